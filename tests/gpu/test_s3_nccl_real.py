"""NCCL itself on a real device: one rank, and two where there are two devices (S3).

`python -m pytest -m gpu tests/gpu/test_s3_nccl_real.py`; each test gives the reason of its skip. Results are compared
with the CPU's in float64, inputs are random and outputs poisoned.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from aiodist.backends import nccl
from aiodist.errors import BackendError, BackendUnavailable, CommunicatorAborted
from aiodist.handles import Progress
from aiodist.testing.seams.nccl import NcclGroup, NcclGroups, NcclNative
from aiodist.testing.seams.progress import transport_lock
from aiodist.testing.seams.transport import Done, Primitive
from aiodist.types import ReduceOp
from tests.support.operations import operation

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120), pytest.mark.asyncio(loop_factories=["asyncio"])]

Failure = BaseException | None
Step = Callable[[NcclNative, Done], None]
NUMELS = (1, 1000, 3_000_001)
REDUCED = (torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8, torch.complex64)
MOVED = (torch.bool, torch.int16, torch.float16, torch.bfloat16, torch.float32, torch.complex128)


def loaded() -> nccl.Library:
    """Return NCCL, or skip the test with the reason."""
    try:
        return nccl.load()
    except BackendUnavailable as why:
        pytest.skip(str(why))


class Rank:
    """One rank, its communicators and its stream."""

    def __init__(self, rank: int, size: int, exchange: nccl.Exchange) -> None:
        self.rank = rank
        self.size = size
        self.device = torch.device("cuda", rank)
        self.progress = Progress.current()
        self.groups = NcclGroups(loaded(), self.progress)
        self.stream = torch.cuda.Stream(device=self.device)
        self._exchange = exchange

    def group(self) -> NcclGroup:
        return self.groups.of("world", range(self.size), self.rank, self.device)

    def start(self, call: Callable[[Done], None]) -> asyncio.Future[Failure]:
        future: asyncio.Future[Failure] = asyncio.get_running_loop().create_future()
        self.progress.start(partial(call, lambda error: self.progress.post(partial(future.set_result, error))))
        return future

    def call(self, step: Step) -> asyncio.Future[Failure]:
        """Enqueue `step` on the stream, behind what the default stream has."""

        def enqueue(done: Done) -> None:
            group = self.group()
            group.open(self._exchange)
            self.stream.wait_stream(torch.cuda.default_stream(self.device))
            with torch.cuda.stream(self.stream):
                step(NcclNative(group), done)

        return self.start(enqueue)


def step(kind: str, *args: object) -> Step:
    """Return what begins that operation."""
    return lambda n, done: n.start(operation(kind, *args), done)


async def enqueued(*futures: asyncio.Future[Failure]) -> list[Failure]:
    async with asyncio.timeout(60):
        return await asyncio.gather(*futures)


async def succeed(ranks: list[Rank], steps: list[Step]) -> None:
    """Run `steps[r]` on rank r and wait for the devices."""
    errors = await enqueued(*[rank.call(step) for rank, step in zip(ranks, steps, strict=True)])
    assert errors == [None] * len(ranks), errors
    for rank in ranks:
        rank.stream.synchronize()


class Post:
    """Carries rank 0's message to all ranks of this process."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._came: list[tuple[bytes | None, Callable[[bytes | None, Failure], None]]] = []

    def __call__(self, mine: bytes | None, then: Callable[[bytes | None, Failure], None]) -> None:
        self._came.append((mine, then))
        if len(self._came) == self._size:
            came, self._came = self._came, []
            (message,) = [message for message, _ in came if message is not None]
            for _, one in came:
                one(message, None)


@pytest.fixture(params=[1, 2])
async def ranks(request: pytest.FixtureRequest) -> AsyncIterator[list[Rank]]:
    """All ranks in this process, each with a device of its own."""
    size: int = request.param
    if torch.cuda.device_count() < size:
        pytest.skip(f"{size} devices are needed, there are {torch.cuda.device_count()}")
    post = Post(size)
    made = [Rank(rank, size, post) for rank in range(size)]
    yield made
    async with asyncio.timeout(60):
        await asyncio.gather(*[rank.groups.aclose(drained=False) for rank in made])


def random(kind: torch.dtype, numel: int) -> Tensor:
    """Return values on the host."""
    if kind.is_floating_point or kind.is_complex:
        return torch.randn(numel, dtype=torch.complex128 if kind.is_complex else torch.float64).to(kind)
    return torch.randint(0, 2 if kind is torch.bool else 100, (numel,)).to(kind)


def poisoned(numel: int, kind: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((max(numel, 1) * kind.itemsize,), 0x7F, dtype=torch.uint8, device=device).view(kind)[:numel]


def check(t: Tensor, expected: Tensor) -> None:
    wide = expected.dtype if expected.dtype.is_floating_point or expected.dtype.is_complex else torch.int64
    torch.testing.assert_close(t.cpu().to(wide), expected.to(wide), rtol=1e-5, atol=1e-5)


async def test_s3_nccl_says_its_version() -> None:
    assert loaded().version() >= (2, 23)


@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize("kind", REDUCED)
async def test_s3_nccl_reduces(ranks: list[Rank], kind: torch.dtype, numel: int) -> None:
    size = len(ranks)
    host = [random(kind, numel) for _ in ranks]
    wide = torch.complex128 if kind.is_complex else torch.float64 if kind.is_floating_point else torch.int64
    stacked = torch.stack([h.to(wide) for h in host])
    expected = {ReduceOp.SUM: stacked.sum(0).to(kind).to(wide)}
    if kind.is_floating_point or kind.is_complex:
        expected[ReduceOp.MEAN] = stacked.mean(0)
    if not kind.is_complex:
        expected[ReduceOp.MIN], expected[ReduceOp.MAX] = stacked.amin(0), stacked.amax(0)
        expected[ReduceOp.PROD] = stacked.prod(0).to(kind).to(wide)
    for op, wanted in expected.items():
        ts = [h.to(rank.device) for h, rank in zip(host, ranks, strict=True)]
        await succeed(ranks, [step("allreduce", t, op) for t in ts])
        for t in ts:
            check(t, wanted)
        ts = [h.to(rank.device) for h, rank in zip(host, ranks, strict=True)]
        await succeed(ranks, [step("reduce", t, op, size - 1) for t in ts])
        for rank, t in enumerate(ts):
            check(t, wanted if rank == size - 1 else host[rank])
        for counts in ([numel] * size, [numel + 3 * r for r in range(size)]):
            long = [random(kind, sum(counts)) for _ in ranks]
            kept = [h.to(rank.device) for h, rank in zip(long, ranks, strict=True)]
            outs = [poisoned(counts[rank.rank], kind, rank.device) for rank in ranks]
            steps = [step("reduce_scatter", t, out, counts, op) for t, out in zip(kept, outs, strict=True)]
            await succeed(ranks, steps)
            whole = combined(long, op, wide)
            for out, block, t, h in zip(outs, whole.split(counts), kept, long, strict=True):
                check(out, block.to(kind).to(wide))
                assert torch.equal(t.cpu(), h)


def combined(parts: list[Tensor], op: ReduceOp, wide: torch.dtype) -> Tensor:
    stacked = torch.stack([part.to(wide) for part in parts])
    if op is ReduceOp.SUM:
        return stacked.sum(0)
    if op is ReduceOp.MEAN:
        return stacked.mean(0)
    if op is ReduceOp.PROD:
        return stacked.prod(0)
    return stacked.amin(0) if op is ReduceOp.MIN else stacked.amax(0)


@pytest.mark.parametrize("kind", MOVED)
async def test_s3_nccl_moves(ranks: list[Rank], kind: torch.dtype) -> None:
    size = len(ranks)
    for numel in NUMELS:
        host = [random(kind, numel) for _ in ranks]
        ts = [h.to(rank.device) for h, rank in zip(host, ranks, strict=True)]
        await succeed(ranks, [step("broadcast", t, size - 1) for t in ts])
        assert all(torch.equal(t.cpu(), host[-1]) for t in ts)
        for counts in ([numel] * size, [numel + 3 * r for r in range(size)]):
            blocks = [random(kind, count) for count in counts]
            given = [b.to(rank.device) for b, rank in zip(blocks, ranks, strict=True)]
            outs = [poisoned(sum(counts), kind, rank.device) for rank in ranks]
            await succeed(ranks, [step("allgather", t, out, counts) for t, out in zip(given, outs, strict=True)])
            assert all(torch.equal(out.cpu(), torch.cat(blocks)) for out in outs)


async def test_s3_nccl_keeps_the_order_of_the_stream(ranks: list[Rank]) -> None:
    """The collective reads the results of earlier work of the stream, and later work reads its result."""
    ts = [torch.empty(1 << 20, device=rank.device) for rank in ranks]
    outs = [torch.empty_like(t) for t in ts]

    def fill_and_sum(t: Tensor, number: int, n: NcclNative, done: Done) -> None:
        t.fill_(number)
        n.start(Primitive("allreduce", t, op=ReduceOp.SUM), done)

    for number in range(50):
        calls = [rank.call(partial(fill_and_sum, t, number)) for rank, t in zip(ranks, ts, strict=True)]
        assert set(await enqueued(*calls)) == {None}
        for rank, t, out in zip(ranks, ts, outs, strict=True):
            with torch.cuda.stream(rank.stream):
                torch.add(t, 1, out=out)
        for rank, out in zip(ranks, outs, strict=True):
            rank.stream.synchronize()
            assert bool(out.eq(number * len(ranks) + 1).all())


async def test_s3_nccl_is_released_and_made_again(ranks: list[Rank]) -> None:
    for _ in range(3):
        ts = [torch.ones(1000, device=rank.device) for rank in ranks]
        await succeed(ranks, [step("allreduce", t, ReduceOp.SUM) for t in ts])
        assert all(bool(t.eq(len(ranks)).all()) for t in ts)
        old = [rank.group() for rank in ranks]
        async with asyncio.timeout(5):  # a release that hangs would be aborted then
            released = [rank.groups.release(group, drained=True) for rank, group in zip(ranks, old, strict=True)]
            await asyncio.gather(*released)
        assert all(rank.group() is not group for rank, group in zip(ranks, old, strict=True))


async def test_s3_nccl_gives_up_connecting_with_a_rank_that_never_comes(ranks: list[Rank]) -> None:
    rank = ranks[0]
    group = rank.groups.of("missing", (0, 1), 0, rank.device)
    t = torch.ones(1000, device=rank.device)

    def enqueue(done: Done) -> None:
        group.open(lambda mine, then: then(mine, None))  # rank 1 does not hear of it
        NcclNative(group).start(Primitive("allreduce", t, op=ReduceOp.SUM), done)

    future = rank.start(enqueue)
    for _ in range(1000):
        await asyncio.sleep(0)
    assert not future.done()
    await give_up(rank, group)
    (error,) = await enqueued(future)
    assert "given up" in str(error)


async def test_s3_nccl_aborts_a_kernel_that_hangs(ranks: list[Rank]) -> None:
    if len(ranks) == 1:
        pytest.skip("a rank alone waits for nobody")
    rank = ranks[0]
    ts = [torch.ones(1000, device=rank.device) for rank in ranks]
    await succeed(ranks, [step("allreduce", t, ReduceOp.SUM) for t in ts])
    assert await enqueued(rank.call(step("allreduce", ts[0], ReduceOp.SUM))) == [None]
    assert not rank.stream.query()  # the others do not come
    await give_up(rank, rank.group())


async def give_up(rank: Rank, group: NcclGroup) -> None:
    """Abort it: later calls say so, and nothing on the device waits any more."""
    with transport_lock:
        assert group.poll_error() is None
        group.abort(CommunicatorAborted("given up"))
    t = torch.ones(1, device=rank.device)
    later = await enqueued(rank.start(lambda done: NcclNative(group).start(Primitive("broadcast", t), done)))
    assert "given up" in str(later[0])
    async with asyncio.timeout(20):
        while not rank.stream.query():  # noqa: ASYNC110  - a device sets no event
            await asyncio.sleep(0)


async def test_s3_nccl_errors_keep_its_text() -> None:
    library = loaded()
    with pytest.raises(BackendError, match="NCCL: connecting 1 ranks: ") as raised:
        library.connect(1, 7, library.unique_id(), threading.Event())
    assert raised.value.code
