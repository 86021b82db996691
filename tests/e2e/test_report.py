"""The report that dskvd answers, as a program: the same greedy text from whole sequences and from cut caches."""

import pytest
from support.daemon import MODELS
from transformers_python import reference

MODEL = MODELS / "atlas-gpt2"


@pytest.fixture(scope="module")
def wanted():
    return reference("report", MODEL)["transformers"]


def test_transformers_agrees_with_itself(wanted):
    assert wanted["a"] == wanted["b"]
    assert wanted["a"].startswith("Capital city of Germany: Berlin")


@pytest.mark.parametrize("past", ["caches", "tuples"])
def test_dskv_in_the_place_of_the_model(daemon, wanted, past):
    """past_key_values are caches that are cut, or exported tuples that are cut and imported again."""
    found = reference("report", MODEL, daemon.endpoint)[past]
    assert found == wanted
