"""N14: a training ends on all ranks, however it ends: a hook raises, a rank stops or is cancelled, data are uneven."""

import asyncio
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.nn.functional import mse_loss

import aiodist
from aiodist import Communicator, CommunicatorAborted, Engine, MismatchError, RemoteError
from aiodist.engine import State
from aiodist.nn import DataParallel, LocalSGD, PipelinedOptimizer, ShardedOptimizer, assert_synchronized
from aiodist.testing import run_ranks
from tests.engine.conftest import Job

EVENTS = ["start", "sample", "forward", "criterion", "backward", "update", "epoch", "end"]


class Broken(Exception):
    """The error of a rank in these tests."""


async def made(coll: Communicator, *, pipelined: bool = False, sharded: bool = False, **options: Any) -> Engine:
    net = await DataParallel.create(Job.build(), coll, bucket_bytes=1, first_bucket_bytes=1)
    make = Job.OPTIMIZERS["momentum"]
    opt: Any = await PipelinedOptimizer.create(net, make) if pipelined else make(net.parameters())
    if sharded:
        opt = await ShardedOptimizer.create(net, make)
    return Engine(net, opt, mse_loss, **Job.QUIET, **options)


async def check_failed(coll: Communicator, guilty: int, train: Any) -> None:
    """The rank that failed raises its own error, and the others get its traceback."""
    if coll.rank == guilty:
        with pytest.raises(Broken, match="here"):
            await train
    else:
        with pytest.raises(RemoteError, match=f"rank {guilty} .*failed in this .*Broken: here") as caught:
            await train
        assert caught.value.raised_by == guilty
        assert "in fail" in caught.value.traceback


@pytest.mark.drawn(3)
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize("event", EVENTS)
async def test_n14_a_hook_that_raises(coll: Communicator, event: Any, at: int) -> None:
    """In the first step, and in the last one of an epoch, after which the others make no step."""
    guilty = coll.size - 1
    engine = await made(coll)

    def fail(state: State) -> None:
        if coll.rank == guilty and (state.batch in (0, at) or event in ("epoch", "end")):
            raise Broken("here")

    engine.on(event, fail)
    await check_failed(coll, guilty, engine.train(Job.pairs(coll.rank, 3), epochs=2))
    assert await coll.allreduce(1) == coll.size  # nothing is left on the way


@pytest.mark.drawn(3)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("event", EVENTS)
async def test_n14_a_coroutine_that_raises_with_a_pipelined_optimizer(coll: Communicator, event: Any) -> None:
    engine = await made(coll, pipelined=True)

    async def fail(state: State) -> None:
        await asyncio.sleep(0)
        if coll.rank == 0 and (state.batch in (0, 2) or event in ("epoch", "end")):
            raise Broken("here")

    engine.on(event, fail)
    await check_failed(coll, 0, engine.train(Job.pairs(coll.rank, 3), epochs=1))


@pytest.mark.drawn(3)
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("event", [*EVENTS, "optimizer"])
async def test_n14_a_failure_with_a_sharded_optimizer(coll: Communicator, event: Any) -> None:
    engine = await made(coll, sharded=True)
    guilty = coll.size - 1

    def fail(state: State) -> None:
        if coll.rank == guilty and (state.batch in (0, 2) or event in ("epoch", "end")):
            raise Broken("here")

    if event == "optimizer":
        engine.state.optimizer.optimizer.register_step_pre_hook(lambda *_: fail(engine.state))
    else:
        engine.on(event, fail)
    await check_failed(coll, guilty, engine.train(Job.pairs(coll.rank, 3), epochs=1))


@pytest.mark.drawn(2)
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("event", ["sample", "forward", "criterion", "backward", "update", "epoch"])
async def test_n14_a_hook_that_raises_amid_uneven_data(coll: Communicator, event: Any) -> None:
    guilty = coll.size - 1
    engine = await made(coll)

    def fail(state: State) -> None:
        if coll.rank == guilty and (state.batch == 3 or event == "epoch"):
            raise Broken("here")

    engine.on(event, fail)
    await check_failed(coll, guilty, engine.train(Job.pairs(coll.rank, 2 + 2 * coll.rank), epochs=2))


def broken_after(pairs: list[Any], count: int) -> Iterator[Any]:
    def fail() -> None:
        raise Broken("here")

    yield from pairs[:count]
    fail()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("count", [0, 2])
async def test_n14_a_loader_that_raises(coll: Communicator, count: int) -> None:
    engine = await made(coll)
    pairs = Job.pairs(coll.rank, 4)
    train = engine.train(broken_after(pairs, count) if coll.rank == 1 else iter(pairs), epochs=1)
    await check_failed(coll, 1, train)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("event", "at"), [("sample", 1), ("update", 1), ("update", 2)])
async def test_n14_without_a_known_length(coll: Communicator, event: Any, at: int) -> None:
    engine = await made(coll)

    def fail(state: State) -> None:
        if coll.rank == 1 and state.batch == at:
            raise Broken("here")

    engine.on(event, fail)
    await check_failed(coll, 1, engine.train(iter(Job.pairs(coll.rank, 2)), epochs=1))


@pytest.mark.ranks(2)
async def test_n14_an_optimizer_that_raises_on_one_rank(coll: Communicator) -> None:
    """The others have made its step, and hear of it in the next one."""
    engine = await made(coll)
    steps = []
    engine.on("update", lambda state: steps.append(state.step))

    def fail(*_: object) -> None:
        if coll.rank == 1 and len(steps) == 2:
            raise Broken("here")

    engine.state.optimizer.register_step_pre_hook(fail)
    await check_failed(coll, 1, engine.train(Job.pairs(coll.rank, 5), epochs=1))
    assert len(steps) == (2 if coll.rank else 3)


@pytest.mark.ranks(2)
async def test_n14_after_a_failure_training_goes_on(coll: Communicator) -> None:
    """A step that failed was made by no rank, and the next training makes it."""
    engine = await made(coll)
    failing = [coll.rank == 1]

    @engine.on("criterion")
    def fail(state: State) -> None:
        if state.step == 3 and failing[0]:
            failing[0] = False
            raise Broken("here")

    await check_failed(coll, 1, engine.train(Job.pairs(coll.rank, 4), epochs=2))
    assert engine.state_dict()["batch"] == 2
    await engine.train(Job.pairs(coll.rank, 4), epochs=2)
    Job.assert_same(engine.state.net, Job.alone(2, [4, 4], epochs=2, optimizer="momentum"))


@pytest.mark.drawn(2)
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize(
    ("event", "at", "last"),
    [("sample", 3, 3), ("criterion", 3, 3), ("update", 3, 4), ("sample", 5, 5), ("update", 5, 5), ("epoch", 5, 5)],
)
async def test_n14_a_stop_on_one_rank_stops_all_behind_the_same_step(
    coll: Communicator, event: Any, at: int, last: int
) -> None:
    engine = await made(coll)
    made_steps = []
    ended = []
    engine.on("update", lambda state: made_steps.append(state.step))
    engine.on("end", lambda state: ended.append(state.stop))

    @engine.on(event)
    def stop(state: State) -> None:
        state.stop = state.stop or (coll.rank == coll.size - 1 and state.step == at)

    await engine.train(Job.pairs(coll.rank, 5), epochs=3)
    assert (made_steps, ended) == ([*range(1, last + 1)], [True])
    await assert_synchronized(engine.state.net.module, coll)
    made_steps.clear()
    await engine.train(Job.pairs(coll.rank, 5), epochs=3)
    assert made_steps == [*range(last + 1, 16)]
    Job.assert_same(engine.state.net, Job.alone(coll.size, [5] * coll.size, epochs=3, optimizer="momentum"))


@pytest.mark.drawn(1)
@pytest.mark.ranks(1, 2, 3)
async def test_n14_a_stop_with_a_pipelined_optimizer(coll: Communicator) -> None:
    engine = await made(coll, pipelined=True)
    steps = []

    @engine.on("update")
    def stop(state: State) -> None:
        steps.append(state.step)
        state.stop = state.stop or (coll.rank == 0 and state.step == 2)

    await engine.train(Job.pairs(coll.rank, 8), epochs=2)
    assert steps == [1, 2, 3, 4]
    await engine.train(Job.pairs(coll.rank, 8), epochs=1)
    assert steps == [*range(1, 9)]
    Job.assert_same(engine.state.net, Job.alone(coll.size, [8] * coll.size, optimizer="momentum"))


@pytest.mark.drawn(2)
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize(("event", "last"), [("sample", 3), ("criterion", 3), ("update", 4)])
async def test_n14_a_stop_with_a_sharded_optimizer(coll: Communicator, event: Any, last: int) -> None:
    engine = await made(coll, sharded=True)
    steps = []

    engine.on("update", lambda state: steps.append(state.step))

    @engine.on(event)
    def stop(state: State) -> None:
        state.stop = state.stop or (coll.rank == 0 and state.step == 3)

    await engine.train(Job.pairs(coll.rank, 8), epochs=2)
    assert steps == [*range(1, last + 1)]
    await engine.train(Job.pairs(coll.rank, 8), epochs=1)
    Job.assert_same(engine.state.net, Job.alone(coll.size, [8] * coll.size, optimizer="momentum"))


@pytest.mark.ranks(2, 3)
async def test_n14_a_stop_amid_uneven_data(coll: Communicator) -> None:
    """Rank 0's data have ended by then; no rank trains on a batch twice, and none is left out."""
    engine = await made(coll)
    counts = [2 + 3 * rank for rank in range(coll.size)]
    steps = []

    @engine.on("update")
    def stop(state: State) -> None:
        steps.append(state.batch)
        state.stop = state.stop or (coll.rank == coll.size - 1 and state.step == 3)

    pairs = Job.pairs(coll.rank, counts[coll.rank])
    await engine.train(pairs, epochs=1)
    assert steps == [*range(1, min(5, len(pairs) + 1))]
    await engine.train(pairs, epochs=1)
    assert steps == [*range(1, len(pairs) + 1)]
    Job.assert_same(engine.state.net, Job.alone(coll.size, counts, optimizer="momentum"))


@pytest.mark.drawn(2)
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("known", [False, True])
async def test_n14_uneven_data(coll: Communicator, pipelined: bool, known: bool) -> None:
    engine = await made(coll, pipelined=pipelined)
    counts = [(5, 2, 0)[rank] for rank in range(coll.size)]
    pairs = Job.pairs(coll.rank, counts[coll.rank])
    for epoch in (1, 2):
        await engine.train(pairs if known else iter(pairs), epochs=epoch)
    Job.assert_same(engine.state.net, Job.alone(coll.size, counts, epochs=2, optimizer="momentum"))


async def cancelled(train: Any, begun: asyncio.Event, ticks: int) -> None:
    task = asyncio.ensure_future(train)
    await begun.wait()
    for _ in range(ticks):
        await asyncio.sleep(0)
    task.cancel()
    await task


@pytest.mark.drawn(3)
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("ticks", range(0, 40, 7))
async def test_n14_a_rank_that_is_cancelled(coll: Communicator, ticks: int) -> None:
    engine = await made(coll)
    begun = asyncio.Event()

    @engine.on("sample")
    def begin(state: State) -> None:
        if state.step == 2:
            begun.set()

    train = engine.train(Job.pairs(coll.rank, 50), epochs=3)
    if coll.rank == 0:
        with pytest.raises(asyncio.CancelledError):
            await cancelled(train, begun, ticks)
    else:
        with pytest.raises((RemoteError, CommunicatorAborted), match=r"rank 0.*[Cc]ancelled"):
            await train


@pytest.mark.drawn(3)
@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize("ticks", range(1, 9))
def test_n14_a_rank_that_is_cancelled_before_it_begins(made: bool, ticks: int) -> None:
    """Others had a duplicate of the communicator already, and waited there."""

    async def program() -> tuple[str, float]:
        seen = "", 0.0
        # Rank 0 reports it with its net too, and this rank may have left already: closing that net meets no rank.
        with suppress(CommunicatorAborted):
            async with aiodist.init() as coll:
                net = await DataParallel.create(Job.build(), coll) if made else None
                loop = asyncio.get_running_loop()

                async def begin() -> None:
                    if net is None:
                        await DataParallel.create(Job.build(), coll)
                    else:
                        engine = Engine(net, Job.OPTIMIZERS["momentum"](net.parameters()), mse_loss, **Job.QUIET)
                        await engine.train(Job.pairs(coll.rank, 2), epochs=1)

                began, task = loop.time(), asyncio.ensure_future(begin())
                if coll.rank == 0:
                    for _ in range(ticks):
                        await asyncio.sleep(0)
                    task.cancel()
                try:
                    await task
                except asyncio.CancelledError:
                    await asyncio.sleep(20)  # it does something else
                except (RemoteError, CommunicatorAborted, MismatchError) as error:
                    seen = str(error), loop.time() - began
        return seen

    _, (seen, seconds) = run_ranks(2, program)
    assert seen
    assert seconds < 10


@pytest.mark.drawn(2)
@pytest.mark.parametrize("event", ["start", "epoch"])
@pytest.mark.parametrize("ticks", [0, 1, 3, 6, 10])
def test_n14_a_rank_that_is_cancelled_between_epochs(event: Literal["start", "epoch"], ticks: int) -> None:
    """It aborted the engine's communicator alone: others, in the next epoch already, waited for its gradients."""

    async def program() -> tuple[str, float]:
        async with aiodist.init() as coll:
            engine, begun, loop = await made(coll), asyncio.Event(), asyncio.get_running_loop()
            engine.on(event, lambda state: begun.set())
            began = loop.time()
            train = engine.train(Job.pairs(coll.rank, 2), epochs=3)
            try:
                await (cancelled(train, begun, ticks) if coll.rank == 0 else train)
            except asyncio.CancelledError:
                await asyncio.sleep(20)  # it does something else
                return "", 0.0
            except (RemoteError, CommunicatorAborted) as error:
                return str(error), loop.time() - began
            return "trained", 0.0

    _, (seen, seconds) = run_ranks(2, program)
    assert re.search("rank 0.*[Cc]ancelled", seen)
    assert seconds < 10


@pytest.mark.ranks(2)
async def test_n14_all_ranks_are_cancelled(coll: Communicator) -> None:
    engine = await made(coll)
    begun = asyncio.Event()
    engine.on("update", lambda state: begun.set())
    with pytest.raises(asyncio.CancelledError):
        await cancelled(engine.train(Job.pairs(coll.rank, 50), epochs=3), begun, 3 * coll.rank)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("guilty", [0, 1])
async def test_n14_the_loss_must_be_one(coll: Communicator, guilty: int) -> None:
    def loss(output: Tensor, target: Tensor) -> Any:
        return output - target if coll.rank == guilty else mse_loss(output, target)

    net = await DataParallel.create(Job.build(), coll)
    engine = Engine(net, torch.optim.SGD(net.parameters(), lr=0.1), loss, **Job.QUIET)
    kind: type[Exception] = TypeError if coll.rank == guilty else RemoteError
    with pytest.raises(kind, match=r"the loss is a tensor of shape \[3, 3\]: expected a tensor of one element"):
        await engine.train(Job.pairs(coll.rank, 2), epochs=1)


class Unknown:
    """A class with the methods of a driver, and no driver."""

    pending = False

    def train(self, forward: Any) -> None: ...

    async def flush(self) -> None: ...

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> None: ...


@pytest.mark.ranks(1)
async def test_n14_drivers_whose_steps_are_not_passes_are_refused(coll: Communicator) -> None:
    net = await DataParallel.create(Job.build(), coll)
    local = await LocalSGD.create(net, torch.optim.SGD(net.parameters(), lr=0.1), every=2)
    with pytest.raises(TypeError, match="LocalSGD: its steps are not one pass of all ranks each"):
        Engine(net, local, mse_loss)
    unknown: Any = Unknown()
    with pytest.raises(TypeError, match=r"Engine\(DataParallel, Unknown\): expected"):
        Engine(net, unknown, mse_loss)
    with pytest.raises(TypeError, match=r"and Unknown\): expected a function .*; and an optimizer"):
        await net.step(lambda: mse_loss(net(torch.ones(1, 3)), torch.ones(1, 3)), unknown)
