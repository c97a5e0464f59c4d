"""Docstrings of the calls that return a handle say what a call costs, and of which shape its tensors are."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aiodist import Communicator, ParameterServer
from aiodist.nn import DataParallel
from aiodist.streams import CudaStream, HostStream

CALLS = [
    pytest.param(owner, member, id=f"{owner.__name__}.{name}")
    for owner in (Communicator, ParameterServer, DataParallel, HostStream, CudaStream)
    for name, member in inspect.getmembers(owner, inspect.isfunction)
    if name[0] != "_" and str(member.__annotations__.get("return")).startswith("Handle[")
]


@pytest.mark.parametrize(("owner", "call"), CALLS)
def test_a_call_says_what_it_costs_and_which_shapes_it_takes(owner: type, call: Callable[..., Any]) -> None:
    said = inspect.getdoc(call) or ""
    assert re.search(r"[Cc]osts?\b", said), "what does it cost?"
    tensors = [str(of) for of in call.__annotations__.values() if "Tensor" in str(of) or str(of) == "Data"]
    assert not tensors or re.search("shape|elements", said), "of which shape?"


ROOT = Path(__file__).resolve().parents[2]
MODULES = [path for folder in ("aiodist", "handles", "nn", "streams") for path in sorted((ROOT / folder).rglob("*.py"))]


def test_rows_of_the_features_are_named_by_tests_alone() -> None:
    row = re.compile(r"\((?:[ACDGHLNPSTW]\d{1,2})(?:, [ACDGHLNPSTW]\d{1,2})*\)")
    assert [str(path.relative_to(ROOT)) for path in MODULES if row.search(path.read_text())] == []
