"""The publishing side of a bridge: copies of states, and the transfer of the newest one to each job that reads.

Rank 0 numbers the versions and decides when one is sent. All ranks of the job carry out its decisions in one order, so
each of them sends its part of the same version. A writer never waits for a reader: a version in flight keeps its copy,
and the next version goes to another one.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final

from torch import Tensor

from aiodist.bridges.cut import StatePart
from aiodist.bridges.job import JobRanks
from aiodist.bridges.union import Union
from aiodist.communicator import Communicator
from aiodist.errors import AiodistError, CommunicatorClosed, MismatchError
from aiodist.handles import Handle, gather

TOPIC: Final = "bridge"
"""Topic of the messages between two jobs."""

_INLINE_BYTES: Final = 1 << 20
_SPARES: Final = 3


@dataclass
class Published:
    """A copy of this rank's part of a state."""

    part: StatePart
    blocks: list[Tensor]
    """Memory of the copy."""
    runs: list[Tensor]
    """Bytes to send, in order."""
    asked: int | None
    """Version that this rank's call gave, or None."""
    version: int = 0
    uses: int = 1
    """Number of transfers, and one more while this is the newest version."""
    named: asyncio.Future[int] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """The version, once rank 0 has named it."""


class JobReaders:
    """The ranks of another job that read, as this rank of the publishing job has them."""

    def __init__(self, union: Union, ranks: Sequence[int]) -> None:
        self.ranks = ranks
        self.wants: dict[int, int] = {}
        """The newest version that each waiting rank has had (on rank 0 of the publishing job)."""
        self.ending = False
        """True once this job closes the bridge."""
        self._union = union
        self._sent: dict[int, object] = {}

    def announce(self, version: int) -> None:
        """Let all ranks receive a version."""
        self.wants.clear()
        for rank in self.ranks:
            self._union.channel.send(rank, TOPIC, ["ship", version])

    def end(self) -> None:
        """Answer the waiting ranks that no version follows."""
        for rank in list(self.wants):
            del self.wants[rank]
            self._union.channel.send(rank, TOPIC, ["end"])

    def send(self, published: Published, *, values: bool) -> list[Handle[Any]]:
        """Send this rank's part to all ranks. True for `values` sends also what is not in tensors."""
        handles: list[Handle[Any]] = []
        part, comm = published.part, self._union.weights
        layout = part.table.entries, part.extents
        for rank in self.ranks:
            known, self._sent[rank] = self._sent.get(rank) == layout, layout
            header = published.version, None if known else layout, part.values if values else None
            handles.append(comm.send_object(header, rank))
            handles += [comm.send(run, rank) for run in published.runs]
        return handles


class Versions:
    """The states that one rank of a job publishes."""

    def __init__(self, coll: Communicator) -> None:
        self._job = JobRanks(coll)
        self._readers: dict[int, JobReaders] = {}
        self._owed: dict[int, Published] = {}
        """Versions for bridges that are still being opened on this rank, by the number of the bridge."""
        self._numbers = itertools.count()
        self._copies: dict[int, asyncio.Future[Published]] = {}
        """Copies by the number of their call, which rank 0 may have named before this rank's call."""
        self._newest: Published | None = None
        self._last = 0
        self._spare: list[tuple[StatePart, list[Tensor]]] = []
        self._failure: AiodistError | None = None
        self._task = asyncio.create_task(self._serve(), name="versions of a bridge")

    async def publish(self, state: Any, version: int | None) -> int:  # noqa: ANN401
        """Copy the state, and return its version. See `Bridge.publish`."""
        if self._failure is not None:
            raise self._failure
        return await asyncio.shield(asyncio.create_task(self._publish(next(self._numbers), state, version)))

    async def _publish(self, number: int, state: Any, version: int | None) -> int:  # noqa: ANN401
        try:
            published = await self._copied(state, version)
        except Exception as error:  # the other ranks may publish this number: readers refuse version -1
            refused = Published(StatePart.of(None, 0, 1), [], [], -1)
            refused.named.cancel()
            self._copy(number).set_result(refused)
            if self._job.rank == 0:
                self._job.tell("refused", number, str(error))
            raise
        self._copy(number).set_result(published)
        if self._job.rank == 0:
            self._last = version or max(self._last + 1, time.time_ns() // 1_000_000)
            self._job.tell("version", number, self._last)
            self.look()
        if self._failure is not None:
            raise self._failure
        named = await published.named
        if version is not None and version != named:
            raise MismatchError(f"version={version} on rank {self._job.rank}, and {named} on rank 0: expected the same")
        return named

    async def _copied(self, state: Any, version: int | None) -> Published:  # noqa: ANN401
        if version is not None and version <= self._last:
            raise ValueError(f"version={version}: expected more than {self._last}, the version published last")
        part = StatePart.of(state, self._job.rank, self._job.size)
        blocks = self._spare_blocks(part)
        if part.table.nbytes < _INLINE_BYTES or not all(t.is_cpu for t in part.elements):
            runs = part.copy(blocks)
        else:
            runs = await asyncio.to_thread(part.copy, blocks)
        return Published(replace(part, elements=()), blocks, runs, version)

    def _spare_blocks(self, part: StatePart) -> list[Tensor]:
        """Return the memory of a version that no transfer reads, or an empty list."""
        same = [
            one for one in self._spare if (one[0].table.entries, one[0].extents) == (part.table.entries, part.extents)
        ]
        self._spare = same[1:]
        return same[0][1] if same else []

    def _copy(self, number: int) -> asyncio.Future[Published]:
        return self._copies.setdefault(number, asyncio.get_running_loop().create_future())

    # --- readers -----------------------------------------------------------------------------------------------

    def add(self, bridge: int, readers: JobReaders) -> None:
        """Serve the ranks of the other job at a bridge."""
        self._readers[bridge] = readers
        if (owed := self._owed.pop(bridge, None)) is not None:
            self._send(readers, owed)
            self._release(owed)

    def discard(self, bridge: int) -> None:
        """Forget a bridge, which has ended."""
        self._readers.pop(bridge, None)
        if (owed := self._owed.pop(bridge, None)) is not None:
            self._release(owed)

    def look(self) -> None:
        """Send the newest version to each job whose ranks all wait for one (on rank 0)."""
        for bridge, readers in list(self._readers.items()):
            waiting = len(readers.wants) == len(readers.ranks)
            newer = readers.wants and self._last > max(readers.wants.values())
            with suppress(RuntimeError):  # the channel is closed
                if waiting and newer:
                    readers.announce(self._last)
                    self._job.tell("ship", bridge)
                elif readers.ending and not newer:
                    readers.end()

    # --- decisions of rank 0 -----------------------------------------------------------------------------------

    async def _serve(self) -> None:
        try:
            while True:
                match await self._job.heard():
                    case ["version", int(number), int(version)]:
                        self._name(await self._copy(number), version)
                        del self._copies[number]
                    case ["refused", int(number), str(why)]:
                        copied = await self._copy(number)
                        del self._copies[number]
                        if not copied.named.done():
                            copied.named.set_exception(MismatchError(f"rank 0 did not publish: {why}"))
                    case ["ship", int(bridge)]:
                        self._ship(bridge)
        except AiodistError as error:
            self._fail(error)

    def _name(self, published: Published, version: int) -> None:
        self._last = version
        published.version = published.asked or version  # readers refuse the parts of different versions
        before, self._newest = self._newest, published
        if before is not None:
            self._release(before)
        if not published.named.done():
            published.named.set_result(version)

    def _ship(self, bridge: int) -> None:
        published = self._newest
        assert published is not None  # rank 0 ships what it has named
        if (readers := self._readers.get(bridge)) is not None:
            self._send(readers, published)
        else:
            published.uses += 1
            self._owed[bridge] = published

    def _send(self, readers: JobReaders, published: Published) -> None:
        try:
            sending = gather(*readers.send(published, values=self._job.rank == 0))
        except AiodistError:  # the other job is lost
            return
        published.uses += 1
        sending.add_done_callback(lambda done: self._sent(published, done))

    def _sent(self, published: Published, sending: Handle[Any]) -> None:
        if not sending.cancelled() and sending.exception() is None:
            self._release(published)  # else a transfer may still read the memory, which is not used again

    def _release(self, published: Published) -> None:
        published.uses -= 1
        if not published.uses and len(self._spare) < _SPARES:
            self._spare.append((published.part, published.blocks))

    def _fail(self, error: AiodistError) -> None:
        self._failure = error
        for copied in self._copies.values():
            if copied.done() and not copied.result().named.done():
                copied.result().named.set_exception(error)

    async def close(self) -> None:
        """End the service."""
        self._task.cancel()
        await asyncio.wait([self._task])
        if self._failure is None:
            self._fail(CommunicatorClosed("the bridge was closed by this job"))
        self._job.close()
