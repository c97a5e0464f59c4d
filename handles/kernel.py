"""Runs programs, which are coroutines whose steps are transfers, on the thread that makes progress.

A program awaits `transfers([...])`, the transfers of one step, and `together(...)`, programs that run at the same time.
A program is no task of the loop, so the operation continues while no task awaits the handle, and while user code
blocks the loop's thread. A program runs only with the transport lock held.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass, field
from types import coroutine
from typing import Any, ParamSpec, TypeVar

from aiodist.errors import AiodistError, BackendError
from aiodist.handles.sources import Done

P = ParamSpec("P")
T = TypeVar("T")
Program = Coroutine[Any, Any, T]
"""A coroutine that awaits only functions of this module, and other programs."""
Transfer = Callable[[Done], None]
"""Function that starts a transfer or waits for an event.

The function calls its argument once, when the transfer has ended, perhaps before the function returns.
"""
Finish = Callable[[Any, BaseException | None], None]
"""Callback for the result of a program, or for its error."""

_UNEXPECTED = (RuntimeError, AssertionError, LookupError, AttributeError, ArithmeticError, MemoryError, OSError)
"""Errors that no program raises on purpose. Each becomes a `BackendError`, which is reported to the other ranks."""


def ours(error: Exception) -> AiodistError:
    """Return an `AiodistError` unchanged, and any other `error` as the cause of a `BackendError`."""
    if isinstance(error, AiodistError):
        return error
    wrapped = BackendError(f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


@coroutine
def transfers(step: Sequence[Transfer]) -> Generator[Sequence[Transfer], None, None]:
    """Start all transfers of one step. Return when all have ended, or raise the first error."""
    yield step


def prepare(function: Callable[P, Program[T]], *args: P.args, **kwargs: P.kwargs) -> Program[T]:
    """Return the program of `function(*args)`, to be run, closed or dropped.

    The returned program has begun, since Python warns of a coroutine that never begins. The program calls `function`
    when it is run.
    """
    program = _prepared(function, *args, **kwargs)
    program.send(None)
    return program


async def _prepared(function: Callable[P, Program[T]], *args: P.args, **kwargs: P.kwargs) -> T:
    await transfers(())
    return await function(*args, **kwargs)


@coroutine
def resume(program: Program[T]) -> Generator[Any, Any, T]:
    """Run a prepared program to its result. Python has no await for a coroutine that has begun."""
    return (yield from program.__await__())


async def together(*programs: Program[T]) -> list[T]:
    """Run several programs at the same time and return their results. Each program needs tags of its own."""
    if len(programs) == 1:
        return [await programs[0]]
    parts = [Nested(program) for program in programs]
    await transfers(parts)
    return [part.result for part in parts]


def run(program: Program[T], finish: Finish, ended: Callable[[], None] = lambda: None) -> None:
    """Run `program` to its end, with the transport lock held. Raise only errors of `finish`.

    Two callbacks are called exactly once: `finish(result, error)` with the outcome, and `ended()` when no transfer of
    the program uses its tensors any more. `ended` comes first, with one exception: if a call of a step raises, `finish`
    is called before the other transfers of the step have ended. These transfers may be in flight until the end of the
    process, since other ranks wait for the transfer that failed here.
    """
    _Run(program, finish, ended).advance(None)


@dataclass(eq=False, slots=True)
class _Part:
    """The callback of one transfer of a step, effective at the first call only."""

    _run: _Run | None

    def __call__(self, error: BaseException | None) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.part_over(error)

    def fails(self, error: BaseException) -> None:
        """Report the `error` of a nested program whose transfers may never end."""
        if self._run is not None:
            self._run.fail(error)


@dataclass(eq=False, slots=True)
class _Run:
    """A running program."""

    _program: Program[Any]
    _finish: Finish | None
    _ended: Callable[[], None]
    _left: int = 0
    _error: BaseException | None = None
    _step: Sequence[Transfer] = ()

    def advance(self, error: BaseException | None) -> None:
        """Resume the program, until a step has a transfer in flight."""
        while True:
            try:
                step = self._program.send(None) if error is None else self._program.throw(error)
            except StopIteration as stop:
                self._end(stop.value, None)
                return
            except BaseException as raised:  # noqa: BLE001  - the task that awaits the operation raises it
                self._end(None, ours(raised) if isinstance(raised, _UNEXPECTED) else raised)
                return
            self._error = None
            # The step is kept until all transfers have ended, since a transfer may hold the only reference to its
            # tensor.
            self._step = step
            # One more than the transfers, so that a transfer that ends immediately does not resume the program inside
            # this loop.
            self._left = len(step) + 1
            for start in step:
                part = _Part(self)
                try:
                    start(part)
                except Exception as raised:  # noqa: BLE001  - as above; other ranks wait for the other transfers
                    self._error = self._error or ours(raised)
                    part(self._error)
            self._left -= 1
            if self._left:
                if self._error is not None:
                    self.fail(self._error)
                return
            error = self._error

    def part_over(self, error: BaseException | None) -> None:
        """Count an ended transfer, and resume the program after the last one."""
        self._error = self._error or error
        self._left -= 1
        if self._left == 0:
            self.advance(self._error)

    def fail(self, error: BaseException) -> None:
        """Report `error` as the outcome, before the end of the program."""
        finish, self._finish = self._finish, None
        if finish is not None:
            finish(None, error)

    def _end(self, result: object, error: BaseException | None) -> None:
        finish, self._finish = self._finish, None
        self._ended()
        if finish is not None:
            finish(result, error)


@dataclass(eq=False, slots=True)
class Nested:
    """A transfer that runs a program. Code that wraps transfers can wrap the transfers of this program too."""

    program: Program[Any]
    result: Any = field(default=None, init=False)
    _done: Done | None = field(default=None, init=False)
    _error: BaseException | None = field(default=None, init=False)
    _ended: bool = field(default=False, init=False)

    def __call__(self, done: Done) -> None:
        """Run the program. `done` is called when none of its transfers uses its tensors any more."""
        self._done = done
        run(self.program, self._finish, self._end)

    def _finish(self, result: object, error: BaseException | None) -> None:
        assert self._done is not None
        self.result, self._error = result, error
        if self._ended:
            self._done(error)
        elif isinstance(self._done, _Part) and error is not None:
            self._done.fails(error)

    def _end(self) -> None:
        assert self._done is not None
        self._ended = True
        if self._error is not None:
            self._done(self._error)
