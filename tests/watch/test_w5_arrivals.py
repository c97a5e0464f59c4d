"""W5: the arrival times of ranks at each collective, which are kept and compared. The report is in tests/lifecycle."""

from __future__ import annotations

import asyncio
from time import perf_counter
from typing import Any

import numpy as np
import pytest
import torch

import aiodist
from aiodist import Communicator
from aiodist.communicator import parts_of
from aiodist.communicator.facts import WaitingCall
from aiodist.communicator.fingerprint import Fingerprint
from aiodist.communicator.oplog import OpLog
from aiodist.handles.origin import whence
from aiodist.testing import gather_ranks
from aiodist.watch.arrivals import lateness
from tests.support.blocking import blocked_until

KEPT = 4096


def kept(log: OpLog, since: int = 0) -> list[tuple[int, int]]:
    return [(int(number), int(came)) for number, came in np.frombuffer(log.arrivals(since), np.int64).reshape(-1, 2)]


def fill(log: OpLog, count: int, kind: str = "allreduce") -> None:
    what, origin = Fingerprint(kind), whence(1)
    for _ in range(count):
        log.record(what, origin)


def test_w5_times_are_noted_only_where_that_is_wanted() -> None:
    log = OpLog()
    fill(log, 3)
    assert kept(log) == []
    log.timed = True
    fill(log, 2)
    (first, came), (second, then) = kept(log)
    assert (first, second) == (3, 4)
    assert 0 < came <= then
    assert kept(log, 4) == [(second, then)]
    assert kept(log, 5) == []


def test_w5_what_came_before_and_behind_a_pause_is_kept_for_longer() -> None:
    log = OpLog()
    log.timed = True
    fill(log, 10)
    began = perf_counter()
    assert blocked_until(lambda: perf_counter() > began + 0.002)  # more than a millisecond
    fill(log, 1, "late")
    fill(log, 2 * KEPT)
    numbers = [number for number, _ in kept(log)]
    assert numbers[-KEPT:] == list(range(log.seq - KEPT, log.seq))
    assert {9, 10} <= set(numbers[:-KEPT])
    assert numbers == sorted(set(numbers))
    found, other = log.find(10), log.find(8)
    assert found is not None
    assert found.what.kind == "late"
    assert other is None or 8 in numbers


async def _looked_at_twice(coll: Communicator, handle: aiodist.Handle[Any]) -> None:
    """Return when it was pending for a tenth of a second at least, or is done."""
    looked, on_look = asyncio.Event(), parts_of(coll).dispatcher.watch.on_look
    on_look.append(looked.set)
    async with asyncio.timeout(20):
        for _ in range(2):
            if not handle.done():  # else no check follows
                await looked.wait()
                looked.clear()
    on_look.remove(looked.set)


def times(*rows: tuple[int, float]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    return np.array([(number, round(seconds * 1e9)) for number, seconds in rows], np.int64)


def test_w5_the_last_rank_is_waited_for_by_each_other_one() -> None:
    ranks = [
        times((4, 1.0), (5, 2.0), (6, 3.0), (7, 4.0)),
        times((5, 2.5), (6, 3.0), (7, 4.0000001)),
        times((3, 0.5), (5, 2.25), (6, 3.0), (6, 3.0), (7, 4.0), (8, 5.0)),
    ]
    numbers, late = lateness(ranks, 1e-6)
    assert numbers.tolist() == [5, 6, 7]  # to which all have come
    assert late.tolist() == [[5.0, 1.0, pytest.approx(0.75)]]  # of ranks 0 and 2; 7 is within the error


def test_w5_a_cause_explains_most_of_the_waiting() -> None:
    assert WaitingCall((0.1, 0.8, 0.1), {}, 3, 0.0).cause == 1
    assert WaitingCall((0.11, 0.79, 0.1), {}, 3, 0.0).cause is None
    assert WaitingCall((0.0, 0.0), {}, 3, 0.0).cause is None


@pytest.mark.parametrize(("name", "kind"), [(None, "allreduce"), ("x", "allreduce 'x'")])
async def test_w5_ranks_of_one_process_are_compared_too(name: str | None, kind: str) -> None:
    waits = [asyncio.Event() for _ in range(3)]

    async def main(rank: int) -> tuple[int | None, float, int]:
        async with aiodist.init(stragglers=True) as coll:
            for wait in waits:
                if rank == 1:
                    await wait.wait()
                handle = coll.allreduce(torch.ones(3), name=name)
                if rank == 0:
                    await _looked_at_twice(coll, handle)
                    wait.set()
                await handle
        waited = coll.statistics().waited
        assert waited is not None
        return waited.cause, waited.by_operation[kind][1], waited.compared

    began = perf_counter()
    told = await gather_ranks(2, main)
    for cause, seconds, compared in told:
        assert cause == 1
        assert 0.25 < seconds < perf_counter() - began
        assert compared >= 3


async def test_w5_names_are_compared_in_whichever_order_ranks_use_them() -> None:
    async def main(rank: int) -> dict[str, tuple[float, ...]]:
        async with aiodist.init(stragglers=True) as coll:
            for turn in range(3):
                first, second = ("a", "b") if rank == turn % 2 else ("b", "a")
                one = coll.allreduce(torch.ones(3), name=first)
                await _looked_at_twice(coll, one)
                two = coll.allreduce(torch.ones(3), name=second)
                await aiodist.gather(one, two)
                for _ in range(turn):  # a comparison may come in between
                    ahead = coll.recv(src=1 - rank)
                    await _looked_at_twice(coll, ahead)
                    await aiodist.gather(ahead, coll.send(torch.ones(1), 1 - rank))
        waited = coll.statistics().waited
        assert waited is not None
        return {kind: waited.by_operation[kind] for kind in ("allreduce 'a'", "allreduce 'b'")}

    told = await gather_ranks(2, main)
    assert told[0] == told[1]
    for late, seconds in zip((1, 0), told[0].values(), strict=True):  # in two of three turns
        assert seconds[late] > 0.15  # it is late by 0.1 s and more, twice
        assert seconds[1 - late] > 0.05


@pytest.mark.ranks(1, 2)
async def test_w5_nothing_is_noted_unless_asked(coll: Communicator) -> None:
    await coll.allreduce(torch.ones(3))
    assert coll.statistics().waited is None
    assert kept(parts_of(coll).dispatcher.oplog) == []


async def test_w5_receives_wait_for_their_sender() -> None:
    async def main(rank: int) -> WaitingCall:
        async with aiodist.init(stragglers=True) as coll:
            for turn in range(3):
                if rank == 2:
                    await asyncio.gather(*(each.wait() for each in waits[turn]))
                    await coll.send(torch.ones(3), 0, tag=turn)
                    await coll.send_object(turn, 1)
                else:
                    handle: aiodist.Handle[Any] = coll.recv(src=2, tag=turn) if rank == 0 else coll.recv_object(2)
                    await _looked_at_twice(coll, handle)
                    waits[turn][rank].set()
                    await handle
            if rank == 0:  # from anybody, and one that is withdrawn
                anybody, nobody = coll.recv(), coll.recv(src=1, tag=9)
            await coll.barrier()
            if rank == 1:
                await coll.send(torch.ones(1), 0)
            if rank == 0:
                await anybody
                assert nobody.cancel()
        waited = coll.statistics().waited
        assert waited is not None
        return waited

    waits = [(asyncio.Event(), asyncio.Event()) for _ in range(3)]
    began = perf_counter()
    told = await gather_ranks(3, main)
    assert told[0] == told[1] == told[2]
    assert told[0].by_operation.keys() >= {"recv", "recv_object"}
    for op in ("recv", "recv_object"):
        seconds = told[0].by_operation[op]
        assert seconds[:2] == (0.0, 0.0)
        assert 0.25 < seconds[2] < perf_counter() - began
    assert told[0].cause == 2
