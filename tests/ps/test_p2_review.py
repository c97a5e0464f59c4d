"""P2: what was found by reading: order behind codes, long entries, many names at once, names that come and go."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import aiodist
from aiodist import Communicator
from aiodist.codecs import TopK
from aiodist.errors import AiodistError, CommunicatorError, PeerLost, RemoteError
from aiodist.ps import SGD, ParameterServer, context
from aiodist.ps.context import Pool
from aiodist.ps.server import Directory
from aiodist.ps.shard import Shards
from aiodist.testing import run_ranks

LARGE = 1_000_000


def complains(shard: Tensor, value: Tensor) -> None:
    raise ValueError("long" * 30_000)


@pytest.mark.ranks(2)
async def test_p2_what_is_not_encoded_stays_in_order_behind_what_is(coll: Communicator) -> None:
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
async def test_p2_what_failed_leaves_nothing_behind(coll: Communicator) -> None:
    """Its communicator, and the memory of its shards, had been there until the world ended."""
    for _ in range(5):
        with suppress(LookupError, CommunicatorError):
            async with ParameterServer(coll, {"w": torch.zeros(LARGE)}) as ps:
                if coll.rank == 0:
                    raise LookupError
                await ps.barrier()
        await coll.barrier()
    assert [c.name for c in coll.parts.registry._open] == ["world"]


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
                await asyncio.sleep(20)  # it does something else: nothing but its word can tell the others
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
async def test_p2_many_names_are_freed_behind_their_pushes(coll: Communicator) -> None:
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
async def test_p2_nothing_is_kept_of_names_that_come_and_go(coll: Communicator) -> None:
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
        assert set(ps._names._entries) == {"stays"}
        assert len(ps._session.server.shards) == (coll.rank == 0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("reads", ["snapshot", "lock-free"])
async def test_p2_memory_of_a_freed_tensor_goes_when_its_last_reader_has_it(coll: Communicator, reads: Any) -> None:
    ones = torch.ones(100_000)
    async with ParameterServer(coll, {"w": ones.clone()}, servers=[0], workers=[0]) as ps:
        if coll.rank == 1:
            pull = ps.pull("w", reads=reads)
            await coll.barrier()
            assert torch.equal(await pull, ones)
            await coll.barrier()
            return
        shard = next(iter(ps._session.server.shards.values()))
        while not shard.readers:  # noqa: ASYNC110  - the pull is on its way
            await asyncio.sleep(0)
        free = ps.free("w")
        await coll.barrier()
        await free
        await coll.barrier()
        assert not ps._session.server._retired


def test_p2_the_pool_forgets_what_was_not_asked_for_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "_KEPT_BYTES", 100)
    buffers = Pool(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
    for nbytes in range(1, 60):
        buffers.release(torch.empty(nbytes, dtype=torch.uint8))
    last = torch.empty(60, dtype=torch.uint8)
    buffers.release(last)
    buffers.release(torch.empty(101, dtype=torch.uint8))
    assert buffers.take(60) is last
    assert buffers._kept_bytes == sum(nbytes * len(free) for nbytes, free in buffers._free.items()) <= 100


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 16, 17, 1000, 1 << 20, (1 << 20) + 1])
def test_p2_room_for_any_size_is_little_larger_and_used_again(nbytes: int) -> None:
    buffers = Pool(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
    room = buffers.take_room(nbytes)
    assert nbytes <= room.nbytes <= nbytes + nbytes // 8
    buffers.release(room)
    assert nbytes == 0 or buffers.take_room(nbytes) is room


class Answers:
    """A server that shows what it would say."""

    def __init__(self) -> None:
        self.said: dict[int, Any] = {}

    def answer(self, client: int, number: int, **said: Any) -> None:
        self.said[number] = said

    def fail(self, client: int, number: int, error: AiodistError) -> None:
        self.said[number] = error

    def tell(self, rank: int, op: str, **said: Any) -> None:
        assert op == "remove"


def test_p2_a_rank_that_waits_for_first_values_hears_that_a_server_died() -> None:
    gone: dict[int, AiodistError] = {}
    context = SimpleNamespace(
        rank=0,
        servers=(0, 1),
        workers=(2, 3),
        gone=gone,
        lost=lambda rank: PeerLost(f"server {rank} is gone", lost=rank),
    )
    answers = Answers()
    names = Directory(context, answers, Shards())  # type: ignore[arg-type]
    call: dict[str, Any] = {"name": "w", "dtype": 8, "shape": [4], "rule": 0, "start": "root", "servers": [0, 1]}
    call |= {"codec": "None", "table": "None", "worker": True, "again": False}
    names.open(2, call | {"n": 1})
    names.open(3, call | {"n": 2})
    assert answers.said == {1: {"key": 0, "fill": True}}
    gone[1] = PeerLost("1 died", lost=1)
    names.leave(1)
    assert isinstance(answers.said[2], PeerLost)
    names.open(3, call | {"n": 3})
    assert isinstance(answers.said[3], PeerLost)
    names.open(3, call | {"n": 4, "name": "v", "servers": [0]})
    names.open(2, call | {"n": 5, "name": "v", "servers": [0]})
    assert answers.said[5]["fill"]
