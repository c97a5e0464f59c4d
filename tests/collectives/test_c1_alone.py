"""C1 with one rank: its tensor is the result, bit by bit, and nothing is computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from aiodist import Communicator
from aiodist.types import Op
from tests.support.simulated_cuda.device import SimulatedCuda

OPS = ["sum", "mean", "prod", "min", "max"]


@pytest.mark.ranks(1)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float32])
async def test_c1_alone_nothing_runs_on_the_device(
    coll: Communicator, simulated_cuda: SimulatedCuda, op: Op, kind: torch.dtype
) -> None:
    t = torch.randn(1000).to(coll.device, kind)
    before = simulated_cuda.launches.copy()
    await coll.allreduce(t, op)
    await coll.reduce(t, op)
    await coll.scan(t, op)
    assert simulated_cuda.launches == before


@pytest.mark.ranks(1)
@pytest.mark.parametrize("op", OPS)
async def test_c1_alone_the_result_is_the_input(coll: Communicator, op: Op) -> None:
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16)
    for given in (bits.view(torch.bfloat16), bits.view(torch.float16), bits.to(torch.float64) / 3):
        calls: list[Any] = [coll.allreduce, coll.reduce, coll.scan, coll.exscan]
        for call in calls:
            for out in (None, torch.empty_like(given)):
                t = given.clone()
                found = await call(t, op, out=out)
                assert found is (t if out is None else out)
                assert same_bits(found, given)
                assert same_bits(t, given)
        for out in (None, torch.empty(0, dtype=given.dtype)):
            assert same_bits(await coll.reduce_scatter(given, op, out=out), given)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype is b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
