"""Shared by the tests of nn: small models, data for each rank and step, and a training loop in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import Optimizer

from aiodist import Communicator
from aiodist.nn import DataParallel, PipelinedOptimizer
from tests.support.one_thread import one_thread as one_thread

Make = Callable[[], nn.Module]
Loss = Callable[[Any, int, int], Tensor]


class Mlp(nn.Sequential):
    """Three layers in float64, the same for the same seed."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 3))
        self.double()


class Trial:
    """A model, its training data, and the reference result of one process."""

    OPTIMIZERS: ClassVar[dict[str, Callable[[Any], Optimizer]]] = {
        "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
        "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
        "adam": lambda params: torch.optim.Adam(params, lr=0.02, weight_decay=0.01),
    }
    Mlp = Mlp
    SMALL: ClassVar[dict[str, Any]] = {"bucket_bytes": 1, "first_bucket_bytes": 1}
    """A bucket for each parameter."""
    FEW: ClassVar[dict[str, Any]] = {"bucket_bytes": 600, "first_bucket_bytes": 100}

    @classmethod
    async def made(
        cls,
        coll: Communicator,
        optimizer: str = "sgd",
        module: nn.Module | None = None,
        *,
        pipelined: bool = False,
        **options: Any,
    ) -> tuple[DataParallel, Any]:
        """Return a net on `coll` and its optimizer."""
        net = await DataParallel.create(module or cls.Mlp(), coll, **options)
        make = cls.OPTIMIZERS[optimizer]
        return net, await PipelinedOptimizer.create(net, make) if pipelined else make(net.parameters())

    @classmethod
    async def train(cls, net: DataParallel, opt: Any, steps: range, rank: int) -> None:
        for step in steps:
            await net.step(cls.loss, opt, net, rank, step)

    @staticmethod
    def batch(rank: int, step: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
        """Return what `rank` trains on in a step: `(4, 6)` and `(4, 3)`."""
        drawn = torch.randn(4, 9, generator=torch.Generator().manual_seed(1000 * rank + step), dtype=torch.float64)
        return drawn[:, :6].to(dtype), drawn[:, 6:].to(dtype)

    @classmethod
    def loss(cls, module: Any, rank: int, step: int) -> Tensor:
        x, y = cls.batch(rank, step)
        return mse_loss(module(x), y)

    @classmethod
    def joined(cls, module: nn.Module, size: int, step: int) -> Tensor:
        """Return the loss of the joined batch of all ranks."""
        x, y = (torch.cat(parts) for parts in zip(*(cls.batch(rank, step) for rank in range(size)), strict=True))
        return mse_loss(module(x), y)

    @classmethod
    def step_alone(cls, module: nn.Module, opt: Optimizer, size: int, step: int) -> None:
        """Make a step of one process on the joined batch of all ranks."""
        opt.zero_grad()
        cls.joined(module, size, step).backward()
        opt.step()

    @classmethod
    def alone(
        cls,
        size: int,
        steps: int,
        *,
        make: Make = Mlp,
        loss: Loss | None = None,
        optimizer: str | Callable[[Any], Optimizer] = "sgd",
        op: str = "mean",
        every: int = 1,
    ) -> nn.Module:
        """Return the module after `steps` steps of one process, on the losses of all ranks; one update in `every`."""
        module = make()
        opt = (cls.OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer)(list(module.parameters()))
        for step in range(steps):
            if step % every == 0:
                opt.zero_grad()
            losses = [(loss or cls.loss)(module, rank, step) for rank in range(size)]
            total = torch.stack(losses).sum()
            (total / size if op == "mean" else total).backward()
            if step % every == every - 1:
                opt.step()
        return module

    @staticmethod
    def assert_same(seen: Any, expected: nn.Module, **within: float) -> None:
        """Compare all parameters on the host: relative 1e-6 for float64, by the dtype otherwise, or as it is given."""
        ours = dict(seen.named_parameters())
        theirs = dict(expected.named_parameters())
        assert ours.keys() == theirs.keys()
        for name, parameter in ours.items():
            how: dict[str, Any] = within or ({"rtol": 1e-6, "atol": 1e-9} if parameter.dtype is torch.float64 else {})
            torch.testing.assert_close(parameter.cpu(), theirs[name].cpu(), msg=f"{name}: ".__add__, **how)

    @staticmethod
    def assert_same_gradients(seen: Any, expected: nn.Module) -> None:
        """Compare all gradients, None with None."""
        for (name, ours), theirs in zip(seen.named_parameters(), expected.parameters(), strict=True):
            if theirs.grad is None:
                assert ours.grad is None, name
            else:
                assert ours.grad is not None, name
                torch.testing.assert_close(ours.grad, theirs.grad, msg=f"{name}: ".__add__)
