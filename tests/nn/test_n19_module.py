"""N19: helpers that look for a module find its methods at the net."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from aiodist import Communicator
from aiodist.nn import (
    DataParallel,
    LocalSGD,
    PipelinedOptimizer,
    ShardedOptimizer,
    functional,
    synchronize_gradients,
)
from aiodist.types import SumOrMean
from tests.nn.conftest import Trial


def normed() -> nn.Sequential:
    return nn.Sequential(Trial.Mlp(), nn.BatchNorm1d(3).double())


@pytest.mark.ranks(1)
async def test_n19_what_a_module_has(coll: Communicator) -> None:
    module = normed()
    net = await DataParallel.create(module, coll)
    lists = ["parameters", "named_parameters", "buffers", "named_buffers", "modules", "named_modules", "children"]
    for name in [*lists, "named_children"]:
        ours, theirs = list(getattr(net, name)()), list(getattr(module, name)())
        assert len(ours) == len(theirs)
        assert ours == theirs if name.startswith("named_") else all(a is b for a, b in zip(ours, theirs, strict=True))
    assert [name for name, _ in net.named_parameters(prefix="p", recurse=True)][0] == "p.0.0.weight"  # noqa: RUF015
    assert net.get_submodule("0.2") is module.get_submodule("0.2")
    assert net.get_parameter("1.bias") is module[1].bias
    assert net.get_buffer("1.running_mean") is module[1].running_mean
    assert net.training
    assert net.eval() is net
    assert not net.training
    assert not module[1].training
    assert net.train().training
    assert net.requires_grad_(False) is net
    assert not any(p.requires_grad for p in module.parameters())
    net.requires_grad_()
    assert net.apply(lambda m: setattr(m, "seen", True)) is net
    assert all(hasattr(m, "seen") for m in module.modules())
    for name in ("to", "cuda", "cpu", "half", "float", "double", "bfloat16", "type", "to_empty"):
        with pytest.raises(RuntimeError, match=rf"DataParallel\.{name}.*move it before create\(\)"):
            getattr(net, name)("cpu")
    assert next(net.parameters()).dtype is torch.float64


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("run", r"net\.submit\(fn\)"),
        ("settings", r"net\.configure\(\.\.\.\)"),
        ("gradients", r"net\.backward_iter\(loss\)"),
        ("steps", r"net\.steps_done"),
        ("open", r"net\.closed, which is True once"),
    ],
)
async def test_n19_an_old_name_is_an_error_that_names_the_new_one(coll: Communicator, old: str, new: str) -> None:
    net: Any = await DataParallel.create(Trial.Mlp(), coll)
    with pytest.raises(AttributeError, match=rf"no attribute '{old}': use {new}"):
        getattr(net, old)
    assert not hasattr(net, old)


@pytest.mark.ranks(1)
async def test_n19_a_setting_that_is_none_is_named(coll: Communicator) -> None:
    create: Any = DataParallel.create
    with pytest.raises(TypeError, match=r"own=: use per_rank="):
        await create(Trial.Mlp(), coll, own=["0.weight"])
    with pytest.raises(
        TypeError, match=r"clip_nrm: expected clip_norm, scaler, scheduler, autocast, per_rank, log, log_every$"
    ):
        await create(Trial.Mlp(), coll, clip_nrm=1.0)


@pytest.mark.ranks(2)
async def test_n19_avg_is_the_mean(coll: Communicator) -> None:
    """Each call with `op=` for gradients takes "avg"."""
    found = []
    ops: tuple[SumOrMean, ...] = ("avg", "mean", "sum")
    for op in ops:
        module, x = Trial.Mlp(), Trial.batch(coll.rank, 0)[0]
        net = await DataParallel.create(module, coll, op=op)
        await net.backward(module(x).sum())
        first = next(module.parameters())
        assert first.grad is not None
        reduced = first.grad.clone()
        await net.aclose()
        module.zero_grad()
        module(x).sum().backward()
        await synchronize_gradients(module, coll, op=op)
        torch.testing.assert_close(first.grad, reduced)
        threaded = await coll.dup(thread=True)
        found.append((reduced, await functional.allreduce(x, threaded, op)))
    torch.testing.assert_close(found[0], found[1])
    assert not found[0][1].equal(found[2][1])


@pytest.mark.ranks(1)
async def test_n19_names_of_the_inside_are_not_listed(coll: Communicator) -> None:
    net = await DataParallel.create(Trial.Mlp(), coll)
    assert not {"reducer", "compute", "expected_state", "check_updated"} & set(dir(net))
    assert not net.closed
    await net.aclose()
    assert net.closed


@pytest.mark.ranks(1)
@pytest.mark.parametrize("kind", [DataParallel, PipelinedOptimizer, ShardedOptimizer, LocalSGD])
async def test_n19_what_all_ranks_make_together_is_made_by_create(coll: Communicator, kind: Any) -> None:
    with pytest.raises(TypeError, match=rf"{kind.__name__}\(\.\.\.\): .* `await {kind.__name__}\.create\("):
        kind(Trial.Mlp(), coll, every=2)


@pytest.mark.ranks(2)
async def test_n19_an_average_of_the_weights(coll: Communicator) -> None:
    """torch's EMA is fed from the net, its statistics of BatchNorm too."""
    net = await DataParallel.create(normed(), coll)
    opt = Trial.OPTIMIZERS["sgd"](net.parameters())
    average: Any = AveragedModel(net.module, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    expected = None
    for step in range(4):
        await net.step(Trial.loss, opt, net, coll.rank, step)
        average.update_parameters(net)
        weight = net.get_parameter("0.2.weight").detach()
        expected = weight.clone() if expected is None else 0.5 * expected + 0.5 * weight
    torch.testing.assert_close(average.module[0][2].weight.detach(), expected)
    assert torch.equal(average.module[1].running_mean, net.get_buffer("1.running_mean"))
    targets: list[Any] = [average, net]
    for target in targets:
        update_bn([Trial.batch(0, step)[0] for step in range(3)], target)
    assert int(net.get_buffer("1.num_batches_tracked")) == 3
    Trial.loss(average, coll.rank, 0).backward()  # a module of its own


@pytest.mark.thorough  # to import torchmetrics takes 2 s, and a test of the engine does
@pytest.mark.ranks(2)
async def test_n19_torchmetrics(coll: Communicator) -> None:
    """A metric of each rank, whose numbers the ranks gather."""
    net = await DataParallel.create(Trial.Mlp(), coll)
    from torchmetrics.classification import MulticlassAccuracy  # takes 2 s, which every process would pay

    metric = MulticlassAccuracy(num_classes=3, average="micro")
    right = []
    for step in range(3):
        x, y = Trial.batch(coll.rank, step)
        scores, labels = await net.submit(net, x), y.argmax(1)
        metric.update(scores, labels)
        right += (scores.argmax(1) == labels).tolist()
    mine = sum(right) / len(right)
    assert float(metric.compute()) == pytest.approx(mine)
    by_rank = await coll.allgather(float(metric.compute()))
    assert by_rank[coll.rank] == pytest.approx(mine)
    assert await coll.allgather(mine) == pytest.approx(by_rank)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("pipelined", [False, True])
async def test_n19_freezing_all_but_the_head(coll: Communicator, pipelined: bool) -> None:
    net, opt = await Trial.made(coll, pipelined=pipelined)
    alone = Trial.Mlp()
    theirs = Trial.OPTIMIZERS["sgd"](alone.parameters())
    for step in range(4):
        for each in (net, alone):
            each.requires_grad_(step != 1)
            each.get_submodule("4").requires_grad_()
        await net.step(partial(Trial.loss, net, coll.rank, step), opt)
        Trial.step_alone(alone, theirs, 2, step)
    if pipelined:
        await opt.flush()
    Trial.assert_same(net, alone)
