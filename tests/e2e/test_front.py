"""The front answers while the engine computes: ping, info, stats, cancel and errors come before a long request's result."""
import itertools

import msgpack
import numpy
import pytest
import zmq

from support.daemon import Daemon

LONG = [1 + i % 1900 for i in range(1000)]


class Raw:
    """Messages as they travel, without a client library that waits for one result before the next call."""

    def __init__(self, endpoint):
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(endpoint)
        self.ids = itertools.count(1)
        self.send("hello", versions=[1])
        self.session = self.receive()["session"]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def send(self, op, *frames, **fields):
        number = next(self.ids)
        self.socket.send_multipart([msgpack.packb({"v": 1, "id": number, "op": op, **fields}), *frames])
        return number

    def send_long(self, n_sequences=4):
        tokens = numpy.array(LONG, numpy.int32)
        sequences = [{"tokens": {"dtype": "i32", "shape": [len(LONG)], "frame": n + 1}, "want": {"argmax": True}}
                     for n in range(n_sequences)]
        return self.send("forward", *[tokens.tobytes()] * n_sequences, sequences=sequences, session=self.session)

    def receive(self, timeout=60.0):
        assert self.socket.poll(timeout * 1000), "no event came"
        return msgpack.unpackb(self.socket.recv_multipart()[0])


@pytest.fixture(scope="module")
def daemon():
    with Daemon(options=["--max-batch-tokens", "256"]) as daemon:
        yield daemon


@pytest.fixture
def raw(daemon):
    with Raw(daemon.endpoint) as raw:
        yield raw


def test_answers_during_a_long_prefill(raw):
    long = raw.send_long()
    quick = [raw.send(op) for op in ("ping", "info", "stats", "ping", "nonsense")]
    for number in quick:
        assert raw.receive()["id"] == number
    result = raw.receive()
    assert (result["id"], result["kind"]) == (long, "result")
    assert sum(one["computed"] for one in result["sequences"]) == 4 * len(LONG)


def test_cancel_during_a_long_prefill(raw):
    raw.send("stats")
    before = raw.receive()["rows_computed"]
    long = raw.send_long()
    cancel = raw.send("cancel", request=long)
    events = {event["id"]: event for event in (raw.receive(), raw.receive())}
    assert events[cancel]["cancelled"] is True
    assert events[long]["code"] == "cancelled"
    raw.send("stats")
    after = raw.receive()
    assert after["rows_computed"] - before < 4 * len(LONG)
    assert after["sequences_active"] == 0


def test_cancel_of_another_clients_request(daemon, raw):
    with Raw(daemon.endpoint) as other:
        long = other.send_long(2)
        for _ in range(3):
            raw.send("cancel", request=long)
            assert raw.receive()["cancelled"] is False
        assert other.receive()["kind"] == "result"


def test_a_ping_can_free(raw):
    tokens = numpy.array(LONG[:10], numpy.int32).tobytes()
    raw.send("forward", tokens, sequences=[{"tokens": {"dtype": "i32", "shape": [10], "frame": 1}}], session=raw.session)
    cache = raw.receive()["sequences"][0]["cache"]
    raw.send("ping", free=[cache])
    assert raw.receive()["kind"] == "result"
    raw.send("export", cache=cache, length=10)
    assert raw.receive()["code"] == "unknown_cache"
