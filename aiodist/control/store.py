"""The key-value store that all ranks share: no input, no output, so that both hubs use it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Waiter = tuple[int, int]
"""Who asks: a rank, and the number of its request."""
Reply = Callable[[object, Exception | None], object]


class Store:
    """Byte strings by name, counters, and those who wait for a name."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._waiting: dict[str, dict[Waiter, Reply]] = {}

    def answer(self, question: Sequence[object], waiter: Waiter, reply: Reply) -> bool:
        """Do what is asked and call `reply(value, error)`: now, or when a key that is asked for is set.

        Return False for a question that is not one for the store.
        """
        value: object = None
        match question:
            case ["get", str(key)]:
                if key not in self._values:
                    self._waiting.setdefault(key, {})[waiter] = reply
                    return True
                value = self._values[key]
            case ["set", str(key), bytes(new)]:
                self._set(key, new)
            case ["add", str(key), int(amount)]:
                old = self._values.get(key, b"0")
                try:
                    value = int(old) + amount
                except ValueError:
                    reply(None, ValueError(f"key {key!r} holds {old[:32]!r}, which is no counter"))
                    return True
                self._set(key, str(value).encode())
            case _:
                return False
        reply(value, None)
        return True

    def _set(self, key: str, value: bytes) -> None:
        self._values[key] = value
        for reply in self._waiting.pop(key, {}).values():
            reply(value, None)

    def cancel(self, rank: int, number: int | None = None) -> None:
        """Wait no more for the request `number` of `rank`, or for any of its; nothing happens when none waits."""
        for key, waiters in tuple(self._waiting.items()):
            for waiter in tuple(waiters):
                if waiter[0] == rank and number in (None, waiter[1]):
                    del waiters[waiter]
            if not waiters:
                del self._waiting[key]
