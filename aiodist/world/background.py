"""`start`: the world for programs that do not use asyncio, on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext

from anyio.from_thread import start_blocking_portal

from aiodist.communicator import Communicator, Hierarchy
from aiodist.communicator.report import REPORT_SECONDS
from aiodist.communicator.threaded import ThreadedCommunicator
from aiodist.world.isolation import isolate
from aiodist.world.runtime import best_loop, init
from aiodist.world.stopping import stopping_by_signals


@contextmanager
def start(
    *,
    backend: str | None = None,
    timeout: float | None = None,
    report: float | None = REPORT_SECONDS,
    levels: Callable[[Communicator], Hierarchy | Awaitable[Hierarchy]] | None = None,
    selector: str | os.PathLike[str] | None = None,
    stop_on_signal: bool = False,
) -> Iterator[ThreadedCommunicator]:
    """Open the world for a script without asyncio: `with aiodist.start() as coll: coll.allreduce(t).wait()`.

    Takes the keywords of `init` and raises what it raises. Its calls return the same handles: `h.wait()` blocks this
    thread until the result is there and returns it, `h.result()` returns it if it is. The thread that calls issues by
    itself, so ranks see the order of the calls; threads take turns, as on a `dup(thread=True)`. The loop runs in a
    thread named "aiodist-loop": `coll.portal.call(fn, *args)` calls `fn` there and returns its result, awaited where it
    is awaitable, such as `coll.portal.call(nn.DataParallel.create, model, coll)`. What makes or closes communicators
    is called there by itself. Works in notebooks and at a prompt too, whether or not a loop runs in their thread.

    Leaving the block does what leaving that of `init` does; an exception in it, Ctrl-C too, is told to the other ranks.
    Cost: a thread; of a short operation about what an `await` costs.
    """
    block = init(backend=backend, timeout=timeout, report=report, levels=levels, selector=selector, thread=True)
    with start_blocking_portal("asyncio", {"loop_factory": _isolated_loop}, name="aiodist-loop") as portal:
        coll = portal.call(block.__aenter__)
        assert isinstance(coll, ThreadedCommunicator)
        coll.parts.registry.portal = portal
        try:
            with stopping_by_signals(coll) if stop_on_signal else nullcontext():
                yield coll
        except BaseException as error:
            raised = portal.call(_leave, block, error)
            if raised is None or raised is error:
                raise
            raise raised from error
        if (raised := portal.call(_leave, block, None)) is not None:
            raise raised


def _isolated_loop() -> asyncio.AbstractEventLoop:
    loop = (best_loop() or asyncio.new_event_loop)()
    isolate(loop)
    return loop


async def _leave(block: AbstractAsyncContextManager[object], error: BaseException | None) -> BaseException | None:
    """Leave `block` with `error`; return what it raises: a portal ends with an exception that is no `Exception`."""
    try:
        await block.__aexit__(type(error) if error else None, error, error.__traceback__ if error else None)
    except BaseException as raised:  # noqa: BLE001  - the caller raises it
        return raised
    return None
