"""Failures that users of other systems reported, each as a test named after the report; on a bundled model.

cold(t): the result for tokens t in one call without a prefix.  Same: equal bits.
"""

import random

import dskv
import numpy as np
import pytest
from exact import Cold, another_dtype, as_dtype, next_row, same, same_kv, tokens
from support.daemon import Daemon

VOCAB = 2048


def refused(call, *arguments, **options):
    with pytest.raises(dskv.Error) as caught:
        call(*arguments, **options)
    return caught.value


@pytest.fixture(scope="module")
def daemon():
    with Daemon("atlas-llama", options=["--max-model-len", "1024", "--block-tokens", "16"]) as daemon:
        yield daemon


def test_deepspeed_3350_a_given_prefix_is_read(client):
    a, other, b = tokens(30, 1), tokens(30, 2), tokens(6, 3)
    cold = Cold(client, [*a, *b])
    prefix = client.forward(a).cache
    same(client.forward(b, prefix=prefix, logits="all").logits, cold.rows[30:])
    strange = client.forward(b, prefix=client.forward(other).cache, logits="all").logits
    assert (strange != cold.rows[30:]).any(axis=1).all()


def test_deepspeed_4515_two_or_more_tokens_on_a_cut_cache(client):
    ids = tokens(16, 4)
    cold = Cold(client, ids)
    for cut in range(17):
        for piece in (1, 2, 3, 7, 16):
            cache, rows = cold.cache[:cut], []
            for start in range(cut, 16, piece):
                made = client.forward(ids[start : start + piece], prefix=cache, logits="all")
                rows.append(made.logits)
                cache = made.cache
            if rows:
                same(np.concatenate(rows), cold.rows[cut:], f"cut {cut}, pieces of {piece}")
    assert refused(cold.cache.__getitem__, slice(17)).code == "cut_past_end"


def test_deepspeed_5212_five_turns_on_one_line_of_caches(client):
    cache, so_far = None, []
    for turn in range(5):
        asked = tokens(5 + 3 * turn, 50 + turn)
        made = client.forward(asked, prefix=cache, logits="all")
        answer = client.generate([int(made.logits[-1].argmax())], prefix=made.cache, max_tokens=6, ignore_eos=True)
        so_far += [*asked, int(made.logits[-1].argmax()), *answer.tokens[:-1]]
        assert list(answer.cache.tokens) == so_far
        cold = Cold(client, so_far)
        same(made.logits, cold.rows[len(so_far) - len(asked) - 6 : len(so_far) - 6], f"turn {turn}")
        same_kv(answer.cache.export(), cold.kv, f"turn {turn}")
        cache = answer.cache


def test_deepspeed_2760_2061_an_export_has_no_zero_rows_and_is_no_alias(client):
    ids = tokens(40, 6)
    cache = client.forward(ids).cache
    pkv = cache.export()
    kept = [(k.copy(), v.copy()) for k, v in pkv]
    for layer in pkv:
        for array in layer:
            assert (array != 0).any(axis=-1).all()
    client.forward(tokens(30, 7), prefix=cache)
    cache.free()
    client.forward_many([dict(tokens=tokens(40, n)) for n in range(8)])
    same_kv(pkv, kept, "after the cache was extended and freed")
    again = client.import_cache(pkv, ids)
    same(next_row(client, again), Cold(client, [*ids, 7], kv=False).rows[-1:])


def test_deepspeed_3960_1797_batches_of_unequal_lengths(client):
    lists = [tokens(n, n) for n in (1, 17, 650, 1000)]
    together = client.forward_many([dict(tokens=ids, logits="last", argmax=True) for ids in lists])
    for ids, made in zip(lists, together):
        alone = client.forward(ids, logits="last", argmax=True)
        same(made.logits, alone.logits, f"length {len(ids)}")
        same(made.argmax, alone.argmax, f"length {len(ids)}")


def test_deepspeed_2485_4506_the_limit_and_one_more(client):
    limit = client.info().limits.max_model_len
    assert limit == 1024
    ids = tokens(limit, 8)
    whole = client.forward(ids, logits="last")
    before = next_row(client, whole.cache[:100])
    error = refused(client.forward, [1], prefix=whole.cache)
    assert error.code == "too_long" and (error.details["length"], error.details["limit"]) == (limit + 1, limit)
    assert refused(client.forward, tokens(limit + 1, 9)).code == "too_long"
    same(client.forward([], prefix=whole.cache, logits="last").logits, whole.logits)
    same(next_row(client, whole.cache[:100]), before)
    made = client.generate(ids[-4:], prefix=whole.cache[: limit - 8], max_tokens=50, ignore_eos=True)
    # A token may stand on every position of the context, the last one too; the last token made is not in the cache.
    assert made.finish_reason == "context" and limit - 8 + 4 + len(made.tokens) in (limit, limit + 1)
    assert len(made.cache) <= limit


def test_deepspeed_1950_6612_what_ran_before_or_beside_changes_nothing(client):
    ids = tokens(20, 10)
    alone = client.forward(ids, logits="all").logits
    order = random.Random(11)
    for _ in range(20):
        beside = [dict(tokens=tokens(order.randrange(1, 40), order.randrange(100))) for _ in range(7)]
        place = order.randrange(8)
        beside.insert(place, dict(tokens=ids, logits="all"))
        same(client.forward_many(beside)[place].logits, alone, f"at place {place}")
    for base in range(0, 200, 40):
        client.forward_many([dict(tokens=tokens(3, base + n)) for n in range(40)])
    same(client.forward(ids, logits="all").logits, alone, "after 200 unrelated ones")


def test_deepspeed_mii_484_forks_share_their_prefix(client):
    base = client.forward(tokens(512, 12)).cache
    before = client.stats().blocks_used
    forks = client.forward_many([dict(tokens=[n + 1, n + 2], prefix=base) for n in range(64)])
    assert client.stats().blocks_used - before == 64
    assert all((made.cached, made.computed) == (512, 2) for made in forks)


def test_deepspeed_5388_an_export_has_the_shape_of_past_key_values(client):
    info = client.info()
    pkv = client.forward(tokens(23, 13)).cache.export()
    assert isinstance(pkv, tuple) and len(pkv) == info.n_layers
    for layer in pkv:
        assert len(layer) == 2
        for array in layer:
            assert array.shape == (1, info.n_kv_heads, 23, info.head_dim)
            assert array.dtype == dskv.protocol.numpy_dtype(info.kv_dtype)


def test_transformers_26344_24741_30042_llama_899_the_mask_is_offset_by_the_cache(client):
    ids = tokens(14, 14)
    cold = Cold(client, ids)
    base = client.forward(ids[:12]).cache
    two = client.forward(ids[12:], prefix=base, logits="all")
    one = client.forward(ids[12:13], prefix=base, logits="all")
    one_more = client.forward(ids[13:], prefix=one.cache, logits="all")
    same(two.logits, cold.rows[12:])
    same(np.concatenate([one.logits, one_more.logits]), cold.rows[12:])
    same_kv(two.cache.export(), cold.kv)
    same_kv(one_more.cache.export(), cold.kv)


def test_llama_cpp_14434_an_empty_cache_and_a_failed_import(client):
    canary = client.forward(tokens(33, 15)).cache
    before = next_row(client, canary)
    empty = client.import_cache(canary[:0].export(), [])
    assert len(empty) == 0 and empty and len(empty.export()[0][0][0, 0]) == 0
    same(next_row(client, empty), Cold(client, [7], kv=False).rows)
    broken = canary.export()
    broken[1][1][0, 0, 5, 3] = np.inf
    assert refused(client.import_cache, broken, canary.tokens).code == "not_finite"
    assert refused(client.import_cache, broken[:-1], canary.tokens).code == "wrong_shape"
    same(next_row(client, canary), before)


def test_llama_cpp_26676_25913_an_imported_cache_is_used(client):
    ids = tokens(50, 16)
    pkv = client.forward(ids).cache.export()
    back = client.import_cache(pkv, ids)
    before = client.stats().rows_computed
    made = client.forward([1, 2, 3], prefix=back)
    assert (made.cached, made.computed) == (50, 3)
    assert client.stats().rows_computed - before == 3


def test_llama_cpp_27052_refused_state_poisons_nothing(client):
    """Mutated imports, each refused or valid; the canary keeps its bits."""
    ids = tokens(8, 17)
    canary = client.forward(tokens(21, 18)).cache
    before = next_row(client, canary)
    good = client.forward(ids).cache.export()
    choice, outcomes = random.Random(19), set()
    other = another_dtype(client.info().kv_dtype)
    for turn in range(1000):
        layers = [[k.copy(), v.copy()] for k, v in good]
        sent, array = list(ids), layers[choice.randrange(len(layers))][choice.randrange(2)]
        for _ in range(choice.randrange(1, 4)):
            flat = array.reshape(-1).view(np.uint8)
            flat[choice.randrange(len(flat))] ^= 1 << choice.randrange(8)
        match choice.randrange(6):
            case 0:
                array.reshape(-1)[choice.randrange(array.size)] = choice.choice([np.nan, np.inf, -np.inf])
            case 1:
                layers = layers[: choice.randrange(len(layers))] or [[k[:, :1], v[:, :1]] for k, v in layers]
            case 2:
                sent[choice.randrange(len(sent))] = choice.choice([-1, VOCAB, 2**31 - 1])
            case 3:
                layers = as_dtype(layers, other)
        try:
            cache = client.import_cache(layers, sent)
            outcomes.add("taken")
            next_row(client, cache)
        except dskv.Error as error:
            assert error.code in ("not_finite", "wrong_shape", "token_out_of_range", "wrong_dtype"), error
            outcomes.add(error.code)
        same(next_row(client, canary), before, f"after mutation {turn}")
    assert outcomes == {"taken", "not_finite", "wrong_shape", "token_out_of_range", "wrong_dtype"}


def test_llama_cpp_3802_branches_do_not_share_a_context(client):
    base = client.forward(tokens(25, 20)).cache
    branches = [[base, list(base.tokens)] for _ in range(2)]
    for turn in range(6):
        for number, branch in enumerate(branches):
            ids = tokens(1 + turn % 3, 100 * number + turn)
            made = client.forward(ids, prefix=branch[0], logits="all")
            branch[0], branch[1] = made.cache, [*branch[1], *ids]
            same(made.logits, Cold(client, branch[1], kv=False).rows[-len(ids) :], f"branch {number}, turn {turn}")


def test_llama_cpp_14847_15215_bad_ids_and_ranges_are_errors(daemon, client):
    cache = client.forward(tokens(10, 21)).cache
    before = next_row(client, cache)

    def pretend(id):
        return dskv.Cache(client, id, np.zeros(10, np.int32), "")

    freed = client.forward([1]).cache
    freed.free()
    for id in (bytes(16), freed.id, cache.id[::-1]):
        made_up = pretend(id)
        assert refused(client.forward, [1], prefix=made_up).code == "unknown_cache"
        assert refused(made_up.export).code == "unknown_cache"
        made_up._held = False
    for id, code in {b"": "bad_value", cache.id[:15]: "bad_value", cache.id + b"0": "bad_value", 7: "bad_type"}.items():
        made_up = pretend(id)
        assert refused(client.forward, [1], prefix=made_up).code == code
        made_up._held = False
    other_tokens = pretend(cache.id)  # right id, but not the tokens that it stands for
    error = refused(client.forward, [1], prefix=other_tokens)
    assert error.code == "bad_value" and error.details["field"] == "check"
    other_tokens._held = False
    for rows in ((3, 1), (0, 4), (-1, 2), (2**31, 2**31 + 1)):
        assert refused(client.forward, [1, 2, 3], prefix=cache, logits=rows).code == "bad_value"
    same(next_row(client, cache), before)


def test_vllm_40896_sglang_34683_llama_cpp_28368_a_warm_repeat_is_the_cold_run(client):
    lists = [tokens(1 + 7 * n % 90, 200 + n) for n in range(40)]
    cold = client.forward_many([dict(tokens=ids, logits="all") for ids in lists])
    for ids, made in zip(lists, cold):
        cut = len(ids) * 2 // 3
        warm = client.forward(ids[cut:], prefix=made.cache[:cut], logits="all")
        same(warm.logits, made.logits[cut:], f"{len(ids)} tokens")
        assert (warm.cached, warm.computed) == (cut, len(ids) - cut)


def test_tensorrt_llm_12024_gpt_oss_270_sampling_is_one_answer(daemon, client):
    ids = tokens(9, 22)
    draw = lambda seed: client.generate(ids, max_tokens=12, temperature=1.0, seed=seed, ignore_eos=True)
    first = draw(5)
    assert first.seed == 5
    for _ in range(3):
        assert list(draw(5).tokens) == list(first.tokens)
    streamed = client.generate(ids, max_tokens=12, temperature=1.0, seed=5, ignore_eos=True, stream=True)
    assert [token for event in streamed for token in event.tokens] == list(first.tokens)
    # At this temperature the likeliest text has a chance of 10^-24, so equal ones are no chance; at 1 they often are.
    hot = lambda seed: client.generate(ids, max_tokens=12, temperature=3.0, seed=seed, ignore_eos=True)
    assert len({tuple(hot(seed).tokens) for seed in range(4)}) == 4
    unseeded = client.generate(ids, max_tokens=12, temperature=1.0, ignore_eos=True)
    assert list(draw(unseeded.seed).tokens) == list(unseeded.tokens)


def test_vllm_3251_5344_scores_and_all_rows_on_a_warm_prefix(client):
    ids = tokens(40, 23)
    cold = client.forward(ids, logits="all", score=True)
    assert np.isnan(cold.scores[0]) and cold.scores.shape == (40,)
    exact = cold.logits.astype(np.float64)
    exact -= np.log(np.exp(exact - exact.max(axis=1, keepdims=True)).sum(axis=1, keepdims=True)) + exact.max(
        axis=1, keepdims=True
    )
    assert np.abs(cold.scores[1:] - exact[np.arange(39), ids[1:]]).max() < 1e-4
    for cut in (1, 16, 31):
        warm = client.forward(ids[cut:], prefix=cold.cache[:cut], logits="all", score=True)
        same(warm.scores, cold.scores[cut:], f"scores after {cut}")
        same(warm.logits, cold.logits[cut:], f"rows after {cut}")
        # The first score needs the row of the prefix's last token, which is run again and counted so.
        assert (warm.cached, warm.computed) == (cut - 1, 40 - cut + 1)


def test_vllm_31154_sglang_31071_ranks_agree_on_every_plan():
    """The debug mode compares a hash of each plan, and what was sampled, over all ranks."""
    with Daemon("atlas-gpt2", options=["--log-level", "debug"]) as daemon, dskv.connect(daemon.endpoint) as client:
        made = client.forward(tokens(30, 24), argmax=True)
        greedy = client.generate([int(made.argmax[-1])], prefix=made.cache, max_tokens=6, ignore_eos=True)
        drafted = client.verify([int(made.argmax[-1])], [*greedy.tokens[:3], 1, 2], prefix=made.cache)
        assert 3 <= drafted.accepted <= 5 and drafted.next == greedy.tokens[drafted.accepted]
        client.generate([5], prefix=made.cache, max_tokens=8, temperature=1.0, seed=1, stop=[[3, 4]])
        client.ping()


def test_deepspeed_2644_1925_nothing_grows_over_many_rounds(client):
    """Create, extend, free; 10,000 rounds, 50 at a time in one request of each kind, and 300 alone."""

    def rounds(n):
        for _ in range(n // 50):
            made = client.forward_many([dict(tokens=[n % VOCAB]) for n in range(50)])
            longer = client.forward_many(
                [dict(tokens=[5], prefix=one.cache, consume=n % 2 == 0) for n, one in enumerate(made)]
            )
            del made, longer
            client.ping()

    used = lambda: (client.stats().blocks_used, client.stats().caches)
    kept = client.forward(tokens(20, 25)).cache
    rounds(1000)
    client.forward([1]).cache.free()
    blocks, memory = used(), client.stats().ranks
    rounds(9000)
    for n in range(300):
        made = client.forward([n])
        client.forward([5], prefix=made.cache).cache.free()
        made.cache.free()
    assert used() == blocks
    for before, after in zip(memory, client.stats().ranks):
        assert after.resident_bytes - before.resident_bytes <= 1 << 20
    assert len(kept) == 20
