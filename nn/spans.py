"""When the buckets of one pass were on their way, and how much of that was after backward."""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter


class Spans:
    """Times of one pass, in seconds of `perf_counter`; `len` is how many buckets were reduced."""

    def __init__(self) -> None:
        self.backward_ended: float | None = None
        """When backward ended."""
        self._began: dict[int, float] = {}
        self._spans: list[tuple[float, float]] = []

    def issued(self, index: int) -> None:
        """Bucket `index` is on its way, unless its device tells otherwise."""
        self._began.setdefault(index, perf_counter())

    def begin(self, index: int, when: float) -> None:
        """Its device began with bucket `index`."""
        self._began[index] = when

    def end(self, index: int) -> float:
        """Bucket `index` is reduced; return when it began."""
        began = self._began[index]
        self._spans.append((began, perf_counter()))
        return began

    def end_backward(self, when: float) -> None:
        """A device came to the end of backward."""
        self.backward_ended = max(when, self.backward_ended or when)

    def __len__(self) -> int:
        return len(self._spans)

    @property
    def seconds(self) -> float:
        """In which something was on its way."""
        return _union(self._spans)

    @property
    def exposed(self) -> float:
        """Those of them after backward had ended."""
        ended = self.backward_ended
        return 0.0 if ended is None else _union([(max(a, ended), b) for a, b in self._spans if b > ended])


def _union(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of what intervals cover together.

    >>> _union([(0, 2), (1, 3), (5, 6)])
    4.0
    """
    total, end = 0.0, float("-inf")
    for a, b in sorted(spans):
        if b > end:
            total += b - max(a, end)
            end = b
    return total
