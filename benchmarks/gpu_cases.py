"""What the benchmark `gpu` measures, and the speeds to reach: pure data, which travels as JSON and imports no torch."""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from aiodist.bench.plan import Errand
from aiodist.bench.records import Record

if TYPE_CHECKING:
    from benchmarks.gpu_turns import Bench

__all__ = [
    "CASES",
    "FULL",
    "QUICK",
    "Case",
    "Figure",
    "Line",
    "Measured",
    "Sizes",
    "State",
    "Todo",
    "figures",
    "groups",
]


class State(StrEnum):
    """What became of a line of the table."""

    REACHED = "yes"
    MISSED = "NO"
    SEEN = "no target"
    NOT_POSSIBLE = "not possible here"
    NOT_MEASURED = "not measured"
    FAILED = "FAILED"


@dataclass(frozen=True)
class Line:
    """One figure that a case measures, with its target; None: it is shown beside the others."""

    name: str
    what: str
    unit: str
    target: float | None = None
    at_least: bool = False


@dataclass(frozen=True)
class Case:
    """What is measured in one go, by all ranks of a job."""

    name: str
    ranks: int
    """0: one for each device, where there are several."""
    measured_by: str
    """module:function; `async def function(bench) -> Measured`, of which rank 0's counts."""
    seconds: float
    """How long it may take."""
    lines: tuple[Line, ...]
    shares: bool = False
    """NCCL is told that ranks may share a device."""

    def load(self) -> Callable[[Bench], Awaitable[Measured]]:
        """Return the function that measures, imported now."""
        module, _, function = self.measured_by.partition(":")
        found: Callable[[Bench], Awaitable[Measured]] = getattr(importlib.import_module(module), function)
        return found


_WAITS = "benchmarks.gpu_waits"
_REDUCTIONS = "benchmarks.gpu_reductions"
_TRAINING = "benchmarks.gpu_training"


def _allreduce(ranks: int, seconds: float) -> Case:
    what = f"{ranks} ranks on one GPU, allreduce by cuda_ipc"
    return Case(
        f"allreduce_{ranks}",
        ranks,
        f"{_REDUCTIONS}:beside_copies",
        seconds,
        (
            Line("copy", f"{what}: its bandwidth over that of copies", "x", 0.6, at_least=True),
            Line("gloo", f"{what}: times as fast as dist.all_reduce over gloo", "x", 5.0, at_least=True),
            Line("staged", f"{what}: times as fast as our own staged", "x", 5.0, at_least=True),
            Line("serial", f"{what}: one awaited after the other", "ms"),
        ),
    )


def _nccl(ranks: int) -> Case:
    what = f"{ranks} ranks on one GPU, allreduce by cuda_ipc: times as fast as NCCL"
    line = Line("nccl", what, "x", 1.0, at_least=True)
    return Case(f"nccl_{ranks}", ranks, f"{_REDUCTIONS}:beside_nccl", 40.0, (line,), shares=True)


CASES: Mapping[str, Case] = {
    case.name: case
    for case in (
        Case(
            "await",
            1,
            f"{_WAITS}:finished_soon",
            20.0,
            (
                Line("await", "await of an event behind a 20 us kernel, launch to result, over the kernel", "us", 30.0),
                Line("blocking", "the same with event.synchronize()", "us"),
            ),
        ),
        Case(
            "parked",
            1,
            f"{_WAITS}:parked",
            15.0,
            (Line("cpu", "CPU while a 1 s kernel is awaited", "CPU s/s", 0.05),),
        ),
        Case(
            "wait_stream",
            1,
            f"{_WAITS}:behind_a_kernel",
            20.0,
            (
                Line("wait_stream", "gap from a kernel to one behind h.wait_stream", "us", 10.0),
                Line("wait_event", "the same with stream.wait_event", "us"),
                Line("await", "the same with await h", "us"),
            ),
        ),
        Case(
            "nccl_overhead",
            1,
            f"{_WAITS}:nccl_overhead",
            45.0,
            (
                Line("await", "await of one rank's allreduce by NCCL, over nccl4py's and a synchronise", "us", 15.0),
                Line("issue", "the call alone, over nccl4py's", "us"),
                Line("flight", "many in flight, waited for once: each, over nccl4py's", "us"),
            ),
        ),
        Case(
            "train",
            1,
            f"{_TRAINING}:beside_none",
            60.0,
            (Line("datapar", "transformer, bf16, one rank: step of DataParallel over a plain one", "x", 1.03),),
        ),
        Case(
            "prefetch",
            1,
            f"{_TRAINING}:prefetched",
            60.0,
            (Line("prefetch", "epoch with prefetch(device) over the slower of loader and steps", "x", 1.1),),
        ),
        _allreduce(2, 60.0),
        _allreduce(4, 90.0),
        Case(
            "train_4",
            4,
            f"{_TRAINING}:beside_ddp",
            90.0,
            (
                Line(
                    "ddp",
                    "4 ranks on one GPU: a step of DataParallel, times as fast as DDP over gloo",
                    "x",
                    1.5,
                    at_least=True,
                ),
            ),
        ),
        _nccl(2),
        _nccl(4),
        Case(
            "allreduce_devices",
            0,
            f"{_REDUCTIONS}:on_several_devices",
            45.0,
            (
                Line("nccl", "one rank on each GPU: cuda_ipc, times as fast as NCCL", "x"),
                Line("staged", "one rank on each GPU: cuda_ipc, times as fast as our own staged", "x"),
            ),
        ),
    )
}
"""By name, in the order in which they are measured: those of one kind of job side by side."""


@dataclass(frozen=True)
class Sizes:
    """How much each case does; times in seconds."""

    allreduce_bytes: int = 256 << 20
    kernel: float = 20e-6
    """What is awaited."""
    ahead: float = 500e-6
    """A kernel during which all that follows is queued."""
    wake: float = 0.2
    """Work after which an idle device has raised its clock."""
    long_kernel: float = 1.0
    waits: int = 500
    """Samples of a wait, at most."""
    rounds: int = 15
    """Turns of anything else, at most."""
    batch: int = 10
    """Operations, or steps, of a sample, where they are quick."""
    flight: int = 200
    """Small operations in flight."""
    seconds: float = 12.0
    """How long the ways of one comparison take turns."""
    width: int = 1024
    layers: int = 8
    words: int = 8192
    window: int = 256
    """Tokens."""
    samples: int = 32
    """Of one rank alone in a step; ranks that share the device have a quarter."""
    batches: int = 60
    """Of an epoch."""


FULL = Sizes()
QUICK = Sizes(
    allreduce_bytes=1 << 20,
    long_kernel=0.1,
    waits=20,
    rounds=3,
    batch=2,
    flight=20,
    seconds=2.0,
    width=64,
    layers=2,
    words=128,
    window=16,
    samples=4,
    batches=6,
)


@dataclass(frozen=True)
class Measured:
    """What a case found: values by the names of its lines, and why some are missing."""

    values: Mapping[str, float] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    records: Sequence[Record] = ()

    def to_dict(self) -> dict[str, object]:
        """Return it as JSON has it."""
        records = [record.to_dict() for record in self.records]
        return {"values": dict(self.values), "missing": dict(self.missing), "records": records}


@dataclass(frozen=True)
class Figure:
    """A line of the table as it came out."""

    case: str
    line: str
    what: str
    unit: str
    target: float | None
    at_least: bool
    state: State
    value: float | None = None
    why: str = ""
    """Why there is no value."""

    def to_dict(self) -> dict[str, object]:
        """Return it as JSON has it."""
        return {**asdict(self), "state": str(self.state)}


def figures(case: Case, found: Mapping[str, float], missing: Mapping[str, str] | None = None) -> Iterator[Figure]:
    """Yield the lines of a case that was measured: `missing` says why a value was not to be had."""
    for line in case.lines:
        value = found.get(line.name)
        if value is None:
            why = (missing or {}).get(line.name, "the case did not say")
            yield _figure(case, line, State.NOT_POSSIBLE if missing and line.name in missing else State.FAILED, why=why)
        elif line.target is None:
            yield _figure(case, line, State.SEEN, value)
        else:
            reached = value >= line.target if line.at_least else value <= line.target
            yield _figure(case, line, State.REACHED if reached else State.MISSED, value)


def without_value(case: Case, state: State, why: str) -> list[Figure]:
    """Return the lines of a case that was not measured."""
    return [_figure(case, line, state, why=why) for line in case.lines]


def _figure(case: Case, line: Line, state: State, value: float | None = None, why: str = "") -> Figure:
    return Figure(case.name, line.name, line.what, line.unit, line.target, line.at_least, state, value, why)


def groups(cases: Sequence[Case]) -> list[list[Case]]:
    """Return cases in groups that the same job can measure, in order."""
    found: dict[tuple[int, bool], list[Case]] = {}
    for case in cases:
        found.setdefault((case.ranks, case.shares), []).append(case)
    return list(found.values())


@dataclass(frozen=True)
class Todo(Errand):
    """What the ranks of one job measure."""

    cases: tuple[str, ...]
    folder: str
    """Where each rank writes what it has found, a line for each event."""
    until: float
    """Seconds since the epoch: no case begins that may take longer."""
    quick: bool = False

    @property
    def sizes(self) -> Sizes:
        """How much each case does."""
        return QUICK if self.quick else FULL
