"""Readers of a shard's memory, and old memory that slow ones keep while the shard has other memory."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from aiodist.ps.context import Context

_READ_SECONDS, _READ_RATE = 0.05, 1e9
"""How long a step waits for readers before it leaves the memory to them: that, and the bytes at that rate."""
_TICK_SECONDS = 2e-3  # of the loop's clock

Reader = tuple[int, int]  # client, number


class Readers:
    """The readers of one shard; true while there are any."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.snapshots: set[Reader] = set()
        """They read the memory as it is: no step changes it until they end, or until it is left to them."""
        self.lookers: dict[Reader, Tensor] = {}
        """Lock-free reads: they see what they see, but not other tensors' memory."""
        self._aside: dict[Reader, Tensor] = {}
        """Slow readers, each with the memory that was left to it."""
        self._held_since: float | None = None
        """When the next step began to wait for them, on the clock of the loop."""

    def __bool__(self) -> bool:
        return bool(self.snapshots or self.lookers or self._aside)

    def hold(self, reader: Reader, memory: Tensor, *, snapshot: bool) -> None:
        """Note one more; with `snapshot` the memory may not change until it ends."""
        if snapshot:
            self.snapshots.add(reader)
        else:
            self.lookers[reader] = memory  # what replaces an object must not free what is looked at

    def release(self, reader: Reader) -> Tensor | None:
        """Take one out that has ended, and return the memory that was left to it."""
        self.snapshots.discard(reader)
        self.lookers.pop(reader, None)
        return self._aside.pop(reader, None)

    def leave(self, client: int) -> None:
        """Take out those of a client that is gone."""
        self.snapshots = {reader for reader in self.snapshots if reader[0] != client}
        self.lookers = {looker: seen for looker, seen in self.lookers.items() if looker[0] != client}
        self._aside = {reader: seen for reader, seen in self._aside.items() if reader[0] != client}

    def see(self, memory: Tensor) -> bool:
        """Return True if a reader has this memory, which is no longer the shard's."""
        return any(memory is seen for seen in (*self._aside.values(), *self.lookers.values()))

    def leave_to(self, memory: Tensor, again: Callable[[], object]) -> bool:
        """Leave the memory to its readers once they have taken long: the next step takes a copy of it.

        Returns False while the step must wait for readers to end, or to take long; `again` is called then. A process
        that was stopped may never end its read. There is one copy at a time: while readers still have the memory that
        was left to them, a step waits for the readers of the next version.
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
        """Begin to count again how long a step waits."""
        self._held_since = None
