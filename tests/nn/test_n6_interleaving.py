"""N6: reductions, prefetched batches and files share one limit on bytes in flight, and nothing hangs."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aiodist
from aiodist import Communicator
from aiodist.data import prefetch
from aiodist.handles import Scheduler
from aiodist.nn import DataParallel, PipelinedOptimizer, assert_synchronized
from aiodist.testing import run_ranks
from aiodist.testing.seams.progress import reducer_of
from tests.nn.conftest import Trial
from tests.support.until import until

MOMENTUM = Trial.OPTIMIZERS["momentum"]
STEPS = 4


def loss_of(module: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return module(x).square().mean()


def loader(rank: int) -> Iterator[Tensor]:
    for step in range(STEPS):
        yield Trial.batch(rank, step)[0]


def reference(size: int, seed: int = 3) -> nn.Module:
    """Train in this process with the data of all ranks."""
    return Trial.alone(
        size,
        STEPS,
        make=partial(Trial.Mlp, seed),
        loss=lambda module, rank, step: loss_of(module, Trial.batch(rank, step)[0]),
        optimizer="momentum",
    )


async def drained(coll: Communicator) -> None:
    """Return when nothing is in flight any more; the ranks have one loop, and so one account."""
    await until(lambda: Scheduler.current().in_flight == 0)
    await coll.barrier()


async def create(coll: Communicator, seed: int = 3) -> DataParallel:
    return await DataParallel.create(Trial.Mlp(seed), coll, **Trial.SMALL)


async def write(path: Path, module: nn.Module) -> None:
    """Save a checkpoint as a writer would: with leave for its bytes, in a thread."""
    state = {name: t.clone() for name, t in module.state_dict().items()}
    lane = Scheduler.current().lane("checkpoint", -10)
    with await lane.acquire(sum(t.nbytes for t in state.values())):
        await asyncio.to_thread(torch.save, state, path)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("pipelined", [False, True])
async def test_n6_all_goes_on_with_a_limit_of_one_byte(coll: Communicator, pipelined: bool, tmp_path: Path) -> None:
    """Training, prefetch and a writer of files run concurrently."""
    await _all_at_once(coll, pipelined, tmp_path)


@pytest.mark.ranks(2, backend="mpi")
async def test_n6_all_goes_on_with_a_limit_of_one_byte_on_processes(coll: Communicator, tmp_path: Path) -> None:
    await _all_at_once(coll, True, tmp_path)


async def _all_at_once(coll: Communicator, pipelined: bool, tmp_path: Path) -> None:
    Scheduler.current().limit = 1
    net = await create(coll)
    opt: Any = await PipelinedOptimizer.create(net, MOMENTUM) if pipelined else MOMENTUM(net.parameters())
    files: list[asyncio.Task[None]] = []
    async with prefetch(loader(coll.rank), depth=3) as batches:
        async for x in batches:
            await net.step(loss_of, opt, net, x)
            files.append(asyncio.create_task(write(tmp_path / f"{coll.rank} {len(files)}", net.module)))
    if pipelined:
        await opt.flush()
    await asyncio.gather(*files)
    Trial.assert_same(net.module, reference(coll.size))
    last = torch.load(tmp_path / f"{coll.rank} {STEPS - 1}")
    assert pipelined or all(torch.equal(last[name], t) for name, t in net.state_dict().items())
    await drained(coll)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("limit", [1, 700])
async def test_n6_two_nets_in_two_tasks(coll: Communicator, limit: int) -> None:
    """Their reductions interleave differently on each rank, and do not wait for one another in a circle."""
    Scheduler.current().limit = limit
    nets = [await create(coll, seed) for seed in (3, 4)]

    async def train(net: DataParallel, delay: int) -> None:
        opt = MOMENTUM(net.parameters())
        async with prefetch(loader(coll.rank), depth=2) as batches:
            async for x in batches:
                for _ in range(delay):
                    await asyncio.sleep(0)
                await net.step(loss_of, opt, net, x)

    order = nets if coll.rank == 0 else nets[::-1]
    async with asyncio.TaskGroup() as tasks:
        for i, net in enumerate(order):
            tasks.create_task(train(net, 20 * i + 7 * coll.rank))
    for seed, net in zip((3, 4), nets, strict=True):
        Trial.assert_same(net.module, reference(coll.size, seed))
    await drained(coll)


def test_n6_reductions_go_before_prefetch_where_both_wait() -> None:
    """And prefetch, which has nothing in flight, is not kept out by them."""
    late = asyncio.Event()
    seen: list[int] = []

    async def main() -> None:
        async with aiodist.init() as coll:
            scheduler = Scheduler.current()
            net = await create(coll)
            opt = MOMENTUM(net.parameters())
            if coll.rank == 1:
                await late.wait()
                await net.step(loss_of, opt, net, Trial.batch(1, 0)[0])
                return
            scheduler.limit = 1
            work = asyncio.ensure_future(net.step(loss_of, opt, net, Trial.batch(0, 0)[0]))
            lane = reducer_of(net).loop.lane
            await until(lambda: lane.waiting)
            count = len(lane.waiting)
            assert lane.granted == 1  # the first is always granted, the others are more than one byte
            first = scheduler.in_flight
            batches = scheduler.lane("batches")
            permits = [batches.request(4000, partial(seen.append, i)) for i in range(2)]
            assert seen == [0]  # one goes though nothing is left
            scheduler.limit = scheduler.in_flight + 4000
            assert scheduler.in_flight > first + 4000
            assert lane.granted == 1 + count  # all the buckets fit in
            assert seen == [0]  # what they left is less than a batch
            late.set()
            await work
            await until(lambda: seen == [0, 1])
            for permit in permits:
                permit.release()
            await until(lambda: scheduler.in_flight == 0)

    run_ranks(2, main)
    assert seen == [0, 1]


@pytest.mark.ranks(2)
async def test_n6_the_order_of_reductions_is_one_though_a_rank_has_no_room(coll: Communicator) -> None:
    """Another lane holds the whole limit, on one rank or the other."""
    scheduler = Scheduler.current()
    scheduler.limit = 2000
    net = await create(coll)
    opt = MOMENTUM(net.parameters())
    lane = scheduler.lane("other", 20)
    for step in range(STEPS):
        mine = step % 2 == coll.rank
        permit = await lane.acquire(2000) if mine else None
        await net.step(loss_of, opt, net, Trial.batch(coll.rank, step)[0])
        if permit is not None:
            permit.release()
    Trial.assert_same(net.module, reference(coll.size))
    await drained(coll)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("pipelined", [False, True])
async def test_n6_a_task_of_the_user_is_not_starved(coll: Communicator, pipelined: bool) -> None:
    """The task runs during forward, backward and the optimizer: each of them waits until it has."""
    ticks = 0
    turn = threading.Condition()

    async def ticker() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0)
            with turn:
                ticks += 1
                turn.notify_all()

    def some_ticks() -> None:
        with turn:
            goal = ticks + 20
            assert turn.wait_for(lambda: ticks >= goal, 15), "the loop stood still"

    class Patient(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            some_ticks()
            return super().step(closure)

    def patient(params: Any) -> torch.optim.Optimizer:
        return Patient(params, lr=0.1, momentum=0.9, weight_decay=0.01)

    def forward(x: Tensor) -> Tensor:
        some_ticks()
        out = net(x)
        out.register_hook(lambda grad: some_ticks())
        return out.square().mean()  # type: ignore[no-any-return]

    net = await create(coll)
    opt: Any = await PipelinedOptimizer.create(net, patient) if pipelined else patient(net.parameters())
    beside = asyncio.create_task(ticker())
    async with prefetch(loader(coll.rank)) as batches:
        async for x in batches:
            await net.step(forward, opt, x)
    if pipelined:
        await opt.flush()
    beside.cancel()
    with suppress(asyncio.CancelledError):
        await beside
    Trial.assert_same(net.module, reference(coll.size))


@pytest.mark.ranks(2)
async def test_n6_what_waits_last_is_served_too(coll: Communicator) -> None:
    """A writer of the lowest priority, while two nets train and ask for more than there is all the time."""
    Scheduler.current().limit = 1
    nets = [await create(coll, seed) for seed in (3, 4)]
    written = 0
    lane = Scheduler.current().lane("files", -10)

    async def writer() -> None:
        nonlocal written
        while True:
            with await lane.acquire(100):
                await asyncio.sleep(0)
            written += 1

    async def train(net: DataParallel) -> None:
        opt = MOMENTUM(net.parameters())
        for step in range(STEPS):
            before = written
            await net.step(loss_of, opt, net, Trial.batch(coll.rank, step)[0])
            await until(lambda: written > before)  # noqa: B023

    beside = asyncio.create_task(writer())
    await asyncio.gather(*map(train, nets))
    beside.cancel()
    with suppress(asyncio.CancelledError):
        await beside
    await drained(coll)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("pipelined", [False, True])
async def test_n6_nothing_stays_in_flight_after_any_failure(coll: Communicator, pipelined: bool) -> None:
    scheduler = Scheduler.current()
    scheduler.limit = 500

    def forward(step: int) -> Tensor:
        out = net(Trial.batch(coll.rank, step)[0]).square().mean()
        if step == 1 and coll.rank == 1:
            raise ArithmeticError("no more")
        return out  # type: ignore[no-any-return]

    net = await create(coll)
    opt: Any = await PipelinedOptimizer.create(net, MOMENTUM) if pipelined else MOMENTUM(net.parameters())
    for step in range(3):
        with suppress(ArithmeticError, aiodist.RemoteError):
            await net.step(forward, opt, step)
    if pipelined:
        await opt.flush()
    await drained(coll)
    async with prefetch(loader(coll.rank), depth=3) as batches:
        async for _ in batches:
            break  # some were prepared in vain
    await drained(coll)
    if not pipelined:
        async for _ in net.backward_iter(await net.submit(forward, 3)):
            break  # the other gradients follow
        await net.step(forward, opt, 4)
    await net.aclose()
    await drained(coll)
    await assert_synchronized(list(net.parameters()), coll)


@pytest.mark.ranks(2)  # else nothing is sent before rank 1 has come
async def test_n6_giving_up_while_buckets_wait_for_room(coll: Communicator) -> None:
    """Waiting buckets withdraw their requests, granted ones return their permits, and others can use the limit."""
    Scheduler.current().limit = 1
    net = await create(await coll.dup())
    opt = MOMENTUM(net.parameters())
    lane = reducer_of(net).loop.lane
    if coll.rank == 0:
        work = asyncio.ensure_future(net.step(loss_of, opt, net, Trial.batch(0, 0)[0]))
        await until(lambda: lane.waiting)
        assert lane.granted == 1  # and rank 1 has sent nothing yet
        reducer_of(net).data.abort("had enough")
        await coll.send(torch.ones(1), 1)
    else:
        await coll.recv(src=0)
        work = asyncio.ensure_future(net.step(loss_of, opt, net, Trial.batch(1, 0)[0]))
    with pytest.raises(aiodist.CommunicatorAborted, match="had enough"):
        await asyncio.wait_for(work, 100)
    await drained(coll)
    assert (lane.granted, len(lane.waiting)) == (0, 0)
    other = await create(coll)
    await other.step(loss_of, MOMENTUM(other.parameters()), other, Trial.batch(coll.rank, 0)[0])
    await assert_synchronized(list(other.parameters()), coll)
    await drained(coll)
