"""What exactness tests share: random tokens, cold runs, and comparisons of bits."""

import importlib.util

import numpy as np

HAS_BF16 = importlib.util.find_spec("ml_dtypes") is not None


def tokens(n, seed, vocab=2048):
    """n random token ids, none of them the atlas models' end token 0."""
    return np.random.default_rng(seed).integers(1, vocab, n, dtype=np.int32)


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
