"""Figures of benchmarks: records with more fields."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from aiodist.bench import records
from aiodist.bench.records import Record, plain_text, seconds_text

__all__ = ["COLUMNS", "Figure", "figure", "figures", "histogram"]


@dataclass(frozen=True)
class Figure(Record):
    """A record of a benchmark. JSON has its own fields only if they are set."""

    value: float | None = None
    """A figure that is no time."""
    batch: int | None = None
    """Training samples of one rank in a step."""
    overlap: float | None = None
    """The share of communication during computation, of the rank with the least."""
    loop_lag: float | None = None
    """The lateness of a 1 ms ticker on the loop, in seconds: the 99th percentile, of the latest rank."""
    rule: str | None = None
    """The rule of a parameter server."""
    thread: str | None = None
    cpu: float | None = None
    """CPU seconds of `thread` in one operation, of the rank with the most."""
    histogram: tuple[int, ...] | None = None
    """Samples of rank 0 below 1, 2, 4, ... microseconds, each counted once."""

    @property
    def case(self) -> tuple[object, ...]:
        """Key of the records that are compared."""
        return self.op, self.nbytes, self.batch, self.rule

    def to_dict(self) -> dict[str, object]:
        """Return the fields of the JSON."""
        known = Record.__dataclass_fields__
        return {name: value for name, value in super().to_dict().items() if value is not None or name in known}


def figure(record: Record, **more: Any) -> Figure:  # noqa: ANN401  - the fields of `Figure`
    """Return a record with some fields replaced."""
    return Figure(**(vars(record) | more))


def figures(found: Iterable[Record]) -> list[Figure]:
    """Return records as figures."""
    return [figure(one) for one in found]


def histogram(seconds: Iterable[float]) -> tuple[int, ...]:
    """Return the number of samples below 1 us, of those from 1 us below 2 us, then 4 us, and so on.

    >>> histogram([3e-7, 1.5e-6, 1.6e-6, 9e-6])
    (1, 2, 0, 0, 1)
    """
    bins = [max(0, int(one * 1e6)).bit_length() for one in seconds]
    return tuple(bins.count(i) for i in range(max(bins, default=-1) + 1))


_OP, _INPUT, _IMPL, *_TIMES = records.COLUMNS
COLUMNS: tuple[records.Column, ...] = (
    *(_OP, _INPUT, ("batch", "batch", plain_text), ("rule", "rule", plain_text)),
    *(_IMPL, ("thread", "thread", plain_text), *_TIMES),
    *(("CPU", "cpu", seconds_text), ("overlap", "overlap", plain_text), ("loop lag", "loop_lag", seconds_text)),
    ("value", "value", plain_text),
)
"""Columns of the table."""
