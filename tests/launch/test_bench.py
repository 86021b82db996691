"""dskv-bench: what it prints and writes is complete and coherent. No time is judged here."""
import json
import subprocess

import pytest
from support.daemon import BIN, MODELS, default_ranks

FIELDS = {"name", "tokens", "iterations", "median_s", "best_s", "floor_s", "bytes", "flops", "idle_median_s", "idle_longest_s"}
ONE_RANK = pytest.mark.skipif(default_ranks() != 1, reason="the same at every number of ranks")


def bench(*options, ranks=1):
    command = [str(BIN / "dskv-bench"), *map(str, options)]
    if ranks > 1:
        command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", str(ranks), *command]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def test_measures_the_four_steps(tmp_path):
    ranks, path = default_ranks(), tmp_path / "bench.json"
    result = bench("--model", MODELS / "atlas-llama", "--device", "cpu", "--context", 64, "--prefill", 40,
                   "--iterations", 2, "--threads", 1, "--json", path, ranks=ranks)
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(path.read_text())
    assert (report["ranks"], report["threads"], report["context"], report["prefill"]) == (ranks, 1, 64, 40)
    assert all(rate > 0 for rate in report["machine"].values())
    assert [(step["name"], step["tokens"]) for step in report["steps"]] == [
        ("decode", 1), ("decode, chained", 1), ("verify 8 tokens", 8), ("decode 8 sequences", 8), ("prefill", 40)]
    for step in report["steps"]:
        assert set(step) == FIELDS and 0 < step["best_s"] <= step["median_s"] and step["floor_s"] > 0
        assert step["bytes"] > report["weight_bytes"] and f"{step['name']} " in result.stdout
    decode, chained, verify, batch, _ = report["steps"]
    assert chained["bytes"] == decode["bytes"] and chained["idle_median_s"] == 0  # it computes when it is asked to
    kv = decode["bytes"] - report["weight_bytes"]  # of 65 tokens
    assert verify["bytes"] - report["weight_bytes"] == pytest.approx(kv / 65 * 72)
    assert batch["bytes"] - report["weight_bytes"] == pytest.approx(kv * 8)
    assert batch["flops"] == pytest.approx(decode["flops"] * 8)
    assert report["any_order"] is False and report["operations"] == []


@ONE_RANK
@pytest.mark.parametrize("model, rotates", [("atlas-llama", True), ("atlas-gpt2", False)])
def test_measures_operations_by_themselves(tmp_path, model, rotates):
    path = tmp_path / "bench.json"
    result = bench("--operations", "--model", MODELS / model, "--device", "cpu", "--dtype", "f16", "--context", 64,
                   "--prefill", 70, "--batch", 8, "--iterations", 2, "--threads", 1, "--json", path)
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(path.read_text())
    assert report["steps"] == [] and report["weight_dtype"] == "f16" and report["kv_dtype"] == "f32"
    found = {}
    for one in report["operations"]:
        assert set(one) == {"name", "rows", "median_s", "floor_s", "bytes", "flops"}
        assert one["median_s"] > 0 and one["floor_s"] > 0 and one["bytes"] > 0
        assert f"\n{one['name']} " in result.stdout
        found.setdefault(one["name"], {})[one["rows"]] = one
    layer, few = [1, 8, 16, 32, 64, 70], [1, 8, 16, 32, 64]
    assert {name: list(rows) for name, rows in found.items()} == {
        "qkv": layer, "rotary, kv write": layer, "attention, one sequence": layer,
        "attention, a sequence a row": [1, 8], "o": layer, "residual, norm": layer, "up, activate": layer,
        "down": layer, "head": few, "select": few, "sample": few, "sample, top-k and top-p": few}
    config = json.loads((MODELS / model / "config.json").read_text())
    width = config.get("hidden_size") or config["n_embd"]
    vocab = config["vocab_size"]
    head = found["head"][8]
    assert head["flops"] == 2 * 8 * vocab * width
    assert head["bytes"] == 2 * vocab * width + 4 * 8 * (vocab + width)
    one, eight = (found["attention, a sequence a row"][rows] for rows in (1, 8))
    assert eight["bytes"] == 8 * one["bytes"] and one == found["attention, one sequence"][1] | {
        "name": one["name"], "median_s": one["median_s"]}
    writes = found["rotary, kv write"][1]["bytes"]
    kv = one["bytes"] - 8 * width  # queries in, heads out, f32; 65 tokens
    assert writes == pytest.approx(kv / 65 * 2) or rotates
    assert writes > kv / 65 * 2 or not rotates


@ONE_RANK
def test_any_order_is_for_gpus(tmp_path):
    result = bench("--any-order", "--device", "cpu", "--model", MODELS / "atlas-llama")
    assert result.returncode == 2 and "--any-order" in result.stderr and result.stdout == ""


@pytest.mark.skipif(default_ranks() != 2, reason="two ranks are needed")
def test_operations_are_one_ranks():
    result = bench("--operations", "--device", "cpu", "--model", MODELS / "atlas-llama", ranks=2)
    assert result.returncode == 2 and "one rank, not 2" in result.stderr and result.stdout == ""


@ONE_RANK
@pytest.mark.parametrize("options, words", [
    (["--shape", "llama-9t"], "llama-135m"),
    (["--iterations", "0"], "1 .. 100000"),
    (["--dtype", "f8"], "bf16"),
    (["--threds", "2"], "--threds"),
    (["--json"], "needs a value"),
    (["--any-order=1"], "takes no value"),
])
def test_refuses_wrong_options_in_one_sentence(options, words):
    result = bench(*options)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("dskv-bench: ") and words in result.stderr and result.stderr.count("\n") == 1


@ONE_RANK
def test_help_lists_every_option():
    result = bench("--help")
    assert result.returncode == 0
    for option in ("--model", "--shape", "--dtype", "--kv-dtype", "--threads", "--context", "--prefill", "--iterations",
                   "--operations", "--any-order", "--json"):
        assert f"{option} " in result.stdout


@ONE_RANK
def test_a_wrong_directory_is_named():
    result = bench("--model", "/nowhere/at/all")
    assert result.returncode == 3 and "/nowhere/at/all" in result.stderr
