"""One training: epochs of steps, the same on every rank, and one end for all of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

from aiodist.checkpoints.own import torch_state
from aiodist.data import ShardQueue
from aiodist.engine import checks
from aiodist.engine.batch import Batch, Loader, Model, length_of, prefetched, set_epoch, source_of
from aiodist.engine.display import Display, Profiling
from aiodist.engine.hooks import Hooks
from aiodist.engine.meters import Assembly, Meter, Sums
from aiodist.engine.state import Event, Position, State
from aiodist.engine.steppers import Stepper
from aiodist.handles import Progress
from aiodist.nn import DataParallel


class Watchers(NamedTuple):
    """What looks at a training beside the user's hooks."""

    display: Display | None
    profiling: Profiling | None
    debug: bool
    dynamic: bool


class _Word(NamedTuple):
    """What a rank says behind an epoch."""

    stop: bool
    interrupted: bool
    sums: Sums
    prints: list[int]
    """See `checks.fingerprints`; empty where they are not compared."""


class Training:
    """One call of `Engine.train` on this rank.

    All ranks do the same in the same order: before each epoch they tell one another whether one stops or has failed,
    then they make steps, and after it they tell what they have measured. The steps of an epoch are inside the block of
    the stepper, which tells the other ranks when one fails there, and has a rank whose data have ended wait.
    """

    def __init__(
        self, model: Model, watchers: Watchers, stepper: Stepper, assembly: Assembly, position: Position, state: State
    ) -> None:
        self._model = model
        self._watchers = watchers
        self._stepper = stepper
        self._assembly = assembly
        self._position = position
        self._state = state
        self._progress = Progress.current()

    async def run(self, loader: Loader, users: Hooks) -> None:
        """Train until there are as many epochs as the state says, or one rank asks to stop."""
        self._loader, self._hooks = loader, Hooks(behind=users)
        self._state.epoch, self._state.step = self._position.epoch, self._position.step
        self._add_ours()
        display, profiling, debug, _ = self._watchers
        try:
            async with AsyncExitStack() as stack:
                await self._assembly.open()
                await stack.enter_async_context(self._stepper.open(self._asks_stop))
                if debug and not self._scaled():
                    stack.enter_context(checks.checked_gradients(self._model.module, self._state))
                if display is not None:
                    stack.callback(display.close)
                try:
                    await self._run()
                finally:
                    if profiling is not None:
                        await self._stepper.run(profiling.end)
        except BaseException as error:
            if not isinstance(error, Exception):
                self._assembly.abort(f"was cancelled in this training: {error!r}")
            raise

    def _add_ours(self) -> None:
        """Add the hooks that come before the user's."""
        display, profiling, debug, dynamic = self._watchers
        if profiling is not None:
            self._hooks.add("sample", self._begin_profile)
        if debug:
            self._hooks.add("criterion", checks.check_loss)
            self._hooks.add("update", self._check_parameters)
        if not dynamic:
            self._hooks.add("criterion", checks.GraphCheck(self._model.module))
        if profiling is not None:
            self._hooks.add("update", self._end_profile)
        if display is not None:
            self._hooks.add("update", display.update)
            self._hooks.add("epoch", display.epoch)

    def _asks_stop(self) -> bool:
        """Return whether this rank asks all to stop: a hook does, or a signal."""
        return self._state.stop or self._assembly.stop_requested

    def _scaled(self) -> bool:
        """Gradients are scaled, so infinite ones are no mistake."""
        net = self._state.net
        return isinstance(net, DataParallel) and net.settings().scaler is not None

    # --- epochs -------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        failure = await self._call("start")
        while True:
            self._state.stop = any(await self._assembly.exchange(self._asks_stop(), failure))
            if self._state.stop or self._position.epoch >= self._state.epochs:
                break
            failure = await self._end_epoch(await self._epoch())
        await self._assembly.exchange(None, await self._call("end"))

    async def _call(self, event: Event) -> Exception | None:
        """Call the hooks of `event`; return what they raise, which the ranks are told when they meet next."""
        try:
            await self._hooks.call(event, self._state)
        except Exception as error:  # noqa: BLE001  - raised after the others have been told
            return error
        return None

    async def _epoch(self) -> Exception | None:
        """Train on what is left of this epoch; return what went wrong on this rank."""
        self._state.epoch = self._position.epoch + 1
        self._meter = Meter(self._model.metrics)
        self._interrupted = False
        try:
            async with self._stepper.epoch():
                if isinstance(self._state.net, DataParallel):
                    checks.check_reduced(self._state.net)
                set_epoch(self._loader, self._position.epoch)
                self._position.begin_epoch()
                if self._watchers.display is not None:
                    self._watchers.display.start(length_of(self._loader))
                async with prefetched(self._loader) as batches:
                    await self._steps(batches)
            await self._stepper.flush()
        except Exception as error:  # noqa: BLE001  - raised after the others have been told
            return error
        return None

    async def _end_epoch(self, failure: Exception | None) -> Exception | None:
        """Tell the others what was measured, or that this rank failed; return what the hooks of "epoch" raise."""
        if failure is not None and not self._stepper.waits:
            self._assembly.abort(f"failed in this training: {failure!r}")
            raise failure
        prints: list[int] = []
        if self._watchers.debug and self._stepper.waits and failure is None:
            prints = await self._prints()
        mine = _Word(self._asks_stop(), self._interrupted, self._meter.sums(), prints)
        words = await self._assembly.exchange(mine, failure)
        checks.check_alike(self._model.module, [word.prints for word in words], self._state)
        self._state.stop = any(word.stop for word in words)
        if any(word.interrupted for word in words):
            self._position.random = torch_state()
            return None
        self._position.epoch, self._position.batch = self._position.epoch + 1, 0
        self._state.metrics = self._meter.means([word.sums for word in words])
        return await self._call("epoch")

    # --- steps --------------------------------------------------------------------------------------------------

    async def _steps(self, batches: AsyncIterator[Any]) -> None:
        position, state = self._position, self._state
        if not isinstance(source_of(self._loader), ShardQueue):  # which gives no batch again
            for _ in range(position.batch):
                await anext(batches)
        position.go_on()
        batch = Batch(self._model, state, self._hooks, self._meter, self._progress)
        async for sample in batches:
            state.step, state.batch = position.step + 1, position.batch + 1
            await batch.take(sample)
            state.loss = await self._stepper.step(batch, self._reduced)
            if not self._stepper.midway:
                await self._hooks.call("backward", state)
            position.step, position.batch = state.step, state.batch
            await self._hooks.call("update", state)
            if self._stepper.stopping():
                self._interrupted = state.stop = True
                break

    def _reduced(self) -> None:
        """The gradients of a step are there; on the thread that computes."""
        self._hooks.call_on_thread("backward", self._state, self._progress)

    # --- our own hooks --------------------------------------------------------------------------------------------

    async def _begin_profile(self, state: State) -> None:
        profiling = self._watchers.profiling
        if profiling is not None and state.step == profiling.first:
            await self._stepper.run(profiling.begin)

    async def _end_profile(self, state: State) -> None:
        profiling = self._watchers.profiling
        if profiling is not None and state.step == profiling.last:
            await self._stepper.run(profiling.end)

    async def _check_parameters(self, state: State) -> None:
        """After each step: all parameters are finite, and the same on all ranks that ought to have them the same."""
        await self._stepper.flush()
        if self._stepper.by_all():  # else one is at the end of its data: they are compared behind the epoch
            checks.check_alike(self._model.module, await self._assembly.exchange(await self._prints()), state)
        await self._stepper.run(checks.check_parameters, self._model.module, state)

    async def _prints(self) -> list[int]:
        return await self._stepper.run(checks.fingerprints, self._model.module)
