"""P2: what was found by reading: order behind codes, long entries, many names at once, names that come and go."""

from __future__ import annotations

import asyncio
import gc
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import aiodist
from aiodist import Communicator
from aiodist.codecs import TopK
from aiodist.communicator import parts_of
from aiodist.errors import AiodistError, CommunicatorError, PeerLost, RemoteError
from aiodist.ps import SGD, ParameterServer
from aiodist.ps.pool import Pool
from aiodist.ps.settings import place
from aiodist.testing import kill_rank, run_ranks
from tests.support.until import until

LARGE = 1_000_000


def complains(shard: Tensor, value: Tensor) -> None:
    raise ValueError("long" * 30_000)


@pytest.mark.ranks(2)
async def test_p2_plain_requests_after_an_encoded_one_keep_their_order(coll: Communicator) -> None:
    """A list with a large tensor must not overtake what waits for the code of an earlier one."""
    one = torch.ones(3, dtype=torch.int64)
    async with ParameterServer(coll, codec=TopK(0.01), servers=1) as ps:
        await ps.init(["large", "whole"], [torch.zeros(LARGE), torch.zeros(3, dtype=torch.int64)])
        if ps.is_worker:
            pushes = [ps.push("large", torch.ones(LARGE)), ps.push("whole", one)]
            pushes.append(ps.push(["whole", "large"], [10 * one, torch.ones(LARGE)]))
            async with asyncio.timeout(60):
                await aiodist.gather(*pushes)
            assert (await ps.pull("whole")).tolist() == [11, 11, 11]


@pytest.mark.ranks(2)
async def test_p2_settings_change_after_the_pushes_that_were_issued_before(coll: Communicator) -> None:
    async with ParameterServer(coll, rule=SGD(lr=1.0), codec=TopK(1.0), servers=1) as ps:
        await ps.init("w", torch.zeros(LARGE))
        if ps.is_worker:
            push = ps.push("w", torch.ones(LARGE))  # is being encoded
            await ps.configure("w", lr=0.0)
            await push
            assert (await ps.pull("w", torch.empty(LARGE))).unique().tolist() == [-1.0]


@pytest.mark.ranks(1, 2)
async def test_p2_a_generator_of_parameters_means_all_of_them_in_every_call(coll: Communicator) -> None:
    """`push_pull` went through it twice: it pushed, and then pulled nothing."""
    net = torch.nn.Linear(2, 1)
    async with ParameterServer(coll, net, rule=SGD(lr=1.0), servers=[0], workers=[0]) as ps:
        if ps.is_worker:
            before = [p.detach().clone() for p in net.parameters()]
            for p in net.parameters():
                p.grad = torch.ones_like(p)
            assert await ps.push_pull(net.parameters()) == list(net.parameters())
            for p, was in zip(net.parameters(), before, strict=True):
                assert torch.equal(p.detach(), was - 1)
            fetched = await ps.prefetch(net.parameters())
            assert [t.shape for t in fetched] == [p.shape for p in net.parameters()]
            assert await ps.integrate(lambda mine, theirs: mine.add_(theirs), net.parameters()) == list(
                net.parameters()
            )


@pytest.mark.ranks(2)
async def test_p2_a_failed_block_leaves_no_communicator_open(coll: Communicator) -> None:
    """The communicator and the memory of shards were kept until the world ended."""
    for _ in range(5):
        with suppress(LookupError, CommunicatorError):
            async with ParameterServer(coll, {"w": torch.zeros(LARGE)}) as ps:
                if coll.rank == 0:
                    raise LookupError
                await ps.barrier()
        await coll.barrier()
    assert [open.name for open in parts_of(coll).registry.members.dispatchers] == ["world"]


@pytest.mark.drawn(3)
@pytest.mark.parametrize("ticks", range(2, 24, 3))
def test_p2_a_rank_that_is_cancelled_while_it_opens_leaves_nobody_waiting(ticks: int) -> None:
    async def program() -> str:
        async with aiodist.init() as coll:

            async def serve() -> None:
                async with ParameterServer(coll, {"w": torch.zeros(3)}) as ps:
                    await ps.push("w", torch.ones(3))
                    await ps.barrier()

            began, opening = asyncio.get_running_loop().time(), asyncio.create_task(serve())
            if coll.rank == 1:
                for _ in range(ticks):
                    await asyncio.sleep(0)
                opening.cancel()
            try:
                await opening
            except asyncio.CancelledError:
                await asyncio.sleep(20)  # it does something else: only its entry can inform the others
                return "cancelled"
            except CommunicatorError as error:
                return str(error) if asyncio.get_running_loop().time() - began < 10 else "told late"
        return "served"

    seen, mine = run_ranks(2, program)
    assert mine == "cancelled"
    assert "CancelledError" in seen


@pytest.mark.ranks(1, 3)
async def test_p2_barriers_may_be_in_flight_together(coll: Communicator) -> None:
    async with ParameterServer(coll) as ps:
        first, second = ps.barrier(), ps.barrier()
        async with asyncio.timeout(60):
            await second
            await first


@pytest.mark.ranks(2)
@pytest.mark.ranks(2, backend="gloo")
async def test_p2_names_and_errors_may_be_longer_than_a_frame(coll: Communicator) -> None:
    name = "name" * 30_000
    async with ParameterServer(coll, rules={"complains": complains}, servers=1) as ps:
        async with asyncio.timeout(60):
            await ps.init([name, "short"], [torch.zeros(3), torch.zeros(3)])
        if ps.is_worker:
            with pytest.raises(RemoteError) as raised:
                await ps.push(name, torch.ones(3), rule="complains")
            assert "long" * 30_000 in str(raised.value)
            pushes = [ps.push(which, torch.ones(3)) for which in (name, "short") * 50]
            await aiodist.gather(*pushes)
            assert (await ps.pull(name)).tolist() == (await ps.pull("short")).tolist() == [50.0] * 3


@pytest.mark.thorough
@pytest.mark.ranks(2)
@pytest.mark.timeout(60)
async def test_p2_many_names_are_freed_after_their_pushes(coll: Communicator) -> None:
    """In a time that grows with their number, not with its cube."""
    names = [f"n{i}" for i in range(3000)]
    async with ParameterServer(coll, servers=1) as ps:
        await ps.init(names, list(torch.zeros(len(names), 1).unbind()))
        if ps.is_worker:
            push = ps.push(names, list(torch.ones(len(names), 1).unbind()))
            await ps.free([*names, names[0]])
            assert push.done()
            await push


@pytest.mark.ranks(2)
async def test_p2_nothing_is_kept_of_names_that_come_and_go(coll: Communicator, tmp_path: Path) -> None:
    async with ParameterServer(coll, {"stays": torch.zeros(2)}, servers=[0], workers=[0, 1]) as ps:
        await coll.barrier()
        await ps.push("stays", torch.ones(2))
        for i in range(10):
            await ps.init(f"n{i}", torch.full((2,), float(i)))
            assert (await ps.pull(f"n{i}")).tolist() == [float(i)] * 2
            await ps.barrier()
            await ps.free(f"n{i}")
        await ps.barrier()
        assert (await ps.pull("stays")).tolist() == [2.0, 2.0]
        assert ps.names == ("stays",)
        if coll.rank == 0:
            manifest = (await ps.save(tmp_path) / "manifest.json").read_text()
            assert '"stays"' in manifest
            assert '"n0"' not in manifest


@pytest.mark.ranks(2)
@pytest.mark.parametrize("reads", ["snapshot", "lock-free"])
async def test_p2_memory_of_a_freed_tensor_goes_when_its_last_reader_has_it(coll: Communicator, reads: Any) -> None:
    ones, names = torch.ones(100_000), [str(i) for i in range(4)]
    memory: list[StorageWeakRef] = []

    def look(shard: Tensor, value: Tensor) -> None:
        memory.append(StorageWeakRef(shard.untyped_storage()))

    tensors = {name: ones.clone() for name in names}
    async with ParameterServer(coll, tensors, rules={"look": look}, servers=[0], workers=[0]) as ps:
        if coll.rank == 1:
            pull = ps.pull(names, reads=reads)
            await coll.barrier()
            assert all(torch.equal(t, ones) for t in await pull)
            await coll.barrier()
            return
        for name in names:
            await ps.push(name, ones, rule="look")
        await until(lambda: ps.statistics().served)
        free = ps.free(names)
        await coll.barrier()
        await free
        await coll.barrier()
        gc.collect()
        assert sum(one.expired() for one in memory) >= 3  # one may be in the pool


def test_p2_the_pool_forgets_what_was_not_asked_for_the_longest() -> None:
    buffers = Pool(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8), most_bytes=100)
    released = [torch.empty(nbytes, dtype=torch.uint8) for nbytes in (10, 20, 30, 60, 40, 101)]
    for t in released:
        buffers.release(t)
    assert [t.nbytes for t in released if buffers.take(t.nbytes) is t] == [60, 40]


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 16, 17, 1000, 1 << 20, (1 << 20) + 1])
def test_p2_room_for_any_size_is_little_larger_and_used_again(nbytes: int) -> None:
    buffers = Pool(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
    room = buffers.take_room(nbytes)
    assert nbytes <= room.nbytes <= nbytes + nbytes // 8
    buffers.release(room)
    assert nbytes == 0 or buffers.take_room(nbytes) is room


def test_p2_a_rank_that_waits_for_first_values_hears_that_a_server_died() -> None:
    here = next(str(i) for i in range(99) if place(str(i), 1, 4, (0, 1), 8)[0].rank == 0)
    told, over = asyncio.Event(), asyncio.Event()

    async def main() -> list[str]:
        seen = []
        with suppress(AiodistError):  # no close succeeds after a death
            async with (
                aiodist.init() as coll,
                ParameterServer(coll, servers=[0, 1], workers=[2, 3], split_bytes=8, timeout=60) as ps,
            ):
                if coll.rank == 3:
                    waiting = ps.init("w", torch.zeros(4))  # on both; rank 2 would give the first values
                    await asyncio.sleep(1)
                    assert not waiting.done()
                    kill_rank(1)
                    with pytest.raises(PeerLost):
                        await waiting
                    with pytest.raises(PeerLost):
                        await ps.init("w", torch.zeros(4))
                    seen.append("lost")
                    told.set()
                if coll.rank == 1:
                    with suppress(asyncio.CancelledError):  # that it is killed: it says nothing any more
                        await over.wait()
                    await over.wait()
                    raise asyncio.CancelledError
                await told.wait()
                if ps.is_worker:
                    await ps.init(here, torch.ones(1))
                    seen.append("made")
                over.set() if coll.rank == 3 else await over.wait()
        return seen

    assert run_ranks(4, main)[2:] == [["made"], ["lost", "made"]]
