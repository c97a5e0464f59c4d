"""Shared by the tests of the pipelined optimizer: models, steps with reductions held back, a plain loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aiodist import Communicator
from aiodist.handles import Handle, Operation, Progress
from aiodist.nn import DataParallel, PipelinedOptimizer
from aiodist.testing.seams.progress import reducer_of
from aiodist.types import Op
from tests.support.in_backward import in_backward
from tests.support.until import until

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Held:
    """The reductions of a net: made immediately, and reported when the test releases them."""

    def __init__(self, net: DataParallel, holding: Callable[[Tensor], bool] = lambda t: True) -> None:
        self.holding = holding
        self.issued: list[int] = []
        """How many elements each reduction had that was issued."""
        self._made = reducer_of(net).data.allreduce
        self._held: list[tuple[Handle[Any], Operation[None]]] = []
        vars(reducer_of(net).data)["allreduce"] = self._allreduce

    def __len__(self) -> int:
        return len(self._held)

    def _allreduce(self, t: Tensor, op: Op = "sum", **options: Any) -> Handle[Any]:
        if options:  # those of the end
            return self._made(t, op, **options)
        self.issued.append(t.numel())
        made: Handle[Any] = self._made(t, op)
        if not self.holding(t):
            return made
        told: Operation[None] = Operation(Progress.current(), "held", polled=False)
        self._held.append((made, told))
        return told.handle

    def release(self) -> None:
        held, self._held = self._held, []
        for made, told in held:
            made.add_done_callback(partial(_pass_on, told))

    def end(self) -> None:
        """Hold nothing from now on."""
        self.holding = lambda t: False
        self.release()


def _pass_on(told: Operation[None], made: Handle[Any]) -> None:
    error = made.exception()
    if error is None:
        told.resolve(None)
    else:
        told.reject(error)


class Course:
    """A model, the data of each rank and step, and the reference result of a plain loop in one process."""

    STEPS = 4
    hold = Held
    wait = staticmethod(in_backward)
    until = staticmethod(until)

    @staticmethod
    def mlp() -> nn.Module:
        torch.manual_seed(7)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3)).double()

    @staticmethod
    def chain() -> nn.Module:
        """Layers of one parameter each, of different sizes: 20, 30, 42, 56 and 24 elements."""
        torch.manual_seed(7)
        widths = (4, 5, 6, 7, 8, 3)
        layers = [nn.Linear(a, b, bias=False) for a, b in pairwise(widths)]
        return nn.Sequential(*layers).double()

    @staticmethod
    def sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.05, momentum=0.9)

    @staticmethod
    def adam(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam(params, lr=0.02)

    @staticmethod
    def batch(rank: int, step: int) -> Tensor:
        return torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * step + rank))

    @classmethod
    def loss_of(cls, module: Callable[[Tensor], Tensor], rank: int, step: int) -> Tensor:
        out = module(cls.batch(rank, step))
        return (out * torch.arange(1.0, out.shape[-1] + 1, dtype=out.dtype)).tanh().square().mean()

    @staticmethod
    async def split(module: nn.Module, coll: Communicator, bucket_bytes: int = 1) -> DataParallel:
        """Return a net, mostly with a bucket for each parameter."""
        return await DataParallel.create(module, coll, bucket_bytes=bucket_bytes, first_bucket_bytes=bucket_bytes)

    @classmethod
    def reference(
        cls,
        module: nn.Module,
        opt: torch.optim.Optimizer | None,
        size: int,
        steps: Iterable[int] = range(STEPS),
        between: Callable[[int], object] = lambda step: None,
        clip: float | None = None,
    ) -> nn.Module:
        """Train in this process with the data of all ranks, with `opt` or `sgd`: what must come out."""
        opt = opt or cls.sgd(module.parameters())
        for step in steps:
            opt.zero_grad()
            for rank in range(size):
                (cls.loss_of(module, rank, step) / size).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(module.parameters(), clip)
            opt.step()
            between(step)
        return module

    @classmethod
    def check(
        cls, module: nn.Module, expected: nn.Module, size: int, steps: Iterable[int] = range(STEPS), make: Make = sgd
    ) -> None:
        """Compare `module` with `expected` after `steps` of the plain loop."""
        cls.same(module, cls.reference(expected, make(list(expected.parameters())), size, steps))

    @staticmethod
    def same(module: nn.Module, expected: nn.Module) -> None:
        ours, theirs = dict(module.named_parameters()), dict(expected.named_parameters())
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)

    @classmethod
    async def train(
        cls,
        net: DataParallel,
        opt: PipelinedOptimizer,
        coll: Communicator,
        steps: Iterable[int] = range(STEPS),
        held: Held | None = None,
        between: Callable[[int], object] = lambda step: None,
        call: Any = None,
    ) -> None:
        """Make steps of the net, or of `call`; with `held` the reductions come only while the next forward runs."""
        for step in steps:
            work = asyncio.ensure_future(net.step(cls.loss_of, opt, call or net, coll.rank, step))
            if held is not None:
                await cls.until(work.done, held.release)
            await work
            between(step)
        flushed = asyncio.ensure_future(opt.flush())
        if held is not None:
            await cls.until(flushed.done, held.release)
        await flushed


@pytest.fixture
def course() -> type[Course]:
    return Course
