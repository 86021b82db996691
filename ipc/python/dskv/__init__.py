"""Client of dskvd: large language models whose key/value caches are values that you hold.

    import dskv

    with dskv.connect() as client:
        a = client.forward([5, 6, 7], logits="last")                # a.cache, a.logits [1, vocab]
        b = client.forward([8, 9], prefix=a.cache[:2], argmax=True)  # a.cache stays as it is
        for event in client.generate([10], prefix=b.cache, stream=True):
            print(event.tokens)

A cache is immutable: extending it makes a new one that shares its memory, and ``cache[:n]`` names its first n tokens.
Every failure is a ``dskv.Error`` with a ``code``, a ``message`` and ``details``, and has changed nothing.
"""

from .cache import Cache, Prefix
from .client import Client, connect
from .errors import Error
from .past_key_values import PastKeyValues
from .results import ForwardResult, GenerateResult, Record, TokensEvent, VerifyResult
from .stream import GenerateStream

__version__ = "0.1.0"

__all__ = [
    "Cache",
    "Client",
    "Error",
    "ForwardResult",
    "GenerateResult",
    "GenerateStream",
    "PastKeyValues",
    "Prefix",
    "Record",
    "TokensEvent",
    "VerifyResult",
    "connect",
]
