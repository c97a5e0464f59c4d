"""The speeds that an await is to reach on 2 ranks, and whether records reach them: a pure function."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiodist.bench.records import Record

__all__ = ["Verdict", "ratio", "verdicts"]


@dataclass(frozen=True)
class Verdict:
    """One line of the table: `reached` is `value` against `target`, at most or at least."""

    what: str
    value: float
    unit: str
    target: float
    at_least: bool = False

    @property
    def reached(self) -> bool:
        """The target is reached."""
        return self.value >= self.target if self.at_least else self.value <= self.target


def verdicts(records: Iterable[Record]) -> list[Verdict]:
    """Return what the records have figures for, ours against the peer measured in the same run."""
    found = list(records)
    values = [
        Verdict(op, record.value * scale, unit, target)
        for op, target, unit, scale in _VALUES
        for record in found
        if record.op == op and record.value is not None
    ]
    waits = [*_small(found, "mpi4py:iallreduce", 2.0), *_small(found, "gloo", 1.2), *_many(found), *_large(found)]
    return [*waits, *values]


_VALUES = (
    ("parked_cpu", 0.05, "CPU s/s", 1.0),
    ("loop_lag", 5.0, "ms", 1e3),
    ("loop_lag_small", 5.0, "ms", 1e3),
    ("progress_busy", 0.1, "x", 1.0),
    ("backward_beside_pending", 1.1, "x", 1.0),
    ("await_busy", 1.5, "x", 1.0),
)
_MANY = (("gather_1000", 8.0), ("aiodist_gather_1000", 5.0), ("issue", 10.0))


def _small(records: Sequence[Record], peer: str, target: float) -> list[Verdict]:
    """Ours over MPI against Iallreduce, ours over gloo against gloo itself."""
    over_mpi = any(record.impl.startswith("mpi4py:") for record in records)
    ours = {"aiodist:gloo" if peer == "gloo" else "aiodist:mpi"}
    if over_mpi != (peer == "gloo"):
        ours.add("aiodist:auto")
    awaited = [record for record in records if record.op == "await_small"]
    return [
        Verdict(f"await {mine.impl} {mine.nbytes} B / {peer}", ratio(mine.seconds, theirs.seconds), "x", target)
        for theirs in awaited
        for mine in awaited
        if theirs.impl == peer and mine.impl in ours and mine.nbytes == theirs.nbytes
    ]


def _many(records: Sequence[Record]) -> list[Verdict]:
    return [
        Verdict(f"{op}, each", record.seconds * 1e6, "us", target)
        for op, target in _MANY
        for record in records
        if record.op == op and record.seconds is not None
    ]


def _large(records: Sequence[Record]) -> list[Verdict]:
    at_size = [r for r in records if r.op == "allreduce" and r.nbytes == 64 << 20 and r.algbw_gbps is not None]
    peers = [r.algbw_gbps or 0.0 for r in at_size if r.impl.startswith("mpi4py:")]
    if not peers:
        return []
    return [
        Verdict(f"64 MiB {r.impl} / best of mpi4py", (r.algbw_gbps or 0.0) / max(peers), "x", 0.95, at_least=True)
        for r in at_size
        if r.impl.startswith("aiodist:")
    ]


def ratio(ours: float | None, theirs: float | None) -> float:
    """Return how many times theirs ours is; NaN where one of them is not known."""
    return ours / theirs if ours and theirs else float("nan")
