"""What exactness tests share: random tokens, cold runs, comparisons of bits, how near other arithmetic must come."""

import importlib.util

import dskv
import numpy as np

HAS_BF16 = importlib.util.find_spec("ml_dtypes") is not None
# Steps between neighbouring values near 1, of the narrow dtypes that a GPU's activations may have (a CPU's are f32).
STEP = {"f16": 2.0**-10, "bf16": 2.0**-7}


def tokens(n, seed, vocab=2048):
    """n random token ids, none of them the atlas models' end token 0."""
    return np.random.default_rng(seed).integers(1, vocab, n, dtype=np.int32)


def logit_tolerance(info, logits):
    """How far logits may be from another arithmetic's: 2e-3, or where activations are narrow some steps of the largest.

    Every operation rounds by half a step at most.  Some tens of roundings, added up as random ones are, come to two or
    three steps, and the worst of thousands of logits to three times that.
    """
    return max(2e-3, 8 * STEP.get(info.activation_dtype, 0) * float(np.abs(logits).max()))


def rounded(array, kind):
    """float32 values as they are when held in a narrower dtype; as float32 again."""
    if kind == "f16":
        return array.astype(np.float16).astype(np.float32)
    if kind == "bf16":  # numpy has none of its own: half of the bits, to nearest even
        bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)).view(np.float32)
    return array


def as_dtype(pkv, kind):
    """Keys and values in the dtype of this name."""
    dtype = dskv.protocol.numpy_dtype(kind)
    return tuple((k.astype(dtype), v.astype(dtype)) for k, v in pkv)


def another_dtype(kind):
    return "f16" if kind == "f32" else "f32"


def same(found, wanted, what=""):
    """Asserts that two arrays have the same dtype, shape and bits."""
    assert found.dtype == wanted.dtype and found.shape == wanted.shape, (
        f"{what}: {found.dtype} {found.shape}, not {wanted.dtype} {wanted.shape}"
    )
    if found.tobytes() == wanted.tobytes():
        return
    size = found.dtype.itemsize
    bits = [np.ascontiguousarray(a).reshape(-1).view(np.uint8).reshape(-1, size) for a in (found, wanted)]
    places = np.flatnonzero((bits[0] != bits[1]).any(axis=1))
    first = np.unravel_index(places[0], found.shape)
    raise AssertionError(
        f"{what}: {len(places)} of {found.size} values differ, the first at {tuple(map(int, first))}:"
        f" {found[first]!r}, not {wanted[first]!r}"
    )


def same_kv(found, wanted, what=""):
    """Asserts that two exports have the same bits; of the longer one, the first tokens count."""
    n = min(found[0][0].shape[2], wanted[0][0].shape[2])
    assert len(found) == len(wanted)
    for layer, (a, b) in enumerate(zip(found, wanted)):
        for name, x, y in zip(("keys", "values"), a, b):
            same(x[:, :, :n], y[:, :, :n], f"{what}, {name} of layer {layer}")


class Cold:
    """Results of one call without a prefix: all rows, and the exported KV when asked for."""

    def __init__(self, client, ids, kv=True):
        made = client.forward(ids, logits="all")
        assert (made.cached, made.computed) == (0, len(ids))
        self.rows = made.logits
        self.kv = made.cache.export() if kv else None
        self.cache = made.cache


def next_row(client, cache, token=7):
    """The row after one more token: what a canary is watched by."""
    return client.forward([token], prefix=cache, logits="last").logits
