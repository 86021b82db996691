"""The cache is read, not replayed; forks share blocks; every rank holds its shard and no more."""

import json
import struct

import dskv
import numpy as np
import pytest
from exact import next_row, same, tokens
from support.daemon import MODELS, Daemon, default_ranks

RANKS = default_ranks()


@pytest.fixture(scope="module")
def daemon():
    with Daemon("atlas-gpt2", options=["--kv-cache-memory", "64M"]) as daemon:
        yield daemon


def test_a_zeroed_layer_changes_the_next_row(client):
    cache = client.forward(tokens(30, 1)).cache
    pkv = cache.export()
    own = next_row(client, cache)
    same(next_row(client, client.import_cache(pkv, cache.tokens)), own, "an unchanged import")
    for layer in range(len(pkv)):
        for which in (0, 1):
            changed = [[k.copy(), v.copy()] for k, v in pkv]
            changed[layer][which][:] = 0
            row = next_row(client, client.import_cache(changed, cache.tokens))
            assert np.abs(row - own).max() > 1e-3, f"layer {layer}, {'kv'[which]} is not read"


def test_rows_are_counted_where_they_are_computed(client):
    base = client.forward(tokens(300, 2)).cache

    def counted(call):
        before = client.stats()
        made = call()
        after = client.stats()
        for rank, ranked in zip(before.ranks, after.ranks):
            assert ranked.rows_computed - rank.rows_computed == after.rows_computed - before.rows_computed
        return made, after.rows_computed - before.rows_computed

    made, rows = counted(lambda: client.forward(tokens(5, 3), prefix=base))
    assert rows == made.computed == 5 and made.cached == 300
    made, rows = counted(lambda: client.forward(tokens(7, 4), prefix=base[:130], logits="all"))
    assert rows == made.computed == 7 and made.cached == 130
    made, rows = counted(lambda: client.forward([], prefix=base, logits="last"))
    assert rows == made.computed == 1 and made.cached == 299 and made.cache is None
    made, rows = counted(lambda: client.generate([9], prefix=base, max_tokens=6, ignore_eos=True))
    assert rows == 6 and made.steps == 5 and (made.cached, made.computed) == (300, 6)
    made, rows = counted(lambda: client.verify([9], tokens(8, 5), prefix=base))
    assert rows == made.computed == 9 and made.cached == 300


def test_forks_of_a_long_prefix_take_their_tails_alone(client):
    base = client.forward(tokens(512, 6)).cache
    before = client.stats().blocks_used
    forks = [client.forward([n + 1], prefix=base).cache for n in range(64)]
    assert client.stats().blocks_used - before == 64
    inside = client.forward([1], prefix=base[:511]).cache  # within a block: that block is copied, the others shared
    assert client.stats().blocks_used - before == 65
    for fork in forks:
        fork.free()
    inside.free()
    assert client.stats().blocks_used == before


def file_tensors(model):
    """{name: (shape, bytes)} of a model's file, whose matrices are f16."""
    with open(MODELS / model / "model.safetensors", "rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return {name: (t["shape"], t["data_offsets"][1] - t["data_offsets"][0]) for name, t in header.items()}


@pytest.mark.parametrize("model", ["atlas-gpt2", "atlas-llama"])
def test_weights_are_sharded_and_memory_is_bounded(model):
    tensors = file_tensors(model)
    sharded = sum(n for name, (shape, n) in tensors.items() if len(shape) == 2 and not name.endswith("wpe.weight"))
    whole = sum(n for _, n in tensors.values())
    options = ["--kv-cache-memory", "8M", "--block-tokens", "16"]
    with Daemon(model, options=options) as daemon, dskv.connect(daemon.endpoint) as client:
        pool = client.info().n_blocks * 16
        used = [client.forward(tokens(1000, n)).cache for n in range(pool // 1000)]  # touch nearly all of it
        assert len(used) >= 1
        ranks, info = client.stats().ranks, client.info()
    assert len(ranks) == RANKS
    held_sharded = sharded * (2 if info.weight_dtype == "f32" else 1)
    assert sum(rank.weight_bytes for rank in ranks) == held_sharded
    for rank in ranks:
        assert rank.pool_bytes <= 8 << 20
        # Replicated KV heads are held by several ranks but counted at one; the rest is a share of units of 64.
        assert rank.weight_bytes <= held_sharded / RANKS * 1.5 + 2**16
        assert rank.read_bytes <= whole if RANKS == 1 else rank.read_bytes < whole * 0.85
        if info.device.startswith("cpu"):  # a GPU's process holds its driver's libraries, and none of this
            held = rank.weight_bytes + rank.replicated_bytes + rank.pool_bytes
            assert rank.resident_bytes <= held + (64 << 20), rank
