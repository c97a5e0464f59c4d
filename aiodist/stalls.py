"""Operations that do not move: ranks show each other what they called, so that whoever is late or differs is named."""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections.abc import Callable, Mapping
from typing import Any

from aiodist.handles import Handle
from aiodist.ledger import Ledger

__all__ = ["Stalls"]

_STALL_SECONDS = 0.1  # an operation that is pending at two ticks in a row is published
_ANSWER_SECONDS = 0.5  # how long the other ranks have to answer to one that failed
_HISTORY_SECONDS = 1.0  # the same where many calls are compared


class Stalls:
    """Watches the pending operations of one communicator, on the loop's thread."""

    def __init__(self, pending: Mapping[Handle[Any], bool], ledger: Ledger, loop: AbstractEventLoop) -> None:
        """`pending` holds them in order of issue, with True for collectives; whoever owns it adds and removes."""
        self.watching = False
        self._pending = pending
        self._ledger = ledger
        self._loop = loop
        self._old: set[int] = set()
        """What was pending at the last tick, by number: a handle would keep its tensors."""
        self._silent = False

    def silence(self) -> None:
        """Publish nothing more: the communicator is given up, or closed."""
        self._silent = True

    def keep_watch(self) -> None:
        """Look at what is pending ten times a second, for as long as something is."""
        if not self.watching:
            self.watching = True
            self._loop.call_later(_STALL_SECONDS, self._watch)

    def expect(self, handle: Handle[Any], seconds: float) -> None:
        """Have it known in good time who is late when `handle` reaches its deadline, `seconds` from now."""
        if seconds < 3 * _STALL_SECONDS:
            self._loop.call_later(seconds / 2, self._publish, handle)

    def ask(self, handle: Handle[Any], conclude: Callable[[], None]) -> None:
        """Give the ranks time to find out that they disagree on `handle`, whose transfer failed; then conclude."""
        self._publish(handle)
        self._loop.call_later(_ANSWER_SECONDS, conclude)

    def compare_history(self, conclude: Callable[[], None]) -> None:
        """Let the ranks show each other their latest calls, which raises where they differ; then conclude."""
        self._ledger.publish_history()
        self._loop.call_later(_HISTORY_SECONDS, conclude)

    def _watch(self) -> None:
        pending = list(self._pending)
        if not pending:
            self.watching = False
            self._old.clear()
            return
        collectives = [h for h in pending if self._pending.get(h)]
        stalled = next((h for h in collectives if h.seq in self._old), None)
        if stalled is not None:
            self._publish(stalled)
        self._old = {h.seq for h in collectives}
        self._loop.call_later(_STALL_SECONDS, self._watch)

    def _publish(self, handle: Handle[Any]) -> None:
        if not self._silent and not handle.done() and self._pending.get(handle):
            self._ledger.publish(handle.seq)
