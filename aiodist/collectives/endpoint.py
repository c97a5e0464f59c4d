"""Endpoints carry and record the messages of a program. Also has the interface of implementations.

Two ranks that differ drain the messages between them by these records. Messages of one tag between two ranks keep their
order: the k-th send of one rank matches the k-th receive of the other. So after both have stopped, the unmatched
messages are the end of the longer list. The ranks exchange the lists. Each rank then sends zeros for the unmatched
receives of the other, and discards the unmatched sends of the other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, dtype

from aiodist._core import KEY_BITS
from aiodist.backends.arithmetic import copy
from aiodist.backends.base import Begin, Done, Exchange, Primitive, Transport, Wanted
from aiodist.handles.kernel import Program, Transfer, run, transfer
from aiodist.streams.memory import bytes_of
from aiodist.types import ReduceOp

ROOM_BYTES = 256 << 10
"""Size, in bytes, from which a message waits until all ranks agree."""

_MOST_RECENT = 1024
_MOST_ROOMS = 32  # buffers kept for each communicator

Lists = dict[int, list[int]]  # tag -> sizes of messages, in bytes

LANE_TAGS = 1 << 22
"""Distance of the tags of two lanes, above the tags of all operations. 32 lanes stay below MPICH's limit."""


class DeviceMessages(Protocol):
    """Sends and receives tensors on a device over a transport, which moves memory of the host."""

    def send(self, transport: Transport, t: Tensor, dst: int, tag: int, done: Done) -> None:
        """Send like `Transport.isend`, after the earlier work of the current stream."""

    def recv(self, transport: Transport, t: Tensor, src: int, tag: int, done: Done) -> None:
        """Receive like `Transport.irecv`. Done when later work of the current stream can use the data."""

    def fetch(self, host: Tensor, t: Tensor, done: Done) -> None:
        """Copy `t` to `host`, of the same shape and dtype, after the earlier work of the current stream."""

    def put(self, host: Tensor, t: Tensor, done: Done) -> None:
        """Copy `host` to `t`, of the same shape and dtype, after the earlier work of the current stream."""

    def cut(self, t: Tensor) -> Sequence[Tensor]:
        """Return the chunks of flat `t`. Each chunk is a message."""


class Differ(Exception):
    """Ranks issued different operations as number `seq`."""

    def __init__(self, seq: int) -> None:
        super().__init__(f"ranks differ on operation #{seq}")
        self.seq = seq


@dataclass(eq=False, slots=True)
class Traffic:
    """The record of the messages of one operation on this rank."""

    rooms: list[Tensor] | None = None
    """Reused buffers for receives that may match a longer message, or None if no receive may."""
    comparison: Callable[[Done], None] | None = None
    """Function that waits for the comparison of the ranks, or None after the comparison."""
    difference: BaseException | None = None
    """Error of the comparison, or None."""
    stopped_by: BaseException | None = None
    """Error that later sends and receives raise, or None."""
    native: int = 0
    """Number of running native parts, in a library or in shared memory. Native parts cannot be stopped."""
    way: str = ""
    """Name of the implementation, or of the last one if several ran."""
    _sent: dict[int, Lists] = field(default_factory=dict)
    _asked: dict[int, Lists] = field(default_factory=dict)

    def send(self, transport: Transport, t: Tensor, dst: int, tag: int, done: Done) -> None:
        """Send `t`, and record the message unless the call fails."""
        sizes = self._sent.setdefault(dst, {}).setdefault(tag, [])
        sizes.append(t.nbytes)
        try:
            transport.isend(t, dst, tag, done)
        except BaseException:
            sizes.pop()
            raise

    def recv(self, transport: Transport, t: Tensor, src: int, tag: int, done: Done) -> None:
        """Receive into `t`, and record the receive unless the call fails.

        Until all ranks agree, the message may be of another operation, up to `ROOM_BYTES` long.
        """
        sizes = self._asked.setdefault(src, {}).setdefault(tag, [])
        sizes.append(t.nbytes)
        try:
            if self.rooms is None or t.nbytes >= ROOM_BYTES:
                transport.irecv(t, src, tag, done)
            else:
                self._recv_in_room(transport, self.rooms, t, src, tag, done)
        except BaseException:
            sizes.pop()
            raise

    @staticmethod
    def _recv_in_room(transport: Transport, rooms: list[Tensor], t: Tensor, src: int, tag: int, done: Done) -> None:
        room = rooms.pop() if rooms else torch.empty(ROOM_BYTES, dtype=torch.uint8, device="cpu")

        def copy_out(error: BaseException | None) -> None:
            if error is None:
                copy(bytes_of(t), room[: t.nbytes])
                if len(rooms) < _MOST_ROOMS:
                    rooms.append(room)
            done(error)

        transport.irecv(room, src, tag, copy_out)

    async def agreed(self) -> None:
        """Return when all ranks have issued this operation, or raise the error of the comparison."""
        if self.comparison is not None:
            await transfer(self.comparison)
        elif self.difference is not None:
            raise self.difference

    @property
    def begun(self) -> bool:
        """True if a transfer has started, so that the output of the operation is unspecified if it fails."""
        return bool(self._sent or self._asked or self.native)

    def with_rank(self, rank: int) -> tuple[Lists, Lists]:
        """Return the sizes of the sends to `rank` and of the receives from `rank`, in order, by tag."""
        return self._sent.get(rank, {}), self._asked.get(rank, {})

    def clear(self, transport: Transport, rank: int, sent: Lists, asked: Lists) -> None:
        """Drain the messages between this rank and `rank`, whose record is `sent` and `asked` (transport lock held)."""
        mine, wanted = self.with_rank(rank)
        for tag, sizes in asked.items():
            for nbytes in sizes[len(mine.get(tag, ())) :]:
                zeros = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
                run(transfer(transport.isend, zeros, rank, tag))
        for tag, sizes in sent.items():
            for nbytes in sizes[len(wanted.get(tag, ())) :]:
                room = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
                run(transfer(transport.irecv, room, rank, tag))


class RecentTraffic(dict[int, Traffic]):
    """The messages of the last operations of a communicator, by number."""

    def __init__(self, rooms: list[Tensor] | None) -> None:
        """`rooms` are for operations of several hosts, see `Traffic`."""
        super().__init__()
        self._rooms = rooms

    def enter(self, number: int) -> Traffic:
        """Return the record of an operation, a new one at the first call."""
        traffic = self.get(number)
        if traffic is None:
            traffic = self[number] = Traffic(self._rooms)
            while (oldest := next(iter(self))) <= number - _MOST_RECENT:
                del self[oldest]
        return traffic


class Endpoint:
    """A transport with one operation's tag, so that messages of different operations never match."""

    __slots__ = ("device_messages", "key", "rank", "ranks", "size", "tag", "traffic", "transport", "whole")

    def __init__(
        self,
        transport: Transport,
        tag: int,
        device_messages: DeviceMessages | None = None,
        traffic: Traffic | None = None,
        number: int | None = None,
    ) -> None:
        """`device_messages` is for tensors on a device, `traffic` records the messages between hosts.

        `number` is the operation's number, by default `tag`. The key of the operation has this number, since tags
        repeat after some operations.
        """
        self.transport = transport
        self.device_messages = device_messages
        self.traffic = traffic
        self.ranks: Sequence[int] = range(transport.size)
        """Ranks in the transport, by rank of the endpoint."""
        self.rank = transport.rank
        self.size = len(self.ranks)
        self.tag = tag
        self.key = (tag if number is None else number) << KEY_BITS
        self.whole = False
        """True if the endpoint is on a lane already, so that tensors are not split into chunks."""

    def among(self, ranks: Sequence[int]) -> Endpoint:
        """Return the endpoint of some of these ranks, numbered in the order given, over the same transport and tag.

        A rank of several groups uses the groups one after another. Raises ValueError if this rank is not in `ranks`.
        """
        if self.rank not in ranks:
            raise ValueError(f"rank {self.rank} is not among {list(ranks)}")
        other = self._copy()
        other.rank, other.size = ranks.index(self.rank), len(ranks)
        other.ranks = [self.ranks[rank] for rank in ranks]
        return other

    def on_lane(self, lane: int) -> Endpoint:
        """Return an endpoint with the tag and the key of a lane, 0 to `MAX_LANES` - 1. A lane has no further lanes."""
        other = self._copy()
        other.whole = True
        other.tag += lane * LANE_TAGS
        other.key += lane
        return other

    def _copy(self) -> Endpoint:
        other = Endpoint.__new__(Endpoint)  # `copy.copy` takes 20 times as long
        other.transport, other.device_messages, other.traffic = self.transport, self.device_messages, self.traffic
        other.ranks, other.rank, other.size = self.ranks, self.rank, self.size
        other.tag, other.key, other.whole = self.tag, self.key, self.whole
        return other

    def send(self, t: Tensor, dst: int) -> Transfer:
        """Return the transfer that sends `t` to rank `dst`."""
        dst = self.ranks[dst]
        if self.device_messages is not None and not t.is_cpu:
            return self.device_messages.send, self.transport, t, dst, self.tag
        if self.traffic is not None:
            if self.traffic.stopped_by is not None:
                raise self.traffic.stopped_by.with_traceback(None)
            return self.traffic.send, self.transport, t, dst, self.tag
        return self.transport.isend, t, dst, self.tag

    def recv(self, t: Tensor, src: int) -> Transfer:
        """Return the transfer that receives `t` from rank `src`."""
        src = self.ranks[src]
        if self.device_messages is not None and not t.is_cpu:
            return self.device_messages.recv, self.transport, t, src, self.tag
        if self.traffic is not None:
            if self.traffic.stopped_by is not None:
                raise self.traffic.stopped_by.with_traceback(None)
            return self.traffic.recv, self.transport, t, src, self.tag
        return self.transport.irecv, t, src, self.tag

    async def known(self) -> None:
        """Wait until the ranks are known to agree. Before that, received data may be of another operation."""
        if self.traffic is not None:
            await self.traffic.agreed()


class Implementation(ABC):
    """A named algorithm or library for the collectives of a communicator."""

    name: str
    finishes: bool = False
    """True if allreduce and reduce_scatter take 16-bit floats and means with one rounding.

    If False, callers convert.
    """
    in_order: bool = False
    """True if operations match by the order of the calls alone. Only first steps of operations then use this."""
    recallable: bool = False
    """True if an operation stops on all ranks when one rank fails.

    False if the ranks that have begun wait for that rank.
    """
    compares: bool = False
    """True if `run` waits for the hosts' agreement if necessary. If False, callers wait before large operations."""

    @abstractmethod
    def lacks(self, wanted: Wanted) -> str | None:
        """Return the reason why the implementation cannot run the operation, or None, equal on all ranks."""

    def in_fixed_order(self, operation: str, ranks: int) -> bool:
        """Return True if reductions among `ranks` ranks combine in the fixed order (see `schedules.in_fixed_order`)."""
        return False

    def plan_allreduce(self, kind: dtype, numel: int, op: ReduceOp) -> Begin | None:
        """Return a function that starts an in-place allreduce by one native call, or None."""
        return None

    @abstractmethod
    def run(self, ep: Endpoint, primitives: Sequence[Primitive]) -> Program[None]:
        """Run supported collectives of one kind on one or several tensors, with joined steps."""


class Exchanger(Implementation):
    """Runs an `Exchange` too, without messages of the endpoint, if all ranks can."""

    @abstractmethod
    def takes(self, ep: Endpoint, exchange: Exchange) -> bool:
        """Return True if this rank can run `exchange`."""

    @abstractmethod
    def release(self, ep: Endpoint) -> None:
        """Return the launch slots of an operation without exchanges."""
