"""The one exception of this package: what the server, or a check before the server, says of a call that failed."""

from __future__ import annotations

from typing import Any, Mapping

import numpy as np

#: Every code, as ipc/PROTOCOL.md explains them.
CODES = frozenset(
    """bad_message unknown_operation unknown_field bad_type bad_value token_out_of_range empty_request no_row too_long
    unknown_cache cut_past_end pool_full busy wrong_dtype wrong_shape wrong_model not_finite reply_too_large unsupported
    draining deadline cancelled timeout unreachable version_mismatch internal""".split()
)


def kind_of(value: Any) -> str:
    """What a value is, with its article: "an int", "a list"."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeioAEIO' or name == 'ndarray' else 'a'} {name}"


def shown(value: Any) -> str:
    """A short value as it is written, any other by its kind: an array does not belong in a sentence."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        text = repr(value)
        if len(text) <= 40:
            return text
    return kind_of(value)


class Error(Exception):
    """A call failed and changed nothing.

    ``code`` is one of bad_message, unknown_operation, unknown_field, bad_type, bad_value, token_out_of_range,
    empty_request, no_row, too_long, unknown_cache, cut_past_end, pool_full, busy, wrong_dtype, wrong_shape,
    wrong_model, not_finite, reply_too_large, unsupported, draining, deadline, cancelled, timeout, unreachable,
    version_mismatch and internal.  ``message`` is one sentence for a person.  ``details`` is a dict of what a program
    may want to know: needed, free, limit, length, index (integers), field and valid (strings); only those that apply
    are there.

        try:
            client.forward(tokens)
        except dskv.Error as error:
            if error.code == "pool_full":
                print(error.details["needed"], "blocks needed,", error.details["free"], "free")
    """

    def __init__(self, code: str, message: str, details: Mapping[str, Any] | None = None) -> None:
        super().__init__(code, message, dict(details or {}))

    @property
    def code(self) -> str:
        return self.args[0]

    @property
    def message(self) -> str:
        return self.args[1]

    @property
    def details(self) -> dict[str, Any]:
        return self.args[2]

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"
