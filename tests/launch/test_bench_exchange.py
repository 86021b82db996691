"""dskv-bench-exchange: what it prints and writes is complete, and sums have the same bits at every size. No time is judged
here."""
import json
import subprocess

import pytest
from support.daemon import BIN, default_ranks


def bench(*options, ranks=1):
    command = [str(BIN / "dskv-bench-exchange"), *map(str, options)]
    if ranks > 1:
        command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", str(ranks), *command]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize("comm", [None, "staged"])
def test_measures_every_size(tmp_path, comm):
    ranks, path = default_ranks(), tmp_path / "exchange.json"
    if comm and ranks == 1:
        pytest.skip("there is one way for one rank")
    chosen = ["--comm", comm] if comm else []
    result = bench("--device", "cpu", "--width", 4096, "--json", path, *chosen, ranks=ranks)
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(path.read_text())
    assert (report["ranks"], report["dtype"], report["width"]) == (ranks, "f32", 4096)
    assert report["comm"] == comm or report["comm"] == ("shm" if ranks > 1 else "self")
    assert [point["bytes"] for point in report["points"]] == [1 << shift for shift in range(14, 23)]
    for point in report["points"]:
        assert point["rows"] * 4096 * 4 == point["bytes"] and point["n_differing"] == 0
        assert point["add_us"] > 0 and point["then_us"] > 0 and (point["sum_us"] > 0 or ranks == 1)
        assert point["nccl_us"] == point["window_us"] == 0


@pytest.mark.skipif(default_ranks() != 1, reason="the command line is the same at every number of ranks")
@pytest.mark.parametrize("options, words", [
    (["--width", "100"], "power of two"),
    (["--width", "64x"], "power of two"),
    (["--json", "/nowhere/figures"], "cannot be written"),
    (["--dtype", "f8"], "bf16"),
    (["--comm", "staged", "--device", "cpu"], "staged"),
    (["--widht", "64"], "--widht"),
    (["--json"], "needs a value"),
])
def test_refuses_wrong_options_in_one_sentence(options, words):
    result = bench(*options)
    assert result.returncode != 0 and result.stdout == ""
    assert result.stderr.startswith("dskv-bench-exchange: ") and words in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.skipif(default_ranks() != 1, reason="the command line is the same at every number of ranks")
def test_help_lists_every_option():
    result = bench("--help")
    assert result.returncode == 0
    for option in ("--device", "--comm", "--share-gpu", "--dtype", "--width", "--json"):
        assert f"{option} " in result.stdout
