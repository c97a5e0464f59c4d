"""Editors complete `op=` and `impl=` with exactly the names that exist."""

from __future__ import annotations

import inspect
from typing import get_args, get_type_hints

from aiodist import Communicator
from aiodist.collectives.choice.table import IMPLEMENTATIONS, NAMES
from aiodist.types import OP_ALIASES, Impl, Op, ReduceOp


def test_c2_the_operators_that_editors_complete_are_those_there_are() -> None:
    words, kind = get_args(Op)
    assert kind is ReduceOp
    assert get_args(words) == (*(op.value for op in ReduceOp), *OP_ALIASES)


def test_a1_the_implementations_that_editors_complete_are_those_there_are() -> None:
    assert get_args(Impl) == ("auto", *IMPLEMENTATIONS)
    assert set(IMPLEMENTATIONS) == {name for names in NAMES.values() for name in names}


def test_c1_every_call_takes_these() -> None:
    calls = [call for name, call in inspect.getmembers(Communicator, inspect.isfunction) if not name.startswith("_")]
    asked = {"op": Op, "impl": Impl}
    seen = [
        (call.__name__, name, get_type_hints(call)[name])
        for call in calls
        for name in asked.keys() & inspect.signature(call).parameters.keys()
    ]
    assert {name for _, name, _ in seen} == {"op", "impl"}
    assert [wrong for wrong in seen if wrong[2] != asked[wrong[1]]] == []
