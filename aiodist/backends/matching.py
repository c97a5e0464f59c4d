"""Matching of messages and receives by source, tag and kind, each in the order of arrival or issue."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from aiodist.backends.base import Done
from aiodist.types import ANY


class Matchable(Protocol):
    """A receive, whose source, tag and kind may be `ANY`, or a message."""

    @property
    def src(self) -> int: ...

    @property
    def tag(self) -> int: ...

    @property
    def kind(self) -> int: ...

    order: int


@dataclass(eq=False, slots=True)
class PostedReceive:
    """A receive that waits for a message. Subclasses add fields."""

    src: int
    tag: int
    kind: int = field(default=ANY, kw_only=True)
    order: int = field(default=0, kw_only=True)
    """Number in the order of issue, or 0 before the receive waits."""


@dataclass(eq=False, slots=True)
class UnexpectedMessage:
    """A message that came before its receive. Subclasses add fields."""

    src: int
    tag: int
    kind: int = field(default=0, kw_only=True)
    order: int = field(default=0, kw_only=True)
    """Number in the order of arrival, or 0 before the message waits."""


@dataclass(eq=False, slots=True)
class TransportReceive(PostedReceive):
    """A receive of a transport."""

    into: Tensor
    done: Done

    def finish(self, _: object, error: BaseException | None) -> None:
        """Call `done` at the end of the program that brings the message."""
        self.done(error)


R = TypeVar("R", bound=Matchable)
M = TypeVar("M", bound=Matchable)
T = TypeVar("T", bound=Matchable)


class Matching(Generic[R, M]):
    """The receives and messages of one communicator on one rank that have not met.

    A receive calls `post`. A message calls `match`, then `keep` if there is no receive. There is a list for each tag,
    so the search time does not depend on operations with other tags.
    """

    def __init__(self) -> None:
        self._receives: dict[int, list[R]] = {}
        self._messages: dict[int, list[M]] = {}
        self._numbered = 0

    @property
    def receives(self) -> list[R]:
        """The receives that wait, in order (any thread)."""
        return _in_order(self._receives)

    @property
    def messages(self) -> list[M]:
        """The messages that wait, in order (any thread)."""
        return _in_order(self._messages)

    @property
    def expects(self) -> bool:
        """True if a receive waits."""
        return bool(self._receives)

    def number(self, message: M) -> None:
        """Give a message the next place in the order of arrival."""
        self._numbered = message.order = self._numbered + 1

    def post(self, receive: R) -> M | None:
        """Remove and return the first message that `receive` takes, or let `receive` wait."""
        tag = receive.tag
        message = _take(self._messages, (tag,) if tag != ANY else tuple(self._messages), receive.src, receive.kind)
        if message is None:
            self._numbered = receive.order = self._numbered + 1
            self._receives.setdefault(tag, []).append(receive)
        return message

    def match(self, src: int, tag: int, kind: int = 0) -> R | None:
        """Remove and return the first receive that takes a message with these fields."""
        return _take(self._receives, (tag, ANY), src, kind)

    def first(self, tag: int) -> R | None:
        """Return the first receive that waits for `tag`, or None if another receive takes any tag."""
        waiting = self._receives.get(tag)
        return None if waiting is None or ANY in self._receives else waiting[0]

    def keep(self, message: M) -> None:
        """Let `message` wait: at the place of its number, or at the end without a number."""
        waiting = self._messages.setdefault(message.tag, [])
        if message.order:
            insort(waiting, message, key=_order)
        else:
            self._numbered = message.order = self._numbered + 1
            waiting.append(message)

    def waits(self, receive: R) -> bool:
        """Return True if no message has matched `receive`."""
        return receive in self._receives.get(receive.tag, ())

    def cancel(self, receive: R) -> None:
        """Remove a receive that waits."""
        _remove(self._receives, receive)

    def cancel_receives(self, which: list[R] | None = None) -> list[R]:
        """Remove and return the receives in `which`, or all receives if None."""
        return _cancel(self._receives, self.receives if which is None else which)

    def cancel_messages(self, which: list[M] | None = None) -> list[M]:
        """Remove and return the messages in `which`, or all messages if None."""
        return _cancel(self._messages, self.messages if which is None else which)


def _take(table: dict[int, list[T]], tags: Sequence[int], src: int, kind: int) -> T | None:
    """Remove and return the first entry with this source, kind and one of these tags. `ANY` on either side fits."""
    found: T | None = None
    at = 0
    for tag in tags:
        for i, one in enumerate(table.get(tag, ())):
            if (one.src == src or ANY in (one.src, src)) and (one.kind == kind or ANY in (one.kind, kind)):
                if found is None or one.order < found.order:
                    found, at = one, i
                break
    if found is not None:
        waiting = table[found.tag]
        del waiting[at]
        if not waiting:
            del table[found.tag]
    return found


def _order(one: Matchable) -> int:
    return one.order


def _in_order(table: dict[int, list[T]]) -> list[T]:
    return sorted([one for waiting in tuple(table.values()) for one in tuple(waiting)], key=_order)


def _remove(table: dict[int, list[T]], one: T) -> None:
    waiting = table[one.tag]
    waiting.remove(one)
    if not waiting:
        del table[one.tag]


def _cancel(table: dict[int, list[T]], which: list[T]) -> list[T]:
    for one in which:
        _remove(table, one)
    return which
