"""The communicators of one `init`: made from one another, told of lost ranks, closed in reverse order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from aiodist.accelerator import Accelerator
from aiodist.backends.base import Capabilities, Done, Native, Transport
from aiodist.backends.shm import Group, Groups, Neighbourhood, ShmNative
from aiodist.collectives.repertoire import Repertoire
from aiodist.collectives.table import Edit, Table
from aiodist.errors import (
    AiodistError,
    CommunicatorAborted,
    CommunicatorClosed,
    CommunicatorError,
    MismatchError,
    OperationTimeout,
)
from aiodist.handles import Handle, Origin, Progress
from aiodist.handles.combinators import all_over
from aiodist.handles.progress import transport_lock
from aiodist.issuer import Issuer

if TYPE_CHECKING:
    from aiodist.communicator import Communicator
    from aiodist.communicator.base import Base
    from aiodist.control import Channel, Exit
    from aiodist.levels import Levels
    from aiodist.topology import Topology

__all__ = ["DRAIN_SECONDS", "Family", "Guest"]

T = TypeVar("T")

DRAIN_SECONDS = 30.0
"""How long closing waits for what is in flight."""


class Guest(Protocol):
    """What lives on a communicator and must end before it: a training net, a parameter server."""

    async def release(self) -> None:
        """End in order; all ranks do so at the same time."""

    def give_up(self) -> None:
        """The program failed, or this rank was told so: end without waiting for anything."""


class Family:
    """Knows every open communicator of one rank."""

    def __init__(
        self,
        channel: Channel,
        make: Callable[[Issuer, Topology | None, Family], Communicator],
        *,
        checked: bool,
        timeout: float | None,
        drain_seconds: float = DRAIN_SECONDS,
        near: Neighbourhood | None = None,
        alone: str = "",
    ) -> None:
        """`near` are the ranks of this host that share memory with this one; `alone` says why there are none."""
        self._channel = channel
        self._make = make
        self.near = near
        """The ranks of this host, and this rank's memory that they can map."""
        self._groups = Groups(Progress.current()) if near is not None else None
        self._alone = alone
        self.accelerator: Accelerator | None = None
        """What this rank has of CUDA, where any rank has something."""
        self._edits: dict[str, list[Edit]] = {}
        self._edits_before: dict[str, int] = {}
        self._checked = checked
        self._timeout = timeout
        self._drain_seconds = drain_seconds
        self._open: list[Communicator] = []
        self._closing: list[Communicator] = []
        self._shared: dict[tuple[str, tuple[int, ...], Levels | None], Communicator] = {}
        self._children: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._guests: dict[Communicator, list[Guest]] = {}

    def world(self, transport: Transport, topology: Topology) -> Communicator:
        """Return the first communicator, over all ranks."""
        if topology.devices:
            self.accelerator = Accelerator(
                Progress.current(),
                self._channel,
                self._device_failed,
                direct="cuda" in transport.capabilities().devices,
            )
        world = self._communicator("world", transport, range(transport.size), topology)
        self._channel.on_lost(lambda exit: world._issuer.progress.post(lambda: self._lost(exit)))
        return world

    def _communicator(
        self,
        name: str,
        transport: Transport,
        ranks: Sequence[int],
        topology: Topology | None,
        table: Table | None = None,
    ) -> Communicator:
        repertoire = self._repertoire(name, transport, ranks, topology, table)
        issuer = Issuer(name, transport, self._channel, ranks, checked=self._checked, repertoire=repertoire)
        issuer.timeout = self._timeout
        if self.accelerator is not None:
            issuer.on_abort.append(partial(self.accelerator.abort, name))
            issuer.mailbox.courier = self.accelerator.courier
        made = self._make(issuer, topology, self)
        self._open.append(made)
        return made

    def _repertoire(
        self, name: str, transport: Transport, ranks: Sequence[int], topology: Topology | None, table: Table | None
    ) -> Repertoire:
        """Return what a new communicator can run its collectives with."""
        hosts = [] if topology is None else [topology.ranks_on(host) for host in topology.hosts]
        mine = self.accelerator
        cuda = "there is no CUDA device here" if mine is None else mine.kit(name, ranks, topology)
        within = self._shared_memory(name, ranks)
        return Repertoire(transport, table, hosts=hosts, within=within, alone=self._alone, cuda=cuda)

    def _shared_memory(self, name: str, ranks: Sequence[int]) -> ShmNative | None:
        """Return the collectives among those of `ranks` that share memory, if this rank is not the only one."""
        if self.near is None or self._groups is None:
            return None
        here = [rank for rank in ranks if rank in self.near.members]
        if len(here) == 1:
            return None
        return ShmNative(Group(self.near, self._groups, name, here, here.index(self.near.rank)))

    def _let_go(self, communicator: Communicator) -> None:
        """Touch no shared memory for it any more; what still had to is over."""
        issuer = communicator._issuer
        if (within := issuer.repertoire.within) is not None:
            with transport_lock:
                within.group.give_up(issuer.refusal or CommunicatorClosed(f"communicator {issuer.name!r} is closed"))

    async def close_memory(self) -> None:
        """Let go of the other ranks' memory and devices, once every communicator is closed or given up."""
        if self.accelerator is not None:
            await self.accelerator.aclose()
        if self.near is not None and self._groups is not None:
            with transport_lock:  # no poll is on its way
                self._groups.close()
                self.near.close()

    def _device_failed(self, name: str, error: AiodistError) -> None:
        """Give the communicator up on all ranks: the others may wait for this one on the device."""
        for communicator in (*self._open, *self._closing):
            issuer = communicator._issuer
            if communicator.name == name and issuer.refusal is None:
                issuer.abort(error)
                issuer.ledger.tell_abort(f"rank {communicator.rank}: {error}")

    def _lost(self, exit: Exit) -> None:
        for communicator in (*self._open, *self._closing):
            if exit.rank < 0 or exit.rank in communicator._issuer.ranks:
                communicator._issuer.peer_lost(exit)

    # --- guests ----------------------------------------------------------------------------------------------

    def admit(self, communicator: Communicator, guest: Guest) -> None:
        """Release `guest` before `communicator` is closed, or have it give up when that is given up."""
        communicator._issuer.check_usable()
        self._guests.setdefault(communicator, []).append(guest)

    # --- the selector ----------------------------------------------------------------------------------------

    def edit(self, communicator: Base, edit: Edit) -> Handle[None]:
        """Edit the tables of `communicator` and of what was made of it; return the handle of its comparison."""
        handle = communicator._announce(edit)
        communicator._adopt([edit])
        self._edits.setdefault(communicator.name, []).append(edit)
        for member in [c for c in self._open if c.name.startswith(f"{communicator.name}/")]:
            self._edits.setdefault(member.name, []).append(edit)
            with suppress(AiodistError):  # it was given up
                member._announce(edit)
            member._adopt([edit])
        return handle

    # --- making ----------------------------------------------------------------------------------------------

    def derive(self, parent: Communicator, kind: str, ranks: Sequence[int]) -> Handle[Communicator]:
        """Return the handle of a communicator among `ranks` of `parent`, which all its ranks name alike."""
        agreed = parent.allgather(torch.tensor([kind == "dup", *ranks]))
        name = self.next_name(parent, kind)

        def join(table: list[torch.Tensor]) -> Coroutine[Any, Any, Communicator]:
            wanted = {rank: row.tolist() for rank, row in enumerate(table)}
            other = next((rank for rank, row in wanted.items() if row != wanted[0]), 0)
            if other:
                kinds = {r: "dup" if wanted[r][0] else "group" for r in (0, other)}
                sides = "; ".join(f"rank {r}: {kind} of {wanted[r][1:]}" for r, kind in kinds.items())
                raise MismatchError(f"ranks disagree on {name!r}: {sides}")
            return self.join(parent, name, tuple(ranks), kind != "dup")

        return self.later(parent, kind, agreed, join)

    def split(self, parent: Communicator, color: int | None, key: int) -> Handle[Communicator]:
        """Return the handle of the communicator of `parent`'s ranks that gave the same `color`."""
        agreed = parent.allgather(torch.tensor([color is None, color or 0, key]))
        name = self.next_name(parent, "split")

        def join(table: list[torch.Tensor]) -> Coroutine[Any, Any, Communicator]:
            rows = [row.tolist() for row in table]
            group = sorted((row[2], rank) for rank, row in enumerate(rows) if row[:2] == rows[parent.rank][:2])
            ranks = () if color is None else tuple(rank for _, rank in group)
            return self.join(parent, name, ranks, shared=True)

        return self.later(parent, "split", agreed, join)

    def later(
        self,
        parent: Communicator,
        kind: str,
        agreed: Handle[Any],
        join: Callable[[Any], Coroutine[Any, Any, T]],
    ) -> Handle[T]:
        """Return a handle that a task of the loop settles: the native calls that make communicators block."""
        issuer = parent._issuer
        handle: Handle[T] = Handle(issuer.progress, kind, agreed.seq, origin=Origin.here(3), account=issuer.account)
        handle.polled = False
        earlier = issuer.pending()

        async def make() -> None:
            try:
                table = await agreed
                if earlier:
                    await all_over(earlier, issuer.progress.loop)
                handle.resolve(await join(table))
            except BaseException as error:  # noqa: BLE001  - it belongs to whoever awaits the handle
                handle.reject(error)

        task = asyncio.get_running_loop().create_task(make(), name=f"{parent.name}: {kind}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return handle

    def next_name(self, parent: Communicator, kind: str) -> str:
        """Return a name for what is made from `parent`: the same on all ranks, which make things in the same order."""
        number = self._children[parent.name] = self._children.get(parent.name, 0) + 1
        name = f"{parent.name}/{kind}{number}"
        self._edits_before[name] = len(self._edits.get(parent.name, ()))
        return name

    async def join(
        self, parent: Communicator, name: str, ranks: tuple[int, ...], shared: bool, levels: Levels | None = None
    ) -> Communicator:
        """Return the communicator among `ranks` of `parent`, made once where it is `shared`; see `Base.levels`."""
        if parent.rank not in ranks:
            return self._outside(name, len(ranks))
        key = (parent.name, ranks, levels)
        if shared and key in self._shared:
            return self._shared[key]
        before = self._edits_before[_issued_as(name)]
        name = f"{name}.{ranks[0]}"
        transport = await parent._transport.split(ranks, name)
        world_ranks = [parent._issuer.ranks[rank] for rank in ranks]
        table = parent._repertoire.table
        made = self._communicator(name, transport, world_ranks, parent.topology.among(ranks), table)
        made._issuer.large_bytes = table.limits["large_bytes"]
        # Edits that came since the call that makes it: elsewhere it may have been there when they came.
        for edit in self._edits.get(parent.name, [])[before:]:
            self._edits.setdefault(made.name, []).append(edit)
            made._announce(edit)
        made._levels, made._made_of = levels, (parent, ranks)
        if shared:
            self._shared[key] = made
        return made

    def _outside(self, name: str, size: int) -> Communicator:
        error = CommunicatorError(f"this rank is outside communicator {name!r}")
        return self._make(Issuer.refusing(name, _Outside(size), self._channel, error), None, self)

    # --- closing -----------------------------------------------------------------------------------------------

    async def close(self, communicator: Communicator) -> None:
        """Close `communicator` and, before it, what was made from it, within `drain_seconds` in all.

        Raises `OperationTimeout` naming what is still pending then, and gives that communicator up.
        """
        if isinstance(communicator._issuer.refusal, RuntimeError):  # a forked child, to which nothing belongs
            raise communicator._issuer.refusal
        until = asyncio.get_running_loop().time() + self._drain_seconds
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._drain_seconds)
        # By name, since tasks may make communicators in another order on each rank. "a/b" sorts behind "a".
        below = [c for c in self._open if c is communicator or c.name.startswith(f"{communicator.name}/")]
        for member in sorted(below, key=lambda c: c.name, reverse=True):
            await self._close(member, until)

    async def _close(self, communicator: Communicator, until: float) -> None:
        if communicator not in self._open:
            return
        self._open.remove(communicator)
        self._closing.append(communicator)  # it still hears of ranks that are lost
        self._shared = {key: made for key, made in self._shared.items() if made is not communicator}
        issuer = communicator._issuer
        drained = False
        try:
            for guest in reversed(self._guests.pop(communicator, [])):
                await self._release(guest, communicator, until)
            issuer.withdraw_receives()
            if issuer.refusal is None:
                await issuer.drain(self._left(until))
                issuer.account.judge()  # before the barrier, which would cover what nobody awaited
                await communicator.barrier(timeout=self._left(until))
                drained = True
        except BaseException as error:
            failure = CommunicatorAborted(f"closing communicator {communicator.name!r} failed: {error!r}")
            issuer.abort(error if isinstance(error, AiodistError) else failure)
            raise
        finally:
            try:
                issuer.close()
            finally:  # a warning that is an error
                self._closing.remove(communicator)
                self._let_go(communicator)
                if self.accelerator is not None:
                    await self.accelerator.release(communicator.name, drained=drained)
                await communicator._transport.aclose(drained=drained)

    async def _release(self, guest: Guest, communicator: Communicator, until: float) -> None:
        try:
            async with asyncio.timeout_at(until):
                await guest.release()
        except TimeoutError:
            guest.give_up()
            raise OperationTimeout(f"{guest} was not over in time", comm=communicator.name, op="aclose") from None

    def _left(self, until: float) -> float:
        return max(0.0, until - asyncio.get_running_loop().time())

    async def abandon(self, error: AiodistError) -> None:
        """The program failed: give everything up at once."""
        for task in self._tasks:
            task.cancel()
        given_up, self._open = self._open[::-1], []
        for communicator in given_up:
            communicator._issuer.abort(error)
            communicator._issuer.ledger.close()
            for guest in reversed(self._guests.pop(communicator, [])):
                guest.give_up()
        for communicator in given_up:
            self._let_go(communicator)
            with suppress(OSError):
                await communicator._transport.aclose(drained=False)


def _issued_as(name: str) -> str:
    """Return the name of the call that makes the communicator: a hierarchy makes several.

    >>> _issued_as("world/dup1.0/hierarchy1.intra2")
    'world/dup1.0/hierarchy1'
    """
    path, _, last = name.rpartition("/")
    return f"{path}/{last.partition('.')[0]}"


class _Outside:
    """The transport of a rank that is not in the group: there is none."""

    name = "none"
    rank = -1
    native: Native | None = None

    def __init__(self, size: int) -> None:
        self.size = size

    def capabilities(self) -> Capabilities:
        return Capabilities(short_receives=True)

    def isend(self, t: torch.Tensor, dst: int, tag: int, done: Done) -> None:
        done(CommunicatorError("this rank is outside the communicator"))

    irecv = isend

    async def split(self, ranks: Sequence[int], name: str) -> Transport:
        raise CommunicatorError("this rank is outside the communicator")

    async def aclose(self, *, drained: bool) -> None:
        return None
