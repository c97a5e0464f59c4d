"""Launch order: native calls are made in the order in which their operations were issued."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

Call = Callable[[], None]


class LaunchOrder:
    """The order of the operations of one group.

    NCCL matches calls by their order alone. Some operations reach theirs only after a message has come, when others
    were issued behind them. So each takes a slot when it is issued, and its calls wait for those of all slots before.

    All is called with the transport lock held, but `take`, on the thread that issues. A call may take, use and give
    back slots; what it adds is made after it, not within.
    """

    def __init__(self) -> None:
        self._line: deque[LaunchSlot] = deque()
        self._late: list[Call] = []
        self._moving = False
        self._unordered = False

    def __len__(self) -> int:
        return len(self._line)

    def take(self) -> LaunchSlot:
        """Return the slot behind all others."""
        slot = LaunchSlot(self)
        self._line.append(slot)
        return slot

    def run_all(self) -> None:
        """Make every call that waits now, in order, and every later one at once: the order matters no more."""
        self._unordered = True
        self.move()

    def add(self, slot: LaunchSlot, call: Call, *, last: bool = False) -> None:
        """See `LaunchSlot.run`; with `last` the slot is given back."""
        slot.released = slot.released or last
        (self._late if self._unordered else slot.calls).append(call)
        self.move()

    def move(self) -> None:
        """Make the calls that are due."""
        if self._moving:
            return
        self._moving = True
        line, late = self._line, self._late
        try:
            while line or late:
                slot = line[0] if line else None
                calls = late if slot is None else slot.calls
                if calls:
                    calls.pop(0)()
                elif slot is None or slot.released or self._unordered:
                    line.popleft()
                else:
                    return
        finally:
            self._moving = False


class LaunchSlot:
    """One operation's place in the order."""

    __slots__ = ("_order", "calls", "released")

    def __init__(self, order: LaunchOrder) -> None:
        self._order = order
        self.calls: list[Call] = []
        """Those that wait."""
        self.released = False

    def run(self, call: Call) -> None:
        """Make `call`, which must not raise: now if all earlier slots were given back, else as soon as they are.

        Raises `RuntimeError` once this slot was given back.
        """
        if self.released:
            raise RuntimeError("this slot was given back: there is no place for the call in the order")
        self._order.add(self, call)

    def release(self) -> None:
        """Say that no more calls follow; those that wait are still made. To say it again does nothing."""
        self.released = True
        self._order.move()
