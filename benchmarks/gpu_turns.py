"""What the cases of the benchmark `gpu` share: ways in turn, kernels of a known length, results that are looked at."""

from __future__ import annotations

import secrets
import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from aiodist.errors import AiodistError

if TYPE_CHECKING:
    from aiodist.bench.session import Session
    from aiodist.communicator import Communicator
    from benchmarks.gpu_cases import Sizes

__all__ = [
    "Bench",
    "NotPossible",
    "Way",
    "WrongResult",
    "check",
    "in_turns",
    "median",
    "poison",
    "seconds_between",
    "spin_rate",
]

_PROBE_CYCLES = 2_000_000  # about a millisecond: launching it does not count
_PROBES = 5
_TRIES = 10
_AGREE = 0.01
_WARMUPS = 2
_LEAST = 3


class NotPossible(AiodistError):
    """A case makes no sense here; raised on all ranks alike, with the reason."""


class WrongResult(AiodistError):
    """What is to be measured computes something else than float64 on the CPU."""


@dataclass(frozen=True)
class Bench:
    """What a case is given, the same on every rank."""

    session: Session
    sizes: Sizes

    @property
    def coll(self) -> Communicator:
        """All ranks."""
        return self.session.coll

    @property
    def device(self) -> torch.device:
        """This rank's CUDA device, the current one."""
        return self.coll.device

    async def seed(self) -> int:
        """Return a number that was never used before, the same on all ranks."""
        return await self.coll.broadcast(secrets.randbits(31))


@dataclass(frozen=True)
class Way:
    """One way to do something: a sample is `batch` times `once`, and `prepare` before the clock starts."""

    name: str
    once: Callable[[], Awaitable[object]]
    batch: int = 1
    prepare: Callable[[], object] = lambda: None
    queues: bool = True
    """What it leaves queued on the device belongs to the sample."""


async def in_turns(bench: Bench, ways: Sequence[Way], most: int | None = None) -> dict[str, list[float]]:
    """Return seconds of each way's `once`, a list of samples by name, after warming up; on all ranks.

    All ranks begin each sample together. The ways take turns, each round the other way about, for `Sizes.seconds`
    three rounds at least, and for `most` rounds (None: `Sizes.rounds`) at most.
    """
    most = bench.sizes.rounds if most is None else most
    samples: dict[str, list[float]] = {way.name: [] for way in ways}
    began = perf_counter()
    rounds, turn = _WARMUPS + 1, 0
    while turn < rounds:
        if turn == 1:  # the first also loaded kernels
            began = perf_counter()
        for way in ways if turn % 2 else list(reversed(ways)):
            seconds = await _sample(bench, way)
            if turn >= _WARMUPS:
                samples[way.name].append(seconds)
        turn += 1
        if turn == _WARMUPS:
            fitting = round(bench.sizes.seconds / max(perf_counter() - began, 1e-6))
            rounds = _WARMUPS + await bench.coll.broadcast(min(most, max(_LEAST, fitting)))
    return samples


async def _sample(bench: Bench, way: Way) -> float:
    way.prepare()
    torch.cuda.synchronize(bench.device)
    await bench.session.fence()
    began = perf_counter()
    for _ in range(way.batch):
        await way.once()
    if way.queues:
        torch.cuda.synchronize(bench.device)
    return (perf_counter() - began) / way.batch


def median(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return this rank's medians."""
    return {name: statistics.median(found) for name, found in samples.items()}


def spin_rate(wake: float = 0.2) -> float:
    """Return how many cycles a second the kernel of `torch.cuda._sleep` counts on the current device.

    An idle device has raised its clock after `wake` seconds of work.
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
    """Return what lay between two events, which are over and were made with `enable_timing`."""
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds * 1e-3


def poison(device: torch.device, nbytes: int) -> None:
    """Leave so much free memory on `device` full of NaN, for the code that allocates next."""
    torch.full((nbytes // 4,), float("nan"), device=device)
    torch.cuda.synchronize(device)


def check(what: str, found: Tensor, expected: Tensor, *, rtol: float, atol: float) -> None:
    """Raise WrongResult unless `found`, from a device, is `expected`, in float64 on the CPU."""
    here = found.detach().cpu().double()
    if here.shape != expected.shape:
        raise WrongResult(f"{what}: {list(here.shape)}, expected {list(expected.shape)}")
    wrong = ~torch.isclose(here, expected, rtol=rtol, atol=atol)  # NaN is far from everything
    if count := int(wrong.sum()):
        first = int(wrong.flatten().nonzero()[0])
        raise WrongResult(
            f"{what}: {count} of {here.numel()} elements are wrong; number {first} is "
            f"{float(here.flatten()[first]):g}, expected {float(expected.flatten()[first]):g}"
        )
