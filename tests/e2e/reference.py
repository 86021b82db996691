"""Programs that run under a Python with transformers 4.34.0, as references for the tests of this folder.

    reference.py report MODEL ENDPOINT     the report's two loops: with transformers, and with dskv in the model's place
    reference.py exchange MODEL ENDPOINT   KV between transformers and dskv, both ways

Each prints one line of JSON.
"""

import json
import sys

import numpy as np

PROMPT = "Capital city of Germany:"


class TransformersModel:
    """past is transformers' own tuple of (k, v) per layer."""

    def __init__(self, directory):
        import torch
        from transformers import AutoModelForCausalLM

        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(directory, torch_dtype=torch.float32).eval()

    def __call__(self, ids, past=None):
        with self.torch.inference_mode():
            out = self.model(self.torch.tensor([ids]), past_key_values=past, use_cache=True)
        return out.logits[0].numpy(), out.past_key_values

    def cut(self, past, n):
        return tuple((k[:, :, :n], v[:, :, :n]) for k, v in past)


class DskvModel:
    """past is a dskv cache."""

    def __init__(self, client):
        self.client = client

    def __call__(self, ids, past=None):
        made = self.client.forward(ids, prefix=past, logits="all")
        return made.logits, made.cache

    def cut(self, past, n):
        return past[:n]


class DskvTupleModel(DskvModel):
    """past is an exported tuple: cut as the report does it, and imported again."""

    def __call__(self, ids, past=None):
        if past is not None:
            length = past[0][0].shape[2]
            past = self.client.import_cache(past, self.tokens[:length])
        logits, cache = super().__call__(ids, past)
        self.tokens = cache.tokens
        return logits, cache.export()

    def cut(self, past, n):
        return tuple((k[:, :, :n], v[:, :, :n]) for k, v in past)


def loop_a(model, ids):
    for _ in range(10):
        logits, _ = model(ids)
        ids = [*ids, int(logits[-1].argmax())]
    return ids


def loop_b(model, ids):
    logits, past = model(ids)
    ids = [*ids, int(logits[-1].argmax())]
    for _ in range(9):
        logits, past = model(ids[-2:], model.cut(past, len(ids) - 2))
        ids = [*ids, int(logits[-1].argmax())]
    return ids


def tokenizer_of(directory):
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_file=f"{directory}/tokenizer.json")


def report(directory, endpoint):
    import dskv

    tokenizer = tokenizer_of(directory)
    prompt = tokenizer(PROMPT)["input_ids"]
    with dskv.connect(endpoint) as client:
        models = {
            "transformers": TransformersModel(directory),
            "caches": DskvModel(client),
            "tuples": DskvTupleModel(client),
        }
        return {
            name: {"a": tokenizer.decode(loop_a(model, prompt)), "b": tokenizer.decode(loop_b(model, prompt))}
            for name, model in models.items()
        }


def exchange(directory, endpoint):
    """The next rows by transformers and by dskv, each on the other's KV and on its own."""
    import dskv
    from dskv.transformers import to_dynamic_cache

    ids, more = list(range(3, 40)), [41, 42]
    model = TransformersModel(directory)
    rows, past = model(ids)
    with dskv.connect(endpoint) as client:
        own = client.forward(ids, logits="all")
        imported = client.import_cache(past, ids)
        exported = own.cache.export()
        found = {
            "dskv on its own": client.forward(more, prefix=own.cache, logits="all").logits,
            "dskv on transformers'": client.forward(more, prefix=imported, logits="all").logits,
            "transformers on dskv's": model(more, to_dynamic_cache(exported))[0],
        }
    wanted = model(more, past)[0]
    shapes = [list(tensor.shape) for layer in past for tensor in layer]
    return {
        "shapes": shapes == [list(array.shape) for layer in exported for array in layer],
        "kv": max(float(np.abs(x - y.numpy()).max()) for a, b in zip(exported, past) for x, y in zip(a, b)),
        "rows": float(np.abs(rows - own.logits).max()),
        **{name: float(np.abs(row - wanted).max()) for name, row in found.items()},
    }


if __name__ == "__main__":
    print(json.dumps({"report": report, "exchange": exchange}[sys.argv[1]](*sys.argv[2:])))
