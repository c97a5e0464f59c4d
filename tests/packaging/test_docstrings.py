"""Docstrings of the calls that return a handle give the cost of a call, and the shapes of its tensors."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
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


def _public_methods() -> Iterator[tuple[str, object]]:
    """Yield what a user may call in the packages where ruff does not ask for docstrings (D102, D103)."""
    for package in ("aiodist.codecs", "aiodist.compat.mpi", "aiodist.engine", "aiodist.nn"):
        module = importlib.import_module(package)
        for name in module.__all__:
            owner = getattr(module, name)
            if inspect.isclass(owner):
                yield f"{package}.{name}", owner
                named = [(key, value) for key, value in inspect.getmembers(owner) if key[0] != "_"]
                yield from ((f"{package}.{name}.{key}", value) for key, value in named if _ours(value))


def _ours(value: object) -> bool:
    return inspect.isroutine(value) and str(getattr(value, "__module__", "")).startswith("aiodist.")


def test_what_is_public_has_a_docstring_be_it_that_of_its_base() -> None:
    assert [name for name, value in _public_methods() if not inspect.getdoc(value)] == []


ROOT = Path(__file__).resolve().parents[2]
MODULES = [path for folder in ("aiodist", "handles", "nn", "streams") for path in sorted((ROOT / folder).rglob("*.py"))]


def test_rows_of_the_features_are_named_by_tests_alone() -> None:
    row = re.compile(r"\((?:[ACDGHLNPSTW]\d{1,2})(?:, [ACDGHLNPSTW]\d{1,2})*\)")
    assert [str(path.relative_to(ROOT)) for path in MODULES if row.search(path.read_text())] == []
