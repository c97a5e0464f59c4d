"""N3 on CUDA devices: the host's work for a step, and the work it avoids."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aiodist import Communicator
from aiodist.data import prefetch
from aiodist.nn import DataParallel
from aiodist.testing.seams.progress import compute_of, reducer_of
from tests.nn.conftest import Trial
from tests.support.simulated_cuda.device import Event, SimulatedCuda

N = 1 << 14


@pytest.fixture
def recorded(simulated_cuda: SimulatedCuda, monkeypatch: pytest.MonkeyPatch) -> set[tuple[int, int]]:
    """The threads that have recorded an event, each with the device: they have a context of it."""
    record: Any = Event.record
    seen: set[tuple[int, int]] = set()

    def noted(event: Event, stream: Any = None) -> None:
        seen.add((threading.get_ident(), (torch.cuda.current_stream() if stream is None else stream).device_index))
        record(event, stream)

    monkeypatch.setattr(Event, "record", noted)
    return seen


@pytest.mark.ranks(1)
@pytest.mark.parametrize("places", [["cuda:0"], ["cuda:1"], ["cuda:0", "cuda:1"], ["cpu", "cuda:1"]], ids=str)
async def test_n3_cuda_the_compute_thread_gets_a_context_first(
    coll: Communicator, recorded: set[tuple[int, int]], places: list[str]
) -> None:
    """CuBLAS warns where a thread has none, which asking for streams does not change."""
    net = await DataParallel.create(nn.ModuleList([nn.Linear(3, 3).to(place) for place in places]), coll)

    def first() -> set[int]:
        return {device for thread, device in recorded if thread == threading.get_ident()}

    assert await net.submit(first) == {torch.device(place).index for place in places if place != "cpu"}
    recorded.clear()
    assert not await net.submit(first)  # it has one now
    await net.aclose()


@pytest.mark.ranks(2)
async def test_n3_cuda_buckets_are_larger(coll: Communicator, simulated_cuda: SimulatedCuda) -> None:
    def layers() -> nn.Module:
        return nn.ParameterList([nn.Parameter(torch.zeros(1 << 18)) for _ in range(12)])  # 1 MiB each

    async def sizes(module: nn.Module, **given: Any) -> list[int]:
        net = await DataParallel.create(module, coll, **given)
        found = [bucket.nbytes >> 20 for bucket in reducer_of(net).buckets]
        await net.aclose()
        return found

    assert await sizes(layers()) == [1, 4, 4, 3]
    assert await sizes(layers().to(coll.device)) == [4, 8]
    assert await sizes(layers().to(coll.device), bucket_bytes=6 << 20) == [4, 6, 2]
    assert await sizes(layers().to(coll.device), first_bucket_bytes=1 << 20) == [1, 11]


@pytest.mark.thorough
@pytest.mark.ranks(1)
@pytest.mark.parametrize("how", ["step", "run", "nested"])
async def test_n3_cuda_arguments_may_be_dropped(coll: Communicator, simulated_cuda: SimulatedCuda, how: str) -> None:
    """A prefetched tensor that goes to a step on another stream, which is late; its memory is wanted meanwhile."""
    net, opt = await Trial.made(coll, "sgd", Trial.Mlp().to(coll.device))
    ones = torch.ones(1, 6, device=coll.device, dtype=torch.float64)
    side = torch.cuda.Stream(device=coll.device)
    torch.cuda.synchronize(coll.device)
    sums: list[Tensor] = []

    def forward(t: Any) -> Tensor:
        with torch.no_grad():
            sums.append((t if how != "nested" else t["x"][0]).sum())
        result: Tensor = net(ones).sum()
        return result

    def batches() -> Iterator[Tensor]:
        for i in range(12):
            yield torch.full((N,), float(i))

    async with asyncio.timeout(30), prefetch(batches(), depth=2, device=coll.device) as items:

        async def one() -> None:
            t = await anext(items)
            with torch.cuda.stream(side):
                if how == "run":
                    await net.submit(forward, t=t)
                else:
                    await net.step(forward, opt, {"x": [t]} if how == "nested" else t)

        for _ in range(5):
            await one()
        await net.submit(compute_of(net).finish)
        with simulated_cuda.paused(side):
            await one()
            for _ in range(3):
                t = await anext(items)
                del t
    torch.cuda.synchronize(coll.device)
    assert [float(total) for total in sums] == [float(i * N) for i in range(6)]
    await net.aclose()


@pytest.mark.ranks(2)
async def test_n3_cuda_nothing_is_kept_of_a_pass_without_gradients(
    coll: Communicator, simulated_cuda: SimulatedCuda
) -> None:
    """A rank that fails has zeros reduced, which are not needed where the next gradient is reduced as it lies."""
    net = await DataParallel.create(nn.Linear(N, 1, bias=False).to(coll.device), coll)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    ones = torch.ones(1, N, device=coll.device)

    def fail() -> Tensor:
        raise ValueError("no luck")

    async def allocated() -> int:
        await net.step(lambda: net(ones).sum(), opt)
        await net.submit(compute_of(net).finish)
        net.zero_grad()
        await coll.barrier()
        return simulated_cuda.allocated(coll.device)

    before = [await allocated() for _ in range(3)][-1]
    with pytest.raises(Exception, match="no luck"):
        await net.step(fail, opt)
    await allocated()
    assert await allocated() == before
    await net.aclose()
