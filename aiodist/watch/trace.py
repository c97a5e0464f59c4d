"""`trace`: what all ranks do in a block, on one clock, as a file for Perfetto."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import lru_cache, partial
from pathlib import Path
from time import perf_counter
from types import CodeType
from typing import Any

from aiodist.communicator import Communicator
from aiodist.communicator.dispatcher import Dispatcher
from aiodist.communicator.names import Named
from aiodist.communicator.watchdog import Peer
from aiodist.handles import Handle, Origin
from aiodist.handles.tracing import Ended, rank_of_task
from aiodist.watch.clock import Clock
from aiodist.watch.merging import merge, prepare
from aiodist.watch.recorder import Recorder


@asynccontextmanager
async def trace(coll: Communicator, folder: str | os.PathLike[str]) -> AsyncIterator[None]:
    """Record what all ranks do in this block: `async with aiodist.trace(coll, "trace"):` writes trace/trace.json.

    https://ui.perfetto.dev and chrome://tracing open the file. It has, of every rank and on the first rank's clock,
    each operation with its bytes, its implementation, its line and how long it waited for which rank, awaits that had
    to wait, forward, backward, optimizer and the reduction of each bucket, what prefetch reads, copies to and from
    devices, calls of a parameter server, the work of host streams, and the blocks of `aiodist.span`. `otherData` in it
    says how far the clocks may be apart.

    Collective over `coll`, mostly the world; all ranks see the `folder`, which is made anew. When the block raises, the
    files of the ranks stay there: `aiodist trace FOLDER` makes one of them. Raises `ConfigError` where it cannot be
    written, RuntimeError inside another trace. Cost: 2 to 5 us an operation.
    """
    recording = Recording(coll, Path(folder), own=True)
    try:
        await recording.begin()
        yield
        await recording.finish()
    finally:
        recording.close()


class Recording:
    """One rank's part in a trace."""

    def __init__(self, coll: Communicator, folder: Path, *, own: bool) -> None:
        """It makes the folder anew, and merges the files, where that is its `own`; else the launcher does."""
        self._coll = coll
        self._folder = folder
        self._own = own
        self._registry = coll.parts.registry
        self._channel = self._registry.channel
        self._recorder: Recorder | None = None
        self._clock: Clock | None = None

    async def begin(self) -> None:
        """Record from now on; collective. Raises what `trace` does."""
        coll, rank = self._coll, self._channel.rank
        Recorder.check_free(rank)
        if self._own:
            if coll.rank == 0:
                await asyncio.to_thread(prepare, self._folder)
            await coll.barrier()
        self._clock = Clock(self._channel, f"clock of a trace of {coll.name}", coll.parts.dispatcher.ranks)
        self._recorder = Recorder.join(self._folder, rank, self._channel.size)
        rank_of_task.set(rank)
        await self._synchronise()
        self._registry.on_open.append(self._observe)
        for each in self._registry.dispatchers:
            self._observe(each)

    async def _synchronise(self) -> None:
        if self._coll.rank == 0 and self._clock is not None and self._recorder is not None:
            self._recorder.synchronise(await self._clock.measure())

    async def finish(self) -> None:
        """Record no more, and see that the file of all ranks is there; collective."""
        await self._synchronise()
        await self._coll.barrier()  # until then the clocks of all are looked at
        self.close()
        if self._own:
            await self._coll.barrier()  # all have written theirs
            if self._coll.rank == 0:
                merged = await asyncio.to_thread(merge, self._folder)
                if merged is not None and len(merged.ranks) < self._coll.size:
                    logging.getLogger("aiodist").warning("%s", merged)

    def close(self) -> None:
        """Record no more; the file of this rank is complete."""
        if self._observe in self._registry.on_open:
            self._registry.on_open.remove(self._observe)
            for each in self._registry.dispatchers:
                each.observe(None)
        if self._recorder is not None:
            rank_of_task.set(None)
            self._recorder.leave(self._channel.rank)
            self._recorder = None
        if self._clock is not None:
            self._clock.close()

    def _observe(self, dispatcher: Dispatcher) -> None:
        if self._recorder is not None:
            dispatcher.observe(_Operations(self._recorder, self._channel.rank, dispatcher))


class _Operations:
    """Records those of one communicator."""

    def __init__(self, recorder: Recorder, rank: int, dispatcher: Dispatcher) -> None:
        self._recorder = recorder
        self._rank = rank
        self._dispatcher = dispatcher

    def issued(self, handle: Handle[Any], meets: Peer | Named | None = None, /) -> Ended:
        """See `OperationObserver`."""
        return partial(self._over, perf_counter(), meets)

    def _over(self, began: float, meets: Peer | Named | None, handle: Handle[Any], way: str = "") -> None:
        comm = self._dispatcher.name
        details: dict[str, Any] = {"comm": comm, "bytes": handle.nbytes, "at": _line(*handle.raw_origin)}
        if isinstance(meets, Peer):
            details["peer"] = str(meets)
        elif isinstance(meets, Named):
            details |= {"called": meets.name, "seq": handle.seq, "implementation": meets.traffic.way}
        else:
            details |= {"seq": handle.seq, "implementation": way or self._dispatcher.way_of(handle)}
        self._recorder.span(handle.op, began, track=comm, of_rank=self._rank, **details)


@lru_cache(4096)
def _line(code: CodeType, instruction: int) -> str:
    return str(Origin(code, instruction))
