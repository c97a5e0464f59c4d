"""How many bytes an item of a loader holds."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import Any

__all__ = ["FLAT", "nbytes_of"]

FLAT = frozenset({int, float, bool, complex, str, type(None)})
"""What most leaves are that hold neither bytes nor tensors."""
_BYTES = (bytes, bytearray)
_SEQUENCES = (list, tuple, set, frozenset)


def nbytes_of(value: object) -> int:
    """Return the bytes of the tensors, arrays and byte strings in `value`, each object once.

    Looked into are lists, tuples, sets, mappings and dataclasses. Objects with a number `nbytes` count with that;
    other objects, strings and numbers count nothing.

    >>> nbytes_of({"x": bytes(100), "y": (bytearray(20), "label", 7)})
    120
    """
    if type(value) in FLAT:
        return 0
    total = 0
    seen: set[int] = set()
    left = [value]
    while left:
        value = left.pop()
        if type(value) in FLAT or id(value) in seen:
            continue
        seen.add(id(value))
        with suppress(Exception):  # an object that cannot tell (a sparse tensor) is no reason to lose an item
            total += _own(value, left)
    return total


def _own(value: Any, left: list[object]) -> int:  # noqa: ANN401
    """Return the bytes of `value` itself, and leave what it holds to be looked at."""
    if isinstance(value, _BYTES):
        return len(value)
    if isinstance(value, _SEQUENCES):
        left.extend(value)
    elif isinstance(nbytes := getattr(value, "nbytes", None), int):
        return nbytes
    elif isinstance(value, Mapping):
        left.extend(value.values())
    elif is_dataclass(value):
        left.extend([getattr(value, field.name, None) for field in fields(value)])
    return 0
