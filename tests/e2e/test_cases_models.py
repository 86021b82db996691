"""Failures that users of other systems reported, each as a test named after the report; on models of other shapes."""

import json
import shutil

import dskv
import numpy as np
import pytest
from exact import Cold, logit_tolerance, rounded, same, tokens
from models import (
    change_json,
    constant_rows,
    copy_of,
    read_safetensors,
    rewrite,
    write_safetensors,
)
from support.daemon import MODELS, SOURCE, Daemon, default_ranks, run

GOLDEN = SOURCE / "tests" / "golden"
RANKS = default_ranks()
HEADS = {"llama-mqa-f16": 1, "llama-14x2-bf16": 2, "llama-6x2-f32": 2, "llama-8x4-f32": 4}


def oracle_rows(client, directory):
    """Compares the last rows with transformers' own, and an extension with the cold run."""
    for entry in json.loads((directory / "oracle.json").read_text()):
        ids = entry["input_ids"]
        cold = Cold(client, ids, kv=False)
        wanted = np.array(entry["last_logits"], np.float32)
        assert np.abs(cold.rows[-1] - wanted).max() <= logit_tolerance(client.info(), wanted)
        if len(ids) > 2:
            prefix = cold.cache[: len(ids) - 2]
            same(client.forward(ids[-2:], prefix=prefix, logits="all").logits, cold.rows[-2:], f"{len(ids)} tokens")


@pytest.mark.parametrize("name", HEADS)
def test_llama_cpp_24015_vllm_2652_52535_kv_heads_over_any_number_of_ranks(name):
    """1, 2 and 4 KV heads (8: the bundled GPT-2), 14 query heads over 4 ranks: replicated or unevenly split."""
    with Daemon(GOLDEN / name) as daemon, dskv.connect(daemon.endpoint) as client:
        assert client.info().n_kv_heads == HEADS[name] and client.info().n_ranks == RANKS
        oracle_rows(client, GOLDEN / name)


@pytest.mark.skipif(RANKS != 4, reason="once is enough")
def test_vllm_2652_52535_more_ranks_than_query_heads_are_refused():
    done = run(["--model", GOLDEN / "gpt2-scaled-bf16", "--listen", "ipc:///tmp/dskv-never"], ranks=5)
    assert done.returncode == 2
    assert "1 to 4" in done.stderr or "1 .. 4" in done.stderr, done.stderr


@pytest.mark.parametrize("vocab", [50257, 32001])
def test_vllm_31474_tensorrt_llm_98_a_vocabulary_that_ranks_do_not_divide(tmp_path, vocab):
    """All logits are below zero, so that padding, which is zero, would win."""
    embedding = constant_rows(tmp_path / "model", vocab)
    with Daemon(tmp_path / "model") as daemon, dskv.connect(daemon.endpoint) as client:
        row = rounded(embedding, client.info().weight_dtype).sum(axis=1)
        assert (row < 0).all()
        assert client.info().vocab == vocab
        made = client.forward([1, vocab - 1, 2], logits="all", argmax=True, topk=5, score=True)
        assert made.logits.shape == (3, vocab)
        assert np.abs(made.logits - row).max() < 1e-3
        assert (made.argmax == made.logits.argmax(axis=1)).all()
        best = np.lexsort((np.arange(vocab), -made.logits[0]))[:5]  # ties by the lowest id
        assert (made.topk_ids == best).all()
        exact = row.astype(np.float64) - np.log(np.exp(row.astype(np.float64)).sum())
        assert np.abs(made.topk_logprobs - exact[best]).max() < 1e-3
        assert np.abs(made.scores[1:] - exact[[vocab - 1, 2]]).max() < 1e-3
        drawn = client.generate([1], max_tokens=20, temperature=1.0, seed=3, ignore_eos=True).tokens
        assert (drawn >= 0).all() and (drawn < vocab).all() and len(set(drawn)) > 10
        with pytest.raises(dskv.Error) as caught:
            client.forward([vocab])
        assert caught.value.code == "token_out_of_range"


def failed_start(directory, *words):
    """The start fails for its model, naming what is wrong in one sentence from rank 0."""
    done = run(["--model", directory, "--listen", f"ipc://{directory}/socket"], ranks=RANKS)
    assert done.returncode == 3, done.stderr
    said = [line for line in done.stderr.splitlines() if any(word in line for word in words)]
    assert len(said) == 1 and all(word in said[0] for word in words), done.stderr


SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def test_vllm_34859_sglang_32279_missing_truncated_and_stray_shards(tmp_path):
    source = GOLDEN / "llama-14x2-bf16"

    missing = copy_of(source, tmp_path / "missing")
    (missing / SHARDS[1]).unlink()
    failed_start(missing, SHARDS[1])

    truncated = copy_of(source, tmp_path / "truncated")
    rewrite(truncated / SHARDS[0], (source / SHARDS[0]).read_bytes()[:-2])
    failed_start(truncated, SHARDS[0])

    swapped = copy_of(source, tmp_path / "swapped")
    for name, other in zip(SHARDS, reversed(SHARDS)):
        rewrite(swapped / name, (source / other).read_bytes())
    failed_start(swapped, "model-0000")

    stray = copy_of(source, tmp_path / "stray")
    shutil.copy(source / SHARDS[0], stray / "model-00003-of-00003.safetensors")
    failed_start(stray, "model-00003-of-00003.safetensors")


def test_vllm_6758_transformers_38870_tied_embeddings(tmp_path):
    """Tied and absent, tied and present: the same rows.  Untied and absent: refused."""
    source = GOLDEN / "llama-6x2-f32"
    tensors = read_safetensors(source / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    rows = []
    for name, head in {"absent": {}, "present": {"lm_head.weight": tensors["model.embed_tokens.weight"]}}.items():
        directory = copy_of(source, tmp_path / name)
        write_safetensors(directory / "model.safetensors", {**tensors, **head})
        with Daemon(directory) as daemon, dskv.connect(daemon.endpoint) as client:
            oracle_rows(client, source)
            rows.append(client.forward([5, 6, 7], logits="all").logits)
    same(rows[1], rows[0], "with and without the head's own tensor")
    untied = copy_of(tmp_path / "absent", tmp_path / "untied")
    change_json(untied, "config.json", tie_word_embeddings=False)
    failed_start(untied, "lm_head.weight")


def test_vllm_4589_tgi_several_end_tokens(tmp_path):
    prompt = tokens(20, 1)
    with Daemon("atlas-gpt2") as daemon, dskv.connect(daemon.endpoint) as client:
        free = client.generate(prompt, max_tokens=12, ignore_eos=True)
    ends = [int(free.tokens[4]), int(free.tokens[9]), 2047]
    first = next(i for i, token in enumerate(free.tokens) if token in ends)
    directory = copy_of(MODELS / "atlas-gpt2", tmp_path / "model")
    change_json(directory, "generation_config.json", eos_token_id=ends)
    with Daemon(directory) as daemon, dskv.connect(daemon.endpoint) as client:
        assert sorted(client.info().end_tokens) == sorted(set(ends))
        made = client.generate(prompt, max_tokens=12)
        assert list(made.tokens) == list(free.tokens[: first + 1]) and made.finish_reason == "stop"
        assert list(client.generate(prompt, max_tokens=12, ignore_eos=True).tokens) == list(free.tokens)
        after = client.forward([*prompt, *free.tokens], argmax=True)  # forward never stops at one
        assert len(after.argmax) == len(prompt) + 12
        assert list(after.argmax[len(prompt) - 1 : -1]) == list(free.tokens)


def test_pegainfer_220_an_unknown_kind_of_rope_is_refused(tmp_path):
    directory = copy_of(MODELS / "atlas-llama", tmp_path / "model")
    change_json(directory, "config.json", rope_scaling={"rope_type": "spiral", "factor": 2.0}, rope_parameters=None)
    failed_start(directory, "spiral")


def rows_served(directory, served, ids):
    with Daemon(directory, options=["--max-model-len", served]) as daemon, dskv.connect(daemon.endpoint) as client:
        made = client.forward(ids, logits="all")
        return made.logits, made.cache.export(), client.info()


def test_gllm_269_what_is_served_decides_how_rope_is_stretched(tmp_path):
    """Sequences that fit the original context get plain (dynamic) or short (longrope) frequencies, for all their life."""
    ids = tokens(30, 1, vocab=201)
    plain = copy_of(GOLDEN / "llama-dynamic-f32", tmp_path / "plain")
    change_json(plain, "config.json", rope_scaling=None)
    short = copy_of(GOLDEN / "llama-longrope-f32", tmp_path / "short")
    scaling = json.loads((short / "config.json").read_text())["rope_scaling"]
    change_json(short, "config.json", rope_scaling={**scaling, "long_factor": scaling["short_factor"]})
    for name, other, served in (("llama-dynamic-f32", plain, 32), ("llama-longrope-f32", short, 256)):
        rows, kv, info = rows_served(GOLDEN / name, 32, ids)
        same(rows, rows_served(other, served, ids)[0], f"{name} served to 32")
        with Daemon(GOLDEN / name) as daemon, dskv.connect(daemon.endpoint) as client:
            assert client.info().limits.max_model_len > 32
            assert np.abs(client.forward(ids, logits="all").logits - rows).max() > 0.01
            assert client.info().numerics_id != info.numerics_id
            with pytest.raises(dskv.Error) as refused:  # its keys are rotated otherwise
                client.import_cache(kv, ids)
            assert refused.value.code == "wrong_model"
