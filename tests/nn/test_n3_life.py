"""N3: the compute thread, the modes that it runs in, and how a net ends: in order or in ruins."""

from __future__ import annotations

import asyncio
import threading
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aiodist
from aiodist import Communicator
from aiodist.handles import Scheduler
from aiodist.nn import DataParallel
from aiodist.testing import gather_ranks, run_ranks
from aiodist.testing.seams.progress import compute_of, reducer_of
from tests.nn.conftest import Trial
from tests.support.in_backward import in_backward
from tests.support.until import until


def compute_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("aiodist-compute")]


@pytest.mark.ranks(2)
async def test_n3_everything_runs_on_one_thread_in_order(coll: Communicator) -> None:
    net = await DataParallel.create(Trial.Mlp(), coll, **Trial.SMALL)
    seen: list[tuple[str, int]] = []

    def note(what: str, *_: object) -> None:
        seen.append((what, threading.get_ident()))

    net.module.get_parameter("0.weight").register_hook(lambda *_: note("backward"))
    opt = Trial.OPTIMIZERS["sgd"](net.parameters())
    opt.register_step_pre_hook(lambda *_: note("optimizer"))

    def forward() -> Tensor:
        note("forward")
        return Trial.loss(net, coll.rank, 0)

    first = net.submit(note, "first")
    step = asyncio.ensure_future(net.step(forward, opt))
    await asyncio.sleep(0)
    last = net.submit(note, "last")
    assert await net.submit(lambda a, b: a + b, 2, b=3) == 5
    await aiodist.gather(first, last)
    await step
    loss = await net.submit(forward)
    await net.backward(loss)
    order = ["first", "forward", "backward", "optimizer", "last", "forward", "backward"]
    assert [what for what, _ in seen] == order
    assert len({thread for _, thread in seen}) == 1
    assert seen[0][1] != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        await net.submit(lambda: 1 / 0)


@pytest.mark.ranks(2)
async def test_n3_the_loop_goes_on_meanwhile(coll: Communicator) -> None:
    net, opt = await Trial.made(coll)
    go = threading.Event()

    def forward() -> Tensor:
        assert go.wait(30)
        return Trial.loss(net, coll.rank, 0)

    step = asyncio.ensure_future(net.step(forward, opt))
    assert await coll.allreduce(1) == 2
    go.set()
    assert (await step).shape == ()


@pytest.mark.ranks(1, 2)
async def test_n3_a_pass_is_released_at_its_end(coll: Communicator) -> None:
    net, opt = await Trial.made(coll, **Trial.SMALL)
    passes: list[Any] = []

    def note() -> None:
        passes.append(weakref.ref(reducer_of(net).last))

    def forward(x: Tensor) -> Tensor:
        out: Tensor = in_backward(net(x), note)
        return out

    for step in range(3):
        await net.step(partial(Trial.loss, forward, coll.rank, step), opt)
        await until(lambda: all(ref() is None for ref in passes))
        assert reducer_of(net).last is None
    assert len(passes) == 3


@pytest.mark.ranks(2)
async def test_n3_a_closed_net_says_so(coll: Communicator) -> None:
    async with await DataParallel.create(Trial.Mlp(), coll) as net:
        opt = Trial.OPTIMIZERS["sgd"](net.parameters())
        await net.step(lambda: Trial.loss(net, coll.rank, 0), opt)
    loss = Trial.loss(net, coll.rank, 1)

    async def each() -> None:
        async for _ in net.backward_iter(loss):
            pass

    async def join() -> None:
        async with net.join():
            pass

    async def run() -> None:
        await net.submit(int)

    async def synchronize() -> None:
        await net.synchronize_buffers()

    for call in (lambda: net.step(lambda: loss, opt), lambda: net.backward(loss), each, join, run, synchronize):
        with pytest.raises(RuntimeError, match="this DataParallel is closed"):
            await call()
    await net.aclose()
    assert net.statistics().passes == 1
    assert net.state_dict().keys() == Trial.Mlp().state_dict().keys()


@pytest.mark.ranks(2)
async def test_n3_what_was_asked_is_done_before_it_closes(coll: Communicator) -> None:
    net, opt = await Trial.made(coll, **Trial.SMALL)
    step = asyncio.ensure_future(net.step(lambda: Trial.loss(net, coll.rank, 0), opt))
    await asyncio.sleep(0)
    await net.aclose()
    await step
    Trial.assert_same(net, Trial.alone(2, 1))


def test_n3_the_world_closes_what_was_left_open() -> None:
    async def main() -> None:
        async with aiodist.init() as coll:
            nets = [await DataParallel.create(Trial.Mlp(), coll) for _ in range(2)]
            group = await coll.dup()
            nets.append(await DataParallel.create(Trial.Mlp(), group))
            for net in nets:
                opt = Trial.OPTIMIZERS["sgd"](net.parameters())
                await net.step(partial(Trial.loss, net, coll.rank, 0), opt)
            await group.aclose()
            with pytest.raises(RuntimeError, match="closed"):
                net.submit(int)
            assert len(compute_threads()) <= 5
        for net in nets:
            with pytest.raises(RuntimeError, match="closed"):
                net.submit(int)
            Trial.loss(net, 0, 0).backward()  # no hook is left

    run_ranks(2, main)
    assert compute_threads() == []


@pytest.mark.parametrize("when", ["idle", "in a step", "in backward", "the others' step"])
def test_n3_a_program_that_fails_ends(when: str) -> None:
    """A program fails with a net open, in any state; an unclosed resource would warn, and warnings are errors here."""

    async def main() -> None:
        async with aiodist.init() as coll:
            net, opt = await Trial.made(coll, **Trial.SMALL)
            await net.step(lambda: Trial.loss(net, coll.rank, 0), opt)
            work: asyncio.Future[Any]
            reached = asyncio.Event()
            loop = asyncio.get_running_loop()
            if when == "idle" or (when == "the others' step" and coll.rank == 0):
                raise LookupError("by design")
            if when == "in backward":
                loss = Trial.loss(net, coll.rank, 0)
                loss.register_hook(lambda grad: loop.call_soon_threadsafe(reached.set) and None)
                work = asyncio.ensure_future(net.backward(loss))
            else:

                def forward() -> Tensor:
                    loop.call_soon_threadsafe(reached.set)
                    return Trial.loss(net, coll.rank, 0)

                work = asyncio.ensure_future(net.step(forward, opt))
            # It may hear of the other rank before it is cancelled: no other code reads its result.
            work.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            await reached.wait()
            if when == "the others' step":
                await work
            else:
                work.cancel()
                raise LookupError("by design")

    with pytest.raises(LookupError, match="by design"):
        run_ranks(2, main)
    for thread in threading.enumerate():
        if thread.name.startswith("aiodist-compute"):
            thread.join(10)
    assert compute_threads() == []


async def test_h13_evaluation_beside_training() -> None:
    """Under asyncio and uvloop: modes held across awaits here leak neither into the compute thread nor out of it."""
    aiodist.isolate(asyncio.get_running_loop())

    async def main() -> None:
        async with aiodist.init() as coll:
            net, opt = await Trial.made(coll, "momentum", **Trial.SMALL)
            other = nn.Linear(6, 3)
            over = False
            rounds = 0

            async def evaluation() -> None:
                nonlocal rounds
                with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
                    while not over:
                        rounds += 1
                        out = other(torch.ones(2, 6))
                        assert out.dtype is torch.bfloat16
                        assert not out.requires_grad
                        await asyncio.sleep(0)
                        seen = await net.submit(lambda: (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
                        assert seen == (False, True)

            async def inference() -> None:
                with torch.inference_mode():
                    while not over:
                        assert (torch.ones(1) * 2).is_inference()
                        await asyncio.sleep(0)

            def forward(step: int) -> Tensor:
                assert torch.is_grad_enabled()
                assert not torch.is_autocast_enabled("cpu")
                torch.set_grad_enabled(False)  # and never back: it is this step's alone
                torch.set_grad_enabled(True)
                return Trial.loss(net, coll.rank, step)

            def leave_modes() -> None:
                torch.set_grad_enabled(False)
                torch.set_autocast_enabled("cpu", True)

            tasks = [asyncio.create_task(task()) for task in (evaluation, inference)]
            await asyncio.sleep(0)
            for step in range(8):
                await net.step(partial(forward, step), opt)
                assert torch.is_grad_enabled()
                await net.submit(leave_modes)
                assert torch.is_grad_enabled()
                assert not torch.is_autocast_enabled("cpu")
            over = True
            await asyncio.gather(*tasks)
            assert rounds > 1
            Trial.assert_same(net, Trial.alone(2, 8, optimizer="momentum"))

    await asyncio.wait_for(gather_ranks(2, main), 60)


@pytest.mark.ranks(3)
async def test_n3_leave_that_another_task_gives(coll: Communicator) -> None:
    """Reductions wait for bytes that a prefetch gives back: they are issued in order, and not as calls of that task."""
    scheduler = Scheduler.current()
    scheduler.limit = 300
    net, opt = await Trial.made(coll, **Trial.SMALL)
    over = False

    async def prefetch() -> None:
        lane = scheduler.lane("batches")
        while not over:
            with await lane.acquire(250):
                await asyncio.sleep(0)
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        group.create_task(prefetch())
        for step in range(8):
            await net.step(partial(Trial.loss, net, coll.rank, step), opt)
        over = True
    Trial.assert_same(net, Trial.alone(3, 8))
    await net.aclose()
    await coll.barrier()
    assert scheduler.in_flight == 0


@pytest.mark.ranks(2)
async def test_n3_a_close_that_is_cancelled_gives_the_net_up(coll: Communicator) -> None:
    """The thread ends, and the parameters belong to no net."""
    module = nn.Linear(2, 2)
    net = await DataParallel.create(module, coll)
    held = threading.Event()
    compute_of(net).submit(held.wait, 20).detach()
    try:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await net.aclose()
    finally:
        held.set()
    await compute_of(net).stream.aclose()
    with pytest.raises(RuntimeError, match="was aborted"):
        await net.step(lambda: net(torch.ones(1, 2)).sum(), torch.optim.SGD(net.parameters()))
    await coll.barrier()
    async with await DataParallel.create(module, coll):
        pass


@pytest.mark.ranks(2)
@pytest.mark.parametrize("work", ["step", "backward", "accumulate", "gradients", "optimizer"])
async def test_n3_a_state_is_not_loaded_while_a_step_is_under_way(coll: Communicator, work: str) -> None:
    """The compute thread reads and writes the parameters meanwhile; after the step the state is loaded."""
    net, opt = await Trial.made(coll, **Trial.SMALL)
    state = Trial.Mlp(5).state_dict()
    begun, go_on = threading.Event(), threading.Event()

    def hold(*_: object) -> None:
        begun.set()
        assert go_on.wait(20)

    def forward() -> Tensor:
        hold()
        return Trial.loss(net, coll.rank, 0)

    async def asked() -> None:
        if work == "step":
            await net.step(forward, opt)
        elif work == "optimizer":
            opt.register_step_pre_hook(hold)
            await net.submit(opt.step)
        else:
            loss = Trial.loss(net, coll.rank, 0)
            assert loss.grad_fn is not None
            loss.grad_fn.register_prehook(hold)
            if work == "gradients":
                _ = [pair async for pair in net.backward_iter(loss)]
            elif work == "backward":
                await net.backward(loss)
            else:
                with net.no_sync():
                    await net.backward(loss)

    task = asyncio.ensure_future(asked())
    await asyncio.to_thread(begun.wait, 20)
    with pytest.raises(RuntimeError, match=r"a step or a backward is in flight.*await it first"):
        net.load_state_dict(state)
    behind = net.submit(net.load_state_dict, state)
    go_on.set()
    await behind
    await task
    Trial.assert_same(net, Trial.Mlp(5))
    net.load_state_dict(Trial.Mlp(6).state_dict())
    Trial.assert_same(net, Trial.Mlp(6))
