"""S4: collectives by CUDA IPC among ranks of one process, on a simulated device: what is not waited for is poison."""

from __future__ import annotations

import asyncio
import operator
import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from aiodist import Communicator
from aiodist.backends.base import Done
from aiodist.backends.cuda_ipc import Mapped, Mappings
from aiodist.backends.cuda_ipc import mappings as mappings_module
from aiodist.backends.inplace import divide
from aiodist.backends.local import LocalHub, LocalTransport
from aiodist.collectives.cuda_ipc import CudaIpc
from aiodist.collectives.on_device import DeviceWork, on_devices
from aiodist.collectives.program import Endpoint, Program, lockstep, run, tag_of
from aiodist.collectives.scheduled import SubEndpoint
from aiodist.collectives.table import USUAL_LIMITS
from aiodist.errors import BackendError, MismatchError
from aiodist.handles import Progress
from aiodist.handles.progress import transport_lock
from aiodist.streams import Events
from aiodist.testing import SimulatedCuda
from aiodist.testing.simulated_mapper import SimulatedMapper
from aiodist.types import ReduceOp

pytestmark = pytest.mark.usefixtures("simulated_cuda")
one_loop = pytest.mark.asyncio(loop_factories=["asyncio"])
SMALL_PIECES = {**USUAL_LIMITS, "cuda_ipc.piece_bytes": 1024}
SECONDS = 20.0
Make = Callable[[CudaIpc, Endpoint], Program[Any]]


class MortalTransport(LocalTransport):
    """Tells who waits for a rank that it is gone, as those of real processes do."""

    def __init__(self, hub: LocalHub, rank: int, size: int) -> None:
        super().__init__(hub, rank, size)
        self._waiting: dict[int, list[Done]] = {}
        self._lost: set[int] = set()

    def isend(self, t: Tensor, dst: int, tag: int, done: Done) -> None:
        if dst in self._lost:
            done(BackendError(f"rank {dst} has left"))
        else:
            super().isend(t, dst, tag, self._once(dst, done))

    def irecv(self, t: Tensor, src: int, tag: int, done: Done) -> None:
        if src in self._lost:
            done(BackendError(f"rank {src} has left"))
        else:
            super().irecv(t, src, tag, self._once(src, done))

    def _once(self, rank: int, done: Done) -> Done:
        waiting = self._waiting.setdefault(rank, [])

        def over(error: BaseException | None) -> None:
            if over in waiting:
                waiting.remove(over)
                done(error)

        waiting.append(over)
        return over

    def lose(self, rank: int) -> None:
        self._lost.add(rank)
        with transport_lock:
            for over in list(self._waiting.get(rank, ())):
                over(BackendError(f"rank {rank} has left"))


class LateTransport(LocalTransport):
    """Messages wait, and those of different operations or to different ranks overtake one another."""

    def __init__(self, hub: LocalHub, rank: int, size: int, seed: int) -> None:
        super().__init__(hub, rank, size)
        self._random = random.Random(f"{seed}-{rank}")
        self._loop = asyncio.get_running_loop()
        self._late: dict[tuple[int, int], list[tuple[Tensor, Done]]] = {}

    def isend(self, t: Tensor, dst: int, tag: int, done: Done) -> None:
        self._late.setdefault((dst, tag), []).append((t, done))
        self._loop.call_soon_threadsafe(self._loop.call_later, self._random.uniform(0, 2e-3), self._send_one)

    def _send_one(self) -> None:
        with transport_lock:
            dst, tag = self._random.choice(list(self._late))
            t, done = self._late[dst, tag].pop(0)
            if not self._late[dst, tag]:
                del self._late[dst, tag]
            super().isend(t, dst, tag, done)


class Ranks:
    """Ranks of one process, each with its stream and mappings."""

    def __init__(self, size: int, *, seed: int | None = None, most: int = 64, devices: int = 1) -> None:
        self.size = size
        self.progress = Progress.current()
        events = Events.of(self.progress)
        hub = LocalHub()
        self.transports = [
            MortalTransport(hub, rank, size) if seed is None else LateTransport(hub, rank, size, seed)
            for rank in range(size)
        ]
        self.mappers = [SimulatedMapper() for _ in range(size)]
        self.mappings = [Mappings(mapper, most) for mapper in self.mappers]
        # Named as in a world of which these are every third.
        self.names = [3 * rank + 1 for rank in range(size)]
        self.impls = [CudaIpc(mappings, self.names, events, SMALL_PIECES) for mappings in self.mappings]
        self.streams = [torch.cuda.Stream(rank % devices) for rank in range(size)]
        self._seq = 0

    def begin(self, rank: int, seq: int, make: Make) -> asyncio.Future[Any]:
        """Begin operation `seq` on one rank."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def tell(result: object, error: BaseException | None) -> None:
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        work = DeviceWork(self.progress, self.streams[rank])
        program = on_devices(make(self.impls[rank], Endpoint(self.transports[rank], tag_of(seq))), [work])

        def finish(result: object, error: BaseException | None) -> None:
            loop.call_soon_threadsafe(partial(tell, result, error))

        self.progress.start(partial(run, program, finish))
        return future

    def issue(self, make: Sequence[Make]) -> list[asyncio.Future[Any]]:
        """Begin one operation on all ranks."""
        self._seq += 1
        return [self.begin(rank, self._seq, make[rank]) for rank in range(self.size)]

    async def perform(self, make: Sequence[Make]) -> list[Any]:
        """Do one operation on all ranks."""
        return await asyncio.wait_for(asyncio.gather(*self.issue(make)), SECONDS)

    async def close(self) -> None:
        for mappings in self.mappings:
            await mappings.aclose()
        assert not any(mapper.opened for mapper in self.mappers)


def brought(size: int, n: int, kind: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
    """Return what each rank brings: small whole numbers, all different, so that sums and products are exact."""
    made = torch.Generator().manual_seed(seed * 1000 + n)
    if kind is torch.bool:
        return [torch.randint(0, 2, (n,), generator=made).bool() for _ in range(size)]
    high = 3 if kind.itemsize == 1 else 4
    ts = [torch.randint(1, high, (n,), generator=made) for _ in range(size)]
    return [t.to(kind) for t in ts]


def on_device(ts: Sequence[Tensor], devices: int = 1) -> list[Tensor]:
    return [t.to(f"cuda:{rank % devices}") for rank, t in enumerate(ts)]


SIZES = (0, 1, 2, 5, 127, 300, 1000)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
async def test_s4_allreduce_of_every_size(size: int) -> None:
    ranks = Ranks(size)
    for n, op in product(SIZES, (ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.MAX)):
        parts = brought(size, n)
        ts = on_device(parts)
        await ranks.perform([partial(lambda t, op, impl, ep: impl.allreduce(ep, t, op), t, op) for t in ts])
        stacked = torch.stack(parts)
        expected = {
            ReduceOp.SUM: stacked.sum(0),
            ReduceOp.MEAN: stacked.sum(0) / size,
            ReduceOp.MAX: stacked.amax(0) if n else stacked.sum(0),
        }[op]
        for t in ts:
            assert torch.equal(t.cpu(), expected), (n, op)
    await ranks.close()


INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
KINDS: dict[ReduceOp, tuple[torch.dtype, ...]] = {
    ReduceOp.SUM: (*INTEGERS, *FLOATS, *COMPLEX),
    ReduceOp.MEAN: (*FLOATS, *COMPLEX),
    ReduceOp.PROD: (*INTEGERS, *FLOATS, *COMPLEX),
    ReduceOp.MIN: (*INTEGERS, *FLOATS, torch.bool),
    ReduceOp.MAX: (*INTEGERS, *FLOATS, torch.bool),
    ReduceOp.BAND: (*INTEGERS, torch.bool),
    ReduceOp.BOR: (*INTEGERS, torch.bool),
    ReduceOp.BXOR: (*INTEGERS, torch.bool),
}


TWO: dict[ReduceOp, Callable[[Tensor, Tensor], Tensor]] = {
    ReduceOp.SUM: operator.add,
    ReduceOp.MEAN: operator.add,
    ReduceOp.PROD: operator.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: operator.and_,
    ReduceOp.BOR: operator.or_,
    ReduceOp.BXOR: operator.xor,
}


def reduced(parts: Sequence[Tensor], op: ReduceOp) -> Tensor:
    """Return what a loop over the ranks says, computed in a wider type and rounded once."""
    kind = parts[0].dtype
    wide = torch.complex128 if kind.is_complex else torch.float64 if kind.is_floating_point else torch.int64
    if kind is torch.bool:
        wide = kind
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        total = TWO[op](total, part.to(wide))
    if op is ReduceOp.MEAN:
        divide(total, len(parts))
    return total.to(kind)


@one_loop
@pytest.mark.parametrize("size", [2, 3])
async def test_s4_allreduce_of_all_dtypes_with_all_operators(size: int) -> None:
    ranks = Ranks(size)
    for op, kinds in KINDS.items():
        for kind in kinds:
            parts = brought(size, 700, kind)
            ts = on_device(parts)
            await ranks.perform([partial(lambda t, op, impl, ep: impl.allreduce(ep, t, op), t, op) for t in ts])
            for t in ts:
                assert t.dtype is kind
                assert torch.equal(t.cpu(), reduced(parts, op)), (op, kind)
    await ranks.close()


@one_loop
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
async def test_s4_sums_of_16_bit_floats_are_rounded_once(kind: torch.dtype) -> None:
    for size in (2, 3, 5):
        ranks = Ranks(size)
        made = torch.Generator().manual_seed(size)
        parts = [torch.randn(999, generator=made).to(kind) for _ in range(size)]
        for op in (ReduceOp.SUM, ReduceOp.MEAN):
            ts = on_device(parts)
            await ranks.perform([partial(lambda t, op, impl, ep: impl.allreduce(ep, t, op), t, op) for t in ts])
            exact = torch.stack(parts).double().sum(0) / (size if op is ReduceOp.MEAN else 1)
            steps = torch.tensor(torch.finfo(kind).eps, dtype=torch.float64) * exact.abs()
            # Half a step, and what float32 adds to it: rounding at each addition errs by several halves.
            assert bool(((ts[0].cpu().double() - exact).abs() <= 0.501 * steps + 1e-6).all())
            assert all(torch.equal(t.cpu(), ts[0].cpu()) for t in ts)
        big = [torch.full((3,), 60000.0, dtype=kind) for _ in range(size)]
        ts = on_device(big)
        await ranks.perform([partial(lambda t, impl, ep: impl.allreduce(ep, t, ReduceOp.MEAN), t) for t in ts])
        assert torch.equal(ts[0].cpu(), big[0]), "a mean whose sum is too large for float16"
        await ranks.close()


@one_loop
async def test_s4_all_ranks_have_the_same_bits() -> None:
    ranks = Ranks(5)
    made = torch.Generator().manual_seed(1)
    parts = [torch.randn(3001, generator=made) for _ in range(5)]
    ts = on_device(parts)
    await ranks.perform([partial(lambda t, impl, ep: impl.allreduce(ep, t, ReduceOp.SUM), t) for t in ts])
    assert all(torch.equal(t.cpu(), ts[0].cpu()) for t in ts)
    assert torch.allclose(ts[0].cpu().double(), torch.stack(parts).double().sum(0), rtol=1e-5, atol=1e-5)
    await ranks.close()


@one_loop
@pytest.mark.parametrize("size", [1, 2, 3, 5])
async def test_s4_reduce_and_broadcast_with_every_root(size: int) -> None:
    ranks = Ranks(size)
    numels = (0, 1, 300, 1000) if size < 5 else (300,)
    for root, n, kind in product(range(size), numels, (torch.float64, torch.bfloat16)):
        parts = brought(size, n, kind, root)
        ts = on_device(parts)
        await ranks.perform(
            [partial(lambda t, root, impl, ep: impl.reduce(ep, t, ReduceOp.SUM, root), t, root) for t in ts]
        )
        for rank, t in enumerate(ts):
            expected = reduced(parts, ReduceOp.SUM) if rank == root else parts[rank]
            assert torch.equal(t.cpu(), expected), (root, n, rank)
        ts = on_device(parts)
        await ranks.perform([partial(lambda t, root, impl, ep: impl.broadcast(ep, t, root), t, root) for t in ts])
        for t in ts:
            assert torch.equal(t.cpu(), parts[root])
    await ranks.close()


def counts_of(size: int) -> list[list[int]]:
    return [
        [0] * size,
        [1] * size,
        [7 * rank for rank in range(size)],
        [300 if rank == 0 else 0 for rank in range(size)],
    ]


@one_loop
@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("own_block", [False, True])
async def test_s4_allgather_of_unequal_blocks(size: int, own_block: bool) -> None:
    ranks = Ranks(size)
    for counts, kind in product(counts_of(size), (torch.float32, torch.bool)):
        parts = [part[:n] for part, n in zip(brought(size, 300, kind), counts, strict=True)]
        outs = [torch.empty(sum(counts), dtype=kind, device="cuda") for _ in range(size)]  # poisoned
        ts = on_device(parts)
        if own_block:
            for rank, out in enumerate(outs):
                out.split(counts)[rank].copy_(ts[rank])
                ts[rank] = out.split(counts)[rank]
        await ranks.perform(
            [
                partial(lambda t, out, counts, impl, ep: impl.allgather(ep, t, out, counts), t, out, counts)
                for t, out in zip(ts, outs, strict=True)
            ]
        )
        for out in outs:
            assert torch.equal(out.cpu(), torch.cat(parts)), (counts, kind)
    await ranks.close()


@one_loop
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("own_block", [False, True])
async def test_s4_reduce_scatter_of_unequal_blocks(size: int, own_block: bool) -> None:
    ranks = Ranks(size)
    for counts, kind, op in product(
        counts_of(size), (torch.float32, torch.bfloat16), (ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.MAX)
    ):
        parts = [part[: sum(counts)] for part in brought(size, 7 * sum(range(size)) + 300, kind)]
        ts = on_device(parts)
        outs = [torch.empty(n, dtype=kind, device="cuda") for n in counts]
        if own_block:
            outs = [t.split(counts)[rank] for rank, t in enumerate(ts)]
        await ranks.perform(
            [
                partial(lambda t, out, c, op, impl, ep: impl.reduce_scatter(ep, t, out, c, op), t, out, counts, op)
                for t, out in zip(ts, outs, strict=True)
            ]
        )
        for rank, (out, t) in enumerate(zip(outs, ts, strict=True)):
            assert torch.equal(out.cpu(), reduced(parts, op).split(counts)[rank]), (counts, kind, op)
            if not own_block:
                assert torch.equal(t.cpu(), parts[rank]), "what is only read has been written to"
    await ranks.close()


@one_loop
@pytest.mark.parametrize("size", [1, 2, 4])
async def test_s4_scan(size: int) -> None:
    ranks = Ranks(size)
    for n, kind, op in product((0, 1, 300, 1000), (torch.float64, torch.bfloat16), (ReduceOp.SUM, ReduceOp.MAX)):
        parts = brought(size, n, kind)
        ts = on_device(parts)
        await ranks.perform([partial(lambda t, op, impl, ep: impl.scan(ep, t, op), t, op) for t in ts])
        for rank, t in enumerate(ts):
            assert torch.equal(t.cpu(), reduced(parts[: rank + 1], op)), (n, kind, op, rank)
    await ranks.close()


def summing(ts: Sequence[Tensor]) -> list[Make]:
    return [partial(lambda t, impl, ep: impl.allreduce(ep, t, ReduceOp.SUM), t) for t in ts]


# --- what is waited for --------------------------------------------------------------------------------------------


@one_loop
async def test_s4_inputs_that_are_still_being_computed(simulated_cuda: SimulatedCuda) -> None:
    """What the caller's stream has queued comes first, on each rank and however long it takes."""
    ranks = Ranks(3)
    parts = brought(3, 500)
    ts, sources = on_device([torch.zeros(500, dtype=torch.float64)] * 3), on_device(parts)
    callers = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    callers[1].hold()  # type: ignore[attr-defined]
    futures = []
    for rank, (t, caller) in enumerate(zip(ts, callers, strict=True)):
        with torch.cuda.stream(caller):
            t.copy_(sources[rank])
            futures.append(ranks.begin(rank, 1, summing(ts)[rank]))
    await asyncio.sleep(0.02)  # as long as it takes where it is not waited for
    assert not any(future.done() for future in futures)
    callers[1].release()  # type: ignore[attr-defined]
    await asyncio.wait_for(asyncio.gather(*futures), SECONDS)
    assert all(torch.equal(t.cpu(), torch.stack(parts).sum(0)) for t in ts)
    await ranks.close()


@one_loop
@pytest.mark.parametrize("at", ["announcement", "work"])
async def test_s4_nobody_is_through_before_all_have_done_their_part(
    at: str, simulated_cuda: SimulatedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank's device stops before it is ready, or when it is about to work; the others' have all the time."""
    ranks = Ranks(3)
    parts = brought(3, 500)
    ts = on_device(parts)
    torch.cuda.synchronize()
    late, mapper = ranks.streams[2], ranks.mappers[2]
    opened = mapper.open

    def stop_and_open(description: bytes, device: torch.device) -> Mapped:
        if len(mapper.opened) == 0:
            late.hold()  # type: ignore[attr-defined]
        return opened(description, device)

    if at == "announcement":
        late.hold()  # type: ignore[attr-defined]
    else:
        monkeypatch.setattr(mapper, "open", stop_and_open)
    futures = ranks.issue(summing(ts))
    await asyncio.sleep(0.03)
    assert not any(future.done() for future in futures)
    assert len(mapper.opened) == (0 if at == "announcement" else 2)
    late.release()  # type: ignore[attr-defined]
    await asyncio.wait_for(asyncio.gather(*futures), SECONDS)
    assert all(torch.equal(t.cpu(), torch.stack(parts).sum(0)) for t in ts)
    await ranks.close()


@one_loop
@pytest.mark.parametrize("seed", range(6))
async def test_s4_several_operations_in_flight_begun_in_any_order(seed: int, simulated_cuda: SimulatedCuda) -> None:
    """Each rank begins them in an order of its own; messages overtake one another; some share a tensor's storage."""
    simulated_cuda.delay = 1e-3
    chance = random.Random(seed)
    size = chance.choice([2, 3])
    ranks = Ranks(size, seed=seed, most=chance.choice([1, 64]))
    whole = [t.view(4, 100) for t in on_device(brought(size, 400, seed=seed))]
    before = [t.cpu() for t in whole]
    makes: list[list[Make]] = []
    for i in range(4):
        rows = [t[i] for t in whole]
        if i % 2:
            makes.append([partial(lambda t, impl, ep: impl.broadcast(ep, t, 1), t) for t in rows])
        else:
            makes.append(summing(rows))
    futures = []
    for rank in range(size):
        for i in chance.sample(range(4), 4):
            futures.append(ranks.begin(rank, 10 + i, makes[i][rank]))
            await asyncio.sleep(chance.uniform(0, 2e-3))
    await asyncio.wait_for(asyncio.gather(*futures), SECONDS)
    for t in whole:
        for i in range(4):
            expected = before[1][i] if i % 2 else torch.stack(before).sum(0)[i]
            assert torch.equal(t[i].cpu(), expected), (seed, i)
    await ranks.close()


@one_loop
async def test_s4_side_by_side_with_one_tag() -> None:
    """Lists of tensors: operations of different kinds share their messages' tag, step by step."""
    ranks = Ranks(3)
    parts = [brought(3, n, seed=n) for n in (5, 0, 300)]
    lists = [on_device(part) for part in parts]

    def make(rank: int, impl: CudaIpc, ep: Endpoint) -> Program[Any]:
        first, nothing, last = (ts[rank] for ts in lists)
        return lockstep(
            [
                impl.allreduce(ep, first, ReduceOp.SUM),
                impl.allreduce(ep, nothing, ReduceOp.SUM),
                impl.broadcast(ep, last, 2),
            ]
        )

    await ranks.perform([partial(make, rank) for rank in range(3)])
    for rank in range(3):
        assert torch.equal(lists[0][rank].cpu(), torch.stack(parts[0]).sum(0))
        assert torch.equal(lists[2][rank].cpu(), parts[2][2])
    await ranks.close()


@one_loop
async def test_s4_some_of_the_ranks_in_another_order() -> None:
    ranks = Ranks(5)
    parts = brought(5, 300)
    ts = on_device(parts)
    groups = ([4, 0, 2], [3, 1])

    def make(rank: int, impl: CudaIpc, ep: Endpoint) -> Program[Any]:
        group = next(group for group in groups if rank in group)
        return impl.reduce(SubEndpoint(ep, group), ts[rank], ReduceOp.SUM, 1)

    await ranks.perform([partial(make, rank) for rank in range(5)])
    for group in groups:
        for rank in group:
            expected = torch.stack([parts[i] for i in group]).sum(0) if rank == group[1] else parts[rank]
            assert torch.equal(ts[rank].cpu(), expected)
    assert ranks.mappings[0].lent == 1
    await ranks.close()


@one_loop
async def test_s4_ranks_on_several_devices(simulated_cuda: SimulatedCuda) -> None:
    ranks = Ranks(4, devices=2)
    parts = brought(4, 700)
    ts = on_device(parts, devices=2)
    await ranks.perform(summing(ts))
    for t in ts:
        assert torch.equal(t.cpu(), torch.stack(parts).sum(0))
    await ranks.close()


@one_loop
async def test_s4_tensors_made_in_inference_mode() -> None:
    ranks = Ranks(2)
    parts = brought(2, 300)
    with torch.inference_mode():
        ts = [parts[0].to("cuda"), torch.empty(300, dtype=torch.float64, device="cuda").copy_(parts[1])]
    await ranks.perform(summing(ts))
    for t in ts:
        assert torch.equal(t.cpu(), torch.stack(parts).sum(0))
    await ranks.close()


@pytest.fixture
def simulated_mapper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mappings_module, "TorchMapper", SimulatedMapper)


@pytest.mark.usefixtures("simulated_mapper")
@pytest.mark.ranks(2, 3, backend="local")
async def test_s4_communicators_of_a_world_share_mappings(coll: Communicator) -> None:
    t = torch.full((300,), float(coll.rank), device="cuda")
    await coll.allreduce(t, impl="cuda_ipc")
    backwards = await coll.split(0, key=-coll.rank)
    await backwards.broadcast(t.fill_(coll.rank), root=0, impl="cuda_ipc")
    assert torch.equal(t.cpu(), torch.full((300,), coll.size - 1.0))
    ts = [torch.full((n,), float(coll.rank), device="cuda") for n in (3, 0, 1000)]
    await backwards.allreduce(ts, op="max", impl="cuda_ipc")
    assert all(torch.equal(one.cpu(), torch.full((one.numel(),), coll.size - 1.0)) for one in ts)


# --- mappings ------------------------------------------------------------------------------------------------------


@one_loop
async def test_s4_a_tensor_is_described_once_to_each_rank() -> None:
    ranks = Ranks(3)
    ts = on_device(brought(3, 100))
    for _ in range(4):
        await ranks.perform(summing(ts))
    assert [mapper.exported for mapper in ranks.mappers] == [2, 2, 2]
    await ranks.close()


@one_loop
async def test_s4_mappings_go_when_tensors_die() -> None:
    ranks = Ranks(2)
    for n in range(1, 12):
        parts = brought(2, n)
        ts = on_device(parts)
        await ranks.perform(summing(ts))
        assert all(torch.equal(t.cpu(), torch.stack(parts).sum(0)) for t in ts)
    assert all(mappings.borrowed <= 2 and mappings.lent <= 2 for mappings in ranks.mappings)
    await ranks.close()


@one_loop
async def test_s4_descriptions_longer_than_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such are those of expandable segments; dead numbers travel with them."""
    plain = SimulatedMapper.export
    monkeypatch.setattr(SimulatedMapper, "export", lambda self, t: plain(self, t) + bytes(3000))
    ranks = Ranks(3)
    for n in (4, 5, 6):
        parts = brought(3, n)
        ts = on_device(parts)
        await ranks.perform(summing(ts))
        assert all(torch.equal(t.cpu(), torch.stack(parts).sum(0)) for t in ts)
    await ranks.close()


# --- what goes wrong -----------------------------------------------------------------------------------------------


async def failures(ranks: Ranks, make: Sequence[Make]) -> list[BaseException]:
    return await asyncio.wait_for(asyncio.gather(*ranks.issue(make), return_exceptions=True), SECONDS)


async def usable(ranks: Ranks) -> None:
    """Assert that the ranks can go on."""
    parts = brought(ranks.size, 50, seed=77)
    ts = on_device(parts)
    await ranks.perform(summing(ts))
    assert all(torch.equal(t.cpu(), torch.stack(parts).sum(0)) for t in ts)
    await ranks.close()


@one_loop
@pytest.mark.parametrize("other", [torch.ones(11), torch.ones(10).double()])
async def test_s4_ranks_that_disagree_are_told_and_go_on(other: Tensor) -> None:
    ranks = Ranks(3)
    ts = on_device([torch.ones(10), torch.ones(10), other])
    errors = await failures(ranks, summing(ts))
    assert [type(error) for error in errors] == [MismatchError] * 3
    assert "rank 7 brings" in str(errors[0])  # its number in the world
    assert torch.equal(ts[0].cpu(), torch.ones(10)), "somebody worked though the ranks disagree"
    await usable(ranks)


@one_loop
@pytest.mark.parametrize("failing", ["export", "open"])
async def test_s4_memory_that_cannot_be_mapped_is_an_error_everywhere(
    failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(3)
    ts = on_device(brought(3, 10))

    def fail(*args: object) -> None:
        raise BackendError("no such segment")

    with monkeypatch.context() as patched:
        patched.setattr(ranks.mappers[1], failing, fail)
        errors = await failures(ranks, summing(ts))
    assert all(isinstance(error, BackendError) and "no such segment" in str(error) for error in errors), errors
    assert "rank 4" in str(errors[0])
    assert not all(mapper.opened == set() for mapper in ranks.mappers)
    await usable(ranks)


@one_loop
async def test_s4_work_that_fails_is_an_error_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(2)
    ts = on_device(brought(2, 600))

    def fail(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(ranks.impls[1], "_allreduced", fail)
        errors = await failures(ranks, summing(ts))
    assert isinstance(errors[1], torch.OutOfMemoryError)
    assert isinstance(errors[0], BackendError)
    assert "rank 4 failed in an operation by CUDA IPC: CUDA out of memory" in str(errors[0])
    await usable(ranks)


@one_loop
async def test_s4_a_device_that_fails_is_an_error_everywhere(simulated_cuda: SimulatedCuda) -> None:
    ranks = Ranks(2, devices=2)
    ts = on_device(brought(2, 600), devices=2)
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)
    with simulated_cuda.paused(ranks.streams[1]):
        futures = ranks.issue(summing(ts))
        await asyncio.sleep(0.01)
        simulated_cuda.fail(1, "an illegal memory access was encountered")
        errors = await asyncio.wait_for(asyncio.gather(*futures, return_exceptions=True), SECONDS)
    assert all(isinstance(error, BackendError) and "illegal memory access" in str(error) for error in errors), errors


@one_loop
@pytest.mark.parametrize("begun", [False, True])
async def test_s4_a_rank_that_dies_in_the_middle(begun: bool, simulated_cuda: SimulatedCuda) -> None:
    """The others are told; nothing of them touches its memory afterwards, and they can go on without it."""
    ranks = Ranks(3)
    parts = brought(3, 600)
    ts = on_device(parts)
    torch.cuda.synchronize()
    with simulated_cuda.paused(ranks.streams[2]):
        dying = [ranks.begin(2, 1, summing(ts)[2])] if begun else []
        futures = [ranks.begin(rank, 1, summing(ts)[rank]) for rank in (0, 1)]
        await asyncio.sleep(0.01)
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
    left = [ts[rank].zero_() for rank in (0, 1)]

    def make(rank: int, impl: CudaIpc, ep: Endpoint) -> Program[Any]:
        return impl.allreduce(SubEndpoint(ep, [0, 1]), left[rank].add_(rank + 1), ReduceOp.SUM)

    torch.cuda.synchronize()
    await asyncio.wait_for(asyncio.gather(*(ranks.begin(rank, 2, partial(make, rank)) for rank in (0, 1))), SECONDS)
    assert all(torch.equal(t.cpu(), torch.full_like(parts[0], 3)) for t in left)
    await ranks.close()
