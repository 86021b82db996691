"""What the Python package accepts and refuses before it asks a server: token ids, prefixes, foreign keys and values."""

import pathlib
import pickle
import subprocess
import sys
import types

import dskv
import numpy as np
import pytest
from dskv.past_key_values import read_layers, tokens_of
from dskv.protocol import integer, number, token_ids
from dskv.request import forward_sequence


def refused(call, *arguments):
    with pytest.raises(dskv.Error) as caught:
        call(*arguments)
    return caught.value


@pytest.mark.parametrize(
    "tokens",
    [
        [1, 2, 3],
        (1, 2, 3),
        range(1, 4),
        np.array([1, 2, 3]),
        np.array([1, 2, 3], np.uint64),
        [np.int64(1), 2, np.uint8(3)],
    ],
)
def test_integers_of_any_kind_are_tokens(tokens):
    ids = token_ids(tokens)
    assert ids.dtype == np.dtype("<i4") and list(ids) == [1, 2, 3]


@pytest.mark.parametrize("tokens", [[], (), range(0), np.array([]), np.zeros(0, np.int64)])
def test_no_tokens_are_tokens(tokens):
    assert token_ids(tokens).shape == (0,)


@pytest.mark.parametrize(
    "tokens",
    [
        [True], [1, False], [1.0], [1, 2.5], [[1, 2]], [[1], [2, 3]], ["1"], [None], "123", b"123", 7, None, {1: 2},
        np.array([1.0]), np.array([True]), np.array([[1, 2]]), np.array(3), [np.float32(1)], [np.bool_(True)],
        (n for n in [1]), {1, 2},
    ],
)  # fmt: skip
def test_anything_else_is_bad_type(tokens):
    error = refused(token_ids, tokens)
    assert error.code == "bad_type" and error.details["field"] == "tokens"


@pytest.mark.parametrize(
    "tokens",
    [
        [1, 2**31], [1, -(2**31) - 1], [1, 10**30], [1, -(10**400)], np.array([1, 2**40]),
        np.array([1, 2**63], np.uint64),
    ],
)  # fmt: skip
def test_what_int32_cannot_hold_is_out_of_range(tokens):
    error = refused(token_ids, tokens)
    assert error.code == "token_out_of_range" and error.details["index"] == 1


def test_torch_tensors_are_tokens():
    torch = pytest.importorskip("torch")
    assert list(token_ids(torch.tensor([1, 2, 3]))) == [1, 2, 3]
    assert refused(token_ids, torch.tensor([1.0])).code == "bad_type"
    assert refused(token_ids, torch.tensor([1.0], dtype=torch.bfloat16)).code == "bad_type"
    assert refused(token_ids, torch.tensor([[1]])).code == "bad_type"
    assert refused(token_ids, torch.tensor([True])).code == "bad_type"


class Nobody:
    """In a client's place."""

    def __init__(self):
        self._garbage = []


def cache_of(n):
    return dskv.Cache(Nobody(), bytes(16), np.arange(n, dtype=np.int32), "")


def test_a_slice_names_a_prefix():
    cache = cache_of(10)
    for key in (slice(4), slice(0, 4), slice(None, -6), slice(None, 4, 1), slice(np.int64(4))):
        assert len(cache[key]) == 4 and list(cache[key].tokens) == [0, 1, 2, 3]
    assert len(cache[:]) == 10 and len(cache[:-20]) == 0 and len(cache[:10]) == 10
    assert len(cache[:8][:-5]) == 3 and cache[:8][:3].cache is cache
    assert len(cache) == 10


def test_a_slice_past_the_end_or_of_another_kind_is_refused():
    cache = cache_of(10)
    error = refused(cache.__getitem__, slice(11))
    assert error.code == "cut_past_end" and (error.details["length"], error.details["limit"]) == (11, 10)
    assert refused(cache[:8].__getitem__, slice(9)).code == "cut_past_end"
    for key in (slice(1, 4), slice(None, None, 2), slice(None, None, -1), slice(-4, None)):
        assert refused(cache.__getitem__, key).code == "bad_value"
    for key in (3, "a", slice("a"), slice(1.5)):
        assert refused(cache.__getitem__, key).code == "bad_type"
    with pytest.raises(TypeError):
        iter(cache)
    assert refused(cache.__getitem__, 2).message.endswith("not by [2]; for the first 2: [:2]")
    assert refused(cache.__getitem__, np.int64(-1)).message.endswith("not by [-1]; for all but the last 1: [:-1]")


def test_what_was_meant_is_said():
    cache = cache_of(3)
    for given in (cache, cache[:2]):
        kind = type(given).__name__
        assert refused(token_ids, given).message == f"tokens are ids, not a {kind}; did you mean prefix=?"
    assert refused(token_ids, 3).message.endswith("not an int")
    result = dskv.ForwardResult(cache, 0, 3, logits=np.zeros((1, 5000)))

    def forward(**options):
        error = refused(forward_sequence, options, np.arange(3))
        assert error.code in ("bad_type", "bad_value") and len(error.message) < 120
        return error.message

    assert forward(prefix=result) == "a prefix is a Cache or a slice of one, not a ForwardResult: pass its .cache"
    assert forward(prefix=np.zeros(5000)) == "a prefix is a Cache or a slice of one, not an ndarray"
    assert forward(logits="first") == "logits is 'first'; allowed are None, \"last\", \"all\", (start, stop)"
    assert forward(logits=np.zeros(5000)).startswith("logits is an ndarray; allowed are")
    assert forward(topk=np.zeros(5000)) == "topk is an integer, not an ndarray"
    assert forward(logits="all", logits_dtype=np.float16) == "logits_dtype is a name, not a type"
    assert refused(integer, np.float32(1.5), "topk").message == "topk is an integer, not 1.5"
    assert refused(number, 10**400, "min_p").message == "min_p is beyond what a float holds"


def test_a_cache_is_true_at_length_0_and_its_tokens_are_read_only():
    assert cache_of(0) and cache_of(3)[:0]
    with pytest.raises(ValueError):
        cache_of(3).tokens[0] = 1


def test_a_dropped_cache_is_noted_and_its_slices_keep_it():
    cache = cache_of(3)
    garbage = cache._client._garbage
    prefix = cache[:2]
    del cache
    assert garbage == [] and len(prefix) == 2
    del prefix
    assert garbage == [bytes(16)]


def pairs(layers=2, heads=2, length=5, dim=3, dtype=np.float32):
    return tuple(
        tuple(np.ones((1, heads, length, dim), dtype) * (layer + i) for i in range(2)) for layer in range(layers)
    )


def test_keys_and_values_come_as_pairs_lists_or_caches_of_transformers():
    pkv = pairs()
    layers = [types.SimpleNamespace(keys=k, values=v) for k, v in pkv]
    forms = [
        pkv,
        [list(pair) for pair in pkv],
        np.array(pkv),
        types.SimpleNamespace(key_cache=[k for k, _ in pkv], value_cache=[v for _, v in pkv]),  # DynamicCache of 4.x
        types.SimpleNamespace(layers=layers),  # of 5.x
        dskv.PastKeyValues(pkv, np.arange(5), "m", "o"),
    ]
    for form in forms:
        for (k, v), (x, y) in zip(pkv, read_layers(form, 5)):
            assert (x == k[0]).all() and (y == v[0]).all()


def test_torch_is_read_with_its_bits():
    torch = pytest.importorskip("torch")
    value = torch.arange(12, dtype=torch.float32).reshape(1, 2, 2, 3)
    ((k, v),) = read_layers([(value, value.half().float())], 2)
    assert k.dtype == np.float32 and (k == value[0].numpy()).all() and (v == k).all()
    quantized = torch.quantize_per_tensor(value, 1.0, 0, torch.quint8)  # numpy has no such type
    assert refused(read_layers, [(quantized, quantized)], 2).code == "wrong_dtype"
    ml_dtypes = pytest.importorskip("ml_dtypes")
    ((k, _),) = read_layers([(value.bfloat16(), value.bfloat16())], 2)
    assert k.dtype == ml_dtypes.bfloat16 and (k.astype(np.float32) == value.bfloat16().float()[0].numpy()).all()


def test_keys_and_values_of_a_wrong_kind_are_refused():
    assert refused(read_layers, 7, 5).code == "bad_type"
    assert refused(read_layers, [("k", "v")], 5).code == "bad_type"
    assert refused(read_layers, [], 5).code == "wrong_shape"
    assert refused(read_layers, pairs(), 6).code == "wrong_shape"
    assert refused(read_layers, [(np.ones((2, 5, 3)), np.ones((2, 5, 3)))], 5).code == "wrong_shape"
    assert refused(read_layers, [(np.ones((2, 2, 5, 3)),) * 2], 5).code == "wrong_shape"  # a batch of two
    error = refused(read_layers, (*pairs(layers=1), *pairs(layers=1, dim=4)), 5)
    assert error.code == "wrong_shape" and error.details["index"] == 1
    error = refused(read_layers, (*pairs(layers=1), *pairs(layers=1, dtype=np.float16)), 5)
    assert error.code == "wrong_dtype" and error.details["index"] == 1


def test_an_export_knows_its_tokens():
    own = dskv.PastKeyValues(pairs(), np.array([4, 5, 6, 7, 8], np.int32), "m", "o")
    assert list(tokens_of(own, None)) == list(tokens_of(own, [4, 5, 6, 7, 8])) == [4, 5, 6, 7, 8]
    error = refused(tokens_of, own, [4, 5, 9, 7, 8])
    assert (error.code, error.details) == ("bad_value", {"field": "tokens", "index": 2})
    assert error.message == "tokens[2] is 9, but the past_key_values stand for 6 there (pkv.tokens)"
    error = refused(tokens_of, own, [4, 5])
    assert (error.code, error.details["length"], error.details["limit"]) == ("bad_value", 2, 5)
    assert list(tokens_of(tuple(own), [1, 2])) == [1, 2]
    assert refused(tokens_of, tuple(own), None).code == "bad_type"


def test_an_export_goes_to_transformers():
    torch = pytest.importorskip("torch")
    from dskv.transformers import to_dynamic_cache

    pkv = dskv.PastKeyValues(pairs(), np.arange(5), "m", "o")
    made = to_dynamic_cache(pkv)
    for (k, v), (x, y) in zip(pkv, read_layers(made, 5)):
        assert (x == k[0]).all() and (y == v[0]).all()
    made[0][0].zero_()
    assert pkv[1][0].all() and isinstance(made[0][0], torch.Tensor)


def test_errors_and_exports_survive_pickling():
    error = pickle.loads(pickle.dumps(dskv.Error("pool_full", "It is full.", {"needed": 3})))
    assert (error.code, error.message, error.details) == ("pool_full", "It is full.", {"needed": 3})
    assert str(error) == "pool_full: It is full."
    pkv = pickle.loads(pickle.dumps(dskv.PastKeyValues(pairs(), np.arange(5), "m", "o")))
    assert (pkv.model, pkv.origin, list(pkv.tokens), len(pkv)) == ("m", "o", [0, 1, 2, 3, 4], 2)


def test_bf16_without_ml_dtypes_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    from dskv.protocol import numpy_dtype

    error = refused(numpy_dtype, "bf16")
    assert error.code == "unsupported" and "ml_dtypes" in error.message


def test_the_version_is_that_of_the_server():
    project = (pathlib.Path(__file__).parents[2] / "CMakeLists.txt").read_text()
    assert f"project(dskvd VERSION {dskv.__version__} " in project


def test_torch_and_ml_dtypes_are_not_imported_with_the_package():
    code = "import dskv, sys; sys.exit(any(name in sys.modules for name in ('torch', 'ml_dtypes', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
