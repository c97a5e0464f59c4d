"""The names that programs and scripts of users may call are listed in public.txt, so that a change shows.

The list has the public names, the classes that a communicator's calls return, and the options of the command line.

`python tests/packaging/test_public.py` rewrites that file.
"""

from __future__ import annotations

import importlib
import inspect
import re
import typing
from collections.abc import Callable, Iterator, Sequence
from enum import EnumType
from pathlib import Path
from typing import Any

import typer

from aiodist import Communicator, cli
from aiodist.types import Elsewhere

MODULES = (
    "aiodist",
    *(
        f"aiodist.{name}"
        for name in ("bridges", "checkpoints", "codecs", "data", "engine", "handles", "nn", "ps", "streams", "testing")
    ),
)
LISTED = Path(__file__).with_name("public.txt")


def public() -> Iterator[str]:
    """Return a line for each public name, each method and property of a class, and each option of a command."""
    named = {f"{module}.{name}": value for module, name, value in _names()}
    for called, value in named.items():
        if not inspect.ismodule(value):
            yield from _lines(called, value)
    known = {id(value) for value in named.values()}
    for value in sorted(_returned([Communicator]), key=_path):
        if id(value) not in known:
            yield from _lines(_path(value), value)
    yield from _commands(typer.main.get_command(cli.app), "aiodist")


def _names() -> Iterator[tuple[str, str, object]]:
    for module in MODULES:
        for name in sorted(importlib.import_module(module).__all__):
            yield module, name, getattr(importlib.import_module(module), name)


def _lines(called: str, value: object) -> Iterator[str]:
    yield f"{called}{_arguments(value)}"
    if inspect.isclass(value):
        yield from (f"{called}.{member}" for member in _members(value))


def _path(value: type) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _returned(classes: Sequence[type]) -> set[type]:
    """Return our classes whose objects public calls and properties of `classes` return, and those of theirs."""
    found: set[type] = set()
    waiting = list(classes)
    while waiting:
        for _, member in inspect.getmembers(waiting.pop()):
            function = member.fget if isinstance(member, property) else member
            if not inspect.isfunction(function) or function.__name__.startswith("_"):
                continue
            new = {of for of in _classes_in(_hint(function)) if of.__module__.startswith("aiodist")} - found
            found |= new
            waiting += new
    return found


def _hint(function: Callable[..., object]) -> object:
    try:
        return typing.get_type_hints(function).get("return")
    except NameError:  # imported for type checkers alone
        return None


def _classes_in(hint: object) -> Iterator[type]:
    if inspect.isclass(hint) and not typing.get_args(hint):
        yield hint
    for part in (typing.get_origin(hint), *typing.get_args(hint)):
        if part is not None:
            yield from _classes_in(part)


def _commands(command: Any, called: str) -> Iterator[str]:
    for option in command.params:
        yield f"{called} {'|'.join(option.opts)}"
    for name, sub in sorted(getattr(command, "commands", {}).items()):
        yield from _commands(sub, f"{called} {name}")


def _members(owner: type) -> Iterator[str]:
    ours = [base for base in reversed(owner.__mro__) if base.__module__.startswith("aiodist")]
    for name, value in sorted({name: value for base in ours for name, value in vars(base).items()}.items()):
        if not name.startswith("_") and not isinstance(value, Elsewhere):
            function = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
            yield f"{name}{_arguments(function)}" if inspect.isfunction(function) else name


def _arguments(value: object) -> str:
    if isinstance(value, EnumType):
        return "(value)"  # each Python tells something else
    try:
        if not callable(value) or typing.get_origin(value):  # as Callable[…] has
            return ""
        # Annotations are text, as in the source; addresses of objects are removed.
        told = re.sub(" at 0x[0-9a-f]+", "", str(inspect.signature(value)))
        return re.sub(r"ForwardRef\((['\"])(.*?)\1\)", r"\2", told)
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
