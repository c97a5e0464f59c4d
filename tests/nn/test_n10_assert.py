"""N10: tensors, modules and numbers that are not the same on all ranks are named, on every rank."""

import asyncio
import math
import re
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import aiodist
from aiodist import Communicator
from aiodist.nn import assert_synchronized, synchronize_parameters
from aiodist.testing import run_ranks

ARITHMETIC = (torch.uint8, torch.int8, torch.int64, torch.bfloat16, torch.float64)


def layer() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7))


ALIKE: dict[str, Callable[[], Any]] = {
    "number": lambda: 3.5,
    "whole number": lambda: -(10**30),
    "other numbers": lambda: [True, 1 + 2j, Fraction(1, 3), np.float32(0.1)],
    "nan": lambda: math.nan,
    "inf": lambda: [math.inf, torch.tensor([1.0, -math.inf])],
    "none": lambda: [None, torch.ones(2)],
    "tensor": lambda: torch.linspace(-1, 1, 7),
    "nan in a tensor": lambda: torch.tensor([1.0, math.nan]),
    "empty": lambda: torch.empty(0, 3),
    "module": layer,
    "nothing": list,
    "nested": lambda: {"a": [torch.ones(2), (1, 2.0)], 3: {"b": layer()}},
    "sparse": lambda: torch.eye(3).to_sparse(),
    "optimizer": lambda: stepped(layer()),
    **{str(dtype): partial(torch.arange, 5, dtype=dtype) for dtype in ARITHMETIC},
    "bool": lambda: torch.tensor([True, False, True]),
    "half": lambda: torch.arange(5).half(),
    "unsigned": lambda: torch.arange(5).to(torch.uint16),
    "complex": lambda: torch.arange(5).to(torch.complex64),
    "float8": lambda: torch.arange(5).to(torch.float8_e4m3fn),
}


def stepped(module: nn.Module) -> dict[str, Any]:
    opt = torch.optim.Adam(module.parameters())
    module(torch.ones(3, 5)).sum().backward()
    opt.step()
    return opt.state_dict()


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("what", ALIKE)
async def test_n10_what_is_alike_passes(coll: Communicator, what: str) -> None:
    before = coll.seq
    await assert_synchronized(ALIKE[what](), coll)
    assert coll.seq == before + 2


def other_layer(rank: int) -> nn.Module:
    module = layer()
    if rank:
        module[1].running_mean += 1  # type: ignore[index]
    return module


DIFFERENT: dict[str, tuple[Callable[[int], Any], str]] = {
    "number": (lambda rank: 1.0 + rank, r"x: rank 0: abs-mean 1\.0, abs-variance 0\.0; rank.*: abs-mean 2\.0"),
    "tensor": (lambda rank: torch.ones(3) * (rank + 1), r"x: rank 0: abs-mean 1\.0, .*; rank.*: abs-mean 2\.0"),
    "variance": (
        lambda rank: torch.tensor([2.0, 2.0]) if rank == 0 else torch.tensor([1.0, -3.0]),
        r"x: rank 0: abs-mean 2\.0, abs-variance 0\.0; rank.*: abs-mean 2\.0, abs-variance 1\.0",
    ),
    "module": (other_layer, r"1\.running_mean: rank 0: abs-mean 0\.0"),
    "list": (lambda rank: [1, 2, rank, 10 * rank], r"x\[2\] and 1 more entries: rank 0: abs-mean 0\.0"),
    "dict": (lambda rank: {"a": 1, "b": [torch.tensor(rank)]}, r"x\['b'\]\[0\]: rank 0: abs-mean 0\.0"),
    "module in a dict": (lambda rank: {"net": other_layer(rank)}, r"x\['net'\]\.1\.running_mean"),
    "bool": (lambda rank: torch.tensor([True, rank == 0]), r"x: rank 0: abs-mean 1\.0.*abs-mean 0\.5"),
    "integer": (lambda rank: torch.tensor([-(2**63), 2**62 * min(rank, 1)]), r"x: rank 0: abs-mean 4\.6"),
    "complex": (lambda rank: torch.tensor([3 + 4j * (rank + 1)]), r"x: rank 0: abs-mean 5\.0"),
    "nan on a rank": (lambda rank: math.nan if rank == 0 else 1.0, r"x: rank 0: abs-mean nan.*rank.*: abs-mean 1\.0"),
    "inf on a rank": (lambda rank: torch.tensor([math.inf if rank == 0 else 1.0]), r"x: rank 0: abs-mean inf"),
    "fewer": (lambda rank: [1.0] * (3 - min(rank, 1)), r"rank 0: x\[2\] number; rank.*: \(missing\)"),
    "shape": (lambda rank: torch.ones(3 + min(rank, 1)), r"rank 0: x float32\[3\]; rank.*: x float32\[4\]"),
    "dtype": (lambda rank: torch.ones(3, dtype=torch.float64 if rank else torch.float32), r"x float32.*x float64"),
    "none": (lambda rank: [torch.ones(1) if rank else None], r"rank 0: x\[0\] None; rank.*: x\[0\] float32\[1\]"),
    "key": (lambda rank: {"b" if rank else "a": 1.0}, r"rank 0: x\['a'\] number; rank.*: x\['b'\] number"),
}


@pytest.mark.ranks(2, 3)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", DIFFERENT)
async def test_n10_what_differs_is_named_on_every_rank(coll: Communicator, what: str) -> None:
    make, text = DIFFERENT[what]
    with pytest.raises(aiodist.MismatchError, match=text) as caught:
        await assert_synchronized(make(coll.rank), coll)
    assert "ranks disagree" in str(caught.value)
    assert caught.value.rank == coll.rank
    assert "rank" in str(caught.value).split("; ")[1]
    await assert_synchronized(coll.size, coll)  # all goes on


@pytest.mark.ranks(5)
async def test_n10_the_ranks_are_told_apart(coll: Communicator) -> None:
    text = r"ranks 0, 2, 4: abs-mean 0\.0, .*; rank 1: abs-mean 1\.0, .*; rank 3: abs-mean 3\.0, "
    with pytest.raises(aiodist.MismatchError, match=text):
        await assert_synchronized(torch.tensor(coll.rank * (coll.rank % 2)), coll)


@pytest.mark.ranks(2)
async def test_n10_the_tolerance_is_relative(coll: Communicator) -> None:
    t = torch.linspace(1, 1e6, 999, dtype=torch.float64)
    await assert_synchronized(t * (1 + 0.4e-7 * coll.rank), coll)  # the variance differs by twice that
    with pytest.raises(aiodist.MismatchError):
        await assert_synchronized(t * (1 + 1.5e-7 * coll.rank), coll)
    await assert_synchronized(t * (1 + 1.5e-7 * coll.rank), coll, rtol=1e-6)
    await assert_synchronized(1e-300 * (1 + 0.5e-7 * coll.rank), coll)
    with pytest.raises(aiodist.MismatchError):
        await assert_synchronized(1e-300 * (1 + coll.rank), coll)
    with pytest.raises(aiodist.MismatchError):
        await assert_synchronized(1.0 + 1e-15 * coll.rank, coll, rtol=0)
    constant = torch.full((1000,), 0.1, dtype=torch.float64)
    constant[0] += 1e-16 * coll.rank  # rounding: both are constant
    await assert_synchronized(constant, coll)
    with pytest.raises(aiodist.MismatchError, match=r"disagree on rtol of .*: rank 0: 1e-07; rank 1: 0\.1"):
        await assert_synchronized(1, coll, rtol=(1e-7, 0.1)[coll.rank])


@pytest.mark.ranks(2)
async def test_n10_large_tensors_and_any_layout(coll: Communicator) -> None:
    t = torch.rand(700, 900, generator=torch.Generator().manual_seed(1), dtype=torch.float64)  # 5 MB: in a thread
    t = t if coll.rank == 0 else t.t().contiguous().t()  # the same, summed in another order
    await assert_synchronized([t, t[:, ::3]], coll)
    other = t.clone()
    other[13, 17] += coll.rank
    with pytest.raises(aiodist.MismatchError, match=r"x\[1\]: rank 0: abs-mean 0\.5"):
        await assert_synchronized([t, other], coll)


@pytest.mark.ranks(1, 2)
async def test_n10_mistakes_are_told_before_anything_is_sent(coll: Communicator) -> None:
    before = coll.seq
    with pytest.raises(TypeError, match=r"x\['name'\] is str: expected a tensor, a module, a number"):
        await assert_synchronized({"name": "text"}, coll)
    with pytest.raises(TypeError, match=r"x is set: expected"):
        await assert_synchronized({1, 2}, coll)
    with pytest.raises(ValueError, match=r"'0\.weight' is not initialised yet"):
        await assert_synchronized(nn.Sequential(nn.LazyLinear(3)), coll)
    with pytest.raises(ValueError, match=r"'x' lives on the meta device"):
        await assert_synchronized(torch.empty(2, device="meta"), coll)
    with pytest.raises(ValueError, match=r"rtol=-1: expected"):
        await assert_synchronized(1, coll, rtol=-1)
    assert coll.seq == before


@pytest.mark.ranks(2)
async def test_n10_in_an_evaluation_task_under_inference_mode(coll: Communicator) -> None:
    with torch.inference_mode():
        await assert_synchronized([layer(), 1.0], coll)
        with pytest.raises(aiodist.MismatchError):
            await assert_synchronized(torch.ones(3) * coll.rank, coll)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("work", [assert_synchronized, synchronize_parameters])
@pytest.mark.parametrize("seed", range(2))
def test_n10_n1_a_rank_that_is_cancelled_amid_it(work: Callable[..., Any], seed: int) -> None:
    """The others raise, unless all its figures are in flight."""

    async def program(ticks: int) -> str:
        async with aiodist.init() as coll:
            task = asyncio.ensure_future(work(layer(), coll))
            if coll.rank == 1:
                for _ in range(ticks):
                    await asyncio.sleep(0)
                task.cancel()
            try:
                async with asyncio.timeout(1):
                    await task
            except (asyncio.CancelledError, aiodist.CommunicatorAborted) as error:
                return f"{error!r}"
            return "done"

    seen = [run_ranks(3, partial(program, ticks), seed) for ticks in range(1, 40)]
    for first, mine, third in seen:
        told = f"rank 1 left {work.__name__}: CancelledError()" in first and mine == "CancelledError()"
        assert first == third
        assert told or first == "done"
    assert seen[0][0] != "done"
    if work is synchronize_parameters:  # the other waits for a thread
        assert seen[-1] == ["done"] * 3


@pytest.mark.ranks(2)
@pytest.mark.parametrize("numel", [1, 2, 7, 1000, 1 << 18, (1 << 18) + 1, 600_001])
async def test_n10_figures_against_numpy(coll: Communicator, numel: int) -> None:
    drawn = torch.randn(numel, generator=torch.Generator().manual_seed(numel), dtype=torch.float64)
    kinds = (drawn, drawn.float() + 1e4, (100 * drawn).to(torch.int16), drawn.bfloat16(), torch.complex(drawn, drawn))
    for t in kinds:
        wide = np.abs(t.to(torch.complex128 if t.is_complex() else torch.float64).numpy())
        with pytest.raises(aiodist.MismatchError) as caught:
            await assert_synchronized(torch.full_like(t, 90) if coll.rank else t, coll)
        found = re.search(r"rank 0: abs-mean (\S+), abs-variance (\S+);", str(caught.value))
        assert found is not None
        mean, variance = map(float, found.groups())
        assert mean == pytest.approx(wide.mean(), rel=1e-13)
        assert variance == pytest.approx(wide.var(), rel=1e-10, abs=1e-300)


async def test_n10_what_cannot_be_compared_leaves_the_communicator_alone() -> None:
    async with aiodist.init() as coll:
        with pytest.raises(OverflowError):
            await assert_synchronized(10**400, coll)
        await coll.barrier()
