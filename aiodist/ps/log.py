"""The log of a worker's pushes since the last checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(eq=False, slots=True)
class LoggedPush:
    """A push with its blocks, in the order of the servers. A code also has its number of elements."""

    number: int
    rule: int
    alpha: float
    blocks: Sequence[tuple[Tensor, int | None]]


class PushLog:
    """A worker's pushes since the last checkpoint, by tensor, for servers that lose their values.

    Each push counts once, since its client and its number name it. For each tensor and client, a checkpoint has all
    pushes up to a number, the *mark*. After a loss, servers restore the checkpoint, and clients repeat the pushes above
    the mark. Every method runs with the transport lock held.
    """

    def __init__(self) -> None:
        self._pushes: dict[str, dict[int, LoggedPush]] = {}

    def add(self, name: str, push: LoggedPush) -> None:
        """Record a push."""
        self._pushes.setdefault(name, {})[push.number] = push

    def forget(self, name: str, number: int | None = None) -> None:
        """Remove a push that was dropped or refused, or all pushes of a freed name."""
        if number is None:
            self._pushes.pop(name, None)
        else:
            self._pushes.get(name, {}).pop(number, None)

    def saved(self, marks: Mapping[str, int]) -> None:
        """Remove the pushes that a checkpoint has, by its marks."""
        for name, pushes in self._pushes.items():
            self._pushes[name] = {n: push for n, push in pushes.items() if n > marks.get(name, 0)}

    def clear(self) -> None:
        """Remove all pushes."""
        self._pushes.clear()

    def above(self, marks: Mapping[str, int]) -> list[tuple[str, LoggedPush]]:
        """Return the pushes above the marks of their tensors, in the order of their numbers."""
        self.saved(marks)
        found = [(name, push) for name, pushes in self._pushes.items() for push in pushes.values()]
        return sorted(found, key=lambda each: each[1].number)
