"""Runs programs, which are coroutines whose steps are transfers, on the thread that makes progress.

A program awaits `transfers([...])`, the transfers of one step, and `together(...)`, programs that run at the same time.
A program is no task of the loop, so the operation continues while no task awaits the handle, and while user code
blocks the loop's thread. A program runs only with the transport lock held.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass
from types import coroutine
from typing import Any, TypeVar, TypeVarTuple

from aiodist.errors import AiodistError, BackendError
from aiodist.handles.sources import Done

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
Program = Coroutine[Any, Any, T]
"""A coroutine that awaits only functions of this module, and other programs."""
Transfer = tuple[Callable[..., object], *tuple[Any, ...]]
"""Function that starts a transfer or waits for an event, and its arguments without the last one, `done`.

The function calls `done` once, when the transfer has ended, perhaps before the function returns.
"""
Part = Transfer | Program[None]
"""One part of a step. The parts of a step are in flight at the same time."""
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


async def transfer(start: Callable[[*Ts, Done], object], *args: *Ts) -> None:
    """Start one transfer, `start(*args, done)`. Return when `done` is called, or raise its error."""
    await transfers([(start, *args)])


@coroutine
def transfers(step: Sequence[Part]) -> Generator[Sequence[Part], None, None]:
    """Start all parts of one step. Return when all parts have ended, or raise the first error."""
    yield step


@coroutine
def resume(program: Program[T]) -> Generator[Any, Any, T]:
    """Run a program that has begun to its result. Python has no await for such a coroutine."""
    return (yield from program.__await__())


async def together(*programs: Program[T]) -> list[T]:
    """Run several programs at the same time and return their results. Each program needs tags of its own."""
    if len(programs) == 1:
        return [await programs[0]]
    results: list[Any] = [None] * len(programs)
    await transfers([_keep_result(program, results, i) for i, program in enumerate(programs)])
    return results


async def _keep_result(program: Program[T], results: list[T], i: int) -> None:
    results[i] = await program


def run(program: Program[T], finish: Finish | None = None, ended: Callable[[], None] | None = None) -> None:
    """Run `program` to its end, with the transport lock held. Raise only errors of `finish`.

    Two callbacks are called exactly once: `finish(result, error)` with the outcome, and `ended()` when no transfer of
    the program uses its tensors any more. `ended` comes first, with one exception: if a part fails while its step
    starts, `finish` is called before the other transfers of the step have ended. These transfers may be in flight until
    the end of the process, since other ranks wait for the transfer that failed here.
    """
    _Run(program, None, finish, ended).advance()


@dataclass(eq=False, slots=True)
class _Run:
    """A running program."""

    program: Program[Any]
    outer: _PartDone | None
    """Callback of the program that awaits this one in `together`, or None."""
    finish: Finish | None = None
    ended: Callable[[], None] | None = None
    left: int = 0
    """Number of parts of the step that have not ended."""
    error: BaseException | None = None
    step: Sequence[Part] = ()
    """The current step, kept until its end, since a transfer may hold the only reference to its tensor."""

    def advance(self) -> None:
        """Resume the program, until a step has a part in flight."""
        while True:
            try:
                error = self.error
                self.step = self.program.send(None) if error is None else self.program.throw(error)
            except StopIteration as stop:
                self.end(stop.value, None)
                return
            except BaseException as raised:  # noqa: BLE001  - the task that awaits the operation raises it
                self.end(None, ours(raised) if isinstance(raised, _UNEXPECTED) else raised)
                return
            self.error = None
            # One more than the parts, so that a part that ends immediately does not resume the program in this loop.
            self.left = len(self.step) + 1
            for part in self.step:
                done = _PartDone(self)
                try:
                    if isinstance(part, tuple):
                        part[0](*part[1:], done)
                    else:
                        _Run(part, done).advance()
                except Exception as raised:  # noqa: BLE001  - as above; other ranks wait for the other parts
                    done(self.error or ours(raised))
            self.left -= 1
            if self.left:
                if self.error is not None:
                    self.fail(self.error)
                return

    def fail(self, error: BaseException) -> None:
        """Report `error` as the outcome, before the end of the program."""
        if self.outer is not None:
            if self.outer.run is not None:
                self.outer.run.fail(error)
        elif self.finish is not None:
            finish, self.finish = self.finish, None
            finish(None, error)

    def end(self, result: object, error: BaseException | None) -> None:
        """Report the end of the program, and the outcome unless an error was reported before."""
        if self.outer is not None:
            self.outer(error)
            return
        finish, self.finish = self.finish, None
        if self.ended is not None:
            self.ended()
        if finish is not None:
            finish(result, error)


@dataclass(eq=False, slots=True)
class _PartDone:
    """The callback of one part of a step, effective at the first call only."""

    run: _Run | None

    def __call__(self, error: BaseException | None) -> None:
        """Count the ended part, and resume the program after the last one."""
        run, self.run = self.run, None
        if run is not None:
            run.error = run.error or error
            run.left -= 1
            if run.left == 0:
                run.advance()
