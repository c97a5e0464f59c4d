"""Endpoints, which carry the messages of a program, and the interface of implementations."""

from __future__ import annotations

import copy as copying
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from torch import Tensor, dtype

from aiodist.backends.base import Begin, Done, Exchange, Primitive, Transport, Wanted, key_of
from aiodist.collectives.traffic import Traffic
from aiodist.handles.kernel import Program, Transfer, transfers
from aiodist.types import ReduceOp

LANE_TAGS = 1 << 22
"""Distance of the tags of two lanes: above the tags of all operations. 32 lanes stay below MPICH's limit."""


class DeviceMessages(Protocol):
    """Sends and receives tensors on a device over a transport, which moves memory of the host."""

    def send(self, transport: Transport, t: Tensor, dst: int, tag: int, done: Done) -> None:
        """Send like `Transport.isend`, after the earlier work of the current stream."""

    def recv(self, transport: Transport, t: Tensor, src: int, tag: int, done: Done) -> None:
        """Receive like `Transport.irecv`; done when later work of the current stream can use the data."""

    def fetch(self, t: Tensor, then: Callable[[Tensor | None, BaseException | None], None]) -> None:
        """Call `then` with a copy of `t` in memory of the host, or with an error."""

    def put(self, host: Tensor, t: Tensor, done: Done) -> None:
        """Copy `host` to `t`, of the same shape and dtype, after the earlier work of the current stream."""

    def cut(self, t: Tensor) -> Sequence[Tensor]:
        """Return the chunks of flat `t`; each chunk is a message."""


class Endpoint:
    """A transport with one operation's tag: messages of different operations never meet."""

    __slots__ = ("device_messages", "key", "rank", "ranks", "size", "tag", "traffic", "transport", "whole")

    def __init__(
        self,
        transport: Transport,
        tag: int,
        device_messages: DeviceMessages | None = None,
        traffic: Traffic | None = None,
        key: int | None = None,
    ) -> None:
        """`device_messages` is for tensors on a device, `traffic` records the messages between hosts.

        `key` identifies collectives of a library in place of the tag, since tags repeat after some operations.
        """
        self.transport = transport
        self.device_messages = device_messages
        self.traffic = traffic
        self.rank = transport.rank
        self.size = transport.size
        self.ranks: Sequence[int] = range(transport.size)
        """Rank of the transport of each of its ranks: all of them, unless `among` made it."""
        self.tag = tag
        self.key = key_of(tag) if key is None else key
        self.whole = False
        """True if it is on a lane already, so that tensors are not split into chunks."""

    def among(self, ranks: Sequence[int]) -> Endpoint:
        """Return the endpoint of some of its ranks, numbered in the order given, over the same transport and tag.

        Ranks that are in several groups use them one after another. Raises ValueError if this rank is not among them.
        """
        if self.rank not in ranks:
            raise ValueError(f"rank {self.rank} is not among {list(ranks)}")
        other = copying.copy(self)
        other.rank, other.size = ranks.index(self.rank), len(ranks)
        other.ranks = [self.ranks[rank] for rank in ranks]
        return other

    def send(self, t: Tensor, dst: int) -> Transfer:
        """Return the call that sends `t` to rank `dst`."""
        dst = self.ranks[dst]
        if self.device_messages is not None and not t.is_cpu:
            return partial(self.device_messages.send, self.transport, t, dst, self.tag)
        if self.traffic is not None:
            self.traffic.check()
            return partial(self.traffic.send, self.transport, t, dst, self.tag)
        return partial(self.transport.isend, t, dst, self.tag)

    def recv(self, t: Tensor, src: int) -> Transfer:
        """Return the call that receives `t` from rank `src`."""
        src = self.ranks[src]
        if self.device_messages is not None and not t.is_cpu:
            return partial(self.device_messages.recv, self.transport, t, src, self.tag)
        if self.traffic is not None:
            self.traffic.check()
            return partial(self.traffic.recv, self.transport, t, src, self.tag)
        return partial(self.transport.irecv, t, src, self.tag)

    async def known(self) -> None:
        """Wait until the ranks are known to agree: until then received data may be of another operation."""
        if self.traffic is not None:
            await transfers([self.traffic.agreed])


def on_lane(ep: Endpoint, lane: int) -> Endpoint:
    """Return `ep` with the tag and the key of a lane, 0 to `MAX_LANES` - 1; a lane has no lanes of its own."""
    other = copying.copy(ep)
    other.whole = True
    other.tag = ep.tag + lane * LANE_TAGS
    other.key = ep.key + lane
    return other


class Implementation(ABC):
    """A named algorithm or library for the collectives of a communicator."""

    name: str
    finishes: bool = False
    """True if its allreduce and reduce_scatter take 16-bit floats and means, and round once."""
    in_order: bool = False
    """True if it matches operations by the order of its calls alone, so only the first step of an operation uses it."""
    recallable: bool = False
    """True if it stops on all ranks when one fails; otherwise the ranks that have begun it wait for that one."""
    compares: bool = False
    """True if it waits for the agreement of the hosts itself, after its part within a host."""

    @abstractmethod
    def lacks(self, wanted: Wanted) -> str | None:
        """Return the reason why it cannot run the operation, or None; the same on all ranks."""

    def plan_allreduce(self, kind: dtype, numel: int, op: ReduceOp) -> Begin | None:
        """Return a function that starts an in-place allreduce by one native call, or None."""
        return None

    @abstractmethod
    def run(self, ep: Endpoint, primitives: Sequence[Primitive]) -> Program[None]:
        """Run supported collectives of one kind on one or several tensors, their steps joined."""


class Exchanger(Implementation):
    """Runs an `Exchange` too, without messages of the endpoint, if all ranks can."""

    @abstractmethod
    def takes(self, ep: Endpoint, exchange: Exchange) -> bool:
        """Return True if this rank can run `exchange`."""

    @abstractmethod
    def release(self, ep: Endpoint) -> None:
        """Return the launch slots of an operation without exchanges."""
