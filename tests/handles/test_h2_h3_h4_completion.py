"""H2 done means data, H3 once, H4 many."""

from __future__ import annotations

import asyncio
import contextvars
import random
import threading
from functools import partial
from typing import Any
from weakref import ref

import pytest
import torch

from aiodist.handles import Handle, Operation, Progress, from_source, internals
from aiodist.streams import HostStream

pytestmark = pytest.mark.timeout(30)


class Owned:
    """Stands for a buffer."""


async def test_h2_done_means_data(until: Any) -> None:
    t = torch.zeros(1 << 16)

    def fill() -> torch.Tensor:
        for part in torch.chunk(t, 16):
            part.fill_(7)
        return t

    async with HostStream() as stream:
        handle = stream.submit(fill)
        await until(handle.done)
        assert handle.result() is t
        assert bool((t == 7).all())


async def test_h2_the_result_is_there_as_soon_as_done_is(bench: Any) -> None:
    """A thread that sees `done()` may read at once."""
    operation = await bench.issue()
    seen: list[object] = []

    def look() -> None:
        while not operation.handle.done():
            pass
        seen.append(operation.handle.result())

    thread = threading.Thread(target=look)
    thread.start()
    operation.finish("data")
    assert await operation.handle == "data"
    await asyncio.to_thread(thread.join, 10)
    assert seen == ["data"]


async def test_h2_buffers_are_owned_until_it_is_over_and_no_longer(bench: Any) -> None:
    operation = await bench.issue()
    handle = operation.handle
    owned = Owned()
    gone = ref(owned)
    Operation.of(handle).keep(owned)
    del owned
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(handle, 0.01)
    assert gone() is not None
    operation.finish()
    await handle
    assert gone() is None


async def test_h2_a_stream_lets_go_of_arguments_and_results() -> None:
    def use(x: Owned) -> Owned:
        made.append(ref(result := Owned()))
        return result

    made: list[ref[Owned]] = []
    async with HostStream() as stream:
        argument = Owned()
        made.append(ref(argument))
        handle = stream.submit(use, argument)
        await handle
        del argument
        assert made[0]() is None
        assert made[1]() is not None
        del handle
        await stream.sync()
        assert made[1]() is None


async def test_h3_completes_once(bench: Any) -> None:
    handle = await bench.ended(1)
    operation: Operation[int] = Operation.of(handle)
    for settle in (partial(operation.resolve, 2), partial(operation.reject, ValueError()), operation.cancel):
        with pytest.raises(asyncio.InvalidStateError, match="done already"):
            settle()
    assert not internals.reject_pending(handle, ValueError())
    assert not handle.cancel()
    assert not handle.cancelled()
    assert await handle == 1


async def test_h3_a_failed_operation_stays_failed(bench: Any) -> None:
    handle = await bench.ended(error := ValueError("no"))
    assert not handle.cancel()
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            await handle
    assert handle.exception() is error


async def test_h3_cancel_and_completion_race_to_one_outcome() -> None:
    ran: set[int] = set()
    dice = random.Random(0)
    go = threading.Event()
    async with HostStream() as stream:
        first = stream.submit(go.wait, 30)
        handles = [stream.submit(ran.add, i) for i in range(2000)]
        order = list(enumerate(handles))
        dice.shuffle(order)
        withdrawn = {i for i, handle in order[:500] if handle.cancel()}
        go.set()
        withdrawn |= {i for i, handle in order[500:] if handle.cancel()}
        await stream.sync()
        assert await first
        assert withdrawn >= {i for i, _ in order[:500]}
        assert ran == set(range(2000)) - withdrawn
        assert all(handle.cancelled() == (i in withdrawn) for i, handle in enumerate(handles))
        for i, handle in enumerate(handles):
            if i not in withdrawn:
                assert handle.result() is None


async def test_h4_many_awaiters_and_callbacks(bench: Any) -> None:
    operation = await bench.issue()
    called: list[object] = []
    for _ in range(3):
        operation.handle.add_done_callback(called.append)
    awaiters = [asyncio.create_task(_value(operation.handle)) for _ in range(5)]
    await asyncio.sleep(0)
    operation.finish("x")
    assert await asyncio.gather(*awaiters) == ["x"] * 5
    await asyncio.sleep(0)
    assert called == [operation.handle] * 3
    assert await operation.handle == "x"


async def test_h4_a_callback_after_completion_is_called_soon_on_the_loop(bench: Any, until: Any) -> None:
    handle = await bench.ended()
    seen: list[int] = []
    handle.add_done_callback(lambda h: seen.append(threading.get_ident()))
    assert not seen
    await until(lambda: seen)
    assert seen == [threading.get_ident()]


async def test_h4_callbacks_run_in_their_context(bench: Any) -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="default")
    operation = await bench.issue()
    seen: list[str] = []
    other = contextvars.copy_context()
    other.run(variable.set, "given")
    variable.set("here")
    operation.handle.add_done_callback(lambda h: seen.append(variable.get()))
    operation.handle.add_done_callback(lambda h: seen.append(variable.get()), context=other)
    variable.set("later")
    operation.finish()
    await operation.handle
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert seen == ["here", "given"]


async def test_h4_a_removed_callback_is_not_called(bench: Any) -> None:
    operation = await bench.issue()
    seen: list[object] = []
    for _ in range(2):
        operation.handle.add_done_callback(seen.append)
    operation.handle.add_done_callback(kept := (lambda h: seen.append("kept")))
    assert operation.handle.remove_done_callback(seen.append) == 2
    assert operation.handle.remove_done_callback(seen.append) == 0
    operation.finish()
    await operation.handle
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert seen == ["kept"]
    assert operation.handle.remove_done_callback(kept) == 0


async def test_h4_awaiting_a_finished_handle_does_not_suspend(bench: Any) -> None:
    handle = await bench.ended("x")
    Progress.current().last_ran = float("inf")  # no time has gone by
    with pytest.raises(StopIteration) as stop:
        next(handle.__await__())
    assert stop.value.value == "x"


async def test_h4_settled_from_a_thread_while_awaiters_come(transport: Any) -> None:
    """No wake-up is lost between the thread that settles and the loop that begins to wait."""
    progress = Progress.current()
    for _ in range(300):
        operation: Operation[int] = Operation(progress, "raced", polled=False)
        handle = operation.handle
        thread = threading.Thread(target=operation.resolve, args=(1,))
        thread.start()
        assert await asyncio.wait_for(asyncio.gather(*[_value(handle) for _ in range(2)]), 10) == [1, 1]
        thread.join()


async def test_h4_from_source_asks_until_it_is_over() -> None:
    class Source:
        polls = 0

        def poll(self) -> bool:
            self.polls += 1
            return self.polls > 3

        def result(self) -> str:
            return "there"

    sources = [Source() for _ in range(10)]
    handles = [from_source(source, "copy") for source in sources]
    assert await asyncio.wait_for(asyncio.gather(*map(_value, handles)), 10) == ["there"] * 10
    assert {source.polls for source in sources} == {4}
    assert not Progress.current().pending()


async def _value(handle: Handle[Any]) -> Any:
    return await handle
