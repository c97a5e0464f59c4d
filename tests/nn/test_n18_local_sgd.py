"""N18: steps of one rank, and averages of parameters every few steps, against a plain loop over all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.optim.lr_scheduler import ExponentialLR

import aiodist
from aiodist import Communicator
from aiodist.nn import DataParallel, Elastic, LocalSGD, SlowMo, assert_synchronized
from tests.nn.conftest import Trial
from tests.support.local_sgd import EVERY, OUTER, Alone, diloco

each_rule = pytest.mark.parametrize("rule", OUTER)
each_overlap = pytest.mark.parametrize("overlap", [False, True], ids=["waits", "overlaps"])
each_optimizer = pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])


@pytest.mark.drawn(1)
@pytest.mark.ranks(1, 2, 3)
@each_optimizer
async def test_n18_every_step_is_the_plain_loop(coll: Communicator, optimizer: str) -> None:
    net = await DataParallel.create(Trial.Mlp(), coll, **Trial.FEW)
    local = await LocalSGD.create(net, Trial.OPTIMIZERS[optimizer](net.parameters()), every=1)
    await Trial.train(net, local, range(6), coll.rank)
    assert not local.pending
    assert net.statistics().passes == 6
    Trial.assert_same(net, Trial.alone(coll.size, 6, optimizer=optimizer))


@pytest.mark.ranks(2, 3)
async def test_n18_averages_of_one_step_are_reduced_gradients(coll: Communicator) -> None:
    """An outer step of length 1 is the average."""
    net = await DataParallel.create(Trial.Mlp(), coll, **Trial.FEW)
    local = await LocalSGD.create(net, Trial.OPTIMIZERS["sgd"](net.parameters()), every=1, outer=SlowMo(0.0))
    await Trial.train(net, local, range(6), coll.rank)
    assert not local.pending
    assert (net.statistics().passes, net.steps_done) == (6, 6)
    Trial.assert_same(net, Trial.alone(coll.size, 6))


@pytest.mark.drawn(4)
@pytest.mark.ranks(1, 2, 3, 4)
@each_rule
@each_overlap
@each_optimizer
async def test_n18_as_the_papers_say(coll: Communicator, optimizer: str, rule: str, overlap: bool) -> None:
    """Each rank's own parameters after every step, and the common ones at the end, match the papers' formulas."""
    net, opt = await Trial.made(coll, optimizer, **Trial.FEW)
    local = await LocalSGD.create(net, opt, every=EVERY, outer=OUTER[rule], overlap=overlap)
    alone = Alone(coll.size, optimizer, rule, overlap=overlap)
    for step in range(4 * EVERY + 1):
        alone.step(step)
        mine = Trial.loss(alone.modules[coll.rank], coll.rank, step + 1).detach()
        await net.step(Trial.loss, local, net, coll.rank, step)
        Trial.assert_same(net, alone.modules[coll.rank])
        with torch.no_grad():
            torch.testing.assert_close(Trial.loss(net, coll.rank, step + 1), mine)
    await local.flush()
    Trial.assert_same(net, alone.flush())
    assert not local.pending
    passes = net.statistics().passes
    await local.flush()
    assert net.statistics().passes == passes
    before = net.state_dict()["0.weight"].clone()
    await Trial.train(net, local, range(20, 20 + EVERY), coll.rank)
    await local.flush()
    assert not torch.equal(before, net.state_dict()["0.weight"])
    await assert_synchronized(net.module, coll)


@pytest.mark.ranks(2, backend="gloo")
async def test_n18_on_processes(coll: Communicator) -> None:
    net = await DataParallel.create(Trial.Mlp(), coll, **Trial.SMALL)
    local = await LocalSGD.create(
        net, Trial.OPTIMIZERS["adam"](net.parameters()), every=EVERY, outer=diloco, overlap=True
    )
    alone = Alone(coll.size, "adam", "diloco", overlap=True)
    for step in range(2 * EVERY + 1):
        alone.step(step)
    await Trial.train(net, local, range(2 * EVERY + 1), coll.rank)
    await local.flush()
    Trial.assert_same(net, alone.flush())


@pytest.mark.ranks(1, 2, 3, 4)
async def test_n18_one_exchange_moves_the_centre_by_alpha_times_the_sum(coll: Communicator) -> None:
    """The numbers are exact in float64."""
    module = nn.Linear(3, 2, bias=False).double()
    nn.init.constant_(module.weight, 4.0)
    net = await DataParallel.create(module, coll)
    opt = torch.optim.SGD(net.parameters(), lr=1.0)
    local = await LocalSGD.create(net, opt, every=1, outer=Elastic(0.25))
    w = float(coll.rank + 1)
    await net.step(lambda: (w * module.weight).sum(), local)  # from 4 to 4 - (rank + 1)
    total = -sum(range(1, coll.size + 1))
    assert torch.equal(module.weight, torch.full((2, 3), 4 - w + 0.25 * w, dtype=torch.float64))
    assert local.pending
    await local.flush()
    assert torch.equal(module.weight, torch.full((2, 3), 4 + 0.25 * total, dtype=torch.float64))


@pytest.mark.drawn(2)
@pytest.mark.ranks(2, 3)
@each_rule
@each_overlap
async def test_n18_complex_parameters_are_averaged(coll: Communicator, rule: str, overlap: bool) -> None:
    """Complex parameters train like their real and imaginary parts."""

    class Planes(nn.Module):
        def __init__(self, *, whole: bool) -> None:
            super().__init__()
            drawn = torch.randn(5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
            self.plane = nn.Parameter(torch.view_as_complex(drawn) if whole else drawn)

        def parts(self) -> Tensor:
            return torch.view_as_real(self.plane) if self.plane.is_complex() else self.plane

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.parts()).tanh()

    made = []
    for whole in (True, False):
        net = await DataParallel.create(Planes(whole=whole), coll)
        opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)
        local = await LocalSGD.create(net, opt, every=EVERY, overlap=overlap, outer=OUTER[rule])
        for step in range(2 * EVERY + 1):
            x = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(9 * step + coll.rank))
            await net.step(lambda net=net, x=x: net(x).square().sum(), local)
        await local.flush()
        await assert_synchronized(net.module, coll, rtol=0)
        made.append(net.module.parts().detach())  # type: ignore[operator]
    torch.testing.assert_close(*made)


@pytest.mark.ranks(2, 3)
async def test_n18_a_sum_of_gradients_is_a_mean_of_parameters(coll: Communicator) -> None:
    """Plain steps with summed gradients come first; then LocalSGD takes the mean of parameters."""
    net = await DataParallel.create(Trial.Mlp(), coll, op="sum", **Trial.FEW)
    local = await LocalSGD.create(net, Trial.OPTIMIZERS["sgd"](net.parameters()), every=EVERY, start=2)
    await Trial.train(net, local, range(2), coll.rank)
    Trial.assert_same(net, Trial.alone(coll.size, 2, op="sum"))
    alone = Alone(coll.size, "sgd", "plain")
    alone.put([parameters_to_vector(net.parameters()).detach()] * coll.size)
    alone.centre = alone.vectors()[0]
    for step in range(2, 2 + 2 * EVERY):
        alone.step(step)
        await net.step(Trial.loss, local, net, coll.rank, step)
    Trial.assert_same(net, alone.modules[0])


@pytest.mark.ranks(2, 3)
@each_overlap
async def test_n18_post_local_begins_with_ordinary_steps(coll: Communicator, overlap: bool) -> None:
    net, opt = await Trial.made(coll, **Trial.FEW)
    local = await LocalSGD.create(net, opt, every=EVERY, start=4, outer=OUTER["slowmo"], overlap=overlap)
    await Trial.train(net, local, range(4), coll.rank)
    assert not local.pending
    expected = Trial.alone(coll.size, 4)
    Trial.assert_same(net, expected)
    alone = Alone(coll.size, "sgd", "slowmo", overlap=overlap)
    alone.centre = parameters_to_vector(expected.parameters()).detach()
    alone.put([alone.centre] * coll.size)
    for step in range(4, 4 + 3 * EVERY):
        alone.step(step)
        await net.step(Trial.loss, local, net, coll.rank, step)
        Trial.assert_same(net, alone.modules[coll.rank])


@pytest.mark.ranks(2)
@each_overlap
async def test_n18_slow_momentum_takes_the_learning_rates_of_its_period(coll: Communicator, overlap: bool) -> None:
    net, opt = await Trial.made(coll)
    net.configure(scheduler=ExponentialLR(opt, 0.8))
    local = await LocalSGD.create(net, opt, every=EVERY, outer=OUTER["slowmo"], overlap=overlap)
    alone = Alone(2, "sgd", "slowmo", overlap=overlap)
    alone.schedulers = [ExponentialLR(each, 0.8) for each in alone.optimizers]
    for step in range(3 * EVERY + 1):
        alone.step(step)
        await net.step(Trial.loss, local, net, coll.rank, step)
    Trial.assert_same(net, alone.modules[coll.rank])
    opt.param_groups[0]["lr"] = 0.0
    await local.flush()
    with pytest.raises(ValueError, match=r"learning rates \[0\.0.* where a period begins"):
        await net.step(Trial.loss, local, net, coll.rank, 0)


@pytest.mark.ranks(2)
async def test_n18_with_fixed_rates_slow_momentum_is_an_outer_sgd(coll: Communicator) -> None:
    """Each parameter has the learning rate of its own group."""
    ways: list[Any] = [SlowMo(0.7, lr=0.8), lambda params: torch.optim.SGD(params, lr=0.8, momentum=0.7)]
    nets = []
    for outer in ways:
        net = await DataParallel.create(Trial.Mlp(), coll, **Trial.FEW)
        first, *others = net.parameters()
        groups: list[dict[str, Any]] = [{"params": others}, {"params": [first], "lr": 0.03}]
        opt = torch.optim.SGD(groups, lr=0.2)
        local = await LocalSGD.create(net, opt, every=EVERY, outer=outer)
        await Trial.train(net, local, range(3 * EVERY + 1), coll.rank)
        await local.flush()
        nets.append(net.module)
    Trial.assert_same(*nets)


@pytest.mark.drawn(2)
@pytest.mark.ranks(2, 3)
@each_rule
async def test_n18_nobody_waits_for_an_average_before_the_next_is_due(coll: Communicator, rule: str) -> None:
    """The last rank ends its first period when the others are at the end of their second."""
    net, opt = await Trial.made(coll, **Trial.FEW)
    local = await LocalSGD.create(net, opt, every=EVERY, outer=OUTER[rule], overlap=True)
    last = coll.size - 1
    await Trial.train(net, local, range(EVERY - 1), coll.rank)
    if coll.rank == last:
        for rank in range(last):
            await coll.recv_object(rank)
        await Trial.train(net, local, range(EVERY - 1, 2 * EVERY), coll.rank)
    else:
        await Trial.train(net, local, range(EVERY - 1, 2 * EVERY - 1), coll.rank)
        await coll.send_object("here", last)
        await Trial.train(net, local, range(2 * EVERY - 1, 2 * EVERY), coll.rank)
    alone = Alone(coll.size, "sgd", rule, overlap=True)
    for step in range(2 * EVERY):
        alone.step(step)
    Trial.assert_same(net, alone.modules[coll.rank])
    await local.flush()
    Trial.assert_same(net, alone.flush())


@pytest.mark.drawn(2)
@pytest.mark.ranks(1, 2)
@each_rule
@each_overlap
async def test_n18_a_checkpoint_goes_on_exactly(coll: Communicator, rule: str, overlap: bool, tmp_path: Any) -> None:
    """Behind `flush`: the same bits."""

    async def begun() -> tuple[DataParallel, LocalSGD]:
        net = await DataParallel.create(Trial.Mlp(), coll, **Trial.FEW)
        return net, await LocalSGD.create(
            net, Trial.OPTIMIZERS["adam"](net.parameters()), every=EVERY, start=1, outer=OUTER[rule], overlap=overlap
        )

    net, local = await begun()
    await Trial.train(net, local, range(5), coll.rank)
    with pytest.raises(RuntimeError, match=r"await local\.flush"):
        local.state_dict()
    await local.flush()
    file = tmp_path / f"{coll.rank}.pt"
    torch.save({"module": net.module.state_dict(), "local": local.state_dict()}, file)
    await Trial.train(net, local, range(5, 10), coll.rank)
    await local.flush()
    await net.aclose()
    again, local_again = await begun()
    state = torch.load(file)
    again.module.load_state_dict(state["module"])
    local_again.load_state_dict(state["local"])
    await Trial.train(again, local_again, range(5, 10), coll.rank)
    await local_again.flush()
    assert all(torch.equal(t, again.state_dict()[name]) for name, t in net.module.state_dict().items())
    torch.testing.assert_close(local_again.state_dict(), local.state_dict(), rtol=0, atol=0)
    for given in (
        {**state["local"], "more": 1},
        {**state["local"], "outer": {} if rule in ("plain", "elastic") else None},
    ):
        with pytest.raises(ValueError, match="state with "):
            local_again.load_state_dict(given)


@pytest.mark.ranks(2)
async def test_n18_a_backward_of_the_net_comes_behind_an_average(coll: Communicator) -> None:
    net = await DataParallel.create(Trial.Mlp(), coll, **Trial.SMALL)
    local = await LocalSGD.create(net, Trial.OPTIMIZERS["sgd"](net.parameters()), every=1, overlap=True)
    alone = Alone(2, "sgd", "plain", overlap=True)
    for step in range(3):
        alone.step(step, every=1)
        await net.step(Trial.loss, local, net, coll.rank, step)
        await net.backward(Trial.loss(net, coll.rank, step))
        await assert_synchronized([p.grad for p in net.parameters()], coll)
    await local.flush()
    Trial.assert_same(net, alone.flush())


@pytest.mark.drawn(2)
@pytest.mark.ranks(2, 3)
@each_rule
@each_overlap
async def test_n18_a_forward_that_raises_is_its_ranks_own_affair(coll: Communicator, rule: str, overlap: bool) -> None:
    """A forward raises in the middle of a period, and at its end: the other ranks continue, and averages are made."""
    net, opt = await Trial.made(coll, **Trial.FEW)
    local = await LocalSGD.create(net, opt, every=EVERY, outer=OUTER[rule], overlap=overlap)
    alone = Alone(coll.size, "sgd", rule, overlap=overlap)

    def fails(step: int) -> Tensor:
        Trial.loss(net, coll.rank, step)
        raise KeyError("no data")

    for step in range(4 * EVERY):
        bad = {1: (1,), EVERY - 1: (0,), 2 * EVERY - 1: (0, 1)}.get(step, ())
        alone.step(step, fails=bad)
        if coll.rank in bad:
            with pytest.raises(KeyError, match="no data"):
                await net.step(fails, local, step)
        else:
            await net.step(Trial.loss, local, net, coll.rank, step)
        Trial.assert_same(net, alone.modules[coll.rank])
    await local.flush()
    Trial.assert_same(net, alone.flush())


@pytest.mark.ranks(2)
async def test_n18_an_outer_optimizer_that_raises_on_one_rank(coll: Communicator) -> None:
    class Fails(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if coll.rank == 1 and failing:
                raise ArithmeticError("broken")
            return super().step(closure)

    failing = True
    net, opt = await Trial.made(coll)
    local = await LocalSGD.create(net, opt, every=1, outer=lambda params: Fails(params, lr=1.0))
    saved = local.state_dict()
    if coll.rank == 1:
        with pytest.raises(ArithmeticError, match="broken"):
            await net.step(Trial.loss, local, net, coll.rank, 0)
    else:
        await net.step(Trial.loss, local, net, coll.rank, 0)
    failing = False
    with pytest.raises(aiodist.MismatchError, match=r"disagree on the steps and loads.*broken"):
        await net.step(Trial.loss, local, net, coll.rank, 1)
    local.load_state_dict(saved)
    net.load_state_dict(Trial.Mlp().state_dict())
    await Trial.train(net, local, range(3), coll.rank)
    Trial.assert_same(net, Trial.alone(2, 3))


@pytest.mark.ranks(2, 3)
async def test_n18_ranks_that_do_not_do_the_same_are_told(coll: Communicator) -> None:
    net, opt = await Trial.made(coll)
    local = await LocalSGD.create(net, opt, every=2)
    before, saved = parameters_to_vector(net.parameters()).detach().clone(), local.state_dict()
    await Trial.train(net, local, range(1 if coll.rank == 0 else 0), coll.rank)
    with pytest.raises(aiodist.MismatchError, match=r"rank 0: averages parameters; rank.*: reduces grad.*same `every`"):
        await net.step(Trial.loss, local if coll.rank == 0 else opt, net, coll.rank, 1)
    assert torch.equal(before, parameters_to_vector(net.parameters())) == (coll.rank != 0)
    local.load_state_dict(saved)


@pytest.mark.ranks(2)
async def test_n18_ranks_that_freeze_different_parameters(coll: Communicator) -> None:
    """No average is made; the next one has all steps in it."""
    net = await DataParallel.create(Trial.Mlp(), coll, **Trial.SMALL)
    local = await LocalSGD.create(net, Trial.OPTIMIZERS["sgd"](net.parameters()), every=2, outer=SlowMo(0.0))
    alone = Alone(2, "sgd", "plain")
    await net.step(Trial.loss, local, net, coll.rank, 0)
    module: Any = net.module
    module[0].requires_grad_(coll.rank == 0)
    with pytest.raises(aiodist.MismatchError, match=r"ranks disagree on the trained parameters: .*rank 1: .* frozen"):
        await net.step(Trial.loss, local, net, coll.rank, 1)
    net.requires_grad_(True)
    alone.step(0)
    alone.modules[1].get_submodule("0").requires_grad_(False)
    alone.step(1)
    alone.modules[1].requires_grad_(True)
    for step in (2, 3, 4):
        alone.step(step, every=2 if step == 4 else 3)
        await net.step(Trial.loss, local, net, coll.rank, step)
    Trial.assert_same(net, alone.modules[0])
