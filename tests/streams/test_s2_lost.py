"""S2: a device that is lost raises, and does not end the process: nothing is freed whose destructor would."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest
import torch

from aiodist.errors import BackendError
from aiodist.handles import Progress
from aiodist.streams import CudaStream, Staging
from aiodist.streams.leak import leak
from tests.support.simulated_cuda.device import SimulatedCuda


async def test_s2_what_was_submitted_is_freed_without_harm(simulated_cuda: SimulatedCuda) -> None:
    stream = CudaStream.of("compute")
    x = torch.ones(1000, device="cuda")
    stream.wait()
    with simulated_cuda.paused():
        handle = stream.submit(torch.mul, x, 2)
        simulated_cuda.fail(0, "an illegal memory access was encountered")
    async with asyncio.timeout(10):
        with pytest.raises(BackendError, match="illegal memory access"):
            await handle
    del handle
    gc.collect()
    assert not simulated_cuda.hazards


async def test_s2_pinned_memory_of_ours_is_never_freed(simulated_cuda: SimulatedCuda) -> None:
    stream = CudaStream.of("to-device")
    there = torch.zeros(1000, device="cuda")
    torch.cuda.synchronize()
    await stream.copy(there, torch.ones(1000))
    progress = Progress.current()
    pool = Staging.of(progress).pool
    held = pool.take(1000)
    there.view(torch.uint8)[:1000].copy_(held, non_blocking=True)
    with simulated_cuda.paused():
        handle = stream.record()
        simulated_cuda.fail(0, "an illegal memory access was encountered")
    async with asyncio.timeout(10):
        with pytest.raises(BackendError, match="illegal memory access"):
            await handle
    for lost in (stream.record(), stream.copy(there, torch.ones(1000))):
        with pytest.raises(BackendError, match="illegal memory access"):
            await lost
    progress.belongings.clear()
    del pool, held, handle
    gc.collect()
    assert not simulated_cuda.hazards


@pytest.mark.drawn(1)
async def test_s2_torch_would_abort_where_it_is(simulated_cuda: SimulatedCuda) -> None:
    """The simulation tells: pinned memory that a copy has used, and what another stream was lent."""
    host, pageable, apart = torch.ones(10, pin_memory=True), torch.ones(10), torch.ones(10, pin_memory=True)
    there, lent = torch.empty(10, device="cuda"), torch.empty(10, device="cuda")
    there.copy_(host, non_blocking=True)
    there.copy_(pageable, non_blocking=True)
    there.copy_(apart)
    there.record_stream(torch.cuda.current_stream())
    lent.record_stream(torch.cuda.Stream())
    torch.cuda.synchronize()
    simulated_cuda.fail(0, "an illegal memory access was encountered")
    del there, pageable, apart
    gc.collect()
    assert not simulated_cuda.hazards
    del host
    gc.collect()
    assert "pinned memory" in simulated_cuda.hazards.pop()
    del lent
    gc.collect()
    assert "lent to another stream" in simulated_cuda.hazards.pop()


def test_s2_what_is_leaked_is_held_by_nobody_and_not_freed() -> None:
    t = torch.ones(10)
    known, before = weakref.ref(t), len(gc.get_referrers(t))
    leak(t)
    assert len(gc.get_referrers(t)) == before  # a module or a list would be cleared at exit
    del t
    gc.collect()
    assert known() is not None
