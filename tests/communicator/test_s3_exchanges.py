"""S3: gather, scatter and alltoall of CUDA tensors in groups of NCCL's sends and receives, lists in one group."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from aiodist import AiodistError, BackendError, Communicator, CommunicatorAborted, OperationTimeout, gather, init
from aiodist.communicator import parts_of
from aiodist.streams import CudaStream
from aiodist.testing import run_ranks
from aiodist.testing.seams.transport import DTYPES
from tests.support.fake_nccl.core import FakeNccl

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiodist.handles import Handle
    from tests.conftest import NcclOnDevices

    Call = Callable[[Communicator, Any], Handle[Any]]

KINDS = [kind for kind in DTYPES if kind not in (torch.uint16, torch.uint32, torch.uint64)]


@pytest.fixture
def fake(fake_nccl: NcclOnDevices) -> FakeNccl:
    return fake_nccl.library


def value(src: int, dst: int, numel: int, kind: torch.dtype = torch.float32) -> torch.Tensor:
    """Return what `src` has for `dst`: other values than any other pair has."""
    number = torch.arange(numel) + 40 * src + 10 * dst
    return (number % 2).bool() if kind is torch.bool else number.to(kind)


def on(coll: Communicator, t: torch.Tensor) -> torch.Tensor:
    return t.to(coll.device)


def exchanged(fake: FakeNccl) -> int:
    return fake.calls.count("send")


async def every_exchange(coll: Communicator, kind: torch.dtype, numels: list[int], impl: Any) -> None:
    """Rank r has `numels[r]` elements for each other rank."""
    me, ranks = coll.rank, range(coll.size)
    root = coll.size - 1
    gathered = await coll.gather(on(coll, value(me, root, numels[me], kind)), root, impl=impl)
    if me == root:
        for r, t in enumerate(gathered):
            assert t.device == coll.device
            assert torch.equal(t.cpu(), value(r, root, numels[r], kind))
    else:
        assert gathered is None
    into = on(coll, torch.empty(0, dtype=kind))
    joined = await coll.gather(on(coll, value(me, root, numels[me], kind)), root, out=into, impl=impl)
    if me == root:
        assert torch.equal(joined.cpu(), torch.cat([value(r, root, numels[r], kind) for r in ranks]))
    lists = [[on(coll, value(root, r, numels[r] + i, kind)) for r in ranks] for i in range(2)]
    dealt = await coll.scatter(lists[0] if me == root else None, root, impl=impl)
    assert dealt.device == coll.device
    assert torch.equal(dealt.cpu(), value(root, me, numels[me], kind))
    several = await coll.scatter(lists if me == root else None, root, impl=impl)
    assert [t.tolist() for t in several] == [value(root, me, numels[me] + i, kind).tolist() for i in range(2)]
    ts = [on(coll, value(me, r, numels[me], kind)) for r in ranks]
    swapped = await coll.alltoall(ts, impl=impl)
    assert all(t.device == coll.device for t in swapped)
    assert [t.tolist() for t in swapped] == [value(r, me, numels[r], kind).tolist() for r in ranks]
    rows = torch.cat([value(me, r, numels[me], kind) for r in ranks])
    single = await coll.alltoall_single(on(coll, rows), sizes=[numels[me]] * coll.size, impl=impl)
    assert torch.equal(single.cpu(), torch.cat([value(r, me, numels[r], kind) for r in ranks]))
    rows = torch.cat([value(me, r, 3, kind) for r in ranks])
    single = await coll.alltoall_single(on(coll, rows), impl=impl)
    assert torch.equal(single.cpu(), torch.cat([value(r, me, 3, kind) for r in ranks]))


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("impl", ["nccl", "auto", "direct"])
async def test_s3_exchanges_of_uneven_sizes(coll: Communicator, fake: FakeNccl, impl: str) -> None:
    for numels in ([5, 0, 1000], [0, 3, 0], [1, 1, 1]):
        await every_exchange(coll, torch.float32, numels[: coll.size], impl)
    await coll.barrier()
    assert bool(exchanged(fake)) == (impl == "nccl" or (impl == "auto" and coll.size > 1))


@pytest.mark.drawn(7)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", KINDS, ids=str)
async def test_s3_exchanges_of_every_kind(coll: Communicator, fake: FakeNccl, kind: torch.dtype) -> None:
    await every_exchange(coll, kind, [4, 7], "nccl")
    assert exchanged(fake)


@pytest.mark.ranks(2, 3)
async def test_s3_availability_says_that_nccl_exchanges(coll: Communicator, fake: FakeNccl) -> None:
    there = coll.availability()
    for operation in ("gather", "scatter", "alltoall", "alltoall_single"):
        assert there.of(operation, "nccl", "cuda").state == "available"
        assert there.of(operation, "direct", "cuda").state == "available"
        assert there.of(operation, "nccl", "cpu").state == "not possible here"
    assert there.of("exscan", "nccl", "cuda").reason == "it has one form"


@pytest.mark.drawn(2)
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("seed", range(3))
async def test_s3_exchanges_keep_the_order_of_issue_with_all_else(
    coll: Communicator, fake: FakeNccl, seed: int
) -> None:
    """An exchange learns sizes first, on each rank at another time; a later operation must not overtake it."""
    dice = random.Random(seed)  # the same on all ranks
    me, ranks = coll.rank, range(coll.size)
    handles: list[Handle[Any]] = []
    expected: list[list[torch.Tensor]] = []
    for i in range(30):
        root = dice.randrange(coll.size)
        what = dice.choice(["gather", "scatter", "alltoall", "single", "allreduce", "allgather", "scatter cpu"])
        if what == "gather":
            handles.append(coll.gather(on(coll, value(me, i, 3 + me)), root))
            expected.append([value(r, i, 3 + r) for r in ranks] if me == root else [])
        elif what.startswith("scatter"):
            given = [value(root, r, 2 + r) for r in ranks]
            given = given if what == "scatter cpu" else [on(coll, t) for t in given]
            handles.append(coll.scatter(given if me == root else None, root))
            expected.append([value(root, me, 2 + me)])
        elif what == "alltoall":
            handles.append(coll.alltoall([on(coll, value(me, r, me + 1)) for r in ranks]))
            expected.append([value(r, me, r + 1) for r in ranks])
        elif what == "single":
            handles.append(coll.alltoall_single(on(coll, torch.cat([value(me, r, 4) for r in ranks]))))
            expected.append([torch.cat([value(r, me, 4) for r in ranks])])
        elif what == "allgather":
            handles.append(coll.allgather(on(coll, value(me, i, 2))))
            expected.append([value(r, i, 2) for r in ranks])
        else:
            handles.append(coll.allreduce(on(coll, value(me, i, 8)), impl=dice.choice(["nccl", "staged"])))
            expected.append([torch.stack([value(r, i, 8) for r in ranks]).sum(0)])
    for result, wanted in zip(await gather(*handles), expected, strict=True):
        seen = [] if result is None else result if isinstance(result, list) else [result]
        assert [t.tolist() for t in seen] == [t.tolist() for t in wanted]


@pytest.mark.ranks(2, 3)
async def test_s3_a_list_is_one_group_of_calls(coll: Communicator, fake: FakeNccl) -> None:
    me, ranks, count = coll.rank, range(coll.size), 5
    await coll.allreduce(on(coll, torch.ones(1)), impl="nccl")
    await coll.barrier()

    async def launched(call: Callable[[], Handle[Any]]) -> tuple[Any, list[int]]:
        """Return the result, and how many calls each launch of this rank had."""
        before = len(fake.launches)
        result = await call()
        await coll.barrier()
        mine = [calls for rank, calls in fake.launches[before:] if rank == me]
        await coll.barrier()
        return result, mine

    ts = [on(coll, value(me, i, 3 + i)) for i in range(count)]
    sums = [torch.stack([value(r, i, 3 + i) for r in ranks]).sum(0).tolist() for i in range(count)]
    reduced, calls = await launched(lambda: coll.allreduce([t.clone() for t in ts], impl="nccl"))
    assert [t.tolist() for t in reduced] == sums
    assert calls == [count]
    gathered, calls = await launched(lambda: coll.allgather(ts, impl="nccl"))
    assert [[t.tolist() for t in of] for of in gathered] == [
        [value(r, i, 3 + i).tolist() for r in ranks] for i in range(count)
    ]
    assert calls == [count]
    at_root, calls = await launched(lambda: coll.gather(ts, 0, impl="nccl"))
    assert calls == [count * (coll.size - 1) if me == 0 else count]
    if me == 0:
        assert [t.tolist() for of in at_root for t in of] == [
            value(r, i, 3 + i).tolist() for i in range(count) for r in ranks
        ]
    lists = [[on(coll, value(me, 10 * i + r, 2)) for r in ranks] for i in range(count)]
    swapped, calls = await launched(lambda: coll.alltoall(lists, impl="nccl"))
    assert calls == [2 * count * (coll.size - 1)]
    assert [[t.tolist() for t in of] for of in swapped] == [
        [value(r, 10 * i + me, 2).tolist() for r in ranks] for i in range(count)
    ]
    dealt, calls = await launched(lambda: coll.scatter(lists if me == 0 else None, 0, impl="nccl"))
    assert calls == [count * (coll.size - 1) if me == 0 else count]
    assert [t.tolist() for t in dealt] == [value(0, 10 * i + me, 2).tolist() for i in range(count)]


@pytest.mark.ranks(2)
async def test_s3_an_alltoall_of_equal_blocks_needs_no_host(coll: Communicator, fake: FakeNccl) -> None:
    await coll.alltoall_single(on(coll, torch.ones(2)))  # opened
    side = torch.cuda.Stream(device=coll.device)
    for i in range(10):
        t = on(coll, value(coll.rank, i, 64))
        out = torch.empty_like(t)
        h = coll.alltoall_single(t, out=out)
        h.wait_stream(side)
        with torch.cuda.stream(side):
            y = out * 2
        await CudaStream(side).record()
        half = slice(32 * coll.rank, 32 * coll.rank + 32)
        assert y.tolist() == (torch.cat([value(r, i, 64)[half] for r in range(2)]) * 2).tolist()
        await h


@pytest.mark.ranks(2, 3)
async def test_s3_what_lies_on_another_device_goes_by_messages(coll: Communicator, fake: FakeNccl) -> None:
    """The first device that a communicator uses is where its ranks exchange; what is elsewhere goes all the same."""
    work = await coll.dup()
    other = torch.device("cuda", (coll.rank + 1) % 5)
    mine = work.device if work.rank else other
    await work.allreduce(torch.ones(2, device=work.device), impl="nccl")
    t = value(work.rank, 0, 6).to(mine)
    before = exchanged(fake)
    gathered = await work.gather(t, 0)
    if work.rank == 0:
        assert [x.tolist() for x in gathered] == [value(r, 0, 6).tolist() for r in range(work.size)]
    swapped = await work.alltoall([value(work.rank, r, 3).to(mine) for r in range(work.size)])
    assert [x.tolist() for x in swapped] == [value(r, work.rank, 3).tolist() for r in range(work.size)]
    dealt = await work.scatter([value(0, r, 3).to(mine) for r in range(work.size)], 0, out=torch.empty(3, device=mine))
    assert dealt.tolist() == value(0, work.rank, 3).tolist()
    assert exchanged(fake) == before
    with pytest.raises(ValueError, match=f"out is on cpu: expected {mine}, as t"):
        work.alltoall_single(t, out=torch.empty(6))


@pytest.mark.ranks(2, 3)
async def test_s3_a_scatter_from_the_host_leaves_the_order_alone(coll: Communicator, fake: FakeNccl) -> None:
    """The other ranks keep a place for it and need none: they learn that, and NCCL continues."""
    work = await coll.dup()
    given = [value(0, r, 9) for r in range(work.size)]
    handle = work.scatter(given if work.rank == 0 else None, 0)
    other = torch.device("cuda", (work.rank + 1) % 5)
    sums = [work.allreduce(torch.ones(2, device=device), impl="nccl") for device in (other, work.device)]
    for reduced in await gather(*sums):
        assert reduced.tolist() == [float(work.size)] * 2
    assert (await handle).tolist() == value(0, work.rank, 9).tolist()
    assert not exchanged(fake)


# --- failures -------------------------------------------------------------------------------------------------


CALLS: dict[str, Call] = {
    "gather": lambda c, impl: c.gather(on(c, torch.ones(3)), 0, impl=impl),
    "scatter": lambda c, impl: c.scatter([on(c, torch.ones(3))] * c.size if c.rank == 0 else None, 0, impl=impl),
    "alltoall": lambda c, impl: c.alltoall([on(c, torch.ones(3))] * c.size, impl=impl),
    "alltoall_single": lambda c, impl: c.alltoall_single(on(c, torch.ones(3 * c.size)), impl=impl),
}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", CALLS)
async def test_s3_an_exchange_that_fails_on_one_rank_is_given_up_on_all(
    coll: Communicator, fake: FakeNccl, name: str, until: Any
) -> None:
    work = await coll.dup()
    await work.allreduce(on(coll, torch.ones(4)), impl="nccl")
    await coll.barrier()
    fake.refuse["send" if name != "gather" else "recv", 0] = 3
    await coll.barrier()
    expected = BackendError if coll.rank == 0 else CommunicatorAborted
    says = "NCCL: " if coll.rank == 0 else "rank 0: NCCL: "
    async with asyncio.timeout(20):
        with pytest.raises(expected, match=f"^{says}.*internal error"):
            await gather(CALLS[name](work, "nccl"), work.allreduce(on(coll, torch.ones(4)), impl="nccl"))
    await until(lambda: not any(comm.is_valid for comm in fake.communicators))  # NCCL aborts in a thread


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", CALLS)
async def test_s3_an_exchange_that_hangs_is_late_and_can_be_aborted(
    coll: Communicator, fake: FakeNccl, name: str
) -> None:
    work = await coll.dup()
    await work.allreduce(on(coll, torch.ones(4)), impl="nccl")
    await coll.barrier()
    assert parts_of(coll).registry.resources.accelerator is not None
    (group,) = parts_of(coll).registry.resources.accelerator.groups_of(work.name)
    stream: Any = group.stream
    if coll.rank == 0:
        stream.hold()  # its kernel never begins
    first = CALLS[name](work, "nccl")
    late = work.allreduce(on(coll, torch.ones(4)), impl="nccl", timeout=0.3)
    with pytest.raises(OperationTimeout, match="allreduce"):
        await late
    await coll.barrier()  # the other rank is late too, before its notification
    work.abort("it hangs")
    for handle in (first, late):
        with pytest.raises(AiodistError, match="it hangs"):
            await handle
    await coll.barrier()  # on the other rank too: a kernel that begins before that could end the operation
    if coll.rank == 0:
        stream.release()
    await coll.barrier()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("impl", ["nccl", "direct"])
async def test_s3_what_one_rank_cannot_receive_is_raised_and_nothing_hangs(
    coll: Communicator, fake: FakeNccl, impl: Any
) -> None:
    work = await coll.dup()
    await work.allreduce(on(coll, torch.ones(4)), impl="nccl")
    view = on(coll, torch.empty(4))[:2]
    async with asyncio.timeout(20):
        with pytest.raises((ValueError, AiodistError), match="cannot grow"):
            await gather(work.gather(on(coll, torch.ones(3)), 0, out=view, impl=impl), work.barrier())
        await coll.barrier()


@pytest.mark.ranks(2)
async def test_s3_ranks_that_differ_on_an_exchange_hear_of_it(coll: Communicator, fake: FakeNccl) -> None:
    work = await coll.dup()
    await work.allreduce(on(coll, torch.ones(4)), impl="nccl")
    t = on(coll, torch.ones(3))
    async with asyncio.timeout(20):
        with pytest.raises(AiodistError, match=r"rank 0: gather.*rank 1: alltoall"):
            await (work.gather(t, 0) if coll.rank == 0 else work.alltoall([t, t]))
        await coll.barrier()


@pytest.mark.parametrize("name", CALLS)
def test_s3_those_left_by_a_rank_that_ends_are_let_go(fake_nccl: NcclOnDevices, name: str) -> None:
    """Its part never comes; launched work of the other ranks ends with the communicator, on the device too."""
    heard: list[AiodistError] = []

    async def main(rank: int) -> None:
        async with init() as coll:
            await coll.allreduce(on(coll, torch.ones(4)), impl="nccl")
            if rank == 1:
                raise ArithmeticError("it ends here")
            async with asyncio.timeout(20):
                try:
                    await gather(CALLS[name](coll, "nccl"), coll.allreduce(on(coll, torch.ones(4)), impl="nccl"))
                except AiodistError as error:
                    heard.append(error)

    with pytest.raises(ArithmeticError, match="it ends here"):
        run_ranks(3, main, timeout=60)
    assert len(heard) == 2
    assert [comm for comm in fake_nccl.library.communicators if comm.is_valid] == []
