"""Requests out of a caller's arguments: the fields of sequences and prefixes, and the tokens that a result has."""

from __future__ import annotations

from typing import Any, Mapping, Union

import numpy as np

from .cache import Cache, Prefix
from .errors import Error, kind_of, shown
from .protocol import boolean, integer, token_ids

Tokens = Any  #: a list, tuple, range, numpy array or torch tensor of integers, one-dimensional
PrefixLike = Union[Cache, Prefix, None]
Rows = Union[None, str, tuple[int, int]]  #: None, "last", "all" or (start, stop)

_FORWARD_OPTIONS = ("tokens", "prefix", "logits", "argmax", "topk", "score", "consume", "logits_dtype")


def check_options(sequence: Mapping[str, Any]) -> None:
    if not isinstance(sequence, Mapping) or "tokens" not in sequence:
        raise Error("bad_type", "a sequence is a dict with tokens", {"field": "tokens"})
    for name in sequence:
        if name not in _FORWARD_OPTIONS:
            raise Error(
                "unknown_field",
                f"a sequence has no {name!r}",
                {"field": str(name), "valid": ", ".join(_FORWARD_OPTIONS)},
            )


def in_sequence(error: Error, index: int) -> Error:
    """The same error, of this sequence among several: sequences[1].tokens[3] is ..."""
    at_once = error.message.startswith(error.details.get("field", " "))
    message = f"sequences[{index}]{'.' if at_once else ': '}{error.message}"
    return Error(error.code, message, {**error.details, "index": index})


def forward_sequence(sequence: Mapping[str, Any], ids: np.ndarray) -> dict[str, Any]:
    want: dict[str, Any] = {}
    rows = _rows(sequence.get("logits"), len(ids))
    if rows is not None:
        want["logits"] = rows
    dtype = sequence.get("logits_dtype", "f32")
    if not isinstance(dtype, str):
        raise Error("bad_type", f"logits_dtype is a name, not {shown(dtype)}", {"field": "logits_dtype"})
    if dtype != "f32":
        want["logits_dtype"] = dtype
    for name in ("argmax", "score"):
        if boolean(sequence.get(name, False), name):
            want[name] = True
    topk = integer(sequence.get("topk", 0), "topk")
    if topk:
        want["topk"] = topk
    wire = {"tokens": ids, **consume_field(sequence.get("consume", False)), **prefix_fields(sequence.get("prefix"))}
    if want:
        wire["want"] = want
    return wire


def _rows(logits: Rows, n: int) -> list[int] | None:
    """[start, stop) of new tokens; without any, row 0 is the prefix's last token."""
    if logits is None:
        return None
    n = max(n, 1)
    if isinstance(logits, str):
        if logits == "last":
            return [n - 1, n]
        if logits == "all":
            return [0, n]
        raise _not_rows("bad_value", logits)
    if not isinstance(logits, (tuple, list)) or len(logits) != 2:
        raise _not_rows("bad_type", logits)
    return [integer(logits[0], "logits"), integer(logits[1], "logits")]


def _not_rows(code: str, logits: object) -> Error:
    valid = '"last", "all", (start, stop)'
    return Error(code, f"logits is {shown(logits)}; allowed are None, {valid}", {"field": "logits", "valid": valid})


def prefix_fields(prefix: PrefixLike) -> dict[str, Any]:
    if prefix is None:
        return {}
    if not isinstance(prefix, (Cache, Prefix)):
        hint = ": pass its .cache" if isinstance(getattr(prefix, "cache", None), Cache) else ""
        raise Error(
            "bad_type", f"a prefix is a Cache or a slice of one, not {kind_of(prefix)}{hint}", {"field": "prefix"}
        )
    cache = prefix.cache if isinstance(prefix, Prefix) else prefix
    length = len(prefix)
    return {"prefix": {"cache": cache.id, "length": length, "check": cache._crc(length)}}


def consume_field(consume: bool) -> dict[str, Any]:
    return {"consume": True} if boolean(consume, "consume") else {}


def stop_field(stop: Any) -> dict[str, Any]:
    """Sequences of ids; an id by itself is a sequence of one."""
    if stop is None:
        return {}
    if isinstance(stop, (str, bytes, bytearray, dict)) or not hasattr(stop, "__iter__"):
        what = f"stop is a list of token ids or of sequences of them, not {shown(stop)}"
        raise Error("bad_type", what, {"field": "stop"})
    stops = [_stop_entry(entry, f"stop[{index}]") for index, entry in enumerate(stop)]
    return {"stop": stops} if stops else {}


def _stop_entry(entry: Any, name: str) -> np.ndarray:
    try:
        return token_ids(_as_sequence(entry), name)
    except Error as error:
        raise Error(error.code, error.message, {**error.details, "field": "stop"}) from None


def _as_sequence(entry: Any) -> Any:
    if hasattr(entry, "ndim"):  # arrays and tensors have an __index__, whatever their shape
        return entry if entry.ndim else entry.reshape(1)
    return [entry] if hasattr(entry, "__index__") else entry


def joined(prefix: PrefixLike, *parts: np.ndarray) -> np.ndarray:
    return np.concatenate(parts if prefix is None else (prefix.tokens, *parts))
