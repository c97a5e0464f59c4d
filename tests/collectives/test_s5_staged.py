"""S5: messages and collectives of tensors on CUDA devices by way of the host, in pinned pieces, as exact as there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from aiodist.backends.arithmetic import SUPPORTED, check_op
from aiodist.collectives.choice.table import USUAL_LIMITS
from aiodist.collectives.cuda.device_messages import StagedMessages
from aiodist.collectives.cuda.staging import chunks_of, cut
from aiodist.collectives.implementations import Primitives
from aiodist.errors import BackendError
from aiodist.handles import LARGE_BYTES, Progress
from aiodist.streams import Staging
from aiodist.testing.seams.algorithms import Endpoint, Implementation, Program, Repertoire, Scheduled
from aiodist.testing.seams.carriers import LocalHub, LocalTransport
from aiodist.testing.seams.cuda import DeviceWork, Staged, on_devices
from aiodist.testing.seams.progress import run, transfers
from aiodist.testing.seams.transport import DTYPES, Done, Primitive, Wanted, tag_of
from aiodist.types import ReduceOp
from tests.support.simulated_cuda.device import SimulatedCuda

PIECE = 4096
LIMITS = {**USUAL_LIMITS, "staged.piece_bytes": PIECE}
SIZES = (0, 1, PIECE // 4 - 1, PIECE // 4, PIECE // 4 + 1, 23 * PIECE // 8 + 1)  # elements of 4 bytes
one_loop = pytest.mark.asyncio(loop_factories=["asyncio"])
SHORT, LONG = 100, 7 * PIECE // 2 + 3


class Wire(LocalTransport):
    """Counts messages, and loses one of them at the test's command."""

    def __init__(self, hub: LocalHub, rank: int, size: int) -> None:
        super().__init__(hub, rank, size)
        self.sent = self.wanted = 0
        self.fails_to_send = self.fails_to_receive = -1

    def isend(self, t: Tensor, dst: int, tag: int, done: Done) -> None:
        self.sent += 1
        assert t.is_cpu
        if self.sent - 1 == self.fails_to_send:
            done(BackendError("the wire broke"))
        else:
            super().isend(t, dst, tag, done)

    def irecv(self, t: Tensor, src: int, tag: int, done: Done) -> None:
        self.wanted += 1
        assert t.is_cpu
        if self.wanted - 1 == self.fails_to_receive:
            done(BackendError("the wire broke"))
        else:
            super().irecv(t, src, tag, done)


class Rank:
    """One of some ranks of this loop, which share its staging."""

    def __init__(self, hub: LocalHub, rank: int, size: int, staging: Staging) -> None:
        self.rank, self.size = rank, size
        self.staging = staging
        self.wire = Wire(hub, rank, size)
        self.running = self.most_running = self.ran = 0
        repertoire = Repertoire(self.wire)

        def host(ep: Endpoint) -> Primitives:
            return Counting(self, Primitives(ep, repertoire, later=True))  # type: ignore[return-value]

        self.host = host
        self.staged = Staged(staging, host, LIMITS)
        self._seq = 0

    def endpoint(self) -> Endpoint:
        self._seq += 1
        return Endpoint(self.wire, tag_of(self._seq), StagedMessages(self.staging))

    def perform(
        self, make: Callable[[Endpoint], Program[Any]], stream: torch.cuda.Stream | None = None
    ) -> asyncio.Future[Any]:
        """Run a program on a stream of its own, behind what the current one has queued."""
        progress = self.staging.progress
        over = progress.loop.create_future()

        def finish(result: object, error: BaseException | None) -> None:
            progress.post(partial(over.set_exception, error) if error else partial(over.set_result, result))

        program = on_devices(make(self.endpoint()), [DeviceWork(progress, stream or torch.cuda.Stream())])
        progress.start(partial(run, program, finish))
        return over


class Counting:
    """The host's primitives, with a count of those in flight."""

    def __init__(self, rank: Rank, primitives: Primitives) -> None:
        self._rank = rank
        self._primitives = primitives
        self.ep = primitives.ep

    async def run(self, primitives: Sequence[Primitive]) -> None:
        rank = self._rank
        rank.running += 1
        rank.most_running = max(rank.running, rank.most_running)
        await self._primitives.run(primitives)
        rank.running -= 1
        rank.ran += 1


def ranks(size: int, piece_bytes: int = PIECE) -> list[Rank]:
    progress = Progress.current()
    staging = Staging(progress)
    staging.piece_bytes = piece_bytes
    hub = LocalHub()
    return [Rank(hub, rank, size, staging) for rank in range(size)]


def begin(
    group: Sequence[Rank],
    make: Callable[[Rank, Endpoint], Program[Any]],
    streams: Sequence[torch.cuda.Stream | None] = (None, None, None),
) -> list[asyncio.Future[Any]]:
    """Run each rank's program."""
    return [r.perform(partial(make, r), stream) for r, stream in zip(group, streams, strict=False)]


def allreduce(
    group: Sequence[Rank],
    on: Sequence[Tensor],
    op: ReduceOp = ReduceOp.SUM,
    streams: Sequence[torch.cuda.Stream | None] = (None, None, None),
) -> list[asyncio.Future[Any]]:
    """Reduce each rank's tensor, staged."""
    return begin(group, lambda r, ep: r.staged.run(ep, [Primitive("allreduce", on[r.rank], op=op)]), streams)


async def all_of(handles: Sequence[asyncio.Future[Any]]) -> list[Any]:
    async with asyncio.timeout(30):
        return await asyncio.gather(*handles)


async def outcomes(handles: Sequence[asyncio.Future[Any]]) -> list[Any]:
    async with asyncio.timeout(30):
        return await asyncio.gather(*handles, return_exceptions=True)


def brought(size: int, numel: int, kind: torch.dtype = torch.float32) -> list[Tensor]:
    """Return what each rank brings, afresh: whole numbers, so that every order of summation gives the same."""
    return [torch.randint(0, 3 if kind is torch.uint8 else 9, (numel,)).to(kind) for _ in range(size)]


def on_device(ts: Sequence[Tensor]) -> list[Tensor]:
    return [t.to("cuda") for t in ts]


def expected(ts: Sequence[Tensor], op: ReduceOp) -> Tensor:
    """Return the reduction, by float64 and the like on the host."""
    kind = ts[0].dtype
    wide = torch.stack(list(ts))
    if kind.is_floating_point:
        wide = wide.double()
    if op in (ReduceOp.SUM, ReduceOp.MEAN):
        total = wide.sum(0)
        return (total / len(ts) if op is ReduceOp.MEAN else total).to(kind)
    if op is ReduceOp.PROD:
        return wide.prod(0).to(kind)
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        return (wide.amin(0) if op is ReduceOp.MIN else wide.amax(0)).to(kind)
    total = ts[0].clone()
    for t in ts[1:]:
        {ReduceOp.BAND: total.bitwise_and_, ReduceOp.BOR: total.bitwise_or_, ReduceOp.BXOR: total.bitwise_xor_}[op](t)
    return total


# --- the plan --------------------------------------------------------------------------------------------------


def test_s5_chunks_are_no_longer_than_a_piece_and_miss_nothing() -> None:
    for piece, numel, itemsize in ((100, 0, 4), (100, 25, 4), (100, 26, 4), (128, 1000, 8), (1, 3, 1), (4096, 9999, 2)):
        chunks = chunks_of(numel * itemsize, {"staged.piece_bytes": piece})
        cuts = [cut(numel, chunks, i) for i in range(chunks)]
        assert [cuts[0][0], *(last for _, last in cuts)] == [*(first for first, _ in cuts), numel]
        assert max(last - first for first, last in cuts) * itemsize <= max(piece + itemsize - 1, itemsize)
        assert chunks == max(1, -(-numel * itemsize // piece))


def test_s5_staging_is_for_devices_alone() -> None:
    staged = Staged(None, None, LIMITS)  # type: ignore[arg-type]
    assert staged.lacks(Wanted("allreduce", torch.float32, ReduceOp.SUM, 1, "cuda")) is None
    assert staged.lacks(Wanted("allreduce", torch.float32, ReduceOp.SUM, 1)) == "staging is for tensors on CUDA devices"
    assert staged.plan_allreduce(torch.float32, 1, ReduceOp.SUM) is None
    assert staged.finishes
    assert not staged.in_order
    implementation: Implementation = staged
    assert implementation.name == "staged"


# --- messages --------------------------------------------------------------------------------------------------


async def exchange(ep: Endpoint, mine: Tensor, into: Tensor) -> None:
    """Send to the next rank and receive from the one before, then add the two."""
    await transfers([ep.recv(into, (ep.rank - 1) % ep.size), ep.send(mine, (ep.rank + 1) % ep.size)])
    into.add_(mine)


@one_loop
@pytest.mark.parametrize("size", [2, 3])
async def test_s5_messages_of_every_size(simulated_cuda: SimulatedCuda, size: int) -> None:
    simulated_cuda.delay = 1e-4
    group = ranks(size)
    for numel in (*SIZES, LONG):
        ts = brought(size, numel)
        mine, into = on_device(ts), [torch.empty(numel, device="cuda") for _ in ts]
        await all_of(begin(group, lambda r, ep: exchange(ep, mine[r.rank], into[r.rank])))  # noqa: B023
        for rank, got in enumerate(into):
            assert torch.equal(got.cpu(), ts[rank] + ts[rank - 1]), numel


@one_loop
async def test_s5_messages_of_every_kind(simulated_cuda: SimulatedCuda) -> None:
    simulated_cuda.delay = 0
    a, b = ranks(2)
    for kind in DTYPES:
        t = torch.randint(0, 2, (3 * PIECE,), dtype=torch.uint8).view(torch.bool if kind is torch.bool else kind)
        sent, into = t.to("cuda"), torch.empty_like(t, device="cuda")

        async def receive(ep: Endpoint, into: Tensor = into) -> None:
            await transfers([ep.recv(into, 0)])

        async def send(ep: Endpoint, sent: Tensor = sent) -> None:
            await transfers([ep.send(sent, 1)])

        await all_of([b.perform(receive), a.perform(send)])
        assert torch.equal(into.cpu().view(torch.uint8), t.view(torch.uint8)), kind


async def test_s5_messages_of_one_tag_keep_their_order(simulated_cuda: SimulatedCuda) -> None:
    simulated_cuda.delay = 1e-4
    a, b = ranks(2)
    sizes = (LONG, 3, 2 * PIECE, 1, LONG)
    ts = [torch.randn(numel) for numel in sizes]
    mine, into = on_device(ts), [torch.empty(numel, device="cuda") for numel in sizes]

    async def send(ep: Endpoint) -> None:
        for t in mine:
            await transfers([ep.send(t, 1)])

    async def receive(ep: Endpoint) -> None:
        for t in into:
            await transfers([ep.recv(t, 0)])

    await all_of([a.perform(send), b.perform(receive)])
    for got, t in zip(into, ts, strict=True):
        assert torch.equal(got.cpu(), t)


@one_loop
async def test_s5_nothing_is_sent_before_the_producer_has_run(simulated_cuda: SimulatedCuda) -> None:
    a, b = ranks(2)
    producer = torch.cuda.Stream()
    into = torch.empty(LONG, device="cuda")
    torch.cuda.synchronize()

    async def receive(ep: Endpoint) -> None:
        await transfers([ep.recv(into, 0)])

    async def send(ep: Endpoint, t: Tensor) -> None:
        await transfers([ep.send(t, 1)])

    with simulated_cuda.paused(producer):
        with torch.cuda.stream(producer):
            late = torch.full((LONG,), 3.0, device="cuda")
            over = [a.perform(lambda ep: send(ep, late)), b.perform(receive)]
        other = torch.ones(LONG, device="cuda")
        again = torch.empty(LONG, device="cuda")

        async def swap(ep: Endpoint) -> None:
            await transfers([ep.recv(again, 0)] if ep.rank else [ep.send(other, 1)])

        a_sent = a.wire.sent
        await all_of([a.perform(swap), b.perform(swap)])  # which passes by
        assert a_sent == 0
        assert a.wire.sent == len(range(0, 4 * LONG, PIECE)), "those of the second message"
    await all_of(over)
    assert into.cpu().eq(3).all()
    assert again.cpu().eq(1).all()


@one_loop
async def test_s5_what_comes_overwrites_nothing_that_is_still_read(simulated_cuda: SimulatedCuda) -> None:
    a, b = ranks(2)
    reader = torch.cuda.Stream()
    old, new = torch.ones(LONG), torch.randn(LONG)
    into, t = on_device([old, new])
    torch.cuda.synchronize()

    async def transfer(ep: Endpoint) -> None:
        await transfers([ep.recv(into, 0)] if ep.rank else [ep.send(t, 1)])

    with simulated_cuda.paused(reader):
        with torch.cuda.stream(reader):
            kept = into.clone()  # is to read what was there when the receive was issued
            over = [b.perform(transfer)]
        over.append(a.perform(transfer))
        async with asyncio.timeout(20):
            while a.wire.sent < 3:  # noqa: ASYNC110
                await asyncio.sleep(0)
    await all_of(over)
    torch.cuda.synchronize()
    assert torch.equal(kept.cpu(), old)
    assert torch.equal(into.cpu(), new)


@one_loop
async def test_s5_a_step_goes_on_with_the_stream_that_it_was_left_with(simulated_cuda: SimulatedCuda) -> None:
    simulated_cuda.delay = 1e-3
    a, b = ranks(2)
    stream = torch.cuda.Stream()
    told: list[tuple[BaseException | None, torch.cuda.Stream]] = []
    t, into = torch.randn(LONG), torch.empty(LONG, device="cuda")
    mine = t.to("cuda")
    torch.cuda.synchronize()
    seen: list[Tensor] = []

    def received(error: BaseException | None) -> None:
        seen.append(into.clone())
        told.append((error, torch.cuda.current_stream()))

    def sent(error: BaseException | None) -> None:
        told.append((error, torch.cuda.current_stream()))

    def begin() -> None:
        with torch.cuda.stream(stream):
            StagedMessages(b.staging).recv(b.wire, into, 0, 5, received)
            StagedMessages(a.staging).send(a.wire, mine, 1, 5, sent)

    a.staging.progress.start(begin)
    async with asyncio.timeout(20):
        while len(told) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
    torch.cuda.synchronize()
    assert told == [(None, stream)] * 2
    assert torch.equal(seen[0].cpu(), t), "what the stream queues finds it there"


@one_loop
@pytest.mark.parametrize("way", ["fails_to_send", "fails_to_receive"])
async def test_s5_a_broken_wire_is_told_once_when_all_is_over(simulated_cuda: SimulatedCuda, way: str) -> None:
    a, b = ranks(2)
    failing = a if way == "fails_to_send" else b
    setattr(failing.wire, way, 2)
    t, into = torch.ones(LONG, device="cuda"), torch.empty(LONG, device="cuda")
    torch.cuda.synchronize()

    async def transfer(ep: Endpoint) -> None:
        await transfers([ep.recv(into, 0)] if ep.rank else [ep.send(t, 1)])

    over = [r.perform(transfer) for r in (a, b)]
    with pytest.raises(BackendError, match="the wire broke"):
        await all_of([over[failing.rank]])
    other = b if failing is a else a
    assert not over[other.rank].done(), "it waits for the pieces that never come"
    async with asyncio.timeout(30):
        while not over[other.rank].done():  # a piece may come to the wire when it is closed already
            for r in (a, b):
                await r.wire.aclose(drained=False)
            await asyncio.sleep(0)
    assert isinstance((await outcomes(over))[other.rank], BackendError)


@one_loop
async def test_s5_the_host_s_side_of_a_message_is_cut_alike(simulated_cuda: SimulatedCuda) -> None:
    a, b = ranks(2)
    device_messages = StagedMessages(b.staging)
    for nbytes in (0, 1, PIECE, PIECE + 1, 3 * PIECE):
        t = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
        on = t.to("cuda")
        into = torch.zeros_like(t)

        async def send(ep: Endpoint, on: Tensor = on) -> None:
            await transfers([ep.send(on, 1)])

        async def receive(ep: Endpoint, into: Tensor = into) -> None:
            await transfers([ep.recv(piece, 0) for piece in device_messages.cut(into)])

        await all_of([a.perform(send), b.perform(receive)])
        assert torch.equal(into, t)


@one_loop
async def test_s5_what_is_fetched_comes_behind_its_producer(simulated_cuda: SimulatedCuda) -> None:
    (a,) = ranks(1)
    producer, progress = torch.cuda.Stream(), a.staging.progress
    over: asyncio.Future[BaseException | None] = progress.loop.create_future()
    host = torch.empty(LONG)

    def fetch() -> None:
        with torch.cuda.stream(producer):
            StagedMessages(a.staging).fetch(host, t, lambda error: progress.post(over.set_result, error))

    with torch.cuda.stream(producer), simulated_cuda.paused(producer):
        t = torch.full((LONG,), 2.0, device="cuda")
        progress.start(fetch)
        assert not over.done()
    assert await all_of([over]) == [None]
    assert host.eq(2).all()


@one_loop
async def test_s5_a_rank_alone_stages_nothing_wrong(simulated_cuda: SimulatedCuda) -> None:
    (a,) = ranks(1)
    t = torch.randn(LONG)
    on, out = t.to("cuda"), torch.empty(LONG, device="cuda")
    torch.cuda.synchronize()
    await all_of(allreduce([a], [on], ReduceOp.MEAN))
    await all_of(begin([a], lambda r, ep: r.staged.run(ep, [Primitive("allgather", on, out, counts=[LONG])])))
    await all_of(begin([a], lambda r, ep: r.staged.run(ep, [Primitive("broadcast", on)])))
    assert torch.equal(on.cpu(), t)
    assert torch.equal(out.cpu(), t)


@one_loop
async def test_s5_schedules_run_on_staged_messages(simulated_cuda: SimulatedCuda) -> None:
    simulated_cuda.delay = 1e-4
    group = ranks(3)
    for name, chunks in (("ring", 4), ("doubling", None), ("direct", None)):
        ts = brought(3, LONG)
        on = on_device(ts)
        impl = Scheduled(name, chunks)
        await all_of(begin(group, lambda r, ep: impl.run(ep, [Primitive("allreduce", on[r.rank])])))  # noqa: B023
        assert all(torch.equal(t.cpu(), expected(ts, ReduceOp.SUM)) for t in on), name


# --- collectives -----------------------------------------------------------------------------------------------


@pytest.mark.drawn(1)
@one_loop
@pytest.mark.parametrize("size", [2, 3])
async def test_s5_allreduce_of_every_kind_op_and_size(simulated_cuda: SimulatedCuda, size: int) -> None:
    simulated_cuda.delay = 2e-5
    group = ranks(size)
    cases = [(torch.float32, ReduceOp.SUM, numel) for numel in SIZES]
    for kind in sorted(SUPPORTED, key=str):
        for op in ReduceOp:
            try:
                check_op(op, kind)
            except TypeError:
                continue
            cases.append((kind, op, SHORT))
    cases += [(kind, op, LONG) for kind in (torch.bfloat16, torch.int8, torch.complex64) for op in (ReduceOp.SUM,)]
    cases += [(kind, ReduceOp.MEAN, LONG) for kind in (torch.float16, torch.float64)]
    for kind, op, numel in cases:
        ts = brought(size, numel, kind)
        on = on_device(ts)
        await all_of(allreduce(group, on, op))
        for t in on:
            assert torch.allclose(t.cpu(), expected(ts, op), rtol=1e-6, atol=0), (kind, op, numel)
    assert group[0].most_running <= LIMITS["staged.pieces"]


@one_loop
async def test_s5_16_bit_floats_are_rounded_once(simulated_cuda: SimulatedCuda) -> None:
    simulated_cuda.delay = 0
    group = ranks(3)
    ts = [torch.randn(LONG).bfloat16() for _ in group]
    on = on_device(ts)
    await all_of(allreduce(group, on, ReduceOp.MEAN))
    wanted = (ts[0].float() + ts[1].float() + ts[2].float()) / 3
    assert (on[0].cpu().float() - wanted).abs().max() <= wanted.abs().max() * 2**-8
    assert (on[0].cpu() == wanted.bfloat16()).float().mean() > 0.999, "but for another order of summation"
    assert torch.equal(on[0].cpu(), on[2].cpu())


@one_loop
@pytest.mark.parametrize("size", [2, 3])
async def test_s5_broadcast_reduce_and_scan(simulated_cuda: SimulatedCuda, size: int) -> None:
    simulated_cuda.delay = 5e-5
    group = ranks(size)
    for root in range(size):
        for numel in (1, SHORT, LONG):
            ts = brought(size, numel)
            on = on_device(ts)
            await all_of(begin(group, lambda r, ep: r.staged.run(ep, [Primitive("reduce", on[r.rank], root=root)])))  # noqa: B023
            for rank, t in enumerate(on):
                assert torch.equal(t.cpu(), expected(ts, ReduceOp.SUM) if rank == root else ts[rank])
            on = on_device(ts)
            await all_of(begin(group, lambda r, ep: r.staged.run(ep, [Primitive("broadcast", on[r.rank], root=root)])))  # noqa: B023
            assert all(torch.equal(t.cpu(), ts[root]) for t in on)
    ts = brought(size, LONG)
    on = on_device(ts)
    await all_of(begin(group, lambda r, ep: r.staged.run(ep, [Primitive("scan", on[r.rank])])))
    for rank, t in enumerate(on):
        assert torch.equal(t.cpu(), expected(ts[: rank + 1], ReduceOp.SUM))


@pytest.mark.drawn(1)
@one_loop
@pytest.mark.parametrize("counts", [(5, 5, 5), (LONG, 1, 0), (0, 0, 7), (LONG, LONG - 1, 2 * LONG), (0, 0, 0)])
async def test_s5_allgather_and_reduce_scatter_of_any_counts(
    simulated_cuda: SimulatedCuda, counts: tuple[int, ...]
) -> None:
    simulated_cuda.delay = 5e-5
    group = ranks(3)
    parts = [torch.randn(count) for count in counts]
    wanted = torch.cat(parts)
    for own_block in (False, True):
        outs = [torch.full((sum(counts),), -1.0, device="cuda") for _ in group]
        blocks = [out.split(list(counts))[rank] for rank, out in enumerate(outs)]
        mine = blocks if own_block else on_device(parts)
        for block, part in zip(blocks if own_block else [], parts, strict=own_block):
            block.copy_(part)

        def gathered(r: Rank, ep: Endpoint, mine: Any = mine, outs: Any = outs) -> Program[None]:
            return r.staged.run(ep, [Primitive("allgather", mine[r.rank], outs[r.rank], counts=counts)])

        await all_of(begin(group, gathered))
        assert all(torch.equal(out.cpu(), wanted) for out in outs)
        ts = brought(3, sum(counts))
        on = on_device(ts)
        blocks = [t.split(list(counts))[rank] for rank, t in enumerate(on)]
        into = blocks if own_block else [torch.full_like(block, -1) for block in blocks]
        op = ReduceOp.MEAN

        def scattered(r: Rank, ep: Endpoint, on: Any = on, into: Any = into, op: Any = op) -> Program[None]:
            return r.staged.run(ep, [Primitive("reduce_scatter", on[r.rank], into[r.rank], counts=counts, op=op)])

        await all_of(begin(group, scattered))
        total = expected(ts, ReduceOp.MEAN).split(list(counts))
        for rank, block in enumerate(into):
            assert torch.allclose(block.cpu(), total[rank])
            if not own_block:
                assert torch.equal(on[rank].cpu(), ts[rank]), "it is only read"


@one_loop
async def test_s5_several_tensors_in_one_operation(simulated_cuda: SimulatedCuda) -> None:
    simulated_cuda.delay = 1e-4
    group = ranks(3)
    numels = (LONG, 1, 0, SHORT)
    brings = [brought(3, numel) for numel in numels]
    on = [on_device(ts) for ts in brings]
    moved = [on_device(ts) for ts in brings]

    async def both(ep: Endpoint, rank: Rank) -> None:
        await rank.staged.run(ep, [Primitive("allreduce", ts[rank.rank]) for ts in on])
        await rank.staged.run(ep, [Primitive("broadcast", ts[rank.rank], root=1) for ts in moved])

    await all_of(begin(group, lambda r, ep: both(ep, r)))
    for ts, got, copies in zip(brings, on, moved, strict=True):
        assert all(torch.equal(t.cpu(), expected(ts, ReduceOp.SUM)) for t in got)
        assert all(torch.equal(t.cpu(), ts[1]) for t in copies)


async def test_s5_many_operations_in_flight_do_not_mix(simulated_cuda: SimulatedCuda) -> None:
    simulated_cuda.delay = 1e-4
    group = ranks(2)
    brings = [brought(2, numel) for numel in (LONG, 1, 3 * PIECE, SHORT) * 5]
    on = [on_device(ts) for ts in brings]
    streams = [torch.cuda.Stream() for _ in range(2)]
    await all_of([handle for ts in on for handle in allreduce(group, ts, streams=streams)])
    for ts, got in zip(brings, on, strict=True):
        assert all(torch.equal(t.cpu(), expected(ts, ReduceOp.SUM)) for t in got)
    assert not simulated_cuda.synchronisations["device"]


@one_loop
async def test_s5_where_pinning_fails_everything_is_right_all_the_same(simulated_cuda: SimulatedCuda) -> None:
    simulated_cuda.pinning_fails = True
    group = ranks(2)
    ts = brought(2, LONG)
    on = on_device(ts)
    into = [torch.empty(LONG, device="cuda") for _ in ts]
    with pytest.warns(RuntimeWarning, match="cannot be pinned"):
        await all_of(allreduce(group, on))
    await all_of(begin(group, lambda r, ep: exchange(ep, on[r.rank], into[r.rank])))  # where a second is an error
    assert all(torch.equal(t.cpu(), expected(ts, ReduceOp.SUM)) for t in on)
    assert all(torch.equal(t.cpu(), 2 * expected(ts, ReduceOp.SUM)) for t in into)


# --- the pipeline ----------------------------------------------------------------------------------------------


@one_loop
async def test_s5_chunks_follow_one_another_and_few_are_on_their_way(simulated_cuda: SimulatedCuda) -> None:
    group = ranks(2)
    ts = brought(2, 20 * PIECE // 4)  # 20 chunks
    on = on_device(ts)
    torch.cuda.synchronize()
    staging, device = group[0].staging, torch.device("cuda", 0)
    with simulated_cuda.paused(staging.to_host(device)):
        over = allreduce(group, on)
        # The first chunks come on the operation's own stream; then this one is needed.
        async with asyncio.timeout(20):
            while any(r.ran < LIMITS["staged.pieces"] for r in group):  # noqa: ASYNC110
                await asyncio.sleep(0)
        before = simulated_cuda.launches["copy_h2d"]
        assert before >= 2 * LIMITS["staged.pieces"], "they go back while others are yet to come"
        assert not any(one.done() for one in over)
    await all_of(over)
    assert [r.ran for r in group] == [20, 20]
    assert all(r.most_running <= LIMITS["staged.pieces"] for r in group)
    assert all(torch.equal(t.cpu(), expected(ts, ReduceOp.SUM)) for t in on)


async def test_s5_a_later_operation_that_waits_for_its_producer_holds_nobody_up(simulated_cuda: SimulatedCuda) -> None:
    group = ranks(2)
    brings = [brought(2, 20 * PIECE // 4) for _ in range(2)]
    first, second = on_device(brings[0]), on_device(brings[1])
    producer, streams = torch.cuda.Stream(), [torch.cuda.Stream() for _ in group]
    torch.cuda.synchronize()
    with simulated_cuda.paused(producer):
        over = allreduce(group, first, streams=streams)
        with torch.cuda.stream(producer):
            for t in second:
                t.add_(1)
            later = allreduce(group, second, streams=streams)
        # On the same streams: all of the first is reduced and copied back, and reported in its turn.
        async with asyncio.timeout(20):
            while any(r.ran < 20 for r in group):  # noqa: ASYNC110
                await asyncio.sleep(0)
        group[0].staging.to_device(torch.device("cuda", 0)).synchronize()
        assert not any(one.done() for one in later)
        with torch.cuda.stream(torch.cuda.Stream()):
            assert all(torch.equal(t.cpu(), expected(brings[0], ReduceOp.SUM)) for t in first)
    await all_of([*over, *later])
    assert all(torch.equal(t.cpu(), expected(brings[1], ReduceOp.SUM) + 2) for t in second)


@one_loop
async def test_s5_a_receiver_overwrites_nothing_that_is_still_read(simulated_cuda: SimulatedCuda) -> None:
    group = ranks(2)
    reader = torch.cuda.Stream()
    before, new = torch.ones(LONG), brought(2, LONG)
    on = on_device([before, new[1]])
    torch.cuda.synchronize()
    with simulated_cuda.paused(reader), torch.cuda.stream(reader):
        kept = on[0].clone()  # is to read what was there when the broadcast was issued
        over = [group[0].perform(lambda ep: group[0].staged.run(ep, [Primitive("broadcast", on[0], root=1)]))]
        with torch.cuda.stream(torch.cuda.Stream()):
            over.append(group[1].perform(lambda ep: group[1].staged.run(ep, [Primitive("broadcast", on[1], root=1)])))
        async with asyncio.timeout(20):
            while any(r.ran < LIMITS["staged.pieces"] for r in group):  # noqa: ASYNC110
                await asyncio.sleep(0)
    await all_of(over)
    torch.cuda.synchronize()
    assert torch.equal(kept.cpu(), before)
    assert torch.equal(on[0].cpu(), new[1])


@one_loop
@pytest.mark.parametrize("way", ["fails_to_send", "fails_to_receive"])
async def test_s5_a_collective_over_a_broken_wire_fails_when_all_is_over(
    simulated_cuda: SimulatedCuda, way: str
) -> None:
    group = ranks(2)
    setattr(group[1].wire, way, 3)
    on = on_device(brought(2, 20 * PIECE // 4))
    over = allreduce(group, on)
    async with asyncio.timeout(20):
        while group[1].wire.sent < 4 or group[1].wire.wanted < 4:  # noqa: ASYNC110
            await asyncio.sleep(0)
        while not all(one.done() for one in over):
            for r in group:  # the others wait for a message that never comes, until the abort
                await r.wire.aclose(drained=False)
            await asyncio.sleep(0)
    for result in await outcomes(over):
        assert isinstance(result, BackendError)
    torch.cuda.synchronize()
    assert not simulated_cuda.hazards


@one_loop
async def test_s5_a_device_that_fails_ends_the_operation(simulated_cuda: SimulatedCuda) -> None:
    group = ranks(2)
    on = on_device(brought(2, LONG))
    torch.cuda.synchronize()
    with simulated_cuda.paused():
        over = allreduce(group, on)
        simulated_cuda.fail(0, "an illegal memory access was encountered")
    for result in await outcomes(over):
        assert isinstance(result, (BackendError, RuntimeError))
        assert "illegal memory access" in str(result)


@one_loop
async def test_s5_a_long_operation_is_left_to_the_progress_thread(simulated_cuda: SimulatedCuda) -> None:
    simulated_cuda.delay = 1e-5
    group = ranks(2, Staging.piece_bytes)
    ts = [torch.full((LARGE_BYTES // 4,), float(rank + 1)) for rank in range(2)]
    on = on_device(ts)
    over = begin(
        group,
        lambda r, ep: Staged(r.staging, r.host, USUAL_LIMITS).run(ep, [Primitive("allreduce", on[r.rank])]),
    )
    progress = group[0].staging.progress
    async with asyncio.timeout(20):
        while not progress.large:
            assert not any(one.done() for one in over)
            await asyncio.sleep(0)
    await all_of(over)
    assert progress.large == 0
    assert all(bool(t.cpu().eq(3).all()) for t in on)
