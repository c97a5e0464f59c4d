"""S1: `HostStream`, ordered work on one thread."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import os
import random
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch

from aiodist.handles import Handle, gather
from aiodist.streams import HostStream
from tests.support.hearing import heard

pytestmark = pytest.mark.timeout(30)


class Blocked:
    """Occupies a stream until the test lets it go."""

    def __init__(self, stream: HostStream) -> None:
        self._begun, self._go = threading.Event(), threading.Event()
        self.handle: Handle[None] = stream.submit(self._work)

    def _work(self) -> None:
        self._begun.set()
        assert self._go.wait(20)

    async def running(self) -> Blocked:
        await asyncio.to_thread(self._begun.wait, 10)
        return self

    def release(self) -> None:
        self._go.set()


async def test_s1_runs_in_the_order_of_submission_on_one_thread() -> None:
    seen: list[tuple[int, int]] = []
    async with HostStream() as stream:
        handles = [stream.submit(lambda i=i: seen.append((i, threading.get_ident()))) for i in range(500)]  # type: ignore[misc]
        await gather(*handles)
    assert [i for i, _ in seen] == list(range(500))
    assert len({thread for _, thread in seen}) == 1
    assert seen[0][1] != threading.get_ident()
    assert [handle.seq for handle in handles] == list(range(500))


async def test_s1_is_issued_at_once() -> None:
    done = threading.Event()
    async with HostStream() as stream:
        handle = stream.submit(done.set)
        assert done.wait(10)  # though the loop does not run
        await handle


async def test_s1_takes_arguments_and_returns_results() -> None:
    def join(*args: str, sep: str = "", timeout: float = 0.0) -> str:
        return sep.join([*args, str(timeout)])

    async with HostStream() as stream:
        assert await stream.submit(join, "a", "b", sep="-", timeout=1.0) == "a-b-1.0"


@pytest.mark.parametrize("kind", [ValueError, SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError])
async def test_s1_an_error_lands_on_its_own_handle_only(kind: type[BaseException]) -> None:
    def fail() -> None:
        raise kind("mine")

    async with HostStream() as stream:
        before, bad, after = stream.submit(int), stream.submit(fail), stream.submit(int)
        assert await gather(before, after) == [0, 0]
        await stream.sync()
        error = bad.exception()
        assert isinstance(error, kind)
        assert error.args == ("mine",)
        assert await stream.submit(int) == 0


async def test_s1_stop_iteration_becomes_an_error_not_a_result() -> None:
    async with HostStream() as stream:
        with pytest.raises(RuntimeError, match="StopIteration"):
            await stream.submit(next, iter(()))


async def test_s1_cancel_withdraws_what_is_queued_and_never_what_runs() -> None:
    ran: list[str] = []
    async with HostStream() as stream:
        blocked = await Blocked(stream).running()
        queued, other = stream.submit(ran.append, "queued"), stream.submit(ran.append, "other")
        assert queued.cancel()
        assert not blocked.handle.cancel()
        with pytest.raises(asyncio.CancelledError):
            await queued
        blocked.release()
        await gather(blocked.handle, other)
    assert ran == ["other"]


async def test_s1_withdrawn_work_lets_go_of_its_arguments_at_once() -> None:
    class Buffer:
        pass

    async with HostStream() as stream:
        blocked = await Blocked(stream).running()
        buffer = Buffer()
        gone = ref(buffer)
        handle = stream.submit(id, buffer)
        del buffer
        assert gone() is not None
        assert handle.cancel()
        assert gone() is None
        blocked.release()
        await blocked.handle


async def test_s1_close_runs_what_is_queued_while_the_loop_goes_on() -> None:
    ran: list[int] = []
    ticks = 0
    stream = HostStream()
    async with stream:
        blocked = await Blocked(stream).running()
        handles = [stream.submit(ran.append, i) for i in range(100)]
        closing = asyncio.create_task(stream.aclose())
        for _ in range(20):
            await asyncio.sleep(0)
            ticks += 1
        assert not closing.done()
        with pytest.raises(RuntimeError, match="is closed"):
            stream.submit(int)
        blocked.release()
        await closing
        assert all(handle.done() for handle in handles)
    assert ran == list(range(100))
    assert "aiodist-stream" not in {thread.name for thread in threading.enumerate()}
    await gather(blocked.handle, *handles)


async def test_s1_a_cancelled_close_still_drains_and_can_be_repeated() -> None:
    ran: list[int] = []
    stream = HostStream()
    await stream.__aenter__()
    blocked = await Blocked(stream).running()
    handle = stream.submit(ran.append, 1)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(stream.aclose(), 0.01)
    blocked.release()
    await stream.aclose()
    await stream.aclose()
    assert ran == [1]
    await gather(blocked.handle, handle)


@pytest.mark.parametrize("how", ["cancelled", "given up"])
async def test_s1_errors_of_what_was_dropped_are_told_however_it_ends(how: str) -> None:
    """Also if no code waits for the end of the thread."""
    told: asyncio.Queue[BaseException] = asyncio.Queue()
    asyncio.get_running_loop().set_exception_handler(lambda _, said: told.put_nowait(said["exception"]))
    stream = HostStream()
    await stream.__aenter__()
    blocked = await Blocked(stream).running()
    stream.submit(int, "x")
    if how == "cancelled":
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stream.aclose(), 0.01)
    blocked.release()
    if how == "given up":
        await stream.submit(int)
        stream.abort()
    assert type(await asyncio.wait_for(told.get(), 10)) is ValueError
    await blocked.handle
    assert told.empty()


async def test_s1_an_error_that_is_dropped_after_it_was_given_up_is_told_too() -> None:
    told: asyncio.Queue[BaseException] = asyncio.Queue()
    asyncio.get_running_loop().set_exception_handler(lambda _, said: told.put_nowait(said["exception"]))
    stream = HostStream()
    await stream.__aenter__()
    kept, fine = stream.submit(int, "x"), stream.submit(int)
    await stream.sync()
    stream.abort()
    await stream.aclose()
    del fine, kept
    assert type(await asyncio.wait_for(told.get(), 10)) is ValueError
    assert told.empty()


async def test_s1_a_result_whose_await_ended_early_may_be_dropped() -> None:
    with heard() as caught:
        async with HostStream() as stream:
            blocked = await Blocked(stream).running()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(stream.submit(lambda: 5), 0.01)
            blocked.release()
            await blocked.handle
    assert not caught


async def test_s1_close_drains_after_an_error_in_the_block() -> None:
    ran: list[int] = []
    with pytest.raises(LookupError):  # noqa: PT012  - the test needs a block
        async with HostStream() as stream:
            handle = stream.submit(ran.append, 1)
            raise LookupError
    assert ran == [1]
    await handle


async def test_s1_sync_is_done_when_all_before_it_is() -> None:
    async with HostStream() as stream:
        blocked = await Blocked(stream).running()
        before = stream.submit(int)
        sync = stream.sync()
        assert not sync.cancel()
        blocked.release()
        await sync
        assert before.done()
        assert blocked.handle.done()
        before.result()
        blocked.handle.result()


async def test_s1_the_callers_modes_go_along_and_do_not_stay() -> None:
    def modes() -> tuple[object, ...]:
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.empty(1).device.type,
        )

    def careless() -> None:
        torch.set_grad_enabled(False)
        torch.set_autocast_enabled("cpu", True)
        torch.inference_mode().__enter__()

    plain = modes()
    async with HostStream() as stream:
        for block in (
            torch.no_grad(),
            torch.inference_mode(),
            torch.autocast("cpu", dtype=torch.float16),
            torch.device("meta"),
        ):
            with block:
                here = modes()
                handle = stream.submit(modes)
            assert here != plain
            assert await handle == here
            assert await stream.submit(modes) == plain
        await stream.submit(careless)
        assert await stream.submit(modes) == plain
    assert modes() == plain


async def test_s1_a_graph_made_on_the_thread_is_used_on_the_loop_and_back() -> None:
    w = torch.ones(3, requires_grad=True)
    async with HostStream("compute") as compute:
        loss = await compute.submit(lambda: (w * 2).sum())
        assert loss.requires_grad
        await compute.submit(loss.backward)
        assert w.grad is not None
        assert w.grad.tolist() == [2, 2, 2]


async def test_s1_context_variables_go_along() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="none")
    async with HostStream() as stream:
        variable.set("given")
        handle = stream.submit(variable.get)
        variable.set("later")
        assert await handle == "given"
        await stream.submit(variable.set, "there")
        assert variable.get() == "later"


async def test_s1_wait_handle_holds_back_what_comes_later() -> None:
    order: list[str] = []
    async with HostStream("first") as first, HostStream("second") as second:
        blocked = await Blocked(first).running()
        first_work = first.submit(order.append, "first")
        early = second.submit(order.append, "early")
        second.wait_handle(first_work)
        late = second.submit(order.append, "late")
        await early
        assert order == ["early"]
        blocked.release()
        await gather(late, first_work, blocked.handle)
    assert order == ["early", "first", "late"]


async def test_s1_wait_handle_of_what_failed_or_was_withdrawn() -> None:
    def fail() -> None:
        raise ValueError

    async with HostStream("first") as first, HostStream("second") as second:
        blocked = await Blocked(first).running()
        bad, withdrawn = first.submit(fail), first.submit(int)
        second.wait_handle(bad)
        second.wait_handle(withdrawn)
        handle = second.submit(str, "ran")
        assert withdrawn.cancel()
        blocked.release()
        assert await handle == "ran"
        assert isinstance(bad.exception(), ValueError)
        await blocked.handle


async def test_s1_two_streams_that_wait_for_each_other_in_turn() -> None:
    """The waits form no cycle, since a stream can only wait for earlier work."""
    order: list[int] = []
    async with HostStream("a") as a, HostStream("b") as b:
        previous: Handle[Any] | None = None
        for i in range(200):
            stream = (a, b)[i % 2]
            if previous is not None:
                stream.wait_handle(previous)
            previous = stream.submit(order.append, i)
        await gather(a.sync(), b.sync())
    assert order == list(range(200))


async def test_s1_knows_its_own_thread() -> None:
    stream = HostStream()
    assert not stream.is_current()
    async with stream, HostStream() as other:
        assert not stream.is_current()
        assert await stream.submit(stream.is_current)
        assert not await other.submit(stream.is_current)


async def test_s1_is_used_open_and_from_its_own_loop_only() -> None:
    stream = HostStream("compute")
    with pytest.raises(RuntimeError, match="<HostStream 'compute'> is not open"):
        stream.submit(int)
    await stream.aclose()

    async def elsewhere() -> None:
        for call in (lambda: stream.submit(int), stream.sync, lambda: stream.wait_handle(done)):
            with pytest.raises(RuntimeError, match=r"was called in thread .*expected .*which it was opened on"):
                call()

    def in_a_thread() -> None:
        with pytest.raises(RuntimeError, match="no running event loop: expected"):
            stream.submit(int)
        asyncio.run(elsewhere())

    async with stream:
        done = stream.submit(int)
        await done
        await asyncio.to_thread(in_a_thread)
        with pytest.raises(RuntimeError, match="no running event loop"):
            await stream.submit(stream.submit, int)
        with pytest.raises(RuntimeError, match="cannot be opened twice"):
            await stream.__aenter__()
        assert await stream.submit(int) == 0
    for call in (lambda: stream.submit(int), stream.sync, lambda: stream.wait_handle(done)):
        with pytest.raises(RuntimeError, match="is closed"):
            call()


async def test_s1_ten_thousand_in_flight() -> None:
    total = 0

    def add(i: int) -> None:
        nonlocal total
        total += i

    async with HostStream() as stream:
        blocked = await Blocked(stream).running()
        handles = [stream.submit(add, i) for i in range(10_000)]
        blocked.release()
        await asyncio.wait_for(gather(blocked.handle, *handles), 20)
    assert total == sum(range(10_000))


@pytest.mark.thorough
async def test_s1_memory_is_flat() -> None:
    async def some(stream: HostStream, count: int) -> None:
        for i in range(count):
            await stream.submit(int)
            if i % 10 == 0:
                stream.submit(int)
            if i % 100 == 0:
                await stream.sync()

    def left() -> int:
        gc.collect()
        return len(gc.get_objects())

    async with HostStream() as stream:
        await some(stream, 200)
        before = left()
        await some(stream, 3000)
        assert left() - before < 300
        await stream.sync()


@pytest.mark.thorough
def test_s1_the_loop_closes_while_work_runs() -> None:
    begun, go = threading.Event(), threading.Event()
    held: list[Any] = []

    def work() -> None:
        begun.set()
        assert go.wait(20)

    async def main() -> None:
        stream = HostStream("orphan")
        await stream.__aenter__()
        held.extend([stream, stream.submit(work), stream.submit(int)])
        assert begun.wait(10)

    loop = asyncio.new_event_loop()
    loop.run_until_complete(main())
    loop.close()
    (thread,) = [t for t in threading.enumerate() if t.name == "aiodist-orphan"]
    go.set()
    thread.join(10)
    assert not thread.is_alive()
    stream, running, queued = held
    assert running.result() is None
    assert queued.cancelled()
    held.clear()
    with heard() as caught:
        del stream, running, queued
        gc.collect()
    assert ["was never closed" in str(w.message) for w in caught] == [True]


@pytest.mark.thorough
async def test_s1_a_stream_that_is_dropped_ends_its_thread() -> None:
    stream = HostStream("dropped")
    await stream.__aenter__()
    await stream.submit(int)
    (thread,) = [t for t in threading.enumerate() if t.name == "aiodist-dropped"]
    with heard() as caught:
        del stream
        gc.collect()
    assert ["was never closed" in str(w.message) for w in caught] == [True]
    await asyncio.to_thread(thread.join, 10)
    assert not thread.is_alive()


async def test_s1_a_dropped_stream_does_not_wait_for_a_handle_for_ever() -> None:
    async with HostStream() as other:
        blocked = await Blocked(other).running()
        stream = HostStream("dropped")
        await stream.__aenter__()
        stream.wait_handle(blocked.handle)
        (thread,) = [t for t in threading.enumerate() if t.name == "aiodist-dropped"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            del stream
            gc.collect()
        await asyncio.to_thread(thread.join, 10)
        assert not thread.is_alive()
        blocked.release()
        await blocked.handle


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.asyncio(loop_factories=["asyncio"])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
async def test_s1_a_forked_child_is_refused() -> None:
    async with HostStream() as stream:
        await stream.submit(int)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                stream.submit(int)
            except RuntimeError as error:
                code = 0 if "forked from" in str(error) else 2
            finally:
                os._exit(code)
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert await stream.submit(int) == 0


@pytest.mark.thorough
@pytest.mark.drawn(1)
async def test_s1_a_program_that_forgets_to_close_ends(tmp_path: Any) -> None:
    script = tmp_path / "forgets.py"
    script.write_text(
        "import asyncio, threading\n"
        "from aiodist.streams import HostStream\n"
        "begun, ended = threading.Event(), threading.Event()\n"
        "async def main():\n"
        "    global stream\n"
        "    stream = HostStream()\n"
        "    await stream.__aenter__()\n"
        "    stream.submit(lambda: (begun.set(), ended.wait(10), print('ran', flush=True)))\n"
        "    begun.wait(10)\n"
        "asyncio.run(main())\n"
        "ended.set()\n"
    )
    root = str(Path(__file__).parents[2])
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(script),
        env={**os.environ, "PYTHONPATH": root},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 25)
    assert process.returncode == 0, err.decode()
    assert out.decode().split() == ["ran"]


async def test_s1_stress_of_submits_cancels_waits_and_errors() -> None:
    dice = random.Random(1)
    ran: list[int] = []

    def work(i: int) -> int:
        ran.append(i)
        if i % 7 == 0:
            raise ValueError(i)
        return i

    async with HostStream("a") as a, HostStream("b") as b:
        handles: list[Handle[int]] = []
        withdrawn = set()
        for i in range(3000):
            handles.append(dice.choice((a, b)).submit(work, i))
            action = dice.random()
            if action < 0.1:
                handle = dice.choice(handles)
                if handle.cancel():
                    withdrawn.add(handle)
            elif action < 0.2:
                dice.choice((a, b)).wait_handle(dice.choice(handles))
            elif action < 0.22:
                await asyncio.wait([dice.choice(handles)])  # type: ignore[type-var]
        await asyncio.wait_for(gather(*handles, return_exceptions=True), 20)
        for i, handle in enumerate(handles):
            assert handle.cancelled() == (handle in withdrawn)
            if not handle.cancelled():
                assert (handle.exception() is None) == (i % 7 != 0)
    assert sorted(ran) == [i for i, handle in enumerate(handles) if handle not in withdrawn]


async def test_s1_a_round_trip_is_short() -> None:
    async with HostStream() as stream:
        best = float("inf")
        for _ in range(300):
            began = time.perf_counter()
            await stream.submit(int)
            best = min(best, time.perf_counter() - began)
    assert best < 1e-3  # 25 to 30 us on a machine with nothing else to do
