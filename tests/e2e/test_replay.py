"""Plans are recorded, printed and replayed without a client."""
import random
import re

import pytest

import dskv
from support.daemon import Daemon, replay

BLOCKS = ["--block-tokens", "16"]
PROMPT = [352, 303, 275, 1646, 26]


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """A file of plans with every kind of row, copied blocks and drawn tokens, and how many steps they were."""
    path = tmp_path_factory.mktemp("trace") / "plans"
    with Daemon(ranks=1, options=[*BLOCKS, "--trace-plans", path]) as daemon:
        with dskv.connect(daemon.endpoint) as client:
            a = client.forward(PROMPT * 8, logits="all", argmax=True, topk=3, score=True)
            client.forward([5, 6], prefix=a.cache[:20], logits="last")
            client.generate([1705], prefix=a.cache, max_tokens=5, temperature=1.0, seed=7, ignore_eos=True)
            steps = client.stats()["steps"]
    return path, steps


def lines_of(result):
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


@pytest.mark.parametrize("ranks", [1, 2])
def test_two_replays_are_the_same(trace, ranks):
    path, steps = trace
    first = lines_of(replay("atlas-gpt2", path, *BLOCKS, ranks=ranks))
    assert len(first) == steps
    assert first[0].startswith("step 1 tokens 40 rows 40 results ")
    assert lines_of(replay("atlas-gpt2", path, *BLOCKS, "--max-batch-tokens", "600", ranks=ranks)) == first


def test_another_model_gives_other_results(trace):
    path, _ = trace
    other = replay("atlas-llama", path, *BLOCKS)
    assert lines_of(other)[0] != lines_of(replay("atlas-gpt2", path, *BLOCKS))[0]


def test_debug_prints_the_plans(trace):
    path, steps = trace
    result = replay("atlas-gpt2", path, *BLOCKS, "--log-level", "debug")
    assert result.returncode == 0
    assert sum(line.startswith("plan of step ") for line in result.stdout.splitlines()) == steps


def test_plans_that_do_not_fit(trace):
    path, _ = trace
    for options in (["--block-tokens", "64"],
                    ["--block-tokens", "16", "--max-batch-tokens", "8", "--max-sequences", "1"],
                    ["--block-tokens", "16", "--max-model-len", "16"]):
        result = replay("atlas-gpt2", path, *options)
        assert result.returncode == 2 and re.search(r"dskvd: --replay: plan \d: ", result.stderr), result.stderr


def test_what_was_computed_is_told_when_a_later_plan_fails(trace, tmp_path):
    path, steps = trace
    (tmp_path / "cut").write_bytes(path.read_bytes()[:-1])
    result = replay("atlas-gpt2", tmp_path / "cut", *BLOCKS)
    assert result.returncode == 2 and f"plan {steps}: " in result.stderr
    assert result.stdout.splitlines() == lines_of(replay("atlas-gpt2", path, *BLOCKS))[:-1]


def test_results_that_cannot_be_written_are_an_error(trace):
    path, _ = trace
    with open("/dev/full", "w") as full:
        result = replay("atlas-gpt2", path, *BLOCKS, stdout=full)
    assert result.returncode == 2 and "cannot be written" in result.stderr


def test_damaged_traces_are_refused_or_run(trace, tmp_path):
    path, _ = trace
    whole, seed = path.read_bytes(), random.randrange(1 << 30)
    chance = random.Random(seed)
    for n in range(12):
        data = bytearray(whole)
        if n % 3 == 0:
            del data[chance.randrange(len(data)):]
        else:
            for _ in range(1 + n):
                data[chance.randrange(2048)] = chance.randrange(256)
        (tmp_path / "damaged").write_bytes(data)
        result = replay("atlas-gpt2", tmp_path / "damaged", *BLOCKS)
        assert result.returncode in (0, 2), f"seed {seed}, trace {n}: {result.returncode}\n{result.stderr}"
