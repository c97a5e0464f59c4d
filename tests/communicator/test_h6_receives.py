"""H6: a receive that no code waits for takes no message: one whose wait timed out, and one that was dropped."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import inspect
import random
import threading
import warnings
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import aiodist
from aiodist import BufferInFlight, Communicator, Handle, OperationTimeout
from aiodist.c10d.work import HandleWork
from aiodist.communicator import parts_of
from aiodist.compat.mpi import Comm
from aiodist.testing import run_ranks
from tests.support.hearing import heard

everywhere = pytest.mark.ranks(2, backend=("local", "openmpi", "mpich", "gloo", "shm"))
LONG = 300_000  # elements: their data follow the header in a message of their own
MOST = LONG + 64
LAST = 1000


def _number(value: Any) -> int:
    return int(value if isinstance(value, int) else value.flatten()[0])


# --- how a wait ends without the outcome ------------------------------------------------------------------------------


async def _wait_for(issue: Callable[[], Any], seconds: float) -> Any:
    return await asyncio.wait_for(issue(), seconds)


async def _asyncio_timeout(issue: Callable[[], Any], seconds: float) -> Any:
    async with asyncio.timeout(seconds):
        return await issue()


async def _our_timeout(issue: Callable[[], Any], seconds: float) -> Any:
    async with aiodist.timeout(seconds):
        return await issue()


async def _cancelled(issue: Callable[[], Any], seconds: float) -> Any:
    async def value() -> Any:
        return await issue()

    task = asyncio.create_task(value())
    await asyncio.wait([task], timeout=seconds)
    task.cancel()
    await asyncio.wait([task])
    if task.cancelled():
        raise TimeoutError
    return task.result()


async def _task_group(issue: Callable[[], Any], seconds: float) -> Any:
    got: list[Any] = []

    async def value() -> None:
        got.append(await issue())

    async def fail() -> None:
        await asyncio.sleep(seconds)
        raise TimeoutError

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(value())
            group.create_task(fail())
    except* TimeoutError:
        pass
    if not got:
        raise TimeoutError
    return got[0]


async def _gathered(issue: Callable[[], Any], seconds: float) -> Any:
    return (await asyncio.wait_for(aiodist.gather(issue()), seconds))[0]


async def _completed(issue: Callable[[], Any], seconds: float) -> Any:
    async with asyncio.timeout(seconds):
        async for handle in aiodist.as_completed([issue()]):
            return await handle


async def _waited_by_thread(issue: Callable[[], Any], seconds: float) -> Any:
    handle = issue()
    return await asyncio.to_thread(handle.wait, seconds)


WAYS = [_wait_for, _asyncio_timeout, _our_timeout, _cancelled, _task_group, _gathered, _completed]


def receives(coll: Communicator, kind: str) -> Callable[[], Any]:
    """Return what issues a receive from rank 0."""
    into = torch.zeros(MOST)
    return {
        "recv": lambda: coll.recv(src=0, tag=7),
        "into": lambda: coll.recv(into, src=0, tag=7),
        "object": lambda: coll.recv_object(src=0, tag=7),
    }[kind]


def send(coll: Communicator, kind: str, number: int, size: int) -> Handle[None]:
    if kind == "object":
        return coll.send_object(number if size == 1 else torch.full((size,), number), dst=1, tag=7)
    return coll.send(torch.full((size,), float(number)), dst=1, tag=7)


@everywhere
@pytest.mark.drawn(5)
@pytest.mark.parametrize("give_up", [*WAYS, _waited_by_thread])
@pytest.mark.parametrize("kind", ["recv", "into", "object"])
async def test_h6_waits_that_time_out_lose_no_message(
    coll: Communicator, give_up: Callable[..., Awaitable[Any]], kind: str
) -> None:
    draw, count = random.Random(coll.rank), 40
    if coll.rank == 0:
        for number in range(count):
            # A message into the caller's tensor stays with its receive, and is reported.
            await send(coll, kind, number, draw.choice((1, 1, 1, 100 if kind == "into" else LONG)))
            if draw.random() < 0.4:
                await asyncio.sleep(draw.random() * 0.004)
    else:
        issue, got = receives(coll, kind), list[int]()
        while len(got) < count:
            try:
                got.append(_number(await give_up(issue, 0.001)))
            except TimeoutError:
                pass
            except BufferInFlight:  # what came last still travels into the tensor
                await asyncio.sleep(0.001)
        assert got == list(range(count))
    await coll.barrier()


@everywhere
@pytest.mark.parametrize("kind", ["recv", "into", "object"])
async def test_h6_the_next_receive_may_be_awaited_while_the_error_is_handled(coll: Communicator, kind: str) -> None:
    """The traceback of the time-out holds the handle all the while."""
    if coll.rank == 1:
        issue = receives(coll, kind)
        try:
            await asyncio.wait_for(issue(), 0.01)
        except TimeoutError:
            await coll.send(torch.zeros(1), dst=0)
            assert _number(await asyncio.wait_for(issue(), 20)) == 5
    else:
        await coll.recv(src=1)
        await send(coll, kind, 5, 1)
    await coll.barrier()


@pytest.mark.ranks(1)
@pytest.mark.parametrize("size", [0, 3, LONG])
async def test_h6_what_came_as_the_wait_was_given_up_goes_to_the_next_receive(coll: Communicator, size: int) -> None:
    for into in (None, torch.zeros(max(size, 1))):
        task = asyncio.ensure_future(coll.recv(into, src=0))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        sent = coll.send(torch.full((size,), 2.0), 0, tag=3)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        other = coll.recv()
        assert (await other).eq(2.0).all()
        assert (other.tag, other.nbytes) == (3, 4 * size)
        await sent


@pytest.mark.ranks(1)
async def test_h6_an_object_that_came_as_the_wait_was_given_up_is_unpacked_once(coll: Communicator) -> None:
    task = asyncio.ensure_future(coll.recv_object())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    first, second = coll.send_object({"a": 1}, 0), coll.send_object("b", 0)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    if task.cancelled():
        assert await coll.recv_object() == {"a": 1}
    messages = coll.messages()
    assert (await anext(messages)).data == "b"
    await messages.aclose()
    await first
    await second


@pytest.mark.ranks(1)
async def test_h6_a_receive_that_is_awaited_again_goes_on(coll: Communicator) -> None:
    t = torch.zeros(3)
    handle = coll.recv(t)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(handle, 0.001)
    await coll.send(torch.ones(3), 0)
    assert await handle is t
    assert t.eq(1).all()
    late = coll.recv()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(late, 0.001)
    await coll.send(torch.ones(1), 0)
    for _ in range(1000):
        if late.done():  # who asks waits too
            break
        await asyncio.sleep(0)
    assert late.result().eq(1).all()


@pytest.mark.ranks(1)
async def test_h6_a_receive_that_is_not_waited_for_frees_the_memory(coll: Communicator) -> None:
    t = torch.zeros(3)
    handle = coll.recv(t)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(handle, 0.001)
    other = coll.recv(t)
    with pytest.raises(BufferInFlight):
        await handle
    await coll.send(torch.ones(3), 0)
    assert await other is t
    assert handle.cancel()
    with pytest.raises(asyncio.CancelledError):
        await handle


@pytest.mark.ranks(1)
async def test_h6_its_own_deadline_gives_a_receive_up_too(coll: Communicator) -> None:
    with pytest.raises(OperationTimeout, match="it waits for a message from any rank") as held:
        await coll.recv(timeout=0.001)
    await coll.send(torch.ones(2), 0)
    assert (await asyncio.wait_for(coll.recv(), 20)).eq(1).all()
    del held


@pytest.mark.ranks(1)
async def test_h6_a_deadline_that_passed_before_the_await_gives_a_receive_up_too(coll: Communicator) -> None:
    late = coll.recv(timeout=1)
    await asyncio.sleep(2)
    with pytest.raises(OperationTimeout, match="it waits for a message from any rank"):
        await late
    await coll.send(torch.ones(2), 0)
    assert (await asyncio.wait_for(coll.recv(), 20)).eq(1).all()
    assert late.cancel()


@pytest.mark.drawn(3)
@everywhere
async def test_h7_a_receive_that_is_dropped_is_told_and_takes_no_message(coll: Communicator) -> None:
    if coll.rank == 1:
        with heard() as caught:
            t = torch.zeros(1)
            coll.recv(t, src=0)
            line = inspect.currentframe().f_lineno - 1  # type: ignore[union-attr]
            again = coll.recv(t, src=0)  # its memory is free
            await coll.send(torch.zeros(1), dst=0)
            assert _number(await again) == 9
            await asyncio.sleep(0)
        (warning,) = caught
        assert (warning.category, warning.filename, warning.lineno) == (RuntimeWarning, __file__, line)
        assert "was never awaited" in str(warning.message)
        assert coll.statistics().pending == 0
    else:
        await coll.recv(src=1)
        await coll.send(torch.full((1,), 9.0), dst=1)
    await coll.barrier()


@pytest.mark.ranks(1)
async def test_h7_a_receive_that_had_its_message_and_is_dropped_is_told(coll: Communicator) -> None:
    with heard() as caught:
        await coll.send(torch.zeros(1), 0)
        coll.recv()
        line = inspect.currentframe().f_lineno - 1  # type: ignore[union-attr]
        await asyncio.sleep(0.01)
    (warning,) = caught
    assert (warning.filename, warning.lineno) == (__file__, line)
    assert "was never awaited" in str(warning.message)


@pytest.mark.ranks(1)
async def test_h7_the_garbage_collector_may_end_operations_while_they_are_listed(coll: Communicator) -> None:
    pending = parts_of(coll).dispatcher.operations
    handles = [coll.send(torch.zeros(1), 0) for _ in range(2)]
    listed: dict[Any, Any] = {object(): SimpleNamespace(meets=None) for _ in range(5000)}
    pending.others.update(listed)

    def collected(_: str, __: dict[str, int]) -> None:
        if listed:
            del pending.others[listed.popitem()[0]]

    thresholds = gc.get_threshold()
    gc.callbacks.append(collected)
    gc.set_threshold(100)
    try:
        pending.items()
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(collected)
        for one in listed:
            del pending.others[one]
    await aiodist.gather(*handles)
    for _ in handles:
        await coll.recv()


@pytest.mark.ranks(1)
async def test_h6_a_detached_receive_stays(coll: Communicator) -> None:
    t = torch.zeros(1)
    coll.recv(t).detach()
    gc.collect()
    await asyncio.sleep(0)
    await coll.send(torch.ones(1), 0)
    await asyncio.sleep(0.01)
    assert t.item() == 1


@pytest.mark.ranks(1)
async def test_h6_a_task_or_a_callback_that_nothing_else_holds_keeps_its_receive(coll: Communicator) -> None:
    got: asyncio.Queue[Any] = asyncio.Queue()

    async def serve() -> None:
        got.put_nowait(await coll.recv_object())

    asyncio.create_task(serve())  # noqa: RUF006  - the test drops the task
    coll.recv_object().add_done_callback(lambda handle: got.put_nowait(handle.result()))
    for _ in range(3):
        await asyncio.sleep(0)
    gc.collect()
    await coll.send_object("a", 0)
    await coll.send_object("b", 0)
    assert {await got.get(), await got.get()} == {"a", "b"}


@pytest.mark.ranks(1)
async def test_h6_a_list_of_receives_is_given_up_as_one(coll: Communicator) -> None:
    ts = [torch.zeros(2), torch.zeros(2)]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(coll.recv(ts), 0.001)
    await coll.send(torch.ones(2), 0)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(coll.recv(ts), 0.01)  # one of two came
    assert (await coll.recv()).eq(1).all()
    both = coll.recv(ts)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(both, 0.001)
    await coll.send([torch.full((2,), 2.0), torch.full((2,), 3.0)], 0)
    assert [t[0].item() for t in await both] == [2.0, 3.0]


@everywhere
@pytest.mark.parametrize("size", [1, LONG])
async def test_h6_a_sendrecv_that_is_given_up_has_sent_and_receives_nothing(coll: Communicator, size: int) -> None:
    """The call sends the message; the receive is like any other, and the same handle can be awaited again."""
    other, t = 1 - coll.rank, torch.full((size,), float(coll.rank))
    if coll.rank == 1:
        for held in (False, True):
            try:
                handle = coll.sendrecv(t, other, other)
                await asyncio.wait_for(handle, 0.01)
            except TimeoutError:
                if not held:
                    del handle
            await coll.send(torch.zeros(1), dst=0, tag=1)
            if held:
                assert (await handle).eq(0).all()
        assert (await coll.recv(src=0)).eq(0).all()
    else:
        for _ in range(2):
            await coll.recv(src=1, tag=1)
            assert (await coll.recv(src=1, tag=0)).eq(1).all()
            await coll.send(torch.zeros(size), dst=1)
    await coll.barrier()


@pytest.mark.ranks(2)
async def test_h6_a_sendrecv_whose_message_was_there_is_finished_when_its_own_is_sent(coll: Communicator) -> None:
    if coll.rank == 0:
        await coll.send(torch.full((1,), 4.0), 0)
        t = torch.ones(LONG)
        handle = coll.sendrecv(t, dst=1, src=0)
        await coll.barrier()
        assert not handle.done()
        with pytest.raises(BufferInFlight):
            coll.allreduce(t)
        await coll.send(torch.zeros(1), dst=1, tag=1)
        assert await handle == 4
        t.zero_()
    else:
        await coll.barrier()
        await coll.recv(src=0, tag=1)
        assert (await coll.recv(src=0)).eq(1).all()
    await coll.barrier()


@pytest.mark.ranks(1)
@pytest.mark.parametrize("thread", [False, True])
async def test_h6_a_receive_may_be_withdrawn_while_its_message_goes_back(coll: Communicator, thread: bool) -> None:
    coll = await coll.dup(thread=thread)
    handle = coll.recv_object()
    wait = handle.__await__()
    next(wait)
    await coll.send_object("a", 0)  # it has come, and is not unpacked
    with pytest.raises(asyncio.CancelledError):
        wait.throw(asyncio.CancelledError)
    assert handle.cancel()
    assert await asyncio.wait_for(coll.recv_object(), 20) == "a"
    assert coll.statistics().pending == 0
    await coll.aclose()


@pytest.mark.ranks(2)
async def test_h7_a_result_that_a_cancelled_await_left_is_told(coll: Communicator) -> None:
    """The result of an operation is reported if it is a value; a barrier has none, and no report."""
    hearing: AbstractContextManager[list[warnings.WarningMessage]] = heard() if coll.rank == 0 else nullcontext([])
    with hearing as caught:
        if coll.rank == 0:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(coll.allgather_object("x"), 0.001)
            line = inspect.currentframe().f_lineno - 1  # type: ignore[union-attr]
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(coll.barrier(), 0.001)
            t, other = torch.ones(2), [torch.ones(2), torch.ones(3)]
            with pytest.raises(TimeoutError):  # its sum is not lost: it is in t
                await asyncio.wait_for(coll.allreduce(t), 0.001)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(coll.allreduce(other), 0.001)
            await coll.send(torch.zeros(1), dst=1)
        else:
            await coll.recv(src=0)
            await coll.allgather_object("y")
            await coll.barrier()
            await coll.allreduce(torch.ones(2))
            await coll.allreduce([torch.ones(2), torch.ones(3)])
        await coll.barrier()
        await asyncio.sleep(0.01)
    if coll.rank == 0:
        (warning,) = [w for w in caught if w.filename == __file__]
        assert warning.lineno == line
        assert "finished after its await had ended, and its result was dropped" in str(warning.message)


@pytest.mark.ranks(1)
async def test_h6_requests_of_the_front_that_are_dropped_take_no_message(coll: Communicator) -> None:
    comm = Comm(coll)
    with heard() as caught:
        assert comm.irecv().test() == (False, None)
        request = comm.irecv()
        await coll.send_object("a", 0)
        assert await request == "a"
    assert [str(w.message).endswith("was never awaited") for w in caught] == [True]


@pytest.mark.ranks(1)
async def test_h6_work_of_a_process_group_that_is_dropped_takes_no_message(coll: Communicator) -> None:
    t, other = torch.zeros(1), torch.zeros(1)
    HandleWork([coll.recv(t, 0)], [t], None)
    kept = HandleWork([coll.recv(other, 0)], [other], None)
    await coll.send(torch.ones(1), 0)
    await asyncio.sleep(0.01)
    assert (t.item(), other.item()) == (0, 1)
    assert kept.is_completed()


# --- every receive, drawn ---------------------------------------------------------------------------------------------

PATIENCE = st.sampled_from([0.0, 0.5, 1.0, 1.5, 4.0])
PLANS = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["recv", "into", "object"]),
        "sends": st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0, 2.0]), st.sampled_from([1, 60, LONG])), max_size=6),
        "waits": st.lists(st.tuples(st.sampled_from([*WAYS, None]), PATIENCE), min_size=1, max_size=8),
    }
)


@pytest.mark.thorough
@given(plan=PLANS, seed=st.integers(0, 3))
def test_h6_each_message_is_received_once_and_in_order_or_told(plan: dict[str, Any], seed: int) -> None:
    """All ways that end a wait, at any time: None drops a receive that nothing has awaited."""
    kind, count = plan["kind"], len(plan["sends"])

    async def main() -> list[int]:
        got: list[int] = []
        async with aiodist.init() as coll:
            if coll.rank == 0:
                sent: list[Handle[None]] = []
                for number, (pause, size) in enumerate(plan["sends"]):
                    await asyncio.sleep(pause)
                    sent.append(send(coll, kind, number, size))
                await coll.recv(src=1)
                await send(coll, kind, LAST, 1)
                await aiodist.gather(*sent)
            else:
                issue = receives(coll, kind)
                for give_up, seconds in plan["waits"] * 2:
                    if give_up is None:
                        with suppress(BufferInFlight):  # the loop withdraws what was gathered in its next turn
                            handle = issue()
                            await asyncio.sleep(seconds)
                            del handle
                        continue
                    with suppress(TimeoutError, BufferInFlight):
                        got.append(_number(await give_up(issue, seconds)))
                await coll.send(torch.zeros(1), dst=0)
                while LAST not in got:
                    with suppress(BufferInFlight):
                        got.append(_number(await issue()))
                    await asyncio.sleep(0)
        return got

    with heard() as caught:
        _, got = run_ranks(2, main, seed=seed)
    dropped = [w for w in caught if "never awaited" in str(w.message) or "was dropped" in str(w.message)]
    assert got == sorted(set(got))
    assert len(got) + len(dropped) >= count + 1  # the message of a dropped receive is reported


def test_h6_a_thread_whose_wait_timed_out_takes_no_message() -> None:
    async def main() -> None:
        async with aiodist.init() as coll:
            with concurrent.futures.ThreadPoolExecutor() as pool:
                loop = asyncio.get_running_loop()
                with pytest.raises(OperationTimeout):
                    await loop.run_in_executor(pool, coll.recv().wait, 0.01)
                await coll.send(torch.ones(1), 0)
                assert (await asyncio.wait_for(coll.recv(), 20)).item() == 1

    asyncio.run(main())


UNPACKING, TIMED_OUT = threading.Event(), threading.Event()


def _unpacked_slowly() -> str:
    UNPACKING.set()
    assert TIMED_OUT.wait(20)
    return "a"


class Slow:
    """An object that is unpacked only after the wait for it has timed out."""

    def __reduce__(self) -> tuple[Callable[[], str], tuple[()]]:
        return _unpacked_slowly, ()


def test_h6_an_object_is_given_back_while_it_is_unpacked() -> None:
    def wait(handle: Handle[Any]) -> None:
        UNPACKING.wait(20)
        with pytest.raises(OperationTimeout):
            handle.wait(0.01)
        TIMED_OUT.set()

    async def main() -> None:
        async with aiodist.init() as coll:
            with concurrent.futures.ThreadPoolExecutor() as pool:
                waited = pool.submit(wait, coll.recv_object())
                await coll.send_object(Slow(), 0)
                assert await asyncio.wait_for(coll.recv_object(), 20) == "a"
                waited.result()

    asyncio.run(main())


@pytest.mark.ranks(2, backend=("gloo", "shm"))
async def test_h6_a_receive_takes_its_message_after_hundreds_of_others(coll: Communicator) -> None:
    """They are in the transport, since no receive waited while the ranks exchanged messages of other operations."""
    count = 600
    if coll.rank == 0:
        sending = [coll.send(torch.tensor([i]), 1, tag=5) for i in range(count)]
        sending.append(coll.send(torch.tensor([-1]), 1, tag=7))
        for _ in range(3):
            await coll.allreduce(1.0, impl="ring")
        await asyncio.gather(*sending)
    else:
        for _ in range(3):
            await coll.allreduce(1.0, impl="ring")
        assert _number(await coll.recv(tag=7)) == -1
        assert [_number(await coll.recv(tag=5)) for _ in range(count)] == list(range(count))
