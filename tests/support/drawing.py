"""Which combinations of a test's parameters `make test` runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random
from typing import TypeVar
from zlib import crc32

__all__ = ["draw"]

T = TypeVar("T")


def draw(name: str, items: Sequence[tuple[T, Iterable[object]]], count: int | None = None) -> list[T]:
    """Return `count` of the items with as many different properties as possible; each item comes with its properties.

    If `count` is None, return the fewest items that have all properties. The same `name` always gives the same items,
    so a test that fails on one machine fails on another.

    >>> both = [(x + y, (x, y)) for x in "abc" for y in "AB"]
    >>> chosen = draw("test_sum", both, 3)
    >>> sorted({letter for pair in chosen for letter in pair})
    ['A', 'B', 'a', 'b', 'c']
    >>> len(draw("test_sum", [(x + y + z, (x, y, z)) for x in "abc" for y in "AB" for z in "01"]))
    3
    """
    left = [(item, set(shown)) for item, shown in items]
    missing = set().union(*(shown for _, shown in left))
    Random(crc32(name.encode())).shuffle(left)
    seen: set[object] = set()
    chosen: list[T] = []
    while missing - seen if count is None else left and len(chosen) < count:
        best = max(left, key=lambda one: len(one[1] - seen))
        left.remove(best)
        seen |= best[1]
        chosen.append(best[0])
    return chosen
