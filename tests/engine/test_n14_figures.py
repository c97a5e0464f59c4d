"""N14: metrics over all ranks, tests, and the display."""

import math
import re
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from aiodist import Communicator, Engine, RemoteError
from aiodist.engine import State
from aiodist.nn import DataParallel, PipelinedOptimizer
from tests.engine.conftest import Job, Pairs


def largest(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).abs().mean()


def uneven(rank: int, batches: int) -> "Pairs":
    """Batches of other numbers of samples on each rank."""
    return [pair for i in range(batches) for pair in Job.pairs(10 * rank + i, 1, samples=2 + i + rank)]


async def made(coll: Communicator, **options: Any) -> Engine:
    net = await DataParallel.create(Job.build(), coll)
    return Engine(net, torch.optim.SGD(net.parameters(), lr=0.1), mse_loss, **Job.QUIET, **options)


@pytest.mark.ranks(1, 2, 3)
async def test_n14_means_over_all_samples_of_all_ranks(coll: Communicator) -> None:
    engine = await made(coll, metrics={"mae": largest})
    counts = [(3, 1, 0)[rank] for rank in range(coll.size)]
    figures = await engine.test(uneven(coll.rank, counts[coll.rank]))
    pairs = [pair for rank in range(coll.size) for pair in uneven(rank, counts[rank])]
    x, y = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    with torch.no_grad():
        output = Job.build()(x)
    assert figures == {
        "loss": pytest.approx(float(mse_loss(output, y))),
        "mae": pytest.approx(float(largest(output, y))),
    }


@pytest.mark.ranks(1, 2, 3)
async def test_n14_torchmetrics_over_all_ranks(coll: Communicator) -> None:
    """A function of torchmetrics is a metric; an object that counts by itself is updated by a hook."""
    from torchmetrics import MeanMetric  # importing it takes a second
    from torchmetrics.functional import mean_absolute_error

    whole = MeanMetric()

    def error(output: Tensor, target: Tensor) -> Tensor:
        return mean_absolute_error(output, target)

    engine = await made(coll, metrics={"mae": error})

    @engine.on("criterion")
    def update(state: State) -> None:
        whole.update(error(state.output.detach(), state.target), len(state.target))

    counts = [(3, 1, 2)[rank] for rank in range(coll.size)]
    figures = await engine.test(uneven(coll.rank, counts[coll.rank]))
    sums = await coll.allreduce(torch.stack([whole.mean_value, whole.weight]))
    net = Job.build()
    pairs = [pair for rank in range(coll.size) for pair in uneven(rank, counts[rank])]
    output = net(torch.cat([x for x, _ in pairs])).detach()
    expected = mean_absolute_error(output, torch.cat([y for _, y in pairs]))
    assert figures["mae"] == pytest.approx(float(expected))
    assert float(sums[0] / sums[1]) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.ranks(2)
async def test_n14_metrics_begin_anew_in_each_epoch(coll: Communicator) -> None:
    metrics = {"target": lambda output, target: target.mean(), "rank": lambda output, target: float(coll.rank)}
    engine = await made(coll, metrics=metrics)
    seen = []
    engine.on("epoch", lambda state: seen.append(dict(state.metrics)))
    tests = []

    @engine.on("epoch")
    async def test(state: State) -> None:
        tests.append(await engine.test(uneven(coll.rank, 2)))

    await engine.train(Job.pairs(coll.rank, 3), epochs=3)
    expected = torch.cat([y for rank in range(2) for _, y in Job.pairs(rank, 3)]).mean()
    assert [figures["target"] for figures in seen] == [pytest.approx(float(expected), rel=1e-5)] * 3
    assert [figures["rank"] for figures in seen] == [0.5] * 3
    assert seen[0]["loss"] > seen[1]["loss"] > seen[2]["loss"]
    assert [figures["rank"] for figures in tests] == [pytest.approx(7 / 12)] * 3
    assert engine.state.metrics == seen[-1]


@pytest.mark.ranks(1, 2)
async def test_n14_no_data_at_all(coll: Communicator) -> None:
    engine = await made(coll)
    assert math.isnan((await engine.test([]))["loss"])
    assert math.isnan((await engine.train([], epochs=1))["loss"])


@pytest.mark.ranks(2)
async def test_n14_metrics_are_one_number(coll: Communicator) -> None:
    engine = await made(coll, metrics={"all": lambda output, target: output - target})
    with pytest.raises(ValueError, match=r"metric 'all' is a tensor of shape \[3, 3\]"):
        await engine.test(Job.pairs(coll.rank, 1))


class Noisy(nn.Module):
    """It has what evaluation switches off, a frozen part that evaluates in training too, and a view on grad mode."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(5, 3).double()
        self.dropout = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(3).double().eval()
        self.seen: list[tuple[bool, bool, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append((torch.is_grad_enabled(), self.dropout.training, self.norm.training))
        out: Tensor = self.norm(self.dropout(self.layer(x)))
        return out


@pytest.mark.ranks(1, 2)
async def test_n14_tests_evaluate_and_leave_everything_as_it_was(coll: Communicator) -> None:
    module = Noisy()
    net = await DataParallel.create(module, coll)
    engine = Engine(net, torch.optim.SGD(net.parameters(), lr=0.1), mse_loss, **Job.QUIET)
    before = {name: t.clone() for name, t in net.state_dict().items()}
    states = []
    engine.on("forward", lambda state: states.append(state.training))
    await engine.test(Job.pairs(coll.rank, 2))
    assert module.seen == [(False, False, False)] * 2
    assert [part.training for part in (module, module.dropout, module.norm)] == [True, True, False]
    await engine.train(Job.pairs(coll.rank, 1), epochs=1)
    assert module.seen[2:] == [(True, True, False)]
    assert states == [False, False, True]
    assert all(torch.equal(t, before[name]) for name, t in net.state_dict().items() if "running" in name)


@pytest.mark.ranks(2)
async def test_n14_a_test_sees_all_updates(coll: Communicator) -> None:
    net = await DataParallel.create(Job.build(), coll, bucket_bytes=1, first_bucket_bytes=1)
    engine = Engine(net, await PipelinedOptimizer.create(net, Job.OPTIMIZERS["sgd"]), mse_loss, **Job.QUIET)
    found = []

    @engine.on("update")
    async def test(state: State) -> None:
        found.append((await engine.test(Job.pairs(5, 1)))["loss"])

    await engine.train(Job.pairs(coll.rank, 2), epochs=1)
    x, y = Job.pairs(5, 1)[0]
    for steps, loss in enumerate(found, start=1):
        assert loss == pytest.approx(float(mse_loss(Job.alone(2, [steps, steps])(x), y).detach()))


@pytest.mark.ranks(2, 3)
async def test_n14_a_test_that_fails_on_one_rank(coll: Communicator) -> None:
    engine = await made(coll)

    @engine.on("forward")
    def fail(state: State) -> None:
        if coll.rank == 0:
            raise ArithmeticError("here")

    kind: type[Exception] = RemoteError if coll.rank else ArithmeticError
    with pytest.raises(kind, match="here"):
        await engine.test(Job.pairs(coll.rank, 1 + coll.rank))
    assert engine.state.net.training


@pytest.mark.ranks(2)
async def test_n14_a_line_for_each_epoch_on_rank_0(coll: Communicator, capsys: pytest.CaptureFixture[str]) -> None:
    net = await DataParallel.create(Job.build(), coll)
    engine = Engine(net, torch.optim.SGD(net.parameters(), lr=0.1), mse_loss, metrics={"mae": largest})
    figures = await engine.train(Job.pairs(coll.rank, 2), epochs=2)
    await coll.barrier()
    if coll.rank == 0:
        lines = capsys.readouterr().out.splitlines()
        assert [line.split(":")[0] for line in lines] == ["epoch 1/2", "epoch 2/2"]
        assert f"loss {figures['loss']:.4g}, mae {figures['mae']:.4g}, " in lines[1]


@pytest.mark.ranks(1)
async def test_n14_a_bar_on_a_terminal(
    coll: Communicator, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is drawn again where the last time is 0.2 s ago, and not with each step."""
    now = [0.0]
    monkeypatch.setattr(sys.modules["aiodist.engine.display"], "perf_counter", lambda: now[0])
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "100"}.items():
        monkeypatch.setenv(name, value)
    net = await DataParallel.create(Job.build(), coll)
    engine = Engine(net, torch.optim.SGD(net.parameters(), lr=0.1), mse_loss)

    @engine.on("backward")
    def later(state: State) -> None:
        now[0] += 0.25 if state.batch == 3 else 0.01

    await engine.train(Job.pairs(0, 7), epochs=2)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().out)
    assert "epoch 1/2 loss 0." in text
    assert "3/7" in text
    assert "4/7" not in text
    assert re.search(r"epoch 1/2: loss 1\.\d+, 0\.3 s", text)
