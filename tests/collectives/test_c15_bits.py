"""C15: sums of floats whose bits depend on the elements and the number of ranks alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise, product
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from torch import Tensor

from aiodist import BackendUnavailable, BufferInFlight, Communicator, MismatchError, init
from aiodist.communicator import parts_of
from aiodist.testing import run_ranks
from aiodist.testing.seams.world import current_place
from aiodist.types import Impl, Op

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)
OPS: tuple[Op, ...] = ("sum", "mean", "prod")
LONG = 1 << 14  # from which direct reductions are cut in blocks
SIZES = (1, 37, LONG + 3)
RING_BYTES = 64 << 10  # from which hosts exchange blocks


def drawn(ranks: int, numel: int, kind: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Return what each rank brings, the same list on every rank: numbers whose sum depends on the order.

    Half of the large numbers of ranks 0 and 1 cancel out, so that the order shows in 16 bits too.
    """
    made = torch.Generator().manual_seed(seed + 31 * numel)
    wide = torch.complex128 if kind.is_complex else torch.float64
    parts = [torch.randn(numel, generator=made, dtype=wide).mul(1.1 + rank % 3) for rank in range(ranks)]
    if ranks > 1:
        parts[0][::2] *= 4096 if kind is torch.float16 else 1 << 30
        parts[1][::2] = -parts[0][::2]
    return [part.to(kind) for part in parts]


def in_order(parts: Sequence[Tensor], op: str = "sum") -> Tensor:
    """Combine neighbours, then pairs of neighbours, and so on; 16-bit floats in float32, rounded once."""
    kind = parts[0].dtype
    level = [part.float() if kind.itemsize == 2 else part for part in parts]
    while len(level) > 1:
        pairs = [(a * b if op == "prod" else a + b) for a, b in zip(level[::2], level[1::2], strict=False)]
        level = pairs + level[len(pairs) * 2 :]
    if op == "mean":
        reals = torch.view_as_real(level[0]) if kind.is_complex else level[0]
        level = [(torch.view_as_complex if kind.is_complex else Tensor.clone)(reals / len(parts))]
    return level[0].to(kind)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype is b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


async def reproducible(coll: Communicator) -> Communicator:
    """Return a communicator of a world that was opened with reproducible=True."""
    resources = parts_of(coll).registry.resources
    resources.reproducible = True
    try:
        return await coll.dup()
    finally:
        resources.reproducible = False


def kept(coll: Communicator, operation: str) -> list[Impl]:
    """Return the implementations that a reproducible communicator has."""
    return [o.impl for o in coll.availability() if (o.operation, o.device, o.state) == (operation, "cpu", "available")]


def test_c15_the_order_shows_in_the_drawn_numbers() -> None:
    for ranks, kind in product((3, 4, 7), FLOATS):
        parts = drawn(ranks, 501, kind)
        assert not same_bits(in_order(parts), in_order([*parts[1:], parts[0]])), (ranks, kind)


@pytest.mark.drawn(1)
@pytest.mark.ranks(2, 3, 5, 8, backend="local")
@pytest.mark.ranks(3, 4, backend=("mpi", "gloo", "shm"))
@pytest.mark.parametrize("numel", SIZES)
async def test_c15_every_implementation_sums_in_one_order(coll: Communicator, numel: int) -> None:
    own, rank, size = await reproducible(coll), coll.rank, coll.size
    for seed, (kind, op) in enumerate(product(FLOATS, OPS)):
        if op == "prod" and kind.is_complex:
            continue  # a product of complex numbers has sums inside, which some processors fuse
        parts = drawn(size, numel, kind, seed)
        total = in_order(parts, op)
        for impl in ("auto", *kept(own, "allreduce")):
            t = parts[rank].clone()
            await own.allreduce(t, op, impl=impl)
            assert same_bits(t, total), ("allreduce", impl, kind, op)
        for impl in ("auto", *kept(own, "reduce")):
            root = seed % size
            result = await own.reduce(parts[rank].clone(), op, root, impl=impl)
            assert rank != root or same_bits(result, total), ("reduce", impl, kind, op)
        for impl in ("auto", *kept(own, "reduce_scatter")):
            block = await own.reduce_scatter(parts[rank], op, impl=impl)
            rows = [numel // size + (r < numel % size) for r in range(size)]
            assert same_bits(block, total.split(rows)[rank]), ("reduce_scatter", impl, kind, op)
    await own.aclose()


@pytest.mark.ranks(3, backend="local")
@pytest.mark.ranks(4, backend="shm")
async def test_c15_in_lists_arenas_slices_outs_by_name_and_in_groups(coll: Communicator) -> None:
    own, rank, size = await reproducible(coll), coll.rank, coll.size
    numel, kind = 3001, torch.float32
    parts = drawn(size, numel, kind)
    total, mine = in_order(parts), parts[coll.rank]
    listed = await own.allreduce([mine.clone(), mine[:5].clone(), mine[7:].clone()])
    assert all(same_bits(*pair) for pair in zip(listed, (total, total[:5], total[7:]), strict=True))
    assert same_bits(await own.allreduce(mine, out=torch.empty(numel)), total)
    assert same_bits(await own.allreduce(mine.clone(), name="bits"), total)
    arena = own.arena_empty(numel).copy_(mine)
    await own.allreduce(arena)
    assert same_bits(arena, total)
    buckets = mine.clone()
    for bucket in buckets.split(1000):
        await own.allreduce(bucket)
    assert same_bits(buckets, total)
    assert same_bits(
        await own.reduce_scatter(mine, sizes=[numel] + [0] * (size - 1)), total[: numel if not rank else 0]
    )
    number = await own.allreduce(0.1 * (rank + 1))
    assert number == float(in_order([torch.tensor([0.1 * (r + 1)], dtype=torch.float64) for r in range(size)]))
    turned = await own.split(0, (rank - 1) % size)
    assert same_bits(await turned.allreduce(mine.clone()), in_order([*parts[1:], parts[0]]))
    prefixes = list(accumulate(parts))  # one rank after another
    assert same_bits(await own.scan(mine.clone()), prefixes[rank])
    assert same_bits(await own.exscan(mine.clone()), prefixes[rank - 1] if rank else mine)
    await own.aclose()


@pytest.mark.ranks(2, 3, backend="local")
async def test_c15_lists_of_short_and_long_tensors(coll: Communicator) -> None:
    sizes = (LONG - 1, LONG + 3, 5, LONG)
    for op in (coll.allreduce, coll.reduce):
        parts = [drawn(coll.size, numel, torch.float32, seed) for seed, numel in enumerate(sizes)]
        ts = [of_ranks[coll.rank].clone() for of_ranks in parts]
        await op(ts, impl="direct")
        if op == coll.allreduce or coll.rank == 0:
            assert all(same_bits(t, in_order(of_ranks)) for t, of_ranks in zip(ts, parts, strict=True))


LAYOUTS: dict[int, list[tuple[list[list[int]], bool]]] = {
    3: [([[0, 1], [2]], True), ([[0], [1, 2]], False), ([[0], [1], [2]], True)],
    4: [([[0, 1], [2, 3]], True), ([[0, 2], [1, 3]], False), ([[0], [1, 2, 3]], False), ([[0, 1, 2], [3]], False)],
    6: [([[0, 1, 2], [3, 4, 5]], False), ([[0, 1], [2, 3], [4, 5]], True), ([[0, 1, 2, 3], [4, 5]], True)],
}
"""Ranks of each host, and whether the sums within the hosts are nodes of the tree."""


def on_hosts(layout: Sequence[Sequence[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the ranks of `run_ranks` take themselves to be on these hosts."""
    host_of = {rank: number for number, ranks in enumerate(layout) for rank in ranks}

    def name() -> str:
        place: Any = current_place.get()
        return f"host{host_of[place.started_as]}"

    monkeypatch.setattr("socket.gethostname", name)
    hosts = property(lambda place: tuple(host_of[rank] for rank in range(place.job.size)))
    monkeypatch.setattr("aiodist.testing.ranks.Seat.hosts", hosts)


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_c15_hosts_do_not_change_the_bits(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(rank: int) -> None:
        async with init(reproducible=True) as coll:
            await coll.selector.set_limit("hierarchical.piece_bytes", RING_BYTES)
            for numel in (37, RING_BYTES // 4 + 1, 50_001):
                chosen = coll.selector.choose("allreduce", numel * 4)
                assert (chosen in ("hierarchical", "leaders")) == in_levels, (layout, chosen)
                parts = drawn(coll.size, numel, torch.float32)
                total = in_order(parts)
                assert same_bits(await coll.allreduce(parts[rank].clone()), total), (layout, numel)
                for root in range(ranks):
                    result = await coll.reduce(parts[rank].clone(), root=root)
                    assert rank != root or same_bits(result, total), (layout, numel, root)
            await check_cuts(coll, drawn(8, 501, torch.float32), "mean")

    for layout, in_levels in LAYOUTS[ranks]:  # noqa: B007 - the ranks read it
        on_hosts(layout, monkeypatch)
        run_ranks(ranks, main, timeout=300)


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.ranks(3, backend="local")
async def test_c15_an_excluded_implementation_is_named(coll: Communicator) -> None:
    own, t = await reproducible(coll), torch.ones(5)
    why = r"impl='ring' of allreduce: init\(reproducible=True\) excludes sums .*: expected auto, tree, direct"
    for call in (own.allreduce, lambda t, **how: own.allreduce([t, t[:1].clone()], **how)):
        with pytest.raises(ValueError, match=why):
            call(t, impl="ring")
    with pytest.raises(ValueError, match=why):
        own.allreduce(t, impl="ring", name="named")
    with pytest.raises(ValueError, match="impl='chain' of reduce: "):
        own.reduce(t, impl="chain")
    with pytest.raises(ValueError, match="impl='halving' of reduce_scatter: "):
        own.reduce_scatter(t, impl="halving")
    with pytest.raises(ValueError, match="impl='doubling' of scan: "):
        own.scan(t, impl="doubling")
    with pytest.raises(BackendUnavailable, match=r"ring is not possible here: init\(reproducible=True\) excludes"):
        own.selector.set("allreduce", "ring")
    offer = own.availability().of("allreduce", "ring")
    assert offer.state == "not possible here"
    assert "init(reproducible=True) excludes" in offer.reason
    assert (
        "# direct here" in own.selector.show(operation="allreduce") or own.selector.choose("allreduce", 1) == "direct"
    )
    await own.allgather(t, impl="ring")  # no sum
    await own.allreduce(t)
    assert t.tolist() == [3.0] * 5
    await coll.allreduce(t, impl="ring")  # the parent is not reproducible
    await own.aclose()


@pytest.mark.ranks(2, backend="local")
async def test_c15_two_ranks_have_one_order(coll: Communicator) -> None:
    own = await reproducible(coll)
    parts = drawn(2, 101, torch.float32)
    for impl in ("ring", "halving", "doubling", "tree", "direct"):
        assert same_bits(await own.allreduce(parts[coll.rank].clone(), impl=impl), in_order(parts))
    await own.aclose()


def test_c15_ranks_that_differ_are_told_at_the_opening() -> None:
    async def main(rank: int) -> None:
        with pytest.raises(MismatchError, match=r"init\(reproducible=\).*rank 0: False.*rank 1: True"):
            async with init(reproducible=rank == 1):
                pass

    run_ranks(2, main, timeout=60)


def test_c15_splits_keep_the_promise() -> None:
    async def main(rank: int) -> None:
        async with init(reproducible=True) as coll:
            group = await coll.group([0, 2, 3])
            if rank != 1:
                with pytest.raises(ValueError, match="impl='ring' of allreduce"):
                    group.allreduce(torch.ones(3), impl="ring")

    run_ranks(4, main, timeout=60)


# --- across=True: the parts of all ranks in one tree ----------------------------------------------------------------


def cuts(parts: int, ranks: int) -> Iterator[list[int]]:
    """Return numbers of parts by rank: even, all but one on the last, and all but one on the first."""
    yield [parts * (r + 1) // ranks - parts * r // ranks for r in range(ranks)]
    yield [1] * (ranks - 1) + [parts - ranks + 1]
    yield [parts - ranks + 1] + [1] * (ranks - 1)


GIVEN: list[tuple[int, torch.dtype, Op]] = [
    (8, torch.float32, "sum"),
    (13, torch.bfloat16, "mean"),
    (8, torch.complex64, "mean"),
]


async def check_cuts(coll: Communicator, parts: Sequence[Tensor], op: Op) -> None:
    total, rank, size = in_order(parts, op), coll.rank, coll.size
    for counts in cuts(len(parts), size):
        start, stop = list(pairwise([0, *accumulate(counts)]))[rank]
        mine = [part.clone() for part in parts[start:stop]]
        out = torch.empty_like(mine[0])
        got: Any = await coll.allreduce(mine, op, across=True, out=out)
        assert got is out
        assert same_bits(out, total), (counts, op)
        assert all(same_bits(*pair) for pair in zip(mine, parts[start:stop], strict=True)), "parts are only read"
        root = size - 1
        result = await coll.reduce(mine, op, root, across=True, out=out.zero_())
        assert rank != root or (result is out and same_bits(out, total)), (counts, op)
        assert await coll.allreduce(mine, op, across=True) is mine
        assert all(same_bits(part, total) for part in mine), (counts, op)


@pytest.mark.drawn(2)
@pytest.mark.ranks(1, 2, 3, 4, 7, 8, backend="local")
@pytest.mark.ranks(4, backend=("gloo", "shm"))
@pytest.mark.parametrize("numel", [0, 1, 37, (1 << 16) + 5])
async def test_c15_across_sums_all_parts_in_one_tree(coll: Communicator, numel: int) -> None:
    for count, kind, op in GIVEN:
        await check_cuts(coll, drawn(count, numel, kind), op)


KINDS: list[tuple[torch.dtype, Op]] = [
    (torch.float32, "sum"),
    (torch.float64, "mean"),
    (torch.float32, "prod"),
    (torch.float32, "max"),
    (torch.complex64, "mean"),
    (torch.float16, "mean"),
    (torch.bfloat16, "sum"),
    (torch.int64, "sum"),
    (torch.uint8, "prod"),
    (torch.bool, "bor"),
]
NUMBERS_OF_PARTS = ([2] * 4, [1] * 4, [8] * 4, [3] * 4, [2, 1, 2, 4], [2] * 4, [16] * 4, [1, 1, 1, 2], [32] * 4)
"""Numbers of parts by rank. Lanes run the powers of two up to 16 that all ranks have."""


def unlike(a: Tensor, b: Tensor) -> list[int]:
    """Return the elements that differ in their bits, except for the payloads of NaN."""
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    floats = a.is_floating_point()
    nan = a.isnan() & b.isnan() if floats else torch.zeros_like(a, dtype=torch.bool)
    signs = a.signbit() != b.signbit() if floats else torch.zeros_like(nan)
    return [int(i) for i in (~nan & ((a != b) | signs)).flatten().nonzero()[:5]]


@pytest.mark.drawn(4)
@pytest.mark.ranks(2, 3, 4, backend="shm")
@pytest.mark.parametrize("place", ["arena", "ordinary", "some"])
@pytest.mark.parametrize("numel", [1, 37, 8193, 70_001])
async def test_c15_across_in_a_lane_has_the_bits_of_a_program(
    coll: Communicator, numel: int, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, size, programs = coll.rank, coll.size, []

    reduce_parts = resolve_name("aiodist.communicator.plans:reduce_parts")

    def counted(*given: Any) -> Any:
        programs.append(1)
        return reduce_parts(*given)

    for module in ("plans", "reductions"):
        monkeypatch.setattr(f"aiodist.communicator.{module}.reduce_parts", counted)
    seed = int(await coll.broadcast(torch.randint(1 << 40, (1,))))
    made = torch.Generator().manual_seed(seed)
    for turn, (counts, (kind, op)) in enumerate(zip(NUMBERS_OF_PARTS * 2, KINDS * 2, strict=False)):
        counts = counts[: size if sum(counts) * numel < 1 << 21 else 0]
        if not counts:
            continue
        parts = [torch.randn(numel, generator=made, dtype=torch.float64).mul(9) for _ in range(sum(counts))]
        for i, part in enumerate(parts if kind.is_floating_point and op != "max" else ()):
            part[torch.randint(numel, (numel // 9,), generator=made)] = -0.0
            part[torch.randint(numel, (1,), generator=made)] = [torch.inf, -torch.inf, torch.nan][i % 3]
        parts = [part.to(kind) for part in parts]
        start, stop = list(pairwise([0, *accumulate(counts)]))[rank]
        shared = place == "arena" or (place == "some" and rank == 1)
        make = coll.arena_empty if shared else torch.empty
        mine = [make(numel, dtype=kind).copy_(part) for part in parts[start:stop]]
        expected: Any = await coll.allreduce(mine, op, across=True, out=torch.empty(numel, dtype=kind), name="program")
        case = (seed, counts, kind, op)
        programs.clear()
        out, given = (make(numel, dtype=kind), mine[0], mine[-1])[turn % 3], [part.clone() for part in mine]
        got: Any = await coll.allreduce(mine, op, across=True, out=out)
        assert got is out
        assert unlike(out, expected) == [], case
        assert all(part is out or unlike(part, before) == [] for part, before in zip(mine, given, strict=True)), case
        for part, before in zip(mine, given, strict=True):
            part.copy_(before)
        result = await coll.reduce(mine, op, size - 1, across=True, out=out)
        assert rank != size - 1 or (result is out and unlike(out, expected) == []), case
        in_lanes = (
            len(set(counts)) == 1 and counts[0] in (1, 2, 8, 16) and kind.itemsize != 2 and kind is not torch.bool
        )
        assert (programs == []) == in_lanes, case
        if not kind.is_floating_point or op == "max":
            continue
        assert unlike(expected, in_order(parts, op)) == [], case


@pytest.mark.ranks(2, 3, backend="shm")
@pytest.mark.parametrize("numel", [5, 100_000])
async def test_c15_across_in_a_lane_writes_after_the_ranks_agree(coll: Communicator, numel: int) -> None:
    """Ranks that differ change nothing; the parts and the result are in flight from the call to the end."""
    for make in (torch.empty, coll.arena_empty):
        parts = [make(numel).fill_(coll.rank + i) for i in (1, 2)]
        out = make(numel).fill_(-7)
        with pytest.raises(MismatchError):
            await coll.allreduce(parts, "sum" if coll.rank else "mean", across=True, out=out)
        assert out.eq(-7).all()
        assert [part.eq(coll.rank + i).all().item() for i, part in zip((1, 2), parts, strict=True)] == [True, True]
        if coll.rank:
            assert await coll.recv_object(0) == "now"
        handle: Any = coll.allreduce(parts, across=True, out=out)
        if coll.rank == 0:
            for busy in (*parts, out):
                with pytest.raises(BufferInFlight, match="allreduce"):
                    coll.allreduce(busy)
            parts[1].data = torch.zeros(numel)  # the operation keeps its memory
            await asyncio.sleep(0.05)  # until the rank parks
            assert not handle.done()
            for other in range(1, coll.size):
                await coll.send_object("now", other)
        await handle
        assert out.eq(sum(2 * rank + 3 for rank in range(coll.size))).all()
        for free in (*parts, out):
            await coll.allreduce(free)


@pytest.mark.ranks(3, backend="local")
async def test_c15_across_takes_an_implementation_by_name(coll: Communicator) -> None:
    """One with another order sums each rank's parts first, unless the world is reproducible."""
    parts = drawn(8, 51, torch.float32)
    mine = parts[coll.rank * 2 :][: 2 if coll.rank < 2 else 4]
    for impl in ("direct", "tree"):
        got: Any = await coll.allreduce(mine, across=True, out=torch.empty(51), impl=impl)
        assert same_bits(got, in_order(parts)), impl
    got = await coll.allreduce(mine, across=True, out=torch.empty(51), impl="ring")
    torch.testing.assert_close(got, in_order(parts))
    own = await reproducible(coll)
    with pytest.raises(ValueError, match="impl='ring' of allreduce: "):
        own.allreduce(mine, across=True, impl="ring")
    await own.aclose()


@pytest.mark.ranks(2, backend="local")
async def test_c15_across_writes_out_as_other_calls_do(coll: Communicator) -> None:
    mine = [torch.full((6,), 1.0 + coll.rank), torch.full((6,), 2.0)]
    total = [7.0] * 6
    larger = torch.zeros(8)
    got: Any = await coll.allreduce(mine, across=True, out=larger)
    assert (got.tolist(), larger.tolist()) == (total, [*total, 0.0, 0.0])
    smaller = torch.zeros(2)
    got = await coll.allreduce(mine, across=True, out=smaller)
    assert got.tolist() == total
    assert (await coll.reduce(mine, across=True, out=mine[0], root=1)) is (mine[0] if coll.rank else None)
    assert mine[0].tolist() == (total if coll.rank else [1.0] * 6)
    with pytest.raises(ValueError, match="out overlaps the input"):
        coll.allreduce([torch.ones(6), larger[1:7]], across=True, out=larger[:6])
    with pytest.raises(TypeError, match="out holds int64"):
        coll.allreduce(mine, across=True, out=torch.zeros(6, dtype=torch.int64))
    with pytest.raises(MismatchError):
        await coll.allreduce([torch.ones(3 + coll.rank)], across=True)
