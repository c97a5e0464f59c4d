"""N3: ranks raise if their numbers of steps differ, after an optimizer that raised or data that ended."""

from __future__ import annotations

import asyncio
import re
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import pytest
import torch

import aiodist
from aiodist import Communicator
from aiodist.nn import DataParallel, PipelinedOptimizer, assert_synchronized
from aiodist.testing import run_ranks
from tests.nn.conftest import Trial

each_size = pytest.mark.parametrize("sizes", [Trial.SMALL, {}], ids=["each", "one"])


class Fails(torch.optim.SGD):
    """An optimizer that raises if `fails` is set."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if type(self).fails:
            raise ArithmeticError("no luck")
        return super().step(closure)


def failing(fails: bool) -> type[Fails]:
    """Return a class of each rank's own."""
    return type("Failing", (Fails,), {"fails": fails})


async def update(net: DataParallel, opt: Any, rank: int, step: int, way: str) -> None:
    if way in ("run", "plain", "between"):
        net.zero_grad()
        await net.backward(Trial.loss(net, rank, step))
        if way == "between" and type(opt).fails:
            raise ArithmeticError("no luck")
        if way == "run":
            await net.submit(opt.step)
        else:
            opt.step()
    else:
        await net.step(partial(Trial.loss, net, rank, step), opt)
    if way == "pipelined":
        await opt.flush()


@pytest.mark.drawn(4)
@pytest.mark.ranks(2, 3)
@pytest.mark.ranks(2, backend="gloo")
@each_size
@pytest.mark.parametrize("way", ["step", "run", "pipelined", "plain", "between"])
async def test_n3_an_optimizer_that_raises_on_one_rank(coll: Communicator, sizes: dict[str, Any], way: str) -> None:
    """The next step raises on all, with ranks and numbers, makes nothing worse; a state that all load ends it.

    However it is called, or where what comes before it raised.
    """
    net = await DataParallel.create(Trial.Mlp(), coll, **sizes)
    kind = failing(False)
    opt: Any = (
        await PipelinedOptimizer.create(net, partial(kind, lr=0.1))
        if way == "pipelined"
        else kind(net.parameters(), lr=0.1)
    )
    await update(net, opt, coll.rank, 0, way)
    kind.fails = coll.rank == 1
    if coll.rank == 1:
        with pytest.raises(ArithmeticError, match="no luck"):
            await update(net, opt, coll.rank, 1, way)
    else:
        await update(net, opt, coll.rank, 1, way)
    kind.fails = False
    before = [p.detach().clone() for p in net.parameters()]
    others = "ranks 0, 2" if coll.size == 3 else "rank 0"
    why = "" if way in ("plain", "between") else r", since its optimizer raised ArithmeticError\('no luck'\)"
    text = rf"{others}: 2 steps made; rank 1: 1 step made{why}; a rank that alone raises in or before `opt\.step\(\)`"
    for _ in range(2):
        with pytest.raises(aiodist.MismatchError, match=text):
            await update(net, opt, coll.rank, 2, way)
        assert all(map(torch.equal, before, net.parameters()))
    if way == "pipelined":
        with suppress(aiodist.MismatchError):
            await opt.flush()
    net.load_state_dict(Trial.Mlp().state_dict())
    for step in range(2):
        await update(net, opt, coll.rank, step, way)
    Trial.assert_same(net, Trial.alone(coll.size, 2))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", ["step", "run", "pipelined", "plain", "between"])
async def test_n3_an_optimizer_that_raises_on_all_ranks(coll: Communicator, way: str) -> None:
    """The ranks stay equal, so the next step works."""
    net = await DataParallel.create(Trial.Mlp(), coll, **Trial.SMALL)
    kind = failing(False)
    opt: Any = (
        await PipelinedOptimizer.create(net, partial(kind, lr=0.1))
        if way == "pipelined"
        else kind(net.parameters(), lr=0.1)
    )
    for step in range(3):
        kind.fails = step == 1
        if kind.fails:
            with pytest.raises(ArithmeticError, match="no luck"):
                await update(net, opt, coll.rank, step, way)
        else:
            await update(net, opt, coll.rank, step and 1, way)
    Trial.assert_same(net, Trial.alone(2, 2))


@pytest.mark.ranks(2)
async def test_n3_only_one_rank_loads_a_state(coll: Communicator) -> None:
    net, opt = await Trial.made(coll)
    await net.step(partial(Trial.loss, net, coll.rank, 0), opt)
    if coll.rank:
        net.load_state_dict(Trial.Mlp().state_dict())
    with pytest.raises(
        aiodist.MismatchError, match=r"rank 0: 1 step made; rank 1: 0 steps made after a load of the state \w+"
    ):
        await net.step(partial(Trial.loss, net, coll.rank, 1), opt)


@pytest.mark.ranks(2)
async def test_n3_a_state_that_one_rank_loads_before_the_first_step(coll: Communicator) -> None:
    """Or another one than the others; once all have loaded the same, the next step works."""
    net, opt = await Trial.made(coll)
    states = [{name: t + i for name, t in Trial.Mlp().state_dict().items()} for i in range(2)]
    alone = r"rank 0: 0 steps made; rank 1: 0 steps made after a load of the state \w+"
    if coll.rank:
        net.load_state_dict(states[1])
    for _ in range(2):
        with pytest.raises(aiodist.MismatchError, match=alone):
            await net.step(partial(Trial.loss, net, coll.rank, 0), opt)
    with pytest.raises(aiodist.MismatchError, match=alone):
        await net.backward(Trial.loss(net, coll.rank, 0))
    net.load_state_dict(states[coll.rank])
    with pytest.raises(
        aiodist.MismatchError, match=r"0: .* the state \w+; rank 1: 0 steps made after a load of the state"
    ):
        await net.step(partial(Trial.loss, net, coll.rank, 0), opt)
    net.load_state_dict(states[0])
    await net.step(partial(Trial.loss, net, coll.rank, 0), opt)
    await net.step(partial(Trial.loss, net, coll.rank, 1), opt)
    await assert_synchronized(net.module, coll)


@pytest.mark.ranks(2)
async def test_n3_a_state_that_one_rank_cannot_load(coll: Communicator) -> None:
    """The state does not count as loaded on the rank that failed."""
    net, opt = await Trial.made(coll)
    await net.step(partial(Trial.loss, net, coll.rank, 0), opt)
    state = Trial.Mlp().state_dict()
    with pytest.raises(RuntimeError, match="size mismatch") if coll.rank else nullcontext():
        net.load_state_dict({**state, "0.weight": torch.zeros(1)} if coll.rank else state)
    with pytest.raises(
        aiodist.MismatchError, match=r"rank 0: 0 steps made after a load of the state \w+; rank 1: 1 step made"
    ):
        await net.step(partial(Trial.loss, net, coll.rank, 1), opt)


@pytest.mark.ranks(3)
async def test_n3_numbers_of_steps_beside_join(coll: Communicator) -> None:
    """Numbers of steps may differ inside the block and agree after it; a missed step of an optimizer raises inside."""
    net = await DataParallel.create(Trial.Mlp(), coll, **Trial.SMALL)
    kind = failing(False)
    opt = kind(net.parameters(), lr=0.1)
    for epoch in range(2):
        async with net.join(opt):
            for step in range(coll.rank + epoch):
                await net.step(partial(Trial.loss, net, coll.rank, step), opt)
        await net.step(partial(Trial.loss, net, coll.rank, 0), opt)
        await assert_synchronized(list(net.parameters()), coll)

    async def train() -> None:
        async with net.join(opt):
            for step in range(3 * coll.rank):
                kind.fails = coll.rank == 1 and step == 1
                with suppress(ArithmeticError):
                    await net.step(partial(Trial.loss, net, coll.rank, step), opt)

    with pytest.raises(aiodist.MismatchError, match=r"rank 1: 8 steps made, since .*; rank 2: 9 steps made"):
        await train()


@pytest.mark.parametrize("counts", [(3, 4), (2, 5, 2), (0, 1)], ids=str)
@pytest.mark.parametrize("sizes", [Trial.SMALL, {}], ids=["each", "one"])
@pytest.mark.parametrize("pipelined", [False, True])
def test_n3_uneven_numbers_of_steps(counts: tuple[int, ...], sizes: dict[str, Any], pipelined: bool) -> None:
    """Ranks that end early and ranks that continue get one error: ranks, numbers, the remedy, the waiting call."""
    texts: list[str] = []
    calls: list[tuple[int, str]] = []

    async def main() -> None:
        async with aiodist.init() as coll:
            net, opt = await Trial.made(coll, pipelined=pipelined, **sizes)
            try:
                for step in range(counts[coll.rank]):
                    await net.step(partial(Trial.loss, net, coll.rank, step), opt)
                await net.aclose()
            except aiodist.MismatchError as error:
                texts.append(str(error))
                calls.append((coll.rank, error.__notes__[0]))

    run_ranks(len(counts), main)
    fewest = min(counts)
    closing = "ranks 0, 2" if len(counts) == 3 else "rank 0"
    said = f"{closing}: closes the net after {fewest} steps; rank 1: is in step {fewest + 1}"
    assert len(texts) == len(counts)
    assert all(f"{said}; every rank must make as many" in text for text in texts)
    assert all("`async with net.join():`" in text for text in texts)
    for rank, note in calls:
        call = "net.aclose" if counts[rank] == fewest else "(net.step|opt.flush)" if pipelined else "net.step"
        assert re.match(rf"raised by {call} #\d+ issued at .*test_n3_steps\.py:\d+ in .*main, on aiodist-compute", note)


@pytest.mark.ranks(2)
async def test_n3_after_an_uneven_end_a_step_is_refused(coll: Communicator) -> None:
    own = await coll.dup()
    net, opt = await Trial.made(own)
    step = partial(net.step, partial(Trial.loss, net, coll.rank, 0), opt)
    with pytest.raises(aiodist.MismatchError, match="rank 0: closes the net after 0 steps; rank 1: is in step 1"):
        await (step() if coll.rank else net.aclose())
    with pytest.raises((aiodist.CommunicatorAborted, RuntimeError), match=r"closes the net after 0 steps|is closed"):
        await asyncio.wait_for(step(), 60)
    assert await coll.allreduce(1) == 2


@pytest.mark.ranks(2)
async def test_n3_only_one_rank_is_in_a_join_block(coll: Communicator) -> None:
    net = await DataParallel.create(Trial.Mlp(), await coll.dup(), **Trial.SMALL)
    opt = Trial.OPTIMIZERS["sgd"](net.parameters())
    step = partial(net.step, partial(Trial.loss, net, coll.rank, 0), opt)

    async def joined() -> None:
        async with net.join(opt):
            await step()

    with pytest.raises(aiodist.MismatchError, match=r"net\.join\(\): rank 0: inside; rank 1: outside; every rank"):
        await (step() if coll.rank else joined())
    with pytest.raises(aiodist.CommunicatorAborted, match=r"rank 0: inside; rank 1: outside"):
        await asyncio.wait_for(step(), 60)
    assert await coll.allreduce(1) == 2


@pytest.mark.ranks(1)
async def test_n3_made_without_create(coll: Communicator) -> None:
    with pytest.raises(TypeError, match=r"`await DataParallel\.create\(module, coll\)`"):
        DataParallel(Trial.Mlp(), coll)  # type: ignore[call-arg, arg-type]
    with pytest.raises(TypeError, match=r"await DataParallel\.create"):
        DataParallel(Trial.Mlp(), device_ids=[0])  # type: ignore[call-arg, arg-type]


@pytest.mark.ranks(2)
async def test_n7_optimizers_that_evaluate_the_loss_themselves(coll: Communicator) -> None:
    """LBFGS says why not, with a step of the net and with the pipelined optimizer; nothing is sent."""
    net = await DataParallel.create(Trial.Mlp(), coll)
    opt = torch.optim.LBFGS(net.parameters())
    why = r"LBFGS runs forward and backward several times by itself \(its `closure`\)"
    with pytest.raises(TypeError, match=why):
        await net.step(partial(Trial.loss, net, coll.rank, 0), opt)
    with pytest.raises(TypeError, match=why):
        await PipelinedOptimizer.create(net, torch.optim.LBFGS)
    with pytest.raises(TypeError, match="make_optimizer returned NoneType: expected an optimizer"):
        await PipelinedOptimizer.create(net, lambda params: None)  # type: ignore[arg-type, return-value]
    sgd = Trial.OPTIMIZERS["sgd"](net.parameters())
    await net.step(partial(Trial.loss, net, coll.rank, 0), sgd)
    Trial.assert_same(net, Trial.alone(2, 1))
