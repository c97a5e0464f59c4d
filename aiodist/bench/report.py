"""Tables for people, and a plot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rich.table import Table

from aiodist.bench.records import BUSY
from aiodist.bench.units import seconds_text, size_text
from aiodist.errors import BackendUnavailable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from aiodist.bench.plan import Plan
    from aiodist.bench.records import Record, Verdict


def tables(records: Sequence[Record], title: str) -> list[Table]:
    """Return a table of what was measured, and where CPU was counted one more, of threads."""
    threads = [record for record in records if record.thread is not None]
    found = [table([record for record in records if record.thread is None], title)]
    return [*found, table(threads, "CPU of each thread, in one of them")] if threads else found


def table(records: Sequence[Record], title: str) -> Table:
    """Return every record as a row; the fastest of each operation and size is marked."""
    result = Table(title=title, title_justify="left")
    columns = [column for column in _COLUMNS if not column.optional or any(map(column.text, records))]
    for column in columns:
        result.add_column(
            column.name, justify="left" if column.name in ("op", "impl", "thread") else "right", no_wrap=True
        )
    before: tuple[object, ...] | None = None
    for record in records:
        here = _group(record) if record.seconds is not None or record.value is None else ("values",)
        if before not in (None, here):
            result.add_section()
        before = here
        cells = [column.text(record) for column in columns]
        result.add_row(*cells, style="bold" if _is_best(record, records) else None)
    return result


def _rate(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


class _Column(NamedTuple):
    """One figure of every record; one that is `optional` is left out where no record has it."""

    name: str
    text: Callable[[Record], str]
    optional: bool = False


_COLUMNS = (
    _Column("op", lambda record: record.op),
    _Column("input", lambda record: size_text(record.nbytes), optional=True),
    _Column("batch", lambda record: _rate(record.batch), optional=True),
    _Column("rule", lambda record: record.rule or "", optional=True),
    _Column("impl", lambda record: record.impl),
    _Column("thread", lambda record: record.thread or "", optional=True),
    _Column("median", lambda record: seconds_text(record.seconds), optional=True),
    _Column("mean", lambda record: seconds_text(record.mean), optional=True),
    _Column("p99", lambda record: seconds_text(record.p99), optional=True),
    _Column("algbw GB/s", lambda record: _rate(record.algbw_gbps), optional=True),
    _Column("busbw GB/s", lambda record: _rate(record.busbw_gbps), optional=True),
    _Column("CPU", lambda record: seconds_text(record.cpu), optional=True),
    _Column("overlap", lambda record: _rate(record.overlap), optional=True),
    _Column("loop lag", lambda record: seconds_text(record.loop_lag), optional=True),
    _Column("value", lambda record: _rate(record.value), optional=True),
)


def _group(record: Record) -> tuple[object, ...]:
    return record.op, record.nbytes, record.batch, record.rule


def _is_best(record: Record, records: Sequence[Record]) -> bool:
    times = [r.seconds for r in records if _group(r) == _group(record) and r.seconds is not None]
    return len(times) > 1 and record.seconds == min(times)


def verdict_table(verdicts: Sequence[Verdict]) -> Table:
    """Return each figure beside its target."""
    result = Table(title="speeds to reach", title_justify="left")
    for name in ("what", "here", "target", "reached"):
        result.add_column(name, justify="left" if name == "what" else "right")
    for verdict in verdicts:
        bound = f"{'>=' if verdict.at_least else '<='} {verdict.target:g}"
        reached = "yes" if verdict.reached else "NO"
        here = f"{verdict.value:.3g} {verdict.unit}"
        result.add_row(verdict.what, here, bound, reached, style=None if verdict.reached else "red")
    return result


def check_plot() -> None:
    """Raise `BackendUnavailable` where no plot can be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise BackendUnavailable("--plot needs matplotlib: pip install 'aiodist[plot]'") from error


def plot(records: Sequence[Record], plan: Plan, path: str) -> None:
    """Draw time and bus bandwidth by size, one line for each implementation, into `path`."""
    check_plot()
    from matplotlib.figure import Figure

    op = ("await_small" if plan.op == "await" else plan.op) + (BUSY if plan.busy else "")
    shown = [r for r in records if r.op == op and r.seconds is not None]
    rates = [r for r in shown if r.busbw_gbps]
    figure = Figure(figsize=(12 if rates else 6, 4.5), layout="constrained")
    axes = figure.subplots(1, 2 if rates else 1, squeeze=False)[0]
    _lines(axes[0], [(r.impl, r.nbytes or 0, (r.seconds or 0) * 1e6) for r in shown], "us")
    if rates:
        _lines(axes[1], [(r.impl, r.nbytes or 0, r.busbw_gbps or 0) for r in rates], "bus bandwidth, GB/s")
    figure.suptitle(f"{op}, {plan.dtype}, {records[0].ranks if records else plan.ranks} ranks")
    figure.savefig(path)


def _lines(axes: Axes, points: Sequence[tuple[str, int, float]], label: str) -> None:
    for impl in dict.fromkeys(point[0] for point in points):
        mine = sorted((x, y) for name, x, y in points if name == impl)
        axes.plot([x for x, _ in mine], [y for _, y in mine], marker="o", markersize=3, label=impl)
    if any(x for _, x, _ in points):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
    axes.set_xlabel("input of one rank, bytes")
    axes.set_ylabel(label)
    axes.grid(visible=True, alpha=0.3)
    if points:
        axes.legend()
