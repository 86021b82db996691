"""Steps that are queued ahead (--queue-ahead on) give what steps one by one give: tokens, counts, events, bits of the cache."""

import os
import signal
import threading
import time

import dskv
import pytest
from exact import same, same_kv, tokens
from support.daemon import Daemon, default_ranks, replay, run

ON, OFF = ["--queue-ahead", "on"], ["--queue-ahead", "off"]


@pytest.fixture(scope="module", params=["atlas-llama", "atlas-gpt2"])
def pair(request):
    """Clients of two daemons: one that runs steps one by one, one that queues them ahead."""
    small = ["--block-tokens", "16", "--max-model-len", "256", "--kv-cache-memory", "24M"]
    with Daemon(request.param, options=[*OFF, *small]) as one, Daemon(request.param, options=[*ON, *small]) as ahead:
        with dskv.connect(one.endpoint) as a, dskv.connect(ahead.endpoint) as b:
            yield a, b


def both(pair, **options):
    """One generation on each, streamed or not: the same in all that a client sees."""
    made, events = [], []
    for client in pair:
        call = client.generate(**options)
        if options.get("stream"):
            events.append([[int(t) for t in event.tokens] for event in call])
            call = call.result
        made.append(call)
    a, b = made
    assert list(a.tokens) == list(b.tokens)
    assert (a.finish_reason, a.steps, a.cached, a.computed) == (b.finish_reason, b.steps, b.cached, b.computed)
    assert a.seed == b.seed or "seed" not in options
    assert not events or events[0] == events[1]
    assert list(a.cache.tokens) == list(b.cache.tokens)
    return a, b


def next_rows_are_the_same(a, b, pair):
    """The next rows of two caches, appended to in place and then again with a copy."""
    for i in range(2):
        more = tokens(3, 50 + i)
        rows = [client.forward(more, prefix=made.cache, logits="all").logits for client, made in zip(pair, (a, b))]
        same(rows[0], rows[1], f"the next rows, {i}")


@pytest.mark.parametrize("length", [15, 16, 17, 30])
@pytest.mark.parametrize("how", [{}, {"temperature": 0.8, "seed": 3}, {"temperature": 1.5, "top_k": 50, "top_p": 0.9, "seed": 4}])
def test_stop_at_every_token(pair, length, how):
    ids = tokens(length, 1)
    whole = both(pair, tokens=ids, max_tokens=18, ignore_eos=True, **how)[0].tokens
    for n in range(18):
        for size in (1, 2, 3):
            if n + 1 < size:
                continue
            stop = [[int(t) for t in whole[n + 1 - size:n + 1]], [2047, 2046]]
            a, b = both(pair, tokens=ids, max_tokens=18, ignore_eos=True, stop=stop, stream=n % 2 == 1, **how)
            assert list(a.tokens[-size:]) == stop[0]
        next_rows_are_the_same(a, b, pair)
        same_kv(a.cache.export(), b.cache.export(), f"stopped at {n}")


@pytest.mark.parametrize("most", [1, 2, 3, 64])
def test_the_last_token_that_was_asked_for(pair, most):
    before = [client.stats() for client in pair]
    a, b = both(pair, tokens=tokens(20, 2), max_tokens=most, ignore_eos=True, stream=True)
    assert a.finish_reason == "length" and len(a.tokens) == most
    next_rows_are_the_same(a, b, pair)
    rows = [client.stats().rows_computed - then.rows_computed for client, then in zip(pair, before)]
    assert rows[0] == rows[1]  # it is known to be the last before it is drawn


def test_the_end_of_the_context(pair):
    for length in (200, 254, 255):
        a, b = both(pair, tokens=tokens(length, 3), max_tokens=500, ignore_eos=True)
        assert a.finish_reason == "context" and len(a.tokens) == 256 - length
        same_kv(a.cache.export(), b.cache.export(), "the whole context")


def test_without_tokens(pair):
    """From a prefix, whole and cut, where the first token that is drawn may already end it."""
    ids = tokens(40, 4)
    prefixes = [client.forward(ids).cache for client in pair]
    for length in (40, 37, 32):
        whole = [client.generate([], prefix=p[:length], max_tokens=4, ignore_eos=True) for client, p in zip(pair, prefixes)]
        assert list(whole[0].tokens) == list(whole[1].tokens)
        for n in range(4):
            made = [client.generate([], prefix=p[:length], max_tokens=9, ignore_eos=True, stop=[[int(whole[0].tokens[n])]])
                    for client, p in zip(pair, prefixes)]
            assert list(made[0].tokens) == list(made[1].tokens) and made[0].computed == made[1].computed
            next_rows_are_the_same(*made, pair)


def test_the_extra_row_is_counted_and_not_told(pair):
    """A row for a token that turns out to be the last is computed, counted by the executor, and nobody's."""
    ids = tokens(20, 5)
    whole = pair[0].generate(ids, max_tokens=9, ignore_eos=True).tokens
    n = [int(t) for t in whole].index(int(whole[-1])) + 1
    rows = []
    for client in pair:
        before = client.stats()
        made = client.generate(ids, max_tokens=30, ignore_eos=True, stop=[[int(whole[-1])]])
        assert made.computed == 20 + n - 1 and made.steps == n - 1
        end = time.monotonic() + 10
        while (now := client.stats()).rows_computed != now.ranks[0].rows_computed and time.monotonic() < end:
            time.sleep(0.005)
        assert all(rank.rows_computed == now.rows_computed for rank in now.ranks)
        rows.append(now.rows_computed - before.rows_computed)
    assert rows == [20 + n - 1, 20 + n]


def test_many_at_once(pair):
    """Generations, drafts and forwards of several clients, which share steps; each ends in its own way."""

    def one(client, i, out):
        with dskv.connect(client.endpoint) as own:
            ids = tokens(11 + i, 60 + i)
            made = own.generate(ids, max_tokens=5 + 7 * i, ignore_eos=True, temperature=float(i % 2), seed=i,
                                stop=[[int(t)] for t in range(i, 2048, 97)])
            draft = own.verify(ids, [int(t) for t in made.tokens[:3]])
            rows = own.forward([int(t) for t in made.tokens], prefix=draft.cache, logits="all").logits
            out[i] = ([int(t) for t in made.tokens], made.finish_reason, made.computed, draft.accepted, draft.next, rows)

    found = []
    for client in pair:
        out = [None] * 8
        threads = [threading.Thread(target=one, args=(client, i, out)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found.append(out)
    for a, b in zip(*found):
        assert a[:-1] == b[:-1]
        same(a[-1], b[-1], "rows of a forward")
    for client in pair:
        assert client.stats().sequences_active == 0


def test_cancelled_in_the_middle(pair):
    ids, n_cancelled = tokens(20, 6), 0
    whole = [int(t) for t in pair[0].generate(ids, max_tokens=230, ignore_eos=True).tokens]
    for n in (1, 2, 5) * 4:
        stream = pair[1].generate(ids, max_tokens=230, ignore_eos=True, stream=True)
        for _ in range(n):
            next(stream)
        stream.close()
        made = stream.result
        drawn = [int(t) for t in made.tokens]
        n_cancelled += made.finish_reason == "cancelled"  # else it was faster than the client
        assert len(drawn) >= n and drawn == whole[:len(drawn)]
        assert list(made.cache.tokens) == [*ids, *drawn[:-1]] and made.computed == 20 + len(drawn) - 1
        row = pair[1].forward(drawn[-1:], prefix=made.cache, logits="last").logits
        same(row, pair[0].forward([*ids, *drawn], logits="last").logits, "the next row")
    assert n_cancelled


def test_a_slow_reader_of_a_stream(pair):
    ids, got = tokens(12, 8), []
    for client in pair:
        stream = client.generate(ids, max_tokens=60, ignore_eos=True, stream=True)
        time.sleep(0.2)
        got.append([int(t) for event in stream for t in event.tokens])
    assert got[0] == got[1] and len(got[0]) == 60


def test_ranks_check_one_another():
    """At the level debug every rank hashes plans and drawn tokens, references included; they agree or the job ends."""
    with Daemon(ranks=max(2, default_ranks()), options=[*ON, "--log-level", "debug"]) as daemon:
        with dskv.connect(daemon.endpoint) as client:
            for temperature in (0.0, 1.0):
                made = client.generate(tokens(20, 9), max_tokens=40, ignore_eos=True, temperature=temperature, seed=1)
                assert len(made.tokens) == 40
            client.ping()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_trace_with_references_is_replayed(tmp_path, ranks):
    """Its plans name drawn tokens by their rows; replayed, in any number of ranks' bits, the same rows come out."""
    ids, hashes = tokens(20, 10), {}
    for name, options in {"off": OFF, "on": ON}.items():
        path = tmp_path / name
        with Daemon("atlas-llama", ranks=ranks, options=[*options, "--trace-plans", path]) as daemon:
            with dskv.connect(daemon.endpoint) as client:
                for temperature in (0.0, 1.0):
                    client.generate(ids, max_tokens=12, ignore_eos=True, temperature=temperature, seed=5)
        result = replay("atlas-llama", path, "--log-level", "debug", ranks=ranks)
        assert result.returncode == 0, result.stderr
        lines = [line for line in result.stdout.splitlines()]
        assert ("of the step before draws" in result.stdout) == (name == "on")
        hashes[name] = [line for line in lines if " results " in line]
    assert len(hashes["on"]) == 24 and hashes["on"] == hashes["off"]


def test_a_trace_that_begins_with_references_is_refused(tmp_path):
    path = tmp_path / "trace"
    with Daemon("atlas-gpt2", ranks=1, options=[*ON, "--trace-plans", path]) as daemon:
        with dskv.connect(daemon.endpoint) as client:
            client.generate(tokens(20, 11), max_tokens=4, ignore_eos=True)
    whole = path.read_bytes()
    first_bytes = int.from_bytes(whole[16:24], "little")
    path.write_bytes(whole[first_bytes:])
    result = replay("atlas-gpt2", path)
    assert result.returncode == 2 and "no row of the plan before" in result.stderr, result.stderr


@pytest.mark.parametrize("ranks, victim", [(2, 0), (2, 1), (3, 0), (3, 2)])
def test_a_killed_rank_ends_the_job(ranks, victim):
    with Daemon(ranks=ranks, options=ON) as daemon, dskv.connect(daemon.endpoint, timeout=5.0) as client:
        stream = client.generate(tokens(20, 12), max_tokens=900, ignore_eos=True, stream=True)
        next(stream)
        os.kill(daemon.rank_pids()[victim], signal.SIGKILL)
        with pytest.raises(dskv.Error):
            for _ in stream:
                pass
        assert daemon.process.wait(5) != 0
        assert not daemon.all_pids()
        if (ranks, victim) == (2, 1):  # of three, another one that lives may end the job before rank 0 has spoken
            assert "dskvd: rank 1 is gone" in daemon.log()


def test_the_option(tmp_path):
    result = run(["--help"])
    assert "--queue-ahead WHEN" in result.stdout and "valid: auto, on or off; default: auto" in result.stdout
    result = run(["--queue-ahead", "maybe", "--model", tmp_path])
    assert result.returncode == 2 and "--queue-ahead cannot be 'maybe'; valid: auto, on or off" in result.stderr
