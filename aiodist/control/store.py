"""The key-value store that all ranks share: no input, no output, so that both hubs use it."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Store"]

Waiter = tuple[int, int]
"""Who waits: a rank, and the number of its request."""


class Store:
    """Byte strings by name, counters, and those who wait for a name."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._waiters: dict[str, dict[Waiter, Callable[[bytes], None]]] = {}
        self._waiting_for: dict[Waiter, str] = {}

    def set(self, key: str, value: bytes) -> None:
        """Store `value` and give it to all who wait for `key`."""
        self._values[key] = value
        for waiter, found in self._waiters.pop(key, {}).items():
            del self._waiting_for[waiter]
            found(value)

    def get(self, key: str, waiter: Waiter, found: Callable[[bytes], None]) -> None:
        """Call `found(value)`: now, or when `key` is set, unless `waiter` is cancelled before."""
        if key in self._values:
            found(self._values[key])
        else:
            self._waiters.setdefault(key, {})[waiter] = found
            self._waiting_for[waiter] = key

    def cancel(self, waiter: Waiter) -> None:
        """Wait no more on behalf of `waiter`; nothing happens when it does not wait."""
        key = self._waiting_for.pop(waiter, None)
        if key is not None:
            waiters = self._waiters[key]
            del waiters[waiter]
            if not waiters:
                del self._waiters[key]

    def cancel_all(self, rank: int) -> None:
        """Wait no more on behalf of `rank`."""
        for waiter in [waiter for waiter in self._waiting_for if waiter[0] == rank]:
            self.cancel(waiter)

    def add(self, key: str, amount: int) -> int:
        """Add `amount` to the counter `key` and return the sum; raise `ValueError` when it is no counter."""
        old = self._values.get(key, b"0")
        try:
            total = int(old) + amount
        except ValueError:
            raise ValueError(f"key {key!r} holds {old[:32]!r}, which is no counter") from None
        self.set(key, str(total).encode())
        return total

    def delete(self, key: str) -> None:
        """Forget `key` if it is there."""
        self._values.pop(key, None)
