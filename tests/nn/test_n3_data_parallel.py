"""N3: what many ranks train equals what one process trains on the joined batch."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import aiodist
from aiodist import Communicator
from aiodist.nn import DataParallel, assert_synchronized
from aiodist.testing import run_ranks
from tests.nn.conftest import Trial

STEPS = 4
SIZES: dict[str, dict[str, Any]] = {
    "as they are": {},
    "one parameter each": Trial.SMALL,
    "a few": Trial.FEW,
}


@pytest.mark.drawn(1)
@pytest.mark.ranks(1, 2, 3, 4, 5)
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
async def test_n3_equals_one_process_with_the_joined_batch(coll: Communicator, optimizer: str) -> None:
    module = Trial.Mlp(0)
    opt = Trial.OPTIMIZERS[optimizer](module.parameters())
    for step in range(STEPS):
        Trial.step_alone(module, opt, coll.size, step)
    for sizes in SIZES.values():
        net = await DataParallel.create(Trial.Mlp(coll.rank), coll, **sizes)
        ours = Trial.OPTIMIZERS[optimizer](net.parameters())
        for step in range(STEPS):
            loss = await net.step(partial(Trial.loss, net, coll.rank, step), ours)
            assert not loss.requires_grad
        Trial.assert_same(net, module)
        await net.aclose()


@pytest.mark.drawn(2)
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("sizes", SIZES)
async def test_n3_the_loss_is_this_ranks_and_the_gradients_are_all_ranks(coll: Communicator, sizes: str) -> None:
    for op in ("mean", "sum"):
        net = await DataParallel.create(Trial.Mlp(), coll, op=op, **SIZES[sizes])
        alone = Trial.Mlp()
        for step in range(3):
            opt = torch.optim.SGD(net.parameters(), lr=0.0)
            loss = await net.step(partial(Trial.loss, net, coll.rank, step), opt)
            torch.testing.assert_close(loss, Trial.loss(alone, coll.rank, step).detach())
            alone.zero_grad()
            losses = torch.stack([Trial.loss(alone, rank, step) for rank in range(coll.size)])
            (losses.mean() if op == "mean" else losses.sum()).backward()
            Trial.assert_same_gradients(net, alone)
        await net.aclose()


@pytest.mark.ranks(2)
async def test_n3_statistics(coll: Communicator) -> None:
    net = await DataParallel.create(Trial.Mlp(), coll, **SIZES["one parameter each"])
    assert net.statistics().passes == 0
    assert net.statistics().hidden == 0
    opt = Trial.OPTIMIZERS["sgd"](net.parameters())
    for step in range(3):
        await net.step(partial(Trial.loss, net, coll.rank, step), opt)
    known = net.statistics()
    assert (known.passes, known.buckets) == (3, 18)
    assert known.nbytes == 3 * sum(p.nbytes for p in net.parameters())
    assert 0 < known.exposed_seconds <= known.reduction_seconds
    assert 0 <= known.hidden < 1


@dataclass(frozen=True)
class Plan:
    """A random model, and how it is trained."""

    widths: list[int]
    path: list[int]
    """Which layers run, in order; one may come several times."""
    frozen: set[int]
    optional: set[int]
    """Layers that each rank uses in some steps only."""
    bucket_bytes: int
    first_bucket_bytes: int
    op: Literal["mean", "sum"]
    optimizer: str
    every: int
    ranks: int
    seed: int


plans = st.builds(
    Plan,
    widths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    path=st.lists(st.integers(0, 5), min_size=1, max_size=8),
    frozen=st.sets(st.integers(1, 5), max_size=2),
    optional=st.sets(st.integers(0, 5), max_size=3),
    bucket_bytes=st.sampled_from([1, 200, 800, 1 << 20]),
    first_bucket_bytes=st.sampled_from([1, 100, 1 << 20]),
    op=st.sampled_from(["mean", "sum"]),
    optimizer=st.sampled_from(["sgd", "momentum", "adam"]),
    every=st.integers(1, 2),
    ranks=st.integers(1, 4),
    seed=st.integers(0, 9),
)


class Drawn(nn.Module):
    """Residual layers from 6 features through a width to 6."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        torch.manual_seed(plan.seed)
        self.plan = plan
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(6, w), nn.Tanh(), nn.Linear(w, 6)) for w in plan.widths])
        self.head = nn.Linear(6, 3)
        self.double()
        for i in plan.frozen:
            if i < len(plan.widths):
                self.layers[i].requires_grad_(False)

    def forward(self, x: Tensor, rank: int, step: int) -> Tensor:
        rng = random.Random(f"{rank} {step}")
        for i in self.plan.path:
            if i < len(self.plan.widths) and (i not in self.plan.optional or rng.random() < 0.5):
                x = x + self.layers[i](x)
        return self.head(x)  # type: ignore[no-any-return]


@pytest.mark.thorough
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan=plans)
def test_n3_random_models_equal_one_process(plan: Plan) -> None:
    def loss(module: Any, rank: int, step: int) -> Tensor:
        x, y = Trial.batch(rank, step)
        return mse_loss(module(x, rank, step), y)

    steps = 4
    make: Callable[[], nn.Module] = lambda: Drawn(plan)  # noqa: E731
    expected = Trial.alone(
        plan.ranks, steps, make=make, loss=loss, optimizer=plan.optimizer, op=plan.op, every=plan.every
    )

    async def main() -> None:
        async with aiodist.init() as coll:
            sizes: dict[str, Any] = {"bucket_bytes": plan.bucket_bytes, "first_bucket_bytes": plan.first_bucket_bytes}
            net = await DataParallel.create(make(), coll, op=plan.op, **sizes)
            opt = Trial.OPTIMIZERS[plan.optimizer](list(net.parameters()))
            for step in range(steps):
                if plan.every == 1:
                    await net.step(partial(loss, net, coll.rank, step), opt)
                    continue
                if step % 2 == 0:
                    opt.zero_grad()
                    with net.no_sync():
                        await net.backward(loss(net, coll.rank, step))
                else:
                    await net.backward(loss(net, coll.rank, step))
                    await net.submit(opt.step)
            Trial.assert_same(net, expected)
            await assert_synchronized(net.module, coll)

    run_ranks(plan.ranks, main, plan.seed)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
async def test_n3_a_forward_that_changes_parameters_is_refused(
    coll: Communicator, kind: type[nn.Embedding | nn.EmbeddingBag]
) -> None:
    """Each rank would scale the rows of its own batch."""
    module = nn.ModuleDict({"words": kind(4, 2, max_norm=1.0)})
    if coll.size == 1:
        await DataParallel.create(module, coll)
        return
    with pytest.raises(ValueError, match=r"embedding 'words' has max_norm=1.0"):
        await DataParallel.create(module, coll)
    module["words"].requires_grad_(False)
    await DataParallel.create(nn.ModuleList([module, nn.Linear(1, 1)]), coll)
