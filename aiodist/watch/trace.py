"""`trace` records all ranks in a block on one clock, as a file for Perfetto.

Each process writes a file. `merging` merges the files. A file has lines of JSON: a dict has facts of a rank, a list is
a batch of spans `[rank, track, name, began, ended, details]`, in seconds of the process's own clock. Writes come
several times a second, so only the last moments of a killed rank are missing.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import threading
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import lru_cache, partial
from pathlib import Path
from time import perf_counter
from types import CodeType
from typing import Any, ClassVar

from aiodist.communicator import Communicator, parts_of
from aiodist.communicator.dispatcher import Dispatcher
from aiodist.communicator.names import Named
from aiodist.communicator.operation import Peer
from aiodist.errors import ConfigError
from aiodist.handles import Handle, Origin, internals
from aiodist.handles.tracing import Ended, rank_of_task, tracing
from aiodist.threads import OwnThread
from aiodist.watch.clock import Clock
from aiodist.watch.merging import merge, prepare

_FLUSH_SECONDS = 0.2
_BATCH = 256  # spans encoded at a time, with the GIL held


@asynccontextmanager
async def trace(coll: Communicator, folder: str | os.PathLike[str]) -> AsyncIterator[None]:
    """Record all ranks in this block: `async with aiodist.trace(coll, "trace"):` writes trace/trace.json.

    https://ui.perfetto.dev and chrome://tracing open the file. The file has the spans of every rank on the first rank's
    clock. Each operation has its bytes, implementation, line and wait for the last rank. Further spans are awaits that
    had to wait, forward, backward, optimizer and the reduction of each bucket, reads of prefetch, copies to and from
    devices, calls of a parameter server, work of host streams, and the blocks of `aiodist.span`. `otherData` has the
    largest error of the clocks.

    Collective over `coll`, usually the world. All ranks need access to `folder`, from which an earlier trace is
    removed. If the block raises, the files of the ranks stay there: `aiodist trace FOLDER` merges the files. Raises
    `ConfigError` if the folder cannot be written, RuntimeError inside another trace. Cost: 2 to 5 us per operation.
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
        """True for `own` prepares the folder and merges the files. If False, the launcher does both."""
        self._coll = coll
        self._folder = folder
        self._own = own
        self._registry = parts_of(coll).registry
        self._channel = self._registry.channel
        self._recorder: Recorder | None = None
        self._clock: Clock | None = None

    async def begin(self) -> None:
        """Start to record. Collective. Raises the errors of `trace`."""
        coll, rank = self._coll, self._channel.rank
        Recorder.check_free(rank)
        if self._own:
            if coll.rank == 0:
                await asyncio.to_thread(prepare, self._folder)
            await coll.barrier()
        self._clock = Clock(self._channel, f"clock of a trace of {coll.name}", parts_of(coll).dispatcher.ranks)
        self._recorder = Recorder.join(self._folder, rank, self._channel.size)
        rank_of_task.set(rank)
        await self._synchronise()
        self._registry.members.on_open.append(self._observe)
        for each in self._registry.members.dispatchers:
            self._observe(each)

    async def _synchronise(self) -> None:
        if self._coll.rank == 0 and self._clock is not None and self._recorder is not None:
            offsets = await self._clock.measure()
            known = {str(rank): offset for rank, offset in offsets.items() if offset.error < 1e9}
            self._recorder.say(offsets=known, at=perf_counter())

    async def finish(self) -> None:
        """Stop recording, then merge the files of all ranks. Collective."""
        await self._synchronise()
        await self._coll.barrier()  # the clocks have been measured
        self.close()
        if self._own:
            await self._coll.barrier()  # all files have been written
            if self._coll.rank == 0:
                merged = await asyncio.to_thread(merge, self._folder)
                if merged is not None and len(merged.ranks) < self._coll.size:
                    logging.getLogger("aiodist").warning("%s", merged)

    def close(self) -> None:
        """Stop recording. The file of this rank is complete."""
        if self._observe in self._registry.members.on_open:
            self._registry.members.on_open.remove(self._observe)
            for each in self._registry.members.dispatchers:
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


class Recorder:
    """Writes the spans of this process, for one rank or for several ranks in tasks."""

    running: ClassVar[Recorder | None] = None

    def __init__(self, folder: Path, rank: int) -> None:
        self._rank = rank
        self._process = os.getpid()
        self._members: set[int] = set()
        self._spans: deque[tuple[Any, ...]] = deque()
        self._ending = threading.Event()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / f"rank-{rank}.jsonl").open("a")
        except OSError as error:
            raise ConfigError(f"a trace cannot be written to {folder}: {error.strerror}") from error
        self._thread = OwnThread("aiodist-trace", self._run)
        self._thread.start()

    @classmethod
    def check_free(cls, rank: int) -> None:
        """Raise RuntimeError if `rank` is recorded already."""
        if cls.running is not None and cls.running._process == os.getpid() and rank in cls.running._members:
            raise RuntimeError(f"rank {rank} is traced already: one trace at a time, of the launcher or of a block")

    @classmethod
    def join(cls, folder: Path, rank: int, size: int) -> Recorder:
        """Return the recorder of this process, with `rank` added. Raise `ConfigError` if the file cannot be opened."""
        cls.check_free(rank)
        recorder = cls.running
        if recorder is None or recorder._process != os.getpid():  # the recorder of a parent process
            recorder = cls.running = tracing.to = cls(folder, rank)
        recorder._members.add(rank)
        recorder.say(rank=rank, size=size, host=socket.gethostname(), process=os.getpid())
        return recorder

    def leave(self, rank: int) -> None:
        """Stop recording `rank`. After the last rank the file is complete."""
        self._members.remove(rank)
        if not self._members:
            Recorder.running = tracing.to = None
            self._ending.set()
            self._thread.join()
            with suppress(OSError):  # the disk is full, which was logged
                self._file.close()

    def span(self, name: str, began: float, /, *, track: str = "", of_rank: int | None = None, **details: Any) -> None:  # noqa: ANN401
        """See `Tracer`."""
        if of_rank is None and (of_rank := rank_of_task.get()) is None:
            of_rank = self._rank
        track = track or threading.current_thread().name
        self._spans.append((of_rank, track, name, began, perf_counter(), details))

    def say(self, **what: Any) -> None:  # noqa: ANN401
        """Write a dict of facts, after the spans recorded before."""
        self._spans.append((what,))

    # --- writing ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._ending.wait(_FLUSH_SECONDS):
                self._write()
            self._write()
        except OSError as error:
            tracing.to = None
            logging.getLogger("aiodist").warning("%s: the trace ends here: %s", self._file.name, error.strerror)

    def _write(self) -> None:
        while self._spans:
            batch = [self._spans.popleft() for _ in range(min(len(self._spans), _BATCH))]
            said = [one[0] for one in batch if len(one) == 1]
            spans = [one for one in batch if len(one) > 1]
            for line in (*said, *([spans] if spans else [])):
                self._file.write(json.dumps(line, default=str, separators=(",", ":")) + "\n")
        self._file.flush()


class _Operations:
    """Records the operations of one communicator."""

    def __init__(self, recorder: Recorder, rank: int, dispatcher: Dispatcher) -> None:
        self._recorder = recorder
        self._rank = rank
        self._dispatcher = dispatcher

    def issued(self, handle: Handle[Any], meets: Peer | Named | None = None, /) -> Ended:
        """See `OperationObserver`."""
        return partial(self._ended, perf_counter(), meets)

    def _ended(self, began: float, meets: Peer | Named | None, handle: Handle[Any], way: str = "") -> None:
        comm = self._dispatcher.name
        details: dict[str, Any] = {"comm": comm, "bytes": handle.nbytes, "at": _line(*internals.issued_at(handle))}
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
