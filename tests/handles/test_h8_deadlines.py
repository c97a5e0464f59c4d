"""H8: deadlines, and errors that say what was waited for."""

from __future__ import annotations

import asyncio
import gc
import math
import time
from typing import Any, cast

import numpy as np
import pytest

import aiodist.handles
from aiodist.errors import OperationTimeout
from aiodist.handles import Handle, Operation, Progress

pytestmark = pytest.mark.timeout(30)
LATE = {1: "at train.py:7", 3: "at train.py:9"}


async def test_h8_a_deadline_is_raised_by_the_await_and_the_operation_goes_on(bench: Any) -> None:
    operation = await bench.issue()
    Operation.of(operation.handle).set_deadline(0.01, lambda: LATE)
    with pytest.raises(OperationTimeout, match=r"continues; late: rank 1 \(at train.py:7\), rank 3") as caught:
        await operation.handle
    assert caught.value.late == LATE
    assert caught.value.op == operation.handle.op
    operation.finish("x")
    assert await operation.handle == "x"


async def test_h8_every_awaiter_is_told(bench: Any) -> None:
    operation = await bench.issue()
    Operation.of(operation.handle).set_deadline(0.01)
    tasks = [asyncio.ensure_future(operation.handle) for _ in range(3)]
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(o) for o in outcomes] == [OperationTimeout] * 3
    operation.finish()
    await operation.handle


async def test_h8_a_deadline_that_passed_unseen_is_told_to_the_next(bench: Any, until: Any) -> None:
    for wait in (lambda h: h, aiodist.handles.gather, _first):
        operation = await bench.issue()
        Operation.of(operation.handle).set_deadline(0.0)
        await until(lambda: not Progress.current().timers)
        with pytest.raises(OperationTimeout):
            await asyncio.wait_for(wait(operation.handle), 10)
        operation.finish("x")
        assert await operation.handle == "x"


async def _first(handle: Handle[Any]) -> None:
    async for _ in aiodist.handles.as_completed([handle]):
        pass


async def test_h8_deadlines_of_members_reach_the_gather(bench: Any) -> None:
    fast, slow = await bench.issue(), await bench.issue()
    Operation.of(slow.handle).set_deadline(0.02)
    first = aiodist.handles.gather(fast.handle, slow.handle)
    every = aiodist.handles.gather(fast.handle, slow.handle, return_exceptions=True)
    fast.finish("x")
    with pytest.raises(OperationTimeout):
        await first
    value, error = await every
    assert value == "x"
    assert isinstance(error, OperationTimeout)
    slow.finish()
    await slow.handle


async def test_h8_done_in_time_raises_nothing(bench: Any) -> None:
    operation = await bench.issue()
    Operation.of(operation.handle).set_deadline(10.0)
    operation.finish("x")
    assert await operation.handle == "x"


async def test_h8_what_is_no_time_is_a_mistake(transport: Any) -> None:
    handle: Handle[None] = Handle(transport.progress, "allreduce")
    for given in (-1, math.nan):
        with pytest.raises(ValueError, match=f"timeout={given}: expected seconds"):
            Operation.of(handle).set_deadline(given)
    for wrong in ("3", True, [1]):
        with pytest.raises(TypeError, match=rf"timeout is {type(wrong).__name__}: expected seconds"):
            Operation.of(handle).set_deadline(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="timeout=nan: expected seconds"):
        aiodist.handles.timeout(math.nan)
    with pytest.raises(TypeError, match="timeout is str"):
        aiodist.handles.timeout("3")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="timeout=nan: expected seconds"):
        await asyncio.to_thread(handle.wait, math.nan)
    later: Handle[None] = Handle(transport.progress, "allreduce")
    Operation.of(later).set_deadline(0.01)
    with pytest.raises(OperationTimeout):
        await asyncio.wait_for(later, 10)


async def test_h8_deadlines_are_told_in_order_and_of_all(transport: Any) -> None:
    requests = [transport.issue(go=False) for _ in range(100)]
    for i, request in enumerate(requests):
        Operation.of(request.handle).set_deadline(0.001 * ((i * 37) % 50))
    waits = [asyncio.wait_for(r.handle, 10) for r in requests]
    outcomes = await asyncio.gather(*waits, return_exceptions=True)
    assert {type(o) for o in outcomes} == {OperationTimeout}
    for request in requests:
        request.go = True
    await aiodist.handles.gather(*[r.handle for r in requests])


async def test_h8_long_deadlines_of_what_is_over_cost_no_memory(transport: Any) -> None:
    progress = Progress.current()
    for _ in range(5000):
        handle: Handle[None] = Handle(progress, "allreduce")
        Operation.of(handle).set_deadline(3600.0)
        Operation.of(handle).resolve(None)
        handle.result()
    assert len(progress.timers) <= 64
    held = [transport.issue(go=False) for _ in range(200)]
    for request in held:
        Operation.of(request.handle).set_deadline(3600.0)
    assert len(progress.timers) <= 2 * 264
    for request in held:
        request.go = True
    await aiodist.handles.gather(*[r.handle for r in held])
    gc.collect()


async def test_h8_timeout_names_what_is_pending_and_who_is_late(bench: Any) -> None:
    first, second = await bench.issue(), await bench.issue()
    Operation.of(second.handle).set_deadline(100, lambda: LATE)
    with pytest.raises(OperationTimeout) as caught:
        async with aiodist.handles.timeout(0.5):
            await asyncio.gather(first.handle, second.handle)
    assert caught.value.late == LATE
    assert str(caught.value).startswith("not done within 0.5 s; pending: ")
    assert str(first.handle) in str(caught.value)
    assert str(second.handle) in str(caught.value)
    assert "late: rank 1 (at train.py:7)" in str(caught.value)
    for operation in (first, second):
        operation.finish()
        await operation.handle


async def test_h8_timeout_names_the_members_of_a_gather(bench: Any) -> None:
    first, second = await bench.issue(), await bench.issue()
    Operation.of(second.handle).set_deadline(100, lambda: LATE)
    Operation.of(first.handle).set_name("first")
    Operation.of(second.handle).set_name("second")
    first.finish()
    await first.handle
    with pytest.raises(OperationTimeout) as caught:
        async with aiodist.handles.timeout(0.5):
            await aiodist.handles.gather(first.handle, second.handle)
    assert str(second.handle) in str(caught.value)
    assert str(first.handle) not in str(caught.value)
    assert caught.value.late == LATE
    second.finish()
    await second.handle


async def test_h8_an_outer_timeout_knows_what_an_inner_block_waited_for(bench: Any) -> None:
    operation = await bench.issue()
    with pytest.raises(OperationTimeout, match=r"within 0.01 s; pending: .* issued at"):
        async with aiodist.handles.timeout(0.01), aiodist.handles.timeout(20):
            await operation.handle
    operation.finish()
    await operation.handle


async def test_h8_timeout_does_not_name_what_is_over(bench: Any) -> None:
    operation = await bench.issue()
    with pytest.raises(OperationTimeout, match="pending: no operation"):  # noqa: PT012  - the test needs the block
        async with aiodist.handles.timeout(0.5):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(operation.handle, 0.001)
            operation.finish()
            await operation.handle
            await asyncio.Event().wait()


async def test_h8_timeout_around_tasks(bench: Any) -> None:
    operation = await bench.issue()

    async def value() -> None:
        await operation.handle

    with pytest.raises(OperationTimeout) as caught:
        async with aiodist.handles.timeout(0.01), asyncio.TaskGroup() as group:
            group.create_task(value())
    assert str(operation.handle) in str(caught.value)
    operation.finish()
    await operation.handle


async def test_h8_timeout_lets_other_errors_and_cancellation_pass(bench: Any) -> None:
    with pytest.raises(ValueError, match="mine"):
        async with aiodist.handles.timeout(10):
            raise ValueError("mine")
    operation = await bench.issue()

    async def guarded() -> None:
        async with aiodist.handles.timeout(10):
            await operation.handle

    task = asyncio.create_task(guarded())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with aiodist.handles.timeout(None):
        operation.finish()
        await operation.handle


async def test_h8_asyncio_timeout_finds_a_note_on_its_cause(bench: Any) -> None:
    operation = await bench.issue()
    with pytest.raises(TimeoutError) as caught:
        async with asyncio.timeout(0.01):
            await operation.handle
    assert type(caught.value) is TimeoutError
    assert isinstance(caught.value.__cause__, asyncio.CancelledError)
    assert caught.value.__cause__.__notes__ == [f"while awaiting {operation.handle}, which continues"]
    operation.finish()
    await operation.handle


async def test_h8_a_deadline_in_a_waiting_thread(bench: Any) -> None:
    operation = await bench.issue()
    Operation.of(operation.handle).set_deadline(0.02)
    with pytest.raises(OperationTimeout, match="continues"):
        await asyncio.to_thread(operation.handle.wait)
    operation.finish("x")
    assert await asyncio.to_thread(operation.handle.wait) == "x"


async def test_h8_a_number_of_numpy_is_as_long_as_it_says(bench: Any) -> None:
    """In its own precision it would end before the clock's next number that it knows, or long behind."""
    operation = await bench.issue()
    began = time.monotonic()
    Operation.of(operation.handle).set_deadline(np.float16(0.0625))  # type: ignore[arg-type]
    with pytest.raises(OperationTimeout):
        await operation.handle
    with pytest.raises(OperationTimeout):
        async with aiodist.handles.timeout(cast(float, np.float16(0.0625))):
            await operation.handle
    assert 0.11 <= time.monotonic() - began < 5  # a promise of seconds: H8
    operation.finish()
    await operation.handle
