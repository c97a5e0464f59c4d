"""N14: the engine trains like the bare loop, and hooks come in order."""

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from aiodist import Communicator, Engine
from aiodist.data import ShardSampler, prefetch
from aiodist.engine import State, WithCriterion
from aiodist.nn import DataParallel, PipelinedOptimizer, assert_synchronized
from tests.engine.conftest import Job

EVENTS: tuple[Any, ...] = ("start", "sample", "forward", "criterion", "backward", "update", "epoch", "end")
STEP = ["sample", "forward", "criterion", "backward", "update"]


def noted(engine: Engine, into: list[str]) -> None:
    """Note each event, by a plain function and then by a coroutine function."""
    for event in EVENTS:

        def plain(state: State, event: str = event) -> None:
            into.append(event)

        async def coroutine(state: State, event: str = event) -> None:
            await asyncio.sleep(0)
            assert threading.current_thread() is threading.main_thread()
            into.append(f"{event}, awaited")

        engine.on(event, plain)
        engine.on(event, coroutine)


@pytest.mark.drawn(2)
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
async def test_n14_trains_as_one_process(coll: Communicator, optimizer: str) -> None:
    net = await DataParallel.create(Job.build(), coll)
    engine = Engine(net, Job.OPTIMIZERS[optimizer](net.parameters()), mse_loss, **Job.QUIET)
    await engine.train(Job.pairs(coll.rank, 5), epochs=3)
    Job.assert_same(net, Job.alone(coll.size, [5] * coll.size, epochs=3, optimizer=optimizer))
    assert (engine.state.epoch, engine.state.step, engine.state.batch) == (3, 15, 5)


@pytest.mark.drawn(2)
@pytest.mark.ranks(1, 3)
@pytest.mark.ranks(2, backend="gloo")
async def test_n14_with_a_pipelined_optimizer(coll: Communicator) -> None:
    net = await DataParallel.create(Job.build(), coll, bucket_bytes=1, first_bucket_bytes=1)
    opt = await PipelinedOptimizer.create(net, Job.OPTIMIZERS["momentum"])
    engine = Engine(net, opt, mse_loss, **Job.QUIET)
    seen: list[str] = []
    noted(engine, seen)
    await engine.train(Job.pairs(coll.rank, 4), epochs=2)
    assert not opt.pending
    Job.assert_same(net, Job.alone(coll.size, [4] * coll.size, epochs=2, optimizer="momentum"))
    assert [event for event in seen if "," not in event][:7] == ["start", *STEP, "sample"]


@pytest.mark.drawn(2)
@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("pipelined", [False, True])
async def test_n14_a_criterion_may_return_aux(coll: Communicator, pipelined: bool) -> None:
    net = await DataParallel.create(Job.build(), coll)
    make = Job.OPTIMIZERS["momentum"]
    opt: Any = await PipelinedOptimizer.create(net, make) if pipelined else make(net.parameters())
    seen: list[Any] = []

    def criterion(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return mse_loss(output, target), {"output": output}

    engine = Engine(net, opt, criterion, **Job.QUIET)
    engine.on("criterion", lambda state: seen.append((state.output.detach().clone(), state.aux["output"])))
    engine.on("update", lambda state: seen.append(state.aux["output"]))
    await engine.train(Job.pairs(coll.rank, 4), epochs=2)
    Job.assert_same(net, Job.alone(coll.size, [4] * coll.size, epochs=2, optimizer="momentum"))
    assert len(seen) == 16
    for (output, aux), again in zip(seen[::2], seen[1::2], strict=True):
        assert torch.equal(output, aux)
        assert aux is again
        assert not aux.requires_grad
    figures = await engine.test(Job.pairs(coll.rank, 2))
    plain = Engine(net, torch.optim.SGD(net.parameters(), lr=0.0), mse_loss, **Job.QUIET)
    assert figures == await plain.test(Job.pairs(coll.rank, 2))


@pytest.mark.ranks(1, 2)
async def test_n14_hooks_come_in_order(coll: Communicator) -> None:
    net = await DataParallel.create(Job.build(), coll)
    engine = Engine(net, torch.optim.SGD(net.parameters(), lr=0.1), mse_loss, **Job.QUIET)
    seen: list[str] = []
    noted(engine, seen)
    await engine.train(Job.pairs(coll.rank, 2), epochs=2)
    events = ["start", *(STEP * 2 + ["epoch"]) * 2, "end"]
    assert seen == [said for event in events for said in (event, f"{event}, awaited")]
    seen.clear()
    await engine.test(Job.pairs(coll.rank, 2))
    events = ["start", *["sample", "forward", "criterion"] * 2, "end"]
    assert seen == [said for event in events for said in (event, f"{event}, awaited")]


@pytest.mark.ranks(2)
async def test_n14_what_the_state_has(coll: Communicator) -> None:
    net = await DataParallel.create(Job.build(), coll)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    engine = Engine(net, opt, mse_loss, **Job.QUIET)
    pairs = Job.pairs(coll.rank, 3)
    before: dict[str, Tensor] = {}
    checked = []

    @engine.on("start")
    def start(state: State) -> None:
        assert (state.epochs, state.epoch, state.step, state.rank, state.size) == (2, 0, 0, coll.rank, 2)
        assert state.net is net
        assert state.network is net.module
        assert state.optimizer is opt

    @engine.on("sample")
    def sample(state: State) -> None:
        assert state.training
        assert state.output is state.loss is None
        assert torch.equal(state.sample[0], pairs[state.batch - 1][0])
        before.update({name: p.detach().clone() for name, p in net.named_parameters()})

    @engine.on("forward")
    def forward(state: State) -> None:
        assert torch.equal(state.input, pairs[state.batch - 1][0])
        assert torch.equal(state.target, pairs[state.batch - 1][1])
        assert state.output.shape == (3, 3)
        assert state.loss is None

    @engine.on("criterion")
    def criterion(state: State) -> None:
        assert state.loss is not None
        assert state.loss.requires_grad
        assert state.weight == 3.0

    @engine.on("backward")
    async def backward(state: State) -> None:
        await assert_synchronized([p.grad for p in net.parameters()], coll)  # reduced, and not yet used
        assert all(torch.equal(p, before[name]) for name, p in net.named_parameters())

    @engine.on("update")
    async def update(state: State) -> None:
        assert state.loss is not None
        assert not state.loss.requires_grad
        assert not any(torch.equal(p, before[name]) for name, p in net.named_parameters())
        assert state.step == 3 * (state.epoch - 1) + state.batch
        checked.append(state.step)

    @engine.on("epoch")
    def epoch(state: State) -> None:
        assert set(state.metrics) == {"loss"}

    await engine.train(pairs, epochs=2)
    assert checked == [1, 2, 3, 4, 5, 6]


@pytest.mark.ranks(2)
async def test_n14_hooks_may_change_sample_output_loss_and_weight(coll: Communicator) -> None:
    def penalised(output: Tensor, target: Tensor) -> Tensor:
        return mse_loss(2 * output, target + 1) + 0.5

    net = await DataParallel.create(Job.build(), coll)
    engine = Engine(net, torch.optim.SGD(net.parameters(), lr=0.1), mse_loss, **Job.QUIET)

    @engine.on("sample")
    def shift(state: State) -> None:
        x, y = state.sample
        state.sample, state.weight = (x, y + 1), 1.0 + state.batch

    @engine.on("forward")
    async def double(state: State) -> None:
        state.output = 2 * state.output

    @engine.on("criterion")
    def add(state: State) -> None:
        assert state.loss is not None
        state.loss = state.loss + torch.tensor(0.5)

    losses = []
    engine.on("update", lambda state: losses.append(float(state.loss)))
    figures = await engine.train(Job.pairs(coll.rank, 3), epochs=1)
    Job.assert_same(net, Job.alone(2, [3, 3], loss=penalised))
    total = await coll.allreduce(sum(loss * weight for loss, weight in zip(losses, (2, 3, 4), strict=True)))
    assert figures["loss"] == pytest.approx(total / 18)


class Scaled(nn.Module):
    """A criterion with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return mse_loss(output * self.scale, target) + self.scale.square()


@pytest.mark.drawn(2)
@pytest.mark.ranks(1, 2, 3)
async def test_n14_the_criterion_may_have_parameters(coll: Communicator) -> None:
    both = WithCriterion(Job.build(), Scaled())
    net = await DataParallel.create(both, coll)
    engine = Engine(net, torch.optim.SGD(net.parameters(), lr=0.1), **Job.QUIET)
    assert engine.state.network is both.network
    await engine.train(Job.pairs(coll.rank, 4), epochs=2)

    module = WithCriterion(Job.build(), Scaled())
    opt = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in [*range(4)] * 2:
        opt.zero_grad()
        for rank in range(coll.size):
            x, y = Job.pairs(rank, 4)[step]
            (module.criterion(module(x), y) / coll.size).backward()
        opt.step()
    Job.assert_same(net, module)
    assert float(both.get_parameter("criterion.scale").detach()) != 1.5


@pytest.mark.ranks(1)
async def test_n14_a_criterion_that_nobody_would_train_is_refused(coll: Communicator) -> None:
    net = await DataParallel.create(Job.build(), coll)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"'scale' that the net does not train: expected a net of .*WithCriterion"):
        Engine(net, opt, Scaled())
    both = await DataParallel.create(WithCriterion(Job.build(), Scaled()), coll)
    with pytest.raises(ValueError, match="another one is given"):
        Engine(both, torch.optim.SGD(both.parameters(), lr=0.1), mse_loss)


@pytest.mark.ranks(1)
async def test_n14_wrong_arguments(coll: Communicator) -> None:
    net = await DataParallel.create(Job.build(), coll)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    wrong: list[tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
        ((net.module, opt), {}, TypeError, r"Engine\(Sequential, SGD\): expected a DataParallel and an optimizer"),
        ((net, mse_loss), {}, TypeError, r"Engine\(DataParallel, function\)"),
        ((net, torch.optim.LBFGS(net.parameters())), {}, TypeError, "needs no closure"),
        ((net, opt, 3), {}, TypeError, "criterion is int"),
        ((net, opt, mse_loss), {"metrics": {"loss": mse_loss}}, ValueError, "other than 'loss'"),
        ((net, opt, mse_loss), {"metrics": {"a": 3}}, TypeError, "metric 'a' is int"),
        ((net, opt), {"metrics": {"a": mse_loss}}, ValueError, "expected `split=`"),
        ((net, opt, mse_loss), {"verbose": True}, TypeError, "verbose: expected progress"),
        ((net, opt, mse_loss), {"profile": 3}, TypeError, r"profile=3: .* such as \(3, 8\)"),
        ((net, opt, mse_loss), {"profile": (8, 3)}, ValueError, "the first not after the last"),
    ]
    for given, keywords, kind, text in wrong:
        with pytest.raises(kind, match=text):
            Engine(*given, **keywords)
    engine = Engine(net, opt, mse_loss, **Job.QUIET)
    with pytest.raises(ValueError, match="event 'batch': expected one of start, sample"):
        engine.on("batch", print)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="hook for 'end' is int"):
        engine.on("end", 3)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="epochs=-1"):
        await engine.train([], epochs=-1)
    with pytest.raises(TypeError, match="a list of 3: expected a pair of input and target, or `split=`"):
        await engine.train([[1, 2, 3]], epochs=1)
    with pytest.raises(TypeError, match="the sample is a int"):
        await engine.test([1])


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3).double()

    def forward(self, x: Tensor, *, y: Tensor | None = None) -> Tensor:
        out: Tensor = self.layer(x)
        return out if y is None else mse_loss(out, y)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("form", ["arguments", "keywords", "split"])
async def test_n14_forms_of_samples(coll: Communicator, form: str) -> None:
    """The network itself may return the loss, of a dict; or a function returns input and target."""
    torch.manual_seed(coll.rank)
    net = await DataParallel.create(Named(), coll)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    pairs = Job.pairs(coll.rank, 3)
    if form == "keywords":
        await Engine(net, opt, **Job.QUIET).train([{"x": x, "y": y} for x, y in pairs], epochs=1)
    elif form == "split":
        engine = Engine(net, opt, mse_loss, split=lambda sample: (sample["x"], sample["y"]), **Job.QUIET)
        await engine.train([{"x": x, "y": y} for x, y in pairs], epochs=1)
    else:
        await Engine(net, opt, mse_loss, **Job.QUIET).train([((x,), y) for x, y in pairs], epochs=1)
    torch.manual_seed(0)
    Job.assert_same(net, Job.alone(2, [3, 3], make=Named))


@pytest.mark.ranks(2)
async def test_n14_kinds_of_loaders(coll: Communicator) -> None:
    """A DataLoader whose sampler has `set_epoch`, an async generator, the result of `prefetch`."""
    x, y = (torch.cat(parts) for parts in zip(*Job.pairs(0, 8), strict=True))
    sampler = ShardSampler(len(x), coll, shuffle=True, drop_last=True)
    loader: Any = DataLoader(TensorDataset(x, y), batch_size=5, sampler=sampler)
    net = await DataParallel.create(Job.build(), coll)
    engine = Engine(net, torch.optim.SGD(net.parameters(), lr=0.1), mse_loss, **Job.QUIET)
    told = []
    engine.on("sample", lambda state: told.append((state.epoch, sampler.epoch)))
    await engine.train(prefetch(loader, depth=3, workers=2, transform=lambda pair: pair), epochs=2)
    assert told == [(1, 0)] * 3 + [(2, 1)] * 3

    async def batches() -> AsyncIterator[Any]:
        for pair in Job.pairs(coll.rank, 2):
            yield pair

    await engine.train(batches(), epochs=3)
    assert engine.state.step == 8
    await assert_synchronized(net.module, coll)


@pytest.mark.ranks(1, 2)
async def test_n14_epochs_count_those_of_before(coll: Communicator) -> None:
    net = await DataParallel.create(Job.build(), coll)
    engine = Engine(net, torch.optim.SGD(net.parameters(), lr=0.1), mse_loss, **Job.QUIET)
    pairs = Job.pairs(coll.rank, 3)
    assert await engine.train(pairs, epochs=0) == {}
    await engine.train(pairs, epochs=1)
    first = await engine.train(pairs, epochs=1)
    assert engine.state.step == 3
    assert await engine.train(pairs, epochs=2) != first
    assert engine.state.step == 6
    Job.assert_same(net, Job.alone(coll.size, [3] * coll.size, epochs=2))


@pytest.mark.ranks(2)
async def test_n14_a_training_inside_itself_is_refused(coll: Communicator) -> None:
    net = await DataParallel.create(Job.build(), coll)
    engine = Engine(net, torch.optim.SGD(net.parameters(), lr=0.1), mse_loss, **Job.QUIET)

    @engine.on("epoch")
    async def again(state: State) -> None:
        await engine.train([], epochs=1)

    with pytest.raises(RuntimeError, match=r"engine\.train inside itself"):
        await engine.train(Job.pairs(coll.rank, 1), epochs=1)
