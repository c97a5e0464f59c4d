"""H5: handles work in all that asyncio and anyio have."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import anyio.lowlevel
import pytest

import aiodist.handles
from aiodist.handles import Progress, internals

pytestmark = pytest.mark.timeout(30)


async def _three(bench: Any) -> list[Any]:
    return [await bench.issue() for _ in range(3)]


def _finish(operations: list[Any]) -> None:
    for i, operation in enumerate(operations):
        operation.finish(i)


async def test_h5_gather(bench: Any) -> None:
    operations = await _three(bench)
    together = asyncio.gather(*[o.handle for o in operations])
    await asyncio.sleep(0)
    _finish(operations)
    assert await together == [0, 1, 2]


async def test_h5_wait_takes_handles_and_tasks(bench: Any) -> None:
    operations = await _three(bench)
    handles = {o.handle for o in operations}
    done, pending = await asyncio.wait(handles, timeout=0.01)
    assert (done, pending) == (set(), handles)
    operations[1].finish()
    done, pending = await asyncio.wait(handles, return_when=asyncio.FIRST_COMPLETED)
    assert done == {operations[1].handle}
    operations[0].fail(ValueError("no"))
    done, pending = await asyncio.wait(handles - done, return_when=asyncio.FIRST_EXCEPTION)
    assert done == {operations[0].handle}
    operations[2].finish()
    done, pending = await asyncio.wait([asyncio.ensure_future(o.handle) for o in operations[1:]])
    assert (len(done), pending) == (2, set())


async def test_h5_wait_for(bench: Any) -> None:
    operation = await bench.issue()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(operation.handle, 0.01)
    operation.finish("x")
    assert await asyncio.wait_for(operation.handle, 10) == "x"


async def test_h5_shield(bench: Any) -> None:
    operation = await bench.issue()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(operation.handle), 0.01)
    operation.finish("x")
    assert await asyncio.shield(operation.handle) == "x"


async def test_h5_as_completed(bench: Any) -> None:
    operations = await _three(bench)
    seen: list[object] = []
    operations[2].finish("c")
    for next_one in asyncio.as_completed([o.handle for o in operations]):
        seen.append(await next_one)
        if len(seen) < 3:
            operations[len(seen) - 1].finish("ab"[len(seen) - 1])
    assert seen == ["c", "a", "b"]


async def test_h5_timeout(bench: Any) -> None:
    operation = await bench.issue()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await operation.handle
    operation.finish()
    async with asyncio.timeout(10):
        await operation.handle


async def test_h5_task_group(bench: Any) -> None:
    operations = await _three(bench)

    async def value(operation: Any) -> Any:
        return await operation.handle

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(value(o)) for o in operations]
        group.create_task(asyncio.to_thread(_finish, operations))
    assert [task.result() for task in tasks] == [0, 1, 2]


async def test_h5_a_failing_handle_ends_its_task_group(bench: Any) -> None:
    operations = await _three(bench)

    async def value(operation: Any) -> Any:
        return await operation.handle

    with pytest.raises(ExceptionGroup) as caught:  # noqa: PT012  - the test needs the group
        async with asyncio.TaskGroup() as group:
            for operation in operations:
                group.create_task(value(operation))
            await asyncio.sleep(0)
            operations[0].fail(ValueError("no"))
    assert [str(e) for e in caught.value.exceptions] == ["no"]
    assert [o.handle.done() for o in operations] == [True, False, False]
    _finish(operations[1:])
    await asyncio.gather(*[o.handle for o in operations[1:]])


async def test_h5_anyio_cancel_scopes(bench: Any) -> None:
    operation = await bench.issue()
    with anyio.move_on_after(0.01) as scope:
        await operation.handle
    assert scope.cancelled_caught
    with pytest.raises(TimeoutError):
        with anyio.fail_after(0.01):
            await operation.handle
    operation.finish("x")
    with anyio.fail_after(10):
        assert await operation.handle == "x"


async def test_h5_anyio_task_group(bench: Any) -> None:
    operations = await _three(bench)
    seen: dict[int, object] = {}

    async def value(i: int) -> None:
        seen[i] = await operations[i].handle

    async with anyio.create_task_group() as group:
        for i in range(3):
            group.start_soon(value, i)
        await anyio.lowlevel.checkpoint()
        _finish(operations)
    assert seen == {0: 0, 1: 1, 2: 2}


async def test_h5_anyio_cancelled_task_group(bench: Any) -> None:
    operations = await _three(bench)

    async def value(i: int) -> None:
        await operations[i].handle

    async with anyio.create_task_group() as group:
        for i in range(3):
            group.start_soon(value, i)
        await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()
    assert not any(o.handle.done() for o in operations)
    _finish(operations)
    assert [await o.handle for o in operations] == [0, 1, 2]


async def test_h5_our_gather(bench: Any) -> None:
    operations = await _three(bench)
    together = aiodist.handles.gather(*[o.handle for o in operations])
    assert not together.done()
    nested = aiodist.handles.gather(together, operations[0].handle)
    _finish(operations)
    assert await together == [0, 1, 2]
    assert await nested == [[0, 1, 2], 0]
    assert await aiodist.handles.gather() == []
    assert await aiodist.handles.gather(*[o.handle for o in operations]) == [0, 1, 2]


async def test_h5_our_gather_with_an_error(bench: Any) -> None:
    operations = await _three(bench)
    handles = [o.handle for o in operations]
    first = aiodist.handles.gather(*handles)
    every = aiodist.handles.gather(*handles, return_exceptions=True)
    operations[1].fail(error := ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        await first
    assert not every.done()
    operations[0].finish("a")
    operations[2].finish("c")
    assert await every == ["a", error, "c"]


async def test_h5_our_gather_takes_handles_of_this_loop_only(transport: Any) -> None:
    with pytest.raises(TypeError, match=r"got Future: use asyncio\.gather"):
        aiodist.handles.gather(asyncio.get_running_loop().create_future())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"got list: write gather\(\*handles\)"):
        aiodist.handles.gather([])  # type: ignore[arg-type]

    async def elsewhere() -> Any:
        return type(transport)().issue(go=False)

    request = await asyncio.to_thread(lambda: asyncio.run(elsewhere()))
    foreign = request.handle
    with pytest.raises(RuntimeError, match="another event loop"):
        aiodist.handles.gather(foreign)
    with pytest.raises(RuntimeError, match="another event loop"):
        await anext(aiodist.handles.as_completed([foreign]))
    with pytest.raises(TypeError, match=r"got Future: use asyncio\.as_completed"):
        await anext(aiodist.handles.as_completed([asyncio.get_running_loop().create_future()]))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="another event loop"):
        await foreign
    request.go = True  # else the progress thread would poll for it until the process ends


async def test_h5_our_gather_of_a_thousand_costs_one_waiter(transport: Any) -> None:
    requests = [transport.issue(go=False) for _ in range(1000)]
    together = aiodist.handles.gather(*[r.handle for r in requests])
    before = len(asyncio.all_tasks())
    waiting = asyncio.ensure_future(asyncio.wait_for(together, 20))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) <= before + 2
    for request in requests:
        request.outcome, request.go = request.handle.seq, True
    assert await waiting == [0] * 1000


async def test_h5_our_as_completed(bench: Any) -> None:
    operations = await _three(bench)
    order = [2, 0, 1]
    operations[order[0]].finish(order[0])
    seen: list[object] = []
    async for handle in aiodist.handles.as_completed([o.handle for o in operations]):
        seen.append(handle.result())
        if len(seen) < 3:
            operations[order[len(seen)]].finish(order[len(seen)])
    assert seen == order


async def test_h5_what_was_over_before_our_as_completed_counts_as_awaited(bench: Any, until: Any) -> None:
    operations = await _three(bench)
    _finish(operations)
    await until(lambda: all(o.handle.done() for o in operations))  # an await would not show it
    seen = [handle async for handle in aiodist.handles.as_completed([o.handle for o in operations])]
    assert len(seen) == 3
    assert all(internals.is_retrieved(handle) for handle in seen)


async def test_h5_leaving_our_as_completed_early_forgets_its_waiters(bench: Any) -> None:
    operations = await _three(bench)
    operations[0].finish()
    iterator = aiodist.handles.as_completed([o.handle for o in operations])
    async for _ in iterator:
        break
    await iterator.aclose()
    assert not internals.is_awaited(operations[1].handle)
    _finish(operations[1:])
    await aiodist.handles.gather(*[o.handle for o in operations[1:]])


async def test_h5_from_a_loop_callback(bench: Any) -> None:
    """Neither the call nor the callback at the end needs a task."""
    operation = await bench.issue()
    called = asyncio.Event()
    asyncio.get_running_loop().call_soon(lambda: operation.handle.add_done_callback(lambda h: called.set()))
    operation.finish()
    await asyncio.wait_for(called.wait(), 10)
    assert Progress.current().owns_thread()
