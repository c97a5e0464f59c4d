"""H10: on a communicator made for it other threads issue and wait, while the loop stands still."""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import inspect
import os
import random
import threading
import warnings
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import aiodist
from aiodist import Communicator
from aiodist.backends.arithmetic import SUPPORTED
from aiodist.communicator.threaded import ThreadedCommunicator
from aiodist.handles import Handle
from tests.support.blocking import blocked_until, rounds

pytestmark = pytest.mark.drawn(2)

everywhere = pytest.mark.ranks(2, 3, backend=("openmpi", "gloo", "shm"))
_LIMIT = 30.0


class Helper(threading.Thread):
    """Runs a function in a thread, and has what it returned or raised."""

    def __init__(self, call: Callable[..., Any], *args: object, name: str = "helper") -> None:
        super().__init__(name=name, daemon=True)
        self._call = partial(call, *args)
        self._outcome: tuple[Any, BaseException | None] = (None, TimeoutError(f"thread {name!r} did not end"))
        self.start()

    def run(self) -> None:
        try:
            self._outcome = (self._call(), None)
        except BaseException as error:  # noqa: BLE001  - the test checks the error
            self._outcome = (None, error)

    def outcome(self, seconds: float = _LIMIT) -> Any:
        """Return what it returned, or raise what it raised; blocks this thread."""
        self.join(seconds)
        result, error = self._outcome
        if error is not None:
            raise error
        return result

    async def over(self) -> Any:
        """The same, without blocking the loop."""
        return await asyncio.to_thread(self.outcome)


def waited(call: Callable[[Communicator], Handle[Any]], coll: Communicator) -> Any:
    """Return what the operation that `call` issues came to; blocks this thread."""
    return call(coll).wait(_LIMIT)


def while_the_loop_stands_still(call: Callable[[], Any], ours: Communicator) -> Any:
    """Return what `call` returns in a thread; the loop is blocked until the threads of all ranks have returned."""

    def work() -> Any:
        result = call()
        ours.barrier().wait(_LIMIT)
        return result

    return Helper(work).outcome()


@pytest.mark.drawn(4)
@everywhere
@pytest.mark.parametrize("numel", [0, 1, 10_000, 300_000, 3_000_000])
async def test_h10_threads_reduce_while_the_loop_stands_still(coll: Communicator, numel: int) -> None:
    ours = await coll.dup(thread=True)

    def reduce() -> list[torch.Tensor]:
        ts = [torch.full((numel,), float(ours.rank + i)) for i in range(5)]
        return [ours.allreduce(t).wait(_LIMIT) for t in ts]

    for i, t in enumerate(while_the_loop_stands_still(reduce, ours)):
        assert t.numel() == numel
        assert t.eq(sum(range(coll.size)) + i * coll.size).all()


@pytest.mark.drawn(2)
@everywhere
async def test_h10_threads_reduce_every_dtype(coll: Communicator) -> None:
    ours = await coll.dup(thread=True)

    def reduce() -> dict[torch.dtype, torch.Tensor]:
        return {kind: ours.allreduce(torch.ones(9).to(kind), op="max").wait(_LIMIT) for kind in real}

    real = sorted((kind for kind in SUPPORTED if not kind.is_complex), key=str)
    for kind, t in while_the_loop_stands_still(reduce, ours).items():
        assert t.dtype is kind
        assert t.eq(1).all()


@everywhere
async def test_h10_threads_call_every_collective_while_the_loop_stands_still(coll: Communicator) -> None:
    ours = await coll.dup(thread=True)
    rank, size = coll.rank, coll.size
    mine, total = torch.full((2 * size,), float(rank)), float(sum(range(size)))

    def call() -> dict[str, Any]:
        out = torch.empty(2 * size)
        return {
            "barrier": ours.barrier().wait(_LIMIT),
            "number": ours.allreduce(rank).wait(_LIMIT),
            "out": ours.allreduce(mine, out=out).wait(_LIMIT),
            "list": ours.allreduce([mine.clone(), mine.clone()]).wait(_LIMIT),
            "across": ours.allreduce([mine.clone(), mine.clone()], across=True).wait(_LIMIT),
            "reduce": ours.reduce(mine.clone(), root=size - 1).wait(_LIMIT),
            "scan": ours.scan(mine.clone()).wait(_LIMIT),
            "exscan": ours.exscan(mine.clone()).wait(_LIMIT),
            "reduce_scatter": ours.reduce_scatter(mine).wait(_LIMIT),
            "broadcast": ours.broadcast(mine.clone(), root=size - 1).wait(_LIMIT),
            "gather": ours.gather(mine, root=0).wait(_LIMIT),
            "allgather": ours.allgather(mine).wait(_LIMIT),
            "scatter": ours.scatter(list(mine.chunk(size)) if rank == 0 else None).wait(_LIMIT),
            "alltoall": ours.alltoall([mine[:1]] * size).wait(_LIMIT),
            "alltoall_single": ours.alltoall_single(mine).wait(_LIMIT),
        }

    seen = while_the_loop_stands_still(call, ours)
    assert (seen["barrier"], seen["number"]) == (None, total)
    assert seen["out"].eq(total).all()
    assert all(t.eq(total).all() for t in seen["list"])
    assert all(t.eq(2 * total).all() for t in seen["across"])
    assert seen["reduce"] is None if rank < size - 1 else seen["reduce"].eq(total).all()
    assert seen["scan"].eq(sum(range(rank + 1))).all()
    assert seen["exscan"].eq(sum(range(rank))).all()
    assert seen["reduce_scatter"].tolist() == [total, total]
    assert seen["broadcast"].eq(size - 1).all()
    assert seen["gather"] is None if rank else [t[0] for t in seen["gather"]] == list(range(size))
    assert [t[0] for t in seen["allgather"]] == list(range(size))
    assert seen["scatter"].tolist() == [0, 0]
    assert [t.item() for t in seen["alltoall"]] == list(range(size))
    assert seen["alltoall_single"].tolist() == [float(r) for r in range(size) for _ in range(2)]


@pytest.mark.drawn(2)
@everywhere
@pytest.mark.parametrize("numel", [3, 300_000])
async def test_h10_threads_send_and_receive_while_the_loop_stands_still(coll: Communicator, numel: int) -> None:
    ours = await coll.dup(thread=True)
    after, before = (coll.rank + 1) % coll.size, (coll.rank - 1) % coll.size
    t = torch.full((numel,), float(coll.rank))

    def call() -> tuple[Any, ...]:
        sent = ours.send(t, after, tag=1)
        came = ours.recv(src=before, tag=1)
        both = ours.sendrecv(t, after, before, tag=2)
        told = ours.send_object({"rank": coll.rank}, after)
        heard = ours.recv_object(before)
        return tuple(handle.wait(_LIMIT) for handle in (sent, came, both, told, heard))

    _, came, both, _, heard = while_the_loop_stands_still(call, ours)
    assert came.eq(before).all()
    assert both.eq(before).all()
    assert heard == {"rank": before}


@everywhere
async def test_h10_threads_exchange_objects_while_the_loop_stands_still(coll: Communicator) -> None:
    ours = await coll.dup(thread=True)
    rank, size = coll.rank, coll.size

    def call() -> dict[str, Any]:
        return {
            "broadcast": ours.broadcast_object(("from", rank)).wait(_LIMIT),
            "allgather": ours.allgather_object(rank).wait(_LIMIT),
            "gather": ours.gather_object(rank, root=0).wait(_LIMIT),
            "scatter": ours.scatter_object([f"to {r}" for r in range(size)] if rank == 0 else None).wait(_LIMIT),
            "alltoall": ours.alltoall_object([(rank, r) for r in range(size)]).wait(_LIMIT),
        }

    assert while_the_loop_stands_still(call, ours) == {
        "broadcast": ("from", 0),
        "allgather": list(range(size)),
        "gather": None if rank else list(range(size)),
        "scatter": f"to {rank}",
        "alltoall": [(r, rank) for r in range(size)],
    }


@pytest.mark.ranks(4)
@pytest.mark.usefixtures("two_hosts")
@pytest.mark.parametrize("numel", [5, 500_000])
async def test_h10_threads_reduce_among_hosts(coll: Communicator, numel: int) -> None:
    """All ranks are threads of one process here, so the loop is not blocked."""
    ours = await coll.dup(thread=True)
    helper = Helper(lambda: [ours.allreduce(torch.ones(numel)).wait(_LIMIT) for _ in range(5)])
    assert all(t.eq(4).all() for t in await helper.over())


# --- waiting -----------------------------------------------------------------------------------------------------


@pytest.mark.drawn(2)
@everywhere
@pytest.mark.parametrize("call", [lambda c: c.allreduce(torch.ones(3)), lambda c: c.allgather_object("x")])
async def test_h10_what_a_thread_issued_is_awaited_by_loop_and_threads(
    coll: Communicator, call: Callable[[Communicator], Handle[Any]]
) -> None:
    ours = await coll.dup(thread=True)
    await call(ours)
    await coll.barrier()
    if coll.rank:
        await rounds()
    handle = await Helper(call, ours).over()
    waiting = [Helper(lambda: handle.wait(_LIMIT)) for _ in range(3)]
    results = [await handle, *[await helper.over() for helper in waiting], await handle]
    assert all(result is results[0] for result in results)


@everywhere
async def test_h10_loop_and_threads_take_turns(coll: Communicator) -> None:
    ours = await coll.dup(thread=True)
    for i in range(20):
        by_thread = await Helper(ours.allreduce, torch.full((2,), float(i))).over()
        by_loop = ours.allreduce(torch.full((3,), float(i)))
        assert (await by_loop).tolist() == [i * coll.size] * 3
        assert (await by_thread).tolist() == [i * coll.size] * 2
    assert ours.seq == 40


@pytest.mark.drawn(1)
@everywhere
async def test_h10_a_wait_in_a_thread_names_who_is_late(coll: Communicator) -> None:
    """The watchdog sees an operation of a thread, although the loop was idle."""
    ours = await coll.dup(thread=True)
    await ours.allreduce(torch.ones(1))
    await coll.barrier()
    if coll.rank == 0:
        with pytest.raises(aiodist.OperationTimeout, match=r"not done in time .*late: rank 1 \(") as told:
            await Helper(lambda: ours.allreduce(torch.ones(1), timeout=2.5).wait()).over()
        assert 1 in told.value.late
    await coll.barrier()
    if coll.rank:
        await ours.allreduce(torch.ones(1))
    await ours.barrier()


@pytest.mark.drawn(1)
@everywhere
async def test_h10_what_a_thread_issued_goes_on_though_nobody_waits(coll: Communicator) -> None:
    """While the loop stands still, and with more in flight than a lane has room for."""
    ours = await coll.dup(thread=True)
    await coll.barrier()

    def issue() -> list[Handle[Any]]:
        return [ours.allreduce(torch.ones(3)) if i % 2 else ours.allgather_object(i) for i in range(300)]

    handles = Helper(issue).outcome()
    assert blocked_until(lambda: all(handle.done() for handle in handles[1::2]), _LIMIT)
    # Objects are unpickled by the loop, or by a thread that waits: another one here, the last of them first.
    results = Helper(lambda: [handle.wait(_LIMIT) for handle in reversed(handles)]).outcome()[::-1]
    assert all(t.eq(coll.size).all() for t in results[1::2])
    assert results[::2] == [[i] * coll.size for i in range(0, 300, 2)]


@everywhere
async def test_h10_threads_that_python_did_not_start_may_issue(coll: Communicator) -> None:
    """As those of torch's autograd."""
    ours = await coll.dup(thread=True)
    over = asyncio.Event()
    seen: list[float] = []
    loop = asyncio.get_running_loop()

    def call() -> None:
        seen.extend(ours.allreduce(torch.full((2,), float(i))).wait(_LIMIT)[0].item() for i in range(3))
        loop.call_soon_threadsafe(over.set)

    _thread.start_new_thread(call, ())
    await asyncio.wait_for(over.wait(), _LIMIT)
    assert seen == [0, coll.size, 2 * coll.size]


# --- what may not be ----------------------------------------------------------------------------------------------


class Slow:
    """Blocks the thread that pickles it, inside the call, until the test releases it."""

    def __init__(self) -> None:
        self.pickling, self.goes_on = threading.Event(), threading.Event()

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        self.pickling.set()
        assert self.goes_on.wait(_LIMIT)
        return int, (7,)


@everywhere
async def test_h10_two_threads_at_once_are_told_and_the_first_is_not_hurt(coll: Communicator) -> None:
    ours = await coll.dup(thread=True)
    slow = Slow()
    first = Helper(lambda: ours.allgather_object(slow).wait(_LIMIT), name="the first")
    assert slow.pickling.wait(_LIMIT)
    at_once = r"threads 'the first' and '{}' issue on communicator .* at once: let them take turns"
    with pytest.raises(RuntimeError, match=at_once.format("the second")):
        await Helper(lambda: ours.allreduce(torch.ones(1)), name="the second").over()
    with pytest.raises(RuntimeError, match=at_once.format("MainThread")):
        ours.barrier()
    slow.goes_on.set()
    assert await first.over() == [7] * coll.size
    assert await ours.allreduce(1) == coll.size  # the calls that were refused took no number


@pytest.mark.drawn(2)
@everywhere
async def test_h10_an_ordinary_communicator_says_what_to_do(coll: Communicator) -> None:
    await coll.allreduce(torch.ones(1))
    for call in (lambda: coll.allreduce(torch.ones(1)), lambda: coll.send(torch.ones(1), 0), coll.barrier):
        with pytest.raises(RuntimeError, match=r"Other threads.* call what `await coll\.dup\(thread=True\)` returns"):
            await Helper(call).over()
    below = await (await coll.dup(thread=True)).dup()
    with pytest.raises(RuntimeError, match="belongs to another thread"):
        await Helper(below.barrier).over()
    await coll.barrier()


@everywhere
async def test_h10_what_makes_communicators_stays_on_the_loop(coll: Communicator) -> None:
    ours = await coll.dup(thread=True)
    calls: dict[str, Callable[[], Any]] = {
        r"dup\(\)": ours.dup,
        r"group\(\)": lambda: ours.group([0]),
        r"split\(\)": lambda: ours.split(0),
        r"hierarchy\(\)": ours.hierarchy,
        r"recv\(\) of a list": lambda: ours.recv([torch.ones(1)]),
    }
    for name, call in calls.items():
        with pytest.raises(RuntimeError, match=f"{name} of communicator .* in thread 'helper': call it on the loop"):
            await Helper(call).over()
    again = await ours.dup(thread=True)  # nothing was issued by those calls
    assert await Helper(lambda: again.allreduce(1).wait(_LIMIT)).over() == coll.size


def test_h10_every_call_that_issues_is_made_by_one_thread_at_a_time() -> None:
    missing = [
        name
        for name, call in inspect.getmembers(Communicator, inspect.isfunction)
        if not name.startswith("_")
        and str(inspect.signature(call).return_annotation).startswith("Handle")
        and name not in vars(ThreadedCommunicator)
    ]
    assert missing == []


async def test_h10_the_world_may_be_made_for_threads() -> None:
    async with aiodist.init(thread=True) as coll:
        assert await Helper(lambda: coll.allreduce(3).wait(_LIMIT)).over() == 3


# --- when things go wrong ------------------------------------------------------------------------------------------


@everywhere
@pytest.mark.parametrize("numel", [1, 500_000])
async def test_h10_a_mismatch_reaches_the_threads_that_wait(coll: Communicator, numel: int) -> None:
    ours = await coll.dup(thread=True)
    await ours.allreduce(torch.ones(numel))

    def call() -> None:
        ours.allreduce(torch.ones(numel), op="max" if ours.rank == 1 else "sum").wait(_LIMIT)

    with pytest.raises(aiodist.MismatchError, match="max"):
        await Helper(call).over()
    assert await Helper(lambda: ours.allreduce(1).wait(_LIMIT)).over() == coll.size


@everywhere
@pytest.mark.parametrize("by_thread", [False, True])
async def test_h10_giving_up_reaches_the_threads_that_wait(coll: Communicator, by_thread: bool, until: Any) -> None:
    """In a lane, in steps, and in a message; and then calls are refused."""
    made = [await coll.dup(thread=True) for _ in range(3)]
    for ours in made:
        await ours.allreduce(torch.ones(1))
    await coll.barrier()
    calls: list[Callable[[Communicator], Handle[Any]]] = [
        lambda c: c.allreduce(torch.ones(1)),
        lambda c: c.allgather_object("x"),
        lambda c: c.recv(src=1),
    ]
    if coll.rank == 0:
        helpers = [Helper(waited, call, ours) for ours, call in zip(made, calls, strict=True)]
        await until(lambda: [ours.statistics().pending for ours in made] == [1, 1, 1])
        await rounds()  # they all wait
        for ours in made:
            if by_thread:
                await Helper(ours.abort, "enough").over()
            else:
                ours.abort("enough")
        for helper in helpers:
            with pytest.raises(aiodist.CommunicatorAborted, match="enough"):
                await helper.over()
    for ours in made:
        if coll.rank:
            with pytest.raises(aiodist.CommunicatorAborted, match="enough"):
                await Helper(waited, lambda c: c.recv(src=0, tag=5), ours).over()
        with pytest.raises(aiodist.CommunicatorAborted, match="enough"):
            await Helper(ours.allreduce, torch.ones(1)).over()
    await coll.barrier()


@everywhere
async def test_h10_closing_waits_for_threads_and_then_refuses_them(coll: Communicator) -> None:
    ours = await coll.dup(thread=True)
    await coll.barrier()
    if coll.rank:
        await rounds()
    handle = await Helper(lambda: ours.allreduce(torch.ones(4))).over()
    message = await Helper(lambda: ours.recv(src=0, tag=9)).over()
    waiting = [Helper(lambda: handle.wait(_LIMIT)), Helper(lambda: message.wait(_LIMIT))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the receive that nothing matched, whose thread may wait for it by now
        await ours.aclose()
    assert (await waiting[0].over()).tolist() == [coll.size] * 4
    with pytest.raises(asyncio.CancelledError, match="withdrawn"):
        waiting[1].outcome()
    for call in (lambda: ours.allreduce(torch.ones(4)), ours.barrier):
        with pytest.raises(aiodist.CommunicatorClosed):
            await Helper(call).over()


@pytest.mark.drawn(1)
@everywhere
@pytest.mark.parametrize("orderly", [False, True])
async def test_h10_threads_that_issue_while_it_ends_never_hang(coll: Communicator, orderly: bool, until: Any) -> None:
    """At the close the threads of each rank are at another operation, so the ranks differ on the next one."""
    ours = await coll.dup(thread=True)
    await ours.allreduce(torch.ones(1))

    def issue() -> None:
        t = torch.ones(1)
        for count in range(1_000_000):
            (ours.allreduce(t) if count % 3 else ours.broadcast(t)).wait(_LIMIT)

    helper = Helper(issue)
    await until(lambda: ours.seq > 20)
    if orderly:
        with contextlib.suppress(aiodist.AiodistError):
            await ours.aclose()
    else:
        ours.abort("in the midst")
    with pytest.raises(aiodist.AiodistError):
        await helper.over()
    await coll.barrier()


@pytest.mark.ranks(2, backend=("openmpi", "shm"))
async def test_h10_a_forked_child_neither_calls_nor_waits(coll: Communicator) -> None:
    ours = await coll.dup(thread=True)
    await coll.barrier()
    slow = Slow()
    inside = Helper(lambda: ours.allgather_object(slow).wait(_LIMIT))
    assert slow.pickling.wait(_LIMIT)
    handle = coll.allreduce(torch.ones(1)) if coll.rank == 0 else None
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork with other threads, from Python 3.12 on
        child = os.fork()
    if child == 0:
        told = [_refused(lambda: ours.allreduce(torch.ones(1)))]
        if handle is not None:
            told.append(_refused(lambda: Helper(lambda: handle.wait(_LIMIT)).outcome()))
        os.write(writing, "\n".join(told).encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as pipe:  # noqa: ASYNC230  - the child is about to end
        told = (await asyncio.to_thread(pipe.read)).splitlines()
    await asyncio.to_thread(os.waitpid, child, 0)
    assert "was opened before os.fork: a child cannot use it" in told[0]
    assert coll.rank or "was issued before os.fork: a child cannot wait for it" in told[1]
    slow.goes_on.set()
    assert await inside.over() == [7, 7]
    await (coll.allreduce(torch.ones(1)) if handle is None else handle)


def _refused(call: Callable[[], object]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


# --- many ----------------------------------------------------------------------------------------------------------


class Hammer:
    """Four threads and the loop issue in an order that all ranks draw alike, and check each result."""

    LOOP = 4

    def __init__(self, coll: Communicator, count: int) -> None:
        draw = random.Random(count)
        self.coll, self.count, self.next = coll, count, 0
        self.by = [draw.randrange(self.LOOP + 1) for _ in range(count)]
        self.sizes = [draw.choice((1, 1, 1, 7, 5_000, 70_000)) for _ in range(count)]
        self.kinds = [draw.choice((*["allreduce"] * 3, "broadcast", "allgather_object")) for _ in range(count)]
        self.turns = threading.Condition()

    def issue(self, i: int) -> Handle[Any]:
        coll, t = self.coll, torch.full((self.sizes[i],), float(i % 97 + self.coll.rank))
        if self.kinds[i] == "allreduce":
            return coll.allreduce(t)
        return (
            coll.broadcast(t, i % coll.size) if self.kinds[i] == "broadcast" else coll.allgather_object((i, coll.rank))
        )

    def check(self, i: int, result: Any) -> None:
        size = self.coll.size
        if self.kinds[i] == "allgather_object":
            assert result == [(i, rank) for rank in range(size)]
        elif self.kinds[i] == "broadcast":
            assert result.eq(i % 97 + i % size).all(), i
        else:
            assert result.eq(i % 97 * size + sum(range(size))).all(), i

    def in_turn(self, i: int) -> Handle[Any]:
        """Issue operation `i` after all earlier ones; blocks this thread until then."""
        with self.turns:
            assert self.turns.wait_for(lambda: self.next == i, _LIMIT)
            handle = self.issue(i)
            self.next += 1
            self.turns.notify_all()
            return handle

    def thread(self, me: int) -> int:
        """Issue what is this thread's, with some in flight; return how many."""
        mine = [i for i in range(self.count) if self.by[i] == me]
        flying: deque[tuple[int, Handle[Any]]] = deque()
        for i in mine:
            flying.append((i, self.in_turn(i)))
            while len(flying) > i % 5:
                self.check(flying[0][0], flying.popleft()[1].wait(_LIMIT))
        for i, handle in flying:
            self.check(i, handle.wait(_LIMIT))
        return len(mine)

    async def loop(self) -> int:
        """The same on the loop, which awaits its turn as well."""
        mine = [i for i in range(self.count) if self.by[i] == self.LOOP]
        for i in mine:
            await asyncio.to_thread(self.wait_for, i)
            self.check(i, await self.in_turn(i))
        return len(mine)

    def wait_for(self, i: int) -> None:
        """Block this thread until operation `i` is next."""
        with self.turns:
            assert self.turns.wait_for(lambda: self.next == i, _LIMIT)


async def _hammer(coll: Communicator, count: int) -> None:
    ours = await coll.dup(thread=True)
    hammer = Hammer(ours, count)
    helpers = [Helper(hammer.thread, me, name=f"thread {me}") for me in range(Hammer.LOOP)]
    issued = await hammer.loop()
    for helper in helpers:
        issued += await helper.over()
    assert issued == ours.seq == count
    await ours.aclose()


@pytest.mark.thorough
@everywhere
@pytest.mark.timeout(120)
async def test_h10_four_threads_and_the_loop_take_turns_a_thousand_times(coll: Communicator) -> None:
    await _hammer(coll, 1_000)


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.ranks(2, backend=("openmpi", "gloo", "shm"))
async def test_h10_four_threads_and_the_loop_take_turns_20_000_times(coll: Communicator) -> None:
    await _hammer(coll, 20_000)
