"""Communicators over gloo, and the creation of the world's communicator.

[Note: lost peers] When a rank cannot be reached, pending and later operations with that rank fail. Receives from any
source fail once for each loss: all waiting receives, or else the next receive that finds no message. Later receives
wait for the other ranks. Messages that arrived completely before the loss are still received. Messages that were only
announced are lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from ctypes import memmove
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from aiodist.backends.base import Capabilities, Done, Native, again, started, tell
from aiodist.backends.gloo.library import GlooRendezvous, ProcessGroup, empty
from aiodist.backends.gloo.native import GlooNative
from aiodist.backends.gloo.wire import MESSAGE, OFFER, GlooFrame, GlooPeer, Wire
from aiodist.backends.header import comm_number
from aiodist.backends.matching import Matching, TransportReceive, UnexpectedMessage
from aiodist.errors import BackendError
from aiodist.handles import Progress
from aiodist.handles.kernel import run, transfer
from aiodist.handles.polling import transport_lock
from aiodist.streams.memory import bytes_of
from aiodist.types import ANY

if TYPE_CHECKING:
    from aiodist.control import Channel

_WORLD = "world"


@dataclass(eq=False, slots=True)
class ArrivedMessage(UnexpectedMessage):
    """A message with its data, or with an offer of its data."""

    nbytes: int
    data: Tensor
    offer: int
    """Number of the offer if the data must be fetched, else 0."""


class Inbox:
    """Waiting receives and messages, in order (transport lock held)."""

    def __init__(self, peers: Mapping[int, GlooPeer]) -> None:
        self.peers = peers
        self._matching: Matching[TransportReceive, ArrivedMessage] = Matching()
        self._unreported: BackendError | None = None  # a loss that no receive from any source has reported yet
        self._closed: BackendError | None = None

    def receive(self, wanted: TransportReceive) -> None:
        """Deliver the message for `wanted`, now or at its arrival, or fail `wanted` (see [Note: lost peers])."""
        message = self._matching.post(wanted)
        if message is not None:
            self._deliver(message, wanted)
            return
        peer = self.peers.get(wanted.src)
        error = self._closed or (None if peer is None else peer.error)
        if wanted.src == ANY and error is None:
            error, self._unreported = self._unreported, None
        if error is not None:
            self._matching.cancel(wanted)
            wanted.done(again(error))

    def arrived(self, message: ArrivedMessage) -> None:
        """Deliver `message` to the first matching receive, or keep the message."""
        wanted = self._matching.match(message.src, message.tag)
        if wanted is not None:
            self._deliver(message, wanted)
        else:
            if not message.offer:
                message.data = message.data.clone()
            self._matching.keep(message)

    def lost(self, rank: int, error: BackendError) -> None:
        """Fail the receives from `rank`, and those from any source once (see [Note: lost peers])."""
        matching = self._matching
        matching.cancel_messages([message for message in matching.messages if message.src == rank and message.offer])
        failed = matching.cancel_receives([wanted for wanted in matching.receives if wanted.src in (rank, ANY)])
        if all(wanted.src == rank for wanted in failed):
            self._unreported = error
        tell((wanted.done, again(error)) for wanted in failed)

    def abort(self, error: BackendError) -> None:
        """Fail all receives, now and later."""
        self._closed = error
        tell((wanted.done, again(error)) for wanted in self._matching.cancel_receives())

    def _deliver(self, message: ArrivedMessage, wanted: TransportReceive) -> None:
        run(self._bring(message, wanted.into), wanted.finish)

    async def _bring(self, message: ArrivedMessage, into: Tensor) -> None:
        """Move the bytes of a message to the tensor of its receive."""
        nbytes = message.nbytes
        fits = nbytes == into.nbytes
        if message.offer:  # a message that does not fit is received too, so that the sender can finish
            await transfer(self.peers[message.src].fetch, message.offer, bytes_of(into) if fits else empty(nbytes))
        elif fits:
            memmove(into.data_ptr(), message.data.data_ptr(), nbytes)
        if not fits:
            raise BackendError(f"a message of {nbytes} bytes met a receive of {into.nbytes}")


class GlooTransport:
    """One communicator over gloo. The world's communicator owns the connections, which the other communicators use."""

    name = "gloo"

    def __init__(
        self,
        meeting: GlooRendezvous,
        wire: Wire | None,
        path: str,
        world_ranks: Sequence[int],
        group: ProcessGroup | None,
    ) -> None:
        """`world_ranks` are the world ranks of the ranks, in order.

        `path` is the name of the communicator, the same on all ranks.

        A communicator of one rank has neither `wire` nor `group`.
        """
        self._meeting = meeting
        self.wire = wire
        self._path = path
        self._world_ranks = tuple(world_ranks)
        self._local = {world: rank for rank, world in enumerate(world_ranks)}
        self.rank = self._local[meeting.rank]
        self.size = len(world_ranks)
        self.comm = comm_number(path)
        self._closed = False
        self.peers: dict[int, GlooPeer] = {}
        if wire is not None:
            self.peers = {self._local[world]: wire.peers[world] for world in world_ranks if world in wire.peers}
        self._inbox = Inbox(self.peers)
        self._native: GlooNative | None = None
        if wire is not None and group is not None:
            self._native = GlooNative(group, self.rank, self.peers.values(), wire.call)
            with transport_lock:
                wire.at_close.add(self._native.close)
                wire.join(self.comm, self)
        self.native: Native | None = self._native

    def capabilities(self) -> Capabilities:
        return Capabilities(short_receives=False)

    # Messages.

    def isend(self, t: Tensor, dst: int, tag: int, done: Done) -> None:
        """Send `t`, done immediately for a short message, else after the receive."""
        if self._closed:  # the next step of an aborted operation
            done(BackendError("gloo: the transport was closed"))
            return
        if dst == self.rank or self.wire is None:
            self._inbox.arrived(ArrivedMessage(self.rank, tag, t.nbytes, bytes_of(t).clone(), 0))
            done(None)
            return
        peer = self.peers[dst]
        if t.nbytes <= self.wire.capacity:
            error = peer.send(MESSAGE, self.comm, tag, nbytes=t.nbytes, data=t)
            done(error and again(error))
        else:
            peer.offer(t, tag, self.comm, done)

    def irecv(self, t: Tensor, src: int, tag: int, done: Done) -> None:
        """Receive a message of the size of `t` into `t`."""
        self._inbox.receive(TransportReceive(src, tag, t, done))

    # Calls of the wire.

    def frame_arrived(self, src: int, frame: GlooFrame) -> None:
        """Handle a frame from world rank `src`."""
        header = frame.header
        number = header.number if header.kind == OFFER else 0
        self._inbox.arrived(ArrivedMessage(self._local[src], header.tag, header.nbytes, frame.data, number))

    def lost(self, world_rank: int, error: BackendError) -> None:
        """Fail operations with `world_rank`, which cannot be reached."""
        rank = self._local.get(world_rank)
        if rank is None:
            return
        self._inbox.lost(rank, error)
        if self._native is not None:
            self._native.abort()

    # Split and close.

    async def split(self, ranks: Sequence[int], name: str) -> GlooTransport:
        """Return a transport among `ranks`, with a separate process group. The connections take some milliseconds."""
        path = f"{self._path}/{name}"
        world_ranks = [self._world_ranks[rank] for rank in ranks]
        if len(ranks) == 1:
            return GlooTransport(self._meeting, None, path, world_ranks, None)
        group = await self._meeting.group(path, list(ranks).index(self.rank), len(ranks))
        return GlooTransport(self._meeting, self.wire, path, world_ranks, group)

    async def aclose(self, *, drained: bool) -> None:
        """Close this transport.

        Pending operations fail. The world's transport closes the connections, which all splits use.
        """
        if self._closed:
            return
        self._closed = True
        owner = self._path == _WORLD
        try:
            if drained and owner and self.size > 1:
                await self._meeting.part()
        finally:  # also when this call is cancelled
            with transport_lock:
                self._abort(BackendError("gloo: the transport was closed"), owner)
            closing = started(self._close, owner)
        await asyncio.wrap_future(closing)

    def _abort(self, error: BackendError, owner: bool) -> None:
        self._inbox.abort(error)
        if self._native is not None:
            self._native.abort()
        if self.wire is not None:
            self.wire.leave(self.comm)
            if owner:
                self.wire.abort(error)

    def _close(self, owner: bool) -> None:
        if self.wire is not None and self._native is not None:
            self._native.close()
            self.wire.at_close.discard(self._native.close)
            if owner:
                self.wire.close()
                self._meeting.devices.clear()


async def open_world(channel: Channel, *, one_host: bool) -> GlooTransport:
    """Return a transport over all ranks of `channel`. Every rank must make this call, once in the channel's life.

    True for `one_host` uses the loopback interface, for ranks on one host. gloo connects in a thread, so the loop
    continues. After a cancellation this thread runs for a while. Raises `BackendError` if the ranks cannot connect,
    `OperationTimeout` or `PeerLost` if a rank is missing.
    """
    meeting = GlooRendezvous(channel, one_host=one_host)
    if channel.size == 1:
        return GlooTransport(meeting, None, _WORLD, (0,), None)
    frames = await meeting.group("frames", channel.rank, channel.size)
    group = await meeting.group(_WORLD, channel.rank, channel.size)
    wire = Wire(frames, channel.rank, channel.size, Progress.current())
    return GlooTransport(meeting, wire, _WORLD, range(channel.size), group)
