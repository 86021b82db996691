"""The report that dskvd answers, as a program: the same greedy text from whole sequences and from cut caches."""

import pytest
from support.daemon import MODELS
from transformers_python import reference


@pytest.fixture(scope="module")
def texts(daemon):
    return reference("report", MODELS / "atlas-gpt2", daemon.endpoint)


def test_transformers_agrees_with_itself(texts):
    assert texts["transformers"]["a"] == texts["transformers"]["b"]
    assert texts["transformers"]["a"].startswith("Capital city of Germany: Berlin")


@pytest.mark.parametrize("past", ["caches", "tuples"])
def test_dskv_in_the_place_of_the_model(texts, past):
    """past_key_values are caches that are cut, or exported tuples that are cut and imported again."""
    assert texts[past] == texts["transformers"]
