"""Groups of ranks in levels. Every rank has the whole hierarchy.

Level 0 is one group of all ranks. Each level splits every group of the level above by a key. The idea of trees and
cartesian links is from TorchMPI (https://github.com/facebookarchive/TorchMPI/blob/master/docs/communicators.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple, get_args

from aiodist.control import disagreement
from aiodist.errors import MismatchError

Form = Literal["cartesian", "tree"]
FORMS: Final[tuple[str, ...]] = get_args(Form)

Group = tuple[int, ...]
"""Ranks, in order."""

Key = tuple[str, ...]
"""One string, or several if a span has merged levels."""


@dataclass(frozen=True)
class Split:
    """The split of the groups of a level into those of the next level."""

    keys: tuple[Key, ...]
    """Keys, by rank. Equal keys form a group."""
    asked: Form | None = None
    """Requested form, or None for cartesian if possible."""


@dataclass(frozen=True)
class Levels:
    """The hierarchy of groups of `size` ranks, for `rank`. `print` shows all.

    The groups of a level are in the order of their parents, then of their keys as strings. The ranks of a group are in
    ascending order. Levels are numbered from 0, all ranks, to `depth`. Negative numbers count from the last.

    >>> levels = Levels(5, rank=3).below(["b", "a", "b", "a", "b"])
    >>> levels.groups(1), levels.group(1), levels.form(1)
    (((1, 3), (0, 2, 4)), (1, 3), 'tree')
    >>> print(levels)
    5 ranks in 2 groups, tree
      a: ranks 1, 3
      b: ranks 0, 2, 4
    """

    size: int
    rank: int
    splits: tuple[Split, ...] = ()

    @property
    def depth(self) -> int:
        """Number of levels below level 0."""
        return len(self.splits)

    # --- queries ---------------------------------------------------------------------------------------------

    def number(self, level: int) -> int:
        """Return the level counted from 0, or raise ValueError for an unknown level, TypeError for no int."""
        if isinstance(level, bool) or not isinstance(level, int):
            raise TypeError(f"level is {type(level).__name__}: expected an int")
        if not -1 - self.depth <= level <= self.depth:
            raise ValueError(f"level {level}: expected 0, all ranks, to {self.depth}, or from -1, the last, down")
        return level % (self.depth + 1)

    def key(self, level: int) -> str:
        """Return the key of this rank at `level`, or "" at level 0."""
        number = self.number(level)
        return "/".join(self.splits[number - 1].keys[self.rank]) if number else ""

    def groups(self, level: int) -> tuple[Group, ...]:
        """Return all groups of `level`."""
        return tuple(group for part in self.parts(level) for group in part)

    def group(self, level: int) -> Group:
        """Return this rank's group at `level`."""
        return next(group for group in self.groups(level) if self.rank in group)

    def parts(self, level: int) -> tuple[tuple[Group, ...], ...]:
        """Return the groups of `level`, one tuple for each group of the level above."""
        number = self.number(level)
        if number == 0:
            return ((tuple(range(self.size)),),)
        return tuple(self._inside(group, number) for group in self.groups(number - 1))

    def form(self, level: int) -> Form:
        """Return the form of the links between this rank's group and the other groups of the same parent.

        "cartesian" links the k-th ranks of the groups, which need equal sizes. "tree" links the first ranks, if sizes
        differ or a tree was requested.
        """
        number = self.number(level)
        return self._form(number, next(part for part in self.parts(number) if any(self.rank in g for g in part)))

    def links(self, level: int) -> tuple[Group, ...]:
        """Return the linked ranks across the groups of `level`, in the order of the groups."""
        number = self.number(level)
        found: list[Group] = []
        for part in self.parts(number):
            linked = list(zip(*part, strict=False))  # as many as the smallest group has ranks
            found += linked if self._form(number, part) == "cartesian" else linked[:1]
        return tuple(found)

    def link(self, level: int) -> Group:
        """Return this rank and the ranks linked with this rank. In a tree only first ranks have links."""
        return next((linked for linked in self.links(level) if self.rank in linked), ())

    def fallen(self, since: int = 1) -> list[str]:
        """Return texts about the groups from level `since` on that form a tree instead of the requested cartesian."""
        return [
            f"level {number}: groups of {', '.join(str(len(group)) for group in part)} ranks"
            for number in range(since, self.depth + 1)
            for part in self.parts(number)
            if self.splits[number - 1].asked == "cartesian" and self._form(number, part) == "tree"
        ]

    def _inside(self, group: Group, level: int) -> tuple[Group, ...]:
        """Return the groups of `level` in `group` of the level above."""
        keys = self.splits[level - 1].keys
        found: dict[Key, list[int]] = {}
        for rank in group:
            found.setdefault(keys[rank], []).append(rank)
        return tuple(tuple(found[key]) for key in sorted(found))

    def _form(self, level: int, part: Sequence[Group]) -> Form:
        wants_tree = level > 0 and self.splits[level - 1].asked == "tree"
        return "tree" if wants_tree or len({len(group) for group in part}) > 1 else "cartesian"

    # --- derived levels --------------------------------------------------------------------------------------

    def below(self, keys: Sequence[str], asked: Form | None = None) -> Levels:
        """Return these levels and a further one, by the key of each rank."""
        if len(keys) != self.size:
            raise ValueError(f"{len(keys)} keys: expected {self.size}, one for each rank")
        return replace(self, splits=(*self.splits, Split(tuple((key,) for key in keys), asked)))

    def among(self, ranks: Sequence[int]) -> Levels:
        """Return the levels among `ranks`, which include this rank, numbered in that order."""
        splits = tuple(Split(tuple(split.keys[rank] for rank in ranks), split.asked) for split in self.splits)
        return Levels(len(ranks), list(ranks).index(self.rank), splits)

    def span(self, outer: int, inner: int) -> Levels:
        """Return the two levels of a span: this rank's group at `outer` and the level below.

        The ranks are those of that group, renumbered. Level 1 has their groups at `inner`, linked across any levels
        between. Raises ValueError unless `inner` is below `outer`.
        """
        low, high = self.number(outer), self.number(inner)
        if low >= high:
            raise ValueError(f"a span from level {low} to level {high}: expected the second to be below the first")
        mine = self.among(self.group(low))
        spanned = mine.splits[low:high]
        keys = tuple(tuple(text for split in spanned for text in split.keys[rank]) for rank in range(mine.size))
        return replace(mine, splits=(Split(keys, spanned[-1].asked),))

    # --- text ------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        return "\n".join(self._lines(0, tuple(range(self.size))))

    def _lines(self, level: int, group: Group) -> list[str]:
        """Return the text of a group, with the inner groups indented."""
        if level == self.depth:
            return [("rank " if len(group) == 1 else "ranks ") + ", ".join(map(str, group))]
        part = self._inside(group, level + 1)
        form = f", {self._form(level + 1, part)}" if len(part) > 1 else ""
        lines = [f"{_count(len(group), 'rank')} in {_count(len(part), 'group')}{form}"]
        for inner in part:
            first, *rest = self._lines(level + 1, inner)
            lines += [f"  {_shown(self.splits[level].keys[inner[0]])}: {first}", *(f"  {line}" for line in rest)]
        return lines


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def _shown(key: Key) -> str:
    text = "/".join(key)
    return text if text and text.isprintable() else repr(text)


class Asked(NamedTuple):
    """The levels that one rank requests. All ranks must request the same, except for the keys."""

    what: str
    of: str
    keys: Sequence[Key]
    forms: Sequence[Form | None]

    def differs(self, other: Asked) -> bool:
        """Return True if the other rank requests other levels."""
        mine, theirs = ((one.what, one.of, len(one.keys), one.forms) for one in (self, other))
        return mine != theirs

    def __str__(self) -> str:
        keys = ", ".join("/".join(key) for key in self.keys)
        forms = f", form {', '.join(map(str, self.forms))}" if any(self.forms) else ""
        return f"{self.what}{f' of {self.of}' if self.of else ''} with {len(self.keys)} level(s) by {keys}{forms}"


def splits_of(name: str, table: Sequence[Asked]) -> tuple[Split, ...]:
    """Return the splits that all ranks request, or raise `MismatchError` if the requests differ."""
    first = table[0]
    if any(asked.differs(first) for asked in table):
        raise MismatchError(disagreement(f"the levels of {name!r}", list(map(str, table))))
    keys = zip(*(asked.keys for asked in table), strict=True)
    return tuple(Split(tuple(level), form) for level, form in zip(keys, first.forms, strict=True))


def keys_of(levels: Levels) -> list[Key]:
    """Return this rank's key at each level."""
    return [split.keys[levels.rank] for split in levels.splits]


def forms_of(levels: Levels) -> list[Form | None]:
    """Return the requested form of each level."""
    return [split.asked for split in levels.splits]


def checked_key(key: object, name: str) -> str:
    """Return `key`, or raise TypeError for any but a str."""
    if not isinstance(key, str):
        raise TypeError(f"{name} is {type(key).__name__}: expected a str")
    return key


def checked_form(form: Form | None) -> Form | None:
    """Return `form`, or raise ValueError for an unknown one."""
    if form is not None and form not in FORMS:
        raise ValueError(f"form={form!r}: expected {', '.join(map(repr, FORMS))} or None")
    return form
