"""What a worker has pushed since the last checkpoint, for servers that lose what they had. Pure; no I/O.

A push counts once, also where ranks die: its client and its number name it. `Log` knows of each push the version that
it made, once a server has said so. A checkpoint has, of each tensor and client, all numbers up to its *mark*. After a
loss servers begin at the checkpoint; what was known to be applied is ordered again as it was (`again`), then clients
send all that is above the mark.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from aiodist.ps.consistency import Push


@dataclass(eq=False, slots=True)
class Logged:
    """One push: its blocks, in the order of the servers that had them, of a code with the elements that it has."""

    number: int
    rule: int
    alpha: float
    base: int
    blocks: Sequence[tuple[Tensor, int | None]]
    version: int | None = None
    """What it made; None: nobody has said."""


class KnownPushes(NamedTuple):
    """A push that made a version, as JSON has it."""

    version: int
    number: int
    base: int


class Log:
    """Of one client, by the names of tensors; every method runs with the transport lock held."""

    def __init__(self) -> None:
        self._pushes: dict[str, dict[int, Logged]] = {}

    def add(self, name: str, push: Logged) -> None:
        """A push is on its way."""
        self._pushes.setdefault(name, {})[push.number] = push

    def applied(self, name: str, number: int, version: int) -> None:
        """A server says that it has made a version."""
        push = self._pushes.get(name, {}).get(number)
        if push is not None:
            push.version = version

    def forget(self, name: str, number: int | None = None) -> None:
        """A push was dropped, or refused; or the name is no more."""
        if number is None:
            self._pushes.pop(name, None)
        else:
            self._pushes.get(name, {}).pop(number, None)

    def saved(self, versions: Mapping[str, int] | None) -> None:
        """A checkpoint has these versions of tensors; None: servers went back to it, and what was pushed is void."""
        if versions is None:
            self._pushes.clear()
            return
        for name, version in versions.items():
            pushes = self._pushes.get(name, {})
            self._pushes[name] = {n: p for n, p in pushes.items() if p.version is None or p.version > version}

    def known(self) -> dict[str, list[KnownPushes]]:
        """Return what is known to be applied."""
        return {
            name: [KnownPushes(p.version, p.number, p.base) for p in pushes.values() if p.version is not None]
            for name, pushes in self._pushes.items()
        }

    def above(self, marks: Mapping[str, int]) -> list[tuple[str, Logged]]:
        """Return the pushes that are above the marks of their tensors, in the order of their numbers."""
        found = [
            (name, push)
            for name, pushes in self._pushes.items()
            for push in pushes.values()
            if push.number > marks.get(name, 0)
        ]
        return sorted(found, key=lambda each: each[1].number)


def again(known: Mapping[int, Iterable[KnownPushes]], marks: Mapping[int, int]) -> list[Push]:
    """Return what is ordered first, of what clients know to be applied to one tensor: as it was then.

    Both by client. A client's own come in the order of their numbers, also where two servers said other versions.
    """
    pushes = [(each, client) for client, found in known.items() for each in found if each.number > marks.get(client, 0)]
    return [Push(client, each.number, each.base) for each, client in sorted(pushes)]
