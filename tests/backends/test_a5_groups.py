"""A5: collectives in shared memory among N ranks of one process, against NumPy and float64."""

from __future__ import annotations

import asyncio
import gc
import random
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from aiodist.backends.arithmetic import COMBINE
from aiodist.errors import CommunicatorClosed, MismatchError
from aiodist.handles import Progress
from aiodist.testing.seams.carriers import Lanes, Neighbourhood, ShmNative, meet
from aiodist.testing.seams.channel import in_process
from aiodist.testing.seams.progress import transport_lock
from aiodist.testing.seams.transport import Done, Primitive
from aiodist.types import ReduceOp
from tests.support.transports import held, started

SUM = ReduceOp.SUM
STAGE_BYTES = 1 << 20  # of a lane
Call = Callable[[ShmNative, int, Done], None]


def begun(kind: str, t: Tensor) -> Call:
    """Return what begins an operation on `t`."""
    return lambda native, key, done: native.start(Primitive(kind, t), key, done)


pytestmark = pytest.mark.asyncio(loop_factories=["asyncio"])


@dataclass
class World:
    """N ranks and their lanes."""

    nears: list[Neighbourhood]

    def __post_init__(self) -> None:
        self.size = len(self.nears)
        self.lanes = [Lanes(Progress.current(), near) for near in self.nears]
        self.all_natives: list[ShmNative] = []
        self.natives = self.group("world")
        self._key = 0

    def group(self, name: str, ranks: Sequence[int] | None = None) -> list[ShmNative]:
        members = list(range(self.size) if ranks is None else ranks)
        natives = [ShmNative(self.lanes[r], name, members, i) for i, r in enumerate(members)]
        self.all_natives += natives
        return natives

    def issue(
        self, rank: int, call: Call, key: int, natives: Sequence[ShmNative] | None = None
    ) -> asyncio.Future[None]:
        """Issue one rank's part of an operation."""
        native = (natives or self.natives)[rank]
        return started(lambda done: call(native, key, done))

    async def all(self, call: Callable[[int], Call]) -> None:
        """Run one operation on all ranks."""
        self._key += 1
        await asyncio.gather(*[self.issue(rank, call(rank), self._key) for rank in range(self.size)])

    def place(self, values: Sequence[Tensor], arena: str) -> list[Tensor]:
        """Return copies of `values` in the arenas of all ranks, of none, or of some."""
        return [
            self.shared(rank, value) if arena == "all" or (arena == "some" and rank % 2) else value.clone()
            for rank, value in enumerate(values)
        ]

    def shared(self, rank: int, value: Tensor) -> Tensor:
        return self.nears[rank].arena.empty(tuple(value.shape), value.dtype).copy_(value)

    async def allreduce(self, ts: Sequence[Tensor], op: ReduceOp = SUM) -> None:
        await self.all(
            lambda r: lambda native, key, done: native.start(Primitive("allreduce", ts[r], op=op), key, done)
        )


@asynccontextmanager
async def world(size: int) -> AsyncIterator[World]:
    async with asyncio.timeout(20):
        met = await asyncio.gather(*[meet(channel, [0] * size) for channel in in_process(size)])
        nears = [one.near for one in met if one.near is not None]
        assert len(nears) == size
        here = World(nears)
        try:
            yield here
        finally:
            with transport_lock:
                for native in here.all_natives:
                    native.abort(CommunicatorClosed("the test is over"))
                for near, lanes in zip(nears, here.lanes, strict=True):
                    lanes.close()
                    near.close()


def drawn(numel: int, kind: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if kind.is_complex:
        return torch.complex(*[torch.randint(-9, 9, (numel,), generator=generator).double() for _ in "ab"]).to(kind)
    low, high = (0, 2) if kind is torch.bool else (-100, 100) if kind is torch.int8 else (1, 9)
    return torch.randint(low, high, (numel,), generator=generator).to(kind)


def wide(kind: torch.dtype) -> torch.dtype:
    return torch.complex128 if kind.is_complex else torch.float64 if kind.is_floating_point else torch.int64


def folded(values: Sequence[Tensor], op: ReduceOp) -> Tensor:
    """Return the reduction, rounded once."""
    kind = values[0].dtype
    total = values[0].to(wide(kind)).clone()
    for value in values[1:]:
        COMBINE[SUM if op is ReduceOp.MEAN else op](total, value.to(wide(kind)))
    return (total / len(values) if op is ReduceOp.MEAN else total).to(kind)


def operators(kind: torch.dtype) -> tuple[ReduceOp, ...]:
    if kind is torch.bool:
        return ReduceOp.BOR, ReduceOp.BAND, ReduceOp.BXOR, ReduceOp.MAX
    if kind.is_complex:
        return SUM, ReduceOp.MEAN
    if kind.is_floating_point:
        return SUM, ReduceOp.MEAN, ReduceOp.MIN
    return SUM, ReduceOp.PROD, ReduceOp.BXOR


KINDS = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.bool, torch.complex64)


async def check_all(here: World, numel: int, kind: torch.dtype, op: ReduceOp, arena: str, root: int) -> None:
    """Run every collective once."""
    size = here.size
    values = [drawn(numel, kind, 100 * rank + numel) for rank in range(size)]
    total = folded(values, op)
    case = (size, numel, kind, op, arena, root)

    ts = here.place(values, arena)
    await here.allreduce(ts, op)
    assert all(torch.equal(t, total) for t in ts), ("allreduce", case)

    ts = here.place(values, arena)
    await here.all(
        lambda r: lambda native, key, done: native.start(Primitive("reduce", ts[r], op=op, root=root), key, done)
    )
    assert all(torch.equal(t, total if r == root else values[r]) for r, t in enumerate(ts)), ("reduce", case)

    ts = here.place(values, arena)
    await here.all(lambda r: lambda native, key, done: native.start(Primitive("scan", ts[r], op=op), key, done))
    shares = [folded(values[: r + 1], op) for r in range(size)]
    assert all(torch.equal(t, share) for t, share in zip(ts, shares, strict=True)), ("scan", case)

    ts = here.place(values, arena)
    await here.all(
        lambda r: lambda native, key, done: native.start(Primitive("broadcast", ts[r], root=root), key, done)
    )
    assert all(torch.equal(t, values[root]) for t in ts), ("broadcast", case)

    counts = [numel // (r + 1) if r != root else 0 for r in range(size)]
    blocks = [values[r][:count] for r, count in enumerate(counts)]
    ts, outs = here.place(blocks, arena), [torch.zeros(sum(counts), dtype=kind) for _ in range(size)]
    await here.all(
        lambda r: (
            lambda native, key, done: native.start(Primitive("allgather", ts[r], outs[r], counts=counts), key, done)
        )
    )
    assert all(torch.equal(out, torch.cat(blocks)) for out in outs), ("allgather", case)

    cut = [numel * (r + 1) // size - numel * r // size for r in range(size)]
    cut[0], cut[1] = cut[0] + cut[1], 0
    ts, outs = here.place(values, arena), [torch.zeros(count, dtype=kind) for count in cut]
    await here.all(
        lambda r: (
            lambda native, key, done: native.start(
                Primitive("reduce_scatter", ts[r], outs[r], counts=cut, op=op), key, done
            )
        )
    )
    assert all(torch.equal(out, block) for out, block in zip(outs, total.split(cut), strict=True)), ("scattered", case)
    assert all(torch.equal(t, value) for t, value in zip(ts, values, strict=True)), "only read"


@pytest.mark.thorough
@pytest.mark.drawn(6)
@pytest.mark.parametrize("size", [2, 3, 5, 8, 16, 32])
@pytest.mark.parametrize("arena", ["all", "none", "some"])
async def test_a5_every_collective_of_every_dtype(size: int, arena: str) -> None:
    draw = random.Random(size)
    async with world(size) as here:
        for kind in KINDS:
            for op in operators(kind):
                for numel in (0, 1, size - 1, draw.randrange(2 * size, 5000)):
                    await check_all(here, numel, kind, op, arena, draw.randrange(size))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("arena", ["all", "none", "some"])
async def test_a5_sizes_around_pieces_and_stages(size: int, arena: str) -> None:
    """Sizes of one, two and three rounds, and one element more or less."""
    async with world(size) as here:
        for nbytes in (1 << 15, 1 << 18, STAGE_BYTES, 2 * STAGE_BYTES, 3 * STAGE_BYTES):
            for more in (-1, 0, 1):
                for numel in (nbytes // 8 + more, size * (nbytes // size // 8) + more * size):
                    values = [drawn(numel, torch.float64, rank) for rank in range(size)]
                    ts = here.place(values, arena)
                    await here.allreduce(ts)
                    assert all(torch.equal(t, folded(values, SUM)) for t in ts), numel
        await check_all(here, 2 * STAGE_BYTES // 8 + 1, torch.float64, SUM, arena, size - 1)


async def test_a5_16_bit_floats_are_rounded_once() -> None:
    async with world(3) as here:
        for kind in (torch.float16, torch.bfloat16):
            values = [torch.rand(5000, generator=torch.Generator().manual_seed(r)).to(kind) for r in range(3)]
            ts = here.place(values, "some")
            await here.allreduce(ts, ReduceOp.MEAN)
            exact = sum(value.float() for value in values)
            assert isinstance(exact, Tensor)
            assert all(torch.equal(t, (exact / 3).to(kind)) for t in ts)


async def test_a5_ranks_may_begin_operations_in_another_order() -> None:
    """As second steps do; tensors of all sizes are in flight at once."""
    draw = random.Random(1)
    async with world(3) as here:
        for _ in range(5):
            keys = list(range(1000, 1020))
            numels = {key: draw.choice((1, 10, 1000, 300_000)) for key in keys}
            given = {key: [drawn(numels[key], torch.int32, key + r) for r in range(3)] for key in keys}
            ts = {key: here.place(given[key], draw.choice(("all", "none", "some"))) for key in keys}
            ends = []
            orders = [draw.sample(keys, len(keys)) for _ in range(3)]
            parts = [(r, key) for i in range(len(keys)) for r, key in ((r, orders[r][i]) for r in range(3))]
            for rank, key in parts:

                def call(native: ShmNative, key: int, done: Done, t: Tensor = ts[key][rank]) -> None:
                    native.start(Primitive("allreduce", t, op=SUM), key, done)

                ends.append(here.issue(rank, call, key))
                if draw.random() < 0.2:
                    await asyncio.sleep(0)
            await asyncio.gather(*ends)
            assert all(torch.equal(t, folded(given[key], SUM)) for key in keys for t in ts[key])


async def test_a5_groups_of_one_neighbourhood_work_at_once() -> None:
    async with world(4) as here:
        sets = {"a": [0, 1, 2, 3], "b": [2, 0], "c": [1, 3], "d": [3, 2, 1, 0]}
        groups = {name: here.group(name, ranks) for name, ranks in sets.items()}
        ends, results = [], []
        for key in range(20):
            for name, ranks in sets.items():
                values = [drawn(100_000 if key == 7 else 10, torch.int64, key + r) for r in ranks]
                ts = [
                    value.clone() if (i + key) % 2 else here.shared(ranks[i], value) for i, value in enumerate(values)
                ]
                results.append((ts, folded(values, SUM)))
                for i, t in enumerate(ts):
                    ends.append(here.issue(i, begun("allreduce", t), key, groups[name]))
        await asyncio.gather(*ends)
        assert all(torch.equal(t, total) for ts, total in results for t in ts)


async def test_a5_windows_may_begin_anywhere() -> None:
    async with world(3) as here:
        wholes = [near.arena.empty((100_000,), torch.int16).fill_(-5) for near in here.nears]
        for starts in ((1, 1, 1), (1, 7, 4099), (0, 33, 2)):
            values = [drawn(70_001, torch.int16, r) for r in range(3)]
            ts = [w[start : start + 70_001].copy_(v) for w, start, v in zip(wholes, starts, values, strict=True)]
            await here.allreduce(ts)
            for whole, t, start in zip(wholes, ts, starts, strict=True):
                assert torch.equal(t, folded(values, SUM))
                assert set(whole[:start].tolist()) | set(whole[start + 70_001 :].tolist()) <= {-5}
                whole.fill_(-5)


async def test_a5_what_is_known_of_a_tensor_is_forgotten_with_it() -> None:
    """Tensors die, and others come in their place, with another dtype and size, on one rank or on all."""
    draw = random.Random(2)
    async with world(3) as here:
        values = [drawn(10, torch.float32, r) for r in range(3)]
        ts = here.place(values, "all")
        places = set()
        for _ in range(300):
            if draw.random() < 0.3:
                kind, numel = draw.choice((torch.float32, torch.int32, torch.float64)), draw.choice((10, 20, 5000))
                ts.clear()  # all tensors again, in the same place
                ts.extend(here.place([drawn(numel, kind, r) for r in range(3)], "all"))
            elif draw.random() < 0.5:  # one of them goes elsewhere
                rank = draw.randrange(3)
                held = ts[rank]
                ts[rank] = held.clone() if draw.random() < 0.2 else here.shared(rank, held)
                del held
            values = [drawn(t.numel(), t.dtype, draw.randrange(100)) for t in ts]
            for t, value in zip(ts, values, strict=True):
                t.copy_(value)
            places.add(tuple(t.data_ptr() for t in ts))
            op = draw.choice((SUM, ReduceOp.MAX))
            await here.allreduce(ts, op)
            assert all(torch.equal(t, folded(values, op)) for t in ts)
        assert len(places) > 10, "nothing moved"


async def test_a5_more_tensors_than_are_remembered() -> None:
    async with world(2) as here:
        ts = [here.place([torch.full((3,), float(i)), torch.ones(3)], "all") for i in range(300)]
        for times in (1, 2):
            for pair in ts:
                await here.allreduce(pair, SUM if times == 1 else ReduceOp.MAX)
        assert all(set(t.tolist()) == {i + 1.0} for i, pair in enumerate(ts) for t in pair)


OTHERS: dict[str, Callable[[ShmNative, Tensor, int, Done], None]] = {
    "int32": lambda n, t, k, d: n.start(Primitive("allreduce", t.int()), k, d),
    r"float32\[5\]": lambda n, t, k, d: n.start(Primitive("allreduce", t[:5].clone()), k, d),
    r"float32\[0\]": lambda n, t, k, d: n.start(Primitive("allreduce", t[:0].clone()), k, d),
    "max": lambda n, t, k, d: n.start(Primitive("allreduce", t, op=ReduceOp.MAX), k, d),
    "broadcast": lambda n, t, k, d: n.start(Primitive("broadcast", t), k, d),
    "scan": lambda n, t, k, d: n.start(Primitive("scan", t), k, d),
}


@pytest.mark.parametrize("arena", ["all", "none", "some"])
async def test_a5_ranks_that_disagree_are_all_told_and_go_on(arena: str) -> None:
    async with world(3) as here:
        key = 5000
        for words, unlike in OTHERS.items():
            for odd in (0, 2):
                key += 1
                ts = here.place([torch.ones(6)] * 3, arena)
                ends = []
                for rank, t in enumerate(ts):

                    def call(
                        n: ShmNative,
                        k: int,
                        d: Done,
                        t: Tensor = t,
                        rank: int = rank,
                        odd: int = odd,
                        unlike: Any = unlike,
                    ) -> None:
                        unlike(n, t, k, d) if rank == odd else n.start(Primitive("allreduce", t), k, d)

                    ends.append(here.issue(rank, call, key))
                for rank, failure in enumerate(await asyncio.gather(*ends, return_exceptions=True)):
                    assert isinstance(failure, MismatchError), words
                    others = {odd} if rank != odd else {0, 1, 2} - {odd}
                    assert any(f"rank {other} issued another" in failure.args[0] for other in others)
                assert all(set(t.tolist()) == {1.0} for t in ts), "nothing was touched"
                await here.allreduce(ts)
                assert all(set(t.tolist()) == {3.0} for t in ts)


async def test_a5_roots_and_cuts_that_differ_are_told() -> None:
    async with world(2) as here:
        t, out = torch.ones(6), [torch.zeros(6), torch.zeros(6)]
        cuts = ([3, 3], [2, 4])
        calls: list[Callable[[int], Call]] = [
            lambda r: lambda n, k, d: n.start(Primitive("broadcast", t, root=r), k, d),
            lambda r: lambda n, k, d: n.start(Primitive("reduce", t, op=SUM, root=r), k, d),
            lambda r: lambda n, k, d: n.start(Primitive("allgather", t[: cuts[r][r]], out[r], counts=cuts[r]), k, d),
            lambda r: (
                lambda n, k, d: n.start(Primitive("reduce_scatter", t, out[r][: cuts[r][r]], counts=cuts[r]), k, d)
            ),
        ]
        for key, call in enumerate(calls):
            ends = [here.issue(rank, call(rank), 100 + key) for rank in range(2)]
            for failure in await asyncio.gather(*ends, return_exceptions=True):
                assert isinstance(failure, MismatchError), key


@pytest.mark.parametrize("numel", [9, 3_000_000])
@pytest.mark.parametrize("arena", ["all", "none"])
async def test_a5_giving_up_lets_go_of_everything(arena: str, numel: int) -> None:
    async with world(2) as here:
        large = Progress.current().large
        ts = here.place([torch.ones(numel)] * 2, arena)
        end = here.issue(0, lambda n, k, d: n.start(Primitive("allreduce", ts[0]), k, d), 1)  # the other never comes
        await asyncio.sleep(0)
        assert not end.done()
        with transport_lock:
            here.natives[0].abort(CommunicatorClosed("given up"))
        with pytest.raises(CommunicatorClosed):
            await end
        assert Progress.current().large == large
        with pytest.raises(CommunicatorClosed):
            await here.issue(0, lambda n, k, d: n.start(Primitive("allreduce", ts[0]), k, d), 2)
        await asyncio.sleep(0)
        assert Progress.current().large == large
        assert not here.lanes[0].completions.pending
        await here.issue(0, lambda n, k, d: n.start(Primitive("allreduce", ts[0]), k, d), 3, here.group("x", [0]))
        assert set(ts[0].tolist()) == {1.0}


async def test_a5_a_group_that_is_given_up_holds_no_memory() -> None:
    async with world(2) as here:
        used = [held(near.arena) for near in here.nears]
        for i in range(20):
            natives = here.group(f"g{i}")
            ts = [torch.ones(400_000), torch.ones(400_000)]
            ends = [here.issue(r, begun("allreduce", t), 1, natives) for r, t in enumerate(ts)]
            await asyncio.gather(*ends)
            with transport_lock:
                for native in natives:
                    native.abort(CommunicatorClosed("closed"))
            here.all_natives.clear()
            del natives, ends, native
        async with asyncio.timeout(50):
            while any(map(len, here.lanes)):  # noqa: ASYNC110  - until the next poll
                await asyncio.sleep(0)
        gc.collect()
        # The lanes of the last one may stay until the others are known to have left too.
        lanes = 2 * (STAGE_BYTES + (1 << 16))
        assert all(held(near.arena) - before <= lanes for near, before in zip(here.nears, used, strict=True))


async def test_a5_what_a_callback_raises_is_for_the_hook_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: told.append(unraisable.exc_type))

    def fails(error: BaseException | None) -> None:
        raise KeyError("a slip")

    async with world(2) as here:
        Progress.current().start(lambda: begun("allreduce", torch.ones(9))(here.natives[0], 1, fails))
        await here.issue(1, begun("allreduce", torch.ones(9)), 1)
        await asyncio.gather(*[here.issue(rank, begun("allreduce", torch.ones(9)), 2) for rank in range(2)])
    assert told == [KeyError]


async def test_a5_the_last_rank_to_compare_continues_without_a_poll() -> None:
    ended: list[str] = []
    async with world(2) as here:
        await here.allreduce([torch.ones(1)] * 2)  # the lanes are joined
        first, last = (native.ordered for native in here.natives)
        with transport_lock:
            first.compare(7, lambda _: ended.append("first"))
            first.call_ended()
            assert ended == []
            last.compare(7, lambda _: ended.append("last"))
            while not ended:  # the engine may hold the lane at the submission
                last.call_ended()
        assert ended == ["last"]


async def test_a5_no_later_end_is_called_inside_the_call_of_an_earlier_one() -> None:
    """A library matches calls by their order, which is that of the comparisons."""
    ended: list[str] = []
    async with world(2) as here:
        await here.allreduce([torch.ones(1)] * 2)
        first, last = (native.ordered for native in here.natives)

        def compare_third(error: BaseException | None) -> None:
            ended.append("one" if error is None else repr(error))
            last.compare(3, lambda _: ended.append("three"))
            for _ in range(1000):
                last.call_ended()

        with transport_lock:
            for word in (1, 2, 3):
                first.compare(word, lambda _: None)
            last.compare(1, compare_third)
            last.compare(2, lambda _: ended.append("two"))
            while len(ended) < 3:
                last.call_ended()
        assert ended == ["one", "two", "three"]


async def test_a5_what_others_may_still_write_is_kept_until_they_have_left_too() -> None:
    """Otherwise the memory would get another owner, and a late rank would write into it."""
    async with world(2) as here:
        natives = here.group("given up")
        await asyncio.gather(*[here.issue(r, begun("allreduce", torch.ones(9)), 1, natives) for r in range(2)])
        before = held(here.nears[0].arena)
        t = here.shared(0, torch.ones(300_000))
        end = here.issue(0, begun("allreduce", t), 2, natives)
        with transport_lock:
            natives[0].abort(CommunicatorClosed("given up"))
        with pytest.raises(CommunicatorClosed):
            await end
        nbytes = t.nbytes
        del t, end
        gc.collect()
        assert held(here.nears[0].arena) >= before + nbytes
        with transport_lock:
            natives[1].abort(CommunicatorClosed("given up too"))
            here.nears[0].leave("nothing", [1], None)  # it looks who has left
        gc.collect()
        assert held(here.nears[0].arena) < before + nbytes


@pytest.mark.parametrize("arena", ["all", "none", "some"])
async def test_a5_modes_and_leaves(arena: str) -> None:
    async with world(2) as here:
        with torch.inference_mode():
            inferred = here.place([torch.ones(100_000), torch.ones(100_000)], arena)
        assert inferred[0].is_inference()
        await here.allreduce(inferred)
        assert all(set(t.tolist()) == {2.0} for t in inferred)
        with torch.inference_mode():
            plain = inferred[0].clone()
        leaves = [t.requires_grad_() for t in here.place([torch.ones(7), torch.ones(7)], arena)]
        for call in (
            lambda r: lambda n, k, d: n.start(Primitive("allreduce", leaves[r]), k, d),
            lambda r: lambda n, k, d: n.start(Primitive("scan", leaves[r]), k, d),
            lambda r: lambda n, k, d: n.start(Primitive("broadcast", leaves[r]), k, d),
        ):
            await here.all(call)
        assert all(leaf.is_leaf and leaf.requires_grad and leaf.grad_fn is None for leaf in leaves)
        assert all(set(leaf.tolist()) == {2.0} for leaf in leaves)
        mixed = [leaves[0], plain[:7]]
        await here.allreduce(mixed)
        assert all(set(t.tolist()) == {4.0} for t in mixed)
        with torch.inference_mode():  # the issuer's mode changes no tensor of another rank
            await here.allreduce(leaves)
