"""Targets of training and the parameter server on 2 ranks, and verdicts on records."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table

from aiodist.bench.records import Record
from benchmarks.await_targets import ratio
from benchmarks.figures import Figure, figures
from benchmarks.threads import OTHERS
from benchmarks.verdicts import Verdict, verdict_table

__all__ = ["reached", "verdicts"]


def reached(records: Sequence[Record]) -> list[Table]:
    """Return a table of the verdicts, if there are any."""
    found = verdicts(records)
    return [verdict_table(found)] if found else []


def verdicts(records: Iterable[Record]) -> list[Verdict]:
    """Return a verdict for each figure of the records, compared with the peer of the same run."""
    found = figures(records)
    return [
        *_steps(found),
        *_step_cpu(found),
        *_engine(found),
        *_lags(found),
        *_epochs(found),
        *_served(found),
        *_codecs(found),
        *_readings(found),
        *_checkpoints(found),
    ]


_OVER_NONE = {("mlp", 32): 1.05, ("transformer", 4): 1.06, ("conv", 32): 1.04, ("tiny1000", 1): 1.15}
_OVER_NONE_OTHERS = 1.06
_OTHER_CPU = {("conv", 32): 2.0, ("transformer", 4): 6.0}
"""Milliseconds of all threads in a step, without the computing one."""


def _steps(records: Sequence[Figure]) -> list[Verdict]:
    """Judge training steps, compared with others of the same model, batch and run."""
    lines = []
    for mine in records:
        if not mine.op.startswith("train:") or mine.thread is not None:
            continue
        kind = mine.op.removeprefix("train:")
        others = {r.impl: r.seconds for r in records if (r.op, r.batch) == (mine.op, mine.batch)}
        against = {
            "aiodist:datapar": {"none": _OVER_NONE.get((kind, mine.batch or 0), _OVER_NONE_OTHERS), "ddp": 1.0},
            "aiodist:pipelined": {"aiodist:datapar": 1.0},
            "aiodist:sharded": {"aiodist:datapar": 1.05},
        }
        for other, target in against.get(mine.impl, {}).items():
            if other in others:
                what = f"{kind} {mine.batch} {mine.impl} / {other.removeprefix('aiodist:')}"
                lines.append(Verdict(what, ratio(mine.seconds, others[other]), "x", target))
    return lines


def _step_cpu(records: Sequence[Figure]) -> list[Verdict]:
    """Judge the CPU time of all threads except the computing one.

    The CPU time of these threads in a step of `none` is subtracted: gloo's thread, for one, is never idle.
    """
    used = {(r.op, r.batch, r.impl): r.cpu for r in records if r.thread == OTHERS and r.cpu is not None}
    lines = []
    for (kind, batch), target in _OTHER_CPU.items():
        mine, none = (used.get((f"train:{kind}:cpu", batch, impl)) for impl in ("aiodist:datapar", "none"))
        if mine is not None and none is not None:
            what = f"{kind} {batch} aiodist:datapar - none, CPU of all threads but the computing"
            lines.append(Verdict(what, (mine - none) * 1e3, "ms", target))
    return lines


def _engine(records: Sequence[Figure]) -> list[Verdict]:
    """Judge steps of the engine, compared with the bare loop."""
    bare = {(r.op, r.batch): r.seconds for r in records if r.impl == "bare"}
    return [
        Verdict(f"{r.op} {r.batch} / bare loop", ratio(r.seconds, bare[r.op, r.batch]), "x", 1.03)
        for r in records
        if r.impl == "aiodist:engine" and (r.op, r.batch) in bare
    ]


def _lags(records: Sequence[Figure]) -> list[Verdict]:
    """Judge the lateness of the loop during `net.step`."""
    return [
        Verdict(f"{record.op.removeprefix('train:')} {record.batch} {record.impl}, loop lag", lag * 1e3, "ms", 5.0)
        for record in records
        if record.impl in ("aiodist:datapar", "aiodist:pipelined") and (lag := record.loop_lag) is not None
    ]


def _epochs(records: Sequence[Figure]) -> list[Verdict]:
    """Judge an epoch of prefetch, compared with the slower one of loading alone and computing alone.

    If both compute, each rank needs two cores.
    """
    lines = []
    for op in ("prefetch", "prefetch:cpu"):
        here = [r for r in records if r.op == op and (op == "prefetch" or len(r.affinity or ()) >= 2 * r.ranks)]
        seconds = {r.impl: r.seconds for r in here if r.seconds}
        if {"aiodist:prefetch", "loader", "step"} <= set(seconds):
            slower = max(seconds["loader"] or 0.0, seconds["step"] or 0.0)
            what = f"{op} / the slower of loader and step"
            lines.append(Verdict(what, ratio(seconds["aiodist:prefetch"], slower), "x", 1.1))
    return lines


def _served(records: Sequence[Figure]) -> list[Verdict]:
    """Judge large pushes and pulls, small pushes, and the step of a rank that serves."""
    lines = []
    for mine in records:
        for size, ours, theirs, target in _PUSHES_AND_PULLS:
            if (mine.nbytes, mine.impl) == (size, ours) and mine.op in ("push", "pull") and mine.rule in (None, "copy"):
                here = [r for r in records if (r.op, r.nbytes, r.rule) == (mine.op, size, mine.rule)]
                what = f"{mine.op} {size >> 20} MiB {ours} against {theirs}"
                lines += [
                    Verdict(what, ratio(r.seconds, mine.seconds), "x faster", target, at_least=True)
                    for r in here
                    if r.impl == theirs
                ]
        if (mine.op, mine.nbytes, mine.rule, mine.impl) == ("push", 4 << 10, "copy", "aiodist:ps") and mine.seconds:
            lines.append(Verdict("push 4 KiB aiodist:ps", mine.seconds * 1e6, "us", 25.0))
        if (mine.op, mine.nbytes, mine.impl) == ("ps_ops", 64, "aiodist:ps") and mine.value is not None:
            lines.append(Verdict("pushes of 64 B, a second", mine.value, "", 50_000, at_least=True))
        if mine.op == "serving" and mine.value is not None:
            lines.append(Verdict(f"step beside 10 pulls/s of {mine.impl}", mine.value, "x", 1.05))
    return lines


def _readings(records: Sequence[Figure]) -> list[Verdict]:
    """Judge records from the disk, compared with plain reads of the same file."""
    seconds = {r.impl: r.seconds for r in records if r.op == "reading"}
    return [
        Verdict(f"reading {impl}, speed / plain", ratio(seconds["plain"], took), "x", 0.7, at_least=True)
        for impl, took in seconds.items()
        if impl != "plain" and "plain" in seconds
    ]


_FEWER_SECONDS = {"powersgd": 1 / 5, "topk": 1 / 3, "bf16": 1 / 1.7}
"""Target ratios of compressed steps to plain ones, for the mlp between two hosts at 1 Gb/s."""


def _codecs(records: Sequence[Figure]) -> list[Verdict]:
    """Judge coding on one core, and compressed steps."""
    coded = {r.impl.removeprefix("aiodist:"): r for r in records if r.op == "codecs" and r.seconds}
    lines = [
        Verdict(f"{name}, encoded and decoded", (r.nbytes or 0) / (r.seconds or 1.0) / 1e9, "GB/s", 1.5, at_least=True)
        for name, r in coded.items()
        if name in ("int8", "sign")
    ]
    if {"int8", "int8-hook"} <= set(coded):
        lines.append(Verdict("int8 / int8-hook", ratio(coded["int8"].seconds, coded["int8-hook"].seconds), "x", 1.0))
    steps = {r.impl.removeprefix("aiodist:"): r.seconds for r in records if (r.op, r.batch) == ("train:mlp", 32)}
    return lines + [
        Verdict(f"mlp 32 {name} / datapar, for two hosts at 1 Gb/s", ratio(steps[name], steps["datapar"]), "x", target)
        for name, target in _FEWER_SECONDS.items()
        if name in steps and "datapar" in steps
    ]


def _checkpoints(records: Sequence[Figure]) -> list[Verdict]:
    """Judge the time for which a checkpoint blocks loop and steps, and steps during the writing."""
    seconds = {r.impl: r.seconds for r in records if r.op == "checkpoint" and r.seconds}
    lines = [
        Verdict(f"checkpoint of the mlp, {what}", seconds[name] * 1e3, "ms", 30.0)
        for name, what in (("aiodist:call", "the loop is held up"), ("aiodist:copy", "steps wait for the copy"))
        if name in seconds
    ]
    beside = [r.value for r in records if r.op == "checkpoint:beside" and r.value is not None]
    return lines + [Verdict("checkpoint of the mlp, a step beside its writing", value, "x", 1.1) for value in beside]


_PUSHES_AND_PULLS = (
    (64 << 20, "aiodist:ps", "rpc", 2.0),
    (64 << 20, "aiodist:ps", "mpi", 0.9),
    (64 << 20, "aiodist:ps-arena", "rpc", 4.0),
)
