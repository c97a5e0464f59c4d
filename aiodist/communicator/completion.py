"""The end of an operation: its outcome, and when its memory is free again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from aiodist.backends.base import once
from aiodist.communicator.claims import Claim, release
from aiodist.communicator.gate import Entry
from aiodist.handles import Handle, Progress
from aiodist.handles.kernel import Program, run


class Owner(Protocol):
    """Answers for operations; with the transport lock held."""

    progress: Progress

    def over(self, handle: Handle[Any], result: object, error: BaseException | None) -> None:
        """The operation of `handle` is over, and its memory free."""

    def fell_out(self, handle: Handle[Any], error: BaseException) -> None:
        """It cannot go on here, where it is a collective."""

    def freed(self, handle: Handle[Any]) -> None:
        """Nothing of the operation, which failed, uses its memory any more; before or after it `fell_out`."""

    def finish(self, handle: Handle[Any], call: Callable[[], object]) -> None:
        """Have `call` settle `handle` without the transport lock, where the user's code may run."""

    def locked(self, call: Callable[[], object]) -> None:
        """Make `call` with the transport lock held; from any thread that does not hold it."""

    def later(self, call: Callable[[], object]) -> None:
        """Make `call` on the loop when other ranks have had time to tell what they know; from any thread."""


@dataclass(eq=False, slots=True)
class Completion:
    """What the outcome of one operation is told to, once; the transport lock is held.

    Its memory is given back when the outcome is known and, where a program runs, no transfer uses it any more: one
    that fails may have others under way.
    """

    _owner: Owner
    handle: Handle[Any] | None
    """The handle to settle; None for a receive that no message has matched."""
    _claims: Sequence[Claim]
    _convert: Callable[[Any], Any] | None = None
    """Makes the result of what came, on the loop's thread or one that waits: it may run the user's code."""
    given_back: Callable[[Any, BaseException | None], None] | None = field(default=None, init=False)
    """Callback in place of `handle` after another receive was given the message."""
    _failed: bool = field(default=False, init=False)
    _left: int = field(default=1, init=False)

    def __call__(self, result: object, error: BaseException | None) -> None:
        """The outcome is `result`, or `error`."""
        owner, handle = self._owner, self.handle
        if error is None and self._convert is not None and handle is not None:
            owner.finish(handle, partial(self._converted, self._convert, result))
            return
        self._failed = error is not None
        self._release()
        if handle is None:
            return
        if error is None:
            owner.over(handle, result, None)
        else:
            owner.fell_out(handle, error)

    def run(
        self,
        program: Program[Any],
        entry: Entry | None = None,
        then: Callable[[Any, BaseException | None], None] | None = None,
    ) -> None:
        """Run `program` to that end; its outcome counts when the ranks agree, where it entered a gate.

        `then` is called with the outcome in place of this, and calls this.
        """
        self._left += 1
        finish = (then or self) if entry is None else partial(through_gate, self._owner, entry, self)
        run(program, finish, self._release)

    def refuse(self, program: Program[Any], error: BaseException | None) -> None:
        """`program` is not run."""
        program.close()
        self(None, error)

    def _converted(self, convert: Callable[[Any], Any], result: object) -> None:
        """On the loop's thread, or on one that waits for the handle."""
        value: Any = None
        error: BaseException | None = None
        if self.given_back is None:
            try:
                value = convert(result)
            except BaseException as raised:  # noqa: BLE001  - it belongs to the task that awaits the operation
                error = raised
        self._owner.progress.start_from_thread(partial(self._settle, result, value, error))

    def _settle(self, result: object, value: object, error: BaseException | None) -> None:
        """With the lock held: a thread may have given the message back while it was converted."""
        if self.given_back is not None:
            self.given_back(result, None)
            value, error = None, asyncio.CancelledError()
        self._release()
        if self.handle is not None:
            self._owner.over(self.handle, value, error)

    def release(self) -> None:
        """It will have no outcome: give its memory back."""
        self._release()

    def _release(self) -> None:
        self._left -= 1
        if self._left == 0:
            release(self._claims)
            self._claims = ()
            if self._failed and self.handle is not None:
                self._owner.freed(self.handle)


def through_gate(
    owner: Owner,
    entry: Entry,
    finish: Callable[[Any, BaseException | None], None],
    result: object,
    error: BaseException | None,
) -> None:
    """Tell `finish` the outcome of `entry` when the ranks are known to agree on it, or that they do not.

    Where they differ, what it met were messages of other operations. For an error nobody need wait who is late.
    """
    if entry.decided and entry.error is None:
        finish(result, error)
        return
    known = once(lambda differ: finish(None if differ else result, differ or error))
    entry.known(known)
    if error is not None:
        owner.later(partial(owner.progress.exclusively, partial(known, None)))
