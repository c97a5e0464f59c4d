"""P7: reads during pushes: snapshots have one version, and lock-free reads do not wait."""

from __future__ import annotations

import asyncio
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor

from aiodist import Communicator
from aiodist.ps import Asynchronous, Bounded, ParameterServer, Synchronous

NUMEL = 1_000_000
READS = 300


def mixed(t: Tensor) -> bool:
    return bool(t.min() != t.max())


async def read_while_others_push(coll: Communicator, reads: int, out: Tensor, numel: int, **how: Any) -> None:
    """Ranks 0 and 1 add the same number everywhere, again and again, while the last rank reads."""
    reader = coll.size - 1
    async with ParameterServer(coll, workers=[0, 1], **how) as ps:
        await ps.init("w", out)
        done = coll.recv(src=reader) if coll.rank in (0, 1) else None
        last, versions = 0, set()
        if coll.rank == reader:
            for _ in range(reads):
                pulled = ps.pull("w", out)
                await pulled
                assert not mixed(out), f"version {pulled.version} and another"
                assert pulled.version == int(out[0]), "the version says what was read"
                assert pulled.version >= last
                last = pulled.version
                versions.add(last)
            for worker in (0, 1):
                await coll.send(torch.zeros(1), worker)
            assert len(versions) > reads // 100, "nobody pushed meanwhile"
        elif done is not None:
            one = torch.ones(numel)
            mine = torch.empty(numel)
            while not done.done():
                await ps.push("w", one)
                pulled = ps.pull("w", mine)
                await pulled
                assert not mixed(mine)
                assert pulled.version is not None
                assert last < pulled.version == int(mine[0]), "a worker sees its own push"
                last = pulled.version
                await asyncio.sleep(0)  # on the server's own rank nothing else suspends
            await done


@pytest.mark.ranks(3)
@pytest.mark.parametrize("servers", [[0], [2], [0, 1], [0, 1, 2]], ids=str)
async def test_p7_snapshots_never_mix_in_one_process(coll: Communicator, servers: list[int]) -> None:
    await read_while_others_push(coll, 40, torch.zeros(200_000), 200_000, servers=servers)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("servers", [[0], [0, 1], [0, 1, 2]], ids=str)
@pytest.mark.parametrize("policy", [Asynchronous(), Bounded(1)], ids=repr)
async def test_p7_small_snapshots_never_mix_in_one_process(coll: Communicator, servers: list[int], policy: Any) -> None:
    await read_while_others_push(coll, 100, torch.zeros(30), 30, servers=servers, split_bytes=4, consistency=policy)


@pytest.mark.thorough
@pytest.mark.ranks(3, backend=("mpi", "shm"))
@pytest.mark.parametrize(
    ("servers", "place"),
    [
        pytest.param([0], "ordinary", marks=pytest.mark.soak),
        ([0, 1], "arena"),
        ([0, 1, 2], "ordinary"),
    ],
    ids=str,
)
async def test_p7_of_300_snapshots_of_a_million_none_is_mixed(
    coll: Communicator, servers: list[int], place: str
) -> None:
    out = coll.arena_empty(NUMEL).zero_() if place == "arena" else torch.zeros(NUMEL)
    await read_while_others_push(coll, READS // 6, out, NUMEL, servers=servers)


class Held:
    """A rule that holds its server in the middle of a step."""

    def __init__(self) -> None:
        self.entered = Event()
        self.go = Event()

    def __call__(self, shard: Tensor, value: Tensor) -> None:
        half = shard.numel() // 2
        shard[:half] += value[:half]
        self.entered.set()
        assert self.go.wait(60)
        shard[half:] += value[half:]


@pytest.fixture
def held() -> Held:
    return Held()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("numel", [10, 300_000])
async def test_p7_lock_free_reads_wait_for_no_writer_and_see_it_half_done(
    coll: Communicator, held: Held, numel: int, until: Any
) -> None:
    async with ParameterServer(coll, [torch.zeros(numel)], rule=held, servers=[0], workers=[0, 1]) as ps:
        if coll.rank == 1:
            pushed = ps.push("0", torch.ones(numel))
            await until(held.entered.is_set)
            snapshot = ps.pull("0", torch.empty(numel))
            free = ps.pull("0", torch.empty(numel), reads="lock-free")
            seen = await free
            assert (float(seen[0]), float(seen[-1]), free.version) == (1.0, 0.0, 0)
            assert not snapshot.done()
            assert not pushed.done()
            held.go.set()
            whole = await snapshot
            assert (whole.unique().tolist(), snapshot.version) == ([1.0], 1)
            after = ps.pull("0", torch.empty(numel), reads="lock-free")
            assert ((await after).unique().tolist(), after.version) == ([1.0], 1)
            await pushed


@pytest.mark.ranks(3)
@pytest.mark.parametrize("mode", ["snapshot", "lock-free"])
async def test_p7_versions_of_one_client_never_go_back(coll: Communicator, mode: Any) -> None:
    async with ParameterServer(coll, [torch.zeros(9)], reads=mode, split_bytes=4) as ps:
        last = 0
        for i in range(30):
            pushed = ps.push("0", torch.ones(9))
            reads = [ps.pull("0", torch.empty(9)) for _ in range(3)]
            for read in reads:
                values = await read
                version = read.version or 0
                assert last <= version
                assert int(values.min()) >= version, "older than its version"
                last = version
            await pushed
            if i % 10 == coll.rank:
                await ps.barrier()
                break
        await ps.sync()


@pytest.mark.ranks(2)
async def test_p7_a_reader_waits_for_the_version_that_it_wants(coll: Communicator) -> None:
    async with ParameterServer(
        coll, [torch.zeros(6)], servers=[1], workers=[0], consistency=Synchronous("mean"), split_bytes=4
    ) as ps:
        if coll.rank == 1:
            pulled = ps.pull("0", torch.empty(6), at_least=3)
            await coll.barrier()
            assert not pulled.done()
            await coll.barrier()
            assert ((await pulled).unique().tolist(), pulled.version) == ([3.0], 3)
        else:
            await ps.push_pull("0", torch.ones(6), torch.empty(6))
            await ps.push_pull("0", torch.ones(6), torch.empty(6))
            await coll.barrier()
            await coll.barrier()
            await ps.push("0", torch.ones(6))
