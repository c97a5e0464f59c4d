"""Which combinations of a test's parameters `make test` runs, where the test says that a few will do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random
from typing import TypeVar
from zlib import crc32

__all__ = ["draw"]

T = TypeVar("T")


def draw(name: str, combinations: Sequence[tuple[T, Iterable[object]]], count: int) -> list[T]:
    """Return `count` of the items, each given with its parameters, which show as many different ones as they can.

    The same for the same `name` at all times: a test that fails in one place fails in another.

    >>> pairs = [(x + y, (x, y)) for x in "abc" for y in "AB"]
    >>> chosen = draw("test_sum", pairs, 3)
    >>> sorted({letter for pair in chosen for letter in pair})
    ['A', 'B', 'a', 'b', 'c']
    """
    left = [(item, set(parameters)) for item, parameters in combinations]
    Random(crc32(name.encode())).shuffle(left)
    seen: set[object] = set()
    chosen: list[T] = []
    while left and len(chosen) < count:
        best = max(left, key=lambda one: len(one[1] - seen))
        left.remove(best)
        seen |= best[1]
        chosen.append(best[0])
    return chosen
