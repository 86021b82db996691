"""A bridge to Hugging Face transformers, for those who have it: exported keys and values as its models take them.

The other way needs no bridge: ``client.import_cache`` takes a model's ``past_key_values`` as they are.
"""

from __future__ import annotations

from typing import Any, Sequence

import numpy as np


def _tensor_of(array: np.ndarray) -> Any:
    import torch

    array = np.ascontiguousarray(array)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def to_dynamic_cache(pkv: Sequence[tuple[np.ndarray, np.ndarray]]) -> Any:
    """What a model's ``past_key_values`` argument takes, made from an export: a DynamicCache where transformers has one
    (4.36 on), else the tuple of tensors that older ones take.  The tensors are copies, on the CPU.

        pkv = a.cache.export()
        model(torch.tensor([[token]]), past_key_values=to_dynamic_cache(pkv))
    """
    layers = [(_tensor_of(keys), _tensor_of(values)) for keys, values in pkv]
    try:
        from transformers import DynamicCache
    except ImportError:
        return tuple(layers)
    cache = DynamicCache()
    for index, (keys, values) in enumerate(layers):
        cache.update(keys, values, index)
    return cache
