"""Starts: the ready line, and for each start that must fail one sentence and its exit code."""
import os
import pathlib
import shutil
import socket
import time

import pytest

import dskv
from support.daemon import MODELS, Daemon, environment_options, run

ATLAS = MODELS / "atlas-gpt2"
GOLDEN = pathlib.Path(__file__).parents[1] / "golden"


def refused(result, code, *words):
    """Exactly one line from dskvd, however many ranks; the code comes through mpirun; all words are in the sentence."""
    said = [line for line in result.stderr.splitlines() if line.startswith("dskvd: ")]
    assert len(said) == 1, result.stderr
    for word in words:
        assert str(word) in said[0]
    assert result.returncode == code
    assert "ready" not in result.stdout


@pytest.fixture
def endpoint(tmp_path):
    return f"ipc://{tmp_path}/e"


@pytest.fixture
def copy(tmp_path):
    """A copy of the model that a test may spoil."""
    return pathlib.Path(shutil.copytree(ATLAS, tmp_path / "model"))


# ---- commands that need no MPI ------------------------------------------------------------------------------------------

NO_MPIRUN = {"PATH": "/nonexistent"}


def test_help_and_version():
    text = run(["--help"], env=NO_MPIRUN)
    assert text.returncode == 0
    for option in ("model", "kv-cache-memory", "listen", "replay", "help"):
        assert f"--{option}" in text.stdout
    version = run(["--version"], env=NO_MPIRUN)
    assert (version.returncode, version.stdout) == (0, "dskvd 0.1.0\n")


def test_print_config():
    result = run(["--print-config", "--block-tokens=16", "--listen", "ipc:///tmp/a", "--listen", "tcp://127.0.0.1:*",
                  "--kv-cache-memory", "512M"], env=NO_MPIRUN)
    assert result.returncode == 0
    lines = result.stdout.splitlines()
    for line in ("block-tokens = 16", "listen = ipc:///tmp/a", "listen = tcp://127.0.0.1:*", "kv-cache-memory = 512M",
                 "threads = auto"):
        assert line in lines


def test_check_good_model():
    result = run(["--check", "--model", ATLAS], env=NO_MPIRUN)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("atlas-gpt2: gpt2, ") and "ranks: 1 to " in result.stdout
    assert "positions: 1024, learned\n" in result.stdout


@pytest.mark.parametrize(
    "model, served, positions",
    [
        ("llama-yarn-f32", None, "256, rotary, stretched by 4 (yarn)"),
        ("llama-dynamic-f32", 100, "100, rotary, stretched by 4 (dynamic), for all as in sequences of 100 tokens"),
        ("llama-longrope-f32", 20, "20, rotary, stretched by 8 (longrope), for all as in sequences of 32 tokens"),
    ],
)
def test_check_says_how_positions_are_stretched(model, served, positions):
    options = ["--max-model-len", str(served)] if served else []
    result = run(["--check", "--model", GOLDEN / model, *options], env=NO_MPIRUN)
    assert result.returncode == 0, result.stderr
    assert f"positions: {positions}\n" in result.stdout


def test_check_length():
    refused(run(["--check", "--model", ATLAS, "--max-model-len", "1025"], env=NO_MPIRUN), 2, "1025", "context is 1024")


def test_check_truncated_weights(copy):
    weights = copy / "model.safetensors"
    with open(weights, "r+b") as file:
        file.truncate(weights.stat().st_size - 1)
    refused(run(["--check", "--model", copy], env=NO_MPIRUN), 3, "model.safetensors")


def test_commands_print_once_under_mpirun():
    assert run(["--version"], ranks=2).stdout == "dskvd 0.1.0\n"


# ---- starts that must fail ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
def test_unknown_option(ranks):
    refused(run(["--modle", ATLAS], ranks=ranks), 2, "--modle", "did you mean --model?")


@pytest.mark.parametrize("ranks", [1, 2])
def test_wrong_directory(ranks, endpoint):
    refused(run(["--model", "/nowhere/at-all", "--listen", endpoint], ranks=ranks), 3, "/nowhere/at-all", "local directory")


def test_a_name_or_a_file_is_no_directory():
    for name in ("meta-llama/Llama-3.1-8B", __file__):
        refused(run(["--check", "--model", name], env=NO_MPIRUN), 3, name[-20:], "a local directory, none is downloaded")


def test_unreadable_file(copy, endpoint):
    config = copy / "config.json"
    if os.geteuid() == 0:  # root reads everything, but not a directory
        config.unlink()
        config.mkdir()
    else:
        config.chmod(0)
    refused(run(["--model", copy, "--listen", endpoint]), 3, "config.json")


def test_missing_weights(copy, endpoint):
    (copy / "model.safetensors").unlink()
    refused(run(["--model", copy, "--listen", endpoint], ranks=2), 3, "safetensors")


def test_too_many_ranks(endpoint):
    heads = 8
    refused(run(["--model", ATLAS, "--listen", endpoint], ranks=heads + 1), 2, heads + 1, f"1 to {heads}")


def test_other_number_of_ranks(endpoint):
    refused(run(["--model", ATLAS, "--listen", endpoint, "--tensor-parallel", 3], ranks=2), 2, "3", "2")


def test_more_rows_than_a_step_has(endpoint):
    options = ["--max-batch-tokens", 65000, "--max-sequences", 4096]
    refused(run(["--model", ATLAS, "--listen", endpoint, *options]), 2, *options, "together 65535 at most")


@pytest.mark.parametrize("ranks", [1, 2])
def test_port_taken(ranks):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        where = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        refused(run(["--model", ATLAS, "--listen", where], ranks=ranks), 4, where)


def test_public_address():
    refused(run(["--model", ATLAS, "--listen", "tcp://0.0.0.0:*"]), 2, "--insecure")


@pytest.mark.parametrize("size", ["1K", "900T"])
def test_no_memory(size, endpoint):
    command = ["--model", ATLAS, "--listen", endpoint, *environment_options(), "--kv-cache-memory", size]
    refused(run(command, ranks=2), 5)


def test_replay_of_nothing(tmp_path):
    refused(run(["--model", ATLAS, "--replay", tmp_path / "none"], ranks=2), 2, "none")
    refused(run(["--model", ATLAS, "--replay", tmp_path]), 2, "plan 1", "cannot be read: Is a directory")


# ---- starts that succeed ------------------------------------------------------------------------------------------------


def test_info_soon_after_the_start():
    begin = time.monotonic()
    with Daemon(ranks=2) as daemon:
        with dskv.connect(daemon.endpoint) as client:
            info = client.info()
        took = time.monotonic() - begin
        assert info["n_ranks"] == 2
        assert "(atlas-gpt2, 2 ranks)" in daemon.log()
    assert took < 3


def test_real_port_is_told():
    with Daemon(ranks=1, listen="tcp://127.0.0.1:*") as daemon:
        assert daemon.endpoint.startswith("tcp://127.0.0.1:") and daemon.endpoint[-1].isdigit()
        with dskv.connect(daemon.endpoint) as client:
            client.ping()


def test_several_endpoints(tmp_path):
    second = f"ipc://{tmp_path}/second"
    with Daemon(ranks=1, options=["--listen", second]) as daemon:
        assert second in daemon.log()
        for endpoint in (daemon.endpoint, second):
            with dskv.connect(endpoint) as client:
                client.ping()
