"""W9: faults on purpose, on ranks of one process: every rank ends, with the right result or an error that says why."""

from __future__ import annotations

import asyncio
import contextvars
import random
import re
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import aiodist
from aiodist import AiodistError, Communicator, OperationTimeout, PeerLost, RemoteError
from aiodist.ps import ParameterServer
from aiodist.testing import Fault, FaultKind, Faults, InjectedFault, kill_rank, run_ranks
from aiodist.testing.seams.progress import transport_lock

DEADLINE = 600.0
"""Time limit of each program, in seconds of the jumping clock."""
FATAL = ("kill", "raise")
HARMLESS = ("block", "slow", "delay", "reorder")
Step = Callable[[Communicator, Any], Awaitable[object]]


async def reduces(coll: Communicator, ps: Any) -> None:
    t = await coll.allreduce(torch.full((5,), float(coll.rank + 1)))
    assert t.tolist() == [coll.size * (coll.size + 1) / 2] * 5


async def spreads(coll: Communicator, ps: Any) -> None:
    t = await coll.broadcast(torch.full((300_000,), coll.rank), root=coll.size - 1)
    assert t.unique().tolist() == [coll.size - 1]


async def collects(coll: Communicator, ps: Any) -> None:
    assert [t.tolist() for t in await coll.allgather(torch.tensor([coll.rank] * (coll.rank + 1)))] == [
        [rank] * (rank + 1) for rank in range(coll.size)
    ]


async def exchanges(coll: Communicator, ps: Any) -> None:
    before, behind = (coll.rank - 1) % coll.size, (coll.rank + 1) % coll.size
    for numel in (3, 300_000):
        got = await coll.sendrecv(torch.full((numel,), coll.rank), behind, before, tag=2)
        assert got.unique().tolist() == [before]


async def pushes(coll: Communicator, ps: Any) -> None:
    await ps.push("w", torch.full((7,), float(ps.rank + 1)))


COLLECTIVES: tuple[Step, ...] = (reduces, spreads, collects)
NUMBERED = (*COLLECTIVES, pushes)
"""Steps whose messages have numbers, so that a lost one is an error, and a copy changes nothing."""
STEPS = (*NUMBERED, exchanges)


def ended(size: int, steps: Sequence[Step], faults: Faults, seed: int) -> list[Any]:
    """Run a program; return the end of each rank: "right", None for a killed rank, or the error."""

    async def go(coll: Communicator, ps: ParameterServer | None) -> None:
        for step in steps:
            await step(coll, ps)
        if ps is not None:
            await ps.sync()
            await coll.barrier()
            total = steps.count(pushes) * size * (size + 1) / 2
            assert (await ps.pull("w", torch.empty(7))).tolist() == [total] * 7
            await coll.barrier()

    async def main() -> Any:
        try:
            async with aiodist.init(timeout=60) as coll:
                if pushes not in steps:
                    await go(coll, None)
                else:
                    async with ParameterServer(coll, {"w": torch.zeros(7)}, split_bytes=8) as ps:
                        await go(coll, ps)
        except (AiodistError, InjectedFault) as error:
            return error
        return "right"

    return run_ranks(size, main, seed, timeout=DEADLINE, faults=faults)


def named(error: Exception) -> set[int]:
    """Return the ranks that an error gives as its cause."""
    match error:
        case PeerLost():
            return {error.lost}
        case RemoteError():
            return {error.raised_by}
        case OperationTimeout():
            return set(error.late)
    return set(map(int, re.findall(r"rank (\d+)(?: left| failed|:)", str(error))))


def check(ends: list[Any], faults: Faults) -> None:
    """Assert that each rank ended as it should."""
    killed = {fault.rank for fault in faults.faults if fault.kind == FaultKind.KILL}
    raised = {fault.rank for fault in faults.faults if fault.kind == FaultKind.RAISE}
    lost = any(fault.kind == FaultKind.DROP for fault in faults.faults)
    failed = {rank for rank, end in enumerate(ends) if end != "right"}
    for rank, end in enumerate(ends):
        if end is None:
            assert rank in killed
        elif isinstance(end, InjectedFault):
            assert rank in raised
        elif isinstance(end, OperationTimeout):
            assert lost, end
        elif end != "right":
            assert named(end), repr(end)
            # a lost message makes a rank fail by its deadline, and the others hear of that
            assert named(end) <= (failed if lost else killed | raised), (end, faults)


@st.composite
def programs(draw: st.DrawFn) -> tuple[int, list[Step], Faults, int]:
    size = draw(st.integers(2, 4))
    steps = draw(st.lists(st.sampled_from(STEPS), min_size=1, max_size=8))
    kinds = [*FATAL, *HARMLESS, *(["drop", "duplicate"] if set(steps) <= set(NUMBERED) else [])]
    fault = st.builds(Fault, st.sampled_from(kinds), st.integers(0, size - 1), st.integers(0, 20), st.floats(0.01, 2))
    return size, steps, Faults(*draw(st.lists(fault, min_size=1, max_size=3))), draw(st.integers(0, 1 << 16))


@pytest.mark.thorough
@given(programs())
@example((3, [pushes, reduces], Faults(Fault("kill", 0, 1)), 0))
@example((2, [pushes], Faults(Fault("raise", 0, 1)), 0))
def test_w9_every_rank_ends_right_or_says_who_failed(drawn: tuple[int, list[Step], Faults, int]) -> None:
    size, steps, faults, seed = drawn
    check(ended(size, steps, faults, seed), faults)


@pytest.mark.parametrize("kind", [*FATAL, *HARMLESS, "drop", "duplicate"])
@pytest.mark.parametrize(
    "runs", [1, pytest.param(100, marks=[pytest.mark.thorough, pytest.mark.soak, pytest.mark.timeout(600)])]
)
def test_w9_each_fault_at_random_operations(kind: str, runs: int) -> None:
    steps = NUMBERED if kind in ("drop", "duplicate") else STEPS
    struck = 0
    for seed in range(runs):
        faults = Faults.drawn(seed, [kind], ranks=range(4), calls=8, seconds=1.5)
        ends = ended(4, steps, faults, seed)
        check(ends, faults)
        (fault,) = faults.faults
        if kind in FATAL:
            assert ends[fault.rank] is None or isinstance(ends[fault.rank], InjectedFault)
            assert all(isinstance(end, AiodistError) for rank, end in enumerate(ends) if rank != fault.rank)
        if kind in HARMLESS or kind == "duplicate":
            assert ends == ["right"] * 4
        struck += ends != ["right"] * 4
    assert struck == (runs if kind in (*FATAL, "drop") else 0)


def test_w9_the_same_seed_draws_the_same_faults_and_ends_the_same() -> None:
    def once(seed: int) -> list[str]:
        faults = Faults.drawn(seed, list(FATAL), ranks=range(3), calls=6, count=2)
        return [f"{type(end).__name__} {end}" for end in ended(3, STEPS, faults, seed)]

    assert [once(3), once(4)] == [once(3), once(4)]
    assert len({repr(Faults.drawn(seed, FaultKind, ranks=range(4), calls=50)) for seed in range(30)}) > 25


def test_w9_the_same_seed_ends_the_same_beside_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The progress thread holds the transport lock now and then, for other loops; and a slow machine is late."""

    def once(seed: int, kinds: Sequence[str]) -> list[str]:
        faults = Faults.drawn(seed, list(kinds), ranks=range(3), calls=6, count=2)
        steps = NUMBERED if "drop" in kinds else STEPS
        return [f"{type(end).__name__} {end}" for end in ended(3, steps, faults, seed)]

    programs = [(3, FATAL), (4, FATAL), (1, ["drop", "delay"]), (2, ["drop"])]
    expected = [once(*program) for program in programs]
    clock = SimpleNamespace(now=lambda: time.monotonic() - random.random())
    monkeypatch.setattr("aiodist.handles.operation.deadline_clock", clock)
    done = threading.Event()

    def hold() -> None:
        while not done.is_set():
            with transport_lock:
                done.wait(2e-4 * random.random())
            done.wait(5e-4 * random.random())

    thread = threading.Thread(target=hold, name="aiodist-progress of the test")
    thread.start()
    try:
        assert [[once(*program) for program in programs] for _ in range(5)] == [expected] * 5
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize("seed", range(10))
def test_w9_all_ranks_name_the_same_of_two_that_are_killed(seed: int) -> None:
    ends = ended(4, COLLECTIVES * 2, Faults(Fault("kill", 1, 3), Fault("kill", 2, 3)), seed)
    assert len({tuple(named(end)) for end in ends if end is not None}) == 1


@pytest.mark.drawn(1)
@pytest.mark.parametrize("kind", ["delay", "slow", "block"])
def test_w9_time_goes_by(kind: str) -> None:
    async def main() -> float:
        async with aiodist.init() as coll:
            began = asyncio.get_running_loop().time()
            await coll.allreduce(torch.ones(3))
            return asyncio.get_running_loop().time() - began

    took = run_ranks(3, main, faults=Faults(Fault(kind, 1, 0, 3.0)))
    assert 3 <= max(took) < 8, took
    assert max(run_ranks(3, main)) < 1


def test_w9_what_follows_a_delayed_message_stays_behind_it_and_a_reordered_one_is_overtaken() -> None:
    async def main() -> list[int]:
        async with aiodist.init() as coll:
            if coll.rank == 0:
                await aiodist.gather(*[coll.send(torch.full((300_000,), i), 1) for i in range(3)])
                return []
            return [int((await coll.recv(torch.empty(300_000, dtype=torch.int64)))[0]) for _ in range(3)]

    for kind in ("delay", "reorder"):  # each message has a tag of its own below
        for at in range(6):
            assert run_ranks(2, main, seed=at, faults=Faults(Fault(kind, 0, at)))[1] == [0, 1, 2]


def test_w9_a_call_counts_for_its_rank_in_any_context() -> None:
    """A thread may wake the loop that makes the calls of a net: nothing of the rank is in its context."""

    made = []

    async def main() -> None:
        async with aiodist.init() as coll:
            await coll.barrier()
            for n in range(3):
                made.append((coll.rank, n))
                await contextvars.Context().run(coll.allreduce, torch.ones(1))

    with pytest.raises(InjectedFault):
        run_ranks(2, main, faults=Faults(Fault("raise", 1, 2)))
    assert (1, 1) in made
    assert (1, 2) not in made


def test_w9_a_rank_that_is_killed_before_it_comes_is_lost_to_the_others() -> None:
    async def main(rank: int) -> Any:
        if rank == 1:
            kill_rank()
        try:
            async with aiodist.init() as coll:
                await coll.barrier()
        except PeerLost as error:
            return error.lost

    assert run_ranks(3, main) == [1, None, 1]


@pytest.mark.parametrize("number", [2, -1])
def test_w9_a_rank_that_is_not_there_cannot_be_killed(number: int) -> None:
    async def main() -> None:
        with pytest.raises(ValueError, match=f"rank {number}: expected one of the 2 that were started"):
            kill_rank(number)

    run_ranks(2, main)


def test_w9_nothing_is_left_of_it_when_it_is_off() -> None:
    def calls() -> list[Any]:
        return [getattr(o, n) for o, ns in (OWNERS) for n in ns]

    before = calls()
    with Faults(Fault("kill", 0)):
        assert all(now is not then for now, then in zip(calls(), before, strict=True))
    assert calls() == before
    assert not {"allreduce", "send"} & vars(Communicator).keys()


OWNERS: tuple[tuple[type, tuple[str, ...]], ...] = (
    (Communicator, ("allreduce", "barrier", "send", "recv_object")),
    (ParameterServer, ("push", "pull", "sync")),
)


def test_w9_mistakes_are_told() -> None:
    async def main() -> None:
        raise AssertionError("it began")

    with pytest.raises(ValueError, match="fault 'explode': expected one of kill, raise, stop"):
        Fault("explode", 0)
    with pytest.raises(ValueError, match=r"rank=2.*expected one of the 2 ranks"):
        run_ranks(2, main, faults=Faults(Fault("kill", 2)))
    with pytest.raises(ValueError, match="at least 0"):
        Fault("kill", 0, -1)
    for kind in ("stop", "stall", "cut"):
        with pytest.raises(ValueError, match="is for ranks that are processes"):
            run_ranks(2, main, faults=Faults(Fault(kind, 0)))

    async def alone() -> None:
        async with aiodist.init() as coll:
            await coll.barrier()

    with Faults(Fault("drop", 0)), pytest.raises(ValueError, match="is for run_ranks"):
        aiodist.run(alone)
