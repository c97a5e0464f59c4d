"""S2: copies between host and device give every byte, wait for nothing on the host, and end where memory is short."""

from __future__ import annotations

import asyncio
import gc
import warnings
import weakref
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor

from aiodist.errors import BackendError
from aiodist.handles import LARGE_BYTES, Progress
from aiodist.streams import CudaStream, Staging
from aiodist.testing.seams.transport import DTYPES
from tests.support.simulated_cuda.device import SimulatedCuda

PIECE = 4096
SIZES = (0, 1, PIECE - 1, PIECE, PIECE + 1, 5 * PIECE + 3)  # bytes


def staging_here() -> Staging:
    return Staging.of(Progress.current())


def fresh(numel: int, kind: torch.dtype = torch.uint8) -> Tensor:
    """Return random bits; no NaN, which equals nothing."""
    if kind is torch.bool:
        return torch.rand(numel) < 0.5
    if kind.is_floating_point or kind.is_complex:
        return torch.randn(numel, dtype=torch.float64).to(kind)
    return torch.randint(0, 256, (numel * kind.itemsize,), dtype=torch.uint8).view(kind)


def copied(staging: Staging, into: Tensor, t: Tensor, stream: torch.cuda.Stream) -> asyncio.Future[list[str]]:
    """Issue the copy, and return the calls of its callbacks in order."""
    told: list[str] = []
    over: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()

    def finish(error: BaseException | None) -> None:
        told.append("over")
        if error is None:
            staging.progress.post(partial(over.set_result, told))
        else:
            staging.progress.post(partial(over.set_exception, error))

    staging.progress.start(lambda: staging.copy(into, t, stream, lambda _: told.append("queued"), finish))
    return over


async def until_over(over: asyncio.Future[list[str]]) -> list[str]:
    async with asyncio.timeout(20):
        return await over


async def there_and_back(staging: Staging, t: Tensor, pin: tuple[bool, bool]) -> Tensor:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        on_device = torch.empty_like(t, device="cuda")
    host = torch.empty_like(t, pin_memory=pin[0]).copy_(t)
    assert await until_over(copied(staging, on_device, host, stream)) == ["queued", "over"]
    host.zero_()
    back = torch.empty_like(t, pin_memory=pin[1])
    assert await until_over(copied(staging, back, on_device, stream)) == ["queued", "over"]
    return back


@pytest.mark.parametrize("pin", list(product((False, True), repeat=2)))
async def test_s2_copies_of_every_size_and_kind(simulated_cuda: SimulatedCuda, pin: tuple[bool, bool]) -> None:
    simulated_cuda.delay = 5e-5
    staging = staging_here()
    for nbytes in SIZES:
        t = fresh(nbytes)
        assert torch.equal(await there_and_back(staging, t, pin), t), nbytes
    for kind in DTYPES:
        t = fresh(PIECE // 3, kind)
        assert torch.equal(await there_and_back(staging, t, pin), t), kind
    assert not simulated_cuda.synchronisations, "the host never waits for the device"


def strided(shape: tuple[int, int], device: str) -> list[Tensor]:
    """Return tensors of a shape whose memory has another order than their elements."""
    rows, columns = shape
    return [
        torch.zeros(columns, rows, device=device).t(),
        torch.zeros(rows, 2 * columns, device=device)[:, ::2],
        torch.zeros(3 * rows, columns, device=device)[1::3],
    ]


@pytest.mark.usefixtures("simulated_cuda")
async def test_s2_copies_between_tensors_of_any_strides() -> None:
    staging, stream, shape = staging_here(), torch.cuda.Stream(), (37, 41)
    torch.cuda.synchronize()
    for source, target in product(("cpu", "cuda"), repeat=2):
        for t, into in product(strided(shape, source), strided(shape, target)):
            if source == target == "cpu":
                continue
            wanted = torch.randn(shape)
            t.copy_(wanted)
            torch.cuda.synchronize()
            await until_over(copied(staging, into, t, stream))
            assert torch.equal(into.cpu(), wanted)


@pytest.mark.usefixtures("simulated_cuda")
async def test_s2_copies_of_conjugates_numbers_parameters_and_inference_tensors() -> None:
    staging, stream = staging_here(), torch.cuda.Stream()
    z = torch.randn(100, dtype=torch.complex64)
    on_device = torch.zeros(100, dtype=torch.complex64, device="cuda")
    torch.cuda.synchronize()
    await until_over(copied(staging, on_device, z.conj(), stream))
    back = torch.zeros(100, dtype=torch.complex64)
    await until_over(copied(staging, back.conj(), on_device, stream))
    assert torch.equal(back, z)
    number, parameter = torch.tensor(0.0), torch.nn.Parameter(torch.zeros(()))
    three = torch.tensor(3.0, device="cuda")
    torch.cuda.synchronize()
    await until_over(copied(staging, parameter, three, stream))
    assert parameter.item() == 3
    assert parameter.requires_grad
    on_device = parameter.to("cuda")
    torch.cuda.synchronize()
    await until_over(copied(staging, number, on_device, stream))
    assert number.item() == 3
    with torch.inference_mode():
        made = torch.zeros(3 * PIECE)
    source = torch.randn(3 * PIECE)
    on_device = source.to("cuda")
    torch.cuda.synchronize()
    await until_over(copied(staging, made, on_device, stream))
    assert torch.equal(made, source)


@pytest.mark.parametrize("pin", [False, True])
async def test_s2_a_copy_begins_behind_what_its_stream_has_queued(
    simulated_cuda: SimulatedCuda, until: Callable[..., object], pin: bool
) -> None:
    staging, stream, other = staging_here(), torch.cuda.Stream(), torch.cuda.Stream()
    t = torch.empty(3 * PIECE, dtype=torch.uint8, pin_memory=pin)
    into = torch.empty(3 * PIECE, dtype=torch.uint8, pin_memory=pin)
    with torch.cuda.stream(stream), simulated_cuda.paused(stream):
        on_device = torch.full((3 * PIECE,), 7, dtype=torch.uint8, device="cuda")
        over = copied(staging, into, on_device, stream)
        # Another copy, and another loop's worth of turns: nothing of the held one has happened.
        await until_over(copied(staging, t, torch.ones_like(t, device="cuda"), other))
        assert not over.done()
    await until_over(over)
    assert into.eq(7).all()


@pytest.mark.parametrize("pin", [False, True])
async def test_s2_what_a_stream_queues_behind_a_copy_finds_it_done(simulated_cuda: SimulatedCuda, pin: bool) -> None:
    staging, stream = staging_here(), torch.cuda.Stream()
    simulated_cuda.delay = 2e-3
    t = fresh(9 * PIECE)
    if pin:
        t = t.pin_memory()
    with torch.cuda.stream(stream):
        on_device = torch.empty_like(t, device="cuda")
    seen: list[Tensor] = []
    over = asyncio.get_running_loop().create_future()

    def queued(event: torch.cuda.Event) -> None:
        with torch.cuda.stream(stream):
            seen.append(on_device.clone())
            torch.cuda.current_stream().wait_event(event)
            seen.append(on_device.clone())

    def finish(error: BaseException | None) -> None:
        staging.progress.post(lambda: over.set_result(error))

    staging.progress.start(lambda: staging.copy(on_device, t, stream, queued, finish))
    async with asyncio.timeout(20):
        assert await over is None
    torch.cuda.synchronize()
    assert len(seen) == 2
    assert all(torch.equal(one.cpu(), t) for one in seen)


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_s2_a_thousand_small_copies_in_flight_on_three_streams(simulated_cuda: SimulatedCuda) -> None:
    simulated_cuda.delay = 2e-5
    streams = [CudaStream(torch.cuda.Stream()) for _ in range(3)]
    ts = [fresh(1 + i % 97, torch.int32) for i in range(500)]
    up, down = (
        torch.empty(500, 97, dtype=torch.int32, device="cuda"),
        torch.cat(ts).to("cuda").split([t.numel() for t in ts]),
    )
    torch.cuda.synchronize()
    before = simulated_cuda.synchronisations.copy()
    back = [torch.full_like(t, -1) for t in ts]
    async with asyncio.timeout(30):
        handles = [streams[i % 3].copy(up[i, : t.numel()], t) for i, t in enumerate(ts)]
        handles += [streams[i % 3].copy(back[i], t) for i, t in enumerate(down)]
        await asyncio.gather(*handles)
    assert simulated_cuda.synchronisations == before
    there = up.cpu()
    assert all(torch.equal(there[i, : t.numel()], t) and torch.equal(back[i], t) for i, t in enumerate(ts))


async def test_s2_where_pinning_fails_copies_are_right_after_one_warning(simulated_cuda: SimulatedCuda) -> None:
    simulated_cuda.pinning_fails = True
    staging = staging_here()
    t = fresh(1)
    with pytest.warns(RuntimeWarning, match="cannot be pinned"):
        assert torch.equal(await there_and_back(staging, t, (False, False)), t)
    for nbytes in SIZES:  # where another warning would be an error
        t = fresh(nbytes)
        assert torch.equal(await there_and_back(staging, t, (False, False)), t)


async def test_s2_a_warning_that_is_an_error_ends_no_copy(
    simulated_cuda: SimulatedCuda, reports: list[dict[str, object]]
) -> None:
    simulated_cuda.pinning_fails = True
    staging = staging_here()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        t = fresh(3 * PIECE)
        assert torch.equal(await there_and_back(staging, t, (False, False)), t)
    assert [type(report["exception"]) for report in reports] == [RuntimeWarning]


@pytest.mark.parametrize("pin", [False, True])
async def test_s2_a_device_that_fails_is_told_and_gives_the_memory_back(
    simulated_cuda: SimulatedCuda, pin: bool
) -> None:
    staging, stream = staging_here(), torch.cuda.Stream()
    t = torch.zeros(6 * PIECE, dtype=torch.uint8, pin_memory=pin)
    into = torch.empty_like(t, device="cuda")
    torch.cuda.synchronize()
    with simulated_cuda.paused(stream):
        waiting = [copied(staging, into, t, stream), copied(staging, t, into, stream)]
        simulated_cuda.fail(0, "an illegal memory access was encountered")
    for one in waiting:
        with pytest.raises(BackendError, match="illegal memory access"):
            await until_over(one)
    with pytest.raises(BackendError, match="illegal memory access"):
        await until_over(copied(staging, into, t, stream))


@pytest.mark.usefixtures("simulated_cuda")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch 2.11, once
async def test_s2_what_cannot_be_copied_is_an_error_of_the_copy() -> None:
    staging, stream = staging_here(), torch.cuda.Stream()
    with pytest.raises(BackendError, match="a copy on cuda:0 failed"):
        await until_over(copied(staging, torch.zeros(4, device="cuda"), torch.zeros(5, device="cuda"), stream))
    sparse = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.tensor([2.0]), (5,), check_invariants=True)
    with pytest.raises((BackendError, NotImplementedError)):
        await until_over(copied(staging, torch.zeros(5, device="cuda"), sparse, stream))


@pytest.mark.usefixtures("simulated_cuda")
async def test_s2_a_long_copy_is_left_to_the_progress_thread() -> None:
    staging, stream = staging_here(), torch.cuda.Stream()
    t = fresh(LARGE_BYTES)
    with torch.cuda.stream(stream):
        on_device = t.to("cuda")
    t.zero_()
    over = copied(staging, t, on_device, stream)
    async with asyncio.timeout(20):
        while not staging.progress.large:
            assert not over.done()
            await asyncio.sleep(0)
    await until_over(over)
    assert staging.progress.large == 0
    torch.cuda.synchronize()
    assert torch.equal(on_device.cpu(), t)


@pytest.mark.usefixtures("simulated_cuda")
async def test_s2_two_devices_have_streams_of_their_own() -> None:
    staging = staging_here()
    for index in (0, 1):
        device = torch.device("cuda", index)
        assert staging.to_host(device) is staging.to_host(device)
        assert staging.to_host(device).device == staging.to_device(device).device == device
    t = fresh(3 * PIECE)
    first, second = [torch.empty_like(t, device=f"cuda:{index}") for index in (0, 1)]
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)
    await until_over(copied(staging, first, t, torch.cuda.Stream(device=0)))
    await until_over(copied(staging, second, first, torch.cuda.Stream(device=0)))
    torch.cuda.synchronize(1)
    back = torch.empty_like(t)
    await until_over(copied(staging, back, second, torch.cuda.Stream(device=1)))
    assert torch.equal(back, t)


@pytest.mark.usefixtures("simulated_cuda")
async def test_s2_nothing_keeps_the_tensors_when_a_copy_is_over(
    until: Callable[[Callable[[], object]], Awaitable[None]],
) -> None:
    staging, stream = staging_here(), torch.cuda.Stream()
    freed: list[bool] = []

    class Watched:
        def __del__(self) -> None:
            freed.append(True)

    t = fresh(3 * PIECE)
    t.watched = Watched()  # type: ignore[attr-defined]
    on_device = torch.empty_like(t, device="cuda")
    torch.cuda.synchronize()
    await until_over(copied(staging, on_device, t, stream))
    del t
    await until(lambda: freed)  # the simulated stream's thread releases its work soon after the end


@pytest.mark.usefixtures("simulated_cuda")
async def test_s2_what_is_pinned_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiodist.streams.staging.PINNED_BYTES", 3 * PIECE)
    staging = staging_here()
    held = [staging.buffer(PIECE) for _ in range(5)]
    assert [t.is_pinned() for t in held] == [True] * 3 + [False] * 2
    view = held[0][:8].view(torch.float32)
    held.clear()
    assert [staging.buffer(2 * PIECE).is_pinned(), staging.buffer(3 * PIECE).is_pinned()] == [True, False]
    del view
    assert staging.buffer(3 * PIECE).is_pinned()


@pytest.mark.usefixtures("simulated_cuda")
def test_s2_buffers_keep_nothing_of_a_loop_that_has_closed() -> None:
    """An aborted operation may hold a buffer, which must not hold the loop."""

    async def made() -> weakref.ref[Staging]:
        staging = Staging.of(Progress.current())
        vars(staging)["of_an_operation"] = staging.buffer(PIECE)
        assert vars(staging)["of_an_operation"].is_pinned()
        return weakref.ref(staging)

    staging = asyncio.run(made())
    gc.collect()
    assert staging() is None
