"""One training: epochs of steps, the same on every rank, and one end for all of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any

from aiodist.engine import checks
from aiodist.engine.display import Display
from aiodist.engine.hooks import Hooks
from aiodist.engine.meeting import Assembly, Word
from aiodist.engine.meters import Meter
from aiodist.engine.plan import Batch, Loader, LoopPlan, length_of, prefetched, queue_of, set_epoch, take
from aiodist.engine.position import Position
from aiodist.engine.profiling import Profiling
from aiodist.engine.state import Event, State
from aiodist.engine.steppers import Stepper
from aiodist.errors import AiodistError
from aiodist.handles import Progress
from aiodist.nn import DataParallel


class Training:
    """One call of `Engine.train` on this rank.

    All ranks do the same in the same order: before each epoch they tell one another how much data they have, then they
    make steps, and after it they tell what they have measured. A rank that fails takes part in this to the end: where
    the others are about to make another step it makes that with a forward that raises, so that they hear of it.
    """

    def __init__(
        self, plan: LoopPlan, stepper: Stepper, assembly: Assembly, position: Position, hooks: Hooks, state: State
    ) -> None:
        self._plan = plan
        self._stepper = stepper
        self._assembly = assembly
        self._position = position
        self._state = state
        self._hooks = Hooks(behind=hooks)
        self._progress = Progress.current()
        self._display = Display() if plan.progress and assembly.rank == 0 else None
        self._profiling: Profiling | None = None
        self.meter = Meter(plan.metrics)
        self._loader: Loader = ()
        self._length: int | None = None
        """Of an epoch, in batches, where the loader knows it."""
        self._uneven = False
        """Ranks may have different numbers of batches."""
        self._interrupted = False
        """This epoch ended before its data."""
        self._passes: int | None = None
        """How many steps of this epoch this rank has begun; None between epochs."""
        self._batches: AsyncIterator[Any] | None = None
        """Those of this epoch, once they are read."""
        self._due = False
        """The other ranks make another step, as far as this one knows."""
        self._told = False
        """The last step failed on all ranks."""
        self._agreed = False
        """They have been asked, and make this step."""
        self._asked = False
        """They have been asked for the last time in this epoch."""
        self._data: list[Any] = []
        """States of a queue of shards with which this epoch begins."""
        self._add_ours()

    def _add_ours(self) -> None:
        """Add the hooks that come before the user's."""
        plan = self._plan
        if plan.profile is not None:
            self._profiling = Profiling(plan.profile, plan.traces, self._assembly.rank)
            self._hooks.add("sample", self._begin_profile)
        if plan.debug:
            self._hooks.add("criterion", checks.check_loss)
            self._hooks.add("update", self._check_parameters)
        if not plan.dynamic:
            self._hooks.add("criterion", checks.GraphCheck(plan.module))
        if self._profiling is not None:
            self._hooks.add("update", self._end_profile)
        if plan.saving is not None:
            self._hooks.add("update", plan.saving.update)
            self._hooks.add("epoch", plan.saving.epoch)
            self._hooks.add("end", plan.saving.finish)
        if self._display is not None:
            self._hooks.add("update", self._display.update)
            self._hooks.add("epoch", self._display.epoch)

    # --- epochs -------------------------------------------------------------------------------------------------

    async def run(self, loader: Loader, epochs: int) -> None:
        """Train until there are `epochs` epochs in all, or one rank asks to stop."""
        self._loader, self._state.epochs = loader, epochs
        self._state.epoch, self._state.step = self._position.epochs, self._position.steps
        try:
            async with AsyncExitStack() as stack:
                await self._assembly.open()
                await stack.enter_async_context(self._stepper.open(self._asks_stop))
                if self._plan.debug and not self._scaled():
                    stack.enter_context(checks.checked_gradients(self._plan.module, self._state))
                if self._display is not None:
                    stack.callback(self._display.close)
                try:
                    await self._run()
                finally:
                    if self._profiling is not None and self._profiling.under_way:
                        await self._stepper.run(self._profiling.end)
        except BaseException as error:
            if not isinstance(error, Exception):
                self._leave(error)
            raise

    def _asks_stop(self) -> bool:
        """Return whether this rank asks all to stop: a hook does, or a signal."""
        return self._state.stop or self._assembly.stop_requested

    def _scaled(self) -> bool:
        """Gradients are scaled, so infinite ones are no mistake."""
        net = self._state.net
        return isinstance(net, DataParallel) and net.settings().scaler is not None

    async def _run(self) -> None:
        failure = await self._call("start")
        while await self._begin_epoch(failure):
            failure = await self._epoch()
            failure = await self._end_epoch(failure)
        failure = await self._call("end")
        await self._assembly.exchange(Word(), failure)

    async def _call(self, event: Event) -> Exception | None:
        """Call the hooks of `event`; return what they raise, which the ranks are told when they meet next."""
        try:
            await self._hooks.call(event, self._state)
        except Exception as error:  # noqa: BLE001  - raised after the others have been told
            return error
        return None

    async def _begin_epoch(self, failure: Exception | None) -> bool:
        """Return whether there is another epoch, the same on all ranks, which hear of one another's data."""
        self._length = length_of(self._loader)
        left = None if self._length is None else self._length - self._position.batches
        word = Word(stop=self._asks_stop(), batches=left, data=self._position.data)
        words = await self._assembly.exchange(word, failure)
        self._state.stop = any(one.stop for one in words)
        if self._state.stop or self._position.epochs >= self._state.epochs:
            return False
        self._uneven = self._stepper.waits and self._is_uneven([one.batches for one in words])
        if self._uneven and self._plan.saving is not None:
            self._plan.saving.check_uneven()
        self._data = [state for one in words for state in one.data or ()]
        return True

    def _is_uneven(self, batches: Sequence[int | None]) -> bool:
        """Return whether ranks may have different numbers of batches; raise ValueError where that cannot be."""
        known = len(set(batches)) == 1 and None not in batches
        if len(batches) == 1 or (known and self._plan.uneven is None) or self._assembly.base is not self._stepper.base:
            return False
        if self._plan.uneven is not None and (self._plan.uneven or known or None in batches):
            return self._plan.uneven
        if self._plan.uneven is None and self._stepper.joins:
            return True
        said = ", ".join(f"rank {rank}: {'unknown' if n is None else n}" for rank, n in enumerate(batches))
        raise ValueError(
            f"ranks have different numbers of batches ({said}): expected as many on every rank, with this optimizer "
            "or with uneven=False"
        )

    async def _epoch(self) -> Exception | None:
        """Train on what is left of this epoch; return what went wrong on this rank."""
        position = self._position
        self._state.epoch = position.epochs + 1
        self._meter_epoch()
        try:
            async with AsyncExitStack() as stack:
                if self._uneven:
                    await stack.enter_async_context(self._stepper.join())
                try:
                    if isinstance(self._state.net, DataParallel):
                        checks.check_reduced(self._state.net)
                    self._load_data()
                    set_epoch(self._loader, position.epochs)
                    position.begin_epoch()
                    self._batches = await stack.enter_async_context(prefetched(self._loader))
                    await self._steps(self._batches)
                except Exception as error:
                    await self._tell(error)
                    raise
            if not self._stepper.asks:  # else it may need all ranks, and one may have failed
                await self._stepper.flush()
            if self._plan.debug and self._uneven:
                await self._compare()
        except Exception as error:  # noqa: BLE001  - raised after the others have been told
            return error
        return None

    def _load_data(self) -> None:
        """Have a queue of shards go on where all ranks were."""
        self._position.data = None
        if self._data and (queue := queue_of(self._loader)) is not None:
            queue.load_state_dicts(self._data)

    def _meter_epoch(self) -> None:
        self.meter = Meter(self._plan.metrics, self._position.figures)
        self._position.figures = None
        self._interrupted = self._told = self._agreed = self._asked = False
        self._passes, self._due = self._position.batches, True
        self._batches = None
        if self._display is not None:
            self._display.start(self._length)

    async def _end_epoch(self, failure: Exception | None) -> Exception | None:
        """Tell the others what was measured, or that this rank failed; return what the hooks of "epoch" raise."""
        self._passes = None
        if failure is not None and not self._stepper.waits:
            self._assembly.abort(f"rank {self._assembly.rank} failed in this training: {failure!r}")
            raise failure
        figures = None if failure is not None else self.meter.figures()
        word = Word(self._asks_stop(), figures=figures, interrupted=self._interrupted)
        words = await self._assembly.exchange(word, failure)
        self._state.stop = any(one.stop for one in words)
        if self._stepper.asks:
            await self._stepper.flush()
        if any(one.interrupted for one in words):
            self._position.interrupt(self.meter.figures())
            return None
        self._position.end_epoch()
        self._state.metrics = self.meter.merged([one.figures for one in words if one.figures is not None])
        return await self._call("epoch")

    # --- steps --------------------------------------------------------------------------------------------------

    async def _steps(self, batches: AsyncIterator[Any]) -> None:
        if queue_of(self._loader) is None:  # which gives no batch again
            for _ in range(self._position.batches):
                await anext(batches)
        self._position.go_on()
        async for sample in batches:
            if await self._stopped_before():
                break
            await self._step(sample)
            if self._stepper.stopping() or (self._waits_for_none and self._asks_stop()):
                self._interrupted = self._state.stop = True
                break
        else:
            self._check_length()
        if self._asks and not self._asked:
            await self._assembly.any(True)

    async def _stopped_before(self) -> bool:
        """Return whether no rank makes the next step: where steps do not tell, one of them has said so."""
        if self._asks and await self._assembly.any(self._asks_stop()):
            self._asked = self._interrupted = self._state.stop = True
        self._agreed = self._asks and not self._asked
        return self._interrupted

    @property
    def _waits_for_none(self) -> bool:
        """A rank that stops need tell no other one: in asynchronous SGD, or alone where passes do not tell."""
        return not self._stepper.waits or (self._stepper.asks and self._assembly.size == 1)

    @property
    def _asks(self) -> bool:
        """Ranks ask each other before each step; in `join` they cannot, and stop behind the epoch."""
        return self._stepper.asks and not self._uneven and self._assembly.size > 1

    async def _step(self, sample: Any) -> None:  # noqa: ANN401
        state, position = self._state, self._position
        if self._counted and self._passes == self._length:
            raise ValueError(f"the loader gives more batches than the {self._length} that it has by len()")
        state.step, state.batch = position.steps + 1, position.batches + 1
        await take(sample, self._plan, state, self._hooks)
        self._passes, self._due, self._agreed = state.batch, False, False
        try:
            state.loss = await self._stepper.step(Batch(self._plan, state, self._hooks, self.meter, self._progress))
        except Exception:
            self._told = not self._stepper.behind
            raise
        if not self._stepper.midway:
            await self._hooks.call("backward", state)
        position.steps, position.batches = state.step, state.batch
        await self._hooks.call("update", state)
        self._due = True

    @property
    def _counted(self) -> bool:
        """All ranks count on as many batches as the loaders say."""
        return self._stepper.waits and not self._uneven and self._length is not None and self._assembly.size > 1

    def _check_length(self) -> None:
        if self._counted and self._passes != self._length:
            raise ValueError(
                f"the loader gives {self._passes} batches: expected the {self._length} that it has by len()"
            )

    # --- failures -----------------------------------------------------------------------------------------------

    async def _tell(self, error: Exception) -> None:
        """Have the ranks hear of `error` that are about to make another step; the others hear of it when they meet."""
        if self._asks:
            await self._tell_asking(error)
            return
        for _ in range(self._untold(error)):
            if not await self._others_go_on():
                break
            self._passes, self._due = (self._passes or 0) + 1, False
            await self._stepper.tell(error)
        if not self._stepper.midway:
            with suppress(Exception):  # what the passes that failed have left: `error` says why
                await self._stepper.flush()

    async def _tell_asking(self, error: Exception) -> None:
        if self._agreed:  # the others make this step
            await self._stepper.tell(error)
        if not self._asked:
            with suppress(Exception):  # where the communicator is lost too, `error` says why
                await self._assembly.any(True)

    def _untold(self, error: BaseException) -> int:
        """Return how many more steps the other ranks begin, as far as data go, before they hear of `error`."""
        if not self._stepper.waits or self._uneven or (self._told and isinstance(error, AiodistError)):
            return 0  # the block of `join` tells them
        return self._stepper.lag + (not self._told)

    async def _others_go_on(self) -> bool:
        assert self._passes is not None
        if self._length is not None:
            return self._passes < self._length
        if self._due or self._batches is None:
            return True
        try:
            await anext(self._batches)
        except StopAsyncIteration:
            return False
        except Exception:  # noqa: BLE001  - it is in the place of a batch
            return True
        return True

    def _leave(self, error: BaseException) -> None:
        """This rank was cancelled: let the others hear of it, and wait for none."""
        if self._passes is not None and not self._asks:
            left = self._untold(error)
            for _ in range(left if self._length is None else min(left, self._length - self._passes)):
                self._stepper.tell_later(error)
        self._assembly.abort(f"rank {self._assembly.rank} was cancelled in this training: {error!r}")

    def reduced(self) -> None:
        """The gradients of a step are there; on the thread that computes."""
        self._hooks.call_on_thread("backward", self._state, self._progress)

    # --- our own hooks --------------------------------------------------------------------------------------------

    async def _begin_profile(self, state: State) -> None:
        assert self._profiling is not None
        if state.step == self._profiling.first:
            await self._stepper.run(self._profiling.begin)

    async def _end_profile(self, state: State) -> None:
        assert self._profiling is not None
        if state.step == self._profiling.last and self._profiling.under_way:
            await self._stepper.run(self._profiling.end)

    async def _check_parameters(self, state: State) -> None:
        """After each step: all parameters are finite, and the same on all ranks where they ought to be."""
        if self._stepper.alike:
            await self._stepper.flush()
        if self._uneven:  # in `join` nothing else communicates: they are compared behind it
            await self._stepper.run(checks.check_parameters, self._plan.module, state)
        else:
            await self._compare()

    async def _compare(self) -> None:
        comm = self._assembly.comm
        if comm is not None and self._stepper.alike:
            mine = await self._stepper.run(checks.fingerprints, self._plan.module)
            await checks.check_alike(self._plan.module, mine, comm, self._state)
        await self._stepper.run(checks.check_parameters, self._plan.module, self._state)
