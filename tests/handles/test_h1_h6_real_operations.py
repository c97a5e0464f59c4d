"""H1 to H6 with operations of MPI, Gloo and shared memory: rank 1 answers the operations of rank 0 on command."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import aiodist
from aiodist import Communicator, Handle
from aiodist.handles import Operation, internals
from tests.support.blocking import blocked_until
from tests.support.giving_up import cancelled_task, gathered, task_group, wait_for

pytestmark = pytest.mark.drawn(3)

GO = 1000
LARGE = 1 << 19
PAYLOAD = bytes(range(256)) * 4096
Issued = tuple[Handle[Any], Callable[[Any], bool]]
"""A handle, and whether a result of it is right."""


# --- kinds of operations: the call of rank 0, and the answer of rank 1 ------------------------------------------------


def is_full(t: Tensor, value: float) -> bool:
    return bool((t == value).all())


class Allreduce:
    numel = 3

    def issue(self, coll: Communicator, i: int) -> Issued:
        t = torch.full((self.numel,), i + 1.0)
        return coll.allreduce(t), lambda seen: seen is t and is_full(t, i + 11.0)

    def answer(self, coll: Communicator, i: int) -> Awaitable[Any]:
        return coll.allreduce(torch.full((self.numel,), 10.0))


class LargeAllreduce(Allreduce):
    numel = LARGE


class Receive:
    numel = 3

    def issue(self, coll: Communicator, i: int) -> Issued:
        t = torch.zeros(self.numel)
        return coll.recv(t, 1, tag=i), lambda seen: seen is t and is_full(t, i + 5.0)

    def answer(self, coll: Communicator, i: int) -> Awaitable[Any]:
        return coll.send(torch.full((self.numel,), i + 5.0), 0, tag=i)


class LargeReceive(Receive):
    numel = LARGE


class ReceiveObject:
    def issue(self, coll: Communicator, i: int) -> Issued:
        return coll.recv_object(1, tag=i), lambda seen: bool(seen == {"i": i, "payload": PAYLOAD})

    def answer(self, coll: Communicator, i: int) -> Awaitable[Any]:
        return coll.send_object({"i": i, "payload": PAYLOAD}, 0, tag=i)


class AllgatherObject:
    def issue(self, coll: Communicator, i: int) -> Issued:
        return coll.allgather_object(("asked", i)), lambda seen: bool(seen == [("asked", i), ("answered", i)])

    def answer(self, coll: Communicator, i: int) -> Awaitable[Any]:
        return coll.allgather_object(("answered", i))


class Request:
    """The user's own, of mpi4py."""

    def issue(self, coll: Communicator, i: int) -> Issued:
        from mpi4py import MPI

        t = torch.zeros(LARGE)
        request = MPI.COMM_WORLD.Irecv(t.numpy(), 1, tag=i)
        return aiodist.as_handle(request), lambda seen: seen is None and is_full(t, i + 5.0)

    def answer(self, coll: Communicator, i: int) -> Awaitable[Any]:
        from mpi4py import MPI

        return aiodist.as_handle(MPI.COMM_WORLD.Isend(torch.full((LARGE,), i + 5.0).numpy(), 0, tag=i))


UNPICKLED = (ReceiveObject, AllgatherObject)
"""On the loop's thread, since it runs what others chose: such a handle is done when the loop has had a turn."""


class Asking:
    """Operations of rank 0; each is pending until `finish` was called as often."""

    def __init__(self, coll: Communicator, kind: Any) -> None:
        self._coll = coll
        self._kind = kind
        self.right: list[Callable[[Any], bool]] = []

    def issue(self) -> Handle[Any]:
        handle, right = self._kind.issue(self._coll, len(self.right))
        self.right.append(right)
        return handle  # type: ignore[no-any-return]

    async def finish(self, count: int = 1) -> None:
        """Let rank 1 do its part of `count` more operations, in the order of issue."""
        for _ in range(count):
            await self._coll.send(torch.zeros(1), 1, tag=GO)

    async def over(self, handle: Handle[Any]) -> None:
        """Return when the handle is done, without an await of the handle."""
        async with asyncio.timeout(20):
            while not handle.done():  # noqa: ASYNC110  - what is waited for sets no event
                await asyncio.sleep(0)


async def play(coll: Communicator, kind: Any, count: int, ask: Callable[[Asking], Awaitable[None]]) -> None:
    """Let rank 0 issue and finish `count` operations, and rank 1 answer them."""
    if kind is Request and coll.backend != "mpi":
        pytest.skip("requests are MPI's")
    if coll.rank == 0:
        asking = Asking(coll, kind())
        await ask(asking)
        assert len(asking.right) == count
    else:
        answers = []
        for i in range(count):
            await coll.recv(torch.zeros(1), 0, tag=GO)
            answers.append(kind().answer(coll, i))
        for answer in answers:
            await answer
    await coll.barrier()


def real(test: Any) -> Any:
    """Mark a test as one of two real ranks over each library, with each kind of operation."""
    kinds = [Allreduce, LargeAllreduce, Receive, LargeReceive, ReceiveObject, AllgatherObject, Request]
    test = pytest.mark.parametrize("kind", kinds)(test)
    return pytest.mark.ranks(2, backend=("openmpi", "gloo", "shm"))(test)


# --- the contract -----------------------------------------------------------------------------------------------------


@real
async def test_h1_goes_on_though_nobody_awaits_and_the_loop_stands_still(coll: Communicator, kind: Any) -> None:
    async def ask(asking: Asking) -> None:
        handle = asking.issue()
        assert not handle.done()
        await asking.finish()
        if kind in UNPICKLED:
            await asking.over(handle)
        assert blocked_until(handle.done)
        assert asking.right[0](handle.result())

    await play(coll, kind, 1, ask)


@real
async def test_h2_h3_done_means_data_and_it_completes_once(coll: Communicator, kind: Any) -> None:
    async def ask(asking: Asking) -> None:
        handle: Any = asking.issue()
        with pytest.raises(asyncio.InvalidStateError):
            handle.result()
        await asking.finish()
        await asking.over(handle)
        assert asking.right[0](handle.result())
        operation: Operation[Any] = Operation.of(handle)
        settles: list[Callable[[], None]] = [
            lambda: operation.resolve(2),
            lambda: operation.reject(ValueError()),
            operation.cancel,
        ]
        for settle in settles:
            with pytest.raises(asyncio.InvalidStateError, match="done already"):
                settle()
        assert not handle.cancel()
        assert not handle.cancelled()
        assert asking.right[0](await handle)
        assert (await handle) is handle.result()

    await play(coll, kind, 1, ask)


@real
async def test_h4_many_awaiters_and_callbacks(coll: Communicator, kind: Any) -> None:
    async def ask(asking: Asking) -> None:
        handle = asking.issue()
        called: list[object] = []
        for _ in range(3):
            handle.add_done_callback(called.append)
        awaiters = [asyncio.create_task(_value(handle)) for _ in range(5)]
        await asyncio.sleep(0)
        assert not handle.done()
        await asking.finish()
        values = await asyncio.wait_for(asyncio.gather(*awaiters), 20)
        assert all(value is values[0] for value in values)
        assert asking.right[0](values[0])
        await asyncio.sleep(0)
        assert called == [handle] * 3

    await play(coll, kind, 1, ask)


@real
async def test_h5_works_in_all_that_asyncio_has(coll: Communicator, kind: Any) -> None:
    async def ask(asking: Asking) -> None:
        def three() -> list[Any]:
            return [asking.issue() for _ in range(3)]

        def check(values: list[Any]) -> None:
            assert all(right(value) for right, value in zip(asking.right[-3:], values, strict=True))

        for gather in (asyncio.gather, aiodist.gather):
            together = gather(*three())
            await asking.finish(3)
            check(await together)

        handles = three()
        assert await asyncio.wait(handles, timeout=0.01) == (set(), set(handles))
        await asking.finish()
        done, pending = await asyncio.wait(handles, timeout=20, return_when=asyncio.FIRST_COMPLETED)
        assert (done, pending) == (set(handles[:1]), set(handles[1:]))
        await asking.finish(2)
        await asyncio.wait(handles, timeout=20)
        check([handle.result() for handle in handles])

        handles = three()
        seen = []
        for expected, completed in zip(handles, asyncio.as_completed(handles, timeout=20), strict=True):
            await asking.finish()
            seen.append(await completed)
            assert expected.done()
        check(seen)

        handles = three()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_value(handle)) for handle in handles]
            group.create_task(asking.finish(3))
        check([task.result() for task in tasks])

        handles = three()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(handles[0]), 0.01)
        await asking.finish(3)
        first = await asyncio.shield(handles[0])
        second = await asyncio.wait_for(handles[1], 20)
        async with asyncio.timeout(20):
            check([first, second, await handles[2]])

    await play(coll, kind, 18, ask)


async def _timeout(handle: Handle[Any]) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.005):
            await handle


@real
async def test_h6_a_cancelled_wait_leaves_the_transfer(coll: Communicator, kind: Any) -> None:
    async def ask(asking: Asking) -> None:
        handle = asking.issue()
        for give_up in (cancelled_task, wait_for, _timeout, gathered, task_group):
            pending = internals.unfinished(handle)
            await give_up(handle)
            assert not handle.done()
            assert not handle.cancelled()
            assert internals.unfinished(handle) == pending != []
        await asking.finish()
        assert asking.right[0](await asyncio.wait_for(handle, 20))

    await play(coll, kind, 1, ask)


@real
async def test_h6_it_completes_after_its_wait_was_cancelled_in_the_middle(coll: Communicator, kind: Any) -> None:
    """The answer is in flight, and no task awaits any more."""

    async def ask(asking: Asking) -> None:
        handles = [asking.issue() for _ in range(5)]
        for handle in handles:
            task = asyncio.ensure_future(_value(handle))
            await asyncio.sleep(0)
            await asking.finish()
            task.cancel()
            await asyncio.wait([task])
        for right, handle in zip(asking.right, handles, strict=True):
            await asking.over(handle)
            assert right(await handle)

    await play(coll, kind, 5, ask)


async def _value(handle: Handle[Any]) -> Any:
    return await handle
