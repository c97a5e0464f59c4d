"""P4: synchronous workers with a server-side optimizer equal one process with torch's own on the joined batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aiodist import Communicator
from aiodist.ps import SGD, Adagrad, Adam, ParameterServer, RMSprop, Rule, Synchronous

STEPS = 20
BATCH = 4  # of each worker
SPLIT = 32  # bytes: four doubles are cut already

OPTIMIZERS: dict[str, tuple[Rule, type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (SGD(0.01), torch.optim.SGD, {"lr": 0.01}),
    "momentum": (SGD(0.005, momentum=0.9), torch.optim.SGD, {"lr": 0.005, "momentum": 0.9}),
    "nesterov": (
        SGD(0.005, momentum=0.9, nesterov=True),
        torch.optim.SGD,
        {"lr": 0.005, "momentum": 0.9, "nesterov": True},
    ),
    "adam": (Adam(lr=0.01), torch.optim.Adam, {"lr": 0.01}),
    "adagrad": (Adagrad(lr=0.05), torch.optim.Adagrad, {"lr": 0.05}),
    "rmsprop": (RMSprop(lr=0.01), torch.optim.RMSprop, {"lr": 0.01}),
}


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1, bias=False)).double()


def batch(step: int, worker: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(100 * step + worker)
    x = torch.randn(BATCH, 6, generator=draw, dtype=torch.float64)
    return x, x.sum(1, keepdim=True).sin()


def lose(model: nn.Module, batches: list[tuple[Tensor, Tensor]], reduction: str) -> None:
    """Leave the gradient of the joined batches' loss in the parameters."""
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    model.zero_grad()
    nn.functional.mse_loss(model(x), y, reduction=reduction).backward()


def groups(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the weights, which decay, and the biases, which do not."""
    named = list(model.named_parameters())
    return [p for name, p in named if name.endswith("weight")], [p for name, p in named if name.endswith("bias")]


def trained_alone(case: str, workers: int, reduction: str, *, change: bool) -> nn.Module:
    """Return the net after torch's optimizer, in one process."""
    _, kind, settings = OPTIMIZERS[case]
    model = net()
    weights, biases = groups(model)
    decay = 0.1 if change else 0.0
    make: Any = kind
    optimizer = make([{"params": weights, "weight_decay": decay}, {"params": biases}], **settings)
    for step in range(STEPS):
        if change and step == STEPS // 2:
            for group in optimizer.param_groups:
                group["lr"] = settings["lr"] / 4
            optimizer.param_groups[0]["weight_decay"] = 0.01
        lose(model, [batch(step, worker) for worker in range(workers)], reduction)
        optimizer.step()
    return model


async def train(
    coll: Communicator, cases: tuple[str, ...], servers: int | None, reduction: Any, *, change: bool = False
) -> None:
    """Train a net for each optimizer, all of them at once, and compare it with the one that was trained alone."""
    rules = {case: OPTIMIZERS[case][0] for case in cases}
    nets = {case: copy.deepcopy(net()) for case in rules}
    async with ParameterServer(
        coll, rules=rules, consistency=Synchronous(reduction), servers=servers, split_bytes=SPLIT
    ) as ps:
        if not ps.is_worker:
            return
        me = ps.workers.index(ps.rank)
        for case, model in nets.items():
            names = [f"{case}.{name}" for name, _ in model.named_parameters()]
            await ps.init(names, list(model.parameters()), rule=case)
            if change and me == 0:
                await ps.configure(groups(model)[0], weight_decay=0.1)
        for step in range(STEPS):
            for case, model in nets.items():
                if change and step == STEPS // 2 and me == len(ps.workers) - 1:
                    # Ordered before this worker's next push, so before the next step, which needs it.
                    ps.configure(groups(model)[0], weight_decay=0.01).add_done_callback(lambda done: done.result())
                    await ps.configure(model, lr=OPTIMIZERS[case][2]["lr"] / 4)
                lose(model, [batch(step, me)], reduction)
            for done in [ps.push_pull(model) for model in nets.values()]:
                await done
        for case, model in nets.items():
            alone = trained_alone(case, len(ps.workers), reduction, change=change)
            for (name, p), expected in zip(model.named_parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(p, expected, rtol=0, atol=1e-6, msg=f"{case} {name}")


@pytest.mark.thorough
@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize(
    ("reduction", "cases"), [("sum", ("momentum", "adam", "adagrad")), ("mean", ("sgd", "nesterov", "rmsprop"))]
)
async def test_p4_workers_that_serve_equal_one_process(
    coll: Communicator, reduction: str, cases: tuple[str, ...]
) -> None:
    await train(coll, cases, None, reduction)


@pytest.mark.drawn(1)
@pytest.mark.ranks(2, 4)
async def test_p4_workers_with_servers_of_their_own_equal_one_process(coll: Communicator) -> None:
    await train(coll, ("sgd", "momentum", "rmsprop"), coll.size // 2, "sum" if coll.size == 2 else "mean")


@pytest.mark.thorough
@pytest.mark.ranks(4)
@pytest.mark.parametrize("servers", [None, 1, 3])
async def test_p4_settings_of_groups_change_between_two_steps(coll: Communicator, servers: int | None) -> None:
    await train(coll, ("nesterov", "adam"), servers, "mean", change=True)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("configures", [1, 3])
async def test_p4_a_change_is_between_the_same_two_pushes_on_all_shards(coll: Communicator, configures: int) -> None:
    w = torch.zeros(30, dtype=torch.float64)
    async with ParameterServer(coll, {"w": w}, rule=SGD(1.0), split_bytes=8) as ps:
        for i in range(60):
            ps.push("w", torch.ones_like(w))
            if i % 20 == 10 and coll.rank < configures:
                ps.configure("w", lr=float(i + coll.rank)).add_done_callback(lambda done: done.result())
            if i % 5 == coll.rank:
                now = await ps.pull("w", torch.empty_like(w))
                assert now.unique().numel() == 1, "the shards do not agree on which pushes had which lr"
        await ps.sync()
        await ps.barrier()
        assert (await ps.pull()).pop().unique().numel() == 1
        assert w[0] < -180
