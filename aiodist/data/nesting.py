"""Items as loaders nest them, in lists, tuples, mappings and dataclasses: what they weigh, and copies of them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

_FLAT = frozenset({int, float, bool, complex, str, type(None)})
"""What most leaves are that hold neither bytes nor tensors."""
_LEAVES = (str, bytes, bytearray, memoryview, range, array, type)
"""Sequences that are not looked into, and classes."""

Change = Callable[[Any], Any]


def rebuilt(value: Any, change: Change) -> Any:  # noqa: ANN401
    """Return `value` with `change(x)` for every tensor `x` in it, and for every `x` that can `pin_memory`.

    Looked into are the containers that torch's `DataLoader` looks into to pin what they hold, lists, tuples, named
    tuples, mappings and what resembles them, and dataclasses too. `value` is left alone: containers in which something
    changed are shallow copies, and others are themselves.

    >>> rebuilt({"x": [1, "two"]}, print)
    {'x': [1, 'two']}
    """
    if type(value) in _FLAT or isinstance(value, _LEAVES):
        return value
    if isinstance(value, Tensor) or _moves_itself(value):
        return change(value)
    places = _places(value)
    items = {place: rebuilt(item, change) for place, item in places}
    if all(items[place] is item for place, item in places):
        return value
    return _filled(value, items)


def _moves_itself(value: object) -> bool:
    """Return True for what has `pin_memory()` and `to()` of its own: a `PackedSequence`, a batch of graphs."""
    return callable(getattr(value, "pin_memory", None)) and callable(getattr(value, "to", None))


def _places(value: Any) -> list[tuple[Any, Any]]:  # noqa: ANN401
    """Return what a container holds, each item with its key, number or name; nothing for what is none."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, Sequence):
        return list(enumerate(value))
    if is_dataclass(value):
        return [(field.name, getattr(value, field.name, None)) for field in fields(value)]
    return []


def _filled(value: Any, items: dict[Any, Any]) -> Any:  # noqa: ANN401
    """Return a container such as `value` with these items; the items as they are, where that cannot be had."""
    kind: Any = type(value)
    plain = items if isinstance(value, Mapping) else list(items.values())
    try:
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return kind(*plain)
        if isinstance(value, Sequence | Mapping) and not isinstance(value, MutableSequence | MutableMapping):
            return kind(plain)
        clone = copy(value)  # it may hold more than its items
        for place, item in items.items():
            if is_dataclass(value):
                object.__setattr__(clone, place, item)  # frozen ones too
            else:
                clone[place] = item
    except TypeError:
        return plain
    return clone


def nbytes_of(value: object) -> int:
    """Return the bytes of the tensors, arrays and byte strings in `value`, each object once.

    Looked into are lists, tuples, sets, mappings and dataclasses. Objects with a number `nbytes` count with that;
    other objects, strings and numbers count nothing.

    >>> nbytes_of({"x": bytes(100), "y": (bytearray(20), "label", 7)})
    120
    """
    if type(value) in _FLAT:
        return 0
    if type(value) is list and set(map(type, value)) == {bytes}:  # a batch of records: each has many
        return sum(map(len, {id(record): record for record in value}.values()))
    total = 0
    seen: set[int] = set()
    left = [value]
    while left:
        value = left.pop()
        if type(value) in _FLAT or id(value) in seen:
            continue
        seen.add(id(value))
        with suppress(Exception):  # an object that cannot tell (a sparse tensor) is no reason to lose an item
            total += _own(value, left)
    return total


def _own(value: Any, left: list[object]) -> int:  # noqa: ANN401
    """Return the bytes of `value` itself, and leave what it holds to be looked at."""
    if isinstance(value, bytes | bytearray):
        return len(value)
    if isinstance(nbytes := getattr(value, "nbytes", None), int):
        return nbytes
    if isinstance(value, set | frozenset):
        left.extend(value)
    elif not isinstance(value, _LEAVES):
        left.extend(item for _, item in _places(value))
    return 0
