"""S3: allreduces that only queue, by NCCL or on the only rank: quicker, and otherwise as every operation."""

from __future__ import annotations

import asyncio
import gc
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from aiodist import AiodistError, BackendError, Communicator, gather
from aiodist.communicator import parts_of
from aiodist.streams import CudaStream
from aiodist.testing.seams.cuda import Accelerator, DeviceWork
from aiodist.types import Op

if TYPE_CHECKING:
    from tests.conftest import NcclOnDevices

OPERATORS: tuple[Op, ...] = ("sum", "mean", "min", "max", "prod")
EXIST = [
    *((op, kind) for op in OPERATORS for kind in ("float32", "float64")),
    *((op, kind) for op in OPERATORS if op != "mean" for kind in ("int32", "int64")),
    ("sum", "complex64"),
]


def accelerator_of(coll: Communicator) -> Accelerator:
    found = parts_of(coll).registry.resources.accelerator
    assert isinstance(found, Accelerator)
    return found


async def opened(coll: Communicator) -> None:
    """NCCL is opened by the first operation, which takes the long way."""
    await coll.allreduce(torch.ones(1).to(coll.device), impl="nccl")
    await coll.barrier()


def reduced(rows: torch.Tensor, op: str) -> torch.Tensor:
    found = getattr(rows, {"min": "amin", "max": "amax"}.get(op, op))(0)
    assert isinstance(found, torch.Tensor)
    return found


@pytest.fixture
def queues(fake_nccl: NcclOnDevices, monkeypatch: pytest.MonkeyPatch) -> list[DeviceWork]:
    """The operations that took the long way."""
    made: list[DeviceWork] = []
    original = Accelerator.work

    def work(self: Accelerator, *args: Any) -> DeviceWork:
        made.append(original(self, *args))
        return made[-1]

    monkeypatch.setattr(Accelerator, "work", work)
    return made


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize(("op", "kind"), EXIST)
async def test_s3_queued_against_float64(coll: Communicator, queues: list[DeviceWork], op: Op, kind: str) -> None:
    dtype = getattr(torch, kind)
    await opened(coll)
    queues.clear()
    generator = torch.Generator().manual_seed(7)
    for numel in (1, 5, 1001):
        given = [
            torch.randint(1, 5, (numel,), generator=generator).to(
                torch.complex128 if dtype.is_complex else torch.float64
            )
            * (rank + 1)
            for rank in range(coll.size)
        ]
        x = given[coll.rank].to(dtype).to(coll.device)
        handle = coll.allreduce(x, op=op, impl="nccl")
        assert await handle is x
        expected = reduced(torch.stack(given), op)
        torch.testing.assert_close(x.cpu().to(expected.dtype), expected, rtol=1e-6, atol=0)
    await coll.barrier()
    assert queues == []


@pytest.mark.drawn(2)
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("seed", range(3))
async def test_s3_queued_among_others_keep_their_order(coll: Communicator, queues: list[DeviceWork], seed: int) -> None:
    """Ranks may issue differently; NCCL matches the calls by their order alone."""
    await opened(coll)
    dice, own = random.Random(seed), random.Random(100 * seed + coll.rank)
    handles, expected = [], []
    for i in range(60):
        numel = dice.choice((3, 16, 700))
        rows = torch.arange(coll.size * numel, dtype=torch.float32).view(coll.size, numel) + i
        x = rows[coll.rank].to(coll.device)
        what = dice.choice(("allreduce", "allreduce", "allgather", "mixed"))
        if what == "allgather":
            handles.append(coll.allgather(x, impl="nccl"))
            expected.append(rows.flatten())
        elif what == "mixed" and own.random() < 0.5:  # the same on the wire, by the long way
            handles.append(coll.allreduce(x, out=torch.empty(numel).to(coll.device), impl="nccl"))
            expected.append(rows.sum(0))
        else:
            handles.append(coll.allreduce(x, impl="nccl"))
            expected.append(rows.sum(0))
        if own.random() < 0.2:
            await asyncio.sleep(0)
    for result, wanted in zip(await gather(*handles), expected, strict=True):
        seen = torch.cat([r.cpu() for r in result]) if isinstance(result, list) else result.cpu()
        assert torch.equal(seen, wanted)
    assert all(len(group.launch_order) == 0 for group in accelerator_of(coll).groups_of(coll.name))


@pytest.mark.ranks(2)
async def test_s3_queued_comes_behind_what_the_caller_had_queued(coll: Communicator, queues: list[DeviceWork]) -> None:
    await opened(coll)
    queues.clear()
    side, other = torch.cuda.Stream(device=coll.device), torch.cuda.Stream(device=coll.device)
    for i in range(20):
        x = torch.full((64,), 1.0).to(coll.device)
        side.wait_stream(torch.cuda.current_stream(coll.device))
        with torch.cuda.stream(side):
            x.mul_(coll.rank + 1.0 + i)
            handle = coll.allreduce(x, impl="nccl")
        handle.wait_stream(other)
        with torch.cuda.stream(other):
            y = x * 2
        await CudaStream(other).record()
        assert y.tolist() == [2.0 * (3 + 2 * i)] * 64
        await handle
    assert queues == []


@pytest.mark.thorough
@pytest.mark.drawn(1)
@pytest.mark.ranks(1, 2)
async def test_s3_queued_tensors_live_until_the_device_is_done(coll: Communicator, queues: list[DeviceWork]) -> None:
    """A dropped tensor and handle: the simulation notes a hazard if its memory is used again before."""
    await opened(coll)
    for i in range(12):
        x = torch.full((4096,), float(i)).to(coll.device)
        handle = coll.allreduce(x, impl="nccl")
        handle.detach()
        del x, handle
        gc.collect()
        torch.empty(4096).to(coll.device).fill_(-1.0)
    await coll.barrier()
    await CudaStream.of("compute", coll.device).record()


@pytest.mark.ranks(2)
async def test_s3_queued_is_refused_while_a_graph_is_captured(
    coll: Communicator, fake_nccl: NcclOnDevices, queues: list[DeviceWork]
) -> None:
    await opened(coll)
    x = torch.ones(4).to(coll.device)
    stream: Any = torch.cuda.current_stream(coll.device)
    seq = coll.seq
    with fake_nccl.device.capturing(stream), pytest.raises(RuntimeError, match="captures a CUDA graph"):
        coll.allreduce(x, impl="nccl")
    assert coll.seq == seq
    await coll.barrier()


@pytest.mark.ranks(2)
async def test_s3_queued_bytes_are_in_flight_until_then(coll: Communicator, queues: list[DeviceWork]) -> None:
    await opened(coll)
    x = torch.ones(8).to(coll.device)
    (group,) = accelerator_of(coll).groups_of(coll.name)
    stream: Any = group.stream
    stream.hold()
    handle = coll.allreduce(x, impl="nccl")
    with pytest.raises(ValueError, match="still owns"):
        coll.allreduce(x[2:5], impl="nccl")
    stream.release()
    await handle
    await coll.allreduce(x, impl="nccl")
    assert x.tolist() == [4.0] * 8


@pytest.mark.ranks(2)
async def test_s3_queued_on_a_communicator_that_fails(coll: Communicator, fake_nccl: NcclOnDevices) -> None:
    work = await coll.dup()
    await opened(work)
    (group,) = accelerator_of(coll).groups_of(work.name)
    stream: Any = group.stream
    stream.hold()
    handle = work.allreduce(torch.ones(4).to(coll.device), impl="nccl")
    group.comm.fail_later()
    with pytest.raises(BackendError, match="NCCL"):
        await handle
    stream.release()
    with pytest.raises(AiodistError):
        work.allreduce(torch.ones(4).to(coll.device), impl="nccl")
    await coll.barrier()


@pytest.mark.ranks(1)
async def test_s3_alone_waits_for_the_stream_and_for_nothing_else(coll: Communicator, queues: list[DeviceWork]) -> None:
    for op in OPERATORS:
        x = torch.arange(100.0).to(coll.device)
        x.add_(1)
        assert await coll.allreduce(x, op=op) is x
        assert x.tolist() == [float(i + 1) for i in range(100)]
    stream: Any = torch.cuda.current_stream(coll.device)
    x = torch.zeros(5).to(coll.device)
    stream.hold()
    x.add_(3)
    handle = coll.allreduce(x)
    await asyncio.sleep(0.02)
    assert not handle.done()
    stream.release()
    await handle
    assert x.tolist() == [3.0] * 5
    assert queues == []
