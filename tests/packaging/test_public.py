"""What programs of others may call is written down in public.txt, so that a change of it is seen.

`python tests/packaging/test_public.py` writes that file anew.
"""

from __future__ import annotations

import importlib
import inspect
import re
import typing
from collections.abc import Iterator
from pathlib import Path

MODULES = ("aiodist", *(f"aiodist.{name}" for name in ("codecs", "data", "handles", "nn", "ps", "streams", "testing")))
LISTED = Path(__file__).with_name("public.txt")


def public() -> Iterator[str]:
    """Return a line for each public name, and one for each method and property of a class."""
    for module in MODULES:
        for name in sorted(importlib.import_module(module).__all__):
            value = getattr(importlib.import_module(module), name)
            if inspect.isclass(value):
                yield f"{module}.{name}{_arguments(value)}"
                yield from (f"{module}.{name}.{member}" for member in _members(value))
            elif not inspect.ismodule(value):
                yield f"{module}.{name}{_arguments(value)}"


def _members(owner: type) -> Iterator[str]:
    ours = [base for base in reversed(owner.__mro__) if base.__module__.startswith("aiodist")]
    for name, value in sorted({name: value for base in ours for name, value in vars(base).items()}.items()):
        if not name.startswith("_"):
            function = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
            yield f"{name}{_arguments(function)}" if inspect.isfunction(function) else name


def _arguments(value: object) -> str:
    try:
        # Annotations are text, as they were written; where an object lies in memory is left out.
        return re.sub(" at 0x[0-9a-f]+", "", str(inspect.signature(value))) if callable(value) else ""
    except (TypeError, ValueError):  # it has none that Python can tell
        return ""


def test_statistics_are_frozen_records_named_after_their_owner() -> None:
    owners = {
        value: typing.get_type_hints(value.statistics)["return"]
        for module in map(importlib.import_module, MODULES)
        for value in (getattr(module, name) for name in module.__all__)
        if inspect.isclass(value) and hasattr(value, "statistics")
    }
    assert {owner.__name__ for owner in owners} == {"Communicator", "DataParallel", "ParameterServer", "Prefetched"}
    for owner, record in owners.items():
        assert record.__name__ == f"{owner.__name__}Statistics"
        assert record.__dataclass_params__.frozen


def test_what_is_public_is_what_is_listed() -> None:
    assert list(public()) == LISTED.read_text().splitlines(), f"if it is meant: python {Path(__file__).name}"


if __name__ == "__main__":
    LISTED.write_text("\n".join(public()) + "\n")
