"""What a worker has pushed since the last checkpoint, for servers that lose what they had. Pure; no I/O.

A push counts once, also where ranks die: its client and its number name it. A checkpoint has, of each tensor and
client, all numbers up to its *mark*. After a loss servers begin at the checkpoint, and clients push again what is above
the mark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(eq=False, slots=True)
class Logged:
    """One push: its blocks, in the order of the servers that had them, of a code with the elements that it has."""

    number: int
    rule: int
    alpha: float
    blocks: Sequence[tuple[Tensor, int | None]]


class Log:
    """Of one client, by the names of tensors; every method runs with the transport lock held."""

    def __init__(self) -> None:
        self._pushes: dict[str, dict[int, Logged]] = {}

    def add(self, name: str, push: Logged) -> None:
        """A push is on its way."""
        self._pushes.setdefault(name, {})[push.number] = push

    def forget(self, name: str, number: int | None = None) -> None:
        """A push was dropped, or refused; or the name is no more."""
        if number is None:
            self._pushes.pop(name, None)
        else:
            self._pushes.get(name, {}).pop(number, None)

    def saved(self, marks: Mapping[str, int]) -> None:
        """A checkpoint has tensors up to these marks."""
        for name, pushes in self._pushes.items():
            self._pushes[name] = {n: push for n, push in pushes.items() if n > marks.get(name, 0)}

    def clear(self) -> None:
        """Servers went back to a checkpoint, and what was pushed is void."""
        self._pushes.clear()

    def above(self, marks: Mapping[str, int]) -> list[tuple[str, Logged]]:
        """Return the pushes that are above the marks of their tensors, in the order of their numbers."""
        self.saved(marks)
        found = [(name, push) for name, pushes in self._pushes.items() for push in pushes.values()]
        return sorted(found, key=lambda each: each[1].number)
