"""P14: what a parameter server counts, on workers and on servers, each number where it can be said exactly."""

from collections import Counter

import pytest
import torch

from aiodist import Communicator, ParameterServer
from aiodist.codecs import Half, Json
from aiodist.errors import RemoteError
from aiodist.ps import Asynchronous, ParameterServerStatistics, Synchronous

SMALL, LARGE = 100, 70_000
SECONDS = 20.0


@pytest.mark.ranks(2)
@pytest.mark.parametrize("numel", [SMALL, LARGE], ids=["inline", "message"])
async def test_p14_a_worker_and_a_server_count_the_same(coll: Communicator, numel: int) -> None:
    async with ParameterServer(coll, {"w": torch.zeros(numel)}, servers=1) as ps:
        await coll.barrier()
        before = ps.statistics()
        await coll.barrier()
        if ps.is_worker:
            nbytes = 4 * numel
            assert (before.pushes, before.push_bytes, before.push_sent_bytes) == (0, 0, 0)  # first values are none
            assert (before.pulls, before.pull_bytes, before.pull_received_bytes) == (1, nbytes, nbytes)
            for _ in range(5):
                await ps.push("w", torch.ones(numel), timeout=SECONDS)
            for reads in ("snapshot", "lock-free", "snapshot"):
                await ps.pull("w", reads=reads, timeout=SECONDS)
            found = ps.statistics()
            assert (found.pushes, found.push_bytes, found.push_sent_bytes) == (5, 5 * nbytes, 5 * nbytes)
            assert (found.pulls, found.pull_bytes, found.pull_received_bytes) == (4, 4 * nbytes, 4 * nbytes)
            assert found.push_seconds > 0
            assert found.pull_seconds > before.pull_seconds
            assert (found.applied, found.steps, found.served) == (0, 0, 0)
            assert found.sent_bytes > before.sent_bytes + 5 * nbytes
        await coll.barrier()
        if ps.is_server:
            found = ps.statistics()
            assert (found.applied, found.steps) == (5, 5)
            assert found.served == before.served + 3
            assert found.step_seconds > 0
            assert (found.pushes, found.push_bytes, found.push_sent_bytes) == (0, 0, 0)
            assert (found.encode_seconds, found.decode_seconds, found.held_seconds) >= (0.0, 0.0, 0.0)
            assert found.sent_bytes > before.sent_bytes + 12 * numel


@pytest.mark.ranks(1)
@pytest.mark.parametrize("numel", [SMALL, LARGE])
async def test_p14_nothing_leaves_a_rank_that_serves_itself(coll: Communicator, numel: int) -> None:
    async with ParameterServer(coll, {"w": torch.zeros(numel)}, codec=Half(), pull_codec=Half()) as ps:
        await ps.init("meta", "x" * numel, codec=Json())
        for _ in range(3):
            await ps.push_pull("w", torch.ones(numel), timeout=SECONDS)
            await ps.push_pull("meta", "y" * numel, timeout=SECONDS)
        found = ps.statistics()
        code = Json().encode("y" * numel).nbytes
        assert (found.pushes, found.push_bytes, found.push_sent_bytes) == (6, 12 * numel + 3 * code, 0)
        assert (found.pulls, found.pull_bytes, found.pull_received_bytes) == (7, 16 * numel + 3 * code, 0)
        assert found.served == 7
        assert (found.sent_bytes, found.encode_seconds, found.decode_seconds) == (0, 0.0, 0.0)


@pytest.mark.ranks(2, backend="shm")
async def test_p14_what_lies_in_an_arena_does_not_travel(coll: Communicator) -> None:
    async with ParameterServer(coll, {"w": torch.zeros(LARGE)}, servers=1) as ps:
        if ps.is_worker:
            value = coll.arena_empty(LARGE, torch.float32).fill_(1.0)
            before = ps.statistics()
            for _ in range(3):
                await ps.push("w", value, timeout=SECONDS)
                await ps.pull("w", timeout=SECONDS)
            found = ps.statistics()
            assert (found.push_bytes, found.push_sent_bytes) == (12 * LARGE, 0)
            assert (found.pull_bytes - before.pull_bytes, found.pull_received_bytes) == (12 * LARGE, 0)
            assert found.sent_bytes - before.sent_bytes < LARGE
        await coll.barrier()
        if ps.is_server:
            found = ps.statistics()
            assert found.served >= 4  # and its own reads


@pytest.mark.ranks(2)
@pytest.mark.parametrize("numel", [SMALL, LARGE])
async def test_p14_codes_are_counted_by_what_they_weigh(coll: Communicator, numel: int) -> None:
    half = Half()
    async with ParameterServer(coll, {"w": torch.zeros(numel)}, servers=1, codec=half, pull_codec=half) as ps:
        code = half.encode(torch.ones(numel)).nbytes
        whole, difference = 16 + 4 * numel, 16 + code
        await coll.barrier()
        await coll.barrier()
        if ps.is_worker:
            for _ in range(3):
                await ps.push_pull("w", torch.ones(numel), timeout=SECONDS)
            found = ps.statistics()
            assert (found.push_bytes, found.push_sent_bytes) == (12 * numel, 3 * code)
            assert (found.pull_bytes, found.pull_received_bytes) == (16 * numel, whole + 3 * difference)
            assert found.encode_seconds > 0
            assert found.decode_seconds > 0
        await coll.barrier()
        if ps.is_server:
            found = ps.statistics()
            assert found.encode_seconds > 0
            assert found.decode_seconds > 0


@pytest.mark.ranks(2)
async def test_p14_objects_are_counted_by_their_codes(coll: Communicator) -> None:
    async with ParameterServer(coll, servers=1) as ps:
        if ps.is_worker:
            await ps.init("meta", 0, codec=Json())
            texts = ["", "x" * 70_000, "x"]
            for text in texts:
                await ps.push_pull("meta", text, timeout=SECONDS)
            total = sum(Json().encode(text).nbytes for text in texts)
            found = ps.statistics()
            assert (found.pushes, found.push_bytes, found.push_sent_bytes) == (3, total, total)
            assert (found.pulls, found.pull_bytes, found.pull_received_bytes) == (3, total, total)


@pytest.mark.ranks(3)
async def test_p14_staleness_is_what_each_push_missed(coll: Communicator) -> None:
    policy = Asynchronous(max_staleness=2, stale="drop")
    async with ParameterServer(coll, {"w": torch.zeros(SMALL)}, servers=1, consistency=policy) as ps:
        for worker, pushes in ((0, 2), (1, 3), (0, 2)):  # without reads, so all bases are 0
            if coll.rank == worker:
                for _ in range(pushes):
                    await ps.push("w", torch.ones(SMALL), timeout=SECONDS)
            await coll.barrier()
        if ps.is_server:
            found = ps.statistics()
            assert found.staleness == Counter({0: 1, 1: 1, 2: 1})
            assert (found.applied, found.dropped, found.scaled, found.steps) == (3, 4, 0, 3)
            found.staleness[0] += 9  # it is a copy
            assert ps.statistics().staleness == Counter({0: 1, 1: 1, 2: 1})
            assert isinstance(found, ParameterServerStatistics)
        elif coll.rank == 0:
            assert ps.statistics().staleness == Counter()
        await coll.barrier()


@pytest.mark.ranks(3)
async def test_p14_what_is_scaled_is_counted_also_when_the_tensor_is_freed(coll: Communicator) -> None:
    policy = Asynchronous(stale="scale")
    async with ParameterServer(coll, {"w": torch.zeros(SMALL)}, servers=1, consistency=policy) as ps:
        if coll.rank == 0:
            for _ in range(3):
                await ps.push("w", torch.ones(SMALL), timeout=SECONDS)
        await coll.barrier()
        if ps.is_worker:
            await ps.free("w", timeout=SECONDS)
        await coll.barrier()
        if ps.is_server:
            found = ps.statistics()
            assert found.staleness == Counter({0: 1, 1: 1, 2: 1})
            assert (found.applied, found.dropped, found.scaled) == (3, 0, 2)
        await coll.barrier()


@pytest.mark.ranks(3)
async def test_p14_what_waits_for_others_is_held(coll: Communicator) -> None:
    async with ParameterServer(coll, {"w": torch.zeros(SMALL)}, servers=1, consistency=Synchronous("sum")) as ps:
        if coll.rank == 0:
            await ps.push("w", torch.ones(SMALL), timeout=SECONDS)
        await coll.barrier()
        if ps.is_server:
            assert (ps.statistics().applied, ps.statistics().steps) == (0, 0)
        await coll.barrier()
        if coll.rank == 1:
            await ps.push_pull("w", torch.ones(SMALL), timeout=SECONDS)
        await coll.barrier()
        if ps.is_server:
            found = ps.statistics()
            assert (found.applied, found.steps) == (2, 1)
            assert found.held_seconds > 0
        await coll.barrier()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("numel", [SMALL, LARGE])
async def test_p14_what_a_rule_refused_is_not_applied(coll: Communicator, numel: int) -> None:
    def refuse(shard: torch.Tensor, value: torch.Tensor) -> None:
        raise ArithmeticError("no")

    async with ParameterServer(coll, {"w": torch.zeros(numel)}, servers=1, rule=refuse) as ps:
        if ps.is_worker:
            with pytest.raises(RemoteError, match="ArithmeticError: no"):
                await ps.push("w", torch.ones(numel), timeout=SECONDS)
            await ps.push("w", torch.ones(numel), rule="add", timeout=SECONDS)
        await coll.barrier()
        if ps.is_server:
            assert ps.statistics().applied == 1
