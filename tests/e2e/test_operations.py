"""What each operation promises: outputs that agree with each other, drafts, generation, consumed and shared caches."""

import threading
import time

import dskv
import numpy as np
import pytest
from exact import Cold, next_row, same, tokens
from support.daemon import Daemon


@pytest.fixture(scope="module")
def daemon():
    with Daemon("atlas-llama") as daemon:
        yield daemon


def refused(call, *arguments, **options):
    with pytest.raises(dskv.Error) as caught:
        call(*arguments, **options)
    return caught.value


def greedy(client, ids, n):
    """n tokens by single forwards."""
    made, out = client.forward(ids, argmax=True), []
    for _ in range(n):
        out.append(int(made.argmax[-1]))
        made = client.forward(out[-1:], prefix=made.cache, argmax=True)
    return out


def test_outputs_are_of_the_same_values(client):
    made = client.forward(tokens(20, 1), logits="all", argmax=True, topk=256, score=True)
    order = np.argsort(-made.logits, axis=1, kind="stable")  # ties by the lowest id
    assert (made.argmax == order[:, 0]).all() and (made.topk_ids == order[:, :256]).all()
    exact = made.logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    assert np.abs(made.topk_logprobs - np.take_along_axis(exact, order[:, :256], 1)).max() < 1e-4
    some = client.forward(tokens(20, 1), logits=(5, 9), topk=3)
    same(some.logits, made.logits[5:9])
    same(some.topk_ids, np.ascontiguousarray(made.topk_ids[:, :3]))
    same(some.topk_logprobs, np.ascontiguousarray(made.topk_logprobs[:, :3]))
    assert some.argmax is None and some.scores is None
    half = client.forward(tokens(20, 1), logits="all", logits_dtype="f16")
    same(half.logits, made.logits.astype(np.float16))
    nothing = client.forward(tokens(20, 1))
    assert nothing.logits is None and len(nothing.cache) == 20


def test_no_tokens_run_the_last_one_again(client):
    made = client.forward(tokens(20, 2), logits="all", argmax=True, topk=2)
    again = client.forward([], prefix=made.cache, logits="last", argmax=True, topk=2)
    assert again.cache is None and (again.cached, again.computed) == (19, 1)
    same(again.logits, made.logits[-1:])
    same(again.topk_logprobs, made.topk_logprobs[-1:])
    same(client.forward([], prefix=made.cache[:7], logits="all").logits, made.logits[6:7])
    first = client.generate([], prefix=made.cache, max_tokens=3, ignore_eos=True)
    assert list(first.tokens) == greedy(client, tokens(20, 2), 3)


def test_verify_counts_what_greedy_decoding_would_choose(client):
    ids = tokens(15, 3)
    base = client.forward(ids[:10]).cache
    wanted = greedy(client, ids, 6)
    for n in range(6):
        draft = [*wanted[:n], (wanted[n] + 1) % 2048, 5, 6]
        made = client.verify(ids[10:], draft, prefix=base)
        assert (made.accepted, made.next) == (n, wanted[n])
        assert list(made.cache.tokens) == [*ids, *wanted[:n]]
        assert made.computed == 5 + len(draft)
        same(next_row(client, made.cache), Cold(client, [*ids, *wanted[:n], 7], kv=False).rows[-1:], f"{n} accepted")
    made = client.verify(ids, wanted)
    assert (made.accepted, len(made.cache)) == (6, 21)
    made = client.verify(ids, [])
    assert (made.accepted, made.next, len(made.cache)) == (0, wanted[0], 15)
    whole = client.forward(ids).cache
    made = client.verify([], wanted[:2], prefix=whole)
    assert (made.accepted, made.next, list(made.cache.tokens)) == (2, wanted[2], [*ids, *wanted[:2]])


def test_generate_is_the_loop_of_forwards_and_goes_on(client):
    ids = tokens(15, 4)
    wanted = greedy(client, ids, 12)
    made = client.generate(ids, max_tokens=12, ignore_eos=True)
    assert list(made.tokens) == wanted and made.finish_reason == "length" and made.steps == 11
    assert list(made.cache.tokens) == [*ids, *wanted[:-1]]
    half = client.generate(ids, max_tokens=5, ignore_eos=True)
    rest = client.generate(half.tokens[-1:], prefix=half.cache, max_tokens=7, ignore_eos=True)
    assert [*half.tokens, *rest.tokens] == wanted
    one = client.generate(ids, max_tokens=1)
    assert list(one.tokens) == wanted[:1] and one.steps == 0 and len(one.cache) == 15


def test_stops(client):
    ids = tokens(15, 5)
    wanted = greedy(client, ids, 10)
    made = client.generate(ids, max_tokens=10, ignore_eos=True, stop=[[1, 1, 1, 1], wanted[3:5]])
    end = next(i for i in range(2, 11) if wanted[i - 2 : i] == wanted[3:5])
    assert list(made.tokens) == wanted[:end] and made.finish_reason == "stop"
    assert list(made.cache.tokens) == [*ids, *wanted[: end - 1]]
    made = client.generate(ids, max_tokens=10, ignore_eos=True, stop=wanted[2:3])
    assert list(made.tokens) == wanted[: wanted.index(wanted[2]) + 1] and made.finish_reason == "stop"


def test_sampling(client):
    ids = tokens(15, 6)
    wanted = greedy(client, ids, 8)
    for narrow in (dict(top_k=1), dict(top_p=1e-6), dict(min_p=1.0)):
        made = client.generate(ids, max_tokens=8, temperature=1.5, seed=1, ignore_eos=True, **narrow)
        assert list(made.tokens) == wanted, narrow
    # The random numbers are of (seed, position): how the tokens were cut into calls changes nothing.
    whole = client.generate(ids, max_tokens=10, temperature=1.0, seed=2, ignore_eos=True)
    half = client.generate(ids, max_tokens=4, temperature=1.0, seed=2, ignore_eos=True)
    rest = client.generate(half.tokens[-1:], prefix=half.cache, max_tokens=6, temperature=1.0, seed=2, ignore_eos=True)
    assert [*half.tokens, *rest.tokens] == list(whole.tokens) != wanted
    # Draws follow the distribution: of 300 first tokens, the best three about as often as they should.
    base = client.forward(ids, logits="last")
    p = np.exp(base.logits[0].astype(np.float64) - base.logits.max())
    p /= p.sum()
    draw = lambda seed: client.generate([], prefix=base.cache, max_tokens=1, temperature=1.0, seed=seed)
    drawn = [int(draw(seed).tokens[0]) for seed in range(300)]
    for token in np.argsort(-p)[:3]:
        deviation = np.sqrt(300 * p[token] * (1 - p[token]))
        assert abs(drawn.count(token) - 300 * p[token]) <= 5 * deviation + 1


def test_consumed_caches_are_given_up(client):
    parent = client.forward(tokens(64, 7)).cache
    used = client.stats().blocks_used
    child = client.forward([1], prefix=parent, consume=True).cache
    assert client.stats().blocks_used == used + 1
    assert refused(client.forward, [1], prefix=parent).code == "unknown_cache"
    same(next_row(client, child), Cold(client, [*tokens(64, 7), 1, 7], kv=False).rows[-1:])
    v = client.verify([2], [3], prefix=child, consume=True)
    assert refused(child.export).code == "unknown_cache"
    g = client.generate([2], prefix=v.cache, max_tokens=2, ignore_eos=True, consume=True)
    assert refused(v.cache.export).code == "unknown_cache" and len(g.cache) == len(v.cache) + 2


def test_ids_are_shared_by_possession_and_end_with_their_session(daemon, client):
    owner = dskv.connect(daemon.endpoint)
    a = owner.forward(tokens(30, 8), logits="last")
    mine = client.forward([5], prefix=a.cache[:20], logits="last")
    same(mine.logits, Cold(client, [*a.cache.tokens[:20], 5], kv=False).rows[-1:])
    owner.close()
    assert refused(client.forward, [5], prefix=a.cache).code == "unknown_cache"
    assert len(client.forward([5], prefix=mine.cache).cache) == 22


def test_threads_share_a_client(client):
    wanted = [Cold(client, tokens(10 + n, n), kv=False).rows for n in range(6)]
    failures = []

    def work(n):
        try:
            for _ in range(5):
                same(client.forward(tokens(10 + n, n), logits="all").logits, wanted[n], f"thread {n}")
                assert len(list(client.generate(tokens(4, n), max_tokens=4, ignore_eos=True, stream=True))) >= 1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures, failures


def test_a_silent_session_ends_with_its_caches_and_the_client_goes_on():
    with Daemon("atlas-gpt2", options=["--cache-lease", "1"]) as daemon:
        with dskv.connect(daemon.endpoint) as client, dskv.connect(daemon.endpoint) as watcher:
            assert client.lease_s == 1
            cache = client.forward(tokens(30, 9)).cache
            end = time.monotonic() + 0.4
            while time.monotonic() < end:  # a session that speaks keeps its caches
                client.ping()
                time.sleep(0.05)
            row = next_row(client, cache)
            end = time.monotonic() + 8
            while watcher.stats().caches and time.monotonic() < end:
                time.sleep(0.1)
            assert watcher.stats().caches == 0 and watcher.stats().blocks_used == 0
            assert refused(client.forward, [7], prefix=cache).code == "unknown_cache"
            same(client.forward([*tokens(30, 9), 7], logits="last").logits, row)


def test_a_server_that_starts_again_is_found_again(tmp_path):
    listen = f"ipc://{tmp_path}/dskvd"
    with Daemon("atlas-gpt2", listen=listen):
        client = dskv.connect(listen, connect_timeout=1)
        old = client.forward(tokens(30, 10), logits="last")
    assert refused(client.forward, [7], timeout=0.5).code == "unreachable"
    with Daemon("atlas-gpt2", listen=listen), client:
        again = client.forward(tokens(30, 10), logits="last")
        same(again.logits, old.logits)
        assert refused(client.forward, [7], prefix=old.cache).code == "unknown_cache"
