"""Defines `Communicator`, with the collectives and messages of a group of ranks.

A call checks its arguments and issues the operation. An await of the handle completes the operation. Every rank must
issue the same collectives in the same order, except named ones. The algorithms are in `aiodist.collectives`.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar, overload

from aiodist.communicator.arguments import check_int64, check_rank
from aiodist.communicator.base import parts_of, upkeep_of
from aiodist.communicator.dispatcher import Dispatcher
from aiodist.communicator.elsewhere import Elsewheres, shown
from aiodist.communicator.group import CommunicatorStatistics
from aiodist.communicator.levels import (
    Asked,
    Form,
    Group,
    Levels,
    checked_form,
    checked_key,
    forms_of,
    keys_of,
    splits_of,
)
from aiodist.communicator.movement import Movement
from aiodist.communicator.objects import Objects
from aiodist.communicator.reductions import Reductions
from aiodist.communicator.registry import Registry
from aiodist.communicator.shared import SharedMemoryCalls
from aiodist.errors import CommunicatorAborted
from aiodist.handles import Handle, Origin
from aiodist.handles.calls import located
from aiodist.topology import Topology

__all__ = ["Communicator", "CommunicatorStatistics", "Hierarchy", "Level", "parts_of", "root_levels", "upkeep_of"]

T = TypeVar("T")


class Communicator(SharedMemoryCalls, Reductions, Movement, Objects, Elsewheres):
    """A group of ranks that communicate. Get the first one from `aiodist.init`, `aiodist.open` or `aiodist.start`.

    | call | returns | writes |
    |---|---|---|
    | `allreduce`, `scan`, `exscan` | `t`, or `out` | `t`, or `out` |
    | `broadcast` | `t` | `t`, except on root |
    | `reduce` | on root `t` or `out`, elsewhere None | on root `t`, or `out` |
    | `allgather` | all blocks, as a list or in `out` | new memory, or `out` |
    | `gather` | on root as `allgather`, elsewhere None | new memory, or `out` |
    | `scatter`, `reduce_scatter` | this rank's block | new memory, or `out` |
    | `alltoall` | a list of the blocks from each rank | new memory, or the tensors of `out` |
    | `alltoall_single` | the rows from all ranks, in rank order | new memory, or `out` |
    | `recv`, `sendrecv` | `t`, `out`, or a new tensor | `t`, `out`, or new memory |
    | `send`, `barrier` | None | nothing |
    | `*_object` | Python objects | new objects |

    Each of these calls returns a `Handle`. The operation starts at the call, and `await` gives its result.

    ```python
    t = torch.ones(4)
    handle = coll.allreduce(t)  # the sum over all ranks, in place
    await handle
    print(coll.rank, t[0])
    ```

    Every rank calls the same collectives in the same order, with the same arguments. The docstring of a call says which
    tensors and sizes may differ. Tensors are dense, contiguous, and on the CPU or a CUDA device. Tensors have any
    shape, also with 0 elements, unless a call names a shape. `timeout` is in seconds from the call. `impl` names an
    implementation, or is "auto" to choose by the table of `selector`.

    `name` frees a collective from the order: the k-th call with a name matches the k-th call with that name on the
    other ranks. So several tasks can share a communicator, each with separate names. Use few names, again and again,
    since a communicator keeps about 5 KB for each name and takes 65,535 names. Names work for tensors on the CPU, but
    not with `impl="mpi"` or "gloo". A call raises ValueError while the last operation of its name is in flight on this
    rank. A `MismatchError` of a name writes nothing. The name stays usable. A name costs a comparison of all ranks, by
    log2(p) messages of 9 bytes. The first use also asks rank 0. `seq` of the handle counts the uses of the name.

    A communicator belongs to the event loop that opened it, and is called on the thread of that loop. Other threads may
    call a communicator made by `dup(thread=True)`, `init(thread=True)` or `start` too.

    Raises:
        TypeError: at the call, for arguments of a wrong type. Nothing has been sent.
        ValueError: at the call, for arguments of a wrong value.
        BufferInFlight: at the call, if another operation uses the tensor.
        RuntimeError: at the call, on another thread or event loop.
        CommunicatorClosed: at the call, after the communicator was closed.
        CommunicatorAborted: at the call or on await, after the communicator was aborted.
        MismatchError: on await, if the ranks called different operations.
        PeerError: on await, if a rank was lost or failed.
        OperationTimeout: on await, after `timeout` seconds. The operation continues.
        BackendError: on await, for an error that a library reports.

    The docstrings below list only further errors. In the costs, p is the number of ranks and n the bytes of a rank's
    tensor. Costs are those of messages, per rank. Within a host shared memory replaces messages. Between hosts every
    rank, or the first of each host, takes part for its host (see the page Algorithms).
    """

    _registry: Registry[Communicator]

    def __init__(self, dispatcher: Dispatcher, topology: Topology | None, registry: Registry[Communicator]) -> None:
        super().__init__(dispatcher, topology, registry.resources, registry.edit)
        self._registry = registry

    # --- other communicators --------------------------------------------------------------------------------

    def shrink(self, *, timeout: float | None = None) -> Handle[Communicator]:
        """Return the world of the live ranks, in their order, after all these ranks have made this call.

        For an elastic world (`init(elastic=True)`), after a rank was lost. If no rank was lost, the call aborts the
        world on all ranks, which then make this call too. From the call on, this world and all communicators made of
        this world raise CommunicatorAborted. The output of an operation that raised PeerLost is unspecified. If another
        rank dies meanwhile, the call starts again with the others. Cancelling the await changes nothing.

        Raises ConfigError unless the world is elastic. Raises CommunicatorError for a part of the world, and during
        another `shrink` or `grow`. Raises CommunicatorAborted for a world that was shrunk already. The await raises
        OperationTimeout with the ranks without this call (the operation continues), and MismatchError if other ranks
        call `grow`. Cost: that of `init`. Source: Bland et al. 2013, "Post-failure recovery of MPI communication
        capability", doi:10.1177/1094342013488238, as MPI_Comm_shrink.
        """
        return self._registry.regroup(self, 0, timeout)

    def grow(self, n: int = 1, *, timeout: float | None = None) -> Handle[Communicator]:
        """Return the world of these ranks and `n` new ones, when all of these ranks have made this call.

        The launcher starts the same program `n` times more. There `init(elastic=True)` returns the new world, with a
        `generation` above 0. The growth begins after all collectives issued here have finished. Messages that were not
        received are lost. From then on this world raises CommunicatorAborted, as after `shrink`.

        Raises as `shrink`, and ValueError for more ranks than the job may have (`aiodist run --elastic MIN:MAX`). The
        await raises PeerLost if a rank of this world dies. If a new rank dies before it has joined, the await raises
        LaunchError, and this world continues. Cost: the start of the program, and that of `init`.
        """
        if isinstance(n, bool) or not isinstance(n, int):
            raise TypeError(f"n is {type(n).__name__}: expected an int")
        if n < 1:
            raise ValueError(f"grow({n}): expected at least 1 rank")
        return self._registry.regroup(self, n, timeout)

    def dup(self, *, thread: bool = False) -> Handle[Communicator]:
        """Make a communicator of the same ranks with separate operations.

        Use one for a task that communicates often, since two tasks that call the same communicator would interleave
        differently on each rank. Every rank makes this call. The call begins after the operations in flight here,
        except messages and named operations.

        Args:
            thread: True lets other threads call collectives and messages of CPU tensors and objects. Threads may
                `wait()` for these even while the event loop is blocked. One thread calls at a time. All ranks see the
                order of the calls. Making and closing communicators stays on the thread of the event loop.

        Returns:
            The new communicator. Without `aclose()`, the world closes the communicator.

        Raises:
            RuntimeError: with `thread=True`, in the later of two calls at the same time. The error names both threads.

        Example:
            ```python
            metrics = await coll.dup()
            handle = metrics.allreduce(1.0)  # not in the order of coll's operations
            total = await coll.allreduce(2.0)
            count = await handle
            await metrics.aclose()
            ```

        Cost: the library's time for a new communicator, milliseconds.
        """
        return self._registry.derive(self, "dup", range(self.size), thread=thread)

    def group(self, ranks: Sequence[int]) -> Handle[Communicator]:
        """Make a communicator of some ranks, in the order given.

        Every rank of this communicator makes this call with the same list. A second call with the same ranks returns
        the same communicator, until that communicator is closed.

        Args:
            ranks: ranks of this communicator. Rank `ranks[i]` becomes rank i.

        Returns:
            The new communicator. Outside of the group `rank` is -1 and every call raises.

        Raises:
            ValueError: if a rank is out of range or occurs twice, or there is none.

        Example:
            ```python
            first = await coll.group(range((coll.size + 1) // 2))  # the first half
            if first.rank >= 0:
                total = await first.allreduce(1)
            ```

        Cost: that of `dup`.
        """
        wanted = [check_rank(rank, self.size, "ranks") for rank in ranks]
        if len(set(wanted)) != len(wanted) or not wanted:
            raise ValueError(f"ranks={wanted}: expected at least one rank, each once")
        return self._registry.derive(self, "group", wanted)

    def split(self, color: int | None = 0, key: int | None = None) -> Handle[Communicator]:
        """Make a communicator of the ranks that give the same color.

        Every rank makes this call. A second call returns the same communicator for the same ranks, until that
        communicator is closed.

        Args:
            color: ranks with the same color form a communicator, ranks with None form none.
            key: the order of the ranks in the new communicator. Equal keys are ordered by rank. None is this rank's
                number.

        Returns:
            The new communicator. With `color=None` the result has `rank` -1, and its calls raise.

        Raises:
            TypeError: if `color` or `key` is neither an int nor None.
            ValueError: if one of the two numbers does not fit into 64 bits.

        Example:
            ```python
            pairs = await coll.split(coll.rank // 2)  # ranks 0 and 1, ranks 2 and 3, and so on
            total = await pairs.allreduce(1)
            ```

        Cost: the colors and keys of all ranks to all, then that of `dup`.
        """
        color, key = check_int64(color, "color"), check_int64(key, "key")
        return self._registry.split(self, color, self.rank if key is None else key)

    def hierarchy(self, *keys: str, form: Form | None = None) -> Handle[Hierarchy]:
        """Return communicators of groups within groups: a level for each of `keys`, or by host (see `levels`).

        Level 0 is this communicator. Each level splits every group of the level above: equal keys form a group, keys
        sort as strings, ranks in a group by their rank here. A level has a communicator within each group. Another
        communicator joins the groups inside one group of the level above. `form` is the link of these groups:
        "cartesian" links the k-th rank of each group with the k-th of the others. "tree" links the first ranks. None is
        cartesian for groups of equal size, else tree. Cartesian for groups of unequal size becomes a tree, with a
        RuntimeWarning on rank 0 and the value of `Level.form`.

        Every rank makes this call with as many keys and the same `form`. The call begins after the operations in flight
        here. The communicators are made once for the same ranks and shared with `group`. Raises `MismatchError` on
        await if ranks differ, TypeError for a key that is no str. Cost: the keys of all ranks to all, then at most two
        communicators a level.
        """
        return _build(self, keys, form)

    # --- debugging ------------------------------------------------------------------------------------------

    def breakpoint(self, rank: int = 0) -> Coroutine[Any, Any, None]:
        """Stop all ranks at this line, and open pdb on `rank`. All ranks continue together after `c`.

        Every rank makes this call. At a prompt of pdb, the deadlines of all ranks of the job stand still, with the
        reports of late ranks and the search for deadlocks. They continue with the time that was left. The event loops
        of other ranks run meanwhile. pdb uses the terminal of `aiodist run`, or the standard input of a program alone.
        After `n` or `s` the other ranks continue too, and the job is held again at each prompt. `q` ends the job. If
        debugpy is attached to `rank`, it stops that rank in place of pdb.

        Args:
            rank: the rank with the debugger.

        Returns:
            A coroutine.

        Raises:
            ValueError: at the call, if `rank` is no rank of this communicator.
            ConfigError: on await, on all ranks, if `rank` has no terminal and no debugger is attached.
            SystemExit: on await, on all ranks, with exit code 1, after `q`.

        Example:
            ```python
            loss = await coll.allreduce(1.0, op="mean")
            if loss != loss:  # nan
                await coll.breakpoint()
            ```

        Cost: that of `allgather_object` and `broadcast_object`. The page "Debugger" has an example and the limits.
        """
        from aiodist.communicator.debugging import debug  # loads pdb

        return debug(self, check_rank(rank, self.size, "rank"), sys._getframe(1))

    # --- the end --------------------------------------------------------------------------------------------

    def abort(self, reason: str = "abort() was called") -> None:
        """Abort this communicator on all ranks.

        Pending operations and every later call raise CommunicatorAborted with `reason`.
        """
        error = CommunicatorAborted(f"communicator {self.name!r} was aborted: {reason}", comm=self.name, rank=self.rank)
        self._dispatcher.failures.tell_abort(str(error))
        self._dispatcher.lifetime.abort(error)

    @located
    async def aclose(self) -> None:
        """Close the communicator on all ranks: wait for the operations in flight, at most 30 s, then release all.

        Every rank makes this call. Receives that matched nothing are withdrawn, with a `ResourceWarning`. A message
        that no rank received is a `RuntimeWarning`. After 30 s the call raises `OperationTimeout` with the pending
        operations, and aborts the communicator. The cancellation of a closing task aborts the communicator on all ranks
        too. A second call waits for the first.

        The close of a world of `aiodist.open` ends all communicators made from that world, like the end of the block of
        `aiodist.init`.
        """
        if not isinstance(self._dispatcher.lifetime.refusal, RuntimeError):  # in a forked child no loop runs
            self._dispatcher.check_loop()
        kept = self._registry.kept
        if kept is None or self.name != "world":
            await self._registry.close(self)
        else:
            await kept.aclose()

    def __dir__(self) -> list[str]:
        return shown(super().__dir__())

    def __deepcopy__(self, memo: object) -> Communicator:
        """Return this communicator: a copy of a module communicates with the same ranks."""
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} cannot be pickled: save the state of its owner (a module's `state_dict`)")


@dataclass(frozen=True, repr=False)
class Level:
    """One level of a hierarchy, on this rank."""

    number: int
    """Number of the level, 0 for the whole communicator."""
    key: str
    """Key of this rank's group, or "" at level 0."""
    groups: tuple[Group, ...]
    """All groups of the level, as ranks of the hierarchy's communicator. See `Levels` for their order."""
    form: Form
    """Form of the links between the groups of the same parent: "cartesian" or "tree"."""
    intra: Communicator
    """Communicator of this rank's group."""
    inter: Communicator
    """Communicator of one rank of each group, in the order of the groups.

    Cartesian: the ranks with the same rank in `intra`. Tree: the first ranks, while every call of the other ranks
    raises.
    """

    def __repr__(self) -> str:
        return f"<Level {self.number} {self.key!r}: {len(self.groups)} groups, {self.form}>"


class Hierarchy(Sequence[Level]):
    """The levels of a communicator, from 0, the whole, to the last. Get one from `Communicator.hierarchy`.

    A hierarchy is immutable: `below` returns another one, which shares the communicators. These are closed with the
    hierarchy's communicator, or separately. A later call makes closed communicators again. `print` shows all levels.
    """

    def __init__(self, comm: Communicator, name: str, groups: Levels, levels: Sequence[Level]) -> None:
        self._comm = comm
        self._name = name
        self._groups = groups
        self._levels = tuple(levels)

    @property
    def comm(self) -> Communicator:
        """Communicator of the ranks of the hierarchy."""
        return self._comm

    @property
    def name(self) -> str:
        """Name in error messages, the same on all ranks."""
        return self._name

    @property
    def levels(self) -> Levels:
        """Groups of the levels, without communicators."""
        return self._groups

    def below(self, key: str, *, form: Form | None = None) -> Handle[Hierarchy]:
        """Return a hierarchy with a further level: the last groups, split by `key`. Arguments as of `hierarchy`."""
        keys = [*keys_of(self._groups), (checked_key(key, "key"),)]
        forms = [*forms_of(self._groups), checked_form(form)]
        return _make(self._comm, Asked("below", self._name, keys, forms), since=len(self))

    def span(self, outer: int = -2, inner: int = -1) -> Handle[Communicator]:
        """Return a communicator of this rank's group at level `outer`, whose own level has the groups at `inner`.

        Collectives of the span run among all ranks of one group at `outer`. Hierarchical collectives run first within
        the groups at `inner`, then between these groups, across any levels between. `levels` of the span are these two.
        `hierarchy()` of the span has communicators within the groups and across the groups. The default is the last two
        levels. Data-parallel groups inside a parameter server:

            h = await coll.hierarchy(str(coll.rank // 8), str(coll.node))
            net = await aiodist.nn.DataParallel.create(Net(), await h.span(1, 2))   # gradients: 8 ranks, by host
            servers = h[1].inter                                                    # parameters: group with group

        Collective over the hierarchy's communicator, with the same levels on every rank. The span is made once, as
        `group`. Raises ValueError unless `inner` is a level below `outer`. The await raises `MismatchError` if ranks
        disagree.
        """
        comm, spanned = self._comm, self._groups.span(outer, inner)
        low, high = self._groups.number(outer), self._groups.number(inner)
        asked = Asked(f"span({low}, {high})", self._name, keys_of(self._groups), forms_of(self._groups))

        async def join(name: str, table: list[Asked]) -> Communicator:
            splits_of(comm.name, table)
            registry: Registry[Communicator] = parts_of(comm).registry
            return await registry.join(comm, name, self._groups.group(low), shared=True, levels=spanned)

        return _issue(comm, "span", asked, join)

    @overload
    def __getitem__(self, index: int) -> Level: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Level]: ...

    def __getitem__(self, index: int | slice) -> Level | Sequence[Level]:
        return self._levels[index]

    def __len__(self) -> int:
        """Return the number of levels, with level 0."""
        return len(self._levels)

    def __str__(self) -> str:
        return f"{self._comm.name}: {self._groups}"

    def __repr__(self) -> str:
        return f"<Hierarchy {self.name!r} of {len(self)} levels, rank {self._comm.rank} of {self._comm.size}>"


def _build(comm: Communicator, given: Sequence[str], form: Form | None) -> Handle[Hierarchy]:
    """Return the handle of a hierarchy of `comm` with a level for each key, or with its own `levels`."""
    form = checked_form(form)
    if given:
        keys = [(checked_key(key, f"key {i}"),) for i, key in enumerate(given)]
        return _make(comm, Asked("hierarchy", "", keys, [form] * len(keys)))
    levels = comm.levels
    return _make(comm, Asked("hierarchy", "", keys_of(levels), [form or asked for asked in forms_of(levels)]))


async def root_levels(world: Communicator, make: Callable[[Communicator], Hierarchy | Awaitable[Hierarchy]]) -> None:
    """Build the levels of `world` by `make`, with the level by host below the last one.

    Raises TypeError unless `make` returns a hierarchy of `world`. Raises `MismatchError` if ranks disagree.
    """
    made = make(world)
    built: object = await made if inspect.isawaitable(made) else made
    if not isinstance(built, Hierarchy) or built.comm is not world:
        seen = repr(built) if isinstance(built, Hierarchy) else type(built).__name__
        raise TypeError(f"levels= returned {seen}: expected the result of coll.hierarchy(...) for its argument coll")
    levels = built.levels
    asked = Asked("init(levels=)", built.name, keys_of(levels), forms_of(levels))
    splits_of(world.name, await world.allgather_object(asked))
    upkeep_of(world).set_levels(levels.below(world.topology.host_of), None)


def _make(comm: Communicator, asked: Asked, since: int = 1) -> Handle[Hierarchy]:
    origin = Origin.here()

    async def join(name: str, table: list[Asked]) -> Hierarchy:
        groups = Levels(comm.size, comm.rank, splits_of(comm.name, table))
        # All ranks make these communicators in the same order. The groups of one level are disjoint.
        levels = [await _level(comm, name, groups, number) for number in range(groups.depth + 1)]
        if comm.rank == 0 and (fallen := groups.fallen(since)):
            message = f"{name} is linked as a tree, not cartesian as requested: {'; '.join(fallen)}"
            warnings.warn_explicit(message, RuntimeWarning, origin.filename, origin.lineno)
        return Hierarchy(comm, name, groups, levels)

    return _issue(comm, asked.what, asked, join)


def _issue(
    comm: Communicator, kind: str, asked: Asked, join: Callable[[str, list[Asked]], Coroutine[Any, Any, T]]
) -> Handle[T]:
    registry: Registry[Communicator] = parts_of(comm).registry
    agreed = comm.allgather_object(asked)
    name = registry.next_name(comm, "span" if kind == "span" else "hierarchy")
    return registry.later(comm, kind, agreed, lambda table: join(name, table))


async def _level(comm: Communicator, name: str, groups: Levels, number: int) -> Level:
    registry = parts_of(comm).registry
    within, across = groups.group(number), groups.link(number)
    return Level(
        number=number,
        key=groups.key(number),
        groups=groups.groups(number),
        form=groups.form(number),
        intra=await registry.join(comm, f"{name}.intra{number}", within, shared=True) if number else comm,
        inter=await registry.join(comm, f"{name}.inter{number}", across, shared=True),
    )
