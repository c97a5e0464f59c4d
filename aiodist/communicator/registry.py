"""The communicators of one `init`: created from one another, notified of lost ranks, closed in reverse order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from types import CodeType
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch

from aiodist.backends.base import Transport, again, ours
from aiodist.backends.local import LocalHub, LocalTransport
from aiodist.backends.shm import Lanes, Neighbourhood, ShmNative
from aiodist.collectives.choice.table import Edit, Table
from aiodist.collectives.cuda.accelerator import Accelerator
from aiodist.collectives.implementations import Repertoire
from aiodist.communicator.agreement import Agreement, Dissemination
from aiodist.communicator.base import WaitingCall, parts_of, upkeep_of
from aiodist.communicator.conversation import LIVENESS_SECONDS
from aiodist.communicator.dispatcher import Dispatcher
from aiodist.communicator.leftovers import made_by_program, unreceived, warn_of_open
from aiodist.communicator.movement import Movement
from aiodist.communicator.operation import CommunicatorOperation
from aiodist.control.generations import Generation
from aiodist.errors import (
    AiodistError,
    BackendError,
    CommunicatorAborted,
    CommunicatorClosed,
    CommunicatorError,
    ConfigError,
    MismatchAborted,
    MismatchError,
    OperationTimeout,
)
from aiodist.handles import Handle, Operation, Origin, Progress, internals
from aiodist.handles.combinators import all_over
from aiodist.handles.polling import transport_lock
from aiodist.handles.state import plight

if TYPE_CHECKING:
    from anyio.from_thread import BlockingPortal

    from aiodist.communicator.levels import Levels
    from aiodist.control import Channel, Exit
    from aiodist.topology import Topology

T = TypeVar("T")

DRAIN_SECONDS = 30.0
"""Longest wait at the close for operations in flight, in seconds."""


class Guest(Protocol):
    """An object on a communicator that must end before it: a training net, a parameter server."""

    async def close(self) -> None:
        """End in order; all ranks do so at the same time."""

    def abort(self) -> None:
        """End without waiting, after a failure of this program or of another rank."""


class OpenBlock(Protocol):
    """The world of `open()`, which has no `async with` block."""

    async def aclose(self) -> None:
        """End the world in order."""

    async def was_forgotten(self) -> bool:
        """Return True if the program has not closed it before the end of the loop or the process."""

    def follow(self, registry: Any) -> None:  # noqa: ANN401
        """Use `registry`, which has the next generation of the world."""


class ElasticJob(Protocol):
    """The transition to the next generation of the world."""

    def regroup(self, comm: Any, joiners: int, timeout: float | None) -> Handle[Any]:  # noqa: ANN401
        """See `Communicator.shrink` and `grow`."""

    @property
    def current(self) -> Any:  # noqa: ANN401
        """The newest world."""


C = TypeVar("C", bound=Movement)


class Registry(Generic[C]):
    """All open communicators of one rank."""

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
        """`near` are the ranks of this host that share memory with this one; `alone` is the reason if there are none.

        `sharing` are all groups of ranks that share memory; a rank in none of them shares none.
        """
        self._channel = channel
        self._make = make
        self.generation = generation or Generation(0, (None,) * channel.size)
        """Generation of this world; the first one if it is not elastic."""
        self.elastic: ElasticJob | None = None
        """Transition to the next generation; None if the world is not elastic."""
        self.near = near
        """The ranks of this host, and this rank's memory that they can map."""
        self.lanes = Lanes(Progress.current(), near) if near is not None else None
        self.alone = alone
        """Reason why no other rank shares memory with this one."""
        self._sharing = sharing
        self.accelerator: Accelerator | None = None
        """CUDA resources of this rank; None if no rank has a CUDA device."""
        self._edits: dict[str, list[Edit]] = {}
        self._edits_before: dict[str, int] = {}
        self._timeout = timeout
        self._drain_seconds = drain_seconds
        self._open: list[C] = []
        self._closing: dict[C, asyncio.Future[None]] = {}
        """Futures that are done when the communicator is closed."""
        self.closed_at: tuple[CodeType, int] | None = None
        """Line of the program that closes the world, if its loop runs in another thread; None else."""
        self.kept: OpenBlock | None = None
        """The world of `aiodist.open`, which a close of the world ends; None else."""
        self.portal: BlockingPortal | None = None
        """Portal to the loop's thread, if `aiodist.start` opened the world; threads may then use all communicators."""
        self.stop_requested = False
        """True if this rank was asked to stop, and asks all others; any thread may set it, and it is never cleared."""
        self.waited: dict[str, WaitingCall] = {}
        """Waits of the ranks, by communicator, if they are measured."""
        self.on_open: list[Callable[[Dispatcher], None]] = []
        """Callbacks with the dispatcher of each new communicator."""
        self._shared: dict[tuple[str, tuple[int, ...], Levels | None], C] = {}
        self._children: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._guests: dict[C, list[Guest]] = {}
        self._made: dict[C, Origin] = {}
        """Lines of the program that made communicators; aiodist's own communicators have no entry."""
        self.unreceived: list[str] = []
        """Unreceived messages from or to this rank, on closed communicators."""
        self._progress = Progress.current()
        self._progress.on_broken.append(self._broken)

    @property
    def channel(self) -> Channel:
        """The control channel, which carries small messages between ranks, also while their programs compute."""
        return self._channel

    @property
    def dispatchers(self) -> list[Dispatcher]:
        """Dispatchers of the communicators that are not closed."""
        return [parts_of(communicator).dispatcher for communicator in (*self._open, *self._closing)]

    def fail(self, why: str) -> None:
        """Notify the other ranks that this one fails."""
        self._channel.fail(why)

    def world(self, transport: Transport, topology: Topology, *, thread: bool = False) -> C:
        """Return the first communicator, over all ranks; `thread`: other threads may use it too."""
        if topology.devices:
            self.accelerator = Accelerator(
                Progress.current(),
                self._channel,
                self._device_failed,
                direct="cuda" in transport.capabilities().devices,
            )
        world = self._communicator("world", transport, range(transport.size), topology, thread=thread)
        self._channel.on_lost(lambda exit: parts_of(world).dispatcher.progress.post(lambda: self._lost(exit)))
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
        repertoire = self._repertoire(name, transport, ranks, topology, table)
        agree = partial(self._agreement, transport, ranks, repertoire.within) if transport.size > 1 else None
        thread = thread or self.portal is not None
        dispatcher = Dispatcher(
            name, transport, self._channel, ranks, repertoire=repertoire, agree=agree, thread=thread
        )
        dispatcher.timeout = self._timeout
        if self.accelerator is not None:
            dispatcher.on_abort.append(partial(self.accelerator.abort, name))
            dispatcher.mailbox.device_messages = self.accelerator.device_messages
        made = self._make(dispatcher, topology, self)
        self._open.append(made)
        for call in list(self.on_open):
            call(dispatcher)
        return made

    def _repertoire(
        self, name: str, transport: Transport, ranks: Sequence[int], topology: Topology | None, table: Table | None
    ) -> Repertoire:
        """Return the repertoire of a new communicator."""
        hosts = [] if topology is None else [topology.ranks_on(host) for host in topology.hosts]
        mine = self.accelerator
        cuda = "there is no CUDA device here" if mine is None else mine.kit(name, ranks, topology)
        within = self._shared_memory(name, ranks)
        return Repertoire(transport, table, hosts=hosts, within=within, alone=self.alone, cuda=cuda)

    def _shared_memory(self, name: str, ranks: Sequence[int]) -> ShmNative | None:
        """Return the collectives among those of `ranks` that share memory, if this rank is not the only one."""
        if self.near is None or self.lanes is None:
            return None
        here = [rank for rank in ranks if rank in self.near.members]
        if len(here) == 1:
            return None
        with transport_lock:  # the progress thread, which polls other lanes, may send to a neighbour too
            return ShmNative(self.lanes, name, here, here.index(self.near.rank))

    def _agreement(
        self,
        transport: Transport,
        ranks: Sequence[int],
        within: ShmNative | None,
        on_differ: Callable[[CommunicatorOperation], None],
        broken: Callable[[BaseException], None],
    ) -> Agreement:
        """Return the agreement of a communicator of these world ranks; `within` is their shared memory on this host."""
        leaders = self._leaders(ranks)
        several = len(leaders) > 1
        between = Dissemination(transport, leaders, broken) if several and transport.rank in leaders else None
        lane = verdicts = None
        if within is not None:
            lane = within.ordered
            if several:
                with transport_lock:
                    verdicts = within.open("verdicts")
        return Agreement(Progress.current(), lane, verdicts, between, several=several, on_differ=on_differ)

    def _leaders(self, ranks: Sequence[int]) -> list[int]:
        """Return the first rank, in the communicator, of each group of `ranks` that share memory."""
        group_of = {rank: group[0] for group in self._sharing for rank in group}
        first: dict[int, int] = {}
        for number, rank in enumerate(ranks):
            first.setdefault(group_of.get(rank, rank), number)
        return list(first.values())

    def _release(self, communicator: C) -> None:
        """Release the shared memory of a communicator without operations in flight."""
        dispatcher = parts_of(communicator).dispatcher
        why = dispatcher.refusal or CommunicatorClosed(f"communicator {dispatcher.name!r} is closed")
        with transport_lock:
            dispatcher.names.close(why)
            if dispatcher.agreement is not None:
                dispatcher.agreement.close(why)
            if (within := dispatcher.repertoire.within) is not None:
                within.abort(why)

    async def close_memory(self) -> None:
        """Close the mappings of the other ranks' memory, after every communicator was closed or aborted."""
        if self._broken not in self._progress.on_broken:  # the second call
            return
        self._progress.on_broken.remove(self._broken)
        try:
            if self.accelerator is not None:
                await self.accelerator.aclose()
        finally:
            if self.near is not None and self.lanes is not None:
                with transport_lock:  # excludes polls
                    self.lanes.close()
                    self.near.close()

    def _device_failed(self, name: str, error: AiodistError) -> None:
        """Abort the communicator on all ranks: the others may wait for this one on the device."""
        for communicator in (*self._open, *self._closing):
            if communicator.name == name:
                parts_of(communicator).dispatcher.abort_everywhere(error)

    def _broken(self, error: Exception) -> None:
        """Abort all communicators on all ranks, since this rank's operations no longer make progress."""
        for communicator in (*self._open, *self._closing):
            parts_of(communicator).dispatcher.abort_everywhere(ours(error))

    def _lost(self, exit: Exit) -> None:
        for communicator in (*self._open, *self._closing):
            if exit.rank < 0 or exit.rank in parts_of(communicator).dispatcher.ranks:
                parts_of(communicator).dispatcher.peer_lost(exit)

    # --- generations -----------------------------------------------------------------------------------------

    def regroup(self, comm: C, joiners: int, timeout: float | None) -> Handle[C]:
        """Return the handle of the next generation's world; raise ConfigError if this one is not elastic."""
        if self.elastic is None:
            how = "expected aiodist.init(elastic=True) under aiodist run --elastic MIN:MAX"
            raise ConfigError(f"communicator {comm.name!r} is not elastic: {how}")
        return self.elastic.regroup(comm, joiners, timeout)

    # --- guests ----------------------------------------------------------------------------------------------

    def admit(self, communicator: C, guest: Guest) -> None:
        """Close `guest` before `communicator` is closed, or abort it when that is aborted."""
        parts_of(communicator).dispatcher.check_usable()
        self._guests.setdefault(communicator, []).append(guest)

    def discard(self, communicator: C, guest: Guest) -> None:
        """Forget `guest`, which has ended before."""
        with suppress(ValueError):
            self._guests.get(communicator, []).remove(guest)

    # --- the selector ----------------------------------------------------------------------------------------

    def edit(self, comm: C, edit: Edit) -> Handle[None]:
        """Edit the tables of `comm` and of its descendants; return the handle of the comparison."""
        handle = upkeep_of(comm).compare_edit(edit)
        upkeep_of(comm).apply_edits([edit])
        self._edits.setdefault(comm.name, []).append(edit)
        for member in [c for c in self._open if c.name.startswith(f"{comm.name}/")]:
            self._edits.setdefault(member.name, []).append(edit)
            with suppress(AiodistError):  # it was aborted
                upkeep_of(member).compare_edit(edit)
            upkeep_of(member).apply_edits([edit])
        return handle

    # --- making ----------------------------------------------------------------------------------------------

    def derive(self, parent: C, kind: str, ranks: Sequence[int], *, thread: bool = False) -> Handle[C]:
        """Return the handle of a communicator among `ranks` of `parent`, the same list on all ranks of `parent`.

        `thread`: other threads of this rank may use it too; ranks may choose this differently.
        """
        agreed = parent.allgather(torch.tensor([kind == "dup", *ranks], device="cpu"))
        name = self.next_name(parent, kind)

        def join(table: list[torch.Tensor]) -> Coroutine[Any, Any, C]:
            wanted = {rank: row.tolist() for rank, row in enumerate(table)}
            other = next((rank for rank, row in wanted.items() if row != wanted[0]), 0)
            if other:
                kinds = {r: "dup" if wanted[r][0] else "group" for r in (0, other)}
                sides = "; ".join(f"rank {r}: {kind} of {wanted[r][1:]}" for r, kind in kinds.items())
                raise MismatchError(f"ranks disagree on {name!r}: {sides}")
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
        self,
        parent: C,
        kind: str,
        agreed: Handle[Any],
        join: Callable[[Any], Coroutine[Any, Any, T]],
    ) -> Handle[T]:
        """Return a handle that a task of the loop settles: the native calls that make communicators block."""
        dispatcher = parts_of(parent).dispatcher
        operation: Operation[T] = Operation(
            dispatcher.progress, kind, agreed.seq, origin=Origin.here(3), account=dispatcher.account, polled=False
        )
        handle = operation.handle
        operation.set_late(partial(internals.late_ranks, agreed))
        dispatcher.set_deadline(handle, None)
        origin = made_by_program(handle.origin)
        # Messages are not awaited: the other rank may send or receive one only after it has made this communicator.
        earlier = [pending for pending in dispatcher.pending_collectives() if not internals.is_detached(pending)]

        async def make() -> None:
            try:
                while internals.is_pending(agreed):
                    with suppress(OperationTimeout):  # `handle` has the same deadline, and reports it
                        await agreed
                table = agreed.result()
                if earlier:
                    await all_over(earlier, dispatcher.progress.loop)
                try:
                    made = await join(table)
                except BackendError as error:  # it may follow from the loss of a rank
                    raise await dispatcher.failures.cause(error) from error.__cause__
                self._note(made, origin)
                operation.resolve(made)
            except BaseException as error:  # noqa: BLE001  - it belongs to the task that awaits the handle
                agreed.detach()
                fail(error)

        def fail(error: BaseException) -> None:
            why = dispatcher.refusal if isinstance(error, asyncio.CancelledError) else None
            operation.reject(again(why) if isinstance(why, AiodistError) else error)

        task = asyncio.get_running_loop().create_task(make(), name=f"{parent.name}: {kind}")
        self._tasks.add(task)
        dispatcher.progress.carry_out(handle, task)

        def on_abort(_: AiodistError) -> None:
            task.cancel()

        def on_done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            dispatcher.on_abort.remove(on_abort)
            if task.cancelled():  # before it began
                agreed.detach()
                fail(asyncio.CancelledError())

        dispatcher.on_abort.append(on_abort)
        task.add_done_callback(on_done)
        return handle

    def _note(self, made: object, origin: Origin | None) -> None:
        for communicator in self._open if origin is not None else ():
            if communicator is made and origin is not None:
                self._made.setdefault(communicator, origin)

    def next_name(self, parent: C, kind: str) -> str:
        """Return a name for a descendant of `parent`; equal on all ranks, which make them in the same order."""
        number = self._children[parent.name] = self._children.get(parent.name, 0) + 1
        name = f"{parent.name}/{kind}{number}"
        self._edits_before[name] = len(self._edits.get(parent.name, ()))
        return name

    async def among(self, parent: C, name: str, ranks: Sequence[int]) -> C:
        """Return a communicator of `ranks` of `parent` that other threads may use; only these ranks call it.

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
        """Return the communicator among `ranks` of `parent`; a `shared` one is made once. See `Base.levels`."""
        if parent.rank not in ranks:
            return self._outside(name, len(ranks))
        key = (parent.name, ranks, levels)
        if shared and key in self._shared:
            return self._shared[key]
        before = self._edits_before[_issued_as(name)]
        name = f"{name}.{ranks[0]}"
        transport = await parts_of(parent).transport.split(ranks, name)
        world_ranks = [parts_of(parent).dispatcher.ranks[rank] for rank in ranks]
        table = parts_of(parent).repertoire.table
        made = self._communicator(name, transport, world_ranks, parent.topology.among(ranks), table, thread=thread)
        parts_of(made).dispatcher.large_bytes = table.limits["large_bytes"]
        # Edits since the call that makes it: on other ranks it may have existed before them.
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
        """Close the descendants of `communicator`, then itself, within `drain_seconds` in total.

        It waits for communicators that another task is closing. Raises `OperationTimeout` with the operations that are
        still pending, and aborts that communicator.
        """
        refusal = parts_of(communicator).dispatcher.refusal
        if isinstance(refusal, RuntimeError):  # a forked child, which owns no communicator
            raise refusal
        until = asyncio.get_running_loop().time() + self._drain_seconds
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._drain_seconds)
        # By name, since tasks may make communicators in another order on each rank. "a/b" sorts after "a".
        all_here, path = (*self._open, *self._closing), f"{communicator.name}/"
        below = [c for c in all_here if c is communicator or c.name.startswith(path)]
        if communicator.name == "world":
            warn_of_open((c.name, self._made[c]) for c in below if c in self._made and c in self._open)
        for member in sorted(below, key=lambda c: c.name, reverse=True):
            await self._close(member, until)

    async def _close(self, communicator: C, until: float) -> None:
        if (closed := self._closing.get(communicator)) is not None:
            await self._closed(communicator, closed, until)
        if communicator not in self._open:
            return
        self._open.remove(communicator)
        self._made.pop(communicator, None)
        closed = self._closing[communicator] = (
            asyncio.get_running_loop().create_future()
        )  # `_lost` still reports lost ranks to it
        self._shared = {key: made for key, made in self._shared.items() if made is not communicator}
        dispatcher = parts_of(communicator).dispatcher
        drained = False
        guests = self._guests.pop(communicator, [])
        try:
            while guests:
                await self._close_guest(guests[-1], communicator, until)
                guests.pop()
            dispatcher.cancel_receives()
            if dispatcher.refusal is None:
                if dispatcher.issuing is not None:  # calls of other threads would disturb the last ones
                    name = dispatcher.name
                    dispatcher.issuing.close(CommunicatorClosed(f"communicator {name!r} is being closed", comm=name))
                await dispatcher.drain(self._left(until))
                mismatch = await self._meet(communicator, until)
                await parts_of(communicator).messenger.part(self._left(until))
                self.unreceived += await unreceived(communicator, self._left(until))
                drained = True
                if mismatch is not None:
                    raise mismatch
                if communicator.name == "world" and self.unreceived:
                    raise MismatchError("; ".join(self.unreceived), rank=communicator.rank, comm=communicator.name)
        except BaseException as error:
            for guest in reversed(guests):
                guest.abort()
            failure = CommunicatorAborted(f"closing communicator {communicator.name!r} failed: {error!r}")
            dispatcher.abort_soon(error if isinstance(error, AiodistError) else failure, tell=not drained)
            raise
        finally:
            try:
                await self._release_all(communicator, drained=drained)
            finally:
                del self._closing[communicator]
                closed.set_result(None)

    async def _release_all(self, communicator: C, *, drained: bool) -> None:
        try:
            parts_of(communicator).dispatcher.close()
        finally:  # a warning may be raised as an error
            self._release(communicator)
            if self.accelerator is not None:
                await self.accelerator.release(communicator.name, drained=drained)
            await parts_of(communicator).transport.aclose(drained=drained)

    async def _closed(self, communicator: C, closed: asyncio.Future[None], until: float) -> None:
        """Wait until another task has closed it; that task raises the errors."""
        if not closed.done():
            await asyncio.wait([closed], timeout=self._left(until))
        if not closed.done():
            text = f"communicator {communicator.name!r} is still being closed by another task"
            raise OperationTimeout(text, comm=communicator.name, op="aclose")

    async def _meet(self, communicator: C, until: float) -> MismatchError | None:
        """Run a last barrier; return the mismatch if another rank had one more call before its own close."""
        dispatcher = parts_of(communicator).dispatcher
        if self.closed_at is not None:
            dispatcher.oplog.caller = self.closed_at
        try:
            await dispatcher.barrier(self._left(until), "close")
        except MismatchAborted:
            raise
        except MismatchError as error:
            await self._meet(communicator, until)  # the third mismatch in a row aborts the communicator
            return error
        return None

    async def _close_guest(self, guest: Guest, communicator: C, until: float) -> None:
        try:
            async with asyncio.timeout_at(until):
                await guest.close()
        except TimeoutError:
            all_here = (*self._open, *self._closing)
            known, late = plight([handle for one in all_here for handle in parts_of(one).dispatcher.pending()])
            text = f"{guest}, which all ranks close together, did not end in time{known}"
            raise OperationTimeout(text, late=late, comm=communicator.name, op="aclose") from None

    def _left(self, until: float) -> float:
        return max(0.0, until - asyncio.get_running_loop().time())

    def supersede(self, error: CommunicatorAborted) -> None:
        """Abort all communicators with `error`, on all ranks: the ranks continue in another world.

        Operations that failed by the loss of a rank keep their error.
        """
        for communicator in list(self._open):
            parts_of(communicator).dispatcher.supersede(error)

    def abort_rest(self, error: AiodistError) -> None:
        """Abort the remaining communicators, on this rank."""
        for communicator in (*self._open, *self._closing):
            if parts_of(communicator).dispatcher.refusal is None:
                parts_of(communicator).dispatcher.abort(error)

    async def abort(self, error: AiodistError) -> None:
        """Abort everything without waiting, after a failure of the program."""
        for task in self._tasks:
            task.cancel()
        aborted, self._open = self._open[::-1], []
        for communicator in self._closing:
            parts_of(communicator).dispatcher.abort(error)
        if self._closing:  # other tasks close these; the abort ends them
            await asyncio.wait(self._closing.values(), timeout=LIVENESS_SECONDS)
        for communicator in aborted:
            parts_of(communicator).dispatcher.account.forgiven = (CommunicatorAborted,)
            parts_of(communicator).dispatcher.abort(error)
            parts_of(communicator).dispatcher.unsubscribe()
            for guest in reversed(self._guests.pop(communicator, [])):
                guest.abort()
        for communicator in aborted:
            self._release(communicator)
            with suppress(OSError):
                await parts_of(communicator).transport.aclose(drained=False)


def _issued_as(name: str) -> str:
    """Return the name of the call that makes the communicator; a hierarchy makes several communicators.

    >>> _issued_as("world/dup1.0/hierarchy1.intra2")
    'world/dup1.0/hierarchy1'
    """
    path, _, last = name.rpartition("/")
    return f"{path}/{last.partition('.')[0]}"
