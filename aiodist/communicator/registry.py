"""The registry of one world makes communicators from one another, and has their common resources."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch

from aiodist.backends.base import Transport, again
from aiodist.backends.local import LocalHub, LocalTransport
from aiodist.backends.shm import Neighbourhood
from aiodist.collectives.choice.table import Edit, Table
from aiodist.collectives.cuda.accelerator import Accelerator
from aiodist.communicator.base import parts_of, upkeep_of
from aiodist.communicator.closing import OpenCommunicators
from aiodist.communicator.dispatcher import Dispatcher
from aiodist.communicator.leftovers import made_by_program
from aiodist.communicator.movement import Movement
from aiodist.communicator.resources import Resources
from aiodist.control import disagreement
from aiodist.env import Generation
from aiodist.errors import (
    AiodistError,
    BackendError,
    CommunicatorError,
    ConfigError,
    MismatchError,
    OperationTimeout,
)
from aiodist.handles import Handle, Operation, Origin, internals
from aiodist.handles.combinators import all_over
from aiodist.handles.deadline import loop_time, wait_within

if TYPE_CHECKING:
    from anyio.from_thread import BlockingPortal

    from aiodist.communicator.levels import Levels
    from aiodist.control import Channel
    from aiodist.topology import Topology

T = TypeVar("T")

DRAIN_SECONDS = 30.0
"""Longest wait at the close for operations in flight, in seconds."""


class OpenBlock(Protocol):
    """The world of `open()`, which has no `async with` block."""

    async def aclose(self) -> None:
        """End the world in order."""

    async def was_forgotten(self) -> bool:
        """Return True if the program has not closed the world before the end of the loop or the process."""

    def follow(self, registry: Any) -> None:  # noqa: ANN401
        """Replace the registry by `registry`, of the next generation of the world."""


class ElasticJob(Protocol):
    """The transition to the next generation of the world."""

    def regroup(self, comm: Any, joiners: int, timeout: float | None) -> Handle[Any]:  # noqa: ANN401
        """See `Communicator.shrink` and `grow`."""

    @property
    def current(self) -> Any:  # noqa: ANN401
        """The newest world."""


C = TypeVar("C", bound=Movement)


class Registry(Generic[C]):
    """Makes the communicators of one rank in one world."""

    def __init__(
        self,
        channel: Channel,
        make: Callable[[Dispatcher, Topology | None, Registry[C]], C],
        *,
        timeout: float | None,
        drain_seconds: float = DRAIN_SECONDS,
        near: Neighbourhood | None = None,
        alone: str = "",
        sharing: Sequence[Sequence[int]] = (),
        generation: Generation | None = None,
    ) -> None:
        """`near` are the ranks of this host that share memory with this one. `alone` is the reason if there are none.

        `sharing` are all groups of ranks that share memory. A rank outside the groups shares no memory.
        """
        self._channel = channel
        self._make = make
        self.elastic: ElasticJob | None = None
        """Transition to the next generation, or None if the world is not elastic."""
        self.resources = Resources(near, alone, sharing, generation or Generation(0, (None,) * channel.size))
        self.members: OpenCommunicators[C] = OpenCommunicators(self.resources)
        self._edits: dict[str, list[Edit]] = {}
        self._edits_before: dict[str, int] = {}
        self.timeout = timeout
        """Default deadline of the operations of new communicators, in seconds, or None."""
        self.strict = False
        """True makes a change of a tensor in flight an error, see `init`."""
        self._drain_seconds = drain_seconds
        self.kept: OpenBlock | None = None
        """The world of `aiodist.open`, which a close of the world ends, or None."""
        self.portal: BlockingPortal | None = None
        """Portal to the loop's thread, if `aiodist.start` opened the world. Threads may then use all communicators."""
        self._shared: dict[tuple[str, tuple[int, ...], Levels | None], C] = {}
        self._children: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.resources.progress.on_broken.append(self.members.broken)

    @property
    def channel(self) -> Channel:
        """The control channel, which carries small messages between ranks, also while their programs compute."""
        return self._channel

    def world(self, transport: Transport, topology: Topology, name: str = "world", *, thread: bool = False) -> C:
        """Return the first communicator, over all ranks. True for `thread` allows calls of other threads."""
        if topology.devices:
            self.resources.accelerator = Accelerator(
                self.resources.progress,
                self._channel,
                self.members.device_failed,
                direct="cuda" in transport.capabilities().devices,
            )
        world = self._communicator(name, transport, range(transport.size), topology, thread=thread)
        self._channel.on_lost(lambda exit: self.resources.progress.post(self.members.lost, exit))
        return world

    def _communicator(
        self,
        name: str,
        transport: Transport,
        ranks: Sequence[int],
        topology: Topology | None,
        table: Table | None = None,
        *,
        thread: bool = False,
    ) -> C:
        resources = self.resources
        repertoire = resources.repertoire(name, transport, ranks, topology, table)
        agree = partial(resources.agreement, transport, ranks, repertoire.within) if transport.size > 1 else None
        thread = thread or self.portal is not None
        dispatcher = Dispatcher(
            name, transport, self._channel, ranks, repertoire=repertoire, agree=agree, thread=thread
        )
        dispatcher.timeout = self.timeout
        dispatcher.account.strict = self.strict
        if resources.accelerator is not None:
            dispatcher.lifetime.on_abort.append(partial(resources.accelerator.abort, name))
            dispatcher.mailbox.device_messages = resources.accelerator.device_messages
        made = self._make(dispatcher, topology, self)
        self.members.add(made)
        return made

    # --- generations -----------------------------------------------------------------------------------------

    def follow(self, before: Registry[C]) -> None:
        """Continue the program of the world `before`, of an earlier generation."""
        self.portal = before.portal
        self.resources.stop_requested = before.resources.stop_requested
        if before.kept is not None:
            before.kept.follow(self)

    def regroup(self, comm: C, joiners: int, timeout: float | None) -> Handle[C]:
        """Return the handle of the next generation's world, or raise ConfigError if this one is not elastic."""
        if self.elastic is None:
            how = "expected aiodist.init(elastic=True) under aiodist run --elastic MIN:MAX"
            raise ConfigError(f"communicator {comm.name!r} is not elastic: {how}")
        return self.elastic.regroup(comm, joiners, timeout)

    # --- the selector ----------------------------------------------------------------------------------------

    def edit(self, comm: C, edit: Edit) -> Handle[None]:
        """Edit the tables of `comm` and of its descendants. Return the handle of the comparison."""
        handle = upkeep_of(comm).compare_edit(edit)
        upkeep_of(comm).apply_edits([edit])
        self._edits.setdefault(comm.name, []).append(edit)
        for member in [c for c in self.members.open if c.name.startswith(f"{comm.name}/")]:
            self._edits.setdefault(member.name, []).append(edit)
            with suppress(AiodistError):  # the member was aborted
                upkeep_of(member).compare_edit(edit)
            upkeep_of(member).apply_edits([edit])
        return handle

    # --- making ----------------------------------------------------------------------------------------------

    def derive(self, parent: C, kind: str, ranks: Sequence[int], *, thread: bool = False) -> Handle[C]:
        """Return the handle of a communicator among `ranks` of `parent`, the same list on all ranks of `parent`.

        True for `thread` allows calls of other threads of this rank. Ranks may choose this differently.
        """
        agreed = parent.allgather(torch.tensor([kind == "dup", *ranks], device="cpu"))
        name = self.next_name(parent, kind)

        def join(table: list[torch.Tensor]) -> Coroutine[Any, Any, C]:
            said = [
                f"{'dup' if is_dup else 'group'} of {members}" for is_dup, *members in map(torch.Tensor.tolist, table)
            ]
            if len(set(said)) > 1:
                raise MismatchError(disagreement(repr(name), said))
            return self.join(parent, name, tuple(ranks), kind != "dup", thread=thread)

        return self.later(parent, kind, agreed, join)

    def split(self, parent: C, color: int | None, key: int) -> Handle[C]:
        """Return the handle of the communicator of `parent`'s ranks that gave the same `color`."""
        agreed = parent.allgather(torch.tensor([color is None, color or 0, key], device="cpu"))
        name = self.next_name(parent, "split")

        def join(table: list[torch.Tensor]) -> Coroutine[Any, Any, C]:
            rows = [row.tolist() for row in table]
            group = sorted((row[2], rank) for rank, row in enumerate(rows) if row[:2] == rows[parent.rank][:2])
            ranks = () if color is None else tuple(rank for _, rank in group)
            return self.join(parent, name, ranks, shared=True)

        return self.later(parent, "split", agreed, join)

    def later(
        self, parent: C, kind: str, agreed: Handle[Any], join: Callable[[Any], Coroutine[Any, Any, T]]
    ) -> Handle[T]:
        """Return a handle that a task of the loop settles, since the native calls that make communicators block.

        The task first awaits `agreed`, the collective that the call has issued.
        """
        dispatcher = parts_of(parent).dispatcher
        operation: Operation[T] = Operation(
            dispatcher.progress, kind, agreed.seq, origin=Origin.here(3), account=dispatcher.account, polled=False
        )
        handle = operation.handle
        operation.set_late(partial(internals.late_ranks, agreed))
        dispatcher.set_deadline(handle, None)
        origin = made_by_program(handle.origin)
        # Messages are not awaited, since the other rank may send or receive only after the making of this communicator.
        earlier = [
            pending for pending in dispatcher.lifetime.pending_collectives() if not internals.is_detached(pending)
        ]

        async def make() -> None:
            try:
                while internals.is_pending(agreed):
                    with suppress(OperationTimeout):  # `handle` has the same deadline, and reports that deadline
                        await agreed
                table = agreed.result()
                if earlier:
                    await all_over(earlier, dispatcher.progress.loop)
                try:
                    made = await join(table)
                except BackendError as error:  # the error may follow from the loss of a rank
                    raise await dispatcher.failures.cause(error) from error.__cause__
                self.members.note_origin(made, origin)
                operation.resolve(made)
            except BaseException as error:  # noqa: BLE001  - the error belongs to the task that awaits the handle
                agreed.detach()
                fail(error)

        def fail(error: BaseException) -> None:
            why = dispatcher.lifetime.refusal if isinstance(error, asyncio.CancelledError) else None
            operation.reject(again(why) if isinstance(why, AiodistError) else error)

        task = asyncio.get_running_loop().create_task(make(), name=f"{parent.name}: {kind}")
        self._tasks.add(task)
        dispatcher.progress.carry_out(handle, task)

        def on_abort(_: AiodistError) -> None:
            task.cancel()

        def on_done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            dispatcher.lifetime.on_abort.remove(on_abort)
            if task.cancelled():  # before the start of the task
                agreed.detach()
                fail(asyncio.CancelledError())

        dispatcher.lifetime.on_abort.append(on_abort)
        task.add_done_callback(on_done)
        return handle

    def next_name(self, parent: C, kind: str) -> str:
        """Return a name for a descendant of `parent`, equal on all ranks if the order of descendants is equal."""
        number = self._children[parent.name] = self._children.get(parent.name, 0) + 1
        name = f"{parent.name}/{kind}{number}"
        self._edits_before[name] = len(self._edits.get(parent.name, ()))
        return name

    async def among(self, parent: C, name: str, ranks: Sequence[int]) -> C:
        """Return a communicator of `ranks` of `parent` that other threads may use. Only these ranks make this call.

        All give the same `name`, which is unique below `parent`.
        """
        path = f"{parent.name}/{name}"
        self._edits_before[path] = len(self._edits.get(parent.name, ()))
        return await self.join(parent, path, tuple(ranks), shared=False, thread=True)

    async def join(
        self,
        parent: C,
        name: str,
        ranks: tuple[int, ...],
        shared: bool,
        levels: Levels | None = None,
        *,
        thread: bool = False,
    ) -> C:
        """Return the communicator among `ranks` of `parent`. A `shared` communicator is made once."""
        if parent.rank not in ranks:
            return self._outside(name, len(ranks))
        key = (parent.name, ranks, levels)
        known = self._shared.get(key)
        if shared and known is not None and known in self.members.open:
            return known
        before = self._edits_before[_issued_as(name)]
        name = f"{name}.{ranks[0]}"
        transport = await parts_of(parent).transport.split(ranks, name)
        world_ranks = [parts_of(parent).dispatcher.ranks[rank] for rank in ranks]
        table = parts_of(parent).repertoire.table
        made = self._communicator(name, transport, world_ranks, parent.topology.among(ranks), table, thread=thread)
        parts_of(made).dispatcher.large_bytes = table.limits["large_bytes"]
        # Edits since the call, since on other ranks the communicator may have existed before these edits.
        for edit in self._edits.get(parent.name, [])[before:]:
            self._edits.setdefault(made.name, []).append(edit)
            upkeep_of(made).compare_edit(edit)
        upkeep_of(made).set_levels(levels, (parent, ranks))
        if shared:
            self._shared[key] = made
        return made

    def _outside(self, name: str, size: int) -> C:
        error = CommunicatorError(f"this rank is outside communicator {name!r}")
        unused = LocalTransport(LocalHub(), -1, size, name="none")
        return self._make(Dispatcher.refusing(name, unused, self._channel, error), None, self)

    # --- closing -----------------------------------------------------------------------------------------------

    async def close(self, communicator: C) -> None:
        """Close the descendants of `communicator`, then `communicator`, within `drain_seconds` in all.

        Waits for communicators that another task closes. A communicator that is not closed in time raises
        `OperationTimeout` with its pending operations, and is aborted.
        """
        refusal = parts_of(communicator).dispatcher.lifetime.refusal
        if isinstance(refusal, RuntimeError):  # a forked child, which owns nothing
            raise refusal
        until = loop_time(asyncio.get_running_loop()) + self._drain_seconds
        if self._tasks:
            await wait_within(self._tasks, self._drain_seconds)
        try:
            await self.members.close(communicator, until)
        finally:
            self._shared = {key: made for key, made in self._shared.items() if made in self.members.open}

    async def abort(self, error: AiodistError) -> None:
        """Abort everything, since the program failed."""
        for task in self._tasks:
            task.cancel()
        await self.members.abort(error)

    async def close_memory(self) -> None:
        """Release the memory and devices of other ranks, after every communicator is closed or aborted."""
        on_broken = self.resources.progress.on_broken
        if self.members.broken in on_broken:  # the first call
            on_broken.remove(self.members.broken)
            await self.resources.close()


def _issued_as(name: str) -> str:
    """Return the name of the call that makes the communicator. A hierarchy makes several communicators.

    >>> _issued_as("world/dup1.0/hierarchy1.intra2")
    'world/dup1.0/hierarchy1'
    """
    path, _, last = name.rpartition("/")
    return f"{path}/{last.partition('.')[0]}"
