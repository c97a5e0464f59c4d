"""One training, whose epochs end together on all ranks, and one evaluation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, TypeVar, cast

import torch
from torch import Tensor, nn

from aiodist.checkpoints.own import torch_state
from aiodist.communicator import Communicator, parts_of
from aiodist.communicator.duplicate import duplicate
from aiodist.data import ShardQueue
from aiodist.engine import checks
from aiodist.engine.batch import Batch, Loader, Meter, Model, Sums, length_of, prefetched, set_epoch, source_of
from aiodist.engine.display import Display, Profiling
from aiodist.engine.state import Event, Hooks, Position, State
from aiodist.engine.steppers import PassStepper, Stepper
from aiodist.handles import Progress
from aiodist.handles.calls import located
from aiodist.nn import DataParallel
from aiodist.nn.per_rank import Shared
from aiodist.nn.step_log import Log, StepLog
from aiodist.world.agree import agree

T = TypeVar("T")


class EngineOptions(TypedDict, total=False):
    """Options of an engine."""

    progress: bool
    debug: bool
    dynamic: bool
    profile: tuple[int, int] | None
    traces: str | PathLike[str]
    log: Log | None
    log_every: int


class Assembly:
    """The ranks of one engine; without a communicator only this one, and nothing is sent."""

    def __init__(self, base: Communicator | None) -> None:
        self._base = base
        self.comm: Communicator | None = None
        """The engine's own communicator, while it is open."""
        self.rank = 0 if base is None else base.rank
        self.size = 1 if base is None else base.size

    @property
    def stop_requested(self) -> bool:
        """True if this rank was asked to stop (`Communicator.stopping`)."""
        return self._base is not None and parts_of(self._base).registry.resources.stop_requested

    @property
    def elastic(self) -> bool:
        return self._base is not None and parts_of(self._base).registry.elastic is not None

    async def open(self) -> None:
        """Make the engine's own communicator, on all ranks, unless it is open."""
        if self.comm is None and self._base is not None:
            self.comm = await duplicate(self._base)

    def abort(self, why: str) -> None:
        """Abort the engine's communicator on all ranks; the next training opens another one."""
        comm, self.comm = self.comm, None
        if comm is not None:
            comm.abort(f"rank {self.rank} {why}")

    async def exchange(self, fact: object, failure: Exception | None = None) -> list[Any]:
        """Return the facts of all ranks, in JSON's types; raise as `agree`."""
        return await agree(self.comm, "this training", fact, error=failure)


class _Word(NamedTuple):
    """The message of a rank after an epoch."""

    stop: bool
    interrupted: bool
    sums: Sums
    prints: list[int]
    """Fingerprints of the parameters; empty if they are not compared."""


class Training:
    """One call of `Engine.train` on this rank.

    All ranks do the same in the same order: they exchange stops and failures before each epoch, make steps, and
    exchange figures after the epoch. The steps of an epoch run in the block of the stepper, which reports a failure to
    the other ranks, and in which a rank without more data waits.
    """

    def __init__(
        self,
        model: Model,
        options: EngineOptions,
        stepper: Stepper,
        assembly: Assembly,
        position: Position,
        state: State,
    ) -> None:
        self._model = model
        self._stepper = stepper
        self._assembly = assembly
        self._position = position
        self._state = state
        self._progress = Progress.current()
        self._display = Display() if options.get("progress", True) and state.rank == 0 else None
        profile, traces = options.get("profile"), Path(options.get("traces", "traces"))
        self._profiling = None if profile is None else Profiling(profile, traces, state.rank)
        log, every = options.get("log"), options.get("log_every", 1)
        step_log = None if log is None else StepLog(log, every, self._waited)
        self._log = step_log if state.rank == 0 else None
        self._debug = options.get("debug", False)
        self._dynamic = options.get("dynamic", True)

    async def run(self, loader: Loader, users: Hooks) -> None:
        """Train until all epochs of the state are finished, or one rank asks to stop."""
        self._loader, self._hooks = loader, Hooks(users)
        self._state.epoch, self._state.step = self._position.epoch, self._position.step
        self._add_ours()
        net = self._state.net
        try:
            async with AsyncExitStack() as stack:
                await self._assembly.open()
                await stack.enter_async_context(self._stepper.open(self._asks_stop))
                scaled = isinstance(net, DataParallel) and net.configure().scaler is not None
                if self._debug and not scaled:  # scaled gradients may be infinite
                    stack.enter_context(checks.checked_gradients(self._model.module, self._state))
                if self._display is not None:
                    stack.callback(self._display.close)
                try:
                    await self._run()
                finally:
                    if self._profiling is not None:
                        await self._stepper.run(self._profiling.end)
        except BaseException as error:
            if not isinstance(error, Exception):
                self._assembly.abort(f"was cancelled in this training: {error!r}")
            raise

    @property
    def _alike(self) -> nn.Module | Shared:
        """The module, or its part, whose parameters must be the same on all ranks."""
        net = self._state.net
        return net.shared if isinstance(net, DataParallel) else self._model.module

    def _add_ours(self) -> None:
        add, profiling = self._hooks.add, self._profiling
        if profiling is not None:
            add("sample", partial(self._profile, profiling.first, profiling.begin))
        if self._debug:
            add("criterion", checks.check_loss)
            add("update", self._check_parameters)
        if not self._dynamic:
            add("criterion", checks.GraphCheck(self._model.module))
        if profiling is not None:
            add("update", partial(self._profile, profiling.last, profiling.end))
        if (log := self._log) is not None:
            add("sample", log.begin)
            add("update", lambda state: log.end(state.step, cast(Tensor, state.loss)))
        if self._display is not None:
            add("update", self._display.update)
            add("epoch", self._display.epoch)

    def _waited(self) -> float:
        """Return the seconds that all steps have waited for reductions: none with a client of a parameter server."""
        net = self._state.net
        return net.statistics().exposed_seconds if isinstance(net, DataParallel) else 0.0

    def _asks_stop(self) -> bool:
        """Return True if a hook or a signal asks all ranks to stop."""
        return self._state.stop or self._assembly.stop_requested

    # --- epochs -------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        failure = await self._call("start")
        while True:
            self._state.stop = any(await self._begin_together(failure))
            if self._state.stop or self._position.epoch >= self._state.epochs:
                break
            failure = await self._end_epoch(await self._epoch())
        await self._assembly.exchange(None, await self._call("end"))

    async def _begin_together(self, failure: Exception | None) -> list[bool]:
        """Return for each rank whether it asks to stop; raise `MismatchError` unless all begin the same epoch."""
        place = (self._position.epoch, self._state.epochs)
        try:
            words = await self._assembly.exchange((self._asks_stop(), place), failure)
            stops, places = [stop for stop, _ in words], [place for _, place in words]
            if not any(stops):
                checks.check_same_epoch(places)
            return stops
        except asyncio.CancelledError:
            if self._position.epoch < self._state.epochs:
                with suppress(Exception):  # such as of an aborted net
                    async with self._stepper.epoch():  # the others may be there, and learn of it only there
                        raise
            raise

    async def _call(self, event: Event) -> Exception | None:
        """Call the hooks of `event`; return their error, for the next exchange with the other ranks."""
        try:
            await self._hooks.call(event, self._state)
        except Exception as error:  # noqa: BLE001  - raised after the other ranks know
            return error
        return None

    async def _epoch(self) -> Exception | None:
        """Train on the rest of this epoch; return the error of this rank."""
        self._state.epoch = self._position.epoch + 1
        self._meter = Meter(self._model.metrics)
        self._interrupted = False
        try:
            async with self._others(), self._stepper.epoch():
                await self._stepper.flush()
                self._stepper.note(self._position.step)
                if isinstance(self._state.net, DataParallel):
                    checks.check_reduced(self._state.net)
                set_epoch(self._loader, self._position.epoch)
                self._position.begin_epoch()
                if self._display is not None:
                    self._display.start(length_of(self._loader))
                async with prefetched(self._loader) as batches:
                    await self._steps(batches)
                self._over.set()
            await self._stepper.flush()
        except Exception as error:  # noqa: BLE001  - raised after the other ranks know
            return error
        return None

    async def _end_epoch(self, failure: Exception | None) -> Exception | None:
        """Exchange figures and failures with the other ranks; return the error of the hooks of "epoch"."""
        if failure is not None and not self._stepper.waits:
            self._assembly.abort(f"failed in this training: {failure!r}")
            raise failure
        prints: list[int] = []
        if self._debug and self._stepper.waits and failure is None:
            prints = await self._prints()
        mine = _Word(self._asks_stop(), self._interrupted, self._meter.sums(), prints)
        words = [_Word(*word) for word in await self._assembly.exchange(mine, failure)]
        checks.check_alike(self._alike, [word.prints for word in words], self._state)
        self._state.stop = any(word.stop for word in words)
        if any(word.interrupted for word in words):
            self._position.random = torch_state()
            return None
        self._position.epoch, self._position.batch = self._position.epoch + 1, 0
        self._stepper.note(None)
        self._state.metrics = self._meter.means([word.sums for word in words])
        return await self._call("epoch")

    # --- steps --------------------------------------------------------------------------------------------------

    async def _steps(self, batches: AsyncIterator[Any]) -> None:
        position, state = self._position, self._state
        if not isinstance(source_of(self._loader), ShardQueue):  # which gives each batch once
            for _ in range(position.batch):
                await anext(batches, None)  # another rank may have had more
        position.restore()
        batch = Batch(self._model, state, self._hooks, self._meter, self._progress)
        async for sample in batches:
            self._stepper.note(position.step)  # again, since hooks may have loaded other parameters
            await self._agree(position.step)
            state.step, state.batch = position.step + 1, position.batch + 1
            await batch.take(sample)
            state.loss = await self._stepper.step(batch, self._reduced)
            if not self._stepper.midway:
                await self._hooks.call("backward", state)
            position.step, position.batch = state.step, state.batch
            self._stepper.note(position.step)
            await self._hooks.call("update", state)
            if self._stepper.stopping():
                self._interrupted = state.stop = True
                break

    async def _agree(self, step: int) -> int:
        """In an elastic world, agree with all ranks on the used records of a queue in the step after `step`."""
        queue = source_of(self._loader)
        if not (isinstance(queue, ShardQueue) and isinstance(self._stepper, PassStepper) and self._assembly.elastic):
            return 0
        return await queue.agree(self._stepper.counted(step))

    @asynccontextmanager
    async def _others(self) -> AsyncIterator[None]:
        """Agree on used records with the other ranks while this rank, without more data, waits for them."""
        self._over = asyncio.Event()

        async def agree() -> None:
            await self._over.wait()
            step = self._position.step
            while await self._agree(step):
                step += 1

        agreeing = asyncio.create_task(agree())
        try:
            yield
            await agreeing
        finally:
            agreeing.cancel()
            await asyncio.wait([agreeing])
            agreeing.cancelled() or agreeing.exception()  # the epoch has the same error

    def _reduced(self) -> None:
        """Call the hooks of "backward", on the compute thread."""
        self._hooks.call_on_thread("backward", self._state, self._progress)

    # --- our own hooks --------------------------------------------------------------------------------------------

    async def _profile(self, step: int, call: Callable[[], None], state: State) -> None:
        if state.step == step:
            await self._stepper.run(call)

    async def _check_parameters(self, state: State) -> None:
        """Check after a step that all parameters are finite, and that shared ones are the same on all ranks."""
        await self._stepper.flush()
        if self._stepper.by_all():  # if not, a rank is at the end of its data, and the check follows the epoch
            checks.check_alike(self._alike, await self._assembly.exchange(await self._prints()), state)
        await self._stepper.run(checks.check_parameters, self._model.module, state)

    async def _prints(self) -> list[int]:
        return await self._stepper.run(checks.fingerprints, self._alike)


# --- evaluation -------------------------------------------------------------------------------------------------------


@located
async def evaluate(
    model: Model, stepper: Stepper, assembly: Assembly, hooks: Hooks, state: State, loader: Loader
) -> dict[str, float]:
    """Return the figures of the data of all ranks, which they exchange at the end."""
    meter = Meter(model.metrics)
    batch = Batch(model, state, hooks, meter, Progress.current())
    failure: Exception | None = None
    await assembly.open()
    try:
        async with stepper.open(lambda: False):
            await stepper.flush()
            with stepper.weights(), _switched_off(model.module):
                await hooks.call("start", state)
                async with prefetched(loader) as samples:
                    async for sample in samples:
                        state.step = state.batch = state.batch + 1
                        await batch.take(sample)
                        state.loss = await stepper.run(_without_gradients, batch)
                        if state.stop:
                            break
    except Exception as error:  # noqa: BLE001  - raised after the other ranks know
        failure = error
    except BaseException as error:
        assembly.abort(f"was cancelled in this evaluation: {error!r}")
        raise
    state.metrics = meter.means(await assembly.exchange(meter.sums(), failure))
    await hooks.call("end", state)
    return dict(state.metrics)


def _without_gradients(batch: Batch) -> Tensor:
    with torch.no_grad():
        return batch()


@contextmanager
def _switched_off(module: nn.Module) -> Iterator[None]:
    """Switch dropout, batch norm and similar modules to evaluation in this block."""
    training = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in training:
            part.training = mode
