"""S4: collectives by CUDA IPC that fail: all ranks learn of it and can continue, and the process lives."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from aiodist import Communicator
from aiodist.backends import nccl
from aiodist.errors import BackendError, BackendUnavailable, MismatchError
from aiodist.testing.seams.algorithms import Endpoint, Program
from aiodist.testing.seams.cuda import CudaIpc
from aiodist.testing.seams.transport import Primitive
from aiodist.types import ReduceOp
from tests.support.blocking import rounds
from tests.support.simulated_cuda.device import SimulatedCuda
from tests.support.simulated_mapper import SimulatedMapper

if TYPE_CHECKING:
    from tests.collectives.conftest import Make, Ranks

pytestmark = pytest.mark.usefixtures("simulated_cuda")
one_loop = pytest.mark.asyncio(loop_factories=["asyncio"])
SECONDS = 20.0


async def failures(ranks: Ranks, make: Sequence[Make]) -> list[BaseException]:
    return await asyncio.wait_for(asyncio.gather(*ranks.issue(make), return_exceptions=True), SECONDS)


async def usable(ranks: Ranks) -> None:
    """Assert that the ranks can continue."""
    parts = ranks.brought(ranks.size, 50, seed=77)
    ts = ranks.on_device(parts)
    await ranks.perform(ranks.summing(ts))
    assert all(torch.equal(t.cpu(), torch.stack(parts).sum(0)) for t in ts)
    await ranks.close()


@one_loop
@pytest.mark.parametrize("other", [torch.ones(11), torch.ones(10).double()])
async def test_s4_ranks_that_disagree_are_told_and_go_on(ranks_of: type[Ranks], other: Tensor) -> None:
    ranks = ranks_of(3)
    ts = ranks_of.on_device([torch.ones(10), torch.ones(10), other])
    errors = await failures(ranks, ranks_of.summing(ts))
    assert [type(error) for error in errors] == [MismatchError] * 3
    assert "rank 7: 1" in str(errors[0])  # its number in the world
    assert torch.equal(ts[0].cpu(), torch.ones(10)), "somebody worked though the ranks disagree"
    await usable(ranks)


@one_loop
@pytest.mark.parametrize("other", [torch.ones(11), torch.ones(10).double()])
async def test_s4_the_rank_that_works_tells_all_that_they_disagree(ranks_of: type[Ranks], other: Tensor) -> None:
    """On a shared device the others communicate with this rank alone, and one of them brings a wrong tensor."""
    ranks = ranks_of(3, shared=True)
    ts = ranks_of.on_device([torch.ones(10), torch.ones(10), other])
    errors = await failures(ranks, ranks_of.summing(ts))
    assert [type(error) for error in errors] == [MismatchError] * 3
    assert all("rank 7: 1" in str(error) for error in errors)
    assert torch.equal(ts[0].cpu(), torch.ones(10)), "somebody worked though the ranks disagree"
    await usable(ranks)


@one_loop
async def test_s4_a_description_that_fits_in_no_frame_is_an_error_everywhere(
    ranks_of: type[Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such tensors come from expandable segments, or from an unknown allocator."""
    plain = SimulatedMapper.export
    ranks = ranks_of(3)
    ts = ranks_of.on_device(ranks_of.brought(3, 10))
    with monkeypatch.context() as patched:
        patched.setattr(SimulatedMapper, "export", lambda self, t: plain(self, t) + bytes(3000))
        errors = await failures(ranks, ranks_of.summing(ts))
    assert all(isinstance(error, BackendError) and "a description of 30" in str(error) for error in errors), errors
    await usable(ranks)


@one_loop
@pytest.mark.parametrize("failing", ["export", "open"])
async def test_s4_memory_that_cannot_be_mapped_is_an_error_everywhere(
    ranks_of: type[Ranks], failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = ranks_of(3)
    ts = ranks_of.on_device(ranks_of.brought(3, 10))

    def fail(*args: object) -> None:
        raise BackendError("no such segment")

    with monkeypatch.context() as patched:
        patched.setattr(ranks.mappers[1], failing, fail)
        errors = await failures(ranks, ranks_of.summing(ts))
    assert all(isinstance(error, BackendError) and "no such segment" in str(error) for error in errors), errors
    assert "rank 4" in str(errors[0])
    assert not all(mapper.opened == set() for mapper in ranks.mappers)
    await usable(ranks)


@one_loop
async def test_s4_work_that_fails_is_an_error_everywhere(
    ranks_of: type[Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = ranks_of(2)
    ts = ranks_of.on_device(ranks_of.brought(2, 600))

    class Full(dict[str, int]):
        def __getitem__(self, name: str) -> int:
            raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(ranks.impls[1], "limits", Full())
        errors = await failures(ranks, ranks_of.summing(ts))
    assert isinstance(errors[1], BackendError)
    assert isinstance(errors[1].__cause__, torch.OutOfMemoryError)
    assert isinstance(errors[0], BackendError)
    assert "rank 4 failed in an operation by CUDA IPC: CUDA out of memory" in str(errors[0])
    await usable(ranks)


@one_loop
async def test_s4_a_device_that_fails_is_an_error_everywhere(
    ranks_of: type[Ranks], simulated_cuda: SimulatedCuda
) -> None:
    ranks = ranks_of(2, devices=2)
    for n in (500, 600):  # the first is dead when the last is announced
        await ranks.perform(ranks_of.summing(ranks_of.on_device(ranks_of.brought(2, n), devices=2)))
    ts = ranks_of.on_device(ranks_of.brought(2, 600), devices=2)
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)
    with simulated_cuda.paused(ranks.streams[1]):
        futures = []
        for rank, make in enumerate(ranks_of.summing(ts)):
            with torch.cuda.stream(ranks.streams[rank]):
                futures.append(ranks.begin(rank, 3, make))
        await rounds()
        simulated_cuda.fail(1, "an illegal memory access was encountered")
        errors = await asyncio.wait_for(asyncio.gather(*futures, return_exceptions=True), SECONDS)
    assert all(isinstance(error, BackendError) and "illegal memory access" in str(error) for error in errors), errors
    await ranks.close()


@one_loop
async def test_s4_closing_leaves_what_my_kernels_may_use(
    ranks_of: type[Ranks], simulated_cuda: SimulatedCuda, until: Any
) -> None:
    """A peer died before the operations finished: no rank waits for them any more."""
    ranks = ranks_of(2, shared=True)
    parts = ranks_of.brought(2, 600)
    ts = ranks_of.on_device(parts)
    torch.cuda.synchronize()
    with simulated_cuda.paused(ranks.streams[0]):
        futures = []
        for rank, make in enumerate(ranks_of.summing(ts)):
            with torch.cuda.stream(ranks.streams[rank]):
                futures.append(ranks.begin(rank, 1, make))
        await until(lambda: ranks.mappers[0].opened)
        await ranks.mappings[0].aclose()
        assert ranks.mappers[0].opened
    await asyncio.wait_for(asyncio.gather(*futures), SECONDS)
    assert all(torch.equal(t.cpu(), torch.stack(parts).sum(0)) for t in ts)
    await ranks.close()


@one_loop
@pytest.mark.parametrize("begun", [False, True])
async def test_s4_a_rank_that_dies_in_the_middle(
    ranks_of: type[Ranks], begun: bool, simulated_cuda: SimulatedCuda
) -> None:
    """The other ranks learn of it, do not touch its memory afterwards, and can continue without it."""
    ranks = ranks_of(3)
    parts = ranks_of.brought(3, 600)
    ts = ranks_of.on_device(parts)
    torch.cuda.synchronize()
    with simulated_cuda.paused(ranks.streams[2]):
        with torch.cuda.stream(ranks.streams[2]):
            ts[2].mul_(1)
        dying = [ranks.begin(2, 1, ranks_of.summing(ts)[2])] if begun else []
        futures = [ranks.begin(rank, 1, ranks_of.summing(ts)[rank]) for rank in (0, 1)]
        await rounds()
        for rank in (0, 1):
            ranks.transports[rank].lose(2)  # type: ignore[union-attr]
        errors = await asyncio.wait_for(asyncio.gather(*futures, return_exceptions=True), SECONDS)
        assert all(isinstance(error, BackendError) and "rank 2 has left" in str(error) for error in errors), errors
        simulated_cuda.launches.clear()
        for rank in (0, 1):  # before it comes so far as to work in their memory, which it has heard of
            ranks.transports[2].lose(rank)  # type: ignore[union-attr]
    for future in dying:
        with pytest.raises(BackendError):
            await asyncio.wait_for(future, SECONDS)
    torch.cuda.synchronize()
    assert not simulated_cuda.launches
    assert torch.equal(ts[2].cpu(), parts[2])
    left = [ts[rank].fill_(rank + 1) for rank in (0, 1)]

    def make(rank: int, impl: CudaIpc, ep: Endpoint) -> Program[Any]:
        return impl.run(ep.among([0, 1]), [Primitive("allreduce", left[rank], op=ReduceOp.SUM)])

    torch.cuda.synchronize()
    await asyncio.wait_for(asyncio.gather(*(ranks.begin(rank, 2, partial(make, rank)) for rank in (0, 1))), SECONDS)
    assert all(torch.equal(t.cpu(), torch.full_like(parts[0], 3)) for t in left)
    await ranks.close()


@pytest.fixture(params=["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def expandable(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(request.param, "max_split_size_mb:64,expandable_segments:True")
    monkeypatch.setattr(nccl, "missing", lambda: "it is left out")
    return str(request.param)


@pytest.mark.usefixtures("expandable")
@pytest.mark.ranks(2, backend="local")
async def test_s4_memory_in_expandable_segments_is_left_to_others(expandable: str, coll: Communicator) -> None:
    t = torch.ones(300, device="cuda")
    with pytest.raises(BackendUnavailable, match=rf"impl='cuda_ipc': .*{expandable} has expandable_segments:True"):
        await coll.allreduce(t, impl="cuda_ipc")
    await coll.allreduce(t)
    assert torch.equal(t.cpu(), torch.full((300,), float(coll.size)))
