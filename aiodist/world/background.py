"""`start`: the world in a thread, for programs without asyncio."""

from __future__ import annotations

import asyncio
import atexit
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager, suppress
from types import MethodType
from typing import Any

from anyio.from_thread import BlockingPortal, start_blocking_portal

from aiodist.communicator import Communicator, Hierarchy, parts_of
from aiodist.communicator.report import REPORT_SECONDS
from aiodist.communicator.threaded import ThreadedCommunicator
from aiodist.handles.origin import whence
from aiodist.threads import result_of
from aiodist.types import renamed
from aiodist.world.isolation import isolate
from aiodist.world.leaving import stopping_by_signals
from aiodist.world.opening import Limits
from aiodist.world.runtime import best_loop, init
from aiodist.world.tracebacks import fold_tracebacks


@renamed(report="report_after", lag="report_lag_over")
@contextmanager
def start(  # noqa: PLR0913 - one for each option
    *,
    backend: str | None = None,
    timeout: float | None = None,
    report_after: float | None = REPORT_SECONDS,
    levels: Callable[[Communicator], Hierarchy | Awaitable[Hierarchy]] | None = None,
    selector: str | os.PathLike[str] | None = None,
    stop_on_signal: bool = False,
    elastic: bool = False,
    stragglers: bool = False,
    report_lag_over: float | None = None,
    strict: bool = False,
    reproducible: bool = False,
) -> Iterator[ThreadedCommunicator]:
    """Open the world without asyncio: `with aiodist.start() as coll:`.

    Every rank enters it. Calls return the same handles: `wait()` blocks this thread until the result is there. The
    event loop runs in a thread named "aiodist-loop". Any thread may call, one at a time; all ranks see the order of the
    calls. It works in notebooks too. Leaving the block does what leaving the block of `init` does. A program that ends
    inside leaves it then, and the other ranks have 5 s to leave theirs.

    `coll.portal.call(fn, *args)` calls `fn` on the event loop and returns its result; it awaits one that is awaitable:
    `net = coll.portal.call(aiodist.nn.DataParallel.create, module, coll)`.

    Args:
        backend: as in `init`, like all that follow.
        timeout: default timeout of every operation, in seconds; None is none.
        report_after: seconds that a rank waits before a warning names the late ranks; None never reports.
        levels: a function that returns the groups of `coll.levels`.
        selector: a file with the table of `coll.selector`.
        stop_on_signal: True turns the first SIGTERM or Ctrl-C into a request that all ranks stop.
        elastic: True lets ranks leave and join.
        stragglers: True measures for which rank the others wait.
        report_lag_over: seconds that the event loop may be blocked before a warning; None never reports.
        strict: True makes each change of a tensor in flight an error on await.
        reproducible: True keeps the bits of sums of floats.

    Returns:
        A context manager, which gives the communicator.

    Raises:
        ConfigError: and all else that `init` raises.

    Example:
        ```python
        import aiodist

        with aiodist.start() as coll:
            total = coll.allreduce(coll.rank + 1).wait()
            coll.print("the sum is", total)
        ```

    Cost: a thread; a short operation takes about as long as with `await`.
    """
    block = init(
        backend=backend,
        timeout=timeout,
        report_after=report_after,
        levels=levels,
        selector=selector,
        thread=True,
        elastic=elastic,
        stragglers=stragglers,
        report_lag_over=report_lag_over,
        strict=strict,
        reproducible=reproducible,
    )
    with ExitStack() as signals, WorldThread(block) as coll:  # they are heard until the block is left
        if stop_on_signal:
            signals.enter_context(stopping_by_signals(lambda: _current(coll)))
        yield coll


class WorldThread:
    """A block on an event loop in a thread of its own. The end of the program leaves the block at the latest.

    After that Python stops the thread, and no code could wait for the end of the block.

    The exit function has a reference to the block until the block is left. So the garbage collector, which runs in any
    thread, never ends the generators of the block: their end waits for the loop.
    """

    def __init__(self, block: AbstractAsyncContextManager[Communicator]) -> None:
        self._block = block
        self._process = os.getpid()
        self._left = False
        self._loop = ExitStack()

    def __enter__(self) -> ThreadedCommunicator:
        """Return the world of the block, once it is open; raise what opening it raises."""
        with ExitStack() as stack:
            options = {"loop_factory": _isolated_loop}
            self._portal = portal = stack.enter_context(start_blocking_portal("asyncio", options, name="aiodist-loop"))
            portal.call = MethodType(_call, portal)  # type: ignore[assignment, method-assign]
            coll = portal.call(self._block.__aenter__)
            assert isinstance(coll, ThreadedCommunicator)
            parts_of(coll).registry.portal = portal
            self._coll, self._opened_at, self._thread = coll, whence(1), portal.call(threading.current_thread)
            self._loop = stack.pop_all()
        atexit.register(self._at_exit)
        return coll

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Leave the block with `error`, and end the thread; raise what the block raises."""
        left, self._left = self._left, True
        atexit.unregister(self._at_exit)
        if error is not None:
            fold_tracebacks()
        else:
            parts_of(self._coll).registry.members.closed_at = whence(1)
        raised = None
        try:
            if not left:
                raised = self._portal.call(_leave, self._block, error)
        except BaseException as interrupt:
            error = interrupt
            raise
        finally:
            ended = raised or error
            self._loop.__exit__(None if ended is None else type(ended), ended, None)
        if raised is not None and raised is not error:
            fold_tracebacks()
            if error is None:
                raise raised
            raise raised from error

    def _at_exit(self) -> None:
        if os.getpid() != self._process or self._left:  # from Python 3.14 on it is called though it is unregistered
            return
        self._left = True
        parts_of(self._coll).registry.members.closed_at = self._opened_at
        with suppress(Exception):  # the others are notified, and the exit code is known
            self._portal.call(_leave_late, self._block, self._coll)
        self._portal.call(self._portal.stop, True)
        self._thread.join()


def _call(portal: BlockingPortal, fn: Callable[..., Any], *args: Any) -> Any:  # noqa: ANN401
    """Call `BlockingPortal.call`, with a wait that the deadlock detection sees."""
    return result_of(portal.start_task_soon(fn, *args))


def _isolated_loop() -> asyncio.AbstractEventLoop:
    loop = (best_loop() or asyncio.new_event_loop)()
    isolate(loop)
    return loop


def _current(coll: Communicator) -> Communicator:
    """Return the newest world of `coll`."""
    life = parts_of(coll).registry.elastic
    return coll if life is None else life.current


async def _leave_late(block: AbstractAsyncContextManager[object], coll: Communicator) -> None:
    """Leave `block` at the end of the program, with its exception if it raised, otherwise together with the others."""
    error: BaseException | None = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if error is None:
        try:
            world = _current(coll)
            await asyncio.wait_for(parts_of(world).registry.close(world), Limits().forgotten)
        except Exception as late:  # noqa: BLE001  - the other ranks get it
            error = late
    await _leave(block, error)


async def _leave(block: AbstractAsyncContextManager[object], error: BaseException | None) -> BaseException | None:
    """Leave `block` with `error`. Return the exception that it raises, since a BaseException would end the portal."""
    try:
        await block.__aexit__(type(error) if error else None, error, error.__traceback__ if error else None)
    except BaseException as raised:  # noqa: BLE001  - the caller raises it
        return raised
    return None
