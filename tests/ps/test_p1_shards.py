"""P1: tensors on servers: every layout, size and dtype, first values from everywhere, and ranks that disagree."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import aiodist
from aiodist import Communicator
from aiodist.ps import ParameterServer
from aiodist.testing import run_ranks

LAYOUTS: dict[str, dict[str, Any]] = {
    "shared": {},
    "shared and cut": {"split_bytes": 1},
    "one apart": {"servers": 1},
    "two apart and cut": {"servers": 2, "split_bytes": 1},
    "one shared": {"servers": [1], "workers": [0, 1, 2]},
    "two shared and cut": {"servers": [2, 0], "workers": [0, 1, 2], "split_bytes": 1},
}
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.complex64,
    torch.complex128,
]


@pytest.mark.drawn(1)
@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("keys", [300, pytest.param(10_000, marks=pytest.mark.soak)])
@pytest.mark.timeout(600)
def test_p1_fifty_pushes_of_every_key_from_three_workers(servers: int, keys: int) -> None:
    """In lists, none awaited before the next; the workers share the fifty."""
    pushes, value = 50, 3

    async def main(rank: int) -> None:
        async with aiodist.init() as coll:
            names = [f"key {i}" for i in range(keys)]
            zeros = list(torch.zeros(keys, dtype=torch.int64).unbind())
            async with ParameterServer(coll, servers=servers) as ps:
                await ps.init(names, zeros)
                if not ps.is_worker:
                    return
                values = list(torch.full((keys,), value).unbind())
                for _ in range([17, 17, 16][rank]):
                    ps.push(names, values)
                await ps.sync()
                await ps.barrier()
                await ps.pull(names)
                assert [int(z) for z in zeros] == [pushes * value] * keys

    run_ranks(3 + servers, main, seed=servers)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("numel", [0, 1, 2, 5, 1001])
async def test_p1_every_size_in_every_layout(coll: Communicator, layout: str, numel: int) -> None:
    """Numbered elements, so that none can be at another's place; 0 elements and fewer than servers too."""
    w = torch.full((numel,), -1.0)
    if coll.rank == 0:
        w = torch.arange(float(numel))
    async with ParameterServer(coll, {"w": w}, **LAYOUTS[layout]) as ps:
        await coll.barrier()  # all have read it
        if ps.is_worker:
            assert torch.equal(w, torch.arange(float(numel))), "values of the first worker"
            await ps.push("w", 10 * torch.arange(float(numel)))
            await ps.barrier()
            out = torch.full((numel,), -1.0)
            assert await ps.pull("w", out) is out
            assert torch.equal(out, (1 + 10 * len(ps.workers)) * torch.arange(float(numel)))
            assert torch.equal(w, torch.arange(float(numel))), "only out was written"


@pytest.mark.ranks(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
async def test_p1_every_dtype(coll: Communicator, dtype: torch.dtype) -> None:
    def numbers(shape: tuple[int, ...], times: int) -> torch.Tensor:
        return (torch.arange(torch.Size(shape).numel()).reshape(shape) % 7 * times).to(dtype)

    shapes: list[tuple[int, ...]] = [(), (1,), (2, 0, 3), (5, 3, 2), (4099,)]
    tensors = [numbers(shape, 1) if coll.rank == 0 else torch.zeros(shape, dtype=dtype) for shape in shapes]
    async with ParameterServer(coll, tensors, split_bytes=64) as ps:
        await ps.push(values=[numbers(shape, 2) for shape in shapes])
        await ps.barrier()
        await ps.pull()
        for t, shape in zip(tensors, shapes, strict=True):
            assert (t.dtype, t.shape) == (dtype, shape)
            assert torch.equal(t, numbers(shape, 1 + 2 * 3))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("split", [1, 1 << 20])
async def test_p1_truth_values_are_copied(coll: Communicator, split: int) -> None:
    flags = torch.tensor([True, False, True, True, False])
    async with ParameterServer(coll, {"b": torch.zeros(5, dtype=torch.bool)}, rule="copy", split_bytes=split) as ps:
        if coll.rank == 1:
            await ps.push("b", flags)
        await ps.barrier()
        assert torch.equal(await ps.pull("b"), flags)
        with pytest.raises(TypeError, match="bool"):
            ps.push("b", flags, rule="add")
        with pytest.raises(TypeError, match="bool"):
            ps.init("c", flags, rule="add")


@pytest.mark.drawn(2)
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.ranks(2, backend=("mpi", "gloo", "shm"))
@pytest.mark.parametrize("split", [1, 1 << 30])
async def test_p1_first_values_and_sums_on_real_wires(coll: Communicator, split: int) -> None:
    """In an entry, in a message, and in memory of the arena; from three starts."""
    sizes = [3, 5000, 100_003]
    async with ParameterServer(coll, split_bytes=split) as ps:
        for start in ("root", "first", "own"):
            tensors = [coll.arena_empty(n, torch.float32).fill_(coll.rank + 1) for n in sizes]
            names = [f"{start} {n}" for n in sizes]
            await ps.init(names, tensors, start=start)
            before = [t.clone() for t in await ps.pull(names)]
            for t in before if start == "root" else ():
                assert bool((t == 1).all())
            for t in before:
                assert set(t.tolist()) <= {float(rank + 1) for rank in range(coll.size)}
            await ps.barrier()
            values = [coll.arena_empty(n, torch.float32).fill_(coll.rank + 0.5) for n in sizes]
            for _ in range(3):
                await ps.push(names, values)
            await ps.barrier()
            await ps.pull(names)
            added = 3 * sum(rank + 0.5 for rank in range(coll.size))
            for t, old in zip(tensors, before, strict=True):
                assert torch.equal(t, old + added)
            await ps.barrier()


# --- where first values come from --------------------------------------------------------------------------------


@pytest.mark.ranks(3)
@pytest.mark.parametrize("slow", [0, 1, 2])
async def test_p1_first_values_are_those_of_the_first_and_others_wait_for_them(coll: Communicator, slow: int) -> None:
    async with ParameterServer(coll, start="first", split_bytes=4) as ps:
        w = torch.full((7,), coll.rank + 1.0)
        if coll.rank == slow:
            await ps.init("w", w)
            await ps.push("w", torch.ones(7))
            await coll.barrier()
        else:
            await coll.barrier()
            await ps.init("w", w)
        assert torch.equal(await ps.pull("w"), torch.full((7,), slow + 2.0))


@pytest.mark.ranks(3)
async def test_p1_a_rank_before_the_first_worker_waits_for_it(coll: Communicator) -> None:
    async with ParameterServer(coll) as ps:
        w = torch.full((7,), coll.rank + 1.0)
        if coll.rank != 0:
            opening = ps.init("w", w)
            await coll.barrier()
            assert not opening.done()
            with pytest.raises(KeyError, match="unknown name 'w'"):
                ps.push("w", w)
            await coll.barrier()
            await opening
        else:
            await coll.barrier()
            await coll.barrier()
            await ps.init("w", w)
        assert torch.equal(await ps.pull("w"), torch.ones(7))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("servers", [[0, 1, 2, 3], [3, 1], [2]])
async def test_p1_own_values_are_each_servers_block(coll: Communicator, servers: list[int]) -> None:
    w = torch.full((8,), coll.rank + 1.0)
    async with ParameterServer(coll, {"w": w}, servers=servers, start="own", split_bytes=1) as ps:
        assert torch.equal(w, torch.full((8,), coll.rank + 1.0)), "nobody's is overwritten"
        out = await ps.pull("w", torch.empty(8))
        expected = sorted(float(server + 1) for server in servers for _ in range(8 // len(servers)))
        assert sorted(out.tolist()) == expected


@pytest.mark.ranks(3)
async def test_p1_names_may_come_later_and_in_any_order(coll: Communicator) -> None:
    names = [f"n{i}" for i in range(20)]
    mine = names[coll.rank :] + names[: coll.rank] if coll.rank != 2 else names[::-1]
    async with ParameterServer(coll, {"first": torch.zeros(2)}) as ps:
        await ps.push("first", torch.ones(2))
        opened = [ps.init(name, torch.full((3,), float(name[1:]))) for name in mine]
        await aiodist.gather(*opened)
        await ps.push(mine, [torch.ones(3)] * 20)
        await ps.barrier()
        pulled = await ps.pull(names)
        assert [float(t[0]) for t in pulled] == [i + 3.0 for i in range(20)]
        assert len(await ps.pull()) == 1, "what it was opened with"


@pytest.mark.ranks(3)
async def test_p1_two_parameter_servers_know_nothing_of_each_other(coll: Communicator) -> None:
    a, b = torch.zeros(3), torch.zeros(4)
    async with (
        ParameterServer(coll, {"w": a}) as one,
        ParameterServer(coll, {"w": b}, rule="copy", servers=[1], workers=[0, 1, 2]) as two,
    ):
        await aiodist.gather(one.push("w", torch.ones(3)), two.push("w", torch.full((4,), 9.0)))
        await one.barrier()
        await aiodist.gather(one.pull(), two.pull())
        assert (a.tolist(), b.tolist()) == ([3.0] * 3, [9.0] * 4)
