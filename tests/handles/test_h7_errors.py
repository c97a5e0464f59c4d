"""H7: errors reach the task that awaits; what no code looks at is reported once, with the line that issued it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import inspect
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import aiodist.handles
from aiodist.handles import Account, Handle, Operation, Origin, Progress, from_future
from aiodist.handles.polling import CallbackFailed
from aiodist.streams import HostStream
from tests.support.hearing import heard

pytestmark = pytest.mark.timeout(30)


def _fail() -> None:
    raise ValueError("the native text")


async def test_h7_every_awaiter_gets_the_error(bench: Any) -> None:
    operation = await bench.issue()
    tasks = [asyncio.ensure_future(operation.handle) for _ in range(3)]
    await asyncio.sleep(0)
    operation.fail(error := ValueError("no"))
    assert [r is error for r in await asyncio.gather(*tasks, return_exceptions=True)] == [True] * 3
    assert operation.handle.exception() is error


@pytest.mark.parametrize("yields", [False, True])
async def test_h7_the_traceback_is_that_of_the_failure_and_does_not_grow(yields: bool) -> None:
    """The await of a finished handle has one frame more if the loop has not run for a while: it lets the loop run."""
    async with HostStream() as stream:
        handle = stream.submit(_fail)
        lengths = []
        for _ in range(4):
            Progress.current().last_ran = 0.0 if yields else float("inf")
            with pytest.raises(ValueError, match="native text") as caught:
                await handle
            frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
            assert frames[-1] == "_fail"
            lengths.append(len(frames))
        assert ("_yielding" in frames) == yields
        assert len(set(lengths[1:])) == 1  # the first await may have suspended
        assert lengths[1] <= lengths[0]


async def test_h7_the_note_names_the_operation_and_its_line() -> None:
    async with HostStream("compute") as stream:
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            await stream.submit(_fail)
    (note,) = caught.value.__notes__
    assert "_fail #0 issued at " in note
    assert "test_h7_errors.py" in note
    assert "compute" in note


async def test_h7_an_error_that_nobody_retrieved_is_reported_once(reports: list[dict[str, Any]]) -> None:
    async with HostStream() as stream:
        stream.submit(_fail)
        line = inspect.currentframe().f_lineno - 1  # type: ignore[union-attr]
        await stream.sync()
        assert len(reports) == 1
        await stream.sync()
    (report,) = reports
    assert isinstance(report["exception"], ValueError)
    assert f"test_h7_errors.py:{line} in test_h7" in report["message"]


async def test_h7_a_handle_dropped_unconsumed_is_reported_at_close(reports: list[dict[str, Any]]) -> None:
    stream = HostStream()
    await stream.__aenter__()
    stream.submit(int)
    line = inspect.currentframe().f_lineno - 1  # type: ignore[union-attr]
    with heard() as caught:
        await stream.aclose()
        await stream.aclose()
    (warning,) = caught
    assert warning.category is RuntimeWarning
    assert (warning.filename, warning.lineno) == (__file__, line)
    assert str(warning.message).startswith(f"int issued at {__file__}:{line} in ")
    assert str(warning.message).endswith("was never awaited")
    assert not reports


async def _awaited(handle: Handle[Any], stream: HostStream) -> None:
    await asyncio.gather(handle, return_exceptions=True)


async def _result(handle: Handle[Any], stream: HostStream) -> None:
    await stream.sync()
    if handle.exception() is None:
        handle.result()


async def _waited(handle: Handle[Any], stream: HostStream) -> None:
    await asyncio.gather(asyncio.to_thread(handle.wait), return_exceptions=True)


async def _callback(handle: Handle[Any], stream: HostStream) -> None:
    handle.add_done_callback(lambda h: None)


async def _gathered(handle: Handle[Any], stream: HostStream) -> None:
    await aiodist.handles.gather(handle, return_exceptions=True)


async def _in_wait(handle: Handle[Any], stream: HostStream) -> None:
    await asyncio.wait([handle])  # type: ignore[type-var]


async def _as_completed(handle: Handle[Any], stream: HostStream) -> None:
    async for _ in aiodist.handles.as_completed([handle]):
        pass


async def _streamed(handle: Handle[Any], stream: HostStream) -> None:
    handle.wait_stream(stream)


async def _cancelled(handle: Handle[Any], stream: HostStream) -> None:
    if not handle.cancel():
        await asyncio.gather(handle, return_exceptions=True)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("work", [int, _fail])
@pytest.mark.parametrize(
    "consume",
    [_awaited, _result, _waited, _callback, _gathered, _in_wait, _as_completed, _streamed, _cancelled],
)
async def test_h7_what_is_consumed_is_not_reported(
    work: Callable[[], Any],
    consume: Callable[[Handle[Any], HostStream], Awaitable[None]],
    reports: list[dict[str, Any]],
) -> None:
    async with HostStream() as stream:
        handle = stream.submit(work)
        await consume(handle, stream)
        del handle
        gc.collect()
    await asyncio.sleep(0)
    assert not reports


async def test_h7_a_sync_covers_what_was_dropped_before(reports: list[dict[str, Any]]) -> None:
    async with HostStream() as stream:
        for _ in range(3):
            stream.submit(int)
        await stream.sync()
        held = stream.submit(int)
        await stream.sync()
        del held  # dropped after the sync that covered it
        stream.sync()  # no await is needed
    assert not reports


async def test_h7_dropped_after_close_is_still_reported(reports: list[dict[str, Any]]) -> None:
    async with HostStream() as stream:
        bad = stream.submit(_fail)
        await stream.sync()
    assert not reports
    del bad
    gc.collect()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [type(report["exception"]) for report in reports] == [ValueError]


async def test_h7_handles_of_no_communicator_are_reported_too(reports: list[dict[str, Any]]) -> None:
    bad: concurrent.futures.Future[None] = concurrent.futures.Future()
    bad.set_exception(ValueError("no"))
    from_future(bad)
    gc.collect()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [type(report["exception"]) for report in reports] == [ValueError]
    assert "test_h7_errors.py" in str(reports[0]["message"])


async def test_h7_a_gather_dropped_with_an_error_is_reported(reports: list[dict[str, Any]]) -> None:
    async with HostStream() as stream:
        aiodist.handles.gather(stream.submit(_fail))
        await stream.sync()
        gc.collect()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert [type(report["exception"]) for report in reports] == [ValueError]
    assert "gather" in str(reports[0]["message"])


async def test_h7_a_gather_with_an_error_retrieves_its_finished_members() -> None:
    progress = Progress.current()
    account = Account(progress.loop, prompt=True)
    with heard() as warned:
        members: list[Operation[str]] = [Operation(progress, "member", seq, account=account) for seq in range(4)]
        members[0].resolve("before")
        members[1].reject(error := ValueError("no"))
        members[2].resolve("after")
        handles = [member.handle for member in members]
        together, every = aiodist.handles.gather(*handles), aiodist.handles.gather(*handles, return_exceptions=True)
        with pytest.raises(ValueError, match="no"):
            await together
        members[3].resolve("late")
        assert await every == ["before", error, "after", "late"]
        members = [Operation(progress, "member", seq, account=account) for seq in range(2)]
        members[0].reject(ValueError("no"))
        members[1].resolve("never seen")
        with pytest.raises(ValueError, match="no"):
            await aiodist.handles.gather(*[member.handle for member in members])
        del members, handles
        gc.collect()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert [str(warning.message) for warning in warned] == []


async def test_h7_nothing_is_raised_by_the_garbage_collector(reports: list[dict[str, Any]]) -> None:
    """Warnings are errors in this run, and an error in `__del__` would fail it."""
    progress = Progress.current()
    handle: Handle[int] = Handle(progress, "allreduce", origin=Origin.here(1))
    Operation.of(handle).resolve(1)
    del handle
    gc.collect()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [type(report["exception"]) for report in reports] == [RuntimeWarning]


def test_h7_dropped_after_the_loop_closed() -> None:
    held: list[Handle[Any]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: seen.append(context["exception"]))
        for outcome in (ValueError("no"), None):
            handle: Handle[Any] = Handle(Progress.current(), "allreduce", account=Account(loop, prompt=True))
            if outcome:
                Operation.of(handle).reject(outcome)
            else:
                Operation.of(handle).resolve(1)
            held.append(handle)

    seen: list[Any] = []
    asyncio.run(main())
    held.clear()
    gc.collect()
    assert [type(e) for e in seen] == [ValueError]


async def test_h7_an_operation_dropped_while_it_runs_keeps_its_error(reports: list[dict[str, Any]]) -> None:
    async with HostStream() as stream:
        stream.submit(_fail)
        gc.collect()
        assert not reports
    assert len(reports) == 1


@pytest.mark.thorough
@pytest.mark.drawn(2)
async def test_h7_memory_is_flat_after_ten_thousand_handles(bench: Any) -> None:
    def left() -> int:
        gc.collect()
        return len(gc.get_objects())

    progress = Progress.current()

    async def some(count: int) -> None:
        for i in range(count):
            handle: Handle[int] = Handle(progress, "allreduce", origin=Origin.here(1))
            Operation.of(handle).set_deadline(1000.0)
            waiting = asyncio.ensure_future(handle) if i % 10 == 0 else handle
            if i % 3:
                Operation.of(handle).resolve(i)
            else:
                Operation.of(handle).reject(ValueError(i))
            await asyncio.gather(waiting, return_exceptions=True)

    await some(500)
    before = left()
    await some(10_000)
    assert left() - before < 500
    assert len(progress.timers) <= 1000


class _Broken:
    """A poller that has something to do and raises."""

    rings = False
    polls = 0

    def __len__(self) -> int:
        return 1

    def poll(self, until: float = 0.0) -> bool:
        self.polls += 1
        raise RuntimeError("nothing moves")


async def test_h7_pollers_that_fail_in_turn_are_given_up(
    reports: list[dict[str, Any]], until: Callable[[Callable[[], object]], Awaitable[None]]
) -> None:
    """Each for itself: that another raises as well keeps none of them."""
    progress = Progress.current()
    told: list[Exception] = []
    progress.on_broken.append(told.append)
    pollers = [_Broken(), _Broken()]
    for poller in pollers:
        progress.add_poller(poller)
    progress.resume_polling()
    await until(lambda: len(told) == len(pollers))
    assert [str(error) for error in told] == ["nothing moves"] * 2
    assert len(reports) == 2  # once for each
    await until(lambda: not progress.pending())
    assert [poller.polls for poller in pollers] == [1, 1]


class _FailingCallback(_Broken):
    """A sound poller, one of whose callbacks raises."""

    def __len__(self) -> int:
        return int(self.polls == 0)

    def poll(self, until: float = 0.0) -> bool:
        self.polls += 1
        raise CallbackFailed from ValueError("a callback")


async def test_h7_a_poller_whose_callback_raises_is_still_polled(
    reports: list[dict[str, Any]], until: Callable[[Callable[[], object]], Awaitable[None]]
) -> None:
    progress = Progress.current()
    broken: list[Exception] = []
    progress.on_broken.append(broken.append)
    poller = _FailingCallback()
    progress.add_poller(poller)
    progress.resume_polling()
    await until(lambda: len(reports) == 1)
    assert str(reports[0]["exception"]) == "a callback"
    poller.polls = 0
    progress.resume_polling()
    await until(lambda: len(reports) == 2)
    assert not broken
    progress.remove_poller(poller)


async def test_h7_a_call_that_makes_the_calls_of_the_inbox_runs_once() -> None:
    progress = Progress.current()
    calls: list[int] = []

    def first() -> None:
        calls.append(1)
        progress.make_calls()

    def both() -> None:
        progress.inbox.append((first, ()))
        progress.inbox.append((calls.append, (2,)))
        progress.make_calls()

    progress.with_lock(both)
    assert calls == [1, 2]
    assert not progress.inbox
