"""S6: while a graph is captured nothing of ours gets into it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from aiodist.streams import CudaStream, check_not_capturing, event_handle
from tests.support.simulated_cuda.device import SimulatedCuda

pytestmark = pytest.mark.usefixtures("simulated_cuda")

REFUSED = pytest.raises(RuntimeError, match="captures a CUDA graph")


async def test_s6_a_graph_that_is_captured_refuses(simulated_cuda: SimulatedCuda) -> None:
    stream = CudaStream.of("compute")
    with simulated_cuda.paused():
        handle = stream.submit(lambda: torch.ones(3, device="cuda"))
        event = stream.stream.record_event()
        with simulated_cuda.capturing():
            calls: list[Callable[[], object]] = [
                stream.record,
                partial(stream.submit, torch.ones, 3),
                lambda: stream.copy(*[torch.ones(3)] * 2),
                stream.wait,
                partial(stream.wait_handle, handle),
                handle.wait_stream,
                partial(handle.wait_stream, torch.cuda.Stream()),
                partial(event_handle, event),
            ]
            for call in calls:
                with REFUSED:
                    call()
    await handle
    await stream.record()


async def test_s6_asked_is_the_stream_of_the_device_that_is_meant(simulated_cuda: SimulatedCuda) -> None:
    first, second = CudaStream.of("compute", 0), CudaStream.of("compute", 1)
    with simulated_cuda.capturing(torch.cuda.current_stream(1)):
        await first.record()
        with REFUSED:
            second.record()
        check_not_capturing(0)
        for asked in ((1,), (0, 1)):
            with REFUSED:
                check_not_capturing(*asked)
        assert torch.cuda.current_device() == 0
    await second.record()
