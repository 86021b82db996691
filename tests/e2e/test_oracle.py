"""Results against transformers' own in float32: of the bundled models, and of the tiny odd ones in tests/golden."""

import json
import pathlib

import dskv
import numpy as np
import pytest
from exact import STEP, logit_tolerance, same
from support.daemon import MODELS, SOURCE, Daemon, default_ranks

RANKS = default_ranks()
BUNDLED = ["atlas-gpt2", "atlas-llama"]


def n_heads(directory):
    config = json.loads((directory / "config.json").read_text())
    return config.get("num_attention_heads") or config["n_head"]


def golden():
    directories = sorted(path.parent for path in (SOURCE / "tests" / "golden").glob("*/oracle.json"))
    return [path for path in directories if n_heads(path) >= RANKS]


def serve(directory, *options):
    return Daemon(directory, options=options)


def tolerance_of(client, entry):
    return logit_tolerance(client.info(), np.array(entry["last_logits"]))


def gap_of(tolerance):
    """Where the two best logits are nearer, another order of summation may rightly choose otherwise."""
    return 2.5 * tolerance


def clear_argmax(rows, gap):
    """The best id of each row, and where it stands clear of the second."""
    best = np.sort(rows, axis=1)[:, -2:]
    return rows.argmax(axis=1), best[:, 1] - best[:, 0] > gap


def check_last(client, last, wanted, tolerance):
    """Each logit is near; where activations are narrow and the tolerance wide, the row as a whole is near as well."""
    difference = last - wanted
    assert np.abs(difference).max() <= tolerance
    step = STEP.get(client.info().activation_dtype)
    if step:
        assert np.linalg.norm(difference) <= 8 * step * np.linalg.norm(wanted)


def check(client, entry):
    tolerance = tolerance_of(client, entry)
    ids, greedy = entry["input_ids"], entry["greedy"]
    made = client.forward(ids + greedy[:-1], logits="all", argmax=True)
    last = made.logits[len(ids) - 1, : len(entry["last_logits"])]
    check_last(client, last, np.array(entry["last_logits"], np.float32), tolerance)
    best, clear = clear_argmax(made.logits, gap_of(tolerance))
    assert (best == made.argmax).all()
    wanted = np.array(entry["argmax"] + greedy[1:])
    assert (best == wanted)[clear].all()
    chosen = made.logits[np.arange(len(wanted)), wanted]  # by the oracle
    assert (made.logits.max(axis=1) - chosen <= gap_of(tolerance)).all()
    if client.info().activation_dtype == "f32":
        assert clear.sum() > len(wanted) // 2  # or the comparison says nothing
    for cut in {len(ids) // 2, len(ids) - 1}:
        rest = client.forward([*ids, *greedy[:-1]][cut:], prefix=made.cache[:cut], logits="all")
        same(rest.logits, made.logits[cut:], f"{cut} tokens cached")


@pytest.mark.parametrize("model", BUNDLED)
def test_bundled_models_with_default_flags(model):
    with serve(model) as daemon, dskv.connect(daemon.endpoint) as client:
        for entry in json.loads((MODELS / model / "oracle.json").read_text()):
            check(client, entry)
            greedy = entry["greedy"]
            made = client.generate(entry["input_ids"], max_tokens=len(greedy))
            if (entry["min_gap"] or 1) > gap_of(tolerance_of(client, entry)):
                assert list(made.tokens) == greedy
            assert made.finish_reason == ("stop" if greedy[-1] == 0 else "length")


@pytest.mark.skipif(RANKS > 4, reason="the dtype of the KV changes nothing with the number of ranks")
@pytest.mark.parametrize(("dtype", "tolerance"), [("f16", 0.01), ("bf16", 0.1)])
@pytest.mark.parametrize("model", BUNDLED)
def test_bundled_models_with_narrow_kv(model, dtype, tolerance):
    with serve(model, "--kv-dtype", dtype) as daemon, dskv.connect(daemon.endpoint) as client:
        assert client.info().kv_dtype == dtype
        for entry in json.loads((MODELS / model / "oracle.json").read_text()):
            last = client.forward(entry["input_ids"], logits="last").logits[0, : len(entry["last_logits"])]
            difference = np.abs(last - np.array(entry["last_logits"], np.float32)).max()
            assert 0 < difference <= max(tolerance, tolerance_of(client, entry))


@pytest.mark.parametrize("directory", golden(), ids=lambda path: pathlib.Path(path).name)
def test_odd_models(directory):
    with serve(directory) as daemon, dskv.connect(daemon.endpoint) as client:
        for entry in json.loads((directory / "oracle.json").read_text()):
            check(client, entry)


def test_every_valid_number_of_ranks_found_its_odd_models():
    assert RANKS > 4 or golden()
