"""Export and import: keys and values in parts of about 1 MiB, at the pace of the receiver's credits."""

from __future__ import annotations

from typing import Any, Callable

import numpy as np

from .errors import Error
from .exchange import Exchange
from .past_key_values import PastKeyValues, read_layers
from .protocol import numpy_dtype, wire_dtype

Begin = Callable[[str, dict[str, Any], "float | None"], Exchange]

_CREDITS = 4  # parts in flight: enough to keep the server busy, little enough to keep memory small


def receive_export(begin: Begin, cache: bytes, length: int, timeout: float | None) -> PastKeyValues:
    """Errors: unknown_cache, cut_past_end, bad_message, timeout, unreachable."""
    with begin("export", {"cache": cache, "length": length, "credits": _CREDITS}, timeout) as exchange:
        start = exchange.next()
        if start["kind"] != "begin":
            raise Error("bad_message", f"the server began an export with {start['kind']!r}")
        shape = (1, start["n_kv_heads"], start["length"], start["head_dim"])
        dtype = numpy_dtype(start["dtype"])
        layers = [(np.empty(shape, dtype), np.empty(shape, dtype)) for _ in range(start["n_layers"])]
        missing = 2 * len(layers) * start["length"]
        given = _CREDITS
        event = exchange.next()
        while event["kind"] != "result":
            if event["kind"] == "part":
                missing -= _place(layers, event)
                if given < start["n_parts"]:
                    exchange.tell("credit", n=1)
                    given += 1
            event = exchange.next()
        if missing:
            raise Error("bad_message", f"the server left {missing} rows of the export out")
    return PastKeyValues(layers, start["tokens"], start["model"], start["origin"])


def _place(layers: list[tuple[np.ndarray, np.ndarray]], part: dict[str, Any]) -> int:
    """Stores a part and returns its number of tokens."""
    first, last, data = part["start"], part["stop"], part["data"]
    if not 0 <= part["layer"] < len(layers) or part["which"] not in ("k", "v"):
        raise Error("bad_message", f"the server sent a part of layer {part['layer']}, {part['which']!r}")
    into = layers[part["layer"]][part["which"] == "v"][0]
    if not 0 <= first < last <= into.shape[1] or data.shape != (into.shape[0], last - first, into.shape[2]):
        raise Error("bad_message", f"the server sent tokens {first} to {last} of layer {part['layer']} as {data.shape}")
    into[:, first:last] = data
    return last - first


def send_import(begin: Begin, pkv: Any, tokens: np.ndarray, convert: bool, timeout: float | None) -> dict[str, Any]:
    """The result event, which names the cache.  Errors: bad_type, wrong_dtype, wrong_shape and the server's."""
    layers = read_layers(pkv, len(tokens))
    n_kv_heads, _, head_dim = layers[0][0].shape
    fields = {
        "tokens": tokens,
        "dtype": wire_dtype(layers[0][0], "past_key_values", ("f32", "f16", "bf16")),
        "n_layers": len(layers),
        "n_kv_heads": n_kv_heads,
        "head_dim": head_dim,
    }
    if convert:
        fields["convert"] = True
    if isinstance(pkv, PastKeyValues):
        fields["model"] = pkv.model
    with begin("import", fields, timeout) as exchange:
        start = exchange.next()
        credits, step = start["credits"], start["part_tokens"]
        for layer, pair in enumerate(layers):
            for which, array in zip("kv", pair):
                for first in range(0, len(tokens), step):
                    while credits == 0:
                        credits += _credits_of(exchange.next())
                    last = min(first + step, len(tokens))
                    data = np.ascontiguousarray(array[:, first:last])
                    exchange.follow("part", layer=layer, which=which, start=first, stop=last, data=data)
                    credits -= 1
        exchange.follow("commit")
        return exchange.result()


def _credits_of(event: dict[str, Any]) -> int:
    if event["kind"] != "credit":
        raise Error("bad_message", f"the server answered an import with {event['kind']!r}")
    return event["n"]
