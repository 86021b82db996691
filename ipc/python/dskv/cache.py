"""Caches as a client holds them: an id, a length and the tokens they stand for.  Knows no socket."""

from __future__ import annotations

import operator
import zlib
from typing import TYPE_CHECKING

import numpy as np

from .errors import Error, shown

if TYPE_CHECKING:
    from .client import Client
    from .past_key_values import PastKeyValues


def _stop_of(key: object, length: int) -> int:
    """The length that ``[:n]`` names on something of this length."""
    if not isinstance(key, slice):
        hint = ""
        if isinstance(key, (int, np.integer)) and key:
            hint = f"; {f'for the first {key}' if key > 0 else f'for all but the last {-key}'}: [:{key}]"
        raise Error("bad_type", f"a prefix is named by [:n], not by [{shown(key)}]{hint}", {"field": "prefix"})
    if key.step not in (None, 1) or key.start not in (None, 0):
        raise Error("bad_value", "a prefix starts at token 0 and has step 1: [:n]", {"field": "prefix"})
    if key.stop is None:
        return length
    try:
        stop = operator.index(key.stop)
    except TypeError:
        raise Error("bad_type", f"a prefix's length is an integer, not {shown(key.stop)}", {"field": "prefix"}) from None
    if stop > length:
        raise Error(
            "cut_past_end",
            f"a prefix of {stop} tokens is longer than its cache of {length}",
            {"length": stop, "limit": length, "field": "prefix"},
        )
    return max(stop + length, 0) if stop < 0 else stop


class Prefix:
    """The first tokens of a cache, as ``cache[:n]`` names them.

    Naming one costs nothing and asks no server.  It goes wherever a cache goes as a prefix, and keeps its cache alive.
    """

    __slots__ = ("cache", "_length")

    def __init__(self, cache: Cache, length: int) -> None:
        self.cache = cache  #: whose first tokens these are
        self._length = length

    @property
    def tokens(self) -> np.ndarray:
        """int32 [length], read-only."""
        return self.cache.tokens[: self._length]

    def __len__(self) -> int:
        return self._length

    def __bool__(self) -> bool:
        return True

    __iter__ = None  # a prefix is not a sequence of anything

    def __getitem__(self, key: slice) -> Prefix:
        return Prefix(self.cache, _stop_of(key, self._length))

    def export(self, *, timeout: float | None = None) -> PastKeyValues:
        """The keys and values of these tokens; see ``Cache.export``."""
        return self.cache._client._export(self.cache, self._length, timeout)

    def __repr__(self) -> str:
        return f"<dskv.Prefix {self._length} of {self.cache!r}>"


class Cache:
    """The keys and values of a sequence of tokens, held by the server.  Nothing ever changes one.

    ``len(cache)`` is its number of tokens; ``cache[:n]`` names its first n (negative n as Python has it; past the end
    raises ``cut_past_end``).  It is true even at length 0.  When the last reference goes, the server is told with the
    next call; ``free()`` or ``with`` tell it at once.

        with client.forward(prompt).cache as cache:
            b = client.forward([7], prefix=cache[:-1])
    """

    __slots__ = ("_client", "_id", "_tokens", "_origin", "_check", "_held", "__weakref__")

    def __init__(self, client: Client, id: bytes, tokens: np.ndarray, origin: str) -> None:
        self._client = client
        self._id = id
        tokens.flags.writeable = False
        self._tokens = tokens
        self._origin = origin
        self._check: int | None = None
        self._held = True  # the server still holds it for us

    @property
    def id(self) -> bytes:
        """16 random bytes.  Whoever has them may use the cache, by the protocol: no call here takes an id."""
        return self._id

    @property
    def tokens(self) -> np.ndarray:
        """int32 [length], read-only: what the cache stands for."""
        return self._tokens

    @property
    def origin(self) -> str:
        """The numerics id that it was computed under, or "foreign" when it goes back to an import."""
        return self._origin

    def __len__(self) -> int:
        return len(self._tokens)

    def __bool__(self) -> bool:
        return True

    __iter__ = None  # a cache is not a sequence of anything

    def __getitem__(self, key: slice) -> Prefix:
        return Prefix(self, _stop_of(key, len(self._tokens)))

    def export(self, *, timeout: float | None = None) -> PastKeyValues:
        """Copies the keys and values to the client: a tuple of (k, v) per layer.

        Each is a numpy array [1, n_kv_heads, length, head_dim] in the cache's dtype (float32, float16 or
        ml_dtypes.bfloat16), keys after rotary, all heads of the model whatever the number of ranks.  The tuple also has
        ``tokens``, ``model`` (fingerprint) and ``origin``.  ``timeout`` is the longest time without progress,
        in seconds.  Errors: unknown_cache, timeout, unreachable.

            pkv = cache.export()
            keys, values = pkv[0]
        """
        return self._client._export(self, len(self._tokens), timeout)

    def free(self) -> None:
        """Gives the cache up now; twice is harmless.  Its slices end with it, caches made from it stay."""
        if self._held:
            self._held = False
            self._client._free(self._id)

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *exception: object) -> None:
        self.free()

    def __del__(self) -> None:
        # Runs on any thread at any moment, perhaps inside a call of this client: only note the id, take no lock.
        if getattr(self, "_held", False):
            self._client._garbage.append(self._id)

    def __repr__(self) -> str:
        state = "" if self._held else ", freed"
        return f"<dskv.Cache {self._id.hex()[:8]} of {len(self._tokens)} tokens{state}>"

    def _crc(self, length: int) -> int:
        """CRC-32 of the first tokens, as the protocol's `check` has it."""
        if length < len(self._tokens):
            return zlib.crc32(self._tokens[:length].tobytes())
        if self._check is None:
            self._check = zlib.crc32(self._tokens.tobytes())
        return self._check
