"""One item on its way from the source to the consumer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from aiodist.handles import Handle, Permit


@dataclass(slots=True)
class Made:
    """An item that is ready, or the error that came in its place: `StopAsyncIteration` at the end of the source."""

    value: Any = None
    error: BaseException | None = None
    nbytes: int = 0
    reading: float = 0.0
    """Seconds that the source took."""
    transforming: float = 0.0
    """Seconds that `transform` took."""
    copying: float = 0.0
    """Seconds from when it was ready on the host until it was on the device."""
    copies: Sequence[Tensor] = ()
    """The tensors in it that were copied to the device."""
    late: bool = False
    """Something in it goes to the device only when it is taken."""

    def failed(self, error: BaseException) -> Made:
        """Return what becomes of it when it cannot be brought to the device."""
        return replace(self, value=None, error=error, nbytes=0, copies=(), late=False)


@dataclass(eq=False, slots=True)
class Item:
    """The place of an item in the order: asked for, read, transformed, and then `handle` is done."""

    seq: int
    handle: Handle[Made]
    settle: Callable[[Item, Made], None]
    permit: Permit = field(init=False)
    settled: bool = False
    """The pass knows what became of it."""

    def release(self) -> None:
        """On the loop: it was taken, or never will be. Gives its bytes back, and lets go of what knows of it."""
        self.settled = True
        self.permit.release()
        del self.permit  # which knows of the item: its tensors would live until the garbage collector comes

    def wake(self, handle: Handle[Any], late: Exception | None, /) -> None:
        """On the loop: it is ready."""
        if late is None:
            self.settle(self, handle.result())
