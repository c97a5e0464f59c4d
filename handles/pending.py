"""A handle, as the modules that it is built on see it."""

from __future__ import annotations

from typing import Protocol


class Pending(Protocol):
    """What a `Handle` shows to timers, to the text of errors and to `Progress`, which import nothing of it."""

    polled: bool
    """A poller finds out that it is over."""

    @property
    def op(self) -> str:
        """What it is a handle of."""

    @property
    def is_pending(self) -> bool:
        """It is not over; nothing is polled to find out."""

    def done(self) -> bool:
        """Return True when it is over; polls."""

    def expire(self) -> None:
        """Let its deadline have passed now."""

    def tell_late(self) -> None:
        """Its deadline has passed."""
