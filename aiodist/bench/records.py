"""Records of measurements, as JSON and as a table."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

# the factors of nccl-tests from algorithm to bus bandwidth; scan and exscan have that of reduce
_SHARED = frozenset({"allgather", "gather", "scatter", "reduce_scatter", "alltoall", "alltoall_single"})
# operations for which nccl-tests counts the inputs of all ranks
_TOGETHER = frozenset({"allgather", "gather"})


@dataclass(frozen=True)
class Record:
    """One measurement. Times are in seconds, of the rank with the largest median; None is not measured."""

    op: str
    impl: str
    ranks: int
    nbytes: int | None = None
    """Bytes of one rank's input."""
    seconds: float | None = None
    """The median of the samples."""
    mean: float | None = None
    p50: float | None = None
    p99: float | None = None
    algbw_gbps: float | None = None
    busbw_gbps: float | None = None
    affinity: tuple[int, ...] | None = None
    """The cores of the rank."""
    torch_threads: int | None = None

    @property
    def case(self) -> tuple[object, ...]:
        """Key of the records that are compared."""
        return self.op, self.nbytes

    def to_dict(self) -> dict[str, object]:
        """Return the fields of the JSON."""
        return asdict(self)


def bandwidths(op: str, nbytes: int, seconds: float, ranks: int) -> tuple[float | None, float | None]:
    """Return algorithm and bus bandwidth in 1e9 bytes a second, as nccl-tests defines them; None without bytes.

    >>> bandwidths("allreduce", 1_000_000_000, 0.5, 4)
    (2.0, 3.0)
    >>> bandwidths("allgather", 1_000_000_000, 1.0, 4)
    (4.0, 3.0)
    """
    if not nbytes or seconds <= 0:
        return None, None
    algorithm = nbytes * (ranks if op in _TOGETHER else 1) / seconds / 1e9
    factor = 1.0
    if op == "allreduce":
        factor = 2 * (ranks - 1) / ranks
    elif op in _SHARED:
        factor = (ranks - 1) / ranks
    return algorithm, algorithm * factor


def dumps(records: Iterable[Record]) -> str:
    """Return records as a JSON list, one to a line."""
    return "[\n" + ",\n".join(json.dumps(record.to_dict()) for record in records) + "\n]\n"


# --- for people ----------------------------------------------------------------------------------------------------


def size_text(nbytes: int | None) -> str:
    """Return bytes with a unit, without rounding.

    >>> size_text(1024), size_text(64 << 20), size_text(1077)
    ('1 KiB', '64 MiB', '1077 B')
    """
    if nbytes is None:
        return ""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes and nbytes % size == 0:
            return f"{nbytes // size} {unit}"
    return f"{nbytes} B"


def seconds_text(seconds: float | None) -> str:
    """Return seconds with a unit.

    >>> seconds_text(4.56e-06), seconds_text(0.0123), seconds_text(2.5)
    ('4.56 us', '12.3 ms', '2.5 s')
    """
    if seconds is None:
        return ""
    for unit, scale in (("us", 1e6), ("ms", 1e3)):
        if seconds * scale < 1000:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds:.3g} s"


def plain_text(value: object) -> str:
    """Return a value with three digits; None is empty."""
    return "" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


Column = tuple[str, str, Callable[[Any], str]]
COLUMNS: tuple[Column, ...] = (
    *(("op", "op", str), ("input", "nbytes", size_text), ("impl", "impl", str), ("median", "seconds", seconds_text)),
    *(("mean", "mean", seconds_text), ("p99", "p99", seconds_text)),
    *(("algbw GB/s", "algbw_gbps", plain_text), ("busbw GB/s", "busbw_gbps", plain_text)),
)
"""Columns of the table: heading, field, and format."""


def table(records: Sequence[Record], title: str, known: Sequence[Column] = COLUMNS) -> Table:
    """Return a row for each record, with the `known` columns that have values; the fastest of each case is bold."""
    result = Table(title=title, title_justify="left")
    columns = [column for column in known if any(column[2](getattr(one, column[1])) for one in records)]
    for name, field, _ in columns:
        result.add_column(name, justify="left" if field in ("op", "impl", "thread") else "right", no_wrap=True)
    for number, one in enumerate(records):
        if number and one.case != records[number - 1].case:
            result.add_section()
        times = [other.seconds for other in records if other.case == one.case and other.seconds is not None]
        fastest = len(times) > 1 and one.seconds == min(times)
        result.add_row(*[text(getattr(one, field)) for _, field, text in columns], style="bold" if fastest else None)
    return result
