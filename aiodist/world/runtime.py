"""`init`, `open` and `run`."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import os
import sys
from asyncio import _get_running_loop
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, NoReturn, ParamSpec, TypeVar
from weakref import ref

import torch

from aiodist.communicator import Communicator, Hierarchy, parts_of
from aiodist.communicator.report import REPORT_SECONDS
from aiodist.elastic.recovery import Recovery
from aiodist.env import Environment, Starter
from aiodist.errors import AiodistError, CommunicatorAborted
from aiodist.handles import Handle, from_future
from aiodist.handles.calls import located
from aiodist.pauses import deadline_clock
from aiodist.streams import CudaStream, event_handle
from aiodist.types import renamed
from aiodist.world.generation import RankWorld, WorldOptions
from aiodist.world.isolation import isolate, isolated
from aiodist.world.leaving import Kept, abort, leave_in_time, the_end
from aiodist.world.opener import WorldOpener
from aiodist.world.opening import Introduction, Limits, RankSeat, current_place, find_place
from aiodist.world.tracebacks import fold_tracebacks

__all__ = ["as_handle", "init", "isolate", "open", "opened", "run"]

P = ParamSpec("P")
_QUIET = (CommunicatorAborted, GeneratorExit, TimeoutError)
"""Ends of a world without its program that are no failure: aborted, dropped, or not closed by the others."""

_DEBUGGED_SECONDS = 86400.0  # to meet, since ranks may wait for a debugger
T = TypeVar("T")

_current_world: ContextVar[ref[Communicator] | None] = ContextVar("aiodist_world", default=None)


def current_world() -> Communicator | None:
    """Return the world that this task, or the task that made it, has opened last and not closed, or None."""
    world = _current_world.get()
    return None if world is None else world()


@renamed(report="report_after", lag="report_lag_over")
def init(  # noqa: PLR0913 - one for each option
    *,
    backend: str | None = None,
    timeout: float | None = None,
    report_after: float | None = REPORT_SECONDS,
    levels: Callable[[Communicator], Hierarchy | Awaitable[Hierarchy]] | None = None,
    selector: str | os.PathLike[str] | None = None,
    thread: bool = False,
    stop_on_signal: bool = False,
    elastic: bool = False,
    stragglers: bool = False,
    report_lag_over: float | None = None,
    strict: bool = False,
    reproducible: bool = False,
) -> AbstractAsyncContextManager[Communicator]:
    """Open the world, a `Communicator` over all ranks of the job, as a block: `async with aiodist.init() as coll:`.

    Every rank enters it. The number of ranks and this rank's number come from `aiodist run`, an MPI launcher, torchrun
    or Slurm; a program that none of them started is the only rank. Leaving the block closes the world on all ranks,
    after the operations in flight (30 s at most). If the block raises, the operations of the other ranks raise
    `RemoteError` or `PeerLost`, and this process ends after a few seconds even if its threads do not.

    Args:
        backend: "mpi", "gloo", "shm" (ranks of one host) or "local" (one rank). None is MPI if an MPI launcher started
            the ranks, else "shm" on one host and "gloo" between hosts.
        timeout: default timeout of every operation, in seconds; None is none.
        report_after: seconds (10 by default) that a rank waits in an operation before a warning of
            `logging.getLogger("aiodist")` names the ranks that are late and their lines; repeated each minute. None
            never reports.
        levels: a function of the world that returns what `coll.hierarchy(...)` returns, or a coroutine of it: the
            groups of `coll.levels`, above those of a host.
        selector: a file with the table of `coll.selector`, as rank 0 finds it; None is AIODIST_SELECTOR, or else the
            table that `aiodist tune` measured for these hosts and versions; "none" ignores both.
        thread: True lets other threads call the world too, see `Communicator.dup`.
        stop_on_signal: True turns the first SIGTERM or Ctrl-C of a rank into a request that all ranks stop, see
            `Communicator.stopping`; a second signal has its usual effect.
        elastic: True lets ranks leave and join, under `aiodist run --elastic MIN:MAX`; see `Communicator.shrink` and
            `grow`. Each new world is opened with the same arguments.
        stragglers: True measures for which rank the others wait: `coll.statistics().waited`.
        report_lag_over: seconds that the event loop may be blocked before a warning names the line, at most once a
            minute; None never reports.
        strict: True makes each change of a tensor in flight an error on await, BufferInFlight, and also finds changes
            of CPU tensors that the operation only reads by a checksum of their bytes at the call and at the end; False
            warns of the changes that torch counts (RuntimeWarning).
        reproducible: True keeps the bits of sums and means of floats: they depend on the elements and the number of
            ranks alone, not on size, memory, buckets, implementation or hosts. All ranks give the same value.
            `coll.availability()` names the excluded implementations; `impl=` of one of them raises ValueError.

    Returns:
        An async context manager, which gives the communicator.

    Raises:
        ConfigError: for a wrong environment; with `stop_on_signal` outside of the main thread; if a world is open in
            this process, unless this is the only rank or plain `mpirun` started it.
        BackendUnavailable: if the library of the backend is missing.
        OperationTimeout: if ranks do not come within 60 s; it names them.
        MismatchError: if ranks differ in `reproducible`.
        PeerLost: if a rank is lost while the world opens.

    Example:
        ```python
        import aiodist

        async def main():
            async with aiodist.init(timeout=60) as coll:
                print(coll.rank, await coll.allreduce(1))

        if __name__ == "__main__":
            aiodist.run(main)
        ```

    Tasks made while the world is open have torch modes of their own, as with `isolate`; a RuntimeWarning names tasks
    that began before. If `init` or the block raises, Python prints the exception with the frames of the program only,
    unless `sys.excepthook` is set.
    """
    world = opened(
        Limits(),
        backend=backend,
        timeout=timeout,
        report_after=report_after,
        levels=levels,
        selector=selector,
        thread=thread,
        stop_on_signal=stop_on_signal,
        elastic=elastic,
        stragglers=stragglers,
        report_lag_over=report_lag_over,
        strict=strict,
        reproducible=reproducible,
    )
    return _WorldBlock(world)


class _WorldBlock(AbstractAsyncContextManager[Communicator]):
    """The result of `init`. Its use as a communicator raises an error with the right use."""

    def __init__(self, world: AbstractAsyncContextManager[Communicator]) -> None:
        self._world = world

    async def __aenter__(self) -> Communicator:
        return await self._world.__aenter__()

    async def __aexit__(self, *error: Any) -> bool | None:  # noqa: ANN401  - as the world's
        return await self._world.__aexit__(*error)

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError(_IT_IS_A_BLOCK)

    __enter__ = __exit__ = __await__ = _refuse

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"no {name} here: {_IT_IS_A_BLOCK}", name=name)


_IT_IS_A_BLOCK = (
    "aiodist.init() is a block, and gives the communicator: `async with aiodist.init() as coll:` in a coroutine. "
    "Without asyncio: `with aiodist.start() as coll:`; in a notebook: `coll = await aiodist.open()`"
)


@asynccontextmanager
async def opened(
    limits: Limits,
    *,
    backend: str | None = None,
    elastic: bool = False,
    meeting: Introduction | None = None,
    **options: Any,  # noqa: ANN401  - the others of `init`
) -> AsyncIterator[Communicator]:
    """Open the world as `init` does, with the time limits `limits`, over the ranks of a `meeting`, if any."""
    given = current_place.get() if meeting is None else None
    try:
        environment = Environment.read()
        if meeting is not None:
            environment = replace(environment, rank=meeting.rank, size=meeting.size, mpi=False, rendezvous=None)
        limits = _patient(limits) if environment.debug else limits
        wanted = WorldOptions(limits, environment, given is None, given is None and meeting is None, **options)
        life = await _life_of(wanted, backend, given, meeting, elastic=elastic)
    except AiodistError:
        if given is None:
            fold_tracebacks()  # it does not open: the program's frames alone are printed
        raise
    with isolated():
        process, patience = os.getpid(), None
        try:
            comm = await life.open()
            outer = _current_world.get()
            _current_world.set(ref(comm))  # contexts of tasks outlive the world
            try:
                yield comm
            except GeneratorExit:  # the loop is closed
                kept = life.registry.kept
                if kept is None or not await kept.was_forgotten():
                    raise
                patience = limits.forgotten
            if os.getpid() == process:  # else a forked child leaves the block
                _current_world.set(outer)
                async with asyncio.timeout(patience):
                    await life.close()
        except BaseException as error:
            if os.getpid() == process:
                await _fail(life, wanted, error)
            raise
        if os.getpid() == process:
            await life.registry.close_memory()
            await life.channel.aclose()


def _patient(limits: Limits) -> Limits:
    """Stop the clock of deadlines, since a debugger may stop a rank at any time. Return limits for this."""
    deadline_clock.hold("AIODIST_DEBUG")
    return replace(limits, rendezvous=_DEBUGGED_SECONDS)


async def _life_of(
    options: WorldOptions, backend: str | None, given: RankSeat | None, meeting: Introduction | None, *, elastic: bool
) -> Recovery | RankWorld:
    """Return the object that opens and closes the world."""
    if elastic:
        return await Recovery.of(WorldOpener(options, backend, given))
    if given is not None:
        place = given.take()
    else:
        place = await find_place(options.environment, backend, options.limits, meeting)
    return await RankWorld.of(options, place)


async def _fail(life: Recovery | RankWorld, options: WorldOptions, error: BaseException) -> None:
    """Notify the others of an error of the block, and close the world in time."""
    limits = options.limits
    if not options.program and isinstance(error, _QUIET) and isinstance(life, RankWorld):
        await life.abort(error if isinstance(error, AiodistError) else CommunicatorAborted("the world was dropped"))
        with suppress(TimeoutError, AiodistError, OSError):
            await life.channel.aclose()
        return
    end = await the_end(error)
    if options.alone:
        fold_tracebacks()
    if options.program and life.channel.size > 1:
        await leave_in_time(end.exitcode, limits.leave)
    await life.cancel()
    patient = options.environment.starter is Starter.MPI
    await abort(life.registry, life.channel, end, limits.abort, patient=patient)
    await life.registry.close_memory()  # if there was no time


def _called_as(other: Callable[P, object]) -> Callable[[Callable[..., T]], Callable[P, T]]:
    """Return a decorator that gives a function the keywords of another, also for editors and type checkers."""

    def same(function: Callable[..., T]) -> Callable[P, T]:
        signature = inspect.signature(other).replace(return_annotation=function.__annotations__["return"])
        function.__signature__ = signature  # type: ignore[attr-defined]
        return function

    return same


@_called_as(init)
@located
async def open(*args: Any, **options: Any) -> Communicator:  # noqa: ANN401  - as `init`
    """Open the world without a block, for notebooks and `python -m asyncio`.

    Every rank calls it. `await coll.aclose()` does what leaving the block of `init` does; an exception does not close
    the world. A program that ends without it gets a RuntimeWarning, and the world is closed then if the other ranks
    close theirs within 5 s. If an exception ends the program, the other ranks' operations raise, as with `init`.

    Args:
        *args: none.
        **options: the keywords of `init`.

    Returns:
        The communicator.

    Raises:
        ConfigError: and all else that `init` raises.

    Example:
        ```python
        import aiodist

        coll = await aiodist.open()
        print(await coll.allreduce(1))
        await coll.aclose()
        ```
    """
    block = init(*args, **options)
    world = await block.__aenter__()
    parts_of(world).registry.kept = Kept(parts_of(world).registry, block, Limits().forgotten)
    return world


# --- running -------------------------------------------------------------------------------------------------


def run(
    main: Callable[..., Coroutine[Any, Any, T]] | Coroutine[Any, Any, T],
    *args: object,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
    debug: bool | None = None,
) -> T:
    """Run a coroutine function with `args`, or a coroutine, on a new event loop; return its result.

    It keeps torch's modes apart in each task, see `isolate`. With `asyncio.run` the main task, and all others that
    began before `init`, share them: `no_grad` in one of them turns off gradients in the rest. It uses uvloop if
    installed.

    Args:
        main: a coroutine function, or a coroutine.
        *args: arguments of the function.
        loop_factory: a function that returns the event loop; None is uvloop's, or asyncio's.
        debug: True turns on asyncio's debug mode; None is asyncio's default.

    Returns:
        The result of the coroutine.

    Raises:
        RuntimeError: if an event loop runs in this thread, as in a notebook: `await main()` there.
        TypeError: if `main` is a plain function.

    Example:
        ```python
        import aiodist

        async def main(scale):
            async with aiodist.init() as coll:
                return await coll.allreduce(scale)

        total = aiodist.run(main, 2.0)
        ```
    """
    if _get_running_loop() is not None:
        raise RuntimeError("run makes an event loop, and one is running here, as in a notebook: `await main()` instead")
    coroutine = main if isinstance(main, Coroutine) else main(*args)
    if not isinstance(coroutine, Coroutine):
        raise TypeError(f"run({main}): expected a coroutine function, `async def`; a plain one is called without run")
    with asyncio.Runner(loop_factory=loop_factory or best_loop(), debug=debug) as runner:
        isolate(runner.get_loop())
        try:
            return runner.run(coroutine)
        except BaseException:
            fold_tracebacks()
            raise


def best_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's factory of loops, or None if uvloop is not installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def as_handle(x: Any) -> Handle[Any]:  # noqa: ANN401
    """Return a handle that is done when `x` is, on the running loop.

    `x` is an mpi4py Request, a `concurrent.futures.Future`, a torch Work, a `torch.cuda.Event` as it was recorded last,
    a `torch.cuda.Stream` or `CudaStream` with the work queued so far, or a handle. Raises TypeError for anything else:
    coroutines and asyncio futures are awaited as they are.
    """
    if isinstance(x, Handle):
        return x
    if isinstance(x, CudaStream):
        return x.record()
    if isinstance(x, torch.cuda.Stream):
        return CudaStream(x).record()
    if isinstance(x, torch.cuda.Event):
        return event_handle(x)
    if isinstance(x, concurrent.futures.Future):
        return from_future(x)
    if "mpi4py.MPI" in sys.modules and isinstance(x, sys.modules["mpi4py.MPI"].Request):
        from aiodist.backends.mpi import request_handle

        return request_handle(x)
    if torch.distributed.is_available() and isinstance(x, torch.distributed.Work):
        from aiodist.backends.gloo import work_handle

        return work_handle(x)
    raise TypeError(
        f"{type(x).__name__} is nothing that completes: expected a Request, a Future, a torch Work, a "
        "CUDA event or stream"
    )
