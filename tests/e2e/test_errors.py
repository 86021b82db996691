"""Every error code provoked by a call, and raw frames; after each, a canary's next row is unchanged."""

import os
import random
import signal
import time

import dskv
import msgpack
import numpy as np
import pytest
import zmq
from exact import another_dtype, as_dtype, next_row, same, tokens
from support.daemon import Daemon, default_ranks

RANKS = default_ranks()


@pytest.fixture(scope="module")
def daemon():
    with Daemon("atlas-gpt2", options=["--kv-cache-memory", "16M"]) as daemon:
        yield daemon


@pytest.fixture(autouse=True)
def canary(daemon):
    """A cache made before the test; its next row, and what is free, are the same afterwards."""
    with dskv.connect(daemon.endpoint) as client:
        cache = client.forward(tokens(70, 1)).cache
        row, before = next_row(client, cache), client.stats()
        yield cache
        same(next_row(client, cache), row, "the canary's next row")
        end = time.monotonic() + 5  # what a test dropped is freed after its client has gone
        while client.stats().blocks_used != before.blocks_used and time.monotonic() < end:
            time.sleep(0.02)
        assert client.stats().blocks_used == before.blocks_used


def refused(call, *arguments, **options):
    with pytest.raises(dskv.Error) as caught:
        call(*arguments, **options)
    assert caught.value.message and "\n" not in caught.value.message
    return caught.value


class Raw:
    """A client of frames: what it sends is what it is given."""

    def __init__(self, daemon):
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(daemon.endpoint)
        self.n = 0

    def __enter__(self):
        self.session = self.ask(op="hello")["session"]
        self.kv_dtype = self.ask(op="info")["kv_dtype"]
        return self

    def __exit__(self, *_):
        self.socket.close()

    def send(self, *frames, **fields):
        """A header made of fields, or given ones, and further frames; returns its id."""
        self.n += 1
        if fields:
            frames = [msgpack.packb({"v": 1, "id": self.n, **fields}), *frames]
        self.socket.send_multipart(frames)
        return fields.get("id", self.n)

    def event(self, timeout=5):
        assert self.socket.poll(timeout * 1000), "no answer"
        return msgpack.unpackb(self.socket.recv_multipart()[0])

    def ask(self, *frames, **fields):
        self.send(*frames, **fields)
        return self.event()

    def drain(self):
        while self.socket.poll(50):
            self.socket.recv_multipart()


@pytest.fixture
def raw(daemon):
    with Raw(daemon) as raw:
        yield raw


def ids_tensor(n, frame=1):
    return {"dtype": "i32", "shape": [n], "frame": frame}


def ids_frame(*ids):
    return np.array(ids, "<i4").tobytes()


# ---- through the client ----------------------------------------------------------------------------------------------


def test_token_out_of_range(client):
    for bad in (-1, 2048, 2**31 - 1):
        error = refused(client.forward, [1, 2, bad])
        assert error.code == "token_out_of_range" and error.details["index"] == 2
    assert refused(client.verify, [1], [2048]).code == "token_out_of_range"
    assert refused(client.generate, [2048]).code == "token_out_of_range"
    many = refused(client.forward_many, [dict(tokens=[1]), dict(tokens=[2, 5000])])
    assert many.code == "token_out_of_range" and many.details["index"] == 1
    assert many.message.startswith("sequences[1].tokens[1] is 5000")


def test_empty_request_and_no_row(client, canary):
    assert refused(client.forward, []).code == "empty_request"
    assert refused(client.generate, []).code == "empty_request"
    assert refused(client.forward, [], prefix=canary[:0], logits="last").code == "no_row"
    assert refused(client.generate, [], prefix=canary[:0]).code == "no_row"
    assert refused(client.verify, [], [1, 2], prefix=canary[:0]).code == "no_row"


def test_bad_values(client):
    for options in (dict(topk=257), dict(topk=-1), dict(logits=(1, 0)), dict(logits=(0, 9)), dict(logits_dtype="f64")):
        assert refused(client.forward, [1, 2], **options).code == "bad_value"
    wrong = dict(max_tokens=0, temperature=-1.0, top_p=0.0, min_p=1.5, top_k=-1, seed=-1)
    for name, value in wrong.items():
        error = refused(client.generate, [1], **{name: value})
        assert error.code == "bad_value" and error.details["field"] == name and "valid" in error.details
    assert refused(client.generate, [1], temperature=float("nan")).code == "bad_value"
    assert refused(client.generate, [1], stop=[[]]).code in ("bad_value", "wrong_shape")
    assert refused(client.generate, [1], stop=[1] * 65).code == "bad_value"


def test_too_long(client, canary):
    error = refused(client.forward, tokens(1025 - 70, 2), prefix=canary)
    assert error.code == "too_long" and (error.details["length"], error.details["limit"]) == (1025, 1024)


def test_unknown_cache(client):
    freed = client.forward([1]).cache
    freed.free()
    error = refused(client.forward, [1], prefix=freed)
    assert error.code == "unknown_cache"
    for cause in ("freed", "--cache-lease", "started again", "never existed"):
        assert cause in error.message
    consumed = client.forward([1]).cache
    client.forward([2], prefix=consumed, consume=True)
    assert refused(consumed.export).code == "unknown_cache"


def test_consume_stands_when_the_call_fails(client, canary):
    parent = client.forward(tokens(20, 3)).cache
    row = next_row(client, parent)
    assert refused(client.forward, [9999], prefix=parent, consume=True).code == "token_out_of_range"
    assert refused(client.forward, tokens(1010, 4), prefix=parent, consume=True).code == "too_long"
    same(next_row(client, parent), row, "the parent's next row")


def test_pool_full_has_numbers(client):
    stats = client.stats()
    free = stats.blocks_total - stats.blocks_used
    error = refused(client.forward_many, [dict(tokens=tokens(1000, n)) for n in range(free * 64 // 1000 + 1)])
    assert error.code == "pool_full" and error.details["needed"] > error.details["free"] == free
    # All or none: what is left is enough for one that fits.
    client.forward(tokens(1000, 5)).cache.free()


def test_wrong_dtype_shape_model_and_not_finite(client, canary):
    pkv, ids = canary.export(), canary.tokens
    other = as_dtype(pkv, another_dtype(client.info().kv_dtype))
    assert refused(client.import_cache, other, ids).code == "wrong_dtype"
    assert refused(client.import_cache, pkv[:2], ids).code == "wrong_shape"
    fewer = tuple((k[:, :4], v[:, :4]) for k, v in pkv)
    assert refused(client.import_cache, fewer, ids).code == "wrong_shape"
    stranger = dskv.PastKeyValues(tuple(pkv), pkv.tokens, "f" * 32, pkv.origin)
    assert refused(client.import_cache, stranger, ids).code == "wrong_model"
    for value in (np.nan, np.inf):
        pkv[-1][1][0, 7, 69, 31] = value  # the very last value of all
        assert refused(client.import_cache, pkv, ids).code == "not_finite"


def test_reply_too_large(client):
    before = client.stats().rows_computed
    sequences = [dict(tokens=tokens(1000, n), logits="all") for n in range(33)]
    error = refused(client.forward_many, sequences)
    assert error.code == "reply_too_large" and error.details["needed"] > error.details["limit"]
    assert client.stats().rows_computed == before  # refused before anything was computed


def test_unsupported_and_timeout(client):
    assert refused(client.generate, [1], speculate=3).code == "unsupported"
    assert refused(client.forward, tokens(1000, 6), timeout=0.001).code == "timeout"
    assert len(client.forward([1]).cache) == 1


def test_a_closed_stream_is_cancelled(client):
    with client.generate([5], max_tokens=900, ignore_eos=True, stream=True) as stream:
        first = next(stream)
    result = stream.result
    assert result.finish_reason == "cancelled" and 1 <= len(result.tokens) < 900
    assert list(result.tokens[: len(first.tokens)]) == list(first.tokens)
    assert len(result.cache) == len(result.tokens)


# ---- frames ----------------------------------------------------------------------------------------------------------


def forward_fields(raw, **sequence):
    return dict(op="forward", session=raw.session, sequences=[{"tokens": ids_tensor(2), **sequence}])


def test_bad_messages(raw):
    good = msgpack.packb({"v": 1, "id": 5, "op": "ping"})
    frame = ids_frame(1, 2)
    bad = {
        "nothing": [b""],
        "not msgpack": [b"\xc1"],
        "not a map": [msgpack.packb([1, 2])],
        "trailing bytes": [good + b"\xc0"],
        "cut": [good[:-1]],
        "a key twice": [b"\x84\xa1v\x01\xa2id\x05\xa2id\x05\xa2op\xa4ping"],
        "a length bomb": [b"\xdd\xff\xff\xff\xff"],
        "a map bomb": [b"\xdf\x7f\xff\xff\xff"],
        "a string bomb": [b"\x81\xdb\xff\xff\xff\xff"],
        "a bin bomb": [b"\x81\xa1v\xc6\xff\xff\xff\xff"],
        "nesting": [b"\x91" * 5000 + b"\xc0"],
        "an ext": [b"\x81\xa1v\xd4\x01\x00"],
        "bad UTF-8": [b"\x81\xa2\xff\xfe\x01"],
        "a frame that nobody names": [good, b"abc"],
        "a frame named twice": [
            msgpack.packb({"v": 1, "id": 5, "op": "verify", "tokens": ids_tensor(2), "draft": ids_tensor(2)}), frame,
        ],
        "too many frames": [good, *[b""] * 5300],
        "a header that is too large": [good + b"\0" * (1 << 20)],
        "a message that is too large": [msgpack.packb({"v": 1, "id": 5, **forward_fields(raw)}), *[bytes(6 << 20)] * 6],
    }  # fmt: skip
    for name, frames in bad.items():
        event = raw.ask(*frames)
        assert (event["kind"], event["last"]) == ("error", True), name
        assert event["code"] == "bad_message", f"{name}: {event}"
        assert event["id"] in (0, 5), name
        assert event.get("op") == {"a frame named twice": "verify"}.get(name, "ping" if event["id"] else None), name


def test_unknown_operations_and_fields(raw):
    event = raw.ask(op="fly")
    assert event["code"] == "unknown_operation" and "forward" in event["details"]["valid"]
    event = raw.ask(op="ping", loud=True)
    assert event["code"] == "unknown_field" and event["details"]["field"] == "loud"
    event = raw.ask(ids_frame(1, 2), **forward_fields(raw, wants={}))
    assert event["code"] == "unknown_field" and event["details"]["field"] == "wants"


def test_bad_types(raw):
    for fields in (
        dict(op=7), dict(op="free", caches="x"), dict(op="ping", session="text"), dict(op="ping", deadline_ms=1.5),
        dict(op="ping", deadline_ms=True), dict(op="export", cache=5, length=1), dict(op="info", v="1"),
    ):  # fmt: skip
        assert raw.ask(**fields)["code"] == "bad_type", fields
    floats = {"dtype": "f32", "shape": [2], "frame": 1}
    square = {"dtype": "i32", "shape": [1, 2], "frame": 1}
    for tensor in (floats, square):
        assert raw.ask(ids_frame(1, 2), **forward_fields(raw, tokens=tensor))["code"] == "bad_type", tensor
    event = raw.ask(ids_frame(1, 2, 3), **forward_fields(raw))
    assert event["code"] == "wrong_shape", event
    event = raw.ask(ids_frame(1, 2), **forward_fields(raw, tokens=ids_tensor(2, frame=2)))
    assert event["code"] == "bad_value", event  # there is one frame after the header


def test_versions(raw):
    assert raw.ask(op="ping", v=2)["code"] == "version_mismatch"
    assert raw.ask(op="hello", versions=[7, 9])["code"] == "version_mismatch"
    assert raw.ask(op="hello", versions=[1, 9])["version"] == 1


def test_sessions_and_missing_fields(raw):
    fields = forward_fields(raw)
    fields.pop("session")
    event = raw.ask(ids_frame(1, 2), **fields)
    assert event["code"] == "bad_value" and event["details"]["field"] == "session"
    event = raw.ask(ids_frame(1, 2), **{**fields, "session": bytes(16)})
    assert event["code"] == "bad_value" and event["details"]["field"] == "session"
    event = raw.ask(op="cancel")
    assert event["code"] == "bad_value" and event["details"]["field"] == "request"


def test_a_cut_past_the_end_and_a_wrong_check(raw, canary):
    prefix = {"cache": canary.id, "length": 71}
    event = raw.ask(ids_frame(1, 2), **forward_fields(raw, prefix=prefix))
    assert event["code"] == "cut_past_end"
    assert (event["details"]["length"], event["details"]["limit"]) == (71, 70)
    prefix = {"cache": canary.id, "length": 10, "check": 1}
    event = raw.ask(ids_frame(1, 2), **forward_fields(raw, prefix=prefix))
    assert event["code"] == "bad_value" and event["details"]["field"] == "check"
    event = raw.ask(op="export", session=raw.session, cache=canary.id, length=71)
    assert event["code"] == "cut_past_end"


def import_fields(raw, n=0, **fields):
    shape = dict(dtype=raw.kv_dtype, n_layers=4, n_kv_heads=8, head_dim=32)
    return dict(op="import", session=raw.session, tokens=ids_tensor(n), **shape, **fields)


def test_deadline_and_cancelled(raw):
    id = raw.send(b"", **import_fields(raw, deadline_ms=20))
    assert raw.event()["kind"] == "begin"
    event = raw.event()
    assert (event["id"], event["code"]) == (id, "deadline")
    id = raw.send(b"", **import_fields(raw))
    assert raw.event()["kind"] == "begin"
    raw.send(op="cancel", request=id)
    events = {event["id"]: event for event in (raw.event(), raw.event())}
    assert events[id]["code"] == "cancelled"
    assert raw.ask(op="cancel", request=id)["cancelled"] is False


def test_followers_of_nothing(raw):
    for fields in (dict(op="commit"), dict(op="credit", n=1)):
        event = raw.ask(request=77, **fields)
        assert event["code"] == "bad_value" and event["id"] == raw.n, fields
    id = raw.send(b"", **import_fields(raw))
    raw.event()
    assert raw.ask(b"", id=id, **import_fields(raw))["code"] == "bad_value"  # this id is in flight
    raw.drain()


def test_an_import_that_is_not_whole(raw):
    id = raw.send(ids_frame(1, 2), **import_fields(raw, 2))
    assert raw.event()["kind"] == "begin"
    raw.send(op="commit", request=id)
    event = raw.event()
    assert event["id"] == id and event["kind"] == "error" and event["code"] == "bad_value"


def test_busy(raw, client):
    """Imports of nothing that are never committed fill the queue."""
    for _ in range(4100):
        raw.send(b"", **import_fields(raw))
    kinds = [raw.event() for _ in range(4100)]
    codes = {event["code"] for event in kinds if event["kind"] == "error"}
    assert codes == {"busy"} and sum(event["kind"] == "begin" for event in kinds) == 4096
    assert raw.ask(op="ping")["kind"] == "result"
    assert refused(client.forward, [1]).code == "busy"
    raw.socket.close()  # the requests in flight of a lost connection are cancelled
    end = time.monotonic() + 5
    while True:
        try:
            client.forward([1])
            break
        except dskv.Error as error:
            assert error.code == "busy" and time.monotonic() < end


def mutated(choice, frames):
    frames = [bytearray(frame) for frame in frames]
    frame = choice.choice(frames)
    for _ in range(choice.randrange(1, 4)):
        match choice.randrange(4):
            case 0 if frame:
                frame[choice.randrange(len(frame))] = choice.randrange(256)
            case 1 if frame:
                del frame[choice.randrange(len(frame)) :]
            case 2:
                at = choice.randrange(len(frame) + 1)
                frame[at:at] = choice.randbytes(choice.randrange(1, 6))
            case 3:
                frames.insert(choice.randrange(len(frames) + 1), bytearray(choice.randbytes(choice.randrange(9))))
    return [bytes(frame) for frame in frames]


def test_random_and_mutated_frames(daemon, raw, canary, client):
    choice = random.Random(RANKS)
    row = next_row(client, canary)
    prefix = {"cache": canary.id, "length": 70, "check": canary._crc(70)}
    seeds = [
        ([ids_frame(1, 2)], forward_fields(raw, prefix=prefix, want={"logits": [0, 2], "argmax": True, "topk": 3})),
        (
            [ids_frame(1), ids_frame(2, 3)],
            dict(op="verify", session=raw.session, tokens=ids_tensor(1), draft=ids_tensor(2, 2)),
        ),
        (
            [ids_frame(1)],
            dict(op="generate", session=raw.session, tokens=ids_tensor(1), max_tokens=2, seed=3, top_p=0.5),
        ),
        ([ids_frame(1, 2)], import_fields(raw, 2, model="x", deadline_ms=50)),
        ([], dict(op="free", session=raw.session, caches=[bytes(16)])),
        ([], dict(op="stats", session=raw.session, free=[bytes(16)])),
    ]
    for turn in range(10_000):
        if choice.random() < 0.3:
            frames = [choice.randbytes(choice.randrange(40)) for _ in range(choice.randrange(1, 4))]
        else:
            more, fields = choice.choice(seeds)
            frames = mutated(choice, [msgpack.packb({"v": 1, "id": turn + 10, **fields}), *more])
        raw.socket.send_multipart(frames)
        if turn % 500 == 499:
            raw.drain()
            same(next_row(client, canary), row, f"after {turn} frames")
    assert raw.ask(op="free", session=raw.session, all=True)["kind"] in ("result", "error")


def test_a_frame_beyond_the_limit_ends_the_connection_alone(daemon, client):
    with Raw(daemon) as raw:
        monitor = raw.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        raw.send(b"\0" * (9 << 20), **forward_fields(raw))
        assert monitor.poll(5000), "the server keeps a connection that sends too large a frame"
        raw.socket.disable_monitor()
        monitor.close()
    client.ping()


# ---- a daemon of their own -------------------------------------------------------------------------------------------


def test_draining():
    with Daemon("atlas-gpt2") as daemon, dskv.connect(daemon.endpoint, connect_timeout=0.5) as client:
        stream = client.generate([5], max_tokens=400, ignore_eos=True, stream=True)
        next(stream)
        daemon.process.send_signal(signal.SIGUSR1)
        end = time.monotonic() + 10
        while True:
            try:
                client.forward([1])
            except dskv.Error as error:
                assert error.code == "draining", error
                break
            assert time.monotonic() < end
        assert len(stream.result.tokens) > 1  # what was accepted is finished
        assert daemon.process.wait(10) == 0
        assert refused(client.ping).code == "unreachable"


def test_a_lost_server_is_unreachable():
    with Daemon("atlas-gpt2") as daemon, dskv.connect(daemon.endpoint, connect_timeout=0.5) as client:
        cache, pids = client.forward([1]).cache, daemon.all_pids()
        stream = client.generate([5], max_tokens=1000, ignore_eos=True, stream=True)
        next(stream)
        for pid in pids:  # at once: a generation takes about a second
            os.kill(pid, signal.SIGKILL)
        assert refused(lambda: stream.result).code == "unreachable"
        assert refused(client.forward, [1], prefix=cache).code == "unreachable"
