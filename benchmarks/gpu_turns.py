"""Sizes, turns, kernels of a known length, and checks of results: shared by the cases of the benchmark `gpu`."""

from __future__ import annotations

import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from aiodist.bench.timing import Contender, Pace, interleaved
from aiodist.errors import AiodistError
from benchmarks.figures import Figure
from benchmarks.suite import own

if TYPE_CHECKING:
    from aiodist.bench.records import Record
    from aiodist.bench.session import Session
    from aiodist.communicator import Communicator

__all__ = ["Bench", "Sizes", "Way", "WrongResult", "check", "in_turns", "median", "seconds_between", "spin_rate"]

_PROBE_CYCLES = 2_000_000  # about a millisecond, much more than a launch
_PROBES = 5
_TRIES = 10
_AGREE = 0.01
_WARMUPS = 2


@dataclass(frozen=True)
class Sizes:
    """The sizes of the cases; times in seconds."""

    allreduce_bytes: int = 256 << 20
    kernel: float = 20e-6
    """The awaited kernel."""
    ahead: float = 500e-6
    """A kernel during which later ones are queued."""
    wake: float = 0.2
    """Work after which an idle device has raised its clock."""
    long_kernel: float = 1.0
    waits: int = 500
    """Samples of a wait."""
    rounds: int = 10
    """Samples of other ways."""
    batch: int = 10
    """Operations, or steps, of a sample of a fast way."""
    flight: int = 200
    """Small operations in flight."""
    width: int = 1024
    layers: int = 8
    words: int = 8192
    window: int = 256
    """Tokens."""
    samples: int = 32
    """Samples of one rank in a step; ranks that share the device have a quarter."""
    batches: int = 60
    """Batches of an epoch."""


QUICK = Sizes(
    **{"allreduce_bytes": 1 << 20, "waits": 20, "rounds": 3, "batch": 2, "flight": 20, "width": 64, "layers": 2},
    **{"words": 128, "window": 16, "samples": 4, "batches": 6},
    long_kernel=0.1,
)


class WrongResult(AiodistError):
    """A measured operation computes something else than float64 on the CPU."""


@dataclass(frozen=True)
class Bench:
    """The session of a case and its sizes, the same on every rank."""

    session: Session
    sizes: Sizes

    @property
    def coll(self) -> Communicator:
        """The communicator of all ranks."""
        return self.session.coll

    @property
    def device(self) -> torch.device:
        """This rank's CUDA device."""
        return self.coll.device

    async def fence(self) -> None:
        """Wait for the device, then for all ranks."""
        torch.cuda.synchronize(self.device)
        await self.session.fence()

    def values(self, **values: float) -> list[Record]:
        """Return records of the figures of this case, on rank 0."""
        op, size = self.session.plan.op, self.coll.size
        return [] if self.coll.rank else [Figure(op, name, size, value=value) for name, value in values.items()]

    @classmethod
    def of(cls, session: Session) -> Bench:
        """Return the bench of a session, and make this rank's device the current one."""
        torch.cuda.set_device(session.coll.device)
        return cls(session, QUICK if own(session.plan).get("quick") else Sizes())


@dataclass(frozen=True)
class Way:
    """One implementation: a sample is `batch` calls of `once`, with `prepare` before the clock starts."""

    name: str
    once: Callable[[], Awaitable[object]]
    batch: int = 1
    prepare: Callable[[], object] | None = None
    queues: bool = True
    """True if a sample ends when the device has finished its queue."""

    async def sample(self) -> None:
        """Run the operations of one sample."""
        for _ in range(self.batch):
            await self.once()
        if self.queues:
            torch.cuda.synchronize()


async def in_turns(bench: Bench, ways: Sequence[Way], rounds: int | None = None) -> dict[str, list[float]]:
    """Return the seconds of each way's `once`, a list of samples by name; `rounds` defaults to `Sizes.rounds`."""
    contenders = [Contender(way.name, way.sample, awaited=True, overwrite=way.prepare) for way in ways]
    samples = await interleaved(contenders, bench.fence, Pace(rounds or bench.sizes.rounds, 1, _WARMUPS))
    return {way.name: [seconds / way.batch for seconds in samples[way.name]] for way in ways}


def median(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return this rank's medians."""
    return {name: statistics.median(found) for name, found in samples.items()}


def spin_rate(wake: float = 0.2) -> float:
    """Return the cycles a second that the kernel of `torch.cuda._sleep` counts on the current device.

    An idle device raises its clock during `wake` seconds of work.
    """
    until = perf_counter() + wake
    while perf_counter() < until:
        _probe()
    found = _rate()
    for _ in range(_TRIES - 1):
        before, found = found, _rate()
        if abs(found - before) <= _AGREE * before:
            break
    return found


def _rate() -> float:
    return statistics.median(_PROBE_CYCLES / max(_probe(), 1e-9) for _ in range(_PROBES))


def _probe() -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    torch.cuda._sleep(_PROBE_CYCLES)
    end.record()
    end.synchronize()
    return seconds_between(begin, end)


def seconds_between(begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
    """Return the time between two recorded events, which were made with `enable_timing`."""
    return float(begin.elapsed_time(end)) * 1e-3


def check(what: str, found: Tensor, expected: Tensor, *, rtol: float, atol: float) -> None:
    """Raise WrongResult unless `found`, on a device, equals `expected`, in float64 on the CPU."""
    here = found.detach().cpu().double()
    wrong = ~torch.isclose(here, expected, rtol=rtol, atol=atol)  # NaN is far from everything
    if count := int(wrong.sum()):
        first = int(wrong.flatten().nonzero()[0])
        raise WrongResult(
            f"{what}: {count} of {here.numel()} elements are wrong; number {first} is "
            f"{float(here.flatten()[first]):g}, expected {float(expected.flatten()[first]):g}"
        )
