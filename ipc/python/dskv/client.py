"""The client: every operation of dskvd as a method.

Owns the session and the queue of caches to free.  Bytes are protocol.py's matter, the socket connection.py's.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections import deque
from typing import Any, Deque, Iterable, Mapping, Sequence, TypeVar

import numpy as np

from . import protocol
from .cache import Cache, Prefix
from .connection import Connection
from .errors import Error
from .exchange import Exchange
from .past_key_values import PastKeyValues, tokens_of
from .protocol import boolean, integer, number, seconds, token_ids
from .request import (
    PrefixLike,
    Rows,
    Tokens,
    check_options,
    consume_field,
    forward_sequence,
    in_sequence,
    joined,
    prefix_fields,
    stop_field,
)
from .results import ForwardResult, GenerateResult, Record, VerifyResult
from .stream import GenerateStream
from .transfer import receive_export, send_import

DEFAULT_ENDPOINT = "tcp://127.0.0.1:5560"

_T = TypeVar("_T")


def _popped(queue: Deque[_T]) -> _T | None:
    """The first entry, which another thread may have taken since anybody looked; None when there is none."""
    try:
        return queue.popleft()
    except IndexError:
        return None


def connect(
    endpoint: str | None = None, timeout: float = 30.0, *, connect_timeout: float = 5.0, name: str = "dskv-python"
) -> Client:
    """Connects and opens a session.

    ``endpoint`` is "tcp://host:port" or "ipc:///path"; None takes DSKV_ENDPOINT from the environment, else
    "tcp://127.0.0.1:5560".  ``timeout`` is the default of every call: the longest time without any news of it, in
    seconds (math.inf: for ever).  ``connect_timeout``: how long to try to reach the server.  ``name`` shows in the
    server's log.
    Errors: unreachable, version_mismatch, bad_value.

        with dskv.connect("ipc:///run/dskvd.sock") as client:
            print(client.info().model_dir)
    """
    endpoint = endpoint or os.environ.get("DSKV_ENDPOINT") or DEFAULT_ENDPOINT
    return Client(endpoint, timeout, connect_timeout=connect_timeout, name=name)


class Client:
    """A session with a dskvd.  Made by ``connect``; a context manager; any number of threads may share one.

    Calls of several threads run at the same time.  A process that was forked makes its own client.  After a lost
    connection the next call connects again; caches are known to the server by their ids, so they stay valid if it still
    runs.  The session owns the lease of the caches made in it: every call renews it, ``close()`` frees them, and they end
    after ``lease_s`` seconds without a call (the server's --cache-lease): a program that pauses for longer pings.
    """

    __slots__ = (
        "endpoint", "timeout", "_connect_timeout", "_name", "_connection", "_connecting", "_session", "_lease_s", "_limits",
        "_ids", "_garbage", "_abandoned", "_closed", "__weakref__",
    )  # fmt: skip

    def __init__(
        self, endpoint: str, timeout: float = 30.0, *, connect_timeout: float = 5.0, name: str = "dskv-python"
    ) -> None:
        self.endpoint = endpoint
        self.timeout = seconds(timeout, "timeout")
        self._connect_timeout = seconds(connect_timeout, "connect_timeout")
        self._name = name
        self._connection: Connection | None = None
        self._connecting = threading.Lock()
        self._session: bytes | None = None
        self._lease_s = math.inf
        self._limits: dict[str, int] = dict(protocol.DEFAULT_LIMITS)
        self._ids = itertools.count(1)
        self._garbage: Deque[bytes] = deque()  # caches that nobody holds; appended to by destructors
        self._abandoned: Deque[Exchange] = deque()  # streams that nobody holds; appended to by destructors
        self._closed = False
        self._live()

    @property
    def lease_s(self) -> float:
        """How long, in seconds, this session may be silent before its caches end; math.inf: for ever."""
        return self._lease_s

    # ---- operations -----------------------------------------------------------------------------------------------

    def forward(
        self,
        tokens: Tokens,
        prefix: PrefixLike = None,
        *,
        logits: Rows = None,
        argmax: bool = False,
        topk: int = 0,
        score: bool = False,
        consume: bool = False,
        timeout: float | None = None,
        logits_dtype: str = "f32",
    ) -> ForwardResult:
        """Runs new tokens after a prefix and makes a cache of both.  The prefix stays as it is.

        ``logits``: the rows to return, "last", "all" or (start, stop), counted in new tokens: [rows, vocab].
        ``argmax``: ids [n].  ``topk``: the k best ids and log-probabilities [n, k].  ``score``: the log-probability of
        each new token given all before it [n] (entry 0 without a prefix is NaN).  ``consume`` gives the prefix's cache
        up when the call succeeds.  No tokens with a prefix: one row, of the prefix's last token, which is run again, and
        no new cache.  ``score`` on a prefix runs that token again too, for entry 0: one less is cached and one more
        computed.
        Errors: bad_type, bad_value, token_out_of_range, empty_request, no_row, too_long, unknown_cache, cut_past_end,
        pool_full, busy, reply_too_large, not_finite, draining, cancelled, timeout, unreachable.

            a = client.forward(prompt, logits="last")
            b = client.forward([a.logits[0].argmax()], prefix=a.cache, argmax=True)
        """
        sequence = dict(
            tokens=tokens, prefix=prefix, logits=logits, argmax=argmax, topk=topk, score=score, consume=consume,
            logits_dtype=logits_dtype,
        )  # fmt: skip
        return self._forward([sequence], timeout)[0]

    def forward_many(
        self, sequences: Iterable[Mapping[str, Any]], *, timeout: float | None = None
    ) -> list[ForwardResult]:
        """Several ``forward`` in one request, all or nothing: dicts of its arguments in, results in the same order out.

        Errors: those of ``forward``; ``details["index"]`` says which sequence was at fault.

            left, right = client.forward_many([dict(tokens=[7], prefix=a.cache), dict(tokens=[8], prefix=a.cache)])
        """
        return self._forward(list(sequences), timeout)

    def verify(
        self,
        tokens: Tokens,
        draft: Tokens,
        prefix: PrefixLike = None,
        *,
        consume: bool = False,
        timeout: float | None = None,
    ) -> VerifyResult:
        """How many draft tokens greedy decoding would have chosen after prefix + tokens, and which token comes next.

        ``tokens`` are certain; they may be empty on a prefix, whose last token is then run again.  ``draft`` is judged
        greedily; an end token in it ends nothing, and one past the context limit is refused.  The new cache is prefix +
        tokens + the accepted draft tokens; ``next`` is not in it: pass it first to go on.  Errors: as ``forward``.

            v = client.verify([token], draft=guess, prefix=a.cache)
            output = [*guess[:v.accepted], v.next]
        """
        ids, guess = token_ids(tokens), token_ids(draft, "draft")
        fields = {"tokens": ids, "draft": guess, **consume_field(consume), **prefix_fields(prefix)}
        event = self._call("verify", fields, timeout)
        self._gave_up(prefix, consume)
        cache = self._cache(event, joined(prefix, ids, guess))
        return VerifyResult(event["accepted"], event["next"], cache, event["cached"], event["computed"])

    def generate(
        self,
        tokens: Tokens,
        prefix: PrefixLike = None,
        *,
        max_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int | None = None,
        stop: Sequence[Any] = (),
        ignore_eos: bool = False,
        speculate: None = None,
        stream: bool = False,
        consume: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Decodes on the server until an end token, a stop sequence, ``max_tokens`` or the context limit.

        ``temperature`` 0 is greedy; then ``top_k`` (0: all), ``top_p`` in (0, 1], ``min_p`` in [0, 1]; ``seed`` in
        0 .. 2**63 - 1 (None: the server's choice, told in the result).  ``stop``: token ids, or
        sequences of them, as lists or arrays: [5, 6] is either id, [[5, 6]] the one after the other.  ``consume`` gives the prefix's cache up, unless the generation is cancelled.
        Returns a GenerateResult, or with ``stream`` a GenerateStream.  No speculation yet: ``speculate`` is None.
        Errors: as ``forward``; ``timeout`` is the longest time without an event.

            r = client.generate(prompt, max_tokens=16)
            again = client.generate(r.tokens[-1:], prefix=r.cache)
        """
        if speculate is not None:
            raise Error("unsupported", "this version does not speculate: speculate is None", {"field": "speculate"})
        ids = token_ids(tokens)
        fields = {
            "tokens": ids,
            "max_tokens": integer(max_tokens, "max_tokens"),
            "temperature": number(temperature, "temperature"),
            "top_k": integer(top_k, "top_k"),
            "top_p": number(top_p, "top_p"),
            "min_p": number(min_p, "min_p"),
            "ignore_eos": boolean(ignore_eos, "ignore_eos"),
            "stream": boolean(stream, "stream"),
            **consume_field(consume),
            **prefix_fields(prefix),
            **stop_field(stop),
        }
        if seed is not None:
            fields["seed"] = integer(seed, "seed")

        def finish(event: dict[str, Any]) -> GenerateResult:
            self._gave_up(prefix, consume and event["finish_reason"] != "cancelled")
            made = event["tokens"]
            cache = self._cache(event, joined(prefix, ids, made))
            return GenerateResult(
                made, event["steps"], event["finish_reason"], event["seed"], cache, event["cached"], event["computed"]
            )

        if stream:
            return GenerateStream(self._begin("generate", fields, timeout), finish, self._abandoned.append)
        return finish(self._call("generate", fields, timeout))

    def import_cache(
        self, pkv: Any, tokens: Tokens = None, convert: bool = False, *, timeout: float | None = None
    ) -> Cache:
        """Makes a cache of keys and values that were exported, here or by transformers.

        ``pkv``: (k, v) per layer, each [1, n_kv_heads, length, head_dim], as numpy arrays or torch tensors; or
        transformers' DynamicCache.  ``tokens``: the length ids that they stand for; None takes an export's own, others
        than those are refused.  Keys and values are continued exactly as given; another dtype than the server's is
        refused unless ``convert``.  ``timeout`` is the longest time without progress.
        Errors: bad_value (tokens), wrong_dtype, wrong_shape, wrong_model (an export of another model), not_finite,
        pool_full, too_long.

            cache = client.import_cache(model(ids).past_key_values, ids[0], convert=True)
        """
        ids = tokens_of(pkv, tokens)
        event = send_import(self._begin, pkv, ids, boolean(convert, "convert"), timeout)
        return self._cache(event, ids)

    def info(self, *, timeout: float | None = None) -> Record:
        """The model, its shapes and dtypes, the numerics id, ranks, device and limits: a Record (dict with attributes).

        client.info().limits.max_model_len
        """
        return self._record("info", timeout)

    def stats(self, *, timeout: float | None = None) -> Record:
        """Counters of the server and, in ``ranks``, of each rank, as a Record.

        client.stats().blocks_used
        """
        return self._record("stats", timeout)

    def ping(self, *, timeout: float | None = None) -> None:
        """Returns when the server has answered.  Errors: timeout, unreachable."""
        self._call("ping", {}, timeout)

    def close(self) -> None:
        """Frees this session's caches and disconnects.  Twice is harmless."""
        if self._closed:
            return
        try:
            if self._connection is not None and self._connection.interrupted:
                self._live()  # a new one
            self._closed = True
            if self._connection is not None and not self._connection.is_lost():
                self._call_on(self._connection, "free", {"all": True}, min(self.timeout, 1.0))
        except Error:
            pass  # the lease ends them
        finally:
            self._closed = True
            if self._connection is not None:
                self._connection.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<dskv.Client of {self.endpoint}{', closed' if self._closed else ''}>"

    # ---- parts of operations --------------------------------------------------------------------------------------

    def _forward(self, sequences: list[Mapping[str, Any]], timeout: float | None) -> list[ForwardResult]:
        ids: list[np.ndarray] = []
        wire: list[dict[str, Any]] = []
        for index, sequence in enumerate(sequences):
            try:
                check_options(sequence)
                ids.append(token_ids(sequence["tokens"]))
                wire.append(forward_sequence(sequence, ids[index]))
            except Error as error:
                if len(sequences) > 1:
                    raise in_sequence(error, index) from None
                raise
        rows: dict[int, list[dict[str, Any]]] = {}
        with self._begin("forward", {"sequences": wire}, timeout) as exchange:
            event = exchange.next()
            while event["kind"] != "result":
                if event["kind"] == "rows":
                    rows.setdefault(event["sequence"], []).append(event)
                event = exchange.next()
        results = []
        for index, (sequence, made) in enumerate(zip(sequences, event["sequences"])):
            self._gave_up(sequence.get("prefix"), sequence.get("consume", False))
            logits = made.get("logits")
            if index in rows:
                logits = np.concatenate([part["data"] for part in sorted(rows[index], key=lambda part: part["start"])])
            results.append(
                ForwardResult(
                    self._cache(made, joined(sequence.get("prefix"), ids[index])),
                    made["cached"],
                    made["computed"],
                    logits,
                    made.get("argmax"),
                    made.get("topk_ids"),
                    made.get("topk_logprobs"),
                    made.get("scores"),
                )
            )
        return results

    def _export(self, cache: Cache, length: int, timeout: float | None) -> PastKeyValues:
        return receive_export(self._begin, cache.id, length, timeout)

    def _free(self, id: bytes) -> None:
        if self._closed:
            return
        try:
            self._call("free", {"caches": [id]}, None)
        except Error:
            self._garbage.append(id)  # with the next call, then
            raise

    def _cache(self, made: Mapping[str, Any], tokens: np.ndarray) -> Any:
        """The cache that an event names, over as many of these tokens as it has; None when it names none."""
        if made.get("cache") is None:
            return None
        length = made["length"]
        if length > len(tokens):
            raise Error("bad_message", f"the server made a cache of {length} of {len(tokens)} tokens")
        return Cache(self, made["cache"], tokens[:length].copy(), made["origin"])

    @staticmethod
    def _gave_up(prefix: PrefixLike, consume: bool) -> None:
        """After a call that consumed a prefix's cache."""
        if consume and prefix is not None:
            (prefix.cache if isinstance(prefix, Prefix) else prefix)._held = False

    def _record(self, op: str, timeout: float | None) -> Record:
        event = self._call(op, {}, timeout)
        return Record.of({key: value for key, value in event.items() if key not in ("id", "kind", "last", "op", "v")})

    # ---- the connection -------------------------------------------------------------------------------------------

    def _live(self) -> Connection:
        """The connection, made (again) when there is none."""
        connection = self._connection
        if connection is not None and not connection.is_lost() and not self._closed:
            return connection
        with self._connecting:
            if self._closed:
                raise Error("unreachable", "the client was closed")
            if self._connection is not None and not self._connection.is_lost():
                return self._connection
            if self._connection is not None:
                self._connection.close()
            connection = Connection(self.endpoint, self._orphan)
            try:
                if self._session is None:
                    self._hello(connection)
                else:  # the session outlives a connection, when the server does; else the next request hears of it
                    self._call_on(connection, "ping", {}, self._connect_timeout)
            except BaseException:
                connection.close()
                raise
            self._connection = connection
            return connection

    def _hello(self, connection: Connection) -> None:
        fields = {"client": self._name, "versions": [protocol.VERSION]}
        event = self._call_on(connection, "hello", fields, self._connect_timeout)
        self._session = event["session"]
        self._lease_s = event["lease_ms"] / 1000 or math.inf
        self._limits = {**protocol.DEFAULT_LIMITS, **event["limits"]}

    def _renew_session(self, connection: Connection, ended: bytes | None) -> None:
        """Opens a new session, unless another thread has already done so since the one that ended was used."""
        with self._connecting:
            if self._session == ended:
                self._hello(connection)

    def _call(self, op: str, fields: dict[str, Any], timeout: float | None) -> dict[str, Any]:
        with self._begin(op, fields, timeout) as exchange:
            return exchange.result()

    def _call_on(self, connection: Connection, op: str, fields: dict[str, Any], timeout: float) -> dict[str, Any]:
        with Exchange(self, connection, op, fields, timeout) as exchange:
            return exchange.result()

    def _begin(self, op: str, fields: dict[str, Any], timeout: float | None) -> Exchange:
        timeout = self.timeout if timeout is None else seconds(timeout, "timeout")
        while (stream := _popped(self._abandoned)) is not None:
            stream.abandon()
        return Exchange(self, self._live(), op, fields, timeout)

    def _next_id(self) -> int:
        return next(self._ids)

    def _send(
        self, connection: Connection, id: int, op: str, fields: dict[str, Any], carries: bool
    ) -> tuple[bytes | None, list[bytes]]:
        """Sends a request, which carries what there is to free or not; returns the session that it went under, and what
        it carried."""
        session = self._session
        message = {"v": protocol.VERSION, "id": id, "op": op, **fields}
        if session is not None and op != "hello":
            message["session"] = session
        freed: list[bytes] = []
        while carries and len(freed) < self._limits["free_ids"] and (garbage := _popped(self._garbage)) is not None:
            freed.append(garbage)
        if freed:
            message["free"] = freed
        try:
            connection.send(protocol.encode(message, self._limits))
        except BaseException:
            self._garbage.extend(freed)
            raise
        return session, freed

    def _orphan(self, event: dict[str, Any]) -> None:
        """An event that came too late: caches that it made are held by nobody."""
        for made in event.get("sequences") or [event]:
            if isinstance(made, dict) and isinstance(made.get("cache"), bytes):
                self._garbage.append(made["cache"])
