"""The wire: messages as msgpack maps with raw tensor frames, and the checks of what a caller gives.  Knows no socket.

A message is a header frame, one msgpack map, and further frames of little-endian tensor bytes.  In the header a tensor
is {dtype, shape, frame}; here it is a numpy array.  ipc/PROTOCOL.md describes every field.
"""

from __future__ import annotations

import operator
from typing import Any, Sequence

import msgpack
import numpy as np

from .cache import Cache, Prefix
from .errors import CODES, Error, kind_of, shown

VERSION = 1

#: Used until `hello` has told the server's own.
DEFAULT_LIMITS = {"header_bytes": 1 << 20, "frame_bytes": 8 << 20, "request_bytes": 32 << 20, "free_ids": 4096}

_NUMPY_NAMES = {"f32": "<f4", "f16": "<f2", "i32": "<i4"}
_WIRE_NAMES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "int32": "i32"}


def numpy_dtype(name: str) -> np.dtype:
    """The numpy dtype of a dtype's name on the wire.  bf16 needs the package ml_dtypes, which is imported only then."""
    if name == "bf16":
        try:
            import ml_dtypes
        except ImportError:
            raise Error(
                "unsupported", "this server's caches are bf16: install the Python package ml_dtypes to hold such arrays"
            ) from None
        return np.dtype(ml_dtypes.bfloat16)
    try:
        return np.dtype(_NUMPY_NAMES[name])
    except KeyError:
        raise Error("bad_message", f"the server sent a tensor of unknown dtype {name!r}") from None


def wire_dtype(array: np.ndarray, field: str, valid: Sequence[str] = ("f32", "f16", "bf16", "i32")) -> str:
    """The name on the wire of an array's dtype.  Errors: wrong_dtype when it is not among the valid ones."""
    name = _WIRE_NAMES.get(array.dtype.name)
    if name is None or name not in valid:
        names = ", ".join(valid)
        raise Error("wrong_dtype", f"{field} are {array.dtype}, not {names}", {"field": field, "valid": names})
    return name


def encode(message: dict[str, Any], limits: dict[str, int]) -> list[Any]:
    """Frames of a message whose tensors are numpy arrays.  Errors: bad_value when a limit of the server is exceeded."""
    frames: list[Any] = [b""]

    def describe(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            if value.dtype.byteorder == ">":
                value = value.astype(value.dtype.newbyteorder("<"))
            data = np.ascontiguousarray(value)
            frames.append(memoryview(data.view(np.uint8).reshape(-1)) if data.size else b"")
            return {"dtype": wire_dtype(value, "tensor"), "shape": list(value.shape), "frame": len(frames) - 1}
        raise TypeError(type(value).__name__)

    frames[0] = msgpack.packb(message, use_bin_type=True, default=describe)
    sizes = [len(frame) for frame in frames]
    _check_limit("header", sizes[0], limits["header_bytes"])
    _check_limit("largest frame", max(sizes), max(limits["frame_bytes"], limits["header_bytes"]))
    _check_limit("whole", sum(sizes), limits["request_bytes"])
    return frames


def _check_limit(what: str, size: int, limit: int) -> None:
    if size > limit:
        raise Error(
            "bad_value",
            f"the request's {what} takes {size} bytes, the server's limit is {limit}",
            {"length": size, "limit": limit},
        )


def decode_header(frame: bytes) -> dict[str, Any]:
    """The map of a header frame, tensors still described.  Errors: bad_message."""
    try:
        header = msgpack.unpackb(frame, raw=False, strict_map_key=True)
    except Exception as error:
        raise Error("bad_message", f"the server sent a header that is not msgpack: {error}") from None
    if not isinstance(header, dict) or not isinstance(header.get("id"), int) or not isinstance(header.get("kind"), str):
        raise Error("bad_message", "the server sent a header that is not an event")
    return header


def resolve_tensors(value: Any, frames: Sequence[bytes]) -> Any:
    """The same value with every described tensor in it, at any depth, as an array of its own.  Errors: bad_message."""
    if isinstance(value, list):
        return [resolve_tensors(entry, frames) for entry in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"dtype", "shape", "frame"}:
        return _tensor(value, frames)
    return {key: resolve_tensors(entry, frames) for key, entry in value.items()}


def _tensor(described: dict[str, Any], frames: Sequence[bytes]) -> np.ndarray:
    dtype = numpy_dtype(described["dtype"])
    shape, frame = described["shape"], described["frame"]
    count = 1
    for size in shape:
        count *= size
    if not 1 <= frame < len(frames) or count * dtype.itemsize != len(frames[frame]):
        raise Error("bad_message", f"the server described a tensor {shape} that does not fit its frame {frame}")
    return np.frombuffer(frames[frame], dtype).reshape(shape).copy()


def error_of(event: dict[str, Any]) -> Error:
    """The error that an event tells of; a code that this version does not know is `internal`."""
    code = event.get("code")
    message = event.get("message", "the server gave no reason")
    return Error(code if code in CODES else "internal", message, event.get("details"))


# ---- what a caller gives ---------------------------------------------------------------------------------------------


def token_ids(tokens: Any, field: str = "tokens") -> np.ndarray:
    """int32 [n] of one-dimensional integers: a list, tuple, range, numpy array or torch tensor.

    Errors: bad_type for anything else (bool, float, nested), token_out_of_range for what int32 cannot hold.
    """
    if isinstance(tokens, (Cache, Prefix)):
        found = type(tokens).__name__
        raise Error("bad_type", f"{field} are ids, not a {found}; did you mean prefix=?", {"field": field})
    if type(tokens).__module__.split(".")[0] == "torch" and hasattr(tokens, "detach"):
        try:
            tokens = tokens.detach().cpu().numpy()
        except TypeError:  # numpy has no bfloat16
            raise _not_tokens(field, f"a tensor of {tokens.dtype}") from None
    if not isinstance(tokens, np.ndarray):
        tokens = _checked_list(tokens, field)
    if tokens.ndim != 1 or (tokens.dtype.kind not in "iu" and tokens.size):
        raise _not_tokens(field, f"an array of {tokens.dtype} with {tokens.ndim} dimensions")
    if tokens.size == 0:
        return np.empty(0, np.dtype("<i4"))
    outside = (tokens < -(2**31)) | (tokens > 2**31 - 1)
    if outside.any():
        index = int(outside.argmax())
        raise _outside(field, index, int(tokens[index]))
    return np.ascontiguousarray(tokens, np.dtype("<i4"))


def _checked_list(tokens: Any, field: str) -> np.ndarray:
    if isinstance(tokens, (str, bytes, bytearray, dict, set, frozenset)) or not hasattr(tokens, "__len__"):
        raise _not_tokens(field, kind_of(tokens))
    for kind in set(map(type, tokens)):
        if kind is not int and not issubclass(kind, np.integer):
            raise _not_tokens(field, f"{kind_of(tokens)} with {kind.__name__} in it")
    try:
        return np.array(list(tokens), dtype=object).astype(np.int64)
    except OverflowError:
        index = next(i for i, token in enumerate(tokens) if not -(2**31) <= int(token) < 2**31)
        raise _outside(field, index, int(tokens[index])) from None


def _outside(field: str, index: int, token: int) -> Error:
    message = f"{field}[{index}] is {shown(token)}, not in the vocabulary"
    return Error("token_out_of_range", message, {"index": index, "field": field})


def _not_tokens(field: str, found: str) -> Error:
    return Error("bad_type", f"{field} are one-dimensional integers, not {found}", {"field": field})


def integer(value: Any, field: str) -> int:
    """An int of a Python or numpy integer.  Errors: bad_type, bad_value beyond 64 bits."""
    try:
        number = operator.index(None if isinstance(value, (bool, np.bool_)) else value)
    except TypeError:  # of an array too, which has an __index__
        raise Error("bad_type", f"{field} is an integer, not {shown(value)}", {"field": field}) from None
    if not -(2**63) <= number < 2**64:
        raise Error("bad_value", f"{field} is {shown(number)}, beyond 64 bits", {"field": field})
    return number


def number(value: Any, field: str) -> float:
    """A float of a Python or numpy number.  Errors: bad_type, bad_value beyond what a float holds."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise Error("bad_type", f"{field} is a number, not {shown(value)}", {"field": field})
    try:
        return float(value)
    except OverflowError:
        raise Error("bad_value", f"{field} is beyond what a float holds", {"field": field}) from None


def seconds(value: Any, field: str) -> float:
    """A time-out; math.inf: for ever.  Errors: bad_type, bad_value for what is no length of time."""
    given = number(value, field)
    if not given >= 0:
        raise Error("bad_value", f"{field} is {given:g}, not a number of seconds from 0 on", {"field": field})
    return given


def boolean(value: Any, field: str) -> bool:
    """Errors: bad_type."""
    if not isinstance(value, (bool, np.bool_)):
        raise Error("bad_type", f"{field} is True or False, not {shown(value)}", {"field": field})
    return bool(value)
