"""Targets of awaits and collectives, and verdicts on records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.table import Table

from aiodist.bench.records import Record, size_text
from aiodist.bench.timing import OVERWRITTEN_BYTES
from benchmarks.busy import BUSY
from benchmarks.figures import Figure, figures
from benchmarks.verdicts import Verdict, verdict_table

__all__ = ["ratio", "reached", "verdicts"]


def reached(records: Sequence[Record]) -> list[Table]:
    """Return a table of the verdicts, if there are any."""
    found = verdicts(records)
    return [verdict_table(found)] if found else []


def verdicts(records: Iterable[Record]) -> list[Verdict]:
    """Return a verdict for each figure of the records, compared with the peer of the same run."""
    found = figures(records)
    return [*_small(found), *_busy(found), *_many(found), *_collectives(found), *_waits(found)]


def _pairs(records: Sequence[Record], ours: str, theirs: str) -> Iterator[tuple[Record, Record]]:
    """Yield the pairs of records with the same operation and size."""
    by_case = {(r.op, r.nbytes): r for r in records if r.impl == theirs and r.seconds is not None}
    for mine in records:
        if mine.impl == ours and mine.seconds is not None and (peer := by_case.get((mine.op, mine.nbytes))):
            yield mine, peer


# --- awaits of 2 ranks ---------------------------------------------------------------------------------------------

_SMALL = (
    ("aiodist:auto", "mpi4py:allreduce", 1.0),
    ("aiodist:auto", "mpi4py:iallreduce", 0.6),
    ("aiodist:mpi", "mpi4py:iallreduce", 2.0),
    ("aiodist:gloo", "gloo", 1.2),
)


def _small(records: Sequence[Record]) -> list[Verdict]:
    awaited = [record for record in records if record.op == "await_small"]
    return [
        Verdict(f"await {ours} {size_text(mine.nbytes)} / {theirs}", ratio(mine.seconds, peer.seconds), "x", target)
        for ours, theirs, target in _SMALL
        for mine, peer in _pairs(awaited, ours, theirs)
    ]


def _busy(records: Sequence[Record]) -> list[Verdict]:
    """Judge 4 B on busy cores: the median hides long awaits, so the mean counts too."""
    awaited = [record for record in records if (record.op, record.nbytes) == (f"await_small{BUSY}", 4)]
    lines = []
    for mine, peer in _pairs(awaited, "aiodist:auto", "mpi4py:iallreduce"):
        what = f"busy cores: await {mine.impl} 4 B / {peer.impl}"
        lines.append(Verdict(f"{what}, median", ratio(mine.seconds, peer.seconds), "x", 0.7))
        lines.append(Verdict(f"{what}, mean", ratio(mine.mean, peer.mean), "x", 0.5))
    return lines


_MANY = (("aiodist_gather", 1.5), ("issue", 1.0))
_GROWTH = ("gather", "aiodist_gather", "issue")


def _many(records: Sequence[Record]) -> list[Verdict]:
    """Judge 1,000 handles in flight, and 20,000 compared with 1,000."""
    seconds = {r.op: r.seconds for r in records if r.impl.startswith("aiodist:") and r.seconds is not None}
    gathered = [record for record in records if record.op == "gather_1000"]
    lines = [
        Verdict(f"{mine.op}, each / {peer.impl}", ratio(mine.seconds, peer.seconds), "x", 1.2)
        for ours in dict.fromkeys(r.impl for r in gathered if r.impl.startswith("aiodist:"))
        for mine, peer in _pairs(gathered, ours, "asyncio:finished")
    ]
    for op, target in _MANY:
        if (each := seconds.get(f"{op}_1000")) is not None:
            lines.append(Verdict(f"{op}_1000, each", each * 1e6, "us", target))
    for op in _GROWTH:
        if {f"{op}_1000", f"{op}_20000"} <= set(seconds):
            grown = ratio(seconds[f"{op}_20000"], seconds[f"{op}_1000"])
            lines.append(Verdict(f"{op}, each of 20,000 / of 1,000", grown, "x", 1.5))
    return lines


_VALUES = (
    ("parked_cpu", 0.01, "CPU s/s", 1.0),
    ("peer_computes_cpu", 0.01, "CPU s/s", 1.0),
    ("loop_lag", 2.0, "ms", 1e3),
    ("loop_lag_small", 2.0, "ms", 1e3),
    ("progress_busy", 0.1, "x", 1.0),
    ("backward_beside_pending", 1.1, "x", 1.0),
    ("await_busy", 2.0, "x", 1.0),
)


def _waits(records: Sequence[Figure]) -> list[Verdict]:
    woken = [
        Verdict(f"wake_up {mine.impl} / {peer.impl}", ratio(mine.seconds, peer.seconds), "x", 1.2)
        for ours in dict.fromkeys(r.impl for r in records if r.impl.startswith("aiodist:"))
        for mine, peer in _pairs([record for record in records if record.op == "wake_up"], ours, "pipe:add_reader")
    ]
    return woken + [
        Verdict(op, record.value * scale, unit, target)
        for op, target, unit, scale in _VALUES
        for record in records
        if record.op == op and record.value is not None
    ]


# --- collectives of one host -----------------------------------------------------------------------------------------


def _collectives(records: Sequence[Record]) -> list[Verdict]:
    """Judge the speed, compared with blocking MPI, of ordinary tensors and of those of the arena."""
    lines = []
    for op in ("allreduce", "broadcast", "reduce_scatter", "allgather"):
        here = [record for record in records if record.op == op]
        blocking = f"mpi4py:{op}"
        for ours, theirs in (("aiodist:auto", blocking), ("aiodist:arena", blocking)):
            for mine, peer in _pairs(here, ours, theirs):
                target = _quickness(mine)
                if target is not None:
                    what = f"{op} {size_text(mine.nbytes)} {ours} against {theirs}, {mine.ranks} ranks"
                    quick = ratio(peer.seconds, mine.seconds)
                    lines.append(Verdict(what, quick, "x as quick", target, at_least=True))
        lines += [
            Verdict(f"{op} 64 MiB {mine.impl} / copy", ratio(mine.seconds, peer.seconds), "x", 2.0)
            for mine, peer in _pairs(here, "aiodist:arena", "copy")
            if (op, mine.nbytes, mine.ranks) == ("allreduce", 64 << 20, 2)
        ]
    return lines


_ARENA_OTHERS = {
    ("broadcast", 1 << 20): 3.0,
    ("reduce_scatter", 1 << 20): 3.0,
    ("allgather", 1 << 20): 3.0,
    ("broadcast", 64 << 20): 2.5,
    ("reduce_scatter", 64 << 20): 3.0,
    ("allgather", 64 << 20): 1.5,  # each rank writes 128 MiB
}
_ARENA_FOUR_RANKS = {64 << 10: 2.0, 64 << 20: 5.0}
"""Target speedups of an allreduce of four ranks on 2 cores, by bytes."""


def _quickness(mine: Record) -> float | None:
    """Return the target speedup over a peer, or None without a target."""
    nbytes = mine.nbytes or 0
    if mine.impl == "aiodist:arena" and (mine.op, mine.ranks) == ("allreduce", 4):
        return _ARENA_FOUR_RANKS.get(nbytes)
    if mine.ranks != 2 or nbytes < OVERWRITTEN_BYTES:
        return None
    if mine.op != "allreduce":
        return _ARENA_OTHERS.get((mine.op, nbytes)) if mine.impl == "aiodist:arena" else None
    if mine.impl == "aiodist:arena":
        return 4.0
    return 1.0 if nbytes < 4 << 20 else 1.5


def ratio(ours: float | None, theirs: float | None) -> float:
    """Return ours divided by theirs, or NaN if one of them is missing."""
    return ours / theirs if ours and theirs else float("nan")
