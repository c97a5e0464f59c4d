"""N3: an optimizer that has none of the net's parameters is refused, for it would train nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aiodist import Communicator, Engine, nn
from aiodist.ps import EASGD, Downpour
from tests.nn.conftest import Trial

SGD = Trial.OPTIMIZERS["sgd"]
FEW = "0 of its 6 parameters are among those of this net"


@pytest.mark.ranks(2)
async def test_n3_an_optimizer_of_another_module_is_refused(coll: Communicator) -> None:
    module, other = Trial.Mlp(), Trial.Mlp()
    async with await nn.DataParallel.create(module, coll) as net:
        with pytest.raises(ValueError, match=FEW):
            await net.step(lambda: Trial.loss(net, coll.rank, 0), SGD(other.parameters()))
        with pytest.raises(ValueError, match=FEW):
            await nn.LocalSGD.create(net, SGD(other.parameters()), every=2)
        with pytest.raises(ValueError, match=FEW):
            Engine(net, SGD(other.parameters()))
        with pytest.raises(ValueError, match=r"0 of its 6 parameters are among those of what make_optimizer"):
            await nn.PipelinedOptimizer.create(net, lambda _: SGD(other.parameters()))
        before = [p.detach().clone() for p in module.parameters()]
        await net.step(lambda: Trial.loss(net, coll.rank, 0), SGD(module[0].parameters()))  # of some of them
        moved = [not torch.equal(p, old) for p, old in zip(module.parameters(), before, strict=True)]
        assert moved == [True, True, False, False, False, False]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["pipelined", "sharded", "local"])
async def test_n3_a_driver_of_another_net_is_refused(coll: Communicator, kind: str) -> None:
    async def driver(net: nn.DataParallel) -> Any:
        if kind == "local":
            return await nn.LocalSGD.create(net, SGD(net.parameters()), every=2)
        return await (nn.PipelinedOptimizer if kind == "pipelined" else nn.ShardedOptimizer).create(net, SGD)

    async with (
        await nn.DataParallel.create(Trial.Mlp(), coll) as net,
        await nn.DataParallel.create(Trial.Mlp(), coll) as other,
    ):
        opt = await driver(other)
        with pytest.raises(ValueError, match=r"drives <DataParallel of Mlp .* expected one that was made for <DataPar"):
            await net.step(lambda: Trial.loss(net, coll.rank, 0), opt)
        with pytest.raises((ValueError, TypeError)):  # `LocalSGD` has no passes
            Engine(net, opt)
        await other.step(lambda: Trial.loss(other, coll.rank, 0), opt)
        await opt.flush()


@pytest.mark.parametrize("kind", [Downpour, EASGD])
def test_p8_an_optimizer_of_other_parameters_is_refused(kind: Any) -> None:
    how = {"n_push": 1, "n_pull": 1} if kind is Downpour else {"tau": 2, "alpha": 0.5}
    mine, other = Trial.Mlp(), Trial.Mlp()
    with pytest.raises(ValueError, match="0 of its 6 parameters are among those of this client"):
        kind(object(), mine, SGD(other.parameters()), **how)
    kind(object(), mine, SGD(mine[2].parameters()), **how)


class Copies(torch.optim.SGD):
    """An optimizer that steps copies of the parameters."""

    def __init__(self, params: Any, lr: float) -> None:
        self.given = list(params)
        super().__init__([p.detach().clone().requires_grad_() for p in self.given], lr)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        copies = self.param_groups[0]["params"]
        for copy, p in zip(copies, self.given, strict=True):
            copy.grad = p.grad
        super().step()
        with torch.no_grad():
            for copy, p in zip(copies, self.given, strict=True):
                p.copy_(copy)


@pytest.mark.ranks(2)
async def test_n3_an_optimizer_with_copies_is_not_refused(coll: Communicator) -> None:
    async with await nn.DataParallel.create(Trial.Mlp(), coll) as net:
        before = [p.detach().clone() for p in net.parameters()]
        await net.step(lambda: Trial.loss(net, coll.rank, 0), Copies(net.parameters(), 0.1))
        assert all(not torch.equal(p, old) for p, old in zip(net.parameters(), before, strict=True))
