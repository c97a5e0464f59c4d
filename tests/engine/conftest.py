"""Helpers of the tests of the engine: a small model, the batches of each rank, and the loop of one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import Optimizer

from tests.support.one_thread import one_thread as one_thread

Pairs = list[tuple[Tensor, Tensor]]


class Job:
    """What is trained: a model in float64, and batches of odd sizes that are other ones for each rank."""

    QUIET: ClassVar[dict[str, Any]] = {"progress": False}
    OPTIMIZERS: ClassVar[dict[str, Callable[[Any], Optimizer]]] = {
        "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
        "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        "adam": lambda params: torch.optim.Adam(params, lr=0.02),
    }

    @staticmethod
    def build() -> nn.Sequential:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()

    @staticmethod
    def pairs(rank: int, batches: int, samples: int = 3) -> Pairs:
        random = torch.Generator().manual_seed(17 + rank)
        shapes = (samples, 5), (samples, 3)
        return [
            tuple(torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes)  # type: ignore[misc]
            for _ in range(batches)
        ]

    @classmethod
    def alone(
        cls,
        size: int,
        counts: Sequence[int],
        *,
        epochs: int = 1,
        optimizer: str = "sgd",
        loss: Callable[[Tensor, Tensor], Tensor] = mse_loss,
        make: Callable[[], nn.Module] | None = None,
    ) -> nn.Module:
        """Return what one process makes of the data of all ranks: in each step the mean over those that have some."""
        module = (make or cls.build)()
        opt = cls.OPTIMIZERS[optimizer](module.parameters())
        data = [cls.pairs(rank, counts[rank]) for rank in range(size)]
        for _ in range(epochs):
            for step in range(max(counts)):
                opt.zero_grad()
                having = [pairs[step] for pairs in data if step < len(pairs)]
                for x, y in having:
                    (loss(module(x), y) / len(having)).backward()
                opt.step()
        return module

    @staticmethod
    def assert_same(seen: Any, expected: nn.Module) -> None:
        ours, theirs = (dict(of.named_parameters()) for of in (seen, expected))
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)


@pytest.fixture
def job() -> type[Job]:
    return Job
