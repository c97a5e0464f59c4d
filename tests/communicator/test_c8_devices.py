"""C8: a list of tensors, one on each device, over all ranks: `across=True`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor

from aiodist import Communicator, CommunicatorAborted, MismatchError, init
from aiodist.testing import run_ranks
from aiodist.types import REDUCTIONS, Impl, Op
from tests.support.simulated_cuda.device import SimulatedCuda
from tests.support.simulated_cuda.simulation import simulated_cuda

KINDS = (torch.float32, torch.bfloat16, torch.int32)


def given(coll: Communicator, numel: int, kind: torch.dtype, seed: int, count: int = 2) -> list[list[Tensor]]:
    """Return what every rank gives, the same on all of them."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [torch.randint(-50, 50, (numel,), generator=generator).to(kind) for _ in range(count)] for _ in range(coll.size)
    ]


def spread(ts: list[Tensor], places: list[str]) -> list[Tensor]:
    return [t.clone().to(place) for t, place in zip(ts, places, strict=True)]


def total(lists: list[list[Tensor]], op: str) -> Tensor:
    wide = torch.stack([t.double() for ts in lists for t in ts])
    reduced = {"sum": wide.sum(0), "mean": wide.mean(0), "max": wide.amax(0)}[op]
    return reduced.to(lists[0][0].dtype)


async def every_operation(coll: Communicator, places: list[str], impl: Impl) -> None:
    """Compare with float64, for lists of a tensor on each of `places`."""
    root = coll.size - 1
    for seed, (numel, kind) in enumerate([(1, KINDS[0]), (37, KINDS[1]), (1025, KINDS[2]), (0, KINDS[0])]):
        lists = given(coll, numel, kind, seed, len(places))
        ops: list[Op] = ["sum", "max", "mean"] if kind.is_floating_point else ["sum", "max"]
        for op in ops if numel else ops[:1]:
            ts = spread(lists[coll.rank], places)
            assert await coll.allreduce(ts, op, across=True, impl=impl) is ts
            assert [t.tolist() for t in ts] == [total(lists, op).tolist()] * len(ts)
            ts = spread(lists[coll.rank], places)
            reduced = await coll.reduce(ts, op, root, across=True, impl=impl)
            assert reduced is (ts[0] if coll.rank == root else None)
            if reduced is not None:
                assert reduced.tolist() == total(lists, op).tolist()
            read = ts[1:] if coll.rank == root else ts
            kept = lists[coll.rank][-len(read) :] if read else []
            assert [t.tolist() for t in read] == [t.tolist() for t in kept], "what is only read stays"
        ts = spread(lists[coll.rank], places)
        assert await coll.broadcast(ts, root, across=True, impl=impl) is ts
        assert [t.tolist() for t in ts] == [lists[root][0].tolist()] * len(ts)
        ts = spread(lists[coll.rank], places)
        flat = await coll.allgather(ts, across=True, impl=impl)
        assert [t.tolist() for t in flat] == [t.tolist() for of in lists for t in of]
        assert [str(t.device) for t in flat] == [str(t.device) for t in ts] * coll.size


@pytest.mark.drawn(2)
@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("impl", ["auto", "staged", "ring"])
async def test_c8_over_ranks_and_devices(coll: Communicator, simulated_cuda: SimulatedCuda, impl: Impl) -> None:
    # Which device comes first differs from rank to rank.
    first = coll.rank % 2
    await every_operation(coll, [f"cuda:{first}", f"cuda:{1 - first}"], impl)


@pytest.mark.ranks(1, 2)
async def test_c8_on_the_cpu(coll: Communicator) -> None:
    await every_operation(coll, ["cpu"] * 3, "auto")
    await every_operation(coll, ["cpu"], "direct")


@pytest.mark.ranks(1, 2)
async def test_c8_an_empty_list_is_done_at_once(coll: Communicator, simulated_cuda: SimulatedCuda) -> None:
    with simulated_cuda.paused():
        empty: list[Tensor] = []
        assert await coll.allreduce(empty, across=True) is empty
        assert await coll.broadcast(empty, across=True) is empty
        assert await coll.allgather([], across=True) == []
        assert await coll.reduce([], across=True) is None


Call = Callable[[Communicator, list[Tensor]], Any]
CALLS: dict[str, Call] = {
    "allreduce": lambda c, ts: c.allreduce(ts, across=True),
    "reduce": lambda c, ts: c.reduce(ts, across=True),
    "broadcast": lambda c, ts: c.broadcast(ts, across=True),
    "allgather": lambda c, ts: c.allgather(ts, across=True),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", CALLS)
async def test_c8_what_is_no_list_of_devices(coll: Communicator, simulated_cuda: SimulatedCuda, name: str) -> None:
    call, zero, one = CALLS[name], "cuda:0", "cuda:1"
    ones = torch.ones(3)
    for refused, why in (
        (spread([ones, ones[:2]], [zero, one]), r"float32\[3\], float32\[2\]: expected the same dtype and number"),
        (spread([ones, ones.int()], [zero, one]), r"float32\[3\], int32\[3\]: expected the same dtype and number"),
        ([ones, ones[:2]], r"float32\[3\], float32\[2\]: expected the same"),
        (spread([ones, ones], [zero, zero]), r"on cuda:0, cuda:0: expected each on a CUDA device of its own"),
        (spread([ones] * 3, [zero, one, zero]), r"3 tensors on .*: expected 2 at most, one per device"),
        (spread([ones, ones], ["cpu", zero]), r"on cpu, cuda:0: expected all on the CPU, or all on CUDA devices"),
    ):
        if name in REDUCTIONS and why.startswith("on cuda:0, cuda:0"):
            continue  # parts of a sum may be on one device
        before = coll.seq
        with pytest.raises(ValueError, match=f"across=True over (.* )?{why}"):
            call(coll, refused)
        assert coll.seq == before
    with pytest.raises(TypeError, match="expected a list of tensors"):
        call(coll, ones)  # type: ignore[arg-type]
    await call(coll, spread([ones, ones], [zero, one]))  # goes on


@pytest.mark.parametrize("name", CALLS)
def test_c8_lists_that_differ_between_ranks(name: str) -> None:
    def job(places: list[list[str]]) -> None:
        async def main(rank: int) -> None:
            async with init() as coll:
                ts = spread([torch.ones(3)] * len(places[rank]), places[rank])
                with pytest.raises(MismatchError) as raised:
                    await CALLS[name](coll, ts)
                assert "rank 0: " in str(raised.value)
                assert "rank 1: " in str(raised.value)

        with suppress(MismatchError, CommunicatorAborted):
            run_ranks(2, main, timeout=60)

    with simulated_cuda(devices=2, delay=0):
        for places in ([["cuda:0", "cuda:1"], ["cuda:0"]], [["cpu"] * 3, ["cpu"] * 2], [[], ["cuda:0"]]):
            if name not in REDUCTIONS or [] in places:  # else C15: the numbers of parts may differ
                job(places)
