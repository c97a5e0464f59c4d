"""An account reports handles whose outcome was never retrieved, and handles that take long."""

from __future__ import annotations

import asyncio
import contextlib
import warnings
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from aiodist.errors import CommunicatorError, PeerError
from aiodist.handles.origin import Origin, described

if TYPE_CHECKING:
    from types import CodeType


class Witness(Protocol):
    """Knowledge of the reasons why operations are pending; its methods take their `Handle`."""

    def late(self, handle: Any, /) -> dict[int, str]:  # noqa: ANN401
        """Return the ranks that the pending operation is known to wait for, each with where it is."""

    def details(self, handle: Any, /) -> str:  # noqa: ANN401
        """Return other reasons, as text; "" without any."""


class _Dropped(NamedTuple):
    op: str
    seq: int
    whence: tuple[CodeType, int] | None
    error: BaseException | None
    given_up: bool
    """An await of it ended without its outcome."""

    @property
    def origin(self) -> Origin | None:
        """The line that issued it, computed only for a report."""
        return None if self.whence is None else Origin(*self.whence)


class Account:
    """The handles of one communicator or stream that were dropped unconsumed.

    A `prompt` account, that of a communicator, reports each as soon as it is both dropped and finished: errors go to
    the loop's exception handler, and a result is a `RuntimeWarning` at the line that issued it, which Python shows once
    for each line. Other accounts wait for a `sync`, which covers the results before it; they become prompt at close.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        prompt: bool = False,
        results: bool = True,
        witness: Witness | None = None,
    ) -> None:
        """`results` is True if a result is reported that is dropped after its await has ended early."""
        self.witness = witness
        """The witness of the operations while they are pending."""
        self.forgiven: tuple[type[BaseException], ...] = ()
        """Errors that need no retrieval: this rank has failed, and reports that itself."""
        self._loop = loop
        self._prompt = prompt
        self._results = results
        self._judging = False
        self._dropped: deque[_Dropped] = deque()
        self._covered = -1
        self._shown: dict[Any, Any] = {}
        """Registry of `warnings`, for the lines that it has shown."""

    def dropped(
        self,
        op: str,
        seq: int,
        whence: tuple[CodeType, int] | None,
        error: BaseException | None,
        *,
        given_up: bool = False,
    ) -> None:
        """Take note of a handle; called by the garbage collector, on any thread, so it only appends."""
        if isinstance(error, self.forgiven) or (given_up and isinstance(error, (CommunicatorError, PeerError))):
            return  # every later call raises the latter
        if given_up and error is None and not self._results:
            return
        if error is not None or given_up or seq > self._covered:
            self._dropped.append(_Dropped(op, seq, whence, error, given_up))
            if self._prompt:
                self._judge_soon()

    def cover(self, seq: int) -> None:
        """A sync saw all operations up to `seq` through: report the errors among them, forget the rest."""
        self._covered = max(self._covered, seq)
        entries = [self._dropped.popleft() for _ in range(len(self._dropped))]
        self._dropped.extend(entry for entry in entries if entry.seq > seq)
        for entry in entries:
            if entry.seq <= seq and not self._report(entry) and entry.given_up:
                self._warn(entry)

    def judge(self) -> None:
        """Report the handles that no `sync` covered, now and, from now on, when they are dropped."""
        self._prompt = True
        self._judging = False
        try:
            while self._dropped:
                entry = self._dropped.popleft()
                if not self._report(entry):
                    self._warn(entry)
        finally:
            if self._dropped:  # a warning that is an error
                self._judge_soon()

    def _judge_soon(self) -> None:
        if self._judging:
            return
        self._judging = True
        try:
            self._loop.call_soon_threadsafe(self.judge)
        except RuntimeError:  # the loop is closed: say it here, where nothing may be raised
            with contextlib.suppress(Warning):
                self.judge()

    def _report(self, entry: _Dropped) -> bool:
        if entry.error is None or isinstance(entry.error, asyncio.CancelledError):
            return False
        why = "raised after its await had ended" if entry.given_up else "raised, and nobody awaited it"
        message = f"{described(entry.op, entry.seq, entry.origin)} {why}"
        self._loop.call_exception_handler({"message": message, "exception": entry.error})
        return True

    def _warn(self, entry: _Dropped) -> None:
        where = entry.origin
        lost = "finished after its await had ended, and its result was dropped"
        what = lost if entry.given_up else "was never awaited"
        if where is None:
            warnings.warn(f"{entry.op} {what}", RuntimeWarning, stacklevel=2)
        else:  # without its number: in a loop each would be another text, and none the same as before
            message = f"{entry.op} issued at {where} {what}"
            warnings.warn_explicit(message, RuntimeWarning, where.filename, where.lineno, registry=self._shown)
