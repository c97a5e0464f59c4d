"""Which message goes to which receive: by source and tag, each in the order of its arrival or issue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

from aiodist.backends.base import Done
from aiodist.types import ANY


class _Labelled(Protocol):
    """What is matched; the source of a receive may be `ANY`, that of a message never is."""

    @property
    def src(self) -> int: ...

    @property
    def tag(self) -> int: ...


class Receive(NamedTuple):
    """A receive that waits for its message."""

    src: int
    tag: int
    into: Tensor
    done: Done


R = TypeVar("R", bound=_Labelled)
M = TypeVar("M", bound=_Labelled)
T = TypeVar("T", bound=_Labelled)


class Matching(Generic[R, M]):
    """The receives and messages of one communicator on one rank that have not met; either side may be there first.

    A receive calls `take`, and `expect` where there is no message; a message calls `match`, and `keep` where there is
    no receive. What is cancelled is as if it had never been there.
    """

    def __init__(self) -> None:
        self._receives: dict[int, list[R]] = {}  # by tag, as the messages
        self._messages: dict[int, list[M]] = {}

    def take(self, src: int, tag: int) -> M | None:
        """Return the first message from `src`, which may be `ANY`, and keep it no longer."""
        for i, message in enumerate(self._messages.get(tag, ())):
            if src in (ANY, message.src):
                return _pop(self._messages, tag, i)
        return None

    def expect(self, receive: R) -> None:
        """Have `receive`, for which `take` found nothing, wait."""
        self._receives.setdefault(receive.tag, []).append(receive)

    def match(self, src: int, tag: int) -> R | None:
        """Return the first receive that fits a message from `src`; it waits no longer."""
        for i, receive in enumerate(self._receives.get(tag, ())):
            if receive.src in (ANY, src):
                return _pop(self._receives, tag, i)
        return None

    def keep(self, message: M) -> None:
        """Have `message`, which `match` found nothing for, wait."""
        self._messages.setdefault(message.tag, []).append(message)

    def cancel_receives(self, which: Callable[[R], bool] | None = None) -> list[R]:
        """Take out the receives for which `which` is true, or all, and return them."""
        return _cancel(self._receives, which)

    def cancel_messages(self, which: Callable[[M], bool] | None = None) -> list[M]:
        """Take out the messages for which `which` is true, or all, and return them."""
        return _cancel(self._messages, which)


def _pop(table: dict[int, list[T]], tag: int, i: int) -> T:
    found = table[tag].pop(i)
    if not table[tag]:
        del table[tag]
    return found


def _cancel(table: dict[int, list[T]], which: Callable[[T], bool] | None) -> list[T]:
    cancelled: list[T] = []
    for tag, waiting in list(table.items()):
        kept = [] if which is None else [one for one in waiting if not which(one)]
        cancelled += waiting if which is None else [one for one in waiting if which(one)]
        if kept:
            table[tag] = kept
        else:
            del table[tag]
    return cancelled
