"""N3 on one rank: its gradients are the mean already, so nothing is hooked, packed, issued or waited for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from aiodist import AiodistError, Communicator
from aiodist.nn import DataParallel
from aiodist.testing.seams.progress import compute_of, reducer_of
from tests.nn.conftest import Trial
from tests.support.simulated_cuda.device import SimulatedCuda

pytestmark = pytest.mark.ranks(1)
STEPS = 4


def issued(net: DataParallel) -> list[int]:
    """Return the numbers of the next operations on the net's communicators."""
    return [
        comm.allreduce(torch.zeros(1)).detach().seq for comm in (reducer_of(net).data, reducer_of(net).consensus.comm)
    ]


async def test_n3_a_rank_alone_issues_nothing(coll: Communicator) -> None:
    net, opt = await Trial.made(coll, "momentum", **Trial.FEW)
    before = issued(net)
    made: dict[nn.Parameter, int] = {}
    for p in net.parameters():
        p.register_post_accumulate_grad_hook(lambda p: made.update({p: p.grad.data_ptr()}))
    for step in range(STEPS):
        await net.step(Trial.loss, opt, net, 0, step)
        assert reducer_of(net).last is None
    assert issued(net) == [number + 1 for number in before]
    assert made == {p: p.grad.data_ptr() for p in net.parameters() if p.grad is not None}
    for ours, theirs in zip(net.parameters(), Trial.alone(1, STEPS, optimizer="momentum").parameters(), strict=True):
        assert torch.equal(ours, theirs)
    known, nbytes = net.statistics(), STEPS * sum(p.nbytes for p in net.parameters())
    assert (known.passes, known.buckets) == (STEPS, STEPS * len(reducer_of(net).buckets))
    assert known.nbytes == known.sent_nbytes == nbytes
    assert net.steps_done == STEPS


async def test_n3_a_rank_alone_has_few_hooks(coll: Communicator) -> None:
    """Before it asks for gradients as they come, which needs one for each bucket and those of each module."""
    net, opt = await Trial.made(coll, **Trial.SMALL)
    for step in range(3):
        await net.step(Trial.loss, opt, net, 0, step)
        assert sum(bool(p._post_accumulate_grad_hooks) for p in net.parameters()) == 4
    with pytest.raises(RuntimeError, match=r"got a gradient outside of net\.step and net\.backward"):
        Trial.loss(net, 0, 0).backward()
    net.zero_grad()
    expected = Trial.Mlp()
    expected.load_state_dict(net.state_dict())
    for step in range(3):
        expected.zero_grad()
        Trial.loss(expected, 0, step).backward()
        net.zero_grad()
        came = [p async for p, _ in net.backward_iter(await net.submit(Trial.loss, net, 0, step))]
        assert len(came) == 6
        Trial.assert_same_gradients(net.module, expected)
        net.zero_grad()
        await net.backward(await net.submit(Trial.loss, net, 0, step))
        Trial.assert_same_gradients(net.module, expected)


async def test_n3_a_rank_alone_adds_up(coll: Communicator) -> None:
    """Gradients are added to earlier ones, under `no_sync` or not; an unused parameter keeps its own."""
    net, expected = await DataParallel.create(Trial.Mlp(), coll, op="sum"), Trial.Mlp()
    module: Any = net.module
    module[2].bias.grad, expected[2].bias.grad = (torch.ones_like(module[2].bias) for _ in range(2))
    for step in range(4):
        through(expected, Trial.batch(0, step)).backward()
        loss = await net.submit(through, module, Trial.batch(0, step))
        if step % 2:
            with net.no_sync():
                await net.backward(loss)
        else:
            await net.backward(loss)
    Trial.assert_same_gradients(net.module, expected)


def through(module: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return a loss that does not depend on one bias."""
    x, y = batch
    return mse_loss(module[4](torch.tanh(nn.functional.linear(module[0](x), module[2].weight))), y)


@pytest.mark.parametrize("where", ["forward", "backward", "sparse"])
async def test_n3_what_a_rank_alone_raises(coll: Communicator, where: str) -> None:
    table = nn.Embedding(5, 6).double()
    net = await DataParallel.create(nn.Sequential(Trial.Mlp(), table), coll)
    module: Any = net.module
    opt = Trial.OPTIMIZERS["sgd"](net.parameters())

    def failing(step: int) -> Tensor:
        table.sparse = where == "sparse"
        loss: Tensor = Trial.loss(module[0], 0, step) + table(torch.tensor([1])).sum()
        if where == "forward":
            raise LookupError("wrong")
        if where == "backward":
            loss.register_hook(lambda _: 1 / 0)
        return loss

    await net.step(lambda: Trial.loss(module[0], 0, 0), opt)
    before = [p.detach().clone() for p in net.parameters()]
    error, text = {"forward": (LookupError, "wrong"), "backward": (ZeroDivisionError, "division")}.get(
        where, (TypeError, "'1.weight' has a gradient of layout torch.sparse_coo: expected a dense one")
    )
    with pytest.raises(error, match=text):
        await net.step(failing, opt, 1)
    assert all(map(torch.equal, before, net.parameters()))
    assert net.steps_done == 1
    table.sparse = False
    await net.step(lambda: Trial.loss(module[0], 0, 1), opt)
    Trial.assert_same(module[0], Trial.alone(1, 2))


async def test_n3_a_rank_alone_whose_communicator_is_given_up(coll: Communicator) -> None:
    net, opt = await Trial.made(coll)
    await net.step(Trial.loss, opt, net, 0, 0)
    reducer_of(net).data.abort("the cable was pulled")
    with pytest.raises(AiodistError, match="the cable was pulled"):
        await net.step(Trial.loss, opt, net, 0, 1)


async def test_n3_cuda_a_rank_alone_queues_nothing_of_its_own(
    coll: Communicator, simulated_cuda: SimulatedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, opt = await Trial.made(coll, "sgd", Trial.Mlp().to(coll.device), **Trial.FEW)
    recorded: list[torch.cuda.Event] = []
    record = torch.cuda.Event.record

    def noted(event: torch.cuda.Event, *args: Any) -> None:
        recorded.append(event)
        record(event, *args)

    monkeypatch.setattr(torch.cuda.Event, "record", noted)
    for step in range(STEPS):
        x, y = (t.to(coll.device) for t in Trial.batch(0, step))
        await net.step(lambda x, y: mse_loss(net(x), y), opt, x, y)
        assert len(recorded) <= 1  # the first step begins behind what the caller has queued
    await net.submit(compute_of(net).finish)
    Trial.assert_same(net, Trial.alone(1, STEPS))
    await net.aclose()
