"""A request in flight: sent once, then its events, then over or cancelled."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from .errors import Error
from .protocol import error_of, resolve_tensors

if TYPE_CHECKING:
    from .client import Client
    from .connection import Connection, Event


class Exchange:
    """Made by ``Client._begin``.  As a context manager it cancels what is unfinished when it is left.

    A session can end while a client is silent; the first request to hear of it is sent again under a new one.
    """

    __slots__ = (
        "finished",
        "_client",
        "_connection",
        "_op",
        "_fields",
        "_timeout",
        "_id",
        "_followers",
        "_follower_error",
        "_session",
        "_carried",
    )

    def __init__(self, client: Client, connection: Connection, op: str, fields: dict[str, Any], timeout: float) -> None:
        self._client = client
        self._connection = connection
        self._op = op
        self._fields = fields
        self._timeout = timeout
        self._followers: list[int] = []
        self._follower_error: Error | None = None
        self._send()

    def _send(self) -> None:
        self.finished = False
        self._id = self._client._next_id()
        self._connection.open(self._id)
        try:
            self._session, self._carried = self._client._send(
                self._connection, self._id, self._op, self._fields, carries=True
            )
        except BaseException:
            self._forget()
            raise

    def next(self) -> dict[str, Any]:
        """The next event, its tensors as arrays.  Waits as long as the time-out without any event.

        Errors: the server's own, timeout (the request is then cancelled), unreachable.
        """
        while True:
            header, frames = self._receive()
            if header["kind"] == "error" and header["id"] == self._id:
                self._end(error_of(header))
            elif header["kind"] == "error":
                self._follower_failed(error_of(header))
            elif header["kind"] == "result" or self._follower_error is None:
                break
        self._carried = []
        if header["kind"] == "result":
            self._forget()
        return resolve_tensors(header, frames)

    def _receive(self) -> Event:
        try:
            return self._connection.receive(self._id, None if math.isinf(self._timeout) else self._timeout)
        except BaseException:
            self.abandon()
            raise

    def _tell_again(self) -> None:
        """What the request carried to be freed goes with the next one: this one may not have been looked at."""
        self._client._garbage.extend(self._carried)
        self._carried = []

    def _end(self, error: Error) -> None:
        """After the request's own error: raises it, or sends the request again when only its session had ended."""
        self._forget()
        self._tell_again()
        if error.code == "cancelled" and self._follower_error is not None:
            raise self._follower_error
        if not self._session_ended(error):
            raise error
        self._client._renew_session(self._connection, self._session)
        self._send()

    def _follower_failed(self, error: Error) -> None:
        """The first follower's error ends the request, whose own error says more if it ended by itself."""
        if self._follower_error is None:
            self._follower_error = error
            self.tell("cancel")

    def _session_ended(self, error: Error) -> bool:
        return (
            error.code == "bad_value"
            and error.details.get("field") == "session"
            and self._session is not None
            and not self._followers
        )

    def result(self) -> dict[str, Any]:
        """Waits for the end, passing over what comes before."""
        event = self.next()
        while not self.finished:
            event = self.next()
        return event

    def tell(self, op: str, **fields: Any) -> None:
        """Sends a message about this request whose own fate does not matter: credit, cancel."""
        self._further(self._client._next_id(), op, fields)

    def follow(self, op: str, **fields: Any) -> None:
        """Sends a part or commit of this request; when it fails, so does the request, and ``next`` raises why."""
        id = self._client._next_id()
        self._connection.open(id, follows=self._id)
        self._followers.append(id)
        self._further(id, op, fields)

    def _further(self, id: int, op: str, fields: dict[str, Any]) -> None:
        self._client._send(self._connection, id, op, {"request": self._id, **fields}, carries=False)

    def cancel(self) -> None:
        """Asks the server to stop; the last event is still to come."""
        if not self.finished:
            self.tell("cancel")

    def abandon(self) -> None:
        """Cancels without waiting; late events are dropped, late caches freed."""
        if self.finished:
            return
        self._tell_again()
        try:
            self.tell("cancel")
        except Error:
            pass  # the connection is lost, and with it the request
        self._forget()

    def _forget(self) -> None:
        self.finished = True
        self._connection.forget([self._id, *self._followers])

    def __enter__(self) -> Exchange:
        return self

    def __exit__(self, *exception: object) -> None:
        self.abandon()
