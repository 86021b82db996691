"""One connection to a server: frames out, events in, sorted by the request they belong to.  The only user of pyzmq.

Any number of threads may wait here.  The socket is used under one lock; one waiting thread (the reader) sleeps on the
socket's descriptor without the lock, the others on a condition.  Whoever touches the socket takes everything out of it,
since its descriptor tells of changes only; a thread that finds another's event wakes it.

A connection that was lost stays lost; its owner makes a new one.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import deque
from typing import Any, Callable, Deque, Iterable, Sequence

import zmq
from zmq.utils.monitor import parse_monitor_message

from .errors import Error
from .protocol import decode_header

Event = tuple[dict[str, Any], list[bytes]]  # header, all frames

_HEARTBEAT_MS = 5000  # a server whose host vanished is noticed
_HEARTBEAT_TIMEOUT_MS = 30000
_LONGEST_SLEEP_S = 3600.0  # poll counts milliseconds in an int: longer waits are made of several


class Connection:
    """``orphan`` is called with every event whose request nobody waits for any more."""

    __slots__ = (
        "_socket", "_monitor", "_poll", "_wake_in", "_wake_out", "_lock", "_changed", "_inboxes", "_orphan", "_reading",
        "_connected", "_lost", "endpoint", "interrupted",
    )  # fmt: skip

    def __init__(self, endpoint: str, orphan: Callable[[dict[str, Any]], None]) -> None:
        self.endpoint = endpoint
        self._orphan = orphan
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._inboxes: dict[int, Deque[Event]] = {}
        self._reading = False
        self._connected = False
        self._lost: Error | None = None
        self.interrupted = False  # by this program; the server may well be there
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.sndhwm = self._socket.rcvhwm = 0  # a full queue would stop the answers to heartbeats
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self._close_sockets()
            raise Error(
                "bad_value",
                f"{endpoint!r} is not an endpoint that can be connected to: {error.strerror}",
                {"field": "endpoint"},
            ) from None
        self._poll = select.poll()
        for descriptor in (self._socket.getsockopt(zmq.FD), self._monitor.getsockopt(zmq.FD), self._wake_in.fileno()):
            self._poll.register(descriptor, select.POLLIN)

    def is_lost(self) -> bool:
        """Whether the server has gone, as far as is known by now; also true once closed."""
        with self._lock:
            self._take_in()
            return self._lost is not None

    def close(self) -> None:
        with self._lock:
            if self._lost is None:
                self._lost = Error("unreachable", "the client was closed")
            if self._socket.closed:
                return
            self._wake()
            self._close_sockets()
            self._changed.notify_all()

    def _close_sockets(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
        self._wake_in.close()
        self._wake_out.close()

    def open(self, request: int, follows: int | None = None) -> None:
        """From now on, events of this request are kept for ``receive``: its own, or that of the request it follows."""
        with self._lock:
            self._inboxes[request] = deque() if follows is None else self._inboxes[follows]

    def forget(self, requests: Iterable[int]) -> None:
        """Events of these requests, also those that came already, are orphans from now on."""
        with self._lock:
            for request in requests:
                inbox = self._inboxes.pop(request, None)
                while inbox:
                    self._orphan(inbox.popleft()[0])

    def send(self, frames: Sequence[Any]) -> None:
        """Errors: unreachable."""
        with self._lock:
            self._check_alive()
            try:
                self._socket.send_multipart(frames, zmq.DONTWAIT, copy=True)
            except zmq.ZMQError as error:
                raise Error("unreachable", f"nothing can be sent to {self.endpoint}: {error.strerror}") from None
            except BaseException:
                self._break_off()
                raise
            self._take_in()

    def receive(self, request: int, timeout: float | None) -> Event:
        """The next event of an open request.  Errors: timeout, unreachable."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            inbox = self._inboxes[request]
            while not inbox:
                self._check_alive()
                left = _LONGEST_SLEEP_S if deadline is None else min(deadline - time.monotonic(), _LONGEST_SLEEP_S)
                if left <= 0:
                    raise self._late(timeout)
                if self._reading:
                    self._changed.wait(left)
                else:
                    self._read(inbox, left)
            return inbox.popleft()

    def _read(self, inbox: Deque[Event], left: float) -> None:
        """As the reader: waits until something came for anyone, at most the time that is left."""
        self._reading = True
        try:
            if not self._drain() and not inbox:
                self._lock.release()
                try:
                    self._poll.poll(max(1, int(left * 1000)))
                finally:
                    self._lock.acquire()
                self._drain()
        finally:
            self._reading = False
            self._changed.notify_all()

    def _take_in(self) -> None:
        """Takes in all that waits, on the way to something else, and wakes those who wait for it."""
        if self._drain():
            self._wake()
            self._changed.notify_all()

    def _drain(self) -> bool:
        """Takes in all that waits; true when anything did."""
        if self._socket.closed:
            return True
        found = False
        try:
            self._wake_in.recv(64)
        except BlockingIOError:
            pass
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                break
            except BaseException:
                self._break_off()
                raise
            found = True
            try:
                header = decode_header(frames[0])
            except Error as error:
                self._lost = error
                return True
            inbox = self._inboxes.get(header["id"])
            if inbox is None:
                self._orphan(header)
            else:
                inbox.append((header, frames))
        while True:
            try:
                change = parse_monitor_message(self._monitor.recv_multipart(zmq.DONTWAIT))
            except zmq.Again:
                return found
            except BaseException:
                self._break_off()
                raise
            found = True
            if change["event"] == zmq.EVENT_DISCONNECTED:
                self._lost = Error("unreachable", f"the connection to {self.endpoint} was lost")
            else:
                self._connected = True

    def _break_off(self) -> None:
        """After an interrupt amid a message's frames: what comes next would be taken for the rest of it."""
        self._lost = Error("unreachable", f"the connection to {self.endpoint} was interrupted")
        self.interrupted = True

    def _wake(self) -> None:
        try:
            self._wake_out.send(b"\0")
        except OSError:
            pass  # a wake is waiting already, or there is nobody left to wake

    def _check_alive(self) -> None:
        if self._lost is not None:
            raise Error(*self._lost.args)

    def _late(self, timeout: float | None) -> Error:
        if self._connected:
            return Error("timeout", f"no reply within {timeout:g} s")
        return Error("unreachable", f"no server answers at {self.endpoint} (tried for {timeout:g} s)")
