"""A streamed ``generate``: an iterator over new tokens, with the result at its end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable

from .errors import Error
from .results import GenerateResult, TokensEvent

if TYPE_CHECKING:
    from .exchange import Exchange


class GenerateStream:
    """Iterates over ``TokensEvent``; ``result`` is there afterwards.  ``close()``, or leaving a ``with``, cancels.

    with client.generate(ids, stream=True) as stream:
        for event in stream:
            print(event.tokens)
    print(stream.result.finish_reason)
    """

    __slots__ = ("_exchange", "_finish", "_result", "_error", "_abandoned")

    def __init__(
        self,
        exchange: Exchange,
        finish: Callable[[dict[str, Any]], GenerateResult],
        abandoned: Callable[[Exchange], None],
    ) -> None:
        self._exchange = exchange
        self._finish = finish
        self._abandoned = abandoned
        self._result: GenerateResult | None = None
        self._error: Error | None = None

    def __iter__(self) -> GenerateStream:
        return self

    def __next__(self) -> TokensEvent:
        while not self._exchange.finished:
            try:
                event = self._exchange.next()
            except Error as error:
                self._error = error
                raise
            if event["kind"] == "result":
                self._result = self._finish(event)
            elif event["kind"] == "tokens":
                return TokensEvent(event["tokens"])
        raise StopIteration

    @property
    def result(self) -> GenerateResult:
        """The whole; waits for the end when it has not come yet.  After ``close()`` its finish_reason is "cancelled",
        unless the end came first.  Errors: what ended the stream."""
        if self._error is None:
            for _ in self:
                pass
        if self._result is None:
            raise Error(*(self._error.args if self._error else ("cancelled", "the stream was interrupted")))
        return self._result

    def close(self) -> None:
        """Cancels what is still running and waits for its end.  Twice is harmless."""
        if self._exchange.finished:
            return
        try:
            self._exchange.cancel()
            for _ in self:
                pass
        except Error as error:
            self._error = error

    def __enter__(self) -> GenerateStream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        # Runs on any thread at any moment: only note it, take no lock; the next call of the client cancels it.
        exchange = getattr(self, "_exchange", None)
        if exchange is not None and not exchange.finished:
            self._abandoned(exchange)
