"""Tensors in nested items."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from copy import copy
from typing import Any

from torch import Tensor

Change = Callable[[Any], Any]


def rebuilt(value: Any, change: Change) -> Any:  # noqa: ANN401
    """Return `value` with `change(x)` for every tensor `x` in it, and for every `x` that can `pin_memory`.

    Looked into are lists, tuples, named tuples and mappings. `value` is left alone: containers in which something
    changed are shallow copies, and others are themselves.

    >>> rebuilt({"x": [1, "two"]}, print)
    {'x': [1, 'two']}
    """
    if isinstance(value, Tensor) or _moves_itself(value):
        return change(value)
    if isinstance(value, Mapping):
        items = {key: rebuilt(item, change) for key, item in value.items()}
        if all(items[key] is item for key, item in value.items()):
            return value
        if not isinstance(value, MutableMapping):
            return items
        clone = copy(value)  # it may hold more than its items
        clone.update(items)
        return clone
    if isinstance(value, list | tuple):
        made = [rebuilt(item, change) for item in value]
        if all(new is item for new, item in zip(made, value, strict=True)):
            return value
        if isinstance(value, tuple):
            return type(value)(*made) if hasattr(value, "_fields") else tuple(made)
        changed = copy(value)
        changed[:] = made
        return changed
    return value


def _moves_itself(value: object) -> bool:
    """Return True for an object with its own `pin_memory()` and `to()`, such as a `PackedSequence`."""
    if isinstance(value, type):
        return False
    return callable(getattr(value, "pin_memory", None)) and callable(getattr(value, "to", None))


def nbytes_of(value: object) -> int:
    """Return the bytes of the tensors, arrays and byte strings in `value`, each object once.

    Looked into are lists, tuples, sets and mappings. Objects with a number `nbytes` count with that; other objects,
    strings and numbers count nothing.

    >>> nbytes_of({"x": bytes(100), "y": (bytearray(20), "label", 7)})
    120
    """
    if type(value) is list and set(map(type, value)) == {bytes}:  # a batch of records: each has many
        return sum(map(len, {id(record): record for record in value}.values()))
    total = 0
    seen: set[int] = set()
    left = [value]
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, bytes | bytearray):
            total += len(value)
        elif isinstance(value, list | tuple | set | frozenset):
            left.extend(value)
        elif isinstance(value, Mapping):
            left.extend(value.values())
        else:
            with suppress(Exception):  # an object that cannot tell (a sparse tensor) is no reason to lose an item
                total += nbytes if isinstance(nbytes := getattr(value, "nbytes", 0), int) else 0
    return total
