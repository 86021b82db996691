"""The Python client on the wire, against a server of a few lines that answers what each test scripts."""

import collections
import gc
import math
import os
import threading
import time

import dskv
import msgpack
import numpy as np
import pytest
import zmq

SESSION = bytes(range(16))
LIMITS = dict(
    header_bytes=1 << 16, frame_bytes=1 << 20, request_bytes=1 << 21, reply_bytes=1 << 20, part_bytes=256, sequences=16,
    topk=8,
    stops=4, stop_tokens=4, free_ids=3, credits=4, max_model_len=1000, max_batch_tokens=64, max_sequences=8,
)  # fmt: skip


def tensor(array, frames):
    frames.append(np.ascontiguousarray(array).tobytes())
    names = {"float32": "f32", "float16": "f16", "int32": "i32"}
    return {"dtype": names[array.dtype.name], "shape": list(array.shape), "frame": len(frames)}


class FakeServer:
    """Answers hello and ping; every other request goes to ``script(request, reply)`` in the server's thread.

    ``request`` has its tensors as arrays.  ``reply(kind, **fields)`` sends an event of it, ``id`` overriding whose.
    """

    def __init__(self, endpoint, script=lambda request, reply: None, hello=True):
        self.endpoint, self.script, self.hello = endpoint, script, hello
        self.seen = []  # every request, in order
        self.sessions = 0
        self._stop = threading.Event()
        self._bound = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._bound.wait(5)

    def _run(self):
        socket = zmq.Context.instance().socket(zmq.ROUTER)
        socket.linger = 0
        socket.bind(self.endpoint)
        self._bound.set()
        while not self._stop.is_set():
            if not socket.poll(20):
                continue
            route, header, *frames = socket.recv_multipart()
            request = msgpack.unpackb(header)
            self._tensors(request, frames)
            self.seen.append(request)
            self._answer(socket, route, request)
        socket.close()

    def _tensors(self, value, frames):
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(entry, dict) and "frame" in entry:
                dtype = {"f32": "<f4", "f16": "<f2", "i32": "<i4"}[entry["dtype"]]
                value[key] = np.frombuffer(frames[entry["frame"] - 1], dtype).reshape(entry["shape"])
            elif isinstance(entry, (dict, list)):
                self._tensors(entry, frames)

    def _answer(self, socket, route, request):
        def reply(kind, id=request["id"], **fields):
            frames = []

            def resolve(value):
                if isinstance(value, np.ndarray):
                    return tensor(value, frames)
                if isinstance(value, dict):
                    return {key: resolve(entry) for key, entry in value.items()}
                return [resolve(entry) for entry in value] if isinstance(value, list) else value

            event = {
                "id": id,
                "kind": kind,
                "last": kind in ("result", "error"),
                "op": request["op"],
                **resolve(fields),
            }
            socket.send_multipart([route, msgpack.packb(event), *frames])

        if request["op"] == "hello" and self.hello:
            self.sessions += 1
            session = bytes([self.sessions]) + SESSION[1:]
            reply("result", version=1, session=session, lease_ms=60000, server_version="0.1.0", limits=LIMITS)
        elif request["op"] == "ping":
            reply("result")
        elif request["op"] == "free":
            reply("result", n_freed=len(request.get("caches", [])))
        else:
            self.script(request, reply)

    def of(self, op):
        return [request for request in self.seen if request["op"] == op]

    def stop(self):
        self._stop.set()
        self._thread.join()


def crc32(data):
    """By the definition: reflected, polynomial 0xEDB88320."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0xEDB88320 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def ref(number, length):
    return dict(cache=bytes([number]) * 16, length=length, origin="n" * 32)


def freed(server):
    """Ids in the free lists of all requests."""
    return [id for request in server.seen for id in request.get("free", [])]


class Forwards:
    """A script: every sequence gets a new cache, and whatever outputs it wants, of zeros."""

    def __init__(self):
        self.n = 0

    def __call__(self, request, reply):
        made = []
        for sequence in request["sequences"]:
            self.n += 1
            cached = sequence.get("prefix", {"length": 0})["length"]
            n = len(sequence["tokens"])
            entry = dict(ref(self.n, cached + n), cached=cached, computed=n)
            if "logits" in sequence.get("want", {}):
                start, stop = sequence["want"]["logits"]
                entry["logits"] = np.zeros((stop - start, 5), np.float32)
            made.append(entry)
        reply("result", sequences=made)


@pytest.fixture
def endpoint(tmp_path):
    return f"ipc://{tmp_path}/s"


@pytest.fixture
def serve(endpoint):
    servers = []

    def start(script=lambda request, reply: None, **options):
        servers.append(FakeServer(endpoint, script, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


def refused(call, *arguments, **options):
    with pytest.raises(dskv.Error) as caught:
        call(*arguments, **options)
    return caught.value


def test_hello_opens_a_session_that_every_request_carries(serve, endpoint):
    server = serve(Forwards())
    with dskv.connect(endpoint, timeout=5) as client:
        client.forward([1, 2])
        assert client.lease_s == 60
    assert server.seen[0]["op"] == "hello" and server.seen[0]["versions"] == [1] and "session" not in server.seen[0]
    assert server.seen[1]["session"] == bytes([1]) + SESSION[1:]
    assert server.seen[-1]["op"] == "free" and server.seen[-1]["all"] is True


def test_the_environment_names_the_endpoint(serve, endpoint, monkeypatch):
    serve()
    monkeypatch.setenv("DSKV_ENDPOINT", endpoint)
    with dskv.connect(timeout=5) as client:
        assert client.endpoint == endpoint


def test_forward_sends_what_the_protocol_says(serve, endpoint):
    server = serve(Forwards())
    with dskv.connect(endpoint, timeout=5) as client:
        a = client.forward([1, 2, 3], logits="last", argmax=True, topk=2, score=True)
        assert a.logits.shape == (1, 5) and (a.cached, a.computed) == (0, 3)
        b = client.forward(np.array([4], np.uint8), prefix=a.cache[:-1], logits=(0, 1), logits_dtype="f16")
        assert list(b.cache.tokens) == [1, 2, 4] and b.cached == 2
    first, second = (request["sequences"][0] for request in server.of("forward"))
    assert first["want"] == {"logits": [2, 3], "argmax": True, "topk": 2, "score": True}
    assert first["tokens"].dtype == np.int32 and "prefix" not in first
    assert second["prefix"] == {"cache": a.cache.id, "length": 2, "check": crc32(bytes([1, 0, 0, 0, 2, 0, 0, 0]))}
    assert second["want"] == {"logits": [0, 1], "logits_dtype": "f16"}


def test_no_tokens_ask_for_the_row_of_the_prefix(serve, endpoint):
    def script(request, reply):
        if len(request["sequences"][0]["tokens"]):
            return Forwards()(request, reply)
        made = dict(cache=None, length=0, origin="", cached=2, computed=1, logits=np.zeros((1, 5), np.float32))
        reply("result", sequences=[made])

    server = serve(script)
    with dskv.connect(endpoint, timeout=5) as client:
        a = client.forward([1, 2, 3])
        again = client.forward([], prefix=a.cache, logits="all")
        assert again.cache is None and (again.cached, again.computed) == (2, 1)
    assert server.of("forward")[1]["sequences"][0]["want"] == {"logits": [0, 1]}


def test_many_sequences_are_one_request(serve, endpoint):
    server = serve(Forwards())
    with dskv.connect(endpoint, timeout=5) as client:
        a, b = client.forward_many([dict(tokens=[1]), dict(tokens=[2, 3], argmax=True)])
        assert len(a.cache) == 1 and list(b.cache.tokens) == [2, 3]
        error = refused(client.forward_many, [dict(tokens=[1]), dict(tokens=[1.5])])
        assert error.code == "bad_type" and error.details["index"] == 1
        assert error.message == "sequences[1].tokens are one-dimensional integers, not a list with float in it"
        error = refused(client.forward_many, [dict(tokens=[1]), dict(tokens=[1, 2**40])])
        assert error.message.startswith("sequences[1].tokens[1] is ") and error.details["field"] == "tokens"
        error = refused(client.forward_many, [dict(tokens=[1]), dict(tokens=[1], prefix=a)])
        assert error.message.startswith("sequences[1]: a prefix is ") and error.message.endswith("pass its .cache")
        error = refused(client.forward_many, [dict(tokens=[1], logit="last")])
        assert error.code == "unknown_field" and error.details["field"] == "logit"
    assert len(server.of("forward")) == 1


def test_large_logits_come_in_rows(serve, endpoint):
    rows = np.arange(35, dtype=np.float32).reshape(7, 5)

    def script(request, reply):
        reply("rows", sequence=0, start=0, data=rows[:4])
        reply("rows", sequence=0, start=4, data=rows[4:])
        made = dict(ref(1, 7), cached=0, computed=7, logits={"dtype": "f32", "shape": [7, 5]})
        reply("result", sequences=[made])

    serve(script)
    with dskv.connect(endpoint, timeout=5) as client:
        assert (client.forward(range(7), logits="all").logits == rows).all()


def test_an_error_has_code_message_and_details(serve, endpoint):
    def script(request, reply):
        reply("error", code="pool_full", message="The pool is full.", details={"needed": 3, "free": 1, "index": 0})

    serve(script)
    with dskv.connect(endpoint, timeout=5) as client:
        error = refused(client.forward, [1])
    assert (error.code, error.message) == ("pool_full", "The pool is full.")
    assert error.details == {"needed": 3, "free": 1, "index": 0}


def test_an_unknown_code_is_internal(serve, endpoint):
    serve(lambda request, reply: reply("error", code="from_the_future", message="m", details={}))
    with dskv.connect(endpoint, timeout=5) as client:
        assert refused(client.forward, [1]).code == "internal"


def test_verify_cuts_the_cache_to_what_was_accepted(serve, endpoint):
    def script(request, reply):
        reply("result", accepted=1, next=9, cached=0, computed=5, **ref(1, 3))

    server = serve(script)
    with dskv.connect(endpoint, timeout=5) as client:
        v = client.verify([1, 2], [3, 4, 5])
        assert (v.accepted, v.next, list(v.cache.tokens)) == (1, 9, [1, 2, 3])
    assert list(server.of("verify")[0]["draft"]) == [3, 4, 5]


def generated(reply, tokens, prompt=1, reason="length"):
    reply(
        "result", tokens=np.array(tokens, np.int32), steps=len(tokens), finish_reason=reason, seed=7, cached=0,
        computed=prompt,
        **ref(1, prompt + len(tokens) - 1),
    )  # fmt: skip


def test_generate_returns_all_but_the_last_token_cached(serve, endpoint):
    server = serve(lambda request, reply: generated(reply, [5, 6]))
    with dskv.connect(endpoint, timeout=5) as client:
        r = client.generate([1], max_tokens=2, temperature=0.5, seed=7, stop=[3, [4, 5]])
        assert (
            list(r.tokens) == [5, 6] and list(r.cache.tokens) == [1, 5] and (r.finish_reason, r.seed) == ("length", 7)
        )
        assert refused(client.generate, [1], speculate=4).code == "unsupported"
        assert len(client.generate([1], stop=None).tokens) == 2
        for stop in (3, [[[3]]], "3", b"3", bytearray(b"3"), {3: 4}):
            error = refused(client.generate, [1], stop=stop)
            assert (error.code, error.details["field"]) == ("bad_type", "stop")
        assert refused(client.generate, [1], stop=[3, [4, 2**31]]).message.startswith("stop[1][1] is 2147483648")
    sent = server.of("generate")[0]
    assert [list(entry) for entry in sent["stop"]] == [[3], [4, 5]] and sent["temperature"] == 0.5


@pytest.mark.parametrize(
    ("stop", "wanted"),
    [
        ([np.array([4, 5]), np.array([6], np.uint8), np.int64(7), np.array(8)], [[4, 5], [6], [7], [8]]),
        (np.array([4, 5]), [[4], [5]]),
        (np.array([[4, 5], [6, 7]], np.int32), [[4, 5], [6, 7]]),
    ],
)
def test_stops_may_be_arrays(serve, endpoint, stop, wanted):
    server = serve(lambda request, reply: generated(reply, [5, 6]))
    with dskv.connect(endpoint, timeout=5) as client:
        client.generate([1], max_tokens=2, stop=stop)
        for wrong in (np.array([4.0]), np.array([[4]]), np.array([True]), np.float64(4), True, 4.0, "4", None):
            error = refused(client.generate, [1], max_tokens=2, stop=[[3], wrong])
            assert (error.code, error.details["field"]) == ("bad_type", "stop")
    assert [entry.tolist() for entry in server.of("generate")[0]["stop"]] == wanted


def test_torch_tensors_may_be_stops(serve, endpoint):
    torch = pytest.importorskip("torch")
    server = serve(lambda request, reply: generated(reply, [5, 6]))
    with dskv.connect(endpoint, timeout=5) as client:
        client.generate([1], max_tokens=2, stop=[torch.tensor([4, 5]), torch.tensor([6]), torch.tensor(7)])
    assert [entry.tolist() for entry in server.of("generate")[0]["stop"]] == [[4, 5], [6], [7]]


def test_a_stream_gives_tokens_and_then_its_result(serve, endpoint):
    def script(request, reply):
        reply("tokens", tokens=np.array([5], np.int32))
        reply("tokens", tokens=np.array([6, 7], np.int32))
        generated(reply, [5, 6, 7])

    serve(script)
    with dskv.connect(endpoint, timeout=5) as client:
        stream = client.generate([1], stream=True)
        assert [list(event.tokens) for event in stream] == [[5], [6, 7]]
        assert list(stream.result.tokens) == [5, 6, 7] and len(stream.result.cache) == 3
        stream.close()
        assert list(client.generate([1], stream=True).result.tokens) == [5, 6, 7]


class EndlessStream:
    """A script: one token, then silence until the cancel."""

    def __call__(self, request, reply):
        if request["op"] == "generate":
            self.id, self.reply = request["id"], reply
            reply("tokens", tokens=np.array([5], np.int32))
        elif request["op"] == "cancel":
            reply("result", cancelled=request["request"] == self.id)
            generated(self.reply, [5], reason="cancelled")
        else:
            Forwards()(request, reply)


def test_closing_a_stream_cancels_it(serve, endpoint):
    server = serve(EndlessStream())
    with dskv.connect(endpoint, timeout=5) as client:
        with client.generate([1], stream=True) as stream:
            assert list(next(stream).tokens) == [5]
        assert stream.result.finish_reason == "cancelled" and list(stream.result.cache.tokens) == [1]
        assert list(stream) == []
    assert len(server.of("cancel")) == 1


def test_a_cancelled_stream_consumes_nothing(serve, endpoint):
    server = serve(EndlessStream())
    with dskv.connect(endpoint, timeout=5) as client:
        prefix = client.forward([1]).cache
        with client.generate([2], prefix=prefix, consume=True, stream=True) as stream:
            next(stream)
        assert stream.result.finish_reason == "cancelled"
        prefix.free()
        assert [request["caches"] for request in server.of("free")] == [[prefix.id]]


def test_a_dropped_stream_is_cancelled_by_the_next_call(serve, endpoint):
    server = serve(EndlessStream())
    with dskv.connect(endpoint, timeout=5) as client:
        next(client.generate([1], stream=True))
        gc.collect()
        client.ping()  # the late result comes before this answer, if it has not come yet
        client.ping()
    assert len(server.of("cancel")) == 1
    assert freed(server) == [bytes([1]) * 16]  # its cache is nobody's


def test_a_timeout_cancels_and_late_events_are_passed_over(serve, endpoint):
    def script(request, reply):
        if request["op"] == "cancel":
            reply("result", cancelled=True)
            reply("result", id=request["request"], sequences=[dict(ref(9, 1), cached=0, computed=1)])

    server = serve(script)
    with dskv.connect(endpoint, timeout=5) as client:
        start = time.monotonic()
        assert refused(client.forward, [1], timeout=0.1).code == "timeout"
        assert time.monotonic() - start < 2
        client.ping()  # the late result comes before this answer, if it has not come yet
        client.ping()
    assert server.of("cancel")[0]["request"] == server.of("forward")[0]["id"]
    assert freed(server) == [bytes([9]) * 16]


def test_a_timeout_may_be_as_long_as_anybody_likes(serve, endpoint):
    serve(Forwards())
    with dskv.connect(endpoint, timeout=1e300, connect_timeout=1e9) as client:
        for timeout in (None, 3e6, 1e10, math.inf, np.float32(5)):
            assert len(client.forward([1], timeout=timeout).cache) == 1
        for timeout, code in ((math.nan, "bad_value"), (-1, "bad_value"), (-math.inf, "bad_value"), ("5", "bad_type")):
            error = refused(client.forward, [1], timeout=timeout)
            assert error.code == code and error.details["field"] == "timeout"
    assert refused(dskv.connect, endpoint, timeout=None).code == "bad_type"


def test_no_server_is_unreachable(endpoint):
    start = time.monotonic()
    assert refused(dskv.connect, endpoint, connect_timeout=0.2).code == "unreachable"
    assert refused(dskv.connect, "tcp://127.0.0.1:1", connect_timeout=0.2).code == "unreachable"
    assert time.monotonic() - start < 3
    assert refused(dskv.connect, "nonsense").code == "bad_value"


def test_a_silent_server_is_a_timeout(serve, endpoint):
    serve(hello=False)
    assert refused(dskv.connect, endpoint, connect_timeout=0.3).code == "timeout"


def test_a_lost_server_fails_the_call_at_once_and_the_next_call_connects_again(serve, endpoint):
    server = serve()  # answers no forward
    client = dskv.connect(endpoint, timeout=20, connect_timeout=2)
    threading.Timer(0.2, server.stop).start()
    start = time.monotonic()
    assert refused(client.forward, [1]).code == "unreachable"
    assert time.monotonic() - start < 5
    again = serve(Forwards())
    assert len(client.forward([1]).cache) == 1
    assert again.of("forward")[0]["session"] == bytes([1]) + SESSION[1:]  # the session outlives the connection
    client.close()


@pytest.mark.parametrize("half", ["send_multipart", "recv_multipart"])
def test_an_interrupt_amid_a_message_ends_the_connection_alone(serve, endpoint, monkeypatch, half):
    whole = getattr(zmq.Socket, half)

    def interrupted(socket, *arguments, **options):
        if socket.type != zmq.DEALER:
            return whole(socket, *arguments, **options)
        socket.send(arguments[0][0], zmq.SNDMORE) if half == "send_multipart" else socket.recv(zmq.DONTWAIT)
        monkeypatch.undo()
        raise KeyboardInterrupt

    serve(Forwards())
    with dskv.connect(endpoint, timeout=2) as client:
        kept = client.forward([1]).cache
        monkeypatch.setattr(zmq.Socket, half, interrupted)
        with pytest.raises(KeyboardInterrupt):
            client.forward([1], prefix=kept, logits="all")
        assert list(client.forward([2], prefix=kept).cache.tokens) == [1, 2]


def test_closing_after_an_interrupt_frees_all_the_same(serve, endpoint, monkeypatch):
    whole = zmq.Socket.send_multipart

    def interrupted(socket, *arguments, **options):
        if socket.type != zmq.DEALER:
            return whole(socket, *arguments, **options)
        monkeypatch.undo()
        raise KeyboardInterrupt

    server = serve(Forwards())
    with pytest.raises(KeyboardInterrupt):
        with dskv.connect(endpoint, timeout=2) as client:
            monkeypatch.setattr(zmq.Socket, "send_multipart", interrupted)
            client.forward([1])
    assert [request["op"] for request in server.seen] == ["hello", "ping", "free"]


def test_an_ended_session_is_opened_again(serve, endpoint):
    def script(request, reply):
        if request["session"][0] == 1:
            reply("error", code="bad_value", message="The session has ended.", details={"field": "session"})
        else:
            Forwards()(request, reply)

    server = serve(script)
    with dskv.connect(endpoint, timeout=5) as client:
        assert len(client.forward([1, 2]).cache) == 2
        client.forward([1])
    assert [request["op"] for request in server.seen] == ["hello", "forward", "hello", "forward", "forward", "free"]


def test_freed_and_collected_caches(serve, endpoint):
    server = serve(Forwards())
    with dskv.connect(endpoint, timeout=5) as client:
        a = client.forward([1]).cache
        a.free()
        a.free()
        with client.forward([1, 2]).cache as b:
            pass
        assert [request["caches"] for request in server.of("free")] == [[a.id], [b.id]]
        ids = [client.forward([1]).cache.id for _ in range(3)]  # each collected before the next call
        assert server.of("forward")[-1]["free"] == [ids[1]]
        keep = [client.forward([n]).cache for n in range(5)]
        ids = [cache.id for cache in keep]
        del keep
        gc.collect()
        client.ping()
        client.ping()
        sent = [request["free"] for request in server.of("ping")]
        assert sorted(sum(sent, [])) == sorted(ids) and [len(entry) for entry in sent] == [
            3,
            2,
        ]  # the limit of free_ids
    count = len(server.of("free"))
    a.free()
    assert len(server.of("free")) == count


@pytest.mark.parametrize("code", ["busy", "bad_value", "timeout"])
def test_a_server_that_refused_a_request_is_told_again_what_to_free(serve, endpoint, code):
    def script(request, reply):
        if request["op"] != "forward" or ("free" in request and code == "timeout"):
            return
        if "free" in request:
            reply("error", code=code, message="It was not looked at.", details={})
        else:
            Forwards()(request, reply)

    server = serve(script)
    with dskv.connect(endpoint, timeout=5) as client:
        id = client.forward([1]).cache.id
        gc.collect()
        assert refused(client.forward, [2], timeout=0.2 if code == "timeout" else 5).code == code
        client.ping()
        assert server.of("forward")[1]["free"] == server.of("ping")[0]["free"] == [id]
        client.ping()
        assert "free" not in server.of("ping")[1]


def test_another_thread_may_take_what_there_is_to_free(serve, endpoint):
    class Emptied(collections.deque):
        def __bool__(self):  # something was there a moment ago
            return True

    server = serve(Forwards())
    with dskv.connect(endpoint, timeout=5) as client:
        client._garbage, client._abandoned = Emptied(), Emptied()
        assert len(client.forward([1]).cache) == 1
    assert "free" not in server.of("forward")[0]


def test_a_slice_keeps_its_cache_alive_and_a_consumed_one_is_not_freed_again(serve, endpoint):
    server = serve(Forwards())
    with dskv.connect(endpoint, timeout=5) as client:
        prefix = client.forward([1, 2]).cache[:1]
        gc.collect()
        b = client.forward([3], prefix=prefix, consume=True).cache
        assert list(b.tokens) == [1, 3]
        del prefix
        gc.collect()
        client.ping()
    assert server.of("forward")[1]["sequences"][0]["consume"] is True
    assert not any("free" in request for request in server.seen)


def test_limits_are_checked_before_anything_is_sent(serve, endpoint):
    server = serve(Forwards())
    with dskv.connect(endpoint, timeout=5) as client:
        error = refused(client.forward, np.zeros(300_000, np.int32))
        assert error.code == "bad_value" and error.details["limit"] == LIMITS["frame_bytes"]
        error = refused(client.forward_many, [dict(tokens=np.zeros(250_000, np.int32))] * 3)
        assert error.details["limit"] == LIMITS["request_bytes"]
        assert len(client.forward([1]).cache) == 1
    assert len(server.of("forward")) == 1


def test_threads_share_a_client(serve, endpoint):
    script = Forwards()

    def slow(request, reply):
        if request["sequences"][0]["tokens"][0] == 999:
            held.append((request, reply))
        else:
            script(request, reply)
            if len(held) == 1 and script.n >= 40:
                script(*held.pop())

    held = []
    serve(slow)
    with dskv.connect(endpoint, timeout=10) as client:
        failures = []

        def work(base):
            for n in range(10):
                r = client.forward([base, n])
                if list(r.cache.tokens) != [base, n] or r.computed != 2:
                    failures.append((base, n))

        waiting = []
        first = threading.Thread(target=lambda: waiting.append(client.forward([999])))
        first.start()  # answered last, while it is the one that reads for all
        time.sleep(0.1)
        threads = [threading.Thread(target=work, args=(base,)) for base in range(4)]
        for thread in threads:
            thread.start()
        for thread in [first, *threads]:
            thread.join(10)
            assert not thread.is_alive()
        assert not failures and list(waiting[0].cache.tokens) == [999]


def kv(layers=2, heads=2, length=9, dim=3, dtype=np.float32):
    rng = np.random.default_rng(1)
    return tuple(tuple(rng.normal(size=(1, heads, length, dim)).astype(dtype) for _ in "kv") for _ in range(layers))


class Transfers:
    """A script: takes an import into ``stored``, and exports what is stored, two tokens a part."""

    def __init__(self, fail_at=None):
        self.stored, self.fail_at = {}, fail_at

    def __call__(self, request, reply):
        op = request["op"]
        if op == "import":
            self.request, self.to, self.parts, self.most = request, reply, 0, 0
            reply("begin", credits=3, part_tokens=2)
        elif op == "part":
            self.parts += 1
            if self.parts == self.fail_at:
                reply("error", code="bad_value", message="There is no such import.", details={})
                return
            into = self.stored.setdefault(
                (request["layer"], request["which"]), np.zeros((2, len(self.request["tokens"]), 3), np.float32)
            )
            into[:, request["start"] : request["stop"]] = request["data"]
            self.to("credit", n=1)
        elif op == "commit":
            self.to("result", **ref(7, len(self.request["tokens"])))
        elif op == "export":
            self.given, self.to = request["credits"], reply
            self.left = [(layer, w, s) for layer in range(2) for w in "kv" for s in range(0, request["length"], 2)]
            self.length = request["length"]
            tokens = np.arange(self.length, dtype=np.int32)
            reply(
                "begin", tokens=tokens, dtype="f32", n_layers=2, n_kv_heads=2, head_dim=3, length=self.length,
                model="m" * 32, origin="o" * 32, n_parts=len(self.left),
            )  # fmt: skip
            self.flow()
        elif op == "credit":
            self.given += request["n"]
            self.flow()

    def flow(self):
        while self.given and self.left:
            layer, which, start = self.left.pop(0)
            stop = min(start + 2, self.length)
            data = self.stored[layer, which][:, start:stop]
            self.to("part", layer=layer, which=which, start=start, stop=stop, data=data)
            self.given -= 1
            if not self.left:
                self.to("result")


def test_import_and_export_travel_in_parts_with_credits(serve, endpoint):
    script = Transfers()
    server = serve(script)
    pkv = kv()
    with dskv.connect(endpoint, timeout=5) as client:
        cache = client.import_cache(pkv, range(9))
        assert len(cache) == 9 and cache.id == bytes([7]) * 16
        out = cache[:5].export()
        assert isinstance(out, tuple) and len(out) == 2 and out.model == "m" * 32 and out.origin == "o" * 32
        assert list(out.tokens) == list(range(5))
        for given, back in zip(pkv, out):
            for x, y in zip(given, back):
                assert y.shape == (1, 2, 5, 3) and (x[:, :, :5] == y).all()
        client.import_cache(cache.export(), range(9), convert=True)
    first, second = server.of("import")
    assert "model" not in first and (first["dtype"], first["n_layers"], first["n_kv_heads"]) == ("f32", 2, 2)
    assert second["model"] == "m" * 32 and second["convert"] is True
    assert len(server.of("credit")) == 2 * 2 * 3 - 4 + 2 * 2 * 5 - 4  # no more than the parts that were left


def test_keys_and_values_of_a_dtype_that_no_cache_has_are_refused(serve, endpoint):
    server = serve(Transfers())
    with dskv.connect(endpoint, timeout=5) as client:
        for dtype in (np.float64, np.int32):
            error = refused(client.import_cache, kv(dtype=dtype), range(9), convert=True)
            assert error.code == "wrong_dtype" and error.details["valid"] == "f32, f16, bf16"
    assert not server.of("import")


@pytest.mark.parametrize(
    ("own", "wanted"), [("cancelled", "bad_value"), ("not_finite", "not_finite")], ids=["of the part", "of the import"]
)
def test_a_failed_part_ends_the_import(serve, endpoint, own, wanted):
    """A part's error may overtake that of the import, which then says more, unless it is our cancel's."""
    script = Transfers(fail_at=3)

    def cancelling(request, reply):
        if request["op"] == "cancel":
            reply("result", cancelled=True)
            script.to("error", code=own, message="the end", details={})
        else:
            script(request, reply)

    server = serve(cancelling)
    with dskv.connect(endpoint, timeout=5) as client:
        assert refused(client.import_cache, kv(), range(9)).code == wanted
        client.ping()
    assert [request["request"] for request in server.of("cancel")] == [server.of("import")[0]["id"]]


def test_info_and_stats_are_records(serve, endpoint):
    serve(lambda request, reply: reply("result", n_ranks=2, limits=LIMITS, ranks=[{"steps": 3}]))
    with dskv.connect(endpoint, timeout=5) as client:
        info = client.info()
        assert info.n_ranks == 2 and info["limits"].free_ids == 3 and "kind" not in info
        assert client.stats().ranks[0].steps == 3
        with pytest.raises(AttributeError):
            info.nothing


def test_a_closed_client_refuses_and_leaves_no_descriptor(serve, endpoint):
    serve(Forwards())
    dskv.connect(endpoint, timeout=5).close()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        client = dskv.connect(endpoint, timeout=5)
        client.close()
        client.close()
        assert refused(client.ping).code == "unreachable"
    time.sleep(0.2)  # ZeroMQ closes in its own thread
    assert len(os.listdir("/proc/self/fd")) <= before + 2


def test_a_server_that_was_away_between_two_calls_is_not_noticed(serve, endpoint):
    first = serve(Forwards())
    with dskv.connect(endpoint, timeout=5, connect_timeout=2) as client:
        client.forward([1])
        first.stop()
        serve(Forwards())
        time.sleep(0.1)
        assert len(client.forward([1, 2]).cache) == 2
