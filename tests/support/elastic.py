"""Trainings of elastic jobs whose ranks are killed at any moment, and the same training in one process."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from aiodist.testing import kill_rank, run_ranks

SAMPLES = 12


def build(seed: int) -> nn.Module:
    """Return a module in float64, other on each rank at first."""
    generator = torch.Generator().manual_seed(seed)
    module = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 3)
    module.register_buffer("seen", torch.tensor(float(seed)))
    return module


def share(module: Any, step: int, rank: int, size: int) -> Tensor:
    """Return a rank's part of the loss of a step's batch, which is a sum over its samples."""
    at = torch.arange(SAMPLES, dtype=torch.float64)[rank::size, None] + step
    x, y = (at * torch.arange(1, 6)).sin(), (at * torch.arange(1, 4)).cos()
    loss: Tensor = (module(x) - y).square().sum() / SAMPLES
    return loss


def stepped(module: nn.Module, opt: torch.optim.Optimizer, scheduler: Any = None, *, steps: Iterable[int]) -> nn.Module:
    """Return `module` after these steps of one process on the joined batches."""
    for step in steps:
        opt.zero_grad()
        share(module, step, 0, 1).backward()
        opt.step()
        if scheduler is not None:
            scheduler.step()
    return module


def bytes_of(module: nn.Module, *states: Any) -> list[bytes]:
    """Return all numbers of a module and of some states, to be compared bit by bit."""
    held: list[Any] = [module.state_dict(), *(each.state_dict() for each in states)]
    return [
        each.clone().view(-1).view(torch.uint8).numpy().tobytes() if isinstance(each, Tensor) else repr(each).encode()
        for each in torch.utils._pytree.tree_leaves(held)
    ]


async def killed_after(turns: int, work: Any) -> Any:
    """Return the result of `work`; the rank dies after `turns` iterations of the loop."""
    task = asyncio.ensure_future(work)
    for _ in range(turns):
        await asyncio.sleep(0)
    kill_rank()
    return await task


def survivors(
    size: int, work: Callable[[int], Any], seed: int, *, within: int, drawn: object = None, dead: int = 2
) -> list[Any]:
    """Return the results of `work` on the ranks that live; `dead` ranks are killed within `within` loop iterations.

    The ranks and the moments are drawn from `drawn`, or else from the `seed` of the interleaving.
    """
    draws = random.Random(f"{drawn}" if drawn is not None else seed)
    turns = {number: draws.randrange(within) for number in draws.sample(range(size), dead)}

    async def main(number: int) -> Any:
        mine = work(number)
        return await (killed_after(turns[number], mine) if number in turns else mine)

    return [each for each in run_ranks(size, main, seed, elastic=(1, 4)) if each is not None]
