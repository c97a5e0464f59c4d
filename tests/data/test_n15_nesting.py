"""N15: tensors in nested items, and the containers around these tensors."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from aiodist.data.nesting import rebuilt


class Pair(NamedTuple):
    x: Any
    y: Any


class Batch(dict[str, Any]):
    """A mapping that holds more than its items."""

    note = ""


def plus_one(x: Any) -> Any:
    return x + 1


def values(kind: Any) -> Any:
    return kind([torch.tensor(1), "text", [torch.tensor(2)]])


@pytest.mark.parametrize("kind", [list, tuple])
def test_n15_sequences_keep_their_type(kind: Any) -> None:
    before = values(kind)
    after = rebuilt(before, plus_one)
    assert type(after) is kind
    assert list(after) == [2, "text", [3]]
    assert list(before) == [1, "text", [2]]


@pytest.mark.parametrize("kind", [dict, OrderedDict, UserDict, Batch])
def test_n15_mappings_keep_their_type(kind: Any) -> None:
    before = kind({"a": torch.tensor(1), "b": {"c": (torch.tensor(2), 7)}})
    if kind is Batch:
        before.note = "kept"
    after = rebuilt(before, plus_one)
    assert type(after) is kind
    assert dict(after) == {"a": 2, "b": {"c": (3, 7)}}
    assert before["a"] == 1
    assert getattr(after, "note", "kept") == "kept"


def test_n15_what_a_default_dictionary_makes_is_kept() -> None:
    after = rebuilt(defaultdict(list, {"a": torch.tensor(1)}), plus_one)
    assert (after["a"], after["b"]) == (2, [])


def test_n15_named_tuples_and_mappings_that_cannot_change() -> None:
    other = namedtuple("other", "u")
    assert rebuilt(Pair(torch.tensor(1), other(torch.tensor(2))), plus_one) == Pair(2, other(3))
    assert rebuilt(MappingProxyType({"a": torch.tensor(1)}), plus_one) == {"a": 2}  # a plain one


def test_n15_what_holds_no_tensor_is_itself() -> None:
    for value in (
        [1, "a", (2.5, None)],
        {"a": [bytes(3), bytearray(2)], "b": range(1 << 60)},
        Pair(1, [2]),
        np.zeros(3),
        memoryview(bytes(3)),
        {torch.tensor(1)},  # as the DataLoader: a set is not looked into
        torch.Tensor,
        object(),
    ):
        assert rebuilt(value, plus_one) is value


def test_n15_what_moves_itself_is_changed_as_a_whole() -> None:
    packed = pack_sequence([torch.ones(2), torch.ones(1)])
    seen: list[Any] = []
    rebuilt([packed, torch.tensor(3)], seen.append)
    assert seen[0] is packed
    assert len(seen) == 2
