"""H7: an error while an operation starts or runs fails that operation alone."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import torch

from aiodist import AiodistError, BackendError, Communicator
from aiodist.backends import arithmetic
from aiodist.collectives import scheduled
from aiodist.communicator import parts_of
from aiodist.handles import Progress, in_flight
from aiodist.types import ReduceOp

pytestmark = [pytest.mark.drawn(4), pytest.mark.timeout(150)]

LONG = 40_000
"""Number of elements that does not fit into the header of a message."""
LONGER = 400_000
"""Number of elements that does not fit into a frame."""

Operation = Callable[[Communicator, torch.Tensor], Awaitable[object]]
Places = dict[str, tuple[Callable[[Communicator], Any], tuple[str, ...]]]


class Boom(RuntimeError):
    """An unexpected error."""


def _steps(coll: Communicator) -> object:
    within = parts_of(coll).dispatcher.repertoire.within
    return None if within is None else within.steps()


PLACES: Places = {
    "transport": (lambda coll: parts_of(coll).dispatcher.transport, ("isend", "irecv")),
    "mailbox": (lambda coll: parts_of(coll).dispatcher.mailbox, ("arrived", "listen")),
    "native": (
        lambda coll: parts_of(coll).dispatcher.transport.native,
        ("start", "plan_allreduce"),
    ),
    "shared memory": (
        lambda coll: parts_of(coll).dispatcher.repertoire.within,
        ("start",),
    ),
    "lane": (_steps, ("submit",)),
    "peer": (
        lambda coll: next(iter(getattr(parts_of(coll).dispatcher.transport, "peers", {}).values()), None),
        ("send", "offer", "fetch"),
    ),
}


async def _there_and_back(coll: Communicator, t: torch.Tensor) -> None:
    other = 1 - coll.rank
    await asyncio.gather(coll.send(t.clone(), other), coll.recv(torch.empty_like(t), other))  # one of them may continue


OPERATIONS: dict[str, Operation] = {
    "allreduce": lambda coll, t: coll.allreduce(t),
    "ring": lambda coll, t: coll.allreduce(t, impl="ring"),
    "broadcast": lambda coll, t: coll.broadcast(t),
    "reduce": lambda coll, t: coll.reduce(t),
    "allgather": lambda coll, t: coll.allgather(t),
    "gather": lambda coll, t: coll.gather(t),
    "reduce_scatter": lambda coll, t: coll.reduce_scatter(t),
    "scan": lambda coll, t: coll.scan(t),
    "alltoall": lambda coll, t: coll.alltoall([t, t.clone()]),
    "messages": _there_and_back,
}


def _all_by(choose: Callable[[Communicator], str]) -> dict[str, Operation]:
    """Return the collectives by one implementation; of several tensors, which goes by calls of its own."""

    def one(name: str) -> Operation:
        return lambda coll, t: getattr(coll, name)(t, impl=choose(coll))

    names = ("allreduce", "broadcast", "reduce", "allgather", "reduce_scatter", "scan")
    return {
        **{name: one(name) for name in names},
        "several": lambda coll, t: coll.allreduce([t, t[1:].clone()], impl=choose(coll)),
        "longer reduce": lambda coll, t: coll.reduce(torch.ones(LONGER), impl=choose(coll)),
    }


IN_LIBRARIES: dict[str, Operation] = {
    **OPERATIONS,
    **{f"{name} by the library": operation for name, operation in _all_by(lambda coll: coll.backend).items()},
    **{f"{name} by memory": operation for name, operation in _all_by(lambda coll: "shm").items()},
    "longer messages": lambda coll, t: _there_and_back(coll, torch.ones(LONGER)),
}


class Fault:
    """Raises at call number `k` of a method, before it does anything or afterwards."""

    def __init__(self, owner: Any, name: str, k: int, *, after: bool) -> None:
        self.calls = 0
        self.hit = False
        self.over = False
        self._left = k
        self._after = after
        real = getattr(owner, name)
        setattr(owner, name, self._planned(real) if name == "plan_allreduce" else self._around(real))

    def _around(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            self._left -= not self.over
            self.hit = self.hit or self._left < 0
            now = self._left == -1 and not self.over
            if now and not self._after:
                raise Boom
            result = real(*args, **kwargs)
            if now:
                raise Boom
            return result

        return call

    def _planned(self, plan: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: self._around(plan(*args))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


async def _survives(coll: Communicator, place: str, name: str, k: int, operation: Operation, *, after: bool) -> bool:
    """Inject a fault into one operation of rank 0; return whether the fault occurred."""
    one = await coll.dup()
    t = torch.ones(LONG)
    owner = PLACES[place][0](one) if coll.rank == 0 else None
    fault = None if owner is None else Fault(owner, name, k, after=after)
    error: AiodistError | None = None
    try:
        async with asyncio.timeout(20):
            await operation(one, t)
    except AiodistError as raised:
        error = raised
    met = False
    if fault is not None:
        met, fault.over = fault.hit, True
    if met and not after:
        assert any(isinstance(cause, Boom) for cause in _causes(error)), error
    elif coll.rank == 0 and not met:
        assert error is None
    if met:
        one.abort("the fault is over")
    else:
        t = torch.ones(LONG)
    async with asyncio.timeout(20):  # the failed operation owns no bytes any more, and the next calls succeed
        assert (await coll.allreduce(t.fill_(1))).sum() == LONG * coll.size
    await coll.barrier()
    assert not Progress.current().large
    met = bool(await coll.allreduce(int(met), op="max"))
    async with asyncio.timeout(20):  # a close that comes before word of the abort raises it
        while met and parts_of(one).dispatcher.lifetime.refusal is None:  # noqa: ASYNC110
            await asyncio.sleep(0)
    return met


async def _meets_each(coll: Communicator, place: str, operation: str, times: int) -> None:
    owner, names = PLACES[place]
    there = int(owner(coll) is not None)
    if not await coll.allreduce(there, op="min"):
        return
    for name in names:
        for k in range(times):
            if not await _survives(coll, place, name, k, OPERATIONS[operation], after=False):
                break


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("place", ["transport", "mailbox"])
@pytest.mark.ranks(2)
async def test_h7_a_fault_fails_the_operation_that_meets_it(coll: Communicator, place: str, operation: str) -> None:
    await _meets_each(coll, place, operation, 3)


async def _callers(coll: Communicator, place: str) -> dict[str, list[str]]:
    """Return by name, for each method at a place, the operations that call it on rank 0."""
    one = await coll.dup()
    owner, names = PLACES[place]
    found: dict[str, list[str]] = {name: [] for name in names}
    faults = {name: Fault(owner(one), name, sys.maxsize, after=False) for name in names} if coll.rank == 0 else {}
    for operation, call in IN_LIBRARIES.items():
        before = {name: fault.calls for name, fault in faults.items()}
        await call(one, torch.ones(LONG))
        for name, fault in faults.items():
            if fault.calls > before[name]:
                found[name].append(operation)
    await one.aclose()
    return await coll.broadcast_object(found)


@pytest.mark.thorough
@pytest.mark.drawn(2)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.ranks(2, backend=("gloo", "shm", "mpi"))
async def test_h7_a_fault_in_a_library_fails_the_operation_that_meets_it(coll: Communicator, place: str) -> None:
    """At the first call of each method, by some of the operations that make it; at a later call by one of them."""
    if PLACES[place][0](coll) is None:
        pytest.skip(f"{coll.backend} has no {place}")
    callers = await _callers(coll, place)
    never = {name for name, operations in callers.items() if not operations}
    assert not never
    for name, operations in callers.items():
        some = operations[:: -(-len(operations) // (12 if name == "start" else 4)) or 1]
        met = [await _survives(coll, place, name, 0, IN_LIBRARIES[operation], after=False) for operation in some]
        # If the lanes of a new communicator have met already, the operation is issued in C instead.
        assert any(met) if place in {"lane", "shared memory"} else all(met), (name, some, met)
        if operations:
            await _survives(coll, place, name, 1, IN_LIBRARIES[operations[-1]], after=False)


@pytest.mark.ranks(2)
async def test_h7_a_fault_behind_a_call_is_told_too(coll: Communicator) -> None:
    """After the transfer has begun or finished, the fault is reported once, and nothing is left."""
    for operation in OPERATIONS.values():
        for name in ("isend", "irecv"):
            await _survives(coll, "transport", name, 0, operation, after=True)


@pytest.mark.ranks(2)
async def test_h7_a_fault_on_all_ranks_fails_the_operation_on_all(coll: Communicator) -> None:
    """No rank waits for a message that the other did not send."""
    of_others = len(in_flight)  # tests that gave a communicator up
    for impl in ("ring", "doubling"):
        one = await coll.dup()
        fault = Fault(parts_of(one).dispatcher.transport, "isend", 0, after=False)
        t = torch.ones(LONG)
        with pytest.raises(BackendError, match="Boom"):
            await one.allreduce(t, impl=impl)
        fault.over = True
        async with asyncio.timeout(20):  # messages in flight are drained
            while len(in_flight) > of_others:  # noqa: ASYNC110
                await asyncio.sleep(0)
        await coll.barrier()
        assert (await one.allreduce(t.fill_(1))).sum() == LONG * coll.size
        assert (await coll.allreduce(t.fill_(1))).sum() == LONG * coll.size


@pytest.mark.ranks(2)
async def test_h7_a_fault_in_a_step_of_a_program(coll: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault in the arithmetic between two steps, on one rank: the other learns of it."""
    one = await coll.dup()
    left = [Boom("in a step")]

    def combine(into: torch.Tensor, t: torch.Tensor, op: ReduceOp) -> None:
        if left and t.numel() > 1000:
            raise left.pop()
        arithmetic.combine(into, t, op)

    if coll.rank == 0:  # both are in this process: whichever comes first meets it
        monkeypatch.setattr(scheduled, "combine", combine)
    await coll.barrier()
    with pytest.raises(AiodistError) as caught:
        await one.allreduce(torch.ones(LONG), impl="ring")
    if any(isinstance(cause, Boom) for cause in _causes(caught.value)):
        assert isinstance(caught.value, BackendError)
        one.abort("in a step")
    assert await coll.allreduce(1) == coll.size
    assert not left or coll.rank
