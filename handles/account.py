"""An account reports handles that were dropped before their outcome was retrieved."""

from __future__ import annotations

import asyncio
import contextlib
import warnings
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from aiodist.errors import CommunicatorError, PeerError
from aiodist.handles.origin import Origin, described

if TYPE_CHECKING:
    from types import CodeType


class _Dropped(NamedTuple):
    op: str
    seq: int
    whence: tuple[CodeType, int] | None
    error: BaseException | None
    given_up: bool
    """True if an await of the handle ended without the outcome."""

    @property
    def origin(self) -> Origin | None:
        """Line that issued the operation, or None if unknown. Computed only for a report."""
        return None if self.whence is None else Origin(*self.whence)


class Account:
    """The handles of one communicator or stream that were dropped before their outcome was retrieved.

    A communicator's account is `prompt`, so each handle is reported once dropped and finished. An error goes to the
    loop's exception handler. A result becomes a `RuntimeWarning` at the line that issued the operation. Python shows
    this warning once for each line. A stream's account reports errors at each `sync` of the stream. The `sync` also
    retrieves the results of earlier operations. When the stream closes, its account becomes prompt.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        prompt: bool = False,
        results: bool = True,
        late: Callable[[Any], dict[int, str]] | None = None,
        details: Callable[[Any], str] | None = None,
    ) -> None:
        """If `results` is False, a result that was dropped after its await ended early is not reported."""
        self.late = late
        """Returns the late ranks of the pending operation of a handle, each with its state, or None."""
        self.details = details
        """Returns other reasons why the operation of a handle is pending, as text, or None."""
        self.waits: dict[tuple[str, int], float] | None = None
        """Seconds of awaits and blocked threads, by call and thread, or None without metrics."""
        self.forgiven: tuple[type[BaseException], ...] = ()
        """Errors that are not reported, since this rank has failed and reports its failure itself."""
        self.strict = False
        """True makes a change of a tensor in flight an error."""
        self._loop = loop
        self._prompt = prompt
        self._results = results
        self._judging = False
        self._dropped: deque[_Dropped] = deque()
        self._covered = -1
        self._shown: dict[Any, Any] = {}
        """Registry of the `warnings` module, with the lines whose warning was shown."""

    def dropped(
        self,
        op: str,
        seq: int,
        whence: tuple[CodeType, int] | None,
        error: BaseException | None,
        *,
        given_up: bool = False,
    ) -> None:
        """Record a dropped handle for a later report, since the garbage collector may call this on any thread."""
        if isinstance(error, self.forgiven) or (given_up and isinstance(error, (CommunicatorError, PeerError))):
            return  # every later call of the communicator raises such an error
        if given_up and error is None and not self._results:
            return
        if error is not None or given_up or seq > self._covered:
            self._dropped.append(_Dropped(op, seq, whence, error, given_up))
            if self._prompt:
                self._judge_soon()

    def cover(self, seq: int) -> None:
        """Report dropped errors of operations up to number `seq`, after a sync, and results whose await ended early."""
        self._covered = max(self._covered, seq)
        entries = [self._dropped.popleft() for _ in range(len(self._dropped))]
        self._dropped.extend(entry for entry in entries if entry.seq > seq)
        for entry in entries:
            if entry.seq <= seq and not self._report(entry) and entry.given_up:
                self._warn(entry)

    def judge(self) -> None:
        """Report all dropped handles that no `sync` covered, and later handles as soon as dropped."""
        self._prompt = True
        self._judging = False
        try:
            while self._dropped:
                entry = self._dropped.popleft()
                if not self._report(entry):
                    self._warn(entry)
        finally:
            if self._dropped:  # a warning was raised as an error
                self._judge_soon()

    def _judge_soon(self) -> None:
        if self._judging:
            return
        self._judging = True
        try:
            self._loop.call_soon_threadsafe(self.judge)
        except RuntimeError:  # the loop is closed, so report here, where no warning may be raised
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
        lost = "finished after its await had ended, and its result was dropped"
        what = lost if entry.given_up else "was never awaited"
        self.warn(entry.op, entry.origin, what)

    def warn(self, op: str, where: Origin | None, what: str) -> None:
        """Warn once for each line that the operation `op`, issued at the line `where`, `what`."""
        if where is None:
            warnings.warn(f"{op} {what}", RuntimeWarning, stacklevel=2)
        else:  # without the number, since Python would show the different texts of all iterations of a loop
            message = f"{op} issued at {where} {what}"
            warnings.warn_explicit(message, RuntimeWarning, where.filename, where.lineno, registry=self._shown)
