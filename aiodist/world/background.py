"""`start`: the world for programs that do not use asyncio, on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import atexit
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager, suppress

from anyio.from_thread import start_blocking_portal

from aiodist.communicator import Communicator, Hierarchy
from aiodist.communicator.report import REPORT_SECONDS
from aiodist.communicator.threaded import ThreadedCommunicator
from aiodist.handles.origin import is_ours, whence
from aiodist.world.isolation import isolate
from aiodist.world.leaving import stopping_by_signals
from aiodist.world.opening import Limits
from aiodist.world.runtime import best_loop, init
from aiodist.world.tracebacks import fold_tracebacks


@contextmanager
def start(  # noqa: PLR0913 - one for each option
    *,
    backend: str | None = None,
    timeout: float | None = None,
    report: float | None = REPORT_SECONDS,
    levels: Callable[[Communicator], Hierarchy | Awaitable[Hierarchy]] | None = None,
    selector: str | os.PathLike[str] | None = None,
    stop_on_signal: bool = False,
    elastic: bool = False,
    stragglers: bool = False,
    lag: float | None = None,
) -> Iterator[ThreadedCommunicator]:
    """Open the world for a script without asyncio: `with aiodist.start() as coll: coll.allreduce(t).wait()`.

    Takes the keywords of `init`, and raises what it raises. Its calls return the same handles: `wait()` blocks this
    thread until the result is there and returns it, `result()` returns it if it is. The calling thread issues by
    itself, so ranks see the order of the calls; threads take turns, as on a `dup(thread=True)`. The loop runs in a
    thread named "aiodist-loop": `coll.portal.call(fn, *args)` calls `fn` there and returns its result, awaited where it
    is awaitable, such as `coll.portal.call(nn.DataParallel.create, model, coll)`. What makes or closes communicators is
    called there by itself, such as `coll = coll.shrink().wait()`. Works in notebooks and at a prompt too, whether or
    not a loop runs in their thread.

    Leaving the block does what leaving that of `init` does; an exception in it, Ctrl-C too, is told to the other ranks.
    A program that ends inside, such as a notebook, leaves it then; the others have 5 s to leave theirs.
    Cost: a thread; of a short operation about what an `await` costs.
    """
    block = init(
        backend=backend,
        timeout=timeout,
        report=report,
        levels=levels,
        selector=selector,
        thread=True,
        elastic=elastic,
        stragglers=stragglers,
        lag=lag,
    )
    with ExitStack() as signals, in_thread(block) as coll:  # they are heard until the block is left
        if stop_on_signal:
            signals.enter_context(stopping_by_signals(lambda: _current(coll)))
        yield coll


@contextmanager
def in_thread(block: AbstractAsyncContextManager[Communicator]) -> Iterator[ThreadedCommunicator]:
    """Enter `block` on an event loop in a thread of its own, and leave it when the program ends at the latest.

    Python ends a program that has not left it with the thread stopped, where nobody could wait for it any more.
    """

    def isolated_loop() -> asyncio.AbstractEventLoop:
        loop = (best_loop() or asyncio.new_event_loop)()
        isolate(loop)
        return loop

    with start_blocking_portal("asyncio", {"loop_factory": isolated_loop}, name="aiodist-loop") as portal:
        coll = portal.call(block.__aenter__)
        assert isinstance(coll, ThreadedCommunicator)
        coll.parts.registry.portal = portal
        opened_at = whence(1)
        thread, process, left = portal.call(threading.current_thread), os.getpid(), False

        def at_exit() -> None:
            nonlocal left
            if os.getpid() == process and not left:
                left = True
                coll.parts.registry.closed_at = opened_at
                with suppress(Exception):  # the others are told, and the process has its exit code already
                    portal.call(_leave_late, block, coll)
                portal.call(portal.stop, True)
                thread.join()

        atexit.register(at_exit)
        try:
            yield coll
        except BaseException as error:
            fold_tracebacks()
            raised = None if left else portal.call(_leave, block, error)
            if raised is None or raised is error:
                raise
            raise raised from error
        finally:
            left = True  # from Python 3.14 on one that is unregistered by what runs at exit is called all the same
            atexit.unregister(at_exit)
        here = whence(1)
        coll.parts.registry.closed_at = opened_at if is_ours(here[0].co_filename) else here
        if (raised := portal.call(_leave, block, None)) is not None:
            fold_tracebacks()
            raise raised


def _current(coll: Communicator) -> Communicator:
    """Return the world that `coll` has become, where it is elastic."""
    life = coll.parts.registry.elastic
    return coll if life is None else life.current


async def _leave_late(block: AbstractAsyncContextManager[object], coll: Communicator) -> None:
    """Leave `block` as the program ends: with the exception that ended it, if one did, else as the others do."""
    error: BaseException | None = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if error is None:
        try:
            world = _current(coll)
            await asyncio.wait_for(world.parts.registry.close(world), Limits().forgotten)
        except Exception as late:  # noqa: BLE001  - it is told to the others
            error = late
    await _leave(block, error)


async def _leave(block: AbstractAsyncContextManager[object], error: BaseException | None) -> BaseException | None:
    """Leave `block` with `error`; return what it raises: a portal ends with an exception that is no `Exception`."""
    try:
        await block.__aexit__(type(error) if error else None, error, error.__traceback__ if error else None)
    except BaseException as raised:  # noqa: BLE001  - the caller raises it
        return raised
    return None
