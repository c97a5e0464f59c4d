"""The reads that a machine holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from heapq import heappop, heappush

from aiodist.ps.consistency.events import Action, Part, Pull, Serve

__all__ = ["WaitingReads"]


class WaitingReads:
    """Reads that wait: first for a push of their own client, then for a version."""

    __slots__ = ("_count", "_held", "_own", "_wants")

    def __init__(self) -> None:
        self._held: dict[tuple[int, int], Pull] = {}
        self._own: dict[int, deque[tuple[int, Pull]]] = {}  # client: (number of the push that it waits for, the read)
        self._wants: list[tuple[int, int, Pull]] = []  # a heap: version, arrival
        self._count = 0

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, event: Pull) -> bool:
        return (event.client, event.number) in self._held

    def held(self) -> tuple[Pull, ...]:
        """Return them, in order of arrival."""
        return tuple(self._held.values())

    def hold(self, event: Pull, after: int | None) -> None:
        """Hold one, until its client's push numbered `after` is applied, if that is said, and until its version."""
        self._held[event.client, event.number] = event
        if after is None:
            self._count += 1
            heappush(self._wants, (event.wants, self._count, event))
        else:
            self._own.setdefault(event.client, deque()).append((after, event))

    def applied(self, parts: Iterable[Part], version: int, actions: list[Action]) -> None:
        """Serve those that waited for this step."""
        for part in parts if self._own else ():
            self._seen(part, version, actions)
        while self._wants and self._wants[0][0] <= version:
            self._serve(heappop(self._wants)[2], version, actions)

    def _seen(self, part: Part, version: int, actions: list[Action]) -> None:
        line = self._own.get(part.worker)
        while line and line[0][0] <= part.number:
            _, event = line.popleft()
            if event.wants <= version:
                self._serve(event, version, actions)
            else:
                self.hold(event, None)
        if line is not None and not line:
            del self._own[part.worker]

    def end(self, version: int, actions: list[Action]) -> None:
        """Serve all that is left: there will be no other version."""
        while self._wants:
            self._serve(heappop(self._wants)[2], version, actions)

    def _serve(self, event: Pull, version: int, actions: list[Action]) -> None:
        del self._held[event.client, event.number]
        actions.append(Serve(event.client, event.number, version))
