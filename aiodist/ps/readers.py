"""Readers of a shard's memory, and old memory that slow readers keep."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from aiodist.ps.context import Context

_READ_SECONDS, _READ_RATE = 0.05, 1e9
"""Longest wait of a step for readers: seconds, and in addition the bytes at a rate per second."""
_TICK_SECONDS = 2e-3  # of the loop's clock

Reader = tuple[int, int]  # client, number


class Readers:
    """The readers of one shard. True while there are any."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.snapshots: set[Reader] = set()
        """Readers of one version. No step changes the memory until they end, or until the memory is left to them."""
        self.lookers: dict[Reader, Tensor] = {}
        """Lock-free readers, each with its memory, which steps may change but the pool does not get."""
        self._aside: dict[Reader, Tensor] = {}
        """Slow readers, each with the memory that was left to it."""
        self._held_since: float | None = None
        """Time at which the next step began to wait, in seconds of the loop's clock, or None."""

    def __bool__(self) -> bool:
        return bool(self.snapshots or self.lookers or self._aside)

    def hold(self, reader: Reader, memory: Tensor, *, snapshot: bool) -> None:
        """Add a reader. True for `snapshot` keeps the memory unchanged until the end of the read."""
        if snapshot:
            self.snapshots.add(reader)
        else:
            self.lookers[reader] = memory  # a push that replaces an object must not free the read memory

    def release(self, reader: Reader) -> Tensor | None:
        """Remove a reader, and return the memory that was left to it, or None."""
        self.snapshots.discard(reader)
        self.lookers.pop(reader, None)
        return self._aside.pop(reader, None)

    def leave(self, client: int) -> None:
        """Remove the readers of a lost client."""
        self.snapshots = {reader for reader in self.snapshots if reader[0] != client}
        self.lookers = {looker: seen for looker, seen in self.lookers.items() if looker[0] != client}
        self._aside = {reader: seen for reader, seen in self._aside.items() if reader[0] != client}

    def see(self, memory: Tensor) -> bool:
        """Return True if a reader has this memory, which is no longer the shard's."""
        return any(memory is seen for seen in (*self._aside.values(), *self.lookers.values()))

    def leave_to(self, memory: Tensor, again: Callable[[], object]) -> bool:
        """Leave the memory to its readers if they take long. The next step continues in a copy.

        Returns False while the step must wait, and calls `again` after the longest wait. A stopped process may never
        end its read. There is one copy at a time: while readers have old memory, a step waits for the readers of the
        next version.
        """
        loop = self._context.progress.loop
        patience = _READ_SECONDS + memory.nbytes / _READ_RATE
        if self._held_since is None:
            self._held_since = loop.time()
            self._context.service.later(patience + _TICK_SECONDS, again)
        if loop.time() - self._held_since < patience or self._aside:
            return False
        self._aside, self.snapshots = dict.fromkeys(self.snapshots, memory), set()
        return True

    def stepped(self) -> None:
        """Note that a step no longer waits."""
        self._held_since = None
