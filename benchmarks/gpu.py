"""`python -m benchmarks gpu`: every speed to reach on a CUDA device, in one call; starts jobs of ranks, and collects.

The cases lie in `gpu_cases`; `gpu_worker` is what each rank runs, with what lies in `gpu_waits`, `gpu_reductions` and
`gpu_training`. A case that fails, hangs or takes its process along ends its job; another one measures what is left.
"""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import time
from typing import Annotated

import typer

from aiodist.bench.cli import writable
from aiodist.bench.plan import parse_names
from aiodist.collectives.choice.availability import state_of
from aiodist.env import Environment, Starter
from aiodist.errors import AiodistError, BackendUnavailable, ConfigError
from benchmarks import gpu_report
from benchmarks.gpu_cases import CASES, Case, Figure, State, Todo, figures, groups, without_value
from benchmarks.gpu_notes import Notes, read_notes
from benchmarks.verdicts import terminal

__all__ = ["Limits", "Run", "app"]

_SECONDS = 460.0
_STOPPED = (130, 143)  # by a signal to this process: then nothing else is to begin

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Limits:
    """How long the command waits, in seconds."""

    start: float = 90.0
    """For a job's first case to begin."""
    grace: float = 20.0
    """For a case that should be over."""
    look: float = 0.2
    """Between two looks at what the ranks have written."""


@app.command()
def gpu(
    only: Annotated[str | None, typer.Option(metavar="NAMES", help=f"Some of {', '.join(CASES)} (all).")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes: to see that it runs.")] = False,
    seconds: Annotated[float, typer.Option(metavar="S", min=1.0, help="No case begins that may end later.")] = _SECONDS,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the figures there.")] = None,
    mpi: Annotated[str, typer.Option(metavar="auto|none|…", help="As in aiodist run.")] = "auto",
) -> None:
    """Measure on one CUDA device, with up to 4 ranks on it, and where there are several with a rank on each.

    Every result is first compared with float64 on the CPU. Exit code 1 where a case failed, 2 without a CUDA device.
    """
    file = writable("--json", json)
    environment = Environment.read()
    if environment.starter is not Starter.ALONE:
        raise ConfigError(
            f"benchmarks gpu: it starts its ranks itself, and {environment.starter} has started this process"
        )
    devices = _devices()
    cases = _chosen(only, devices)
    first = environment.visible_devices[0] if environment.visible_devices else "0"
    refused = {case.name: why for case in cases if (why := _refused(case, first))}
    start = Jobs(mpi, first)
    run = Run(cases, devices, time() + seconds, quick=quick, start=start, refused=refused)
    found = asyncio.run(run.all())
    width, colour = terminal()
    if file is not None:  # first: what was measured is not lost when printing it fails
        gpu_report.write(file, run.machine, found, run.records)
    gpu_report.show(run.machine, found, width=width, colour=colour)
    raise typer.Exit(int(any(figure.state is State.FAILED for figure in found)))


def _devices() -> int:
    """Return how many CUDA devices there are; raise `ConfigError` where there is none."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        built = torch.version.cuda or "without CUDA"
        raise ConfigError(f"there is no CUDA device here: torch {torch.__version__} (built: {built}) sees none")
    return count


def _refused(case: Case, first: str) -> str:
    """Return why NCCL does not connect the ranks of a case that share the device `first`; empty where it may."""
    if not case.shares:
        return ""
    from aiodist.backends import nccl

    try:
        found = nccl.load().version()
    except BackendUnavailable as error:
        return f"nccl is {state_of(str(error))}: {error}"
    why = nccl.unconnectable([(socket.gethostname(), first)] * case.ranks, found, shared=True)
    return f"nccl is not possible here: {why}" if why else ""


def _chosen(only: str | None, devices: int) -> list[Case]:
    names = tuple(CASES) if only is None else parse_names("--only", only, tuple(CASES))
    cases = [CASES[name] for name in names]
    several = [case.name for case in cases if not case.ranks]
    if only is not None and several and devices == 1:
        raise ConfigError(f"--only {several[0]}: it takes several CUDA devices, and one is here")
    return [case for case in cases if case.ranks or devices > 1]


@dataclass(frozen=True)
class Jobs:
    """Starts the ranks of one job, and returns their exit code."""

    mpi: str
    first: str
    """The device that ranks share, as CUDA_VISIBLE_DEVICES names it."""

    def __call__(self, todo: Todo, ranks: int, *, shares: bool, together: bool) -> Awaitable[int]:
        exports = [f"NCCL_MULTI_RANK_GPU_ENABLE={int(shares)}"]
        if together:
            exports.append(f"CUDA_VISIBLE_DEVICES={self.first}")
        return todo.start("benchmarks.gpu_worker", ranks, mpi=self.mpi, exports=tuple(exports))


Start = Callable[..., Awaitable[int]]


class Run:
    """One run of the command: what is measured, and what has become of it."""

    def __init__(
        self,
        cases: Sequence[Case],
        devices: int,
        until: float,
        *,
        quick: bool,
        start: Start,
        refused: Mapping[str, str] | None = None,
        limits: Limits = Limits(),
    ) -> None:
        """`start(todo, ranks, shares=, together=)` runs a job; no case begins that may end after `until`.

        `refused` says of cases, by name, why no job is started for them.
        """
        self.machine: dict[str, object] = {}
        self.records: list[dict[str, object]] = []
        self._cases = cases
        self._devices = devices
        self._until = until
        self._quick = quick
        self._start = start
        self._refused = refused or {}
        self._limits = limits

    async def all(self) -> list[Figure]:
        """Measure, job after job; return every line of every case, in the order of the cases."""
        found = {
            case.name: without_value(case, State.NOT_POSSIBLE, self._refused[case.name])
            for case in self._cases
            if case.name in self._refused
        }
        for group in groups([case for case in self._cases if case.name not in found]):
            left = list(group)
            while left:
                found |= await self._some(left)
                left = [case for case in left if case.name not in found]
        return [figure for case in self._cases for figure in found[case.name]]

    async def _some(self, cases: Sequence[Case]) -> dict[str, list[Figure]]:
        """Start a job for `cases` of a group; return what has become of the first of them, at least."""
        left = self._until - time()
        if left < min(case.seconds for case in cases):
            why = f"{max(left, 0.0):.0f} s are left"
            return {case.name: without_value(case, State.NOT_MEASURED, why) for case in cases}
        with tempfile.TemporaryDirectory(prefix="aiodist-bench-") as folder:
            todo = Todo(tuple(case.name for case in cases), folder, self._until, self._quick)
            ended = await self._job(todo, cases)
            notes = read_notes(folder)
        self.machine = notes.machine or self.machine
        found = {}
        for case in cases:
            if (result := self._result(case, notes)) is not None:
                found[case.name] = result
        if len(found) < len(cases):
            # The first that has no result is whom the job ended with; where none began, no other will.
            lost = [case for case in cases if case.name not in found]
            for case in lost[: None if not notes.began else 1]:
                found[case.name] = without_value(case, State.FAILED, notes.error_of(case.name) or ended)
        return found

    async def _job(self, todo: Todo, cases: Sequence[Case]) -> str:
        """Run a job to its end, or until a case takes too long; return how it ended."""
        first = cases[0]
        # Where there is one device, or ranks are to share one, no other is seen.
        running = asyncio.ensure_future(
            self._start(todo, first.ranks or self._devices, shares=first.shares, together=first.ranks > 0)
        )
        began, why = time(), ""
        said = None
        while not why and not (await asyncio.wait([running], timeout=self._limits.look))[0]:
            notes = read_notes(todo.folder)
            if notes.running is not None and notes.running != said:
                said = notes.running
                typer.echo(f"aiodist: measuring {said[0]}", err=True)
            why = self._overdue(notes, {case.name: case for case in cases}, began)
        if why:
            running.cancel()
        try:
            code = await running
        except asyncio.CancelledError:
            return why
        except AiodistError as error:  # it could not be started
            return str(error)
        if code in _STOPPED:
            self._until = 0.0
        return f"the ranks ended with exit code {code}"

    def _overdue(self, notes: Notes, cases: dict[str, Case], began: float) -> str:
        """Return why the job is to be ended, "" where it is not."""
        if notes.running is None:
            waits = not notes.began and time() - began > self._limits.start
            return f"the ranks had not begun after {self._limits.start:g} s" if waits else ""
        name, since = notes.running
        patience = cases[name].seconds + self._limits.grace
        return f"not over after {patience:g} s" if time() - since > patience else ""

    def _result(self, case: Case, notes: Notes) -> list[Figure] | None:
        """Return the lines of a case that was dealt with."""
        told = notes.results.get(case.name)
        if told is None:
            return None
        if "late" in told:
            return without_value(case, State.NOT_MEASURED, str(told["late"]))
        if "not_possible" in told:
            return without_value(case, State.NOT_POSSIBLE, str(told["not_possible"]))
        self.records += told["records"]
        return list(figures(case, told["values"], told["missing"]))
