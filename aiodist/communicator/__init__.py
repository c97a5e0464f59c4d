"""`Communicator`: the collectives and messages of a group of ranks, each call an awaitable handle.

A call checks its arguments and issues the operation; awaiting the handle completes it. Every rank must issue the
same collectives in the same order, but for those that it names. This package owns no algorithm: see
`aiodist.collectives`.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar, overload

from aiodist.communicator.arguments import check_int64, check_rank
from aiodist.communicator.base import CommunicatorStatistics, parts_of, upkeep_of
from aiodist.communicator.elsewhere import Elsewheres, shown
from aiodist.communicator.levels import Asked, Form, Group, Levels, agree, checked_form, checked_key, forms_of, keys_of
from aiodist.communicator.movement import Movement
from aiodist.communicator.objects import Objects
from aiodist.communicator.reductions import Reductions
from aiodist.communicator.registry import Registry
from aiodist.communicator.shared import SharedMemory
from aiodist.errors import CommunicatorAborted
from aiodist.handles import Handle, Origin
from aiodist.handles.calls import located

__all__ = ["Communicator", "CommunicatorStatistics", "Hierarchy", "Level", "parts_of", "root_levels", "upkeep_of"]

T = TypeVar("T")


class Communicator(SharedMemory, Reductions, Movement, Objects, Elsewheres):
    """A group of ranks that communicate; get the first from `aiodist.init`.

    It belongs to the event loop it was opened on and is called from that loop's thread alone, or from others too where
    it was made for that (`dup(thread=True)`). Tensors are dense,
    contiguous, and on the CPU or a CUDA device; any shape goes unless a call names one, 0 elements too. Every
    collective is called by all ranks, in the same order and with the same arguments, tensors and sizes apart where the
    call says so. Collectives and messages take `timeout=` (seconds from issue; None is none) and most `impl=` (the name
    of an implementation, or "auto": the table of `selector` chooses).

    `name=`, a str, frees a collective from the order: it meets those that the other ranks issue by that name, the k-th
    use of a name the k-th of each. So tasks that nothing orders can share a communicator, each with names of its own.
    Nothing moves before all ranks have come; `seq` of the handle counts the uses of the name. Names are few, and used
    again and again: a communicator keeps some 5 KB on each rank for each, and takes 65,535. They are for tensors on the
    CPU. The call raises ValueError while the last operation of the name is in flight here, and for an `impl` that tells
    operations apart by their order ("mpi", "gloo"); "auto" passes these over. The await raises MismatchError as for any
    other, also where ranks have edited the table of `selector` differently meanwhile; nothing was written then, and the
    name can be used again. Cost: a comparison of all ranks, log2(p) messages of 9 bytes, and at a name's first use a
    question to rank 0, besides what the call says.

    Every call raises TypeError or ValueError for what it cannot take, BufferInFlight for a tensor that another
    operation owns, CommunicatorClosed, CommunicatorAborted or PeerError when there is no communicator any more, and
    RuntimeError in another thread or on another event loop; before a byte moves, and the communicator goes on. The
    await raises MismatchError when ranks issued different operations, PeerError when a rank is lost or failed,
    CommunicatorAborted when it was given up, OperationTimeout when `timeout` has passed (the operation goes on) and
    BackendError for what a library reports. Below is only what a call adds to that.

    In the costs p is the number of ranks and n the bytes of a rank's tensor; they are those of the schedules over
    messages, per rank. Within a host shared memory takes their place, and nothing is sent; among hosts every rank, or
    the first of each host, takes part for its host (docs/algorithms.md).
    """

    _registry: Registry[Communicator]

    # --- other communicators --------------------------------------------------------------------------------

    def shrink(self, *, timeout: float | None = None) -> Handle[Communicator]:
        """Return the world of those ranks that live, once all of them have called this; they keep their order.

        For an elastic world (`init(elastic=True)`), after a rank was lost; otherwise the call gives this one up on all
        ranks, whose operations raise CommunicatorAborted then, and they are to call it too. From now on everything of
        this world, what was made of it too, raises CommunicatorAborted. What an operation that raised PeerLost has
        written is unspecified. Where a rank dies meanwhile it starts over with the others. Cancelling the await changes
        nothing.

        Raises ConfigError unless the world is elastic, CommunicatorError for a communicator that is only a part of it
        and while another `shrink` or `grow` is under way, CommunicatorAborted for a world that was shrunk already; on
        await OperationTimeout naming the ranks that did not call it (it goes on), MismatchError where others call
        `grow`. Cost: that of `init`. Source: Bland et al. 2013, "Post-failure recovery of MPI communication
        capability", doi:10.1177/1094342013488238, where it is MPI_Comm_shrink.
        """
        return self._registry.regroup(self, 0, timeout)

    def grow(self, n: int = 1, *, timeout: float | None = None) -> Handle[Communicator]:
        """Return the world of these ranks and `n` new ones behind them, once all of these have called this.

        The launcher starts the same program `n` times more; there `init(elastic=True)` returns the new world, whose
        `generation` is above 0. It begins once all collectives that were issued here are over; messages that nobody has
        received are lost. From then on this world raises CommunicatorAborted, as after `shrink`.

        Raises as `shrink`, and ValueError for more ranks than the job may have (`aiodist run --elastic MIN:MAX`); on
        await PeerLost where a rank of this world dies, and LaunchError where a new one does before it has joined, after
        which this world goes on. Cost: the start of the program, and that of `init`.
        """
        if isinstance(n, bool) or not isinstance(n, int):
            raise TypeError(f"n is {type(n).__name__}: expected an int")
        if n < 1:
            raise ValueError(f"grow({n}): expected at least 1 rank")
        return self._registry.regroup(self, n, timeout)

    def dup(self, *, thread: bool = False) -> Handle[Communicator]:
        """Return a communicator of the same ranks whose traffic never meets this one's.

        Code that issues from a task of its own needs one, or names (`name=`): two tasks that issue on the same
        communicator would interleave differently on each rank. Collective; begins once all that is in flight here is
        over, but for messages and named operations.

        With `thread=True` other threads may call its collectives and messages of tensors on the CPU and of objects,
        beside the loop's thread, and wait for them by `wait()`: neither needs the loop, which may stand still. The
        ranks see one order, that of the calls. So one thread calls at a time: two at once raise RuntimeError in the
        later one, which names both. What makes or closes communicators stays on the loop's thread.
        Cost: what the library takes to make one, milliseconds.
        """
        return self._registry.derive(self, "dup", range(self.size), thread=thread)

    def group(self, ranks: Sequence[int]) -> Handle[Communicator]:
        """Return a communicator of `ranks`, in that order; elsewhere one of which every call raises.

        Collective over this communicator, with the same list on every rank. Made once: asking again for the same ranks
        returns the same communicator until it is closed. Raises ValueError for ranks out of range, none, or one twice.
        Cost: as `dup`.
        """
        wanted = [check_rank(rank, self.size, "ranks") for rank in ranks]
        if len(set(wanted)) != len(wanted) or not wanted:
            raise ValueError(f"ranks={wanted}: expected at least one rank, each once")
        return self._registry.derive(self, "group", wanted)

    def split(self, color: int | None = 0, key: int | None = None) -> Handle[Communicator]:
        """Return a communicator of the ranks that gave the same `color`, ordered by `key`, then by rank.

        `color=None` gives one of which every call raises. `key` is the rank unless given. Collective; made once for the
        same ranks, as `group`. Raises TypeError unless both are ints or None, and ValueError for one that does not fit
        into 64 bits.
        Cost: the colors and keys of all ranks to all, then as `dup`.
        """
        color, key = check_int64(color, "color"), check_int64(key, "key")
        return self._registry.split(self, color, self.rank if key is None else key)

    def hierarchy(self, *keys: str, form: Form | None = None) -> Handle[Hierarchy]:
        """Return communicators of groups within groups: a level for each of `keys`, or by host (see `levels`).

        Level 0 is this communicator. Each level splits every group of the level above: equal keys form a group, keys
        sort as strings, ranks in a group by their rank here. A level has a communicator within each group and one
        across those that lie in the same group of the level above. `form` says which ranks that one links:
        "cartesian" the k-th of each with the k-th of the others, "tree" the first ranks; None is cartesian where the
        groups are of equal size, else tree. Cartesian for groups of unequal size is a tree too, with a RuntimeWarning
        on rank 0, and `Level.form` says so.

        Collective; begins once all that is in flight here is over. The communicators are made once for the same ranks,
        as those of `group`, and shared with it. All ranks give as many keys and the same `form`, else `MismatchError`
        is raised on await. A key that is no str is a TypeError. Cost: the keys of all ranks to all, then at most two
        communicators a level.
        """
        return _build(self, keys, form)

    # --- the end --------------------------------------------------------------------------------------------

    def abort(self, reason: str = "abort() was called") -> None:
        """Give this communicator up on all ranks: what is pending and every later call raise CommunicatorAborted."""
        error = CommunicatorAborted(f"communicator {self.name!r} was aborted: {reason}", comm=self.name, rank=self.rank)
        self._dispatcher.abort(error)
        self._dispatcher.disputes.tell_abort(str(error))

    @located
    async def aclose(self) -> None:
        """Close it on all ranks: wait for what is in flight, at most 30 s, then release it. Collective.

        Receives that nothing matched are withdrawn and reported as `ResourceWarning`, messages that nobody received as
        `RuntimeWarning`. Raises `OperationTimeout` naming what is still pending after that, and gives it up. A rank
        that gives the close up, as a task that is cancelled does, gives up the communicator, on all ranks. A second
        call, like the end of the block, waits for the first.
        The world that `aiodist.open` returned ends with all that belongs to it, as at the end of the block of
        `aiodist.init`.
        """
        if not isinstance(self._dispatcher.refusal, RuntimeError):  # in a forked child no loop runs
            self._dispatcher.check_loop()
        kept = self._registry.kept
        if kept is None or self.name != "world":
            await self._registry.close(self)
        else:
            await kept.aclose()

    def __dir__(self) -> list[str]:
        return shown(super().__dir__())

    def __deepcopy__(self, memo: object) -> Communicator:
        """Return itself: a copy of a module communicates with the same ranks."""
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} cannot be pickled: of what holds it save the state (a module's `state_dict`)")


@dataclass(frozen=True, repr=False)
class Level:
    """One level of a hierarchy, as this rank sees it."""

    number: int
    """From 0, which is the whole communicator."""
    key: str
    """What this rank's group gave; "" at level 0."""
    groups: tuple[Group, ...]
    """All groups of the level, as ranks of the hierarchy's communicator; see `Levels` for their order."""
    form: Form
    """How the groups that lie in one group of the level above are linked: "cartesian" or "tree"."""
    intra: Communicator
    """The ranks of this rank's group."""
    inter: Communicator
    """One rank of each group, in the order of the groups.

    Cartesian: those that have the same rank in `intra`. Tree: the first ranks; on others every call of it raises.
    """

    def __repr__(self) -> str:
        return f"<Level {self.number} {self.key!r}: {len(self.groups)} groups, {self.form}>"


class Hierarchy(Sequence[Level]):
    """The levels of a communicator, from 0, the whole, to the last; get one from `Communicator.hierarchy`.

    It never changes: `below` returns another, which shares the communicators. These are closed with the communicator
    the hierarchy was made of, or by themselves, and are made anew when they are asked for again. `print` shows all
    levels.
    """

    def __init__(self, comm: Communicator, name: str, groups: Levels, levels: Sequence[Level]) -> None:
        self._comm = comm
        self._name = name
        self._groups = groups
        self._levels = tuple(levels)

    @property
    def comm(self) -> Communicator:
        """The communicator whose ranks it arranges."""
        return self._comm

    @property
    def name(self) -> str:
        """What error messages call it, the same on all ranks."""
        return self._name

    @property
    def levels(self) -> Levels:
        """The groups alone, without communicators."""
        return self._groups

    def below(self, key: str, *, form: Form | None = None) -> Handle[Hierarchy]:
        """Return a hierarchy with one level more: the last groups, split by `key`. Arguments as of `hierarchy`."""
        keys = [*keys_of(self._groups), (checked_key(key, "key"),)]
        forms = [*forms_of(self._groups), checked_form(form)]
        return _make(self._comm, Asked("below", self._name, keys, forms), since=len(self))

    def span(self, outer: int = -2, inner: int = -1) -> Handle[Communicator]:
        """Return a communicator of my group at level `outer` whose own level is that of the groups at `inner`.

        The span says between which two levels collectives run: among all ranks of one group at `outer`, and, where
        they are hierarchical, first within the groups at `inner`, then between these, across any levels between.
        Its `levels` are these two, and its `hierarchy()` has the communicators for both ways. Left alone it spans the
        last two levels. Data-parallel groups inside a parameter server:

            h = await coll.hierarchy(str(coll.rank // 8), str(coll.node))
            net = await aiodist.nn.DataParallel.create(Net(), await h.span(1, 2))   # gradients: 8 ranks, by host
            servers = h[1].inter                                                    # parameters: group with group

        Collective over the hierarchy's communicator, with the same levels on every rank; made once, as `group`.
        Raises ValueError unless `inner` is a level below `outer`; `MismatchError` on await if ranks disagree.
        """
        comm, spanned = self._comm, self._groups.span(outer, inner)
        low, high = self._groups.number(outer), self._groups.number(inner)
        asked = Asked(f"span({low}, {high})", self._name, keys_of(self._groups), forms_of(self._groups))

        async def join(name: str, table: list[Asked]) -> Communicator:
            agree(comm.name, table)
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
        """Return the number of levels, level 0 among them."""
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
    """Have `make` build the levels of `world`, and root the one by host under the last of them.

    Raises TypeError if it returns anything but a hierarchy of `world`; `MismatchError`.
    """
    made = make(world)
    built: object = await made if inspect.isawaitable(made) else made
    if not isinstance(built, Hierarchy) or built.comm is not world:
        seen = repr(built) if isinstance(built, Hierarchy) else type(built).__name__
        raise TypeError(f"levels= returned {seen}: expected what coll.hierarchy(...) returns, of the coll it was given")
    levels = built.levels
    asked = Asked("init(levels=)", built.name, keys_of(levels), forms_of(levels))
    agree(world.name, await world.allgather_object(asked))
    upkeep_of(world).set_levels(levels.below(world.topology.host_of), None)


def _make(comm: Communicator, asked: Asked, since: int = 1) -> Handle[Hierarchy]:
    origin = Origin.here()

    async def join(name: str, table: list[Asked]) -> Hierarchy:
        groups = Levels(comm.size, comm.rank, agree(comm.name, table))
        # All ranks come by here in the same order, each time as one of some groups that have no rank in common.
        levels = [await _level(comm, name, groups, number) for number in range(groups.depth + 1)]
        if comm.rank == 0 and (fallen := groups.fallen(since)):
            message = f"{name} is linked as a tree, not cartesian as asked: {'; '.join(fallen)}"
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
