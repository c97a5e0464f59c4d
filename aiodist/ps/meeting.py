"""Where the ranks of a parameter server meet, at its first server: barriers, and the end."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aiodist.ps.context import Context
    from aiodist.ps.server import Server

__all__ = ["Meeting"]


class Meeting:
    """Every method runs with the transport lock held."""

    def __init__(self, context: Context, server: Server) -> None:
        self._context = context
        self._server = server
        self._at_barrier: dict[int, deque[int]] = {}
        """The questions of each worker that waits there: who asks again before the first is answered waits twice."""
        self._goodbyes: dict[int, int] = {}
        self._parted: set[int] = set()
        self._over = False

    def barrier(self, client: int, call: dict[str, Any]) -> None:
        """A worker waits for the others."""
        self._at_barrier.setdefault(client, deque()).append(call["n"])
        self._check_barrier()

    def bye(self, client: int, call: dict[str, Any]) -> None:
        """A rank waits for the end: nothing it asked for is open."""
        self._goodbyes[client] = call["n"]
        self._check_over()

    def part(self, client: int) -> None:
        """A worker comes to no barrier any more; what it has pushed may still wait for others."""
        self._parted.add(client)
        self._check_barrier()

    def leave(self, client: int, *, gone: bool) -> None:
        """A worker has finished, or a rank died: nobody waits for it."""
        self.part(client)
        if gone:
            self._check_over()

    def _check_barrier(self) -> None:
        while self._at_barrier and not set(self._context.workers) - self._parted - set(self._at_barrier):
            for client, numbers in list(self._at_barrier.items()):
                self._server.answer(client, numbers.popleft())
                if not numbers:
                    del self._at_barrier[client]

    def _check_over(self) -> None:
        missing = set(range(len(self._context.world_ranks))) - set(self._context.gone) - set(self._goodbyes)
        if missing or self._over or not self._goodbyes:
            return
        self._over = True
        for client, number in self._goodbyes.items():
            self._server.answer(client, number)
            if client != self._context.rank:
                self._context.post.say_last(client)
