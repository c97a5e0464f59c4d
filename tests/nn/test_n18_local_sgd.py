"""N18: steps of one rank, and averages of parameters every few steps, against a plain loop over all ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.lr_scheduler import ExponentialLR

import aiodist
from aiodist import Communicator
from aiodist.nn import DataParallel, Elastic, LocalSGD, SlowMo, assert_synchronized

if TYPE_CHECKING:
    from tests.nn.conftest import Trial

EVERY = 3


def diloco(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.7, momentum=0.8, nesterov=True)


OUTER: dict[str, Any] = {"plain": None, "slowmo": SlowMo(0.6, lr=0.9), "diloco": diloco, "elastic": Elastic(0.2)}
each_rule = pytest.mark.parametrize("rule", OUTER)
each_overlap = pytest.mark.parametrize("overlap", [False, True], ids=["waits", "overlaps"])
each_optimizer = pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])


class Alone:
    """All ranks in one process: their modules, the centre as a vector, and the formulas of the papers."""

    def __init__(self, trial: type[Trial], size: int, optimizer: str, rule: str, *, overlap: bool = False) -> None:
        self.trial = trial
        self.modules = [trial.Mlp() for _ in range(size)]
        self.optimizers: list[Any] = [trial.OPTIMIZERS[optimizer](list(m.parameters())) for m in self.modules]
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
                self.trial.loss(module, rank, step).backward()
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


async def trained(net: DataParallel, local: LocalSGD, trial: type[Trial], steps: range, rank: int) -> None:
    for step in steps:
        await net.step(trial.loss, local, net, rank, step)


# --- every step ------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(1, 2, 3)
@each_optimizer
async def test_n18_every_step_is_the_plain_loop(coll: Communicator, trial: type[Trial], optimizer: str) -> None:
    net = await DataParallel.create(trial.Mlp(), coll, **trial.FEW)
    local = LocalSGD(net, trial.OPTIMIZERS[optimizer](net.parameters()), every=1)
    await trained(net, local, trial, range(6), coll.rank)
    assert not local.pending
    assert net.statistics().passes == 6
    trial.assert_same(net, trial.alone(coll.size, 6, optimizer=optimizer))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
async def test_n18_averages_of_one_step_are_reduced_gradients(
    coll: Communicator, trial: type[Trial], optimizer: str
) -> None:
    """An outer step of length 1 is the average; momentum is averaged too. (Adam is not linear in the gradient.)"""
    net = await DataParallel.create(trial.Mlp(), coll, **trial.FEW)
    average_state = ["momentum_buffer"] if optimizer == "momentum" else []
    opt = trial.OPTIMIZERS[optimizer](net.parameters())
    local = LocalSGD(net, opt, every=1, outer=SlowMo(0.0), average_state=average_state)
    await trained(net, local, trial, range(6), coll.rank)
    assert net.statistics().passes == 6 * (1 + len(average_state))
    trial.assert_same(net, trial.alone(coll.size, 6, optimizer=optimizer))
    await assert_synchronized(opt.state_dict(), coll)


# --- against the formulas --------------------------------------------------------------------------------------------


@pytest.mark.ranks(1, 2, 3, 4)
@each_rule
@each_overlap
@each_optimizer
async def test_n18_as_the_papers_say(
    coll: Communicator, trial: type[Trial], optimizer: str, rule: str, overlap: bool
) -> None:
    """Each rank's own parameters after every step, and what all have in the end."""
    net = await DataParallel.create(trial.Mlp(), coll, **trial.FEW)
    opt = trial.OPTIMIZERS[optimizer](net.parameters())
    local = LocalSGD(net, opt, every=EVERY, outer=OUTER[rule], overlap=overlap)
    alone = Alone(trial, coll.size, optimizer, rule, overlap=overlap)
    for step in range(4 * EVERY + 1):
        alone.step(step)
        mine = trial.loss(alone.modules[coll.rank], coll.rank, step + 1).detach()
        await net.step(trial.loss, local, net, coll.rank, step)
        trial.assert_same(net, alone.modules[coll.rank])
        with torch.no_grad():
            torch.testing.assert_close(trial.loss(net, coll.rank, step + 1), mine)
    await local.flush()
    trial.assert_same(net, alone.flush())
    assert not local.pending
    torch.testing.assert_close(parameters_to_vector(local.centre.values()), alone.centre)
    passes = net.statistics().passes
    await local.flush()
    assert net.statistics().passes == passes
    before = net.state_dict()["0.weight"].clone()
    await trained(net, local, trial, range(20, 20 + EVERY), coll.rank)
    await local.flush()
    assert not torch.equal(before, net.state_dict()["0.weight"])
    names = [name for name, _ in net.named_parameters()]
    assert all(torch.equal(local.centre[name], net.module.get_parameter(name)) for name in names)


@pytest.mark.ranks(2, backend="gloo")
async def test_n18_on_processes(coll: Communicator, trial: type[Trial]) -> None:
    net = await DataParallel.create(trial.Mlp(), coll, **trial.SMALL)
    local = LocalSGD(net, trial.OPTIMIZERS["adam"](net.parameters()), every=EVERY, outer=diloco, overlap=True)
    alone = Alone(trial, coll.size, "adam", "diloco", overlap=True)
    for step in range(2 * EVERY + 1):
        alone.step(step)
    await trained(net, local, trial, range(2 * EVERY + 1), coll.rank)
    await local.flush()
    trial.assert_same(net, alone.flush())


@pytest.mark.ranks(1, 2, 3, 4)
async def test_n18_one_exchange_moves_the_centre_by_alpha_times_the_sum(coll: Communicator) -> None:
    """With numbers that are exact in float64."""
    module = nn.Linear(3, 2, bias=False).double()
    nn.init.constant_(module.weight, 4.0)
    net = await DataParallel.create(module, coll)
    opt = torch.optim.SGD(net.parameters(), lr=1.0)
    local = LocalSGD(net, opt, every=1, outer=Elastic(0.25))
    w = float(coll.rank + 1)
    await net.step(lambda: (w * module.weight).sum(), local)  # from 4 to 4 - (rank + 1)
    total = -sum(range(1, coll.size + 1))
    assert torch.equal(local.centre["weight"], torch.full((2, 3), 4 + 0.25 * total, dtype=torch.float64))
    assert torch.equal(module.weight, torch.full((2, 3), 4 - w + 0.25 * w, dtype=torch.float64))
    assert local.pending


@pytest.mark.ranks(2, 3)
async def test_n18_a_sum_of_gradients_is_a_mean_of_parameters(coll: Communicator, trial: type[Trial]) -> None:
    """Also where ordinary steps came before, whose gradients were summed."""
    net = await DataParallel.create(trial.Mlp(), coll, op="sum", **trial.FEW)
    local = LocalSGD(net, trial.OPTIMIZERS["sgd"](net.parameters()), every=EVERY, start=2)
    await trained(net, local, trial, range(2), coll.rank)
    trial.assert_same(net, trial.alone(coll.size, 2, op="sum"))
    alone = Alone(trial, coll.size, "sgd", "plain")
    alone.put([parameters_to_vector(net.parameters()).detach()] * coll.size)
    alone.centre = alone.vectors()[0]
    for step in range(2, 2 + 2 * EVERY):
        alone.step(step)
        await net.step(trial.loss, local, net, coll.rank, step)
    trial.assert_same(net, alone.modules[0])


@pytest.mark.ranks(2, 3)
@each_overlap
async def test_n18_post_local_begins_with_ordinary_steps(coll: Communicator, trial: type[Trial], overlap: bool) -> None:
    net = await DataParallel.create(trial.Mlp(), coll, **trial.FEW)
    opt = trial.OPTIMIZERS["sgd"](net.parameters())
    local = LocalSGD(net, opt, every=EVERY, start=4, outer=OUTER["slowmo"], overlap=overlap)
    await trained(net, local, trial, range(4), coll.rank)
    assert not local.pending
    expected = trial.alone(coll.size, 4)
    trial.assert_same(net, expected)
    alone = Alone(trial, coll.size, "sgd", "slowmo", overlap=overlap)
    alone.centre = parameters_to_vector(expected.parameters()).detach()
    alone.put([alone.centre] * coll.size)
    for step in range(4, 4 + 3 * EVERY):
        alone.step(step)
        await net.step(trial.loss, local, net, coll.rank, step)
        trial.assert_same(net, alone.modules[coll.rank])


@pytest.mark.ranks(2)
@each_overlap
async def test_n18_slow_momentum_takes_the_learning_rates_of_its_period(
    coll: Communicator, trial: type[Trial], overlap: bool
) -> None:
    net = await DataParallel.create(trial.Mlp(), coll)
    opt = trial.OPTIMIZERS["sgd"](net.parameters())
    net.settings(scheduler=ExponentialLR(opt, 0.8))
    local = LocalSGD(net, opt, every=EVERY, outer=OUTER["slowmo"], overlap=overlap)
    alone = Alone(trial, 2, "sgd", "slowmo", overlap=overlap)
    alone.schedulers = [ExponentialLR(each, 0.8) for each in alone.optimizers]
    for step in range(3 * EVERY + 1):
        alone.step(step)
        await net.step(trial.loss, local, net, coll.rank, step)
    trial.assert_same(net, alone.modules[coll.rank])
    opt.param_groups[0]["lr"] = 0.0
    await local.flush()
    with pytest.raises(ValueError, match=r"learning rate is 0\.0 where a period begins"):
        await net.step(trial.loss, local, net, coll.rank, 0)


# --- beside the next steps -------------------------------------------------------------------------------------------


@pytest.mark.ranks(2, 3)
@each_rule
async def test_n18_nobody_waits_for_an_average_before_the_next_is_due(
    coll: Communicator, trial: type[Trial], rule: str
) -> None:
    """The last rank ends its first period when the others are at the end of their second."""
    net = await DataParallel.create(trial.Mlp(), coll, **trial.FEW)
    opt = trial.OPTIMIZERS["sgd"](net.parameters())
    local = LocalSGD(net, opt, every=EVERY, outer=OUTER[rule], overlap=True)
    last = coll.size - 1
    await trained(net, local, trial, range(EVERY - 1), coll.rank)
    if coll.rank == last:
        for rank in range(last):
            await coll.recv_object(rank)
        await trained(net, local, trial, range(EVERY - 1, 2 * EVERY), coll.rank)
    else:
        await trained(net, local, trial, range(EVERY - 1, 2 * EVERY - 1), coll.rank)
        await coll.send_object("here", last)
        await trained(net, local, trial, range(2 * EVERY - 1, 2 * EVERY), coll.rank)
    alone = Alone(trial, coll.size, "sgd", rule, overlap=True)
    for step in range(2 * EVERY):
        alone.step(step)
    trial.assert_same(net, alone.modules[coll.rank])
    await local.flush()
    trial.assert_same(net, alone.flush())
    assert net.statistics().reduction_seconds > net.statistics().exposed_seconds


@pytest.mark.ranks(2)
async def test_n18_a_backward_of_the_net_takes_the_place_of_an_average(coll: Communicator, trial: type[Trial]) -> None:
    """That is told, and the next average makes up for it."""
    net = await DataParallel.create(trial.Mlp(), coll)
    local = LocalSGD(net, trial.OPTIMIZERS["sgd"](net.parameters()), every=1, overlap=True)
    await net.step(trial.loss, local, net, coll.rank, 0)
    await net.backward(trial.loss(net, coll.rank, 1))
    with pytest.raises(RuntimeError, match="took its place"):
        await net.step(trial.loss, local, net, coll.rank, 1)
    alone = Alone(trial, 2, "sgd", "plain")
    for step in range(2):
        alone.step(step)
    trial.assert_same(net, alone.modules[coll.rank])
    await local.flush()
    trial.assert_same(net, alone.flush())


# --- state -----------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(1, 2)
@each_rule
@each_overlap
@pytest.mark.parametrize("after", [2, EVERY, EVERY + 1, 2 * EVERY])
async def test_n18_a_checkpoint_goes_on_exactly(
    coll: Communicator, trial: type[Trial], rule: str, overlap: bool, after: int, tmp_path: Any
) -> None:
    """In the middle of a period, at its end, with an average on its way: the same bits."""

    async def begun() -> tuple[DataParallel, LocalSGD]:
        net = await DataParallel.create(trial.Mlp(), coll, **trial.FEW)
        opt = trial.OPTIMIZERS["adam"](net.parameters())
        return net, LocalSGD(net, opt, every=EVERY, start=1, outer=OUTER[rule], overlap=overlap)

    net, local = await begun()
    await trained(net, local, trial, range(after), coll.rank)
    file = tmp_path / f"{coll.rank}.pt"
    torch.save({"module": net.module.state_dict(), "local": local.state_dict()}, file)
    await trained(net, local, trial, range(after, after + 5), coll.rank)
    await local.flush()
    await net.aclose()
    again, local_again = await begun()
    state = torch.load(file)
    again.module.load_state_dict(state["module"])
    local_again.load_state_dict(state["local"])
    await trained(again, local_again, trial, range(after, after + 5), coll.rank)
    await local_again.flush()
    assert all(torch.equal(t, again.state_dict()[name]) for name, t in net.module.state_dict().items())
    torch.testing.assert_close(local_again.state_dict(), local.state_dict(), rtol=0, atol=0)


@pytest.mark.ranks(2)
async def test_n18_a_state_that_does_not_fit(coll: Communicator, trial: type[Trial]) -> None:
    net = await DataParallel.create(trial.Mlp(), coll)
    make = trial.OPTIMIZERS["sgd"]
    local = LocalSGD(net, make(net.parameters()), every=1, overlap=True)
    state = local.state_dict()
    wrong: list[tuple[Any, str]] = [
        ({**state, "more": 1}, r"state has \[.*'more'"),
        ([], "state has list: expected"),
        ({**state, "outer": {}}, "state with outer=True"),
        ({**state, "centre": {"0.bias": torch.ones(2)}}, r"state of '0.bias' \[2\]"),
        ({**state, "sent": {"none": torch.ones(2)}}, r"state of 'none' \[2\]"),
    ]
    for given, text in wrong:
        with pytest.raises(ValueError, match=text):
            local.load_state_dict(given)
    with pytest.raises(ValueError, match=r"state of \['0.bias'\]: expected \['0.bias', '0.weight'"):
        LocalSGD(net, make(net.parameters()), every=1, outer=diloco).load_state_dict(
            {**state, "outer": {}, "centre": {"0.bias": torch.ones(9)}}
        )
    await net.step(trial.loss, local, net, coll.rank, 0)
    with pytest.raises(RuntimeError, match="an average is on its way"):
        local.load_state_dict(state)
    await local.flush()
    local.load_state_dict(state)


@pytest.mark.ranks(2, 3)
async def test_n18_state_of_the_optimizer_is_averaged_or_forgotten(coll: Communicator, trial: type[Trial]) -> None:
    for how, averages in (
        ({}, False),
        ({"average_state": ("exp_avg", "exp_avg_sq")}, True),
        ({"reset_state": True}, False),
    ):
        net = await DataParallel.create(trial.Mlp(), coll, **trial.FEW)
        opt = trial.OPTIMIZERS["adam"](net.parameters())
        local = LocalSGD(net, opt, every=EVERY, **how)
        alone = Alone(trial, coll.size, "adam", "plain")
        for step in range(2 * EVERY + 1):
            alone.step(step)
            if alone.since == 0:
                for parts in zip(*(module.parameters() for module in alone.modules), strict=True):
                    states = [opt.state[p] for opt, p in zip(alone.optimizers, parts, strict=True)]
                    for name in ("exp_avg", "exp_avg_sq") if averages else ():
                        mean = torch.stack([state[name] for state in states]).mean(0)
                        for state in states:
                            state[name].copy_(mean)
                if "reset_state" in how:
                    for theirs in alone.optimizers:
                        theirs.state.clear()
            await net.step(trial.loss, local, net, coll.rank, step)
        trial.assert_same(net, alone.modules[coll.rank])
        theirs = alone.optimizers[coll.rank].state_dict()["state"]
        torch.testing.assert_close(opt.state_dict()["state"], theirs, rtol=1e-6, atol=1e-12)
        await local.flush()
        await net.aclose()


@pytest.mark.ranks(2)
async def test_n18_state_that_cannot_be_averaged(coll: Communicator, trial: type[Trial]) -> None:
    """Every rank raises, once all have averaged what there is."""
    for name, why in (("momentum", "is not there"), ("step", "is not of its parameter's shape")):
        net = await DataParallel.create(trial.Mlp(), coll)
        local = LocalSGD(
            net, trial.OPTIMIZERS["adam"](net.parameters()), every=1, outer=SlowMo(0), average_state=[name]
        )
        with pytest.raises(ValueError, match=rf"average_state='{name}': {why}.*Adam.*'exp_avg'"):
            await net.step(trial.loss, local, net, coll.rank, 0)
        await net.aclose()


# --- one rank that fails ---------------------------------------------------------------------------------------------


@pytest.mark.ranks(2, 3)
@each_rule
@each_overlap
async def test_n18_a_forward_that_raises_is_its_ranks_own_affair(
    coll: Communicator, trial: type[Trial], rule: str, overlap: bool
) -> None:
    """In the middle of a period, and at its end; the others hear nothing, and averages are made."""
    net = await DataParallel.create(trial.Mlp(), coll, **trial.FEW)
    opt = trial.OPTIMIZERS["sgd"](net.parameters())
    local = LocalSGD(net, opt, every=EVERY, outer=OUTER[rule], overlap=overlap)
    alone = Alone(trial, coll.size, "sgd", rule, overlap=overlap)

    def fails(step: int) -> Tensor:
        trial.loss(net, coll.rank, step)
        raise KeyError("no data")

    for step in range(4 * EVERY):
        bad = {1: (1,), EVERY - 1: (0,), 2 * EVERY - 1: (0, 1)}.get(step, ())
        alone.step(step, fails=bad)
        if coll.rank in bad:
            with pytest.raises(KeyError, match="no data"):
                await net.step(fails, local, step)
        else:
            await net.step(trial.loss, local, net, coll.rank, step)
        trial.assert_same(net, alone.modules[coll.rank])
    await local.flush()
    trial.assert_same(net, alone.flush())


@pytest.mark.ranks(2)
async def test_n18_an_outer_optimizer_that_raises_on_one_rank(coll: Communicator, trial: type[Trial]) -> None:
    class Fails(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if coll.rank == 1 and failing:
                raise ArithmeticError("broken")
            return super().step(closure)

    failing = True
    net = await DataParallel.create(trial.Mlp(), coll)
    opt = trial.OPTIMIZERS["sgd"](net.parameters())
    local = LocalSGD(net, opt, every=1, outer=lambda params: Fails(params, lr=1.0))
    saved = local.state_dict()
    if coll.rank == 1:
        with pytest.raises(ArithmeticError, match="broken"):
            await net.step(trial.loss, local, net, coll.rank, 0)
    else:
        await net.step(trial.loss, local, net, coll.rank, 0)
    failing = False
    with pytest.raises(aiodist.MismatchError, match=r"different numbers of steps.*broken"):
        await net.step(trial.loss, local, net, coll.rank, 1)
    local.load_state_dict(saved)
    net.load_state_dict(trial.Mlp().state_dict())
    await trained(net, local, trial, range(3), coll.rank)
    trial.assert_same(net, trial.alone(2, 3))


@pytest.mark.ranks(2, 3)
async def test_n18_ranks_that_do_not_do_the_same_are_told(coll: Communicator, trial: type[Trial]) -> None:
    net = await DataParallel.create(trial.Mlp(), coll)
    opt = trial.OPTIMIZERS["sgd"](net.parameters())
    local = LocalSGD(net, opt, every=2)
    before, saved = parameters_to_vector(net.parameters()).detach().clone(), local.state_dict()
    with pytest.raises(
        aiodist.MismatchError, match=r"rank 0 averages parameters, rank 1 reduces gradients.*same `every`"
    ):
        if coll.rank == 0:
            await trained(net, local, trial, range(2), coll.rank)
        else:
            await net.step(trial.loss, opt, net, coll.rank, 0)
    assert torch.equal(before, parameters_to_vector(net.parameters())) == (coll.rank != 0)
    local.load_state_dict(saved)


@pytest.mark.ranks(2)
async def test_n18_ranks_that_freeze_different_parameters(coll: Communicator, trial: type[Trial]) -> None:
    """No average is made; the next one has all steps in it."""
    net = await DataParallel.create(trial.Mlp(), coll, **trial.SMALL)
    local = LocalSGD(net, trial.OPTIMIZERS["sgd"](net.parameters()), every=2, outer=SlowMo(0.0))
    alone = Alone(trial, 2, "sgd", "plain")
    await net.step(trial.loss, local, net, coll.rank, 0)
    net.module[0].requires_grad_(coll.rank == 0)
    with pytest.raises(aiodist.MismatchError, match=r"ranks train different parameters: .* frozen on rank 1"):
        await net.step(trial.loss, local, net, coll.rank, 1)
    net.requires_grad_(True)
    alone.step(0)
    alone.modules[1][0].requires_grad_(False)  # type: ignore[operator]
    alone.step(1)
    alone.modules[1].requires_grad_(True)
    for step in (2, 3, 4):
        alone.step(step, every=2 if step == 4 else 3)
        await net.step(trial.loss, local, net, coll.rank, step)
    trial.assert_same(net, alone.modules[0])


# --- what a net has beside ------------------------------------------------------------------------------------------


UNEVEN = {1: [(4,)], 2: [(3, 7), (0, 4), (6, 6)], 3: [(1, 8, 3), (0, 0, 2)]}


@pytest.mark.ranks(1, 2, 3)
@each_overlap
@pytest.mark.parametrize("start", [0, 2])
async def test_n18_uneven_data(coll: Communicator, trial: type[Trial], start: int, overlap: bool) -> None:
    """An average is over those that still have data, and in the end all have the same, state included."""
    for counts in UNEVEN[coll.size]:
        net = await DataParallel.create(trial.Mlp(), coll, **trial.FEW)
        opt = trial.OPTIMIZERS["momentum"](net.parameters())
        local = LocalSGD(net, opt, every=2, start=start, outer=SlowMo(0.5), overlap=overlap)
        async with net.join(local):
            await trained(net, local, trial, range(counts[coll.rank]), coll.rank)
        assert not local.pending
        await assert_synchronized([net.state_dict(), local.centre], coll)
        local.outer is None or await assert_synchronized(local.outer.state_dict(), coll)
        await net.step(trial.loss, local, net, coll.rank, 20)
        await net.aclose()


@pytest.mark.ranks(2, 3)
async def test_n18_an_average_is_over_those_that_have_data(coll: Communicator, trial: type[Trial]) -> None:
    """The last rank has no data at all, the first has one period less than the others."""
    counts = [EVERY, *[2 * EVERY] * (coll.size - 2), 0]
    for rule in ("plain", "elastic"):
        net = await DataParallel.create(trial.Mlp(), coll, **trial.FEW)
        local = LocalSGD(net, trial.OPTIMIZERS["sgd"](net.parameters()), every=EVERY, outer=OUTER[rule])
        async with net.join(local):
            await trained(net, local, trial, range(counts[coll.rank]), coll.rank)
        alone = Alone(trial, coll.size - 1, "sgd", rule)
        for step in range(EVERY):
            alone.step(step)
        if coll.size > 2:
            rest = Alone(trial, 1, "sgd", rule)
            rest.put(alone.vectors()[1:])
            rest.centre = alone.centre
            rest.trial = type("Second", (trial,), {"loss": lambda module, rank, step: trial.loss(module, 1, step)})
            for step in range(EVERY, 2 * EVERY):
                rest.step(step)
            alone = rest
        trial.assert_same(net, alone.flush())
        await net.aclose()


@pytest.mark.ranks(2)
async def test_n18_settings_look_at_the_gradients_of_this_rank(coll: Communicator, trial: type[Trial]) -> None:
    """Clipping, three closures a step, and a scaler that leaves out a step of rank 1; schedulers step all the same."""

    def part(module: Any, rank: int, step: int) -> Tensor:
        x, y = trial.batch(rank, step, torch.float32)
        out: Tensor = module(x)
        return nn.functional.mse_loss(out, y)

    def bad(module: Any, rank: int, step: int) -> Tensor:
        return part(module, rank, step) * (float("inf") if rank == 1 and step == 4 else 1.0)

    net = await DataParallel.create(trial.Mlp().float(), coll, clip_norm=0.2)
    opt = trial.OPTIMIZERS["momentum"](net.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    net.settings(scaler=scaler, scheduler=ExponentialLR(opt, 0.9))
    local = LocalSGD(net, opt, every=EVERY)
    modules = [trial.Mlp().float() for _ in range(2)]
    optimizers: list[Any] = [trial.OPTIMIZERS["momentum"](list(m.parameters())) for m in modules]
    schedulers = [ExponentialLR(each, 0.9) for each in optimizers]
    for step in range(2 * EVERY):
        closures = [partial(bad, net, coll.rank, step), partial(part, net, coll.rank, step + 50)]
        seen = await net.step(closures, local)
        assert torch.isfinite(seen) == ((coll.rank, step) != (1, 4))
        for rank in range(2):
            optimizers[rank].zero_grad()
            (part(modules[rank], rank, step) + part(modules[rank], rank, step + 50)).backward()
            nn.utils.clip_grad_norm_(modules[rank].parameters(), 0.2)
            if (rank, step) != (1, 4):
                optimizers[rank].step()
            else:
                optimizers[rank]._opt_called = True
            schedulers[rank].step()
        if step % EVERY == EVERY - 1:
            mean = torch.stack([parameters_to_vector(m.parameters()).detach() for m in modules]).mean(0)
            for module in modules:
                vector_to_parameters(mean.clone(), module.parameters())
        for ours, theirs in zip(net.parameters(), modules[coll.rank].parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    assert scaler.get_scale() == (64 if coll.rank == 0 else 32)
    assert opt.param_groups[0]["lr"] == optimizers[0].param_groups[0]["lr"]
    await assert_synchronized(list(net.parameters()), coll)


@pytest.mark.ranks(1, 2)
async def test_n18_autocast(coll: Communicator, trial: type[Trial]) -> None:
    seen: list[torch.dtype] = []

    def loss(step: int) -> Tensor:
        x, y = trial.batch(coll.rank, step, torch.float32)
        out = net(x)
        seen.append(out.dtype)
        return nn.functional.mse_loss(out.float(), y)

    net = await DataParallel.create(trial.Mlp().float(), coll, autocast=torch.bfloat16)
    local = LocalSGD(net, trial.OPTIMIZERS["sgd"](net.parameters()), every=2)
    for step in range(3):
        await net.step(loss, local, step)
    assert seen == [torch.bfloat16] * 3


class Odd(nn.Module):
    """Several dtypes, a tied weight, one that is never used, a frozen one, a batch norm, a transposed weight."""

    DTYPES = (torch.float32, torch.float64, torch.bfloat16)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList([nn.Linear(6, 6).to(dtype) for dtype in self.DTYPES])
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.layers[0].weight  # type: ignore[assignment]
        self.never = nn.Linear(6, 3)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.norm = nn.BatchNorm1d(6)
        self.turned = nn.Parameter(torch.randn(3, 6).t())

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.frozen(self.tied(x.float())))
        for layer, dtype in zip(self.layers, self.DTYPES, strict=True):
            x = torch.tanh(layer(x.to(dtype)))
        return (x.float() @ self.turned).double()


@pytest.mark.ranks(1, 2, 3)
@each_rule
@each_overlap
@pytest.mark.parametrize("sizes", [{"bucket_bytes": 1, "first_bucket_bytes": 1}, {}], ids=["each", "all"])
async def test_n18_many_kinds_of_parameters(
    coll: Communicator, trial: type[Trial], rule: str, overlap: bool, sizes: dict[str, Any]
) -> None:
    net = await DataParallel.create(Odd(), coll, **sizes)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    local = LocalSGD(net, opt, every=2, outer=OUTER[rule], overlap=overlap)
    modules = [Odd() for _ in range(coll.size)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in modules]
    begin = [p.detach().double().clone() for p in modules[0].parameters()]
    for step in range(2):
        await net.step(trial.loss, local, net, coll.rank, step)
        for rank, (module, theirs) in enumerate(zip(modules, optimizers, strict=True)):
            theirs.zero_grad()
            trial.loss(module, rank, step).backward()
            theirs.step()
    await local.flush()
    factor = {"plain": 1.0, "slowmo": 0.9, "diloco": 0.7 * 1.8, "elastic": 0.2 * coll.size}[rule]
    for ours, before, *parts in zip(net.parameters(), begin, *(m.parameters() for m in modules), strict=True):
        expected = before + factor * (torch.stack([p.detach().double() for p in parts]).mean(0) - before)
        torch.testing.assert_close(
            ours.double(), expected, rtol=0.02, atol=0.02 if ours.dtype is torch.bfloat16 else 1e-3
        )
    await assert_synchronized(list(net.parameters()), coll)
    assert ("frozen.weight" in local.centre, "never.weight" in local.centre) == (False, True)
    mean = net.module.norm.running_mean
    assert mean is not None
    torch.testing.assert_close(mean, modules[coll.rank].norm.running_mean)  # each rank's own
    await net.synchronize_buffers(how="mean")
    await assert_synchronized(net.module, coll)


@pytest.mark.ranks(2)
@each_overlap
async def test_n18_freezing_and_thawing(coll: Communicator, trial: type[Trial], overlap: bool) -> None:
    net = await DataParallel.create(trial.Mlp(), coll, **trial.FEW)
    net.module[0].requires_grad_(False)
    local = LocalSGD(net, trial.OPTIMIZERS["sgd"](net.parameters()), every=2, overlap=overlap)
    alone = Alone(trial, 2, "sgd", "plain", overlap=overlap)
    switches = {0: (0, False), 3: (0, True), 4: (2, False), 9: (2, True)}
    for step in range(12):
        if step in switches:
            which, able = switches[step]
            for module in (net.module, *alone.modules):
                module[which].requires_grad_(able)
        alone.step(step, every=2)
        await net.step(trial.loss, local, net, coll.rank, step)
        trial.assert_same(net, alone.modules[coll.rank])
    await local.flush()
    trial.assert_same(net, alone.flush())
    net.module[0].requires_grad_(False)
    other = LocalSGD(net, torch.optim.SGD(net.parameters(), lr=0.1), every=2, outer=SlowMo(0.5))
    net.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"'0.weight', '0.bias': frozen when this LocalSGD was made"):
        await net.step(trial.loss, other, net, coll.rank, 0)


@pytest.mark.ranks(2)
@each_overlap
async def test_n18_compressed(coll: Communicator, trial: type[Trial], overlap: bool) -> None:
    """What a code leaves out goes into the next average, so that ranks and centre stay together."""
    net = await DataParallel.create(trial.Mlp().float(), coll, compress=aiodist.codecs.Int8())
    local = LocalSGD(net, torch.optim.SGD(net.parameters(), lr=0.05), every=2, overlap=overlap)
    alone = Alone(trial, 2, "sgd", "plain", overlap=overlap)
    for opt in alone.optimizers:
        opt.param_groups[0]["lr"] = 0.05

    def loss(step: int) -> Tensor:
        x, y = trial.batch(coll.rank, step, torch.float32)
        return nn.functional.mse_loss(net(x), y)

    for step in range(20):
        alone.step(step, every=2)
        await net.step(loss, local, step)
    await local.flush()
    seen, expected = parameters_to_vector(net.parameters()), parameters_to_vector(alone.flush().parameters())
    begin = parameters_to_vector(trial.Mlp().parameters())
    assert (seen - expected).norm() < 0.02 * (expected - begin).norm()
    await assert_synchronized(list(net.parameters()), coll)
    assert net.statistics().sent_nbytes < 0.5 * net.statistics().nbytes


# --- calls that do not fit ---------------------------------------------------------------------------------------


@pytest.mark.ranks(1)
async def test_n18_arguments(coll: Communicator, trial: type[Trial]) -> None:
    net = await DataParallel.create(trial.Mlp(), coll)
    opt = trial.OPTIMIZERS["sgd"](net.parameters())
    wrong: list[tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
        ((net.module, opt), {}, TypeError, r"net is a Mlp: expected what `await DataParallel\.create"),
        ((net, [opt]), {}, TypeError, "optimizer is a list"),
        ((net, torch.optim.LBFGS(net.parameters())), {}, TypeError, "LBFGS"),
        ((net, opt), {"every": 0}, ValueError, "every=0: expected a whole number of steps, at least 1"),
        ((net, opt), {"every": 2.0}, ValueError, r"every=2\.0"),
        ((net, opt), {"every": True}, ValueError, "every=True"),
        ((net, opt), {"start": -1}, ValueError, "start=-1"),
        ((net, opt), {"outer": opt}, TypeError, "outer is SGD: expected a SlowMo"),
        ((net, opt), {"outer": 0.7}, TypeError, "outer is float"),
        ((net, opt), {"outer": len}, TypeError, "outer returned int"),
        ((net, opt), {"outer": torch.optim.LBFGS}, TypeError, "LBFGS"),
        ((net, opt), {"average_state": "exp_avg"}, TypeError, "average_state='exp_avg': expected a sequence"),
        ((net, opt), {"average_state": ["a"], "overlap": True}, ValueError, "average_state and overlap"),
        ((net, opt), {"average_state": ["a"], "reset_state": True}, ValueError, "average_state and reset_state"),
        ((net, torch.optim.Adagrad(net.parameters())), {"reset_state": True}, TypeError, "Adagrad"),
    ]
    for args, how, error, text in wrong:
        with pytest.raises(error, match=text):
            LocalSGD(*args, **{"every": 2, **how})
    for make, text in (
        (lambda: SlowMo(1.0), r"momentum=1\.0"),
        (lambda: SlowMo(0.5, lr=0.0), r"lr=0\.0"),
        (lambda: Elastic(0.0), r"alpha=0\.0"),
        (lambda: Elastic(float("nan")), "alpha=nan"),
    ):
        with pytest.raises(ValueError, match=text):
            make()
    rows = await DataParallel.create(nn.Embedding(3, 2, sparse=True), coll)
    with pytest.raises(TypeError, match=r"sparse gradients of 'weight': expected an embedding with sparse=False"):
        LocalSGD(rows, torch.optim.SGD(rows.parameters(), lr=0.1), every=2)
    assert repr(LocalSGD(net, opt, every=2)).startswith("<LocalSGD of SGD, every 2 steps, on <DataParallel of Mlp")


@pytest.mark.ranks(2)
async def test_n18_parameters_of_one_rank_are_not_taken_for_those_of_all(
    coll: Communicator, trial: type[Trial]
) -> None:
    net = await DataParallel.create(trial.Mlp(), coll)
    opt = trial.OPTIMIZERS["sgd"](net.parameters())
    local = LocalSGD(net, opt, every=2)
    await net.step(trial.loss, local, net, coll.rank, 0)
    for call in (net.state_dict, lambda: net.load_state_dict({})):
        with pytest.raises(RuntimeError, match="await opt.flush"):
            call()
    with pytest.raises(RuntimeError, match="await opt.flush"):
        await net.step(trial.loss, opt, net, coll.rank, 1)
    with pytest.raises(RuntimeError, match="no_sync"), net.no_sync():
        await net.step(trial.loss, local, net, coll.rank, 1)
    await net.aclose()  # it averages
    alone = Alone(trial, 2, "sgd", "plain")
    alone.step(0)
    trial.assert_same(net.module, alone.flush())
    with pytest.raises(RuntimeError, match="is closed"):
        await local.flush()


@pytest.mark.ranks(2)
async def test_n18_loaded_parameters_are_the_new_centre(coll: Communicator, trial: type[Trial]) -> None:
    net = await DataParallel.create(trial.Mlp(1), coll)
    local = LocalSGD(net, trial.OPTIMIZERS["sgd"](net.parameters()), every=2, outer=OUTER["elastic"])
    await trained(net, local, trial, range(3), coll.rank)
    await local.flush()
    net.load_state_dict(trial.Mlp().state_dict())
    alone = Alone(trial, 2, "sgd", "elastic")
    for step in range(2):
        alone.step(step, every=2)
    await trained(net, local, trial, range(2), coll.rank)
    trial.assert_same(net, alone.modules[coll.rank])


@pytest.mark.ranks(2, 3)
async def test_n18_a_step_whose_await_is_cancelled_is_made(coll: Communicator, trial: type[Trial]) -> None:
    net = await DataParallel.create(trial.Mlp(), coll)
    local = LocalSGD(net, trial.OPTIMIZERS["sgd"](net.parameters()), every=2)
    alone = Alone(trial, coll.size, "sgd", "plain")
    for step in range(4):
        alone.step(step, every=2)
        task = asyncio.ensure_future(net.step(trial.loss, local, net, coll.rank, step))
        await asyncio.sleep(0)
        if coll.rank == 1:
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled() == (coll.rank == 1)
    await local.flush()
    trial.assert_same(net, alone.modules[0])


@pytest.mark.ranks(2, 3)
async def test_n18_a_rank_that_closes_in_the_middle_is_told(coll: Communicator, trial: type[Trial]) -> None:
    net = await DataParallel.create(trial.Mlp(), coll)
    local = LocalSGD(net, trial.OPTIMIZERS["sgd"](net.parameters()), every=2)
    await trained(net, local, trial, range(2), coll.rank)
    with pytest.raises(aiodist.MismatchError, match=r"rank 1 closes the net after 1 steps.*net\.join"):
        if coll.rank == 1:
            await net.aclose()
        else:
            await trained(net, local, trial, range(2, 4), coll.rank)
