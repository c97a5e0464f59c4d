"""S4: collectives by CUDA IPC among ranks of one process, on a simulated device: what is not waited for is poison."""

from __future__ import annotations

import asyncio
import operator
import pickle
import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch
from torch import Tensor

import aiodist
from aiodist import Communicator
from aiodist.backends.arithmetic import divide
from aiodist.backends.cuda_ipc import mappings as mappings_module
from aiodist.collectives.choice.table import USUAL_LIMITS
from aiodist.collectives.cuda import ipc as cuda_ipc
from aiodist.communicator import parts_of
from aiodist.testing import run_ranks
from aiodist.testing.seams.algorithms import Endpoint, Program
from aiodist.testing.seams.cuda import CudaIpc, Mapped
from aiodist.testing.seams.transport import Done, Primitive
from aiodist.types import ReduceOp
from tests.support.blocking import rounds
from tests.support.simulated_cuda.device import SimulatedCuda
from tests.support.simulated_mapper import SimulatedMapper

if TYPE_CHECKING:
    from tests.collectives.conftest import Make, Ranks

pytestmark = pytest.mark.usefixtures("simulated_cuda")
one_loop = pytest.mark.asyncio(loop_factories=["asyncio"])
SECONDS = 20.0


SIZES = (0, 1, 2, 5, 127, 300, 1000)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
async def test_s4_allreduce_of_every_size(ranks_of: type[Ranks], size: int, shared: bool) -> None:
    ranks = ranks_of(size, shared=shared)
    for n, op in product(SIZES, (ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.MAX)):
        parts = ranks_of.brought(size, n)
        ts = ranks_of.on_device(parts)
        await ranks.perform(
            [partial(lambda t, op, impl, ep: impl.run(ep, [Primitive("allreduce", t, op=op)]), t, op) for t in ts]
        )
        stacked = torch.stack(parts)
        expected = {
            ReduceOp.SUM: stacked.sum(0),
            ReduceOp.MEAN: stacked.sum(0) / size,
            ReduceOp.MAX: stacked.amax(0) if n else stacked.sum(0),
        }[op]
        for t in ts:
            assert torch.equal(t.cpu(), expected), (n, op)
    await ranks.close()


@pytest.mark.parametrize("kind", ["allreduce", "reduce", "scan"])
async def test_s4_memory_is_described_only_to_the_ranks_that_work_in_it(ranks_of: type[Ranks], kind: str) -> None:
    """On a shared device that is one rank, once for each storage; a description may take the driver long."""
    for shared, described in ((True, [0, 1, 1, 1]), (False, [3, 3, 3, 3])):
        ranks = ranks_of(4, shared=shared)
        ts = ranks_of.on_device(ranks_of.brought(4, 100))
        for _ in range(3):
            await ranks.perform(
                [partial(lambda x, impl, ep: impl.run(ep, [Primitive(kind, x, root=2)]), t) for t in ts]
            )
        assert [mapper.exported for mapper in ranks.mappers] == described
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


@pytest.mark.drawn(1)
@one_loop
@pytest.mark.parametrize("size", [2, 3])
async def test_s4_allreduce_of_all_dtypes_with_all_operators(ranks_of: type[Ranks], size: int) -> None:
    ranks = ranks_of(size)
    for op, kinds in KINDS.items():
        for kind in kinds:
            parts = ranks_of.brought(size, 700, kind)
            ts = ranks_of.on_device(parts)
            await ranks.perform(
                [partial(lambda t, op, impl, ep: impl.run(ep, [Primitive("allreduce", t, op=op)]), t, op) for t in ts]
            )
            for t in ts:
                assert t.dtype is kind
                assert torch.equal(t.cpu(), reduced(parts, op)), (op, kind)
    await ranks.close()


@one_loop
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
async def test_s4_sums_of_16_bit_floats_are_rounded_once(ranks_of: type[Ranks], kind: torch.dtype) -> None:
    for size in (2, 3, 5):
        ranks = ranks_of(size)
        made = torch.Generator().manual_seed(size)
        parts = [torch.randn(999, generator=made).to(kind) for _ in range(size)]
        for op in (ReduceOp.SUM, ReduceOp.MEAN):
            ts = ranks_of.on_device(parts)
            await ranks.perform(
                [partial(lambda t, op, impl, ep: impl.run(ep, [Primitive("allreduce", t, op=op)]), t, op) for t in ts]
            )
            exact = torch.stack(parts).double().sum(0) / (size if op is ReduceOp.MEAN else 1)
            steps = torch.tensor(torch.finfo(kind).eps, dtype=torch.float64) * exact.abs()
            # Half a step, and the error of float32: rounding at each addition errs by several halves.
            assert bool(((ts[0].cpu().double() - exact).abs() <= 0.501 * steps + 1e-6).all())
            assert all(torch.equal(t.cpu(), ts[0].cpu()) for t in ts)
        big = [torch.full((3,), 60000.0, dtype=kind) for _ in range(size)]
        ts = ranks_of.on_device(big)
        await ranks.perform(
            [partial(lambda t, impl, ep: impl.run(ep, [Primitive("allreduce", t, op=ReduceOp.MEAN)]), t) for t in ts]
        )
        assert torch.equal(ts[0].cpu(), big[0]), "a mean whose sum is too large for float16"
        await ranks.close()


@one_loop
async def test_s4_all_ranks_have_the_same_bits(ranks_of: type[Ranks]) -> None:
    ranks = ranks_of(5)
    made = torch.Generator().manual_seed(1)
    parts = [torch.randn(3001, generator=made) for _ in range(5)]
    ts = ranks_of.on_device(parts)
    await ranks.perform([partial(lambda t, impl, ep: impl.run(ep, [Primitive("allreduce", t)]), t) for t in ts])
    assert all(torch.equal(t.cpu(), ts[0].cpu()) for t in ts)
    assert torch.allclose(ts[0].cpu().double(), torch.stack(parts).double().sum(0), rtol=1e-5, atol=1e-5)
    await ranks.close()


@one_loop
@pytest.mark.parametrize(("size", "shared"), [(1, False), (2, False), (3, False), (5, False), (2, True), (3, True)])
async def test_s4_reduce_and_broadcast_with_every_root(ranks_of: type[Ranks], size: int, shared: bool) -> None:
    ranks = ranks_of(size, shared=shared)
    numels = (0, 1, 300, 1000) if size < 5 else (300,)
    for root, n, kind in product(range(size), numels, (torch.float64, torch.bfloat16)):
        parts = ranks_of.brought(size, n, kind, root)
        ts = ranks_of.on_device(parts)
        await ranks.perform(
            [partial(lambda t, root, impl, ep: impl.run(ep, [Primitive("reduce", t, root=root)]), t, root) for t in ts]
        )
        for rank, t in enumerate(ts):
            expected = reduced(parts, ReduceOp.SUM) if rank == root else parts[rank]
            assert torch.equal(t.cpu(), expected), (root, n, rank)
        ts = ranks_of.on_device(parts)
        await ranks.perform(
            [
                partial(lambda t, root, impl, ep: impl.run(ep, [Primitive("broadcast", t, root=root)]), t, root)
                for t in ts
            ]
        )
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
async def test_s4_allgather_of_unequal_blocks(ranks_of: type[Ranks], size: int, own_block: bool) -> None:
    ranks = ranks_of(size)
    for counts, kind in product(counts_of(size), (torch.float32, torch.bool)):
        parts = [part[:n] for part, n in zip(ranks_of.brought(size, 300, kind), counts, strict=True)]
        outs = [torch.empty(sum(counts), dtype=kind, device="cuda") for _ in range(size)]  # poisoned
        ts = ranks_of.on_device(parts)
        if own_block:
            for rank, out in enumerate(outs):
                out.split(counts)[rank].copy_(ts[rank])
                ts[rank] = out.split(counts)[rank]
        await ranks.perform(
            [
                partial(
                    lambda t, out, counts, impl, ep: impl.run(ep, [Primitive("allgather", t, out, counts=counts)]),
                    t,
                    out,
                    counts,
                )
                for t, out in zip(ts, outs, strict=True)
            ]
        )
        for out in outs:
            assert torch.equal(out.cpu(), torch.cat(parts)), (counts, kind)
    await ranks.close()


@one_loop
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("own_block", [False, True])
async def test_s4_reduce_scatter_of_unequal_blocks(ranks_of: type[Ranks], size: int, own_block: bool) -> None:
    ranks = ranks_of(size)
    for counts, kind, op in product(
        counts_of(size), (torch.float32, torch.bfloat16), (ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.MAX)
    ):
        parts = [part[: sum(counts)] for part in ranks_of.brought(size, 7 * sum(range(size)) + 300, kind)]
        ts = ranks_of.on_device(parts)
        outs = [torch.empty(n, dtype=kind, device="cuda") for n in counts]
        if own_block:
            outs = [t.split(counts)[rank] for rank, t in enumerate(ts)]
        await ranks.perform(
            [
                partial(
                    lambda t, out, c, op, impl, ep: impl.run(
                        ep, [Primitive("reduce_scatter", t, out, counts=c, op=op)]
                    ),
                    t,
                    out,
                    counts,
                    op,
                )
                for t, out in zip(ts, outs, strict=True)
            ]
        )
        for rank, (out, t) in enumerate(zip(outs, ts, strict=True)):
            assert torch.equal(out.cpu(), reduced(parts, op).split(counts)[rank]), (counts, kind, op)
            if not own_block:
                assert torch.equal(t.cpu(), parts[rank]), "what is only read has been written to"
    await ranks.close()


@one_loop
@pytest.mark.parametrize(("size", "shared"), [(1, False), (2, False), (4, False), (3, True)])
async def test_s4_scan(ranks_of: type[Ranks], size: int, shared: bool) -> None:
    ranks = ranks_of(size, shared=shared)
    for n, kind, op in product((0, 1, 300, 1000), (torch.float64, torch.bfloat16), (ReduceOp.SUM, ReduceOp.MAX)):
        parts = ranks_of.brought(size, n, kind)
        ts = ranks_of.on_device(parts)
        await ranks.perform(
            [partial(lambda t, op, impl, ep: impl.run(ep, [Primitive("scan", t, op=op)]), t, op) for t in ts]
        )
        for rank, t in enumerate(ts):
            assert torch.equal(t.cpu(), reduced(parts[: rank + 1], op)), (n, kind, op, rank)
    await ranks.close()


# --- what is waited for --------------------------------------------------------------------------------------------


@one_loop
async def test_s4_inputs_that_are_still_being_computed(ranks_of: type[Ranks], simulated_cuda: SimulatedCuda) -> None:
    """The queued work of the caller's stream comes first, on each rank, however long it takes."""
    ranks = ranks_of(3)
    parts = ranks_of.brought(3, 500)
    ts, sources = ranks_of.on_device([torch.zeros(500, dtype=torch.float64)] * 3), ranks_of.on_device(parts)
    callers = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    callers[1].hold()  # type: ignore[attr-defined]
    futures = []
    for rank, (t, caller) in enumerate(zip(ts, callers, strict=True)):
        with torch.cuda.stream(caller):
            t.copy_(sources[rank])
            futures.append(ranks.begin(rank, 1, ranks_of.summing(ts)[rank]))
    await rounds()
    assert not any(future.done() for future in futures)
    callers[1].release()  # type: ignore[attr-defined]
    await asyncio.wait_for(asyncio.gather(*futures), SECONDS)
    assert all(torch.equal(t.cpu(), torch.stack(parts).sum(0)) for t in ts)
    await ranks.close()


@one_loop
@pytest.mark.parametrize("at", ["announcement", "work"])
async def test_s4_nobody_is_through_before_all_have_done_their_part(
    ranks_of: type[Ranks], at: str, simulated_cuda: SimulatedCuda, monkeypatch: pytest.MonkeyPatch, until: Any
) -> None:
    """One rank's device stops before it is ready, or when it is about to work; the others' have all the time."""
    ranks = ranks_of(3)
    parts = ranks_of.brought(3, 500)
    ts = ranks_of.on_device(parts)
    torch.cuda.synchronize()
    late, mapper = ranks.streams[2], ranks.mappers[2]
    opened = mapper.open

    def stop_and_open(description: bytes, device: torch.device) -> Mapped:
        if len(mapper.opened) == 0:
            late.hold()  # type: ignore[attr-defined]
        return opened(description, device)

    if at == "announcement":
        late.hold()  # type: ignore[attr-defined]
        ts[2].record_stream(late)
        with torch.cuda.stream(late):
            ts[2].mul_(1)
    else:
        monkeypatch.setattr(mapper, "open", stop_and_open)
    futures = ranks.issue(ranks_of.summing(ts))
    await until(lambda: len(mapper.opened) == (0 if at == "announcement" else 2))
    await rounds()
    assert not any(future.done() for future in futures)
    assert len(mapper.opened) == (0 if at == "announcement" else 2)
    late.release()  # type: ignore[attr-defined]
    await asyncio.wait_for(asyncio.gather(*futures), SECONDS)
    assert all(torch.equal(t.cpu(), torch.stack(parts).sum(0)) for t in ts)
    await ranks.close()


@one_loop
@pytest.mark.parametrize("seed", range(6))
async def test_s4_several_operations_in_flight_begun_in_any_order(
    ranks_of: type[Ranks], seed: int, simulated_cuda: SimulatedCuda
) -> None:
    """Each rank begins them in an order of its own; messages overtake one another; some share a tensor's storage."""
    simulated_cuda.delay = 1e-3
    chance = random.Random(seed)
    size = chance.choice([2, 3])
    ranks = ranks_of(size, seed=seed, shared=chance.choice([False, True]))
    whole = [t.view(4, 100) for t in ranks_of.on_device(ranks_of.brought(size, 400, seed=seed))]
    before = [t.cpu() for t in whole]
    makes: list[list[Make]] = []
    for i in range(4):
        rows = [t[i] for t in whole]
        if i % 2:
            makes.append(
                [partial(lambda t, impl, ep: impl.run(ep, [Primitive("broadcast", t, root=1)]), t) for t in rows]
            )
        else:
            makes.append(ranks_of.summing(rows))
    futures = []
    for rank in range(size):
        for i in chance.sample(range(4), 4):
            futures.append(ranks.begin(rank, 10 + i, makes[i][rank]))
            await rounds(chance.randrange(4))
    await asyncio.wait_for(asyncio.gather(*futures), SECONDS)
    for t in whole:
        for i in range(4):
            expected = before[1][i] if i % 2 else torch.stack(before).sum(0)[i]
            assert torch.equal(t[i].cpu(), expected), (seed, i)
    await ranks.close()


@one_loop
async def test_s4_side_by_side_with_one_tag(ranks_of: type[Ranks]) -> None:
    """Lists of tensors share their messages' tag, step by step."""
    ranks = ranks_of(3)
    parts = [ranks_of.brought(3, n, seed=n) for n in (5, 0, 300)]
    lists = [ranks_of.on_device(part) for part in parts]

    def make(rank: int, impl: CudaIpc, ep: Endpoint) -> Program[Any]:
        return impl.run(ep, [Primitive("allreduce", ts[rank]) for ts in lists])

    await ranks.perform([partial(make, rank) for rank in range(3)])
    for rank in range(3):
        for ts, part in zip(lists, parts, strict=True):
            assert torch.equal(ts[rank].cpu(), torch.stack(part).sum(0))
    await ranks.close()


@one_loop
async def test_s4_some_of_the_ranks_in_another_order(ranks_of: type[Ranks]) -> None:
    ranks = ranks_of(5)
    parts = ranks_of.brought(5, 300)
    ts = ranks_of.on_device(parts)
    groups = ([4, 0, 2], [3, 1])

    def make(rank: int, impl: CudaIpc, ep: Endpoint) -> Program[Any]:
        group = next(group for group in groups if rank in group)
        return impl.run(ep.among(group), [Primitive("reduce", ts[rank], root=1)])

    await ranks.perform([partial(make, rank) for rank in range(5)])
    for group in groups:
        for rank in group:
            expected = torch.stack([parts[i] for i in group]).sum(0) if rank == group[1] else parts[rank]
            assert torch.equal(ts[rank].cpu(), expected)
    assert len(ranks.mappings[0].lent) == 1
    await ranks.close()


@one_loop
@pytest.mark.parametrize(("devices", "shared", "working"), [(2, False, 4), (2, True, 2), (1, True, 1)])
async def test_s4_the_first_rank_of_each_device_works(
    ranks_of: type[Ranks], devices: int, shared: bool, working: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = ranks_of(4, devices=devices, shared=shared)
    parts = ranks_of.brought(4, 700)
    ts = ranks_of.on_device(parts, devices)
    seen: list[tuple[torch.device, int]] = []

    def reduce(into: Tensor, ts: Sequence[Tensor], op: ReduceOp) -> None:
        seen.append((into.device, into.numel()))
        plain(into, ts, op)

    plain = cuda_ipc.reduce
    monkeypatch.setattr(cuda_ipc, "reduce", reduce)
    for impl in ranks.impls:
        impl.limits = USUAL_LIMITS  # of one piece
    await ranks.perform(ranks_of.summing(ts))
    for t in ts:
        assert torch.equal(t.cpu(), torch.stack(parts).sum(0))
    assert len(seen) == working
    assert {device.index for device, _ in seen} == set(range(devices))
    assert sum(numel for _, numel in seen) == 700
    await ranks.close()


@one_loop
async def test_s4_nothing_is_asked_of_a_device_with_nothing_queued(
    ranks_of: type[Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even an event on an empty stream finishes only at this process's turn on the device."""
    ranks = ranks_of(3)
    parts = ranks_of.brought(3, 500)
    ts = ranks_of.on_device(parts)
    torch.cuda.synchronize()
    watched: list[torch.cuda.Stream] = []

    class Watched:
        def watch(self, stream: torch.cuda.Stream, then: Done) -> None:
            watched.append(stream)
            events.watch(stream, then)

    events = ranks.impls[0].events
    futures = []
    for rank, (impl, t, stream) in enumerate(zip(ranks.impls, ts, ranks.streams, strict=True)):
        monkeypatch.setattr(impl, "events", Watched())
        with torch.cuda.stream(stream):
            futures.append(
                ranks.begin(rank, 1, partial(lambda t, impl, ep: impl.run(ep, [Primitive("broadcast", t)]), t))
            )
    await asyncio.wait_for(asyncio.gather(*futures), SECONDS)
    assert all(torch.equal(t.cpu(), parts[0]) for t in ts)
    assert set(watched) <= {*ranks.streams[1:]}, "root has queued nothing"
    await ranks.close()


@one_loop
async def test_s4_tensors_made_in_inference_mode(ranks_of: type[Ranks]) -> None:
    ranks = ranks_of(2)
    parts = ranks_of.brought(2, 300)
    with torch.inference_mode():
        ts = [parts[0].to("cuda"), torch.empty(300, dtype=torch.float64, device="cuda").copy_(parts[1])]
    await ranks.perform(ranks_of.summing(ts))
    for t in ts:
        assert torch.equal(t.cpu(), torch.stack(parts).sum(0))
    await ranks.close()


@pytest.fixture
def simulated_mapper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mappings_module, "Mapper", SimulatedMapper)


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


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiodist.backends.cuda_ipc.mappings.LOOK_SECONDS", 1e-3)


@pytest.mark.usefixtures("simulated_mapper", "soon")
@pytest.mark.ranks(3, backend="local")
async def test_s4_memory_goes_back_where_no_other_operation_follows(coll: Communicator) -> None:
    mappings: Any = parts_of(coll).registry.resources.accelerator.mappings
    kept, t = (torch.full((n,), 1.0, device="cuda") for n in (300, 400))
    for each in (kept, t):
        await coll.allreduce(each, impl="cuda_ipc")
    assert len(mappings.lent) == 2
    del each, t
    async with asyncio.timeout(SECONDS):
        while len(mappings.lent) > 1 or len(mappings.borrowed) > 2:  # noqa: ASYNC110  - no notification exists
            await asyncio.sleep(1e-3)
    await coll.allreduce(kept, impl="cuda_ipc")
    assert torch.equal(kept.cpu(), torch.full((300,), float(coll.size**2)))


class Collecting(SimulatedMapper):
    """Looks, where a rank has torch give memory back, who still has some of its mapped."""

    everybody: ClassVar[list[SimulatedMapper]] = []
    mapped: ClassVar[list[int]] = []

    def __init__(self) -> None:
        super().__init__()
        self.everybody.append(self)

    def collect(self) -> None:
        opened = [pickle.loads(description) for mapper in self.everybody for description in mapper.opened]
        self.mapped.append(sum(lender == id(self) for _, lender, _ in opened))


@pytest.mark.parametrize("seed", range(5))
def test_s4_a_rank_gives_memory_back_when_the_others_have_let_go_of_it(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch would at the end of the process, where CUDA may be gone."""
    monkeypatch.setattr(mappings_module, "Mapper", Collecting)
    monkeypatch.setattr(Collecting, "everybody", [])
    monkeypatch.setattr(Collecting, "mapped", [])

    async def program() -> None:
        async with aiodist.init() as coll:
            for n in (100, 300):
                t = torch.full((n,), 1.0, device=coll.device)
                await coll.allreduce(t, impl="cuda_ipc")
                assert torch.equal(t.cpu(), torch.full((n,), 4.0))
            assert any(mapper.opened for mapper in Collecting.everybody)

    run_ranks(4, program, seed=seed)
    assert Collecting.mapped == [0] * 4
    assert not any(mapper.opened for mapper in Collecting.everybody)


# --- mappings ------------------------------------------------------------------------------------------------------


@one_loop
async def test_s4_a_tensor_is_described_once_to_each_rank(ranks_of: type[Ranks]) -> None:
    ranks = ranks_of(3)
    ts = ranks_of.on_device(ranks_of.brought(3, 100))
    for _ in range(4):
        await ranks.perform(ranks_of.summing(ts))
    assert [mapper.exported for mapper in ranks.mappers] == [2, 2, 2]
    await ranks.close()


@one_loop
async def test_s4_mappings_go_when_tensors_die(ranks_of: type[Ranks]) -> None:
    ranks = ranks_of(2)
    for n in range(1, 12):
        parts = ranks_of.brought(2, n)
        ts = ranks_of.on_device(parts)
        await ranks.perform(ranks_of.summing(ts))
        assert all(torch.equal(t.cpu(), torch.stack(parts).sum(0)) for t in ts)
    assert all(len(mappings.borrowed) <= 2 and len(mappings.lent) <= 2 for mappings in ranks.mappings)
    await ranks.close()
