"""Fixtures of checkpoint tests: a training with equal results on any number of ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from aiodist import Communicator
from aiodist.nn import DataParallel


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Use one thread for torch, and restore the generators after the test."""
    threads = torch.get_num_threads()
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


class Training:
    """A small net in float64, its Adam, and steps in which every rank has the same batch.

    So its results depend on the number of ranks by rounding alone, and not at all where that is a power of two.
    """

    def __init__(self, net: DataParallel, opt: torch.optim.Optimizer) -> None:
        self.net = net
        self.opt = opt

    @staticmethod
    def module(seed: int = 0) -> nn.Sequential:
        """Return 33,000 weights in a matrix that is divided among ranks, and some small ones."""
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(110, 301), nn.BatchNorm1d(301), nn.Tanh(), nn.Linear(301, 3)).double()

    @classmethod
    async def make(cls, coll: Communicator, seed: int = 0) -> Training:
        """Return a new one."""
        net = await DataParallel.create(cls.module(seed), coll)
        return cls(net, torch.optim.Adam(net.parameters(), lr=0.01, amsgrad=True))

    async def steps(self, first: int, last: int) -> list[float]:
        """Return the losses of these steps."""
        return [float(await self.net.step(lambda i=i: self._loss(i), self.opt)) for i in range(first, last)]

    def _loss(self, step: int) -> Tensor:
        drawn = torch.randn(4, 113, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        return mse_loss(self.net(drawn[:, :110]), drawn[:, 110:])

    def state(self) -> dict[str, Any]:
        """Return copies of all tensors of net and optimizer."""
        found = {f"net {name}": t.clone() for name, t in self.net.state_dict().items()}
        for number, state in self.opt.state_dict()["state"].items():
            found |= {f"opt {number} {name}": t.clone() for name, t in state.items()}
        return found


def assert_same(seen: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare bit by bit."""
    assert seen.keys() == expected.keys()
    for name, t in expected.items():
        assert seen[name].dtype is t.dtype, name
        assert torch.equal(seen[name], t), name


@pytest.fixture
def training() -> type[Training]:
    return Training
