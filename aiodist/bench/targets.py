"""The speeds to reach on 2 ranks, and whether records reach them: a pure function."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiodist.bench.records import Record

__all__ = ["Verdict", "verdicts"]


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
    return [*waits, *values, *_steps(found), *_lags(found), *_epochs(found), *_jobs(found), *_served(found)]


_VALUES = (
    ("parked_cpu", 0.05, "CPU s/s", 1.0),
    ("loop_lag", 5.0, "ms", 1e3),
    ("loop_lag_small", 5.0, "ms", 1e3),
    ("progress_busy", 0.1, "x", 1.0),
    ("backward_beside_pending", 1.1, "x", 1.0),
    ("await_busy", 1.5, "x", 1.0),
)
_TINY_PARAMETERS = 1000
_MANY = (("gather_1000", 8.0), ("aiodist_gather_1000", 5.0), ("issue", 10.0))


def _small(records: Sequence[Record], peer: str, target: float) -> list[Verdict]:
    """Ours over MPI against Iallreduce, ours over gloo against gloo itself."""
    ours = _ours_over_gloo if peer == "gloo" else _ours_over_mpi
    lines = []
    for record in records:
        if record.op == "await_small" and record.impl == peer:
            for mine in records:
                if mine.op == "await_small" and mine.nbytes == record.nbytes and ours(records, mine.impl):
                    ratio = _ratio(mine.seconds, record.seconds)
                    lines.append(Verdict(f"await {mine.impl} {record.nbytes} B / {peer}", ratio, "x", target))
    return lines


def _ours_over_mpi(records: Sequence[Record], impl: str) -> bool:
    return impl == "aiodist:mpi" or (impl == "aiodist:auto" and _mpi(records))


def _ours_over_gloo(records: Sequence[Record], impl: str) -> bool:
    return impl == "aiodist:gloo" or (impl == "aiodist:auto" and not _mpi(records))


def _mpi(records: Sequence[Record]) -> bool:
    return any(record.impl.startswith("mpi4py:") for record in records)


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


def _steps(records: Sequence[Record]) -> list[Verdict]:
    """Training steps, ours against others of the same model, batch and run."""
    lines = []
    for mine in records:
        if not mine.op.startswith("train:") or mine.impl not in ("aiodist:datapar", "aiodist:pipelined"):
            continue
        kind = mine.op.removeprefix("train:")
        others = {r.impl: r.seconds for r in records if (r.op, r.batch) == (mine.op, mine.batch)}
        what = f"{kind} {mine.batch} {mine.impl}"
        if kind == "tiny1000":
            if mine.impl == "aiodist:datapar" and mine.seconds and others.get("none"):
                each = (mine.seconds - (others["none"] or 0.0)) / _TINY_PARAMETERS * 1e6
                lines.append(Verdict(f"{what} - none, a parameter", each, "us", 3.0))
        elif mine.impl == "aiodist:pipelined":
            if (kind, mine.batch) == ("mlp", 32) and "aiodist:datapar" in others:
                lines.append(Verdict(f"{what} / datapar", _ratio(mine.seconds, others["aiodist:datapar"]), "x", 1.0))
        else:
            heavy = (kind, mine.batch) == ("mlp", 32)
            for other, target in (("none", 1.35 if heavy else 1.06), ("ddp", 1.0)):
                if other in others:
                    lines.append(Verdict(f"{what} / {other}", _ratio(mine.seconds, others[other]), "x", target))
    return lines


def _lags(records: Sequence[Record]) -> list[Verdict]:
    """The ticker beside `net.step`."""
    return [
        Verdict(f"{record.op.removeprefix('train:')} {record.batch} {record.impl}, loop lag", lag * 1e3, "ms", 5.0)
        for record in records
        if record.impl in ("aiodist:datapar", "aiodist:pipelined") and (lag := record.loop_lag) is not None
    ]


def _epochs(records: Sequence[Record]) -> list[Verdict]:
    """An epoch of ours against the slower of what loading alone and computing alone take.

    Where both compute, that is only to be had where each rank has two cores.
    """
    lines = []
    for op in ("prefetch", "prefetch:cpu"):
        here = [r for r in records if r.op == op and (op == "prefetch" or len(r.affinity or ()) >= 2 * r.ranks)]
        seconds = {r.impl: r.seconds for r in here if r.seconds}
        if {"aiodist:prefetch", "loader", "step"} <= set(seconds):
            slower = max(seconds["loader"] or 0.0, seconds["step"] or 0.0)
            what = f"{op} / the slower of loader and step"
            lines.append(Verdict(what, _ratio(seconds["aiodist:prefetch"], slower), "x", 1.1))
    return lines


def _jobs(records: Sequence[Record]) -> list[Verdict]:
    """Samples per second, accuracy, and lines of user code, against the job written with DDP.

    With loader processes or without, whichever is the better.
    """
    lines = []
    for mine in records:
        values = [r.value for r in records if r.op == mine.op and r.impl in ("ddp", "ddp:0") and r.value is not None]
        theirs = max(values, default=None)
        if mine.impl != "aiodist:datapar" or mine.value is None or theirs is None:
            continue
        if mine.op == "end2end:lines":
            lines.append(Verdict("end2end: lines of code / ddp", mine.value / theirs, "x", 1.0))
        elif mine.op.endswith(":accuracy"):
            lines.append(Verdict(f"{mine.op} - ddp", mine.value - theirs, "", -0.01, at_least=True))
        elif mine.op.startswith("end2end:"):
            lines.append(Verdict(f"{mine.op}, samples/s / ddp", mine.value / theirs, "x", 1.1, at_least=True))
    return lines


def _served(records: Sequence[Record]) -> list[Verdict]:
    """A parameter server's large pushes and pulls against others', its small pushes, and the step beside it."""
    lines = []
    for mine in records:
        for size, ours, theirs, target in _PUSHES_AND_PULLS:
            if (mine.nbytes, mine.impl) == (size, ours) and mine.op in ("push", "pull") and mine.rule in (None, "copy"):
                here = [r for r in records if (r.op, r.nbytes, r.rule) == (mine.op, size, mine.rule)]
                what = f"{mine.op} {size >> 20} MiB {ours} against {theirs}"
                lines += [
                    Verdict(what, _ratio(r.seconds, mine.seconds), "x faster", target, at_least=True)
                    for r in here
                    if r.impl == theirs
                ]
        if (mine.op, mine.nbytes, mine.rule, mine.impl) == ("push", 4 << 10, "copy", "aiodist:ps") and mine.seconds:
            lines.append(Verdict("push 4 KiB aiodist:ps", mine.seconds * 1e6, "us", 40.0))
        if (mine.op, mine.nbytes, mine.impl) == ("ps_ops", 64, "aiodist:ps") and mine.value is not None:
            lines.append(Verdict("pushes of 64 B, a second", mine.value, "", 50_000, at_least=True))
        if mine.op == "serving" and mine.value is not None:
            lines.append(Verdict(f"step beside 10 pulls/s of {mine.impl}", mine.value, "x", 1.05))
    return lines


_PUSHES_AND_PULLS = (
    (64 << 20, "aiodist:ps", "rpc", 2.0),
    (64 << 20, "aiodist:ps", "mpi", 0.9),
    (64 << 20, "aiodist:ps-arena", "rpc", 4.0),
)


def _ratio(ours: float | None, theirs: float | None) -> float:
    return ours / theirs if ours and theirs else float("nan")
