"""Torch modes of its own for each task.

In torch, modes such as grad mode and autocast belong to the thread, which all tasks of a loop share. Without this
module, `with torch.no_grad(): await …` in one task disables gradients in other tasks. Two such blocks that overlap
without nesting disable gradients until the end of the program.
"""

from __future__ import annotations

import asyncio
import sysconfig
import warnings
from collections.abc import Coroutine, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CoroutineType
from typing import TYPE_CHECKING, Any

from aiodist.streams.modes import Modes, ModeSwitch, plain


def isolate(loop: asyncio.AbstractEventLoop) -> None:
    """Give each task that `loop` makes from now on torch modes of its own.

    A task begins with the modes of the code that made it. Callbacks outside tasks do not change. An earlier task
    factory continues to make the tasks. A second call is a no-op. Cost: a microsecond per step of a task.
    """
    _factory(loop).lasting = True


@contextmanager
def isolated() -> Iterator[None]:
    """Isolate the tasks that the running loop makes while this block, or another one like it, is open.

    Afterwards the loop has its old task factory again, unless other code has set a new one. The calling task has begun
    already, and keeps the modes of its thread, which no isolated task changes. Two such tasks share modes: a
    RuntimeWarning names each other task of the program that has begun before, unless it waits for this one.
    """
    loop = asyncio.get_running_loop()
    factory = _factory(loop)
    _warn_of_others(loop)
    factory.holders += 1
    try:
        yield
    finally:
        factory.holders -= 1
        if not (factory.lasting or factory.holders) and loop.get_task_factory() is factory:
            loop.set_task_factory(factory.previous)


def _factory(loop: asyncio.AbstractEventLoop) -> _Factory:
    """Return the one that isolates the tasks of `loop`, which has it from now on."""
    current = loop.get_task_factory()
    if not isinstance(current, _Factory):
        current = _Factory(current)
        loop.set_task_factory(current)
    return current


def _warn_of_others(loop: asyncio.AbstractEventLoop) -> None:
    """Warn of tasks of the program that share torch's modes with the calling one, if that does."""
    mine = asyncio.current_task(loop)
    if mine is None or isinstance(mine.get_coro(), _Isolated):
        return
    for task in _running_beside(mine, asyncio.all_tasks(loop)):
        coro: Any = task.get_coro()
        code = getattr(coro, "cr_code", None)
        if code is None or isinstance(coro, _Isolated) or _of_library(code.co_filename):
            continue
        frames = task.get_stack(limit=1)
        line = frames[0].f_lineno if frames else code.co_firstlineno
        warnings.warn(
            f"task {task.get_name()!r} ({code.co_qualname}, {code.co_filename}:{line}) began before aiodist isolated "
            "the tasks of this loop, so it shares torch's modes with the task that opens the world: a no_grad block of "
            "one takes the other's graph away. Make the task after `aiodist.init()`, use `aiodist.run(main)`, or call "
            "`aiodist.isolate(loop)` before you make it",
            RuntimeWarning,
            stacklevel=2,
        )


def _running_beside(mine: asyncio.Task[Any], tasks: set[asyncio.Task[Any]]) -> set[asyncio.Task[Any]]:
    """Return the tasks that may run before `mine` has ended: those that wait for it or for its waiters may not."""
    waiting = {mine}
    while more := {task for task in tasks - waiting if not waiting.isdisjoint(_awaited_by(task))}:
        waiting |= more
    return tasks - waiting


def _awaited_by(task: asyncio.Task[Any]) -> Iterator[Any]:
    """Yield what a task awaits: a task, the members of a gather or of a task group, the task within a wait_for."""
    future = getattr(task, "_fut_waiter", None)
    yield future
    yield from getattr(future, "_children", ())
    coro: Any = task.get_coro()
    while hasattr(inner := getattr(coro, "cr_await", None), "cr_frame"):
        coro = inner
    if (frame := getattr(coro, "cr_frame", None)) is not None:
        yield frame.f_locals.get("fut")  # of wait_for, up to Python 3.11
        yield from getattr(frame.f_locals.get("self"), "_tasks", ())  # of a task group of asyncio or anyio


def _of_library(file: str) -> bool:
    ours = str(Path(__file__).parents[1])
    return file.startswith(("<", ours, *sysconfig.get_paths().values()))


class _Factory:
    """Makes tasks of coroutines that carry modes, by way of the factory that was there before."""

    def __init__(self, previous: Any) -> None:  # noqa: ANN401  - typed differently from Python to Python
        self.previous = previous
        self.lasting = False
        """True if the program wants it for the life of the loop."""
        self.holders = 0
        """Worlds that are open on the loop."""

    def __call__(self, loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Future[Any]:  # noqa: ANN401
        kind = type(coro)
        if kind is CoroutineType or (kind is not _Isolated and asyncio.iscoroutine(coro)):
            coro = _Isolated(coro)
        if self.previous is None:
            return asyncio.Task(coro, loop=loop, **options)
        task: asyncio.Future[Any] = self.previous(loop, coro, **options)
        return task


class _Isolated(Coroutine[Any, Any, Any]):
    """A coroutine that runs each step of another in modes of its own; for everything else it is the other one.

    `send` and `throw` are those of a generator, with no frame of ours in between: that would cost 0.2 us a step, and
    keep an error that is thrown in alive by its own traceback.
    """

    __slots__ = ("__weakref__", "_coro", "_steps", "send", "throw")

    def __init__(self, coro: Coroutine[Any, Any, Any]) -> None:
        self._coro = coro
        self._steps = _steps(coro, Modes.capture())
        next(self._steps)
        self.send = self._steps.send  # type: ignore[method-assign]
        self.throw = self._steps.throw  # type: ignore[method-assign]

    if TYPE_CHECKING:

        def send(self, value: Any, /) -> Any: ...  # noqa: ANN401
        def throw(self, *error: Any) -> Any: ...  # noqa: ANN401

    def close(self) -> None:
        self._steps.close()
        self._coro.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._steps

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._coro, name)

    def __repr__(self) -> str:
        return repr(self._coro)


def _steps(coro: Coroutine[Any, Any, Any], modes: Modes) -> Generator[Any, Any, Any]:
    """Run `coro`; suspended first of all before its first step, so that an error may be thrown into that."""
    switch = ModeSwitch(modes)
    # All is as torch starts: then it is enough to look whether it still is.
    quiet = modes.simple and modes.grad and modes.place is None
    call = send = coro.send
    value: Any = None
    begun = False
    while True:
        try:
            argument = yield value
            call = send
        except GeneratorExit:
            if begun:
                _close(coro, switch)
            raise
        except BaseException as error:  # noqa: BLE001  - all of them go to the task
            call, argument = coro.throw, error
        begun = True
        if not quiet or not plain():
            quiet = False
            switch.enter()
        try:
            value = call(argument)
        except BaseException as error:
            # The error holds this frame, which must not hold it in turn, nor a future that does.
            argument = value = None
            if not quiet or not plain():
                switch.leave(last=True)
            if isinstance(error, StopIteration):
                return error.value
            raise
        if not quiet or not plain():
            quiet = switch.leave()


def _close(coro: Coroutine[Any, Any, Any], switch: ModeSwitch) -> None:
    switch.enter()
    try:
        coro.close()
    finally:
        switch.leave(last=True)
