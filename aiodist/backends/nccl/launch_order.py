"""The launch order, in which native calls follow the order of issue of their operations."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, TypeVarTuple

Ts = TypeVarTuple("Ts")
Call = tuple[Callable[..., object], tuple[Any, ...]]
"""Function with its arguments."""


class LaunchOrder:
    """The order of the operations of one group.

    NCCL matches calls by the order alone. Some operations make their calls only after a message has arrived, when other
    operations were issued later. So each operation takes a slot at the issue. The calls of a slot wait for the calls of
    all earlier slots.

    `take` runs on the issuing thread, all other methods with the transport lock held. A call may take, use and release
    slots. Calls that `call` adds run after `call`.
    """

    def __init__(self) -> None:
        self._line: deque[LaunchSlot] = deque()
        self._late: list[Call] = []
        self._moving = False
        self._unordered = False

    def __len__(self) -> int:
        return len(self._line)

    def take(self) -> LaunchSlot:
        """Return a new slot, the last one."""
        slot = LaunchSlot(self)
        self._line.append(slot)
        return slot

    def run_all(self) -> None:
        """Make all waiting calls in order, and later ones without waiting: the order is no longer needed."""
        self._unordered = True
        self.move()

    def add(self, slot: LaunchSlot, call: Callable[[*Ts], object], *args: *Ts, last: bool = False) -> None:
        """See `LaunchSlot.run`. True for `last` also releases the slot."""
        slot.released = slot.released or last
        (self._late if self._unordered else slot.calls).append((call, args))
        self.move()

    def move(self) -> None:
        """Make the calls that need not wait."""
        if self._moving:
            return
        self._moving = True
        line, late = self._line, self._late
        try:
            while line or late:
                slot = line[0] if line else None
                calls = late if slot is None else slot.calls
                if calls:
                    call, args = calls.pop(0)
                    call(*args)
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
        """Calls that wait for earlier slots."""
        self.released = False

    def run(self, call: Callable[[*Ts], object], *args: *Ts) -> None:
        """Make `call`, which must not raise, after all earlier slots are released.

        Raises `RuntimeError` if this slot is released.
        """
        if self.released:
            raise RuntimeError("this slot is released: the call has no place in the launch order")
        self._order.add(self, call, *args)

    def release(self) -> None:
        """Accept no more calls. Waiting calls are still made. A second call does nothing."""
        self.released = True
        self._order.move()
