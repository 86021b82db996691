"""Model directories that tests change: copies of bundled and golden ones, and safetensors files read and written."""

import json
import pathlib
import struct

import numpy as np

NUMPY = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


def copy_of(source, into):
    """A new directory with links to a model's files; a test replaces what it changes."""
    source, into = pathlib.Path(source), pathlib.Path(into)
    into.mkdir(parents=True)
    for path in source.iterdir():
        (into / path.name).symlink_to(path)
    return into


def rewrite(path, data):
    """Replaces a file, or the link that stands for it."""
    path.unlink(missing_ok=True)
    path.write_bytes(data)


def change_json(directory, name, **fields):
    path = directory / name
    content = json.loads(path.read_text()) if path.exists() else {}
    content.update(fields)
    rewrite(path, json.dumps(content).encode())


def read_safetensors(path):
    """{name: (dtype, array)}; bf16 as its 16 bits."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    header.pop("__metadata__", None)
    return {
        name: (
            entry["dtype"],
            np.frombuffer(body[slice(*entry["data_offsets"])], NUMPY[entry["dtype"]]).reshape(entry["shape"]),
        )
        for name, entry in header.items()
    }


def write_safetensors(path, tensors):
    header, body = {"__metadata__": {"format": "pt"}}, b""
    for name, (dtype, array) in tensors.items():
        data = np.ascontiguousarray(array, NUMPY[dtype]).tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    rewrite(path, struct.pack("<Q", len(text)) + text + body)


def constant_rows(directory, vocab, width=64, n_heads=4):
    """A GPT-2 whose every row of logits is the same, all of it below zero, so that zero padding would win.

    Its final norm puts out ones, so that logit n is the sum of the embedding's row n.  Returns the embedding, float32
    [vocab, width].
    """
    rng = np.random.default_rng(vocab)
    directory.mkdir()
    embedding = (-rng.uniform(0.001, 0.1, (vocab, width))).astype(np.float16)
    small = lambda *shape: rng.normal(0, 0.02, shape).astype(np.float16)
    ones, zeros = lambda n: np.ones(n, np.float16), lambda n: np.zeros(n, np.float16)
    h = "transformer.h.0."
    tensors = {
        "transformer.wte.weight": embedding, "transformer.wpe.weight": small(64, width),
        h + "ln_1.weight": ones(width), h + "ln_1.bias": zeros(width),
        h + "attn.c_attn.weight": small(width, 3 * width), h + "attn.c_attn.bias": zeros(3 * width),
        h + "attn.c_proj.weight": small(width, width), h + "attn.c_proj.bias": zeros(width),
        h + "ln_2.weight": ones(width), h + "ln_2.bias": zeros(width),
        h + "mlp.c_fc.weight": small(width, 4 * width), h + "mlp.c_fc.bias": zeros(4 * width),
        h + "mlp.c_proj.weight": small(4 * width, width), h + "mlp.c_proj.bias": zeros(width),
        "transformer.ln_f.weight": zeros(width), "transformer.ln_f.bias": ones(width),
    }  # fmt: skip
    write_safetensors(directory / "model.safetensors", {name: ("F16", array) for name, array in tensors.items()})
    config = dict(
        model_type="gpt2", architectures=["GPT2LMHeadModel"], n_embd=width, n_head=n_heads, n_layer=1, n_positions=64,
        vocab_size=vocab, activation_function="gelu_new", layer_norm_epsilon=1e-5, eos_token_id=0,
        torch_dtype="float16",
    )  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    return embedding.astype(np.float32)
