"""Messages through shared memory, for communicators whose ranks are all on this host."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from torch import Tensor

from aiodist.backends.base import Capabilities, Done, Native, Transport
from aiodist.backends.header import comm_number
from aiodist.backends.shm.messages import Messages
from aiodist.backends.shm.neighbours import Neighbourhood
from aiodist.backends.shm.peers import short_bytes
from aiodist.backends.shm.records import ShmReceive, ShmSend
from aiodist.errors import BackendError
from aiodist.handles import Progress
from aiodist.handles.polling import transport_lock
from aiodist.types import ANY

_WORLD = "world"
_PARTED = "messages: over"
_PART_SECONDS = 2.0
_LOOK_SECONDS = 1e-3


class ShmTransport:
    """One communicator in shared memory. The world's communicator owns the queues, which the other communicators use.

    The transport has no collectives, since `ShmNative` gives collectives to any communicator on one host.
    """

    name = "shm"

    def __init__(self, messages: Messages, path: str, world_ranks: Sequence[int]) -> None:
        """`world_ranks` are the world ranks of the ranks, in order.

        `path` is the name of the communicator, the same on all ranks.
        """
        self.messages = messages
        self._path = path
        self._world_ranks = tuple(world_ranks)
        self.comm = comm_number(path)
        self._closed = False
        self.rank = self._world_ranks.index(messages.rank)
        self.size = len(self._world_ranks)
        self.native: Native | None = None
        with transport_lock:
            messages.join(self.comm, self._world_ranks)

    @property
    def near(self) -> Neighbourhood:
        return self.messages.near

    def capabilities(self) -> Capabilities:
        kept_from = short_bytes(len(self.near.members)) + 1
        return Capabilities(
            short_receives=True, kept_from=kept_from, send_now=self._send_now, receive_each=self._receive_each
        )

    def isend(self, t: Tensor, dst: int, tag: int, done: Done) -> None:
        """Send `t`, done immediately for a short message, else after the copy of all bytes.

        The send fails if the other rank is lost. See [Note: lost ranks] of `messages`.
        """
        self.messages.send(ShmSend(t, self.comm, tag, done), self._world_ranks[dst])

    def _send_now(self, data: bytearray, dst: int, tag: int) -> bool:
        peer = self.messages.peers.get(self._world_ranks[dst])
        return peer is not None and peer.send_now(data, self.comm, tag)

    def irecv(self, t: Tensor, src: int, tag: int, done: Done) -> None:
        """Receive into `t`. A shorter message does not change the rest of `t`."""
        source = ANY if src == ANY else self._world_ranks[src]
        self.messages.receive(ShmReceive(source, tag, t, self.comm, done))

    def _receive_each(self, t: Tensor, tag: int, each: Callable[[bytearray], object], done: Done) -> None:
        self.messages.receive(ShmReceive(ANY, tag, t, self.comm, done, each=each))

    async def split(self, ranks: Sequence[int], name: str) -> Transport:
        return ShmTransport(self.messages, f"{self._path}/{name}", [self._world_ranks[rank] for rank in ranks])

    async def aclose(self, *, drained: bool) -> None:
        """Fail pending operations. The close of the world's transport ends all splits and frees their memory.

        Unless `drained`, the memory is kept until this object dies, since other ranks may still read the memory.
        """
        if self._closed:
            return
        self._closed = True
        error = BackendError(f"the shared memory of {self._path!r} was closed")
        with transport_lock:
            self.messages.close_comm(self.comm, error)
            if self._path == _WORLD:
                self.messages.close(error)
        if drained and self._path == _WORLD:
            await self._part()
            with transport_lock:
                self.messages.release()

    async def _part(self) -> None:
        """Wait until no other rank needs this rank's memory, since all have closed their transports."""
        neighbours = self.near.neighbours.values()
        until = asyncio.get_running_loop().time() + _PART_SECONDS
        with transport_lock:
            for neighbour in neighbours:
                neighbour.send({"place": _PARTED, "at": (0, 0)})
        while asyncio.get_running_loop().time() < until:
            with transport_lock:
                for neighbour in neighbours:
                    neighbour.flush()
                    neighbour.listen()
            if all(_PARTED in neighbour.places for neighbour in neighbours):
                return
            await asyncio.sleep(_LOOK_SECONDS)


def open_world(near: Neighbourhood) -> ShmTransport:
    """Return a transport over all ranks of `near`, once in the life of `near`.

    Every rank must make this call. Raises MemoryError if there is no memory for the queues.
    """
    return ShmTransport(Messages(near, Progress.current()), _WORLD, near.members)
