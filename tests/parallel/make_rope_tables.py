#!/usr/bin/env python3
"""Writes rope_tables.h: rotary frequencies and factors as transformers 4.45.2 computes them, beside the config.json of each.

    make_rope_tables.py        with transformers 4.45.2 and torch

A table is that of a sequence of `served` tokens.  Two things are as later versions have them, and by 4.45's own code all the
same: yarn's original_max_position_embeddings is handed to it as max_position_embeddings, which is what it takes for it; and
longrope, whose short factors its Llama never takes, is that of its Phi-3.
"""
import json
import pathlib

import torch
import transformers
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.phi3.modeling_phi3 import Phi3LongRoPEScaledRotaryEmbedding

SHORT = [1.0, 1.0, 1.05, 1.1, 1.2, 1.3, 1.5, 1.7]
LONG = [1.0, 1.2, 1.7, 2.6, 4.1, 5.9, 7.4, 8]

# head size, theta, max_position_embeddings, members beside rope_scaling, rope_scaling, served
CASES = [
    (16, 500000.0, 512, {}, dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                 original_max_position_embeddings=64), 512),
    (16, 10000.0, 128, {}, dict(type="linear", factor=4.0), 128),
    (16, 10000.0, 64, {}, dict(rope_type="yarn", factor=4.0), 64),
    (20, 1000000.0, 32768, {}, dict(type="yarn", factor=4, original_max_position_embeddings=4096), 32768),
    (32, 10000.0, 2048, {}, dict(rope_type="yarn", factor=16.5, beta_fast=8.0, beta_slow=2, attention_factor=0.75), 2048),
    (16, 10000.0, 2, {}, dict(rope_type="yarn", factor=2.0), 2),  # a passage of no length
    (16, 10000.0, 1, {}, dict(rope_type="yarn", factor=2.0), 1),  # one that ends before it begins
    (16, 100.0, 1024, {}, dict(rope_type="yarn", factor=2.0, beta_fast=1.0, beta_slow=1.0), 2048),  # one behind the head
    (16, 10000.0, 32, {}, dict(rope_type="dynamic", factor=4.0), 7),
    (16, 10000.0, 32, {}, dict(rope_type="dynamic", factor=4.0), 32),
    (16, 10000.0, 32, {}, dict(rope_type="dynamic", factor=4.0), 33),
    (16, 10000.0, 32, {}, dict(type="dynamic", factor=4.0), 128),
    (4, 500000.0, 2048, {}, dict(rope_type="dynamic", factor=1.5), 3000),
    (16, 10000.0, 256, {"original_max_position_embeddings": 32},
     dict(rope_type="longrope", short_factor=SHORT, long_factor=LONG), 32),
    (16, 10000.0, 256, {"original_max_position_embeddings": 32},
     dict(type="su", short_factor=SHORT, long_factor=LONG), 33),
    (16, 10000.0, 256, {}, dict(rope_type="longrope", short_factor=SHORT, long_factor=LONG, factor=8.0,
                                original_max_position_embeddings=32), 256),
]


def of_phi3(config, served):
    rotary = Phi3LongRoPEScaledRotaryEmbedding(config.head_dim, config)
    cosines, _ = rotary(torch.zeros(1), torch.zeros(1, 1, dtype=torch.int64), seq_len=served)
    return rotary.inv_freq, float(cosines[0, 0, 0])


def compute(head_dim, theta, context, beside, scaling, served):
    kind = scaling.get("rope_type") or scaling["type"]
    original = beside.get("original_max_position_embeddings") or scaling.get("original_max_position_embeddings")
    config = LlamaConfig(head_dim=head_dim, rope_theta=theta, max_position_embeddings=context)
    config.rope_scaling = scaling
    if kind in ("longrope", "su"):
        config.original_max_position_embeddings = original
        return of_phi3(config, served)
    if kind == "yarn" and original:
        config.max_position_embeddings = original
    return ROPE_INIT_FUNCTIONS[kind](config, None, **({"seq_len": served} if kind == "dynamic" else {}))


def entry(case):
    head_dim, theta, context, beside, scaling, served = case
    frequencies, factor = compute(*case)
    members = {"head_dim": head_dim, "rope_theta": theta, "max_position_embeddings": context, **beside, "rope_scaling": scaling}
    text = json.dumps(members)[1:-1].replace('"', '\\"')
    return (f'    {{"{text}",\n     {served}, {len(frequencies)}, {factor!r},\n'
            f"     {{{', '.join(repr(value) for value in frequencies.tolist())}}}}},\n")


if __name__ == "__main__":
    assert transformers.__version__ == "4.45.2"
    (pathlib.Path(__file__).parent / "rope_tables.h").write_text(
        "/* Made by make_rope_tables.py. */\n/* clang-format off */\n"
        "static const struct {\n    const char *members; /* of config.json */\n    int max_model_len, n_pairs;\n"
        "    double factor, frequencies[16];\n} rope_tables[] = {\n" + "".join(entry(case) for case in CASES) + "};\n")
