"""What each rank of `benchmarks scale --check` runs: fits the simulator to this machine, compares it with real runs.

Started as `python -m benchmarks.scale_check PLAN`, the plan as JSON. The model knows neither the cost of a handle,
which is measured and added, nor ranks that share cores or a memory bus, nor that consecutive operations overlap.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import aiodist
from aiodist.backends.arithmetic import combine
from aiodist.backends.base import Done, Primitive
from aiodist.bench.plan import carry_out
from aiodist.bench.records import seconds_text, size_text
from aiodist.bench.session import facts
from aiodist.bench.timing import Contender, Pace, interleaved, pace
from aiodist.collectives.endpoint import Endpoint
from aiodist.collectives.scheduled import Scheduled
from aiodist.communicator import parts_of
from aiodist.communicator.fingerprint import Fingerprint
from aiodist.communicator.operation import CommunicatorOperation
from aiodist.handles import Handle
from aiodist.handles.kernel import Program, Transfer, transfers
from aiodist.schedules import Blocks
from aiodist.types import ReduceOp
from benchmarks.loggp import LogGP, Machine
from benchmarks.scale_check_plan import CheckPlan
from benchmarks.scale_model import Case, chunks, estimate, flat

if TYPE_CHECKING:
    from torch import Tensor

    from aiodist.communicator import Communicator

__all__ = ["Compared", "Fit", "compare", "fit"]

_TAG = (1 << 22) - 1  # the last one of a collective: nothing else is in flight here
_FIT_BYTES = (4, 1 << 10, 16 << 10, 128 << 10, 1 << 20, 4 << 20)
_REPEAT = 5
_MOST_BATCH = 10  # operations of a sample: where ranks outnumber cores each takes milliseconds
_ROW = 64  # messages in a row
_COMBINED = 1 << 20  # elements: more than a core's own caches hold


@dataclass(frozen=True)
class Fit:
    """What was measured between two ranks, in seconds."""

    ranks: int
    """Of the communicator whose first two they are."""
    network: LogGP
    combine: float
    """Per byte."""
    start: float
    """Of an operation that does nothing."""


@dataclass(frozen=True)
class Compared:
    """One schedule that was run, and simulated with what was fitted; times in seconds."""

    op: str
    impl: str
    ranks: int
    nbytes: int
    """One rank's input."""
    predicted: float
    measured: float
    """The least, of the rank where it is largest: the model knows no disturbances."""

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return self.measured / self.predicted


# --- fitting ---------------------------------------------------------------------------------------------------------


async def fit(coll: Communicator, nbytes: Sequence[int] = _FIT_BYTES) -> Fit:
    """Return the figures of the transport that carries `coll`, measured between ranks 0 and 1; the same on all ranks.

    L and G come from messages of `nbytes` to and fro; g from many in one step; o is what a rank takes for each of
    many in a row of steps, as a schedule has them. Where ranks outnumber cores, the pauses between polls are in L.
    """
    start = await _seconds(coll, lambda ep: _nothing())
    busy: list[float] = []
    short = torch.zeros(4, dtype=torch.uint8)
    for _ in range(_REPEAT):
        await _perform(coll, lambda ep: _to_and_fro(ep, short, 50, partial(_timed, busy)))
    alpha, byte_gap = _line(nbytes, [await _one_way(coll, length, start) for length in nbytes])
    in_steps = await _each(coll, _in_steps)
    at_once = await _each(coll, _at_once)
    calls = min(2 * median(busy or [0.0]), alpha)  # of sending and receiving; the rest of alpha is no work
    network = LogGP(alpha - calls, max(in_steps, calls / 2), max(at_once, byte_gap), byte_gap)
    return await coll.broadcast_object(Fit(coll.size, network, _combining(), start))


async def _each(coll: Communicator, messages: Callable[[Endpoint, int], Program[None]]) -> float:
    """Return the seconds for one of many messages in a row."""
    one = await _seconds(coll, lambda ep: messages(ep, 1))
    many = await _seconds(coll, lambda ep: messages(ep, _ROW))
    return max(many - one, 0) / (_ROW - 1)


async def _one_way(coll: Communicator, nbytes: int, start: float) -> float:
    rounds = max(2, min(50, (1 << 20) // nbytes))
    t = torch.zeros(nbytes, dtype=torch.uint8)
    return (await _seconds(coll, lambda ep: _to_and_fro(ep, t, rounds), nbytes) - start) / (2 * rounds)


def _line(nbytes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Return a and b of seconds = a + b (nbytes - 1), with the least squared relative errors; neither is below 0."""
    y = np.maximum(np.array(seconds), 1e-9)
    columns = np.stack([1 / y, (np.array(nbytes) - 1) / y], axis=1)
    (a, b), *_ = np.linalg.lstsq(columns, np.ones(len(y)), rcond=None)
    if a <= 0 or b <= 0:  # noise: take it from the ends
        a, b = y[0], max(y[-1] - y[0], 0) / nbytes[-1]
    return float(a), float(b)


async def _seconds(coll: Communicator, make: Callable[[Endpoint], Program[None]], nbytes: int = 0) -> float:
    """Return what such an operation takes on this rank when nothing disturbs it: the least of a few times."""
    samples = []
    for turn in range(_REPEAT + 1):
        await coll.barrier()
        began = perf_counter()
        await _perform(coll, make, nbytes)
        if turn:
            samples.append(perf_counter() - began)
    return min(samples)


def _perform(coll: Communicator, make: Callable[[Endpoint], Program[Any]], nbytes: int = 0) -> Handle[Any]:
    """Issue a program of ours as the next operation of all ranks: what the communicator itself does with its own."""
    endpoint, operation = Endpoint(parts_of(coll).transport, _TAG), CommunicatorOperation()
    return parts_of(coll).dispatcher.issue(operation, Fingerprint("scheduled"), lambda _: make(endpoint), nbytes=nbytes)


async def _nothing() -> None:
    await transfers([])


async def _to_and_fro(
    ep: Endpoint, t: Tensor, rounds: int, wrapped: Callable[[Transfer], Transfer] = lambda call: call
) -> None:
    for turn in range(2 * rounds if ep.rank < 2 else 0):
        sends = turn % 2 == ep.rank
        await transfers([wrapped(ep.send(t, 1 - ep.rank) if sends else ep.recv(t, 1 - ep.rank))])


async def _in_steps(ep: Endpoint, count: int) -> None:
    """Rank 0 sends to rank 1, one after another."""
    if ep.rank < 2:
        await Scheduled("chain", count).run(ep.among((0, 1)), [Primitive("broadcast", torch.zeros(count))])


async def _at_once(ep: Endpoint, count: int) -> None:
    """Rank 0 sends to rank 1, all in one step; rank 1 answers the last."""
    messages = list(torch.zeros(count, 1).unbind())
    answer = torch.zeros(1)
    if ep.rank == 0:
        await transfers([ep.send(t, 1) for t in messages])
        await transfers([ep.recv(answer, 1)])
    elif ep.rank == 1:
        await transfers([ep.recv(t, 0) for t in messages])
        await transfers([ep.send(answer, 0)])


def _timed(spent: list[float], call: Transfer) -> Transfer:
    """Return the transfer, noting for how long its call keeps the processor busy."""
    start, *args = call

    def timed(done: Done) -> None:
        began = perf_counter()
        start(*args, done)
        spent.append(perf_counter() - began)

    return (timed,)


def _combining() -> float:
    """Return seconds per byte."""
    into, t = torch.zeros(_COMBINED), torch.zeros(_COMBINED)
    samples = []
    for _ in range(2 * _REPEAT):
        began = perf_counter()
        combine(into, t, ReduceOp.SUM)
        samples.append(perf_counter() - began)
    return min(samples) / t.nbytes


# --- comparing -------------------------------------------------------------------------------------------------------


async def compare(coll: Communicator, plan: CheckPlan, fitted: Fit, repeat: int = 10) -> list[Compared]:
    """Return, on each rank, how long the schedules take beside what was predicted."""
    found = []
    machine = Machine(fitted.network, fitted.network, fitted.combine)
    for nbytes in plan.sizes:
        case = Case(plan.op, coll.size, nbytes, machine)
        contenders = [Contender(name, _runner(coll, case, name), awaited=True) for name in plan.impls]
        often = Pace(repeat, min(pace(nbytes, repeat).batch, _MOST_BATCH))
        samples = await interleaved(contenders, coll.barrier, often)
        everything = await coll.allgather_object(dict(samples))
        for name in plan.impls:
            simulated = estimate(case, name).seconds
            assert simulated is not None  # so few ranks are always simulated
            measured = max(min(samples[name]) for samples in everything)
            found.append(Compared(plan.op, name, coll.size, nbytes, fitted.start + simulated, measured))
    return found


def _runner(coll: Communicator, case: Case, name: str) -> Callable[[], Handle[Any]]:
    how = Scheduled(name, chunks(case, flat(case.op, name)[0]).get("chunks"))
    t = torch.zeros(case.nbytes // case.itemsize)
    match case.op:
        case "allreduce":
            return lambda: _perform(coll, lambda ep: how.run(ep, [Primitive("allreduce", t)]), t.nbytes)
        case "broadcast":
            return lambda: _perform(coll, lambda ep: how.run(ep, [Primitive("broadcast", t)]), t.nbytes)
        case "reduce_scatter":
            counts = Blocks.even(t.numel(), coll.size).counts()
            out = torch.zeros(counts[coll.rank])
            return lambda: _perform(
                coll, lambda ep: how.run(ep, [Primitive("reduce_scatter", t, out, counts=counts)]), t.nbytes
            )
        case _:
            counts = [t.numel()] * coll.size
            out = torch.zeros(sum(counts))
            return lambda: _perform(
                coll, lambda ep: how.run(ep, [Primitive("allgather", t, out, counts=counts)]), out.nbytes
            )


# --- the job ---------------------------------------------------------------------------------------------------------


async def _measure(plan: CheckPlan) -> None:
    fits: list[Fit] = []
    found: list[Compared] = []
    async with aiodist.init() as coll:
        for count in plan.counts:
            group = coll if coll.size == count else await coll.group(range(count))
            if coll.rank < count:
                fits.append(await fit(group))
                found += await compare(group, plan, fits[-1])
            await coll.barrier()
        if coll.rank == 0:
            _report(plan, fits, found, coll.backend)


def _report(plan: CheckPlan, fits: Sequence[Fit], found: Sequence[Compared], backend: str) -> None:
    if plan.json is not None:
        compared = [{**asdict(one), "ratio": one.ratio} for one in found]
        Path(plan.json).write_text(json.dumps({"fits": [*map(asdict, fits)], "compared": compared}, indent=1) + "\n")
    console = Console(width=plan.width, force_terminal=plan.colour, highlight=False)
    cores = len(facts().affinity)
    for one in fits:
        network = one.network
        times = {"L": network.latency, "o": network.overhead, "g": network.gap, "a handle": one.start}
        rates = {"G": network.byte_gap, "combining": one.combine}
        figures = [f"{name} {seconds_text(value)}" for name, value in times.items()]
        figures += [f"{name} {value * 1e9:.3g} ns/B" for name, value in rates.items()]
        console.print(f"two of {one.ranks} ranks over {backend}: {', '.join(figures)}")
        if one.ranks > cores:
            console.print(f"{one.ranks} ranks take turns on {cores} core(s), which the model does not know")
    table = Table(title=f"{plan.op}: simulated with these, and measured", title_justify="left")
    for name in ("ranks", "input", "schedule", "predicted", "measured", "measured/predicted"):
        table.add_column(name, justify="left" if name == "schedule" else "right")
    for row in _rows(found):
        table.add_row(*row)
    console.print(table)


def _rows(found: Sequence[Compared]) -> Iterator[tuple[str, ...]]:
    for one in found:
        times = seconds_text(one.predicted), seconds_text(one.measured)
        yield str(one.ranks), size_text(one.nbytes), one.impl, *times, f"{one.ratio:.2f}"


if __name__ == "__main__":
    carry_out(lambda text: aiodist.run(_measure, CheckPlan.from_json(text)))
