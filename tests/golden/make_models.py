#!/usr/bin/env python3
"""Makes the tiny random models of this folder, each with its oracle from transformers in float32 on the CPU.

    make_models.py [NAME ...]        with transformers 4.34, torch, safetensors; those that name another version with that

Weights are seeded and large (standard deviation 0.15), so that logits spread and an error shows.  They are rounded to the
dtype of the files before the oracle is computed.  What transformers 4.34 does not know (a bias in the MLP, a head size that
is not width / heads) is put into its modules by hand; config.json then says it as later versions write it.
"""
import json
import pathlib
import shutil
import sys

import torch
import transformers
from safetensors.torch import save_file
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

HERE = pathlib.Path(__file__).parent
PROMPT_LENGTHS = (1, 2, 3, 7, 17, 33, 40)
KV_PROMPT = 3  # the prompt whose keys and values are stored
GREEDY = 16

MODELS = {
    # 6 query over 2 KV heads, head size 20, a vocabulary and an MLP that no number of ranks divides; tied, and the head is in the
    # file all the same; several end tokens, one of which is met.
    "llama-6x2-f32": dict(
        family="llama", seed=1, dtype="float32", head_in_file=True, meet_end_token=True,
        config=dict(hidden_size=120, num_attention_heads=6, num_key_value_heads=2, num_hidden_layers=2,
                    intermediate_size=100, vocab_size=257, tie_word_embeddings=True)),
    # 14 over 2: uneven at 3 and 4 ranks; two files with an index; untied.
    "llama-14x2-bf16": dict(
        family="llama", seed=2, dtype="bfloat16", n_files=2,
        config=dict(hidden_size=112, num_attention_heads=14, num_key_value_heads=2, num_hidden_layers=2,
                    intermediate_size=150, vocab_size=321)),
    # One KV head for all; biases at q, k, v and o; fewer MLP and vocabulary units than ranks.
    "llama-mqa-f16": dict(
        family="llama", seed=3, dtype="float16",
        config=dict(hidden_size=128, num_attention_heads=8, num_key_value_heads=1, num_hidden_layers=2,
                    intermediate_size=60, vocab_size=130, attention_bias=True, rms_norm_eps=1e-5)),
    # 8 over 4, heads wider than the model, biases in the MLP, gelu, another theta, config.json as transformers 5 writes it.
    "llama-8x4-f32": dict(
        family="llama", seed=4, dtype="float32", head_dim=24, mlp_bias=True, version=5, rope_theta=500000.0,
        config=dict(hidden_size=96, num_attention_heads=8, num_key_value_heads=4, num_hidden_layers=2,
                    intermediate_size=130, vocab_size=200, hidden_act="gelu_pytorch_tanh", tie_word_embeddings=True)),
    # Rotary frequencies as Llama 3.1 stretches them: of head size 16, some kept, some in the passage, some divided.
    "llama-stretched-f32": dict(
        family="llama", seed=8, dtype="float32", rope_theta=500000.0, transformers="4.45.2",
        config=dict(hidden_size=96, num_attention_heads=6, num_key_value_heads=3, num_hidden_layers=2,
                    intermediate_size=100, vocab_size=201,
                    rope_scaling=dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                      original_max_position_embeddings=64))),
    # Three more ways to stretch: pairs kept, in the passage and divided; theta of four times the context, which is the longest
    # sequence that is served where nothing else is said; a number per pair, with the context before it beside the scaling.
    "llama-yarn-f32": dict(
        family="llama", seed=11, dtype="float32", transformers="4.45.2",
        config=dict(hidden_size=96, num_attention_heads=6, num_key_value_heads=3, num_hidden_layers=2,
                    intermediate_size=100, vocab_size=201, max_position_embeddings=64,
                    rope_scaling=dict(rope_type="yarn", factor=4.0))),
    "llama-dynamic-f32": dict(
        family="llama", seed=12, dtype="float32", transformers="4.45.2", served=128,
        config=dict(hidden_size=96, num_attention_heads=6, num_key_value_heads=3, num_hidden_layers=2,
                    intermediate_size=100, vocab_size=201, max_position_embeddings=32,
                    rope_scaling=dict(rope_type="dynamic", factor=4.0))),
    "llama-longrope-f32": dict(
        family="llama", seed=13, dtype="float32", transformers="4.45.2", served=256,
        config=dict(hidden_size=96, num_attention_heads=6, num_key_value_heads=3, num_hidden_layers=2,
                    intermediate_size=100, vocab_size=201, max_position_embeddings=256,
                    original_max_position_embeddings=32,
                    rope_scaling=dict(rope_type="longrope", short_factor=[1.0, 1.0, 1.05, 1.1, 1.2, 1.3, 1.5, 1.7],
                                      long_factor=[1.0, 1.2, 1.7, 2.6, 4.1, 5.9, 7.4, 8.0]))),
    # A window as long as the longest prompt and its continuation; heads wider than the model.
    "mistral-6x2-f16": dict(
        family="mistral", seed=9, dtype="float16", transformers="4.45.2",
        config=dict(hidden_size=90, num_attention_heads=6, num_key_value_heads=2, head_dim=20, num_hidden_layers=2,
                    intermediate_size=110, vocab_size=211, sliding_window=56, rms_norm_eps=1e-5)),
    # Biases at q, k and v, and a window that is not used.
    "qwen2-8x2-bf16": dict(
        family="qwen2", seed=10, dtype="bfloat16", transformers="4.45.2", rope_theta=1000000.0, sliding_window=8,
        config=dict(hidden_size=96, num_attention_heads=8, num_key_value_heads=2, num_hidden_layers=2,
                    intermediate_size=120, vocab_size=205, use_sliding_window=False, tie_word_embeddings=True)),
    # Odd sizes, the exact gelu, names without the prefix, and the mask buffers that old files carry.
    "gpt2-odd-f32": dict(
        family="gpt2", seed=5, dtype="float32", bare_names=True, buffers=True,
        config=dict(n_embd=60, n_head=5, n_layer=2, n_inner=100, vocab_size=259, n_positions=128,
                    activation_function="gelu")),
    # Attention scaled by the layer's number; an untied head.
    "gpt2-scaled-bf16": dict(
        family="gpt2", seed=6, dtype="bfloat16",
        config=dict(n_embd=96, n_head=4, n_layer=3, vocab_size=300, n_positions=160,
                    scale_attn_by_inverse_layer_idx=True, tie_word_embeddings=False)),
}


def widen_heads(model, head_dim):
    """Gives a Llama heads of another size than width / heads."""
    for layer in model.model.layers:
        attention = layer.self_attn
        width, heads, kv_heads = attention.hidden_size, attention.num_heads, attention.num_key_value_heads
        attention.head_dim = head_dim
        attention.hidden_size = heads * head_dim  # of the reshape before o_proj
        attention.q_proj = nn.Linear(width, heads * head_dim, bias=False)
        attention.k_proj = nn.Linear(width, kv_heads * head_dim, bias=False)
        attention.v_proj = nn.Linear(width, kv_heads * head_dim, bias=False)
        attention.o_proj = nn.Linear(heads * head_dim, width, bias=False)
        attention._init_rope()


def add_mlp_biases(model):
    for layer in model.model.layers:
        for name in ("gate_proj", "up_proj", "down_proj"):
            old = getattr(layer.mlp, name)
            setattr(layer.mlp, name, nn.Linear(old.in_features, old.out_features, bias=True))


def fix_rope(rotary, length):
    """Rotary frequencies as of a sequence of this length, whatever the length of a call."""
    rotary.inv_freq, rotary.attention_scaling = rotary.rope_init_fn(rotary.config, None, seq_len=length)
    rotary.rope_type = "fixed"


def build(spec):
    torch.manual_seed(spec["seed"])
    common = dict(bos_token_id=0, eos_token_id=2, pad_token_id=None, torch_dtype=spec["dtype"])
    if spec["family"] != "gpt2":
        name = spec["family"].title()
        config = getattr(transformers, f"{name}Config")(
            **common, **{"max_position_embeddings": 512, "rope_theta": spec.get("rope_theta", 10000.0)} | spec["config"])
        model = getattr(transformers, f"{name}ForCausalLM")(config)
        if "head_dim" in spec:
            widen_heads(model, spec["head_dim"])
        if spec.get("mlp_bias"):
            add_mlp_biases(model)
        if "served" in spec:
            fix_rope(model.model.rotary_emb, spec["served"])
    else:
        model = GPT2LMHeadModel(GPT2Config(**common, **spec["config"]))
    dtype = getattr(torch, spec["dtype"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = parameter.dim() == 1 and name.endswith("weight")
            value = 1 + 0.1 * torch.randn_like(parameter) if is_norm else 0.15 * torch.randn_like(parameter)
            parameter.copy_(value.to(dtype).float())
    model.tie_weights()
    return model.float().eval()


def gap(row):
    best = row.topk(2).values
    return round(float(best[0] - best[1]), 5)


@torch.inference_mode()
def continue_greedily(model, ids, end_tokens):
    out = model(torch.tensor([ids]), use_cache=True)
    row, past, greedy, gaps = out.logits[0, -1], out.past_key_values, [], []
    while True:
        greedy.append(int(row.argmax()))
        gaps.append(gap(row))
        if len(greedy) == GREEDY or greedy[-1] in end_tokens:
            return greedy, gaps
        out = model(torch.tensor([[greedy[-1]]]), past_key_values=past, use_cache=True)
        row, past = out.logits[0, -1], out.past_key_values


def floats(tensor):
    return [round(float(value), 6) for value in tensor.flatten()]


@torch.inference_mode()
def oracle(model, end_tokens):
    vocab = model.config.vocab_size
    generator = torch.Generator().manual_seed(7)
    rows = []
    for index, length in enumerate(PROMPT_LENGTHS):
        ids = torch.randint(0, vocab, (length,), generator=generator).tolist()
        out = model(torch.tensor([ids]), use_cache=True)
        greedy, greedy_gaps = continue_greedily(model, ids, end_tokens)
        row = {"input_ids": ids, "argmax": out.logits[0].argmax(-1).tolist(), "gaps": [gap(r) for r in out.logits[0]],
               "last_logits": floats(out.logits[0, -1]), "greedy": greedy, "greedy_gaps": greedy_gaps,
               "min_gap": min(greedy_gaps[1:], default=None)}
        if index == KV_PROMPT:
            row["kv"] = {str(layer): {"k": floats(out.past_key_values[layer][0]), "v": floats(out.past_key_values[layer][1])}
                         for layer in (0, model.config.num_hidden_layers - 1)}
        rows.append(row)
    return rows


def write_config(directory, model, spec, end_tokens):
    config = json.loads(model.config.to_json_string())
    if spec.get("version") == 5:
        config["dtype"] = config.pop("torch_dtype")
        config["rope_parameters"] = {"rope_theta": config.pop("rope_theta"), "rope_type": "default"}
        config.pop("rope_scaling", None)
    for key in ("head_dim", "mlp_bias", "sliding_window"):
        if key in spec:
            config[key] = spec[key]
    config["transformers_version"] = "5.17.0" if spec.get("version") == 5 else spec.get("transformers", "4.34.0")
    config["architectures"] = [type(model).__name__]
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    if len(end_tokens) > 1:
        generation = {"bos_token_id": 0, "eos_token_id": end_tokens}
        (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def write_weights(directory, model, spec):
    dtype = getattr(torch, spec["dtype"])
    tensors = {name: value.to(dtype).clone() for name, value in model.named_parameters()}
    if model.config.tie_word_embeddings and spec.get("head_in_file"):
        tensors["lm_head.weight"] = model.lm_head.weight.data.to(dtype).clone()
    if spec.get("bare_names"):
        tensors = {name.removeprefix("transformer."): value for name, value in tensors.items()}
    if spec.get("buffers"):
        n = model.config.n_positions
        for layer in range(model.config.n_layer):
            tensors[f"h.{layer}.attn.bias"] = torch.ones(n, n, dtype=torch.bool).tril().view(1, 1, n, n)
            tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-10000.0)
    n_files = spec.get("n_files", 1)
    if n_files == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(tensors)
    weight_map = {}
    for index in range(n_files):
        file = f"model-{index + 1:05}-of-{n_files:05}.safetensors"
        part = names[len(names) * index // n_files:len(names) * (index + 1) // n_files]
        save_file({name: tensors[name] for name in part}, directory / file, metadata={"format": "pt"})
        weight_map.update((name, file) for name in part)
    total = sum(value.numel() * value.element_size() for value in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def make(name, spec):
    directory = HERE / name
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    model = build(spec)
    end_tokens = [2]
    if spec.get("meet_end_token"):  # the fifth token of the second prompt's continuation becomes an end token, too
        end_tokens.append(oracle(model, [])[1]["greedy"][4])
    write_config(directory, model, spec, end_tokens)
    write_weights(directory, model, spec)
    rows = oracle(model, end_tokens)
    (directory / "oracle.json").write_text(json.dumps(rows) + "\n")
    spread = max(abs(value) for row in rows for value in row["last_logits"])
    print(f"{name}: largest logit {spread:.2f}, smallest gap {min(min(row['gaps']) for row in rows)}, "
          f"{sum(file.stat().st_size for file in directory.iterdir()) / 1e3:.0f} kB")


if __name__ == "__main__":
    for chosen in sys.argv[1:] or [name for name in MODELS if "transformers" not in MODELS[name]]:
        make(chosen, MODELS[chosen])
