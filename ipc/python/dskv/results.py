"""What calls return.  Arrays belong to the caller and may be written to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .cache import Cache


@dataclass(slots=True, frozen=True, eq=False)
class ForwardResult:
    """What ``forward`` made.  An output that was not asked for is None.

    Row i belongs to the i-th new token and predicts the token after it.
    """

    cache: Cache | None  #: prefix + tokens; None when no token was given (nothing new was made)
    cached: int  #: tokens that were taken from the prefix
    computed: int  #: tokens that were run through the model; the prefix's last one among them when it was run again
    logits: np.ndarray | None = None  #: float32 (or float16) [rows, vocab]
    argmax: np.ndarray | None = None  #: int32 [n]: the id of the largest logit, the lowest of equals
    topk_ids: np.ndarray | None = None  #: int32 [n, k], best first
    topk_logprobs: np.ndarray | None = None  #: float32 [n, k]
    scores: np.ndarray | None = None  #: float32 [n]: log-probability of new token i given all before it


@dataclass(slots=True, frozen=True, eq=False)
class VerifyResult:
    """What ``verify`` made."""

    accepted: int  #: leading draft tokens that greedy decoding agrees with
    next: int  #: the token that greedy decoding puts after them; it is not in the cache
    cache: Cache  #: prefix + tokens + accepted draft tokens
    cached: int
    computed: int


@dataclass(slots=True, frozen=True, eq=False)
class GenerateResult:
    """What ``generate`` made."""

    tokens: np.ndarray  #: int32 [n]: the new tokens, an end token included
    steps: int  #: passes through the model after the prompt's
    finish_reason: str  #: "stop", "length", "context" or "cancelled"
    seed: int  #: of the random numbers; give it again for the same tokens
    cache: Cache | None  #: all but the last token: pass that one first to go on
    cached: int
    computed: int


@dataclass(slots=True, frozen=True, eq=False)
class TokensEvent:
    """New tokens of a streamed ``generate``."""

    tokens: np.ndarray  #: int32 [n], n >= 1


class Record(dict):
    """A dict whose entries are attributes too: ``client.info().n_ranks``, ``client.stats().ranks[0].pool_bytes``."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the server did not send {name!r}") from None

    @classmethod
    def of(cls, value: Any) -> Any:
        """The same value with every dict in it, at any depth, as a Record."""
        if isinstance(value, dict):
            return cls((key, cls.of(entry)) for key, entry in value.items())
        if isinstance(value, list):
            return [cls.of(entry) for entry in value]
        return value
