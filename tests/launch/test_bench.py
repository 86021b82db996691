"""dskv-bench: what it prints and writes is complete and coherent. No time is judged here."""
import json
import subprocess

import pytest
from support.daemon import BIN, MODELS, default_ranks

FIELDS = {"name", "tokens", "iterations", "median_s", "best_s", "floor_s", "bytes", "flops"}


def bench(*options, ranks=1):
    command = [str(BIN / "dskv-bench"), *map(str, options)]
    if ranks > 1:
        command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", str(ranks), *command]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def test_measures_the_four_steps(tmp_path):
    ranks, path = default_ranks(), tmp_path / "bench.json"
    result = bench("--model", MODELS / "atlas-llama", "--context", 64, "--prefill", 40, "--iterations", 2,
                   "--threads", 1, "--json", path, ranks=ranks)
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(path.read_text())
    assert (report["ranks"], report["threads"], report["context"], report["prefill"]) == (ranks, 1, 64, 40)
    assert all(rate > 0 for rate in report["machine"].values())
    assert [(step["name"], step["tokens"]) for step in report["steps"]] == [
        ("decode", 1), ("verify 8 tokens", 8), ("decode 8 sequences", 8), ("prefill", 40)]
    for step in report["steps"]:
        assert set(step) == FIELDS and 0 < step["best_s"] <= step["median_s"] and step["floor_s"] > 0
        assert step["bytes"] > report["weight_bytes"] and f"{step['name']} " in result.stdout
    decode, verify, batch, _ = report["steps"]
    kv = decode["bytes"] - report["weight_bytes"]  # of 65 tokens
    assert verify["bytes"] - report["weight_bytes"] == pytest.approx(kv / 65 * 72)
    assert batch["bytes"] - report["weight_bytes"] == pytest.approx(kv * 8)
    assert batch["flops"] == pytest.approx(decode["flops"] * 8)


@pytest.mark.skipif(default_ranks() != 1, reason="the command line is the same at every number of ranks")
@pytest.mark.parametrize("options, words", [
    (["--shape", "llama-9t"], "llama-135m"),
    (["--iterations", "0"], "1 .. 100000"),
    (["--dtype", "f8"], "bf16"),
    (["--threds", "2"], "--threds"),
    (["--json"], "needs a value"),
])
def test_refuses_wrong_options_in_one_sentence(options, words):
    result = bench(*options)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("dskv-bench: ") and words in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.skipif(default_ranks() != 1, reason="the command line is the same at every number of ranks")
def test_help_lists_every_option():
    result = bench("--help")
    assert result.returncode == 0
    for option in ("--model", "--shape", "--dtype", "--kv-dtype", "--threads", "--context", "--prefill", "--iterations",
                   "--json"):
        assert f"{option} " in result.stdout


@pytest.mark.skipif(default_ranks() != 1, reason="a start that fails is the same at every number of ranks")
def test_a_wrong_directory_is_named():
    result = bench("--model", "/nowhere/at/all")
    assert result.returncode == 3 and "/nowhere/at/all" in result.stderr
