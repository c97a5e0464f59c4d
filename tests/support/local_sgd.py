"""All ranks of a local SGD in one process, by the formulas of the papers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from aiodist.nn import Elastic, SlowMo
from tests.nn.conftest import Trial

EVERY = 3


def diloco(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.7, momentum=0.8, nesterov=True)


OUTER: dict[str, Any] = {"plain": None, "slowmo": SlowMo(0.6, lr=0.9), "diloco": diloco, "elastic": Elastic(0.2)}


class Alone:
    """All ranks in one process: their modules, the centre as a vector, and the formulas of the papers."""

    def __init__(self, size: int, optimizer: str, rule: str, *, overlap: bool = False) -> None:
        self.modules = [Trial.Mlp() for _ in range(size)]
        self.optimizers: list[Any] = [Trial.OPTIMIZERS[optimizer](list(m.parameters())) for m in self.modules]
        self.schedulers: list[Any] = []
        self.rule = rule
        self.overlap = overlap
        self.centre = self.vectors()[0]
        self.slow = torch.zeros_like(self.centre)
        self.rate = self.optimizers[0].param_groups[0]["lr"]
        self.sent: list[Tensor] | None = None
        self.since = 0

    def vectors(self) -> list[Tensor]:
        """Return the parameters of each rank, `(numel,)`."""
        return [parameters_to_vector(m.parameters()).detach().clone() for m in self.modules]

    def put(self, vectors: list[Tensor]) -> None:
        for module, vector in zip(self.modules, vectors, strict=True):
            vector_to_parameters(vector.clone(), module.parameters())

    def step(self, step: int, *, every: int = EVERY, fails: tuple[int, ...] = ()) -> None:
        """Make a local step on every rank but those whose forward `fails`."""
        if self.since == 0:
            self.rate = self.optimizers[0].param_groups[0]["lr"]
        for rank, (module, opt) in enumerate(zip(self.modules, self.optimizers, strict=True)):
            if rank not in fails:
                opt.zero_grad()
                Trial.loss(module, rank, step).backward()
                opt.step()
        for scheduler in self.schedulers:
            scheduler.step()
        self.since += 1
        if self.since == every:
            self.exchange()

    def exchange(self) -> None:
        self.since = 0
        self.settle()
        self.sent, self.sent_rate = self.vectors(), self.rate
        if not self.overlap:
            self.settle()

    def settle(self) -> None:
        if self.sent is None:
            return
        sent, self.sent = self.sent, None
        before, x = self.centre, self.vectors()
        away = before - torch.stack(sent).mean(0)
        if self.rule == "elastic":
            self.centre = before + 0.2 * torch.stack([s - before for s in sent]).sum(0)
            self.put([mine - 0.2 * (s - before) for mine, s in zip(x, sent, strict=True)])
            return
        if self.rule == "slowmo":
            self.slow = 0.6 * self.slow + away / self.sent_rate
            self.centre = before - 0.9 * self.sent_rate * self.slow
        elif self.rule == "diloco":
            self.slow = 0.8 * self.slow + away
            self.centre = before - 0.7 * (away + 0.8 * self.slow)
        else:
            self.centre = before - away
        self.put([self.centre + mine - s for mine, s in zip(x, sent, strict=True)])

    def flush(self) -> nn.Module:
        """Return what all ranks have in the end."""
        moved = self.since > 0
        self.settle()
        if moved:
            self.sent, self.sent_rate, self.since = self.vectors(), self.rate, 0
            self.settle()
        self.put([self.centre] * len(self.modules))
        return self.modules[0]
