"""N7: learning rates and the like may change at any time: an update is made with those of its step."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from aiodist import Communicator
from aiodist.nn import DataParallel, PipelinedOptimizer, ShardedOptimizer
from tests.nn.pipelined.conftest import Course


@pytest.mark.ranks(2)
@pytest.mark.parametrize("late", [True, False])
async def test_n7_an_update_is_made_with_the_settings_of_its_step(coll: Communicator, late: bool) -> None:
    def turn_down(groups: list[dict[str, Any]], step: int) -> None:
        for group in groups:
            group["lr"] = 0.05 / (step + 2)
            group["momentum"] = 0.9 if step % 2 else 0.5

    net = await Course.split(Course.mlp(), coll)
    opt = await PipelinedOptimizer.create(net, Course.sgd)
    held = Course.hold(net) if late else None
    await Course.train(net, opt, coll, held=held, between=lambda step: turn_down(opt.param_groups, step))
    expected = Course.mlp()
    plain = Course.sgd(expected.parameters())
    Course.reference(expected, plain, coll.size, between=lambda step: turn_down(plain.param_groups, step))
    Course.same(net.module, expected)
    assert {group["lr"] for group in opt.param_groups} == {0.05 / (Course.STEPS + 1)}


def turn(schedules: list[torch.optim.lr_scheduler.ExponentialLR]) -> None:
    for schedule in schedules:
        schedule.step()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("late", [True, False])
async def test_n7_a_scheduler_of_torch_for_each_optimizer(coll: Communicator, late: bool) -> None:
    """Nor does torch warn that the optimizer has not stepped yet."""
    net = await Course.split(Course.mlp(), coll)
    opt = await PipelinedOptimizer.create(net, Course.sgd)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in opt.optimizers]
    held = Course.hold(net) if late else None
    await Course.train(net, opt, coll, held=held, between=lambda step: turn(schedules))
    expected = Course.mlp()
    plain = Course.sgd(expected.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(plain, 0.5)
    Course.reference(expected, plain, coll.size, between=lambda step: turn([schedule]))
    Course.same(net.module, expected)


class Slow(torch.optim.SGD):
    """An optimizer whose step begins and then waits."""

    def __init__(self, params: list[nn.Parameter], began: threading.Event, go_on: threading.Event) -> None:
        super().__init__(params, lr=0.05)
        self.began, self.go_on = began, go_on

    def step(self, closure: Any = None) -> Any:
        self.began.set()
        assert self.go_on.wait(20)
        return super().step(closure)


@pytest.mark.ranks(1)
async def test_n7_settings_changed_just_while_an_update_is_made(coll: Communicator) -> None:
    """Settings changed during an update on the compute thread apply to the next step, and none is lost."""
    began, go_on = threading.Event(), threading.Event()
    net = await DataParallel.create(Course.mlp(), coll)
    opt = await PipelinedOptimizer.create(net, lambda params: Slow(params, began, go_on))
    await net.step(Course.loss_of, opt, net, 0, 0)
    opt.param_groups[0]["lr"] = 7.0
    await Course.until(began.is_set)
    opt.param_groups[0]["lr"] = 0.5
    go_on.set()
    await opt.flush()
    assert opt.param_groups[0]["lr"] == 0.5
    Course.check(net.module, Course.mlp(), 1, range(1), lambda params: torch.optim.SGD(params, lr=0.05))


class Learns(torch.optim.SGD):
    """An optimizer that sets its own learning rate, and counts its steps in an attribute."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.05)
        self.steps = 0

    def step(self, closure: Any = None) -> Any:
        done = super().step(closure)
        self.steps += 1
        for group in self.param_groups:
            group["lr"] = 0.05 / (1 + self.steps)
        return done


@pytest.mark.ranks(2)
@pytest.mark.parametrize("late", [True, False])
async def test_n7_an_optimizer_that_changes_its_own_settings(coll: Communicator, late: bool) -> None:
    net = await Course.split(Course.mlp(), coll)
    opt = await PipelinedOptimizer.create(net, Learns)
    await Course.train(net, opt, coll, held=Course.hold(net) if late else None)
    Course.check(net.module, Course.mlp(), coll.size, make=Learns)
    assert {group["lr"] for group in opt.param_groups} == {0.05 / (1 + Course.STEPS)}


def two_rates(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return Adam with the biases first, at a higher learning rate, then the matrices."""
    biases, matrices = ([p for p in params if p.dim() == dim] for dim in (1, 2))
    return torch.optim.Adam([{"params": biases, "lr": 0.03}, {"params": matrices, "lr": 0.01}])


@pytest.mark.ranks(2)
async def test_n7_the_norm_is_of_what_the_optimizers_have(coll: Communicator) -> None:
    def of_weights(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return Course.sgd([p for p in params if p.dim() > 1])

    trained = []
    for pipelined in (False, True):
        net = await Course.split(Course.mlp(), coll, bucket_bytes=1 << 20)
        net.configure(clip_norm=1e-3)
        opt = await PipelinedOptimizer.create(net, of_weights) if pipelined else of_weights(net.parameters())
        for step in range(4):
            await net.step(Course.loss_of, opt, net, coll.rank, step)
        if isinstance(opt, PipelinedOptimizer):
            await opt.flush()
        trained.append(net.module)
        await net.aclose()
    Course.same(*trained)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("make", ["one", "two"])
@pytest.mark.parametrize("bucket_bytes", [100, 1 << 20])
async def test_n7_going_on_from_a_state(coll: Communicator, bucket_bytes: int, make: str) -> None:
    """The state of small buckets, in buckets of this size."""
    adam = Course.adam if make == "one" else two_rates
    net = await Course.split(Course.mlp(), coll, 100)
    opt = await PipelinedOptimizer.create(net, adam)
    await Course.train(net, opt, coll, range(2))
    weights, state = copy.deepcopy(net.state_dict()), pickle.loads(pickle.dumps(opt.state_dict()))
    await Course.train(net, opt, coll, range(2, 4))
    opt.close()
    await net.aclose()

    other = await Course.split(Course.mlp(), coll, bucket_bytes)
    again = await PipelinedOptimizer.create(other, adam)
    with pytest.raises(ValueError, match="expected"):
        again.load_state_dict(state[:-1])
    other.load_state_dict(weights)
    again.load_state_dict(state)
    await Course.train(other, again, coll, range(2, 4))
    Course.same(other.module, net.module)


@pytest.mark.ranks(2)
async def test_n7_settings_of_a_state_go_to_their_parameters_or_nowhere(coll: Communicator) -> None:
    """Two rates go from a bucket each into one, and back, with the same groups; into one group they do not fit."""

    def rates(opt: PipelinedOptimizer) -> dict[tuple[int, ...], float]:
        return {tuple(p.shape): group["lr"] for group in opt.param_groups for p in group["params"]}

    small = await Course.split(Course.mlp(), coll, 1)
    opt = await PipelinedOptimizer.create(small, two_rates)
    assert len(opt.optimizers) > 2
    for group in opt.param_groups:
        group["lr"] *= 3
    large = await Course.split(Course.mlp(), coll, 1 << 20)
    other = await PipelinedOptimizer.create(large, two_rates)
    other.load_state_dict(opt.state_dict())
    wanted = {tuple(p.shape): pytest.approx(0.09 if p.dim() == 1 else 0.03) for p in small.parameters()}
    assert rates(other) == wanted
    opt.param_groups[0]["lr"] = opt.param_groups[1]["lr"] = 7.0
    opt.load_state_dict(other.state_dict())
    assert rates(opt) == wanted
    other.close()
    plain = await PipelinedOptimizer.create(large, Course.adam)
    before = copy.deepcopy(plain.state_dict())
    with pytest.raises(ValueError, match="parameters with different lr in one group here"):
        plain.load_state_dict(opt.state_dict())
    assert plain.state_dict() == before


@pytest.mark.ranks(1)
async def test_n7_a_state_of_what_is_updated(coll: Communicator) -> None:
    """An optimizer may skip parameters; a state without the numbers of its parameters is refused."""
    net = await Course.split(Course.mlp(), coll)
    opt = await PipelinedOptimizer.create(
        net, lambda params: torch.optim.SGD(params[1:] or params, lr=0.1, momentum=0.9)
    )
    await Course.train(net, opt, coll, range(2))
    opt.load_state_dict(opt.state_dict())
    with pytest.raises(ValueError, match="without the numbers of its parameters"):
        opt.load_state_dict([each.state_dict() for each in opt.optimizers])


@pytest.mark.ranks(1, 2)
async def test_n7_it_steps_again_after_a_sharded_optimizer_of_the_net_was_closed(coll: Communicator) -> None:
    net = await Course.split(Course.mlp(), coll)
    opt = await PipelinedOptimizer.create(net, Course.sgd)
    sharded = await ShardedOptimizer.create(net, Course.sgd)
    sharded.close()
    await Course.train(net, opt, coll)
    expected = Course.mlp()
    Course.reference(expected, Course.sgd(expected.parameters()), coll.size)
    Course.same(net.module, expected)
