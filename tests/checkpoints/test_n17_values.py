"""N17: values as JSON and tensors: they come back as they were, what cannot be said is an error that names it."""

from __future__ import annotations

import json
import math
import random
from collections import Counter, OrderedDict, namedtuple
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aiodist.checkpoints import Piece
from aiodist.checkpoints.values import decode, encode

keys = st.one_of(st.none(), st.booleans(), st.integers(), st.text(), st.tuples(st.integers(), st.text()))
text = st.text(st.characters(exclude_categories=["Cs"]))
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), text),
    lambda inner: st.one_of(
        st.lists(inner), st.lists(inner).map(tuple), st.dictionaries(text, inner), st.dictionaries(st.integers(), inner)
    ),
    max_leaves=30,
)


def through(value: Any) -> Any:
    """Return what a checkpoint makes of a value."""
    tensors: dict[str, torch.Tensor] = {}
    said = json.dumps(encode(value, "x", tensors), allow_nan=False)
    return decode(json.loads(said), tensors.__getitem__)


def same(a: Any, b: Any) -> bool:
    """Return whether these are equal, kinds and the signs of zeros and all; NaN is NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a.items(), b.items(), strict=True))
    return bool(a == b)


@given(values)
def test_n17_values_come_back_as_they_were(value: Any) -> None:
    assert same(through(value), value)


@pytest.mark.parametrize(
    "value",
    [
        *(math.nan, math.inf, -math.inf, -0.0, 5e-324, 1e308, 0.1),
        *(1 << 53, (1 << 53) + 1, -(1 << 200)),
        {"map": {"tuple": [1]}},
        {"float": "nan"},
        {0: {"exp_avg": (1, None, [True])}, "betas": (0.9, 0.999), (1, "a"): {}, None: 3, True: 4},
        random.Random(3).getstate(),
    ],
)
def test_n17_values_that_json_has_not(value: Any) -> None:
    assert same(through(value), value)


def test_n17_tensors_and_arrays_keep_dtype_shape_and_place() -> None:
    tensors: dict[str, torch.Tensor] = {}
    value = {
        "a/b": torch.arange(6).view(2, 3).t(),
        "a": {"b": torch.tensor(1.5, dtype=torch.bfloat16), "c": [np.arange(5, dtype=np.uint32)[::2]]},
    }
    said = json.loads(json.dumps(encode(value, "x", tensors)))
    assert set(tensors) == {"x/a/b", "x/a/b'", "x/a/c/0"}
    back = decode(said, tensors.__getitem__)
    assert torch.equal(back["a/b"], value["a/b"])  # type: ignore[arg-type]
    assert back["a"]["b"].dtype is torch.bfloat16
    assert back["a"]["c"][0].dtype == np.uint32
    assert back["a"]["c"][0].tolist() == [0, 2, 4]


def test_n17_dicts_of_other_kinds_come_back_as_dicts() -> None:
    assert through(OrderedDict(a=1)) == {"a": 1}
    assert through(Counter("aab")) == {"a": 2, "b": 1}


Pair = namedtuple("Pair", "a b")
Level = IntEnum("Level", "LOW HIGH")


@pytest.mark.parametrize(
    ("value", "path", "kind"),
    [
        ({"groups": [{"lr": 1 + 2j}]}, "opt/groups/0/lr", "complex"),
        ([1, {2, 3}], "opt/1", "set"),
        (b"abc", "opt", "bytes"),
        ({3: print}, "opt/3", "builtin_function_or_method"),
        (np.float64(1.5), "opt", "numpy.float64"),
        (Pair(1, 2), "opt", "Pair"),
        (Level.LOW, "opt", "Level"),
        (torch.float32, "opt", "torch.dtype"),
        (np.array(["a"], dtype=object), "opt", "object"),
        (np.arange(3, dtype=">i4"), "opt", "an array of >i4"),
        (torch.ones(3).to_sparse(), "opt", "sparse"),
        (torch.ones(3, device="meta"), "opt", "meta"),
        ({torch.ones(1): 2}, "opt", "a tensor for a key"),
        ({"a": "\ud800"}, "opt/a", "UTF-8"),
    ],
)
def test_n17_what_cannot_be_said_is_a_type_error_that_names_its_place(value: Any, path: str, kind: str) -> None:
    with pytest.raises(TypeError) as raised:
        encode(value, "opt", {})
    assert str(raised.value).startswith((f"{path} ", f"{path}: "))
    assert kind in str(raised.value)


def test_n17_a_nested_tensor_is_a_type_error() -> None:
    ragged = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    with pytest.raises(TypeError, match=r"^opt.*dense"):
        encode(ragged, "opt", {})


def test_n17_a_value_that_holds_itself_is_a_type_error() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(TypeError, match="nested more than"):
        encode(value, "x", {})


@pytest.mark.parametrize(
    "said",
    [
        3j,
        {"float": "much"},
        {"pickle": "gASVAAAA"},
        {"map": []},
        {"map": {}, "tuple": []},
        {},
        {"int": "zz"},
        {"dict": [[1]]},
        {"dict": [[[], 1]]},
        {"tuple": 3},
        {"permuted": ["one"]},
        {"permuted": ["one", [1]]},
        {"permuted": ["one", 0]},
    ],
)
def test_n17_other_json_is_an_error(said: Any) -> None:
    with pytest.raises((ValueError, TypeError, LookupError, AttributeError)):
        decode(said, lambda name: torch.zeros(1))


def test_n17_pieces_are_said_as_what_they_are_of() -> None:
    found: dict[str, Any] = {}
    first = Piece(torch.arange(3), 3, (3, 2, 4), dims=(1, 2, 0))
    said = encode(
        {"a": first, "b": Piece(torch.ones(1), 0, (), number=True), "c": Piece(torch.ones(2), 0, (5,))}, "x", found
    )
    assert found["x/a"] is first
    assert said == {"map": {"a": {"permuted": ["x/a", [1, 2, 0]]}, "b": {"number": "x/b"}, "c": {"tensor": "x/c"}}}
    whole = {"x/a": torch.arange(24).view(3, 2, 4), "x/b": torch.tensor(7, dtype=torch.int64), "x/c": torch.ones(5)}
    again = decode(said, whole.__getitem__)
    assert torch.equal(again["a"], whole["x/a"].permute(1, 2, 0))
    assert (again["b"], type(again["b"])) == (7, int)
    assert again["c"] is whole["x/c"]


def test_n17_integers_longer_than_python_writes_in_decimal() -> None:
    assert through([10**5000]) == [10**5000]
