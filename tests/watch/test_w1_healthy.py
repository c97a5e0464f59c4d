"""W1: a program that is slow, and not late, hears nothing of it: no rank is named, reported or warned of."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch

import aiodist
from aiodist import Communicator, Handle
from aiodist.communicator import parts_of
from aiodist.testing import run_ranks
from tests.support.hearing import heard


class Limits(NamedTuple):
    """All in seconds."""

    pause: float
    """The longest one between two calls; a rank waits in no call for longer than that."""
    deadline: float
    report: float


FAKE = Limits(8.0, 9.0, 10.0)
REAL = Limits(1.6, 8.0, 8.0)  # other processes may hold a rank up


class _Round:
    """One operation of all ranks, which are late to it by turns: as one of them sees it."""

    def __init__(self, coll: Communicator, draw: random.Random, limits: Limits) -> None:
        """`draw` is the same on all ranks."""
        self.coll = coll
        self.deadline = limits.deadline
        self.pauses = [draw.choice((0, 0.3, 1.5, draw.uniform(0, limits.pause))) for _ in range(coll.size)]
        self.root = draw.randrange(coll.size)
        self.limit = draw.choice(("none", "argument", "block", "asyncio"))
        self.polled = draw.random() < 0.2

    async def run(self, kind: Callable[[_Round], Awaitable[None]]) -> None:
        """Come in one's own time, and do it."""
        await asyncio.sleep(self.pauses[self.coll.rank])
        if self.limit == "block":
            async with aiodist.timeout(self.deadline):
                await kind(self)
        elif self.limit == "asyncio":
            await asyncio.wait_for(kind(self), self.deadline)
        else:
            await kind(self)
        await self.coll.barrier()  # the next one begins on all ranks alike

    @property
    def timeout(self) -> float | None:
        return self.deadline if self.limit == "argument" else None

    async def over(self, *handles: Handle[Any]) -> list[Any]:
        while self.polled and not all(handle.done() for handle in handles):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        return await aiodist.gather(*handles)


async def _allreduce(a: _Round) -> None:
    first, second = a.coll.allreduce(torch.ones(5000), timeout=a.timeout), a.coll.allreduce(1, timeout=a.timeout)
    total, number = await a.over(first, second)
    assert total.sum() == 5000 * a.coll.size
    assert number == a.coll.size


async def _broadcast(a: _Round) -> None:
    (t,) = await a.over(a.coll.broadcast(torch.full((3,), float(a.coll.rank)), root=a.root, timeout=a.timeout))
    assert t.tolist() == [a.root] * 3


async def _barrier(a: _Round) -> None:
    await a.over(a.coll.barrier(timeout=a.timeout))


async def _exchange(a: _Round) -> None:
    to, of = (a.coll.rank + 1) % a.coll.size, (a.coll.rank - 1) % a.coll.size
    arrived = a.coll.recv(src=of, tag=3, timeout=a.timeout)
    (t, _) = await a.over(arrived, a.coll.send(torch.full((4000,), float(a.coll.rank)), to, tag=3, timeout=a.timeout))
    assert t.sum() == 4000 * of


async def _requests(a: _Round) -> None:
    """All ask one, which answers in the order of arrival."""
    if a.coll.rank != a.root:
        await a.over(a.coll.send_object(a.coll.rank, a.root, tag=4, timeout=a.timeout))
        assert await a.coll.recv_object(a.root, tag=5, timeout=a.timeout) == a.coll.rank**2
        return
    for _ in range(a.coll.size - 1):
        handle = a.coll.recv_object(tag=4, timeout=a.timeout)
        (asked,) = await a.over(handle)
        assert handle.source is not None
        await a.coll.send_object(asked**2, handle.source, tag=5, timeout=a.timeout)


async def _group(a: _Round) -> None:
    side = await a.coll.dup()
    (total,) = await a.over(side.allreduce(side.rank, timeout=a.timeout))
    assert total == sum(range(side.size))
    await side.aclose()


KINDS = (_allreduce, _broadcast, _barrier, _exchange, _requests, _group)


async def _healthy(coll: Communicator, seed: int, rounds: int, limits: Limits) -> None:
    """Rounds of operations in an order drawn from `seed`, with a receive of each rank posted before."""
    draw = random.Random(seed)
    aside = await coll.dup()
    ahead = aside.recv_object((coll.rank - 1) % coll.size, tag=9)
    for kind in draw.choices(KINDS, k=rounds):
        await _Round(coll, draw, limits).run(kind)
    await aside.send_object("end", (coll.rank + 1) % coll.size, tag=9)
    assert await ahead == "end"
    await aside.aclose()


@contextmanager
def _nobody_named(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fail where anything is logged or warned of."""
    with heard() as caught:
        yield
    assert [str(warning.message) for warning in caught] == []
    assert [record.getMessage() for record in caplog.records] == []


@pytest.mark.drawn(1)
@pytest.mark.parametrize("tenth", range(10))
def test_w1_thousand_healthy_runs_name_nobody(tenth: int, caplog: pytest.LogCaptureFixture) -> None:
    """From `init` to the close."""

    async def main() -> None:
        async with aiodist.init(report_after=FAKE.report) as coll:
            await _healthy(coll, seed, 4, FAKE)

    with _nobody_named(caplog):
        for seed in range(100 * tenth, 100 * (tenth + 1)):
            run_ranks(2 + seed % 2, main, seed)


@pytest.mark.thorough
@pytest.mark.drawn(1)
@pytest.mark.ranks(2, backend=("gloo", "openmpi", "mpich", "shm"))
async def test_w1_healthy_runs_on_processes_name_nobody(
    coll: Communicator, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    await coll.barrier()
    monkeypatch.setattr(parts_of(coll).dispatcher.watch.report, "after", REAL.report)
    with _nobody_named(caplog):
        for seed in range(2):
            one = await coll.dup()
            await _healthy(one, seed, 3, REAL)
            await one.aclose()


def test_w1_a_run_that_is_not_healthy_names_somebody(caplog: pytest.LogCaptureFixture) -> None:
    """A report that the runs above would contain."""

    async def main() -> None:
        async with aiodist.init(report_after=FAKE.pause / 2) as coll:
            for rank in range(coll.size):
                await asyncio.sleep(FAKE.pause * (coll.rank == rank))
                await coll.barrier()

    with pytest.raises(AssertionError, match="waits for rank"), _nobody_named(caplog):
        run_ranks(2, main)
