"""Exactness: the row and the KV of a position depend on the tokens before it alone, to the bit.

Each test runs on daemons that differ in model, dtype of the KV and block size.  Random choices print their seed.
"""

import os
import random

import dskv
import numpy as np
import pytest
from exact import HAS_BF16, Cold, next_row, same, same_kv, tokens
from support.daemon import Daemon

CONFIGURATIONS = {
    "gpt2": ("atlas-gpt2", []),
    "llama-blocks16": ("atlas-llama", ["--block-tokens", "16"]),
    "llama-f16": ("atlas-llama", ["--kv-dtype", "f16"]),
    "gpt2-bf16": ("atlas-gpt2", ["--kv-dtype", "bf16", "--block-tokens", "16"]),
}
SEED = int(os.environ.get("DSKV_TEST_SEED", random.randrange(1 << 30)))


@pytest.fixture(scope="module", params=CONFIGURATIONS)
def daemon(request):
    model, options = CONFIGURATIONS[request.param]
    with Daemon(model, options=options) as daemon:
        daemon.exports = HAS_BF16 or "bf16" not in options  # numpy has no bf16 of its own
        yield daemon


def extended(client, ids, pieces, prefix=None):
    """Runs ids in pieces of the given lengths, each on the cache of the one before: all new rows and the last cache."""
    rows, cache = [], prefix
    for n in pieces:
        made = client.forward(ids[:n], prefix=cache, logits="all")
        assert made.computed == n
        ids, cache = ids[n:], made.cache
        rows.append(made.logits)
    assert len(ids) == 0
    return np.concatenate(rows), cache


def test_two_tokens_are_two_steps_of_one_are_cold(daemon, client):
    ids = tokens(12, 1)
    cold = Cold(client, ids, daemon.exports)
    base = client.forward(ids[:10]).cache
    for pieces in ([2], [1, 1]):
        rows, cache = extended(client, ids[10:], pieces, base)
        same(rows, cold.rows[10:], f"pieces {pieces}")
        if daemon.exports:
            same_kv(cache.export(), cold.kv, f"pieces {pieces}")


def test_every_cut_and_every_piece(daemon, client):
    ids = tokens(16, 2)
    cold = Cold(client, ids, daemon.exports)
    for cut in range(16):
        prefix = cold.cache[:cut] if cut else None
        for piece in (1, 2, 3, 7, 16):
            left = 16 - cut
            pieces = [min(piece, left - done) for done in range(0, left, piece)]
            rows, cache = extended(client, ids[cut:], pieces, prefix)
            same(rows, cold.rows[cut:], f"cut {cut}, pieces of {piece}")
            if daemon.exports and piece in (2, 7) and cut % 5 == 0:
                same_kv(cache.export(), cold.kv, f"cut {cut}, pieces of {piece}")


def test_over_the_borders_of_blocks_and_key_pieces(daemon, client):
    ids = tokens(200, 3)
    cold = Cold(client, ids, daemon.exports)
    for pieces in ([63, 1, 1, 63, 1, 71], [64, 64, 64, 8], [16, 15, 1, 33, 135], [65, 62, 2, 71]):
        rows, cache = extended(client, ids, pieces)
        same(rows, cold.rows, f"pieces {pieces}")
        if daemon.exports:
            same_kv(cache.export(), cold.kv, f"pieces {pieces}")


def test_lengths_in_one_request_against_alone(daemon, client):
    lists = [tokens(n, 10 + n) for n in (1, 17, 650, 1000)]
    together = client.forward_many([dict(tokens=ids, logits=(max(0, len(ids) - 3), len(ids))) for ids in lists])
    for ids, made in zip(lists, together):
        alone = client.forward(ids, logits=(max(0, len(ids) - 3), len(ids)))
        same(made.logits, alone.logits, f"length {len(ids)}")
        if daemon.exports and len(ids) == 650:
            same_kv(made.cache.export(), alone.cache.export(), f"length {len(ids)}")


def test_one_amid_others_and_after_unrelated_ones(daemon, client):
    ids = tokens(40, 4)
    shared = client.forward(tokens(70, 5)).cache
    cold = Cold(client, ids, daemon.exports)
    order = random.Random(6)
    for _ in range(8):
        others = [dict(tokens=tokens(order.randrange(1, 60), order.randrange(1000))) for _ in range(5)]
        others += [dict(tokens=[9], prefix=shared), dict(tokens=[9, 8], prefix=shared[:33])]
        others.insert(order.randrange(len(others) + 1), dict(tokens=ids, logits="all"))
        made = next(made for made in client.forward_many(others) if made.logits is not None)
        same(made.logits, cold.rows, "amid others")
    for at in range(0, 200, 50):
        client.forward_many([dict(tokens=tokens(1 + (at + i) % 9, at + i)) for i in range(50)])
    again = Cold(client, ids, daemon.exports)
    same(again.rows, cold.rows, "after 200 unrelated ones")
    if daemon.exports:
        same_kv(again.kv, cold.kv, "after 200 unrelated ones")


def test_random_trees_of_forks_cuts_and_extensions(daemon, client):
    print("DSKV_TEST_SEED", SEED)
    choice = random.Random(SEED)
    caches = [client.forward(tokens(choice.randrange(1, 100), SEED)).cache]
    for step in range(25):
        parent = choice.choice(caches)
        cut = choice.choice([len(parent), choice.randrange(len(parent) + 1), len(parent) // 16 * 16])
        ids = tokens(choice.choice([1, 2, 3, choice.randrange(1, 90)]), SEED + step)
        made = client.forward(ids, prefix=parent[:cut], logits="all", argmax=True, consume=False)
        assert (made.cached, made.computed) == (cut, len(ids))
        cold = Cold(client, made.cache.tokens, daemon.exports and step % 5 == 0)
        same(made.logits, cold.rows[cut:], f"seed {SEED}, step {step}: {cut} of {len(parent)} and {len(ids)} more")
        if cold.kv:
            same_kv(made.cache.export(), cold.kv, f"seed {SEED}, step {step}")
        caches.append(made.cache)
        if len(caches) > 12:
            caches.pop(choice.randrange(len(caches))).free()


def test_an_export_and_an_import_are_the_same_cache(daemon, client):
    if not daemon.exports:
        pytest.skip("bf16 arrays need the Python package ml_dtypes")
    ids = tokens(90, 8)
    cold = Cold(client, ids)
    back = client.import_cache(cold.kv, ids)
    assert back.origin == "foreign" and cold.cache.origin == client.info().numerics_id
    same_kv(back.export(), cold.kv, "exported again")
    same(next_row(client, back), next_row(client, cold.cache), "the next row")
    same(next_row(client, back[:64]), next_row(client, cold.cache[:64]), "the next row of a cut")


def test_the_ids_of_the_arithmetic_are_equal_where_the_bits_are():
    """Block size is no part of the numerics id, and no bit depends on it; the dtype of the KV is."""
    rows, ids = {}, tokens(150, 9)
    wide, narrow = ["--kv-dtype", "f32"], ["--kv-dtype", "f16"]
    for name, options in {"64": wide, "16": [*wide, "--block-tokens", "16"], "f16": narrow}.items():
        with Daemon("atlas-llama", options=options) as daemon, dskv.connect(daemon.endpoint) as client:
            base = client.forward(ids[:99], logits="last")
            made = client.forward(ids[99:], prefix=base.cache, logits="all")
            rows[name] = client.info().numerics_id, np.concatenate([base.logits, made.logits])
            activations = client.info().activation_dtype
    assert rows["64"][0] == rows["16"][0] != rows["f16"][0]
    same(rows["16"][1], rows["64"][1], "blocks of 16 against 64")
    if activations == "f32":  # narrower ones fit a narrow pool as they are
        assert (rows["f16"][1] != rows["64"][1]).any()
