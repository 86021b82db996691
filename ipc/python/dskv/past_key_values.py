"""Keys and values outside the server: the tuple that an export gives, and reading whatever an import is given.

torch is never imported here: an object that is a torch tensor has imported it already.
"""

from __future__ import annotations

import sys
from typing import Any, Sequence

import numpy as np

from .errors import Error, kind_of
from .protocol import numpy_dtype, token_ids


class PastKeyValues(tuple):
    """A tuple of (k, v) per layer, each a numpy array [1, n_kv_heads, length, head_dim], as transformers lays them out.

    ``tokens`` int32 [length], ``model`` the fingerprint of the model that made them, ``origin`` the numerics id of the
    cache ("foreign" when it was imported).  ``client.import_cache(pkv)`` makes a cache of it again.
    """

    tokens: np.ndarray
    model: str
    origin: str

    def __new__(cls, layers: Sequence[tuple[np.ndarray, np.ndarray]], tokens: np.ndarray, model: str, origin: str):
        self = super().__new__(cls, layers)
        self.tokens = tokens
        self.model = model
        self.origin = origin
        return self

    def __reduce__(self):
        return PastKeyValues, (tuple(self), self.tokens, self.model, self.origin)


def tokens_of(pkv: Any, tokens: Any) -> np.ndarray:
    """The ids that an import is to stand for: those given, which an export's own must not contradict, else its own."""
    own = token_ids(pkv.tokens, "pkv.tokens") if isinstance(pkv, PastKeyValues) else None
    if tokens is None:
        if own is None:
            raise Error("bad_type", "these past_key_values do not say their tokens: give them", {"field": "tokens"})
        return own
    ids = token_ids(tokens)
    if own is None or np.array_equal(ids, own):
        return ids
    if len(ids) != len(own):
        what = f"tokens are {len(ids)} ids, but the past_key_values stand for {len(own)}"
        raise Error("bad_value", f"{what} (pkv.tokens)", {"field": "tokens", "length": len(ids), "limit": len(own)})
    index = int((ids != own).argmax())
    what = f"tokens[{index}] is {ids[index]}, but the past_key_values stand for {own[index]} there"
    raise Error("bad_value", f"{what} (pkv.tokens)", {"field": "tokens", "index": index})


def _pairs_of(pkv: Any) -> list[tuple[Any, Any]]:
    """(k, v) per layer of a tuple of pairs, or of transformers' DynamicCache of 4.x or 5.x."""
    if hasattr(pkv, "key_cache") and hasattr(pkv, "value_cache"):
        return list(zip(pkv.key_cache, pkv.value_cache))
    if hasattr(pkv, "layers"):
        return [(layer.keys, layer.values) for layer in pkv.layers]
    try:
        return [(layer[0], layer[1]) for layer in pkv]
    except (TypeError, IndexError, KeyError):
        raise Error(
            "bad_type",
            f"past_key_values are (k, v) per layer or a DynamicCache, not {kind_of(pkv)}",
            {"field": "pkv"},
        ) from None


def _array_of(value: Any, what: str) -> np.ndarray:
    """A numpy array of a numpy array or a torch tensor of any device and dtype."""
    if isinstance(value, np.ndarray):
        return value
    if type(value).__module__.split(".")[0] == "torch" and hasattr(value, "detach"):
        torch = sys.modules["torch"]
        tensor = value.detach().cpu().contiguous()
        if tensor.dtype == torch.bfloat16:  # numpy has no such type: carry the bits over
            return tensor.view(torch.int16).numpy().view(numpy_dtype("bf16"))
        try:
            return tensor.numpy()
        except TypeError:  # one of the types that numpy does not have either
            raise Error("wrong_dtype", f"{what} are {tensor.dtype}, not f32, f16, bf16", {"field": "pkv"}) from None
    raise Error("bad_type", f"{what} are {kind_of(value)}, not an array or a tensor", {"field": "pkv"})


def read_layers(pkv: Any, length: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Per layer k and v as [n_kv_heads, length, head_dim], all of one dtype and shape.  Errors: bad_type, wrong_shape,
    wrong_dtype."""
    layers: list[tuple[np.ndarray, np.ndarray]] = []
    for index, pair in enumerate(_pairs_of(pkv)):
        arrays: list[np.ndarray] = []
        for name, value in zip("kv", pair):
            what = f"{'keys' if name == 'k' else 'values'} of layer {index}"
            array = _array_of(value, what)
            if array.ndim != 4 or array.shape[0] != 1 or array.shape[2] != length:
                raise Error(
                    "wrong_shape",
                    f"{what} have shape {list(array.shape)}, not [1, n_kv_heads, {length}, head_dim]",
                    {"field": "pkv", "index": index, "length": length},
                )
            first = layers[0][0] if layers else arrays[0] if arrays else array[0]
            if array.shape[1:] != first.shape:
                raise Error(
                    "wrong_shape",
                    f"{what} have shape {list(array.shape)}, the first have {[1, *first.shape]}",
                    {"field": "pkv", "index": index},
                )
            if array.dtype != first.dtype:
                raise Error(
                    "wrong_dtype",
                    f"{what} are {array.dtype}, the first are {first.dtype}",
                    {"field": "pkv", "index": index},
                )
            arrays.append(array[0])
        layers.append((arrays[0], arrays[1]))
    if not layers:
        raise Error("wrong_shape", "past_key_values have no layer", {"field": "pkv"})
    return layers
