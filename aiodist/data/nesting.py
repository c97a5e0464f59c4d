"""Items as loaders nest them, in lists, tuples, mappings and dataclasses: what they weigh, and copies of them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, MutableMapping, MutableSequence, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

_FLAT = frozenset({int, float, bool, complex, str, type(None)})
"""What most leaves are that hold neither bytes nor tensors."""
_BYTES = (bytes, bytearray)
_SEQUENCES = (list, tuple, set, frozenset)
_LEAVES = (str, bytes, bytearray, memoryview, range, array, type)

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
    if isinstance(value, Mapping):
        return _mapping(value, change)
    if isinstance(value, Sequence):
        return _sequence(value, change)
    if is_dataclass(value):
        return _dataclass(value, change)
    return value


def _moves_itself(value: object) -> bool:
    """Return True for what has `pin_memory()` and `to()` of its own: a `PackedSequence`, a batch of graphs."""
    return callable(getattr(value, "pin_memory", None)) and callable(getattr(value, "to", None))


def _mapping(value: Mapping[Any, Any], change: Change) -> Any:  # noqa: ANN401
    items = {key: rebuilt(item, change) for key, item in value.items()}
    if all(items[key] is item for key, item in value.items()):
        return value
    return _filled(value, items, items.items())


def _sequence(value: Sequence[Any], change: Change) -> Any:  # noqa: ANN401
    items = [rebuilt(item, change) for item in value]
    if all(new is item for new, item in zip(items, value, strict=True)):
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*items)
    return _filled(value, items, enumerate(items))


def _filled(value: Any, items: object, places: Iterable[tuple[Any, Any]]) -> Any:  # noqa: ANN401
    """Return a container such as `value` with these items; the items as they are, where that cannot be had."""
    try:
        if not isinstance(value, MutableMapping | MutableSequence):
            return type(value)(items)
        clone = copy(value)  # it may hold more than its items
        for place, item in places:
            clone[place] = item
    except TypeError:
        return items
    return clone


def _dataclass(value: Any, change: Change) -> Any:  # noqa: ANN401
    clone = value
    for field in fields(value):
        item = getattr(value, field.name, None)
        new = rebuilt(item, change)
        if new is not item:
            if clone is value:
                clone = copy(value)
            object.__setattr__(clone, field.name, new)  # frozen ones too
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
