"""W4: threads that wait in calls of aiodist hide no deadlock: those of nets, optimizers, trainings and streams."""

from __future__ import annotations

import asyncio
import inspect
import pathlib
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from io import StringIO
from typing import Any, NamedTuple

import pytest
import rich.progress
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from torch import Tensor, nn

import aiodist
from aiodist import Communicator, DeadlockError
from aiodist.engine import Engine
from aiodist.handles import Handle, Operation, Progress
from aiodist.nn import DataParallel, LocalSGD, PipelinedOptimizer, ShardedOptimizer, SyncBatchNorm
from aiodist.streams import HostStream
from aiodist.testing import run_ranks
from tests.support.looks import Looks

pytestmark = pytest.mark.timeout(100)

JOIN = "`async with net.join():`"
Sgd = partial(torch.optim.SGD, lr=0.1)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(2, 1)


async def _plain(coll: Communicator) -> tuple[DataParallel, Any]:
    net = await DataParallel.create(_model(), coll)
    return net, Sgd(net.parameters())


async def _pipelined(coll: Communicator) -> tuple[DataParallel, Any]:
    net = await DataParallel.create(_model(), coll)
    return net, await PipelinedOptimizer.create(net, Sgd)


async def _sharded(coll: Communicator) -> tuple[DataParallel, Any]:
    net = await DataParallel.create(_model(), coll)
    return net, await ShardedOptimizer.create(net, Sgd)


async def _local(coll: Communicator) -> tuple[DataParallel, Any]:
    net = await DataParallel.create(_model(), coll)
    return net, await LocalSGD.create(net, Sgd(net.parameters()), every=1)


KINDS = [_plain, _pipelined, _sharded, _local]


async def _train(net: DataParallel, opt: Any, steps: int) -> Tensor:
    for _ in range(steps):
        loss: Tensor = await net.step(lambda: net(torch.ones(2)).sum(), opt)
    return loss


LINE_OF_STEP = inspect.getsourcelines(_train)[1] + 2


async def _one_alone(net: DataParallel, opt: Any, coll: Communicator, _: pathlib.Path) -> None:
    loss = await _train(net, opt, 3)
    if coll.rank == 0:
        await coll.allreduce(loss, op="mean")
    await _train(net, opt, 3)


async def _saves_alone(net: DataParallel, opt: Any, coll: Communicator, path: pathlib.Path) -> None:
    await _train(net, opt, 3)
    if coll.rank == 0:
        await aiodist.save(path, net)
    await _train(net, opt, 3)


async def _ends_early(net: DataParallel, opt: Any, coll: Communicator, _: pathlib.Path) -> None:
    loss = await _train(net, opt, 6 - 3 * coll.rank)
    await coll.allreduce(loss, op="mean")


MISTAKES = {_one_alone: "allreduce", _saves_alone: "save issued at", _ends_early: "allreduce"}


@pytest.mark.drawn(3)
@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("kind", KINDS)
def test_w4_a_collective_of_one_rank_beside_steps_is_told(kind: Any, mistake: Any, tmp_path: pathlib.Path) -> None:
    texts = []

    async def main(rank: int) -> None:
        async with aiodist.init() as coll:
            net, opt = await kind(coll)
            with pytest.raises(DeadlockError) as caught:
                await mistake(net, opt, coll, tmp_path)
            texts.append(str(caught.value))

    run_ranks(2, main)
    assert len(texts) == 2
    for text in texts:
        assert text.count(f" in net.step issued at {__file__}:{LINE_OF_STEP} in _train\n") == 1
        assert "dup" not in text
        assert MISTAKES[mistake] in text
        assert JOIN in text


@pytest.mark.drawn(1)
@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.ranks(2, backend=("shm", "gloo", "mpi"))
async def test_w4_a_collective_of_one_rank_beside_steps_is_told_within_a_second(
    coll: Communicator, mistake: Any, tmp_path: pathlib.Path
) -> None:
    side = await coll.dup()
    net = await DataParallel.create(_model(), side)
    opt = Sgd(net.parameters())
    await _train(net, opt, 3)
    await coll.barrier()
    with Looks(coll, tmp_path) as looks, pytest.raises(DeadlockError, match=r"net\.step issued at"):
        await mistake(net, opt, side, tmp_path)
    assert min(await coll.allgather_object(looks.count())) < 15  # ten a second


async def _waits_in_a_hook(coll: Communicator) -> None:
    """A training whose hook, on the compute thread, is a coroutine that only the first rank has to wait in."""
    net = await DataParallel.create(_model(), coll)
    engine = Engine(net, Sgd(net.parameters()), nn.functional.mse_loss, progress=False)

    async def watch(_: object) -> None:
        if coll.rank == 0:
            await coll.allreduce(1)

    engine.on("forward", watch)
    await engine.train([(torch.ones(3, 2), torch.ones(3, 1))] * 3, epochs=1)


async def _waits_in_a_thread(coll: Communicator) -> None:
    one, two = await coll.dup(thread=True), await coll.dup(thread=True)
    await asyncio.to_thread(lambda: (one, two)[coll.rank].allreduce(torch.ones(2)).wait())


async def _waits_in_a_gate(coll: Communicator) -> None:
    """Work of a stream after an operation, while one rank has another operation first."""
    one, two = await coll.dup(), await coll.dup()
    async with HostStream() as stream:
        first = (one, two)[coll.rank].allreduce(torch.ones(2))
        first.wait_stream(stream)
        await stream.submit(int)
        await first


async def _waits_in_a_layer(coll: Communicator) -> None:
    """A layer that communicates in forward, which one rank does not run."""
    layer = SyncBatchNorm(2, await coll.dup(thread=True))
    net = await DataParallel.create(nn.Sequential(layer, nn.Linear(2, 1)), coll)
    opt = Sgd(net.parameters())
    inner = net.module if coll.rank == 0 else net.module[1]  # type: ignore[index]
    await net.step(lambda: inner(torch.ones(3, 2)).sum(), opt)


async def _waits_in_a_join(coll: Communicator) -> None:
    net, opt = await _plain(coll)
    await _train(net, opt, 2)
    if coll.rank == 0:
        async with net.join():
            await _train(net, opt, 2)
    else:
        await coll.barrier()


async def _waits_beside_a_progress_bar(coll: Communicator) -> None:
    with rich.progress.Progress(console=Console(file=StringIO(), force_terminal=True)) as bars:
        bars.add_task("steps", total=None)
        await coll.recv(src=1 - coll.rank)


WAITS = [
    _waits_in_a_hook,
    _waits_in_a_thread,
    _waits_in_a_gate,
    _waits_in_a_layer,
    _waits_in_a_join,
    _waits_beside_a_progress_bar,
]


@pytest.mark.drawn(1)
@pytest.mark.parametrize("wait", WAITS)
def test_w4_waits_of_other_threads_are_told(wait: Callable[[Communicator], Awaitable[None]]) -> None:
    times = []

    async def main(rank: int) -> None:
        async with aiodist.init() as coll:
            with pytest.raises(aiodist.AiodistError, match="deadlock: rank 0 waits for rank 1"):
                await wait(coll)
            times.append(asyncio.get_running_loop().time())

    run_ranks(2, main)
    assert len(times) == 2


# --- slow is no deadlock ---------------------------------------------------------------------------------------


class Delays(NamedTuple):
    """Whether a rank is slow, for longer than it takes to find a deadlock, at each place of a step."""

    reading: bool = False
    """In the thread of a prefetch."""
    forward: bool = False
    """On the compute thread."""
    hook: bool = False
    """On the compute thread, in backward."""
    beside: bool = False
    """In a thread of an executor, for which the compute thread waits."""
    timer: bool = False
    """On the loop, for which the compute thread waits by a handle."""
    after: bool = False
    """On the loop, between two steps."""


SLOW = 0.7
"""Seconds of a loop's timer that the check finds."""
_delays = st.builds(Delays, *[st.sampled_from([False, False, False, True])] * len(Delays._fields))


def _slow(net: DataParallel, delays: Delays, looks: Looks) -> Callable[[Tensor], Tensor]:
    """Return a forward that takes as long as `delays` says, everywhere that a rank may."""
    loop, progress, be_slow = asyncio.get_running_loop(), Progress.current(), partial(looks.block, slow=True)

    def by_timer() -> Handle[None]:
        told: Operation[None] = Operation(progress, "timer", polled=False)
        loop.call_soon_threadsafe(loop.call_later, SLOW, told.resolve, None)
        return told.handle

    def forward(x: Tensor) -> Tensor:
        if delays.forward:
            be_slow()
        if delays.timer:
            by_timer().wait()
        if delays.beside:
            asyncio.run_coroutine_threadsafe(asyncio.to_thread(be_slow), loop).result()
        loss: Tensor = net(x).sum()
        if delays.hook:
            loss.register_hook(lambda _: be_slow())
        return loss

    return forward


async def _trains(coll: Communicator, kind: Any, of_ranks: Sequence[Sequence[Delays]], folder: pathlib.Path) -> int:
    net, opt = await kind(coll)
    mine = of_ranks[coll.rank]
    looks = Looks(coll, folder)

    def read() -> Iterator[tuple[Delays, Tensor]]:
        for delays in mine:
            if delays.reading:
                looks.block(slow=True)
            yield delays, torch.ones(2)

    steps = 0
    with looks:
        async with aiodist.data.prefetch(read()) as batches:
            async for delays, x in batches:
                await net.step(partial(_slow(net, delays, looks), x), opt)
                if delays.after:
                    await asyncio.sleep(SLOW)
                steps += 1
        return await coll.allreduce(steps)


@pytest.mark.thorough
@given(
    st.sampled_from(KINDS),
    st.integers(1, 3).flatmap(lambda n: st.lists(st.lists(_delays, min_size=n, max_size=n), min_size=2, max_size=2)),
)
@settings(max_examples=8, deadline=None)
def test_w4_slow_ranks_of_a_training_are_no_deadlock(kind: Any, of_ranks: list[list[Delays]]) -> None:
    async def main(rank: int) -> int:
        async with aiodist.init() as coll:
            return await _trains(coll, kind, of_ranks, pathlib.Path(folder))

    with tempfile.TemporaryDirectory() as folder:
        assert run_ranks(len(of_ranks), main) == [sum(map(len, of_ranks))] * len(of_ranks)


@pytest.mark.drawn(3)
@pytest.mark.parametrize("place", Delays._fields)
@pytest.mark.ranks(2, backend=("shm", "gloo", "mpi"))
async def test_w4_slow_ranks_of_a_training_are_none_on_processes(
    coll: Communicator, place: str, tmp_path: pathlib.Path
) -> None:
    quick, slow = Delays(), Delays(**{place: True})
    folder = pathlib.Path(await coll.broadcast_object(str(tmp_path)))
    assert await _trains(coll, _plain, [[quick, slow], [slow, quick]], folder) == 4
