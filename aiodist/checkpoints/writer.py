"""The background work of a communicator's checkpoints: order, thread, memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from queue import Empty
from typing import Any, TypeVar

import torch
from torch import Tensor

from aiodist.backends.base import again
from aiodist.checkpoints.folders import pages
from aiodist.checkpoints.values import Json
from aiodist.communicator import Communicator, parts_of
from aiodist.errors import CommunicatorAborted, DeadlockError
from aiodist.handles import Handle, Operation, Origin, Progress, internals
from aiodist.streams import HostStream
from aiodist.threads import JobQueue
from aiodist.world.agree import agree

T = TypeVar("T")


async def together(coll: Communicator, what: str, work: Awaitable[object], *, same: Json = None) -> list[Any]:
    """Return the result of `work` on each rank, by rank. The result has JSON's types; errors are those of `agree`."""
    result, failed = None, None
    try:
        result = await work
    except Exception as error:  # noqa: BLE001  - all ranks learn of it
        failed = error
    return await agree(coll, what, result, same=same, error=failed)


_LOOK_SECONDS = 0.5


class Writer:
    """The saves and loads of one communicator on this rank, from the first one to the end of the communicator.

    It owns a duplicate of the communicator, a thread for files, and the memory for copies of shares.
    """

    def __init__(self, coll: Communicator, op: str) -> None:
        """`op` is the name of the user's call."""
        self.parent = coll
        self.progress = Progress.current()
        self.buffers = BufferPool(self.progress)
        self.coll: Communicator
        self.stream: HostStream
        registry, name = parts_of(coll).registry, parts_of(coll).registry.next_name(coll, "dup")
        agreed = coll.barrier()
        parts_of(coll).dispatcher.oplog.calls[internals.issued_at(agreed)] = op
        self._made: Handle[None] = registry.later(coll, "dup", agreed, lambda _: self._open(name))
        self._tasks: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()
        self._seq = 0

    @classmethod
    def of(cls, coll: Communicator, op: str) -> Writer:
        """Return the writer of `coll`. The first use, by `op`, is collective. Raises as a call of `coll`."""
        parts_of(coll).dispatcher.check_on_loop(f"{op}()")
        known: dict[Communicator, Writer] = Progress.current().belongings.setdefault(cls, {})
        if coll not in known:
            known[coll] = cls(coll, op)
        return known[coll]

    def later(self, op: str, job: Callable[[], Awaitable[T]]) -> Handle[T]:
        """Return the handle of `job`, which begins after all jobs requested before."""
        account = parts_of(self.parent).dispatcher.account
        origin = Origin.here(3)
        operation: Operation[T] = Operation(self.progress, op, self._seq, origin=origin, account=account, polled=False)
        self._seq += 1
        task = asyncio.get_running_loop().create_task(self._do(job, operation), name=f"{self.parent.name}: {op}")
        self._tasks.add(task)
        self.progress.carry_out(operation.handle, task)
        task.add_done_callback(self._tasks.discard)
        return operation.handle

    async def _do(self, job: Callable[[], Awaitable[T]], operation: Operation[T]) -> None:
        handle = operation.handle
        try:
            async with self._turn:  # in the order of the calls
                await self._made
                parts_of(self.coll).dispatcher.oplog.name_caller(internals.issued_at(handle), handle.op)
                result = await job()
        except asyncio.CancelledError:
            why = f"communicator {self.parent.name!r} was aborted while a checkpoint was in flight"
            refusal = parts_of(self.parent).dispatcher.lifetime.refusal
            if isinstance(refusal, DeadlockError):
                operation.reject(again(refusal))
            else:
                operation.reject(CommunicatorAborted(why, comm=self.parent.name, rank=self.parent.rank, op=handle.op))
        except BaseException as error:  # noqa: BLE001  - it belongs to the task that awaits the handle
            operation.reject(error)
        else:
            operation.resolve(result)

    async def _open(self, name: str) -> None:
        """Make the duplicate, whose close waits for this writer from then on."""
        everybody = tuple(range(self.parent.size))
        self.coll = await parts_of(self.parent).registry.join(self.parent, name, everybody, shared=False)
        self.stream = await HostStream(f"files {self.coll.name}").__aenter__()
        parts_of(self.coll).registry.members.admit(self.coll, self)

    async def close(self) -> None:
        self._forgotten()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self.stream.aclose()

    def abort(self) -> None:
        """Abort the jobs in flight; no checkpoint results from them."""
        self._forgotten()
        self.buffers.given_up = True
        for task in self._tasks:
            task.cancel()
        self.stream.abort()

    def _forgotten(self) -> None:
        self.progress.belongings[Writer].pop(self.parent, None)

    def __repr__(self) -> str:
        return f"<Writer of {self.parent!r}, {len(self._tasks)} under way>"


class BufferPool:
    """Memory for copies of shares: one buffer, which a save borrows until its file is written."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._free: JobQueue[Tensor] = JobQueue()
        self._free.put(torch.empty(0, dtype=torch.uint8, device="cpu"))
        self.given_up = False
        """True after an abort, which ends waits for memory."""

    def borrow(self, nbytes: int) -> Tensor:
        """Return `nbytes` of memory after the save before is written (any thread but the loop's)."""
        while True:
            with suppress(Empty):
                return self._sized(self._free.get(_LOOK_SECONDS), nbytes)
            if self._progress.loop.is_closed() or self.given_up:
                raise RuntimeError("the save before was aborted")

    def borrow_nowait(self, nbytes: int) -> Tensor:
        """Return `nbytes` of memory, which is new until the save before is written."""
        try:
            return self._sized(self._free.get_nowait(), nbytes)
        except Empty:
            return pages(nbytes)

    @staticmethod
    def _sized(buffer: Tensor, nbytes: int) -> Tensor:
        fits = nbytes <= buffer.numel() <= 2 * nbytes
        return buffer if fits else pages(nbytes)

    def release(self, buffer: Tensor) -> None:
        if self._free.empty():
            self._free.put(buffer)
