"""C10: operations wait at the gate of their communicator, in order, on any thread; what fails there fails alone."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import aiodist
from aiodist import Communicator
from aiodist.communicator import parts_of
from aiodist.communicator.fingerprint import merged, word_of
from aiodist.handles import in_flight
from tests.support.blocking import blocked_until, rounds

pytestmark = pytest.mark.drawn(3)

on_processes = pytest.mark.ranks(2, 3, backend=("openmpi", "gloo", "shm"))


@pytest.mark.drawn(1)
@on_processes
async def test_c10_more_are_in_flight_than_a_ring_holds(coll: Communicator) -> None:
    """A rank far ahead waits for room in the rings, and continues by itself."""
    await coll.barrier()
    if coll.rank == 0:  # the others are through with all their calls
        await aiodist.gather(*[coll.recv_object(rank) for rank in range(1, coll.size)])
    ts = [torch.full((3,), float(i + coll.rank)) for i in range(2500)]
    handles = [coll.allreduce(t) for t in ts]
    if coll.rank:
        await coll.send_object("issued", 0)
    results = await aiodist.gather(*handles)
    base = sum(range(coll.size))
    assert [t[0].item() for t in results] == [float(coll.size * i + base) for i in range(2500)]


@pytest.mark.drawn(1)
@on_processes
@pytest.mark.parametrize("numel", [1, 1 << 20, 1 << 22])
async def test_h1_it_goes_through_while_user_code_computes(coll: Communicator, numel: int, until: Any) -> None:
    """The loop of rank 0 stands still from its call until the others have their results."""
    await coll.allreduce(torch.ones(numel))
    with tempfile.TemporaryDirectory() as folder:
        through = Path(await coll.broadcast_object(folder))
        await coll.barrier()
        if coll.rank == 0:
            handle = coll.allreduce(torch.ones(numel))
            (through / "issued").touch()
            assert blocked_until(lambda: len(os.listdir(through)) == coll.size, 40), "the others wait for this loop"
            await handle
        else:
            await until(lambda: (through / "issued").exists())
            assert (await coll.allreduce(torch.ones(numel)))[0] == coll.size
            (through / str(coll.rank)).touch()
        await coll.barrier()


@pytest.mark.drawn(2)
@on_processes
async def test_c10_a_gate_at_which_nothing_waits_is_not_polled(coll: Communicator, until: Any) -> None:
    """The lane of its comparison is not polled either, on any thread."""
    lanes = parts_of(coll).registry.resources.lanes
    assert lanes is not None
    for numel in (1, 1 << 20):
        for turn in range(20):
            if turn % coll.size == coll.rank:
                await asyncio.to_thread(lambda: None)  # the progress thread may drive the others meanwhile
            await aiodist.gather(*[coll.allreduce(torch.ones(numel)) for _ in range(3)])
    await until(lambda: not len(lanes))


@pytest.mark.drawn(1)
@pytest.mark.ranks(2, 3)
async def test_c10_what_is_kept_of_old_operations_is_bounded(coll: Communicator) -> None:
    for _ in range(1100):
        await coll.barrier()
    assert len(parts_of(coll).dispatcher.recent) <= 1024


@pytest.mark.drawn(2)
@on_processes
async def test_c10_several_communicators_wait_for_themselves_alone(coll: Communicator) -> None:
    one, two = await coll.dup(), await coll.dup()
    first, second = (one, two) if coll.rank == 0 else (two, one)
    a = first.allreduce(torch.ones(3))
    await rounds()
    b = second.allreduce(torch.ones(3))
    assert (await a)[0] == (await b)[0] == coll.size


@pytest.mark.ranks(2, 3, 5)
@pytest.mark.ranks(2, 3, backend="openmpi")
async def test_c10_what_fails_on_one_rank_fails_on_all_and_alone(coll: Communicator, until: Any) -> None:
    """A program of messages fails: the other ranks learn of it, its messages are drained, the next call succeeds."""
    into: Any = torch.empty(3)[1:]  # a view, which cannot grow
    of_others = len(in_flight)  # tests that gave a communicator up
    for _ in range(2):
        with pytest.raises((ValueError, aiodist.RemoteError), match="cannot grow"):
            await coll.allgather(torch.ones(4), out=into if coll.rank == 0 else None)
        assert await coll.allreduce(coll.rank) == sum(range(coll.size))
        got = await coll.allgather(torch.full((2,), coll.rank))
        assert [t[0].item() for t in got] == list(range(coll.size))
    await until(lambda: len(in_flight) <= of_others)  # messages in flight are drained


@pytest.mark.drawn(1)
@pytest.mark.ranks(2, 3, backend=("openmpi", "gloo", "shm"))
async def test_c10_what_fails_within_a_host_fails_on_all_and_alone(coll: Communicator, until: Any) -> None:
    """In shared memory the other ranks do not wait, for any failing rank: earlier and later operations continue."""
    into: Any = torch.empty(3)[1:]
    of_others = len(in_flight)
    for turn in range(12):
        who, numel = turn % coll.size, (4, 1 << 18)[turn % 2]
        before = [coll.allgather(torch.full((1 << 15,), turn)) for _ in range(3)]
        fails = coll.allgather(coll.arena_empty(numel), out=into if coll.rank == who else None)
        behind = [coll.allgather(torch.full((1 << 15,), turn)) for _ in range(3)]
        with pytest.raises(ValueError if coll.rank == who else aiodist.RemoteError, match="cannot grow"):
            await fails
        for ts in await aiodist.gather(*before, *behind):
            assert all(t.eq(turn).all() for t in ts)
    await until(lambda: len(in_flight) <= of_others)


@pytest.mark.ranks(2, 3)
async def test_c10_what_the_root_alone_finds_is_told_to_those_who_wait_for_it(coll: Communicator) -> None:
    """The root cannot concatenate the parts, so it receives none of them."""
    other = await coll.dup()
    t = torch.ones(2, 200_000 + coll.rank)
    with pytest.raises((aiodist.MismatchError, aiodist.RemoteError), match="other than dim 0"):
        await other.gather(t, out=torch.empty(0) if coll.rank == 0 else None, timeout=20)
    assert await other.allreduce(1) == coll.size


def test_c10_words_agree_where_all_that_know_say_the_same() -> None:
    plain, other = word_of(("scatter",)), word_of(("gather",))
    ints, floats = word_of(("scatter",), "int64"), word_of(("scatter",), "float32")
    assert len({plain, other, ints, floats}) == 4
    assert merged(plain, plain) == plain
    assert merged(plain, ints) == merged(ints, plain) == ints
    assert merged(ints, floats) is merged(plain, other) is merged(other, ints) is None
    assert merged(ints ^ 7, plain ^ 7) == ints ^ 7  # mixed with a number
    assert merged(ints ^ 7, ints ^ 8) is None
