"""`Hierarchy`: the communicators of groups within groups, inside each group and across them."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, overload

from aiodist.communicator.levels import FORMS, Form, Group, Key, Levels, Split
from aiodist.errors import MismatchError
from aiodist.handles import Handle, Origin

if TYPE_CHECKING:
    from aiodist.communicator import Communicator

__all__ = ["Hierarchy", "Level", "build", "root_levels"]

T = TypeVar("T")


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
        keys = [*_keys_of(self._groups), (_checked(key, "key"),)]
        forms = [*_forms_of(self._groups), _checked_form(form)]
        return _make(self._comm, _Asked("below", self._name, keys, forms), since=len(self))

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
        asked = _Asked(f"span({low}, {high})", self._name, _keys_of(self._groups), _forms_of(self._groups))

        async def join(name: str, table: list[_Asked]) -> Communicator:
            _agree(comm, table)
            return await comm.parts.registry.join(comm, name, self._groups.group(low), shared=True, levels=spanned)

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


def build(comm: Communicator, given: Sequence[str], form: Form | None) -> Handle[Hierarchy]:
    """Return the handle of a hierarchy of `comm` with a level for each key, or with its own `levels`."""
    form = _checked_form(form)
    if given:
        keys = [(_checked(key, f"key {i}"),) for i, key in enumerate(given)]
        return _make(comm, _Asked("hierarchy", "", keys, [form] * len(keys)))
    levels = comm.levels
    return _make(comm, _Asked("hierarchy", "", _keys_of(levels), [form or asked for asked in _forms_of(levels)]))


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
    asked = _Asked("init(levels=)", built.name, _keys_of(levels), _forms_of(levels))
    _agree(world, await world.allgather_object(asked))
    world.upkeep.set_levels(levels.below(world.topology.host_of))


class _Asked(NamedTuple):
    """What one rank wants; all must want the same, the keys apart."""

    what: str
    of: str
    keys: Sequence[Key]
    forms: Sequence[Form | None]

    def differs(self, other: _Asked) -> bool:
        """Return whether the other rank wants something else."""
        mine, theirs = ((one.what, one.of, len(one.keys), one.forms) for one in (self, other))
        return mine != theirs

    def __str__(self) -> str:
        keys = ", ".join("/".join(key) for key in self.keys)
        forms = f", form {', '.join(map(str, self.forms))}" if any(self.forms) else ""
        return f"{self.what}{f' of {self.of}' if self.of else ''} with {len(self.keys)} level(s) by {keys}{forms}"


def _make(comm: Communicator, asked: _Asked, since: int = 1) -> Handle[Hierarchy]:
    origin = Origin.here()

    async def join(name: str, table: list[_Asked]) -> Hierarchy:
        groups = Levels(comm.size, comm.rank, _agree(comm, table))
        # All ranks come by here in the same order, each time as one of some groups that have no rank in common.
        levels = [await _level(comm, name, groups, number) for number in range(groups.depth + 1)]
        if comm.rank == 0 and (fallen := groups.fallen(since)):
            message = f"{name} is linked as a tree, not cartesian as asked: {'; '.join(fallen)}"
            warnings.warn_explicit(message, RuntimeWarning, origin.filename, origin.lineno)
        return Hierarchy(comm, name, groups, levels)

    return _issue(comm, asked.what, asked, join)


def _issue(
    comm: Communicator, kind: str, asked: _Asked, join: Callable[[str, list[_Asked]], Coroutine[Any, Any, T]]
) -> Handle[T]:
    agreed = comm.allgather_object(asked)
    name = comm.parts.registry.next_name(comm, "span" if kind == "span" else "hierarchy")
    return comm.parts.registry.later(comm, kind, agreed, lambda table: join(name, table))


async def _level(comm: Communicator, name: str, groups: Levels, number: int) -> Level:
    registry = comm.parts.registry
    within, across = groups.group(number), groups.link(number)
    return Level(
        number=number,
        key=groups.key(number),
        groups=groups.groups(number),
        form=groups.form(number),
        intra=await registry.join(comm, f"{name}.intra{number}", within, shared=True) if number else comm,
        inter=await registry.join(comm, f"{name}.inter{number}", across, shared=True),
    )


def _agree(comm: Communicator, table: Sequence[_Asked]) -> tuple[Split, ...]:
    """Return the levels that all ranks want; raise `MismatchError` if they do not want the same."""
    first = table[0]
    for rank, asked in enumerate(table):
        if asked.differs(first):
            raise MismatchError(f"ranks disagree on the levels of {comm.name!r}: rank 0: {first}; rank {rank}: {asked}")
    keys = zip(*(asked.keys for asked in table), strict=True)
    return tuple(Split(tuple(level), form) for level, form in zip(keys, first.forms, strict=True))


def _keys_of(levels: Levels) -> list[Key]:
    return [split.keys[levels.rank] for split in levels.splits]


def _forms_of(levels: Levels) -> list[Form | None]:
    return [split.asked for split in levels.splits]


def _checked(key: object, name: str) -> str:
    if not isinstance(key, str):
        raise TypeError(f"{name} is {type(key).__name__}: expected a str")
    return key


def _checked_form(form: Form | None) -> Form | None:
    if form is not None and form not in FORMS:
        raise ValueError(f"form={form!r}: expected {', '.join(map(repr, FORMS))} or None")
    return form
