"""Records of measurements, as JSON, a table and a plot."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from rich.table import Table

from aiodist.bench.plots import lines, picture

# the factors of nccl-tests from algorithm to bus bandwidth; scan and exscan have that of reduce
_SHARED = frozenset({"allgather", "gather", "scatter", "reduce_scatter", "alltoall", "alltoall_single"})
# operations for which nccl-tests counts the inputs of all ranks
_TOGETHER = frozenset({"allgather", "gather"})
_OPTIONAL = frozenset({"value", "batch", "overlap", "loop_lag", "rule", "thread", "cpu"})


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
    value: float | None = None
    """A figure that is no time. JSON has this field and the next ones only if they are set."""
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

    def to_dict(self) -> dict[str, object]:
        """Return the fields of the JSON."""
        return {name: value for name, value in asdict(self).items() if value is not None or name not in _OPTIONAL}


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


def _text(value: object) -> str:
    return "" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


_COLUMNS = (
    *(("op", "op", str), ("input", "nbytes", size_text), ("batch", "batch", _text), ("rule", "rule", _text)),
    *(("impl", "impl", str), ("thread", "thread", _text), ("median", "seconds", seconds_text)),
    *(("mean", "mean", seconds_text), ("p99", "p99", seconds_text), ("algbw GB/s", "algbw_gbps", _text)),
    *(("busbw GB/s", "busbw_gbps", _text), ("CPU", "cpu", seconds_text), ("overlap", "overlap", _text)),
    *(("loop lag", "loop_lag", seconds_text), ("value", "value", _text)),
)
"""Columns of the table: heading, field, and format; a column without values is skipped."""


def table(records: Sequence[Record], title: str) -> Table:
    """Return a row for each record; the fastest of each operation and size is bold."""
    result = Table(title=title, title_justify="left")
    columns = [
        (name, field, text) for name, field, text in _COLUMNS if any(text(getattr(one, field)) for one in records)
    ]
    for name, _, _ in columns:
        result.add_column(name, justify="left" if name in ("op", "impl", "thread") else "right", no_wrap=True)
    best: dict[object, list[float]] = {}
    for one in records:
        if one.seconds is not None:
            best.setdefault(_case(one), []).append(one.seconds)
    for number, one in enumerate(records):
        if number and _case(one) != _case(records[number - 1]):
            result.add_section()
        beside = best.get(_case(one), [])
        is_best = len(beside) > 1 and one.seconds == min(beside)
        result.add_row(*[text(getattr(one, field)) for _, field, text in columns], style="bold" if is_best else None)
    return result


def _case(one: Record) -> tuple[object, ...]:
    """Return the key of records that are compared."""
    return one.op, one.nbytes, one.batch, one.rule


def plot(records: Sequence[Record], op: str, path: str) -> None:
    """Draw time and bus bandwidth of `op` by size, one line for each implementation, into `path`."""
    shown = [r for r in records if r.op == op and r.seconds is not None]
    rates = [r for r in shown if r.busbw_gbps]
    with picture(path, columns=2 if rates else 1) as (axes,):
        bytes_of = "input of one rank, bytes"
        lines(axes[0], [(r.impl, r.nbytes or 0, (r.seconds or 0) * 1e6) for r in shown], bytes_of, "us")
        axes[0].set_title(f"{op}, {shown[0].ranks if shown else 0} ranks")
        if rates:
            lines(axes[1], [(r.impl, r.nbytes or 0, r.busbw_gbps) for r in rates], bytes_of, "bus bandwidth, GB/s")
        if shown:
            axes[-1].legend()
