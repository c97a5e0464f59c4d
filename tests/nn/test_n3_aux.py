"""N3: forward may return `(loss, aux)`, and a step returns both: what one process has of the same batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import mse_loss

import aiodist
from aiodist import Communicator, nn
from aiodist.nn import DataParallel
from tests.nn.conftest import Trial
from tests.support.awaited import awaited

MOMENTUM = Trial.OPTIMIZERS["momentum"]
DRIVERS: dict[str, Callable[[DataParallel], Any]] = {
    "plain": lambda net: MOMENTUM(net.parameters()),
    "pipelined": lambda net: nn.PipelinedOptimizer.create(net, MOMENTUM),
    "sharded": lambda net: nn.ShardedOptimizer.create(net, MOMENTUM),
    "local": lambda net: nn.LocalSGD.create(net, MOMENTUM(net.parameters()), every=1),
}


class Seen(NamedTuple):
    output: Tensor
    rank: int
    more: dict[str, list[Tensor]]


def forward(module: Any, rank: int, step: int) -> tuple[Tensor, Seen]:
    x, y = Trial.batch(rank, step)
    output = module(x)
    return mse_loss(output, y), Seen(output, rank, {"both": [x, output * 2]})


def assert_seen(seen: tuple[Tensor, Seen], module: torch.nn.Module, rank: int, step: int) -> None:
    """Compare with the forward of `module`, a copy from before the step, on the same batch."""
    with torch.no_grad():
        expected = forward(module, rank, step)
    loss, aux = seen
    torch.testing.assert_close(loss, expected[0])
    torch.testing.assert_close(aux.output, expected[1].output)
    torch.testing.assert_close(aux.more["both"], expected[1].more["both"])
    assert aux.rank == rank
    assert not any(t.requires_grad for t in (loss, aux.output, *aux.more["both"]))


@pytest.mark.drawn(4)
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("driver", DRIVERS)
async def test_n3_a_step_returns_what_forward_returns_beside_the_loss(coll: Communicator, driver: str) -> None:
    net = await DataParallel.create(Trial.Mlp(), coll, **Trial.FEW)
    opt = await awaited(DRIVERS[driver](net))
    alone = Trial.Mlp()
    theirs = MOMENTUM(alone.parameters())
    for step in range(4):
        seen = await net.step(forward, opt, net, coll.rank, step)
        assert_seen(seen, alone, coll.rank, step)
        Trial.step_alone(alone, theirs, coll.size, step)
    if driver != "plain":
        await opt.flush()
    Trial.assert_same(net, alone)


@pytest.mark.ranks(2)
async def test_n3_aux_of_a_step_of_one_rank(coll: Communicator) -> None:
    net = await DataParallel.create(Trial.Mlp(), coll)
    local = await nn.LocalSGD.create(net, MOMENTUM(net.parameters()), every=2)
    alone = Trial.Mlp()
    theirs = MOMENTUM(alone.parameters())
    for step in range(2):
        assert_seen(await net.step(forward, local, net, coll.rank, step), alone, coll.rank, step)
        theirs.zero_grad()
        Trial.loss(alone, coll.rank, step).backward()
        theirs.step()
    await local.flush()


@pytest.mark.drawn(2)
@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("driver", DRIVERS)
async def test_n3_a_list_of_functions_has_a_list_of_aux(coll: Communicator, driver: str) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    net = await DataParallel.create(Trial.Mlp(), coll, scaler=scaler)
    opt = await awaited(DRIVERS[driver](net))
    alone = Trial.Mlp()
    parts = [partial(forward, net, coll.rank, number) for number in range(3)]
    loss, aux = await net.step(parts, opt)
    for number in range(3):
        assert_seen(
            (mse_loss(aux[number].output, Trial.batch(coll.rank, number)[1]), aux[number]), alone, coll.rank, number
        )
    torch.testing.assert_close(
        loss, torch.stack([Trial.loss(alone, coll.rank, number) for number in range(3)]).sum().detach()
    )
    _, (only,) = await net.step(parts[:1], opt)
    assert only.rank == coll.rank
    mixed: list[Any] = [parts[0], partial(Trial.loss, net, coll.rank, 1)]
    _, (first, second) = await net.step(mixed, opt)
    assert first.rank == coll.rank
    assert second is None


@pytest.mark.ranks(2)
async def test_n3_aux_within_join(coll: Communicator) -> None:
    net, opt = await Trial.made(coll)
    alone = Trial.Mlp()
    theirs = Trial.OPTIMIZERS["sgd"](alone.parameters())
    async with net.join():
        for step in range(2 + 2 * coll.rank):
            assert_seen(await net.step(forward, opt, net, coll.rank, step), alone, coll.rank, step)
            theirs.zero_grad()
            with_data = [rank for rank in range(coll.size) if step < 2 + 2 * rank]
            torch.stack([Trial.loss(alone, rank, step) for rank in with_data]).mean().backward()
            theirs.step()
    if coll.rank == 1:
        Trial.assert_same(net, alone)
    await nn.assert_synchronized(net.module, coll)


@pytest.mark.ranks(1)
async def test_n3_aux_without_gradients_is_the_very_object(coll: Communicator) -> None:
    net, opt = await Trial.made(coll)
    given: list[Any] = [{"name": object(), "count": torch.ones(2)}, None]
    for each in given:
        _, aux = await net.step(lambda each=each: (Trial.loss(net, 0, 0), each), opt)
        assert aux is each


WRONG: dict[str, tuple[Callable[[Tensor], Any], type[Exception], str]] = {
    "three": (lambda loss: (loss, 1, 2), TypeError, r"forward returned tuple: expected the loss, .* or \(loss, aux\)"),
    "list": (lambda loss: [loss, 1], TypeError, r"forward returned list: .* or \(loss, aux\)"),
    "the other way": (lambda loss: (1, loss), TypeError, r"forward returned int: .* or \(loss, aux\)"),
    "output first": (lambda loss: (loss.expand(3), loss), ValueError, r"a tensor of shape \[3\]: expected the loss"),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrong", WRONG)
async def test_n3_what_is_no_pair_of_loss_and_aux_is_refused(coll: Communicator, wrong: str) -> None:
    given, error, text = WRONG[wrong]
    net, opt = await Trial.made(coll)
    if coll.rank == 0:
        with pytest.raises(error, match=text):
            await net.step(lambda: given(Trial.loss(net, 0, 0)), opt)
    else:
        with pytest.raises(aiodist.RemoteError, match=text):
            await net.step(forward, opt, net, 1, 0)
    await net.step(forward, opt, net, coll.rank, 0)
    await nn.assert_synchronized(net.module, coll)
