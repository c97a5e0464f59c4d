"""A net on one communicator: the duplicates, buckets and compute thread that end with the communicator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal, TypeVar, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from aiodist.communicator import Communicator, parts_of
from aiodist.communicator.resources import Resources
from aiodist.errors import CommunicatorError, DeadlockError, PeerError
from aiodist.handles import Handle, internals
from aiodist.handles.handle import FutureWaiter
from aiodist.nn.bucket_plan import Sizes
from aiodist.nn.buckets import Bucket, Slot, row_parameters
from aiodist.nn.compression import Compression
from aiodist.nn.compute import Compute
from aiodist.nn.devices import placement
from aiodist.nn.drivers import Driver
from aiodist.nn.joiners import JoinedState
from aiodist.nn.layout import named_state, structure
from aiodist.nn.passes import Pass
from aiodist.nn.per_rank import Shared
from aiodist.nn.reducer import Reducer
from aiodist.nn.step_log import StepLog
from aiodist.nn.steps import Changes, StepSettings
from aiodist.streams import HostStream
from aiodist.types import settings_text

T = TypeVar("T")


@dataclass(frozen=True)
class Arguments:
    """Arguments of `DataParallel.create` that hold on every communicator of a net."""

    shared: Shared
    op: Literal["mean", "sum"]
    sizes: Sizes
    compression: Compression | None

    def described(self) -> dict[str, object]:
        """Return the values that ranks compare."""
        parameters, rows = list(self.shared.named_parameters()), row_parameters(self.shared.module)
        named = named_state(self.shared)
        return {
            "place": placement(named),
            "op": self.op,
            "compress": settings_text(self.compression),
            "bytes of buckets": [self.sizes.bucket, self.sizes.first],
            "frozen parameters": ", ".join(name for name, p in parameters if not p.requires_grad) or "none",
            "sparse gradients": ", ".join(name for name, p in parameters if p in rows) or "none",
            **structure(named),
        }


class Binding:
    """The parts of a net on one communicator (loop's thread). A guest of the duplicate that is closed first."""

    def __init__(
        self,
        home: Communicator,
        side: Communicator,
        arguments: Arguments,
        settings: StepSettings,
        joined: JoinedState,
        reducer: Reducer,
        stream: HostStream,
    ) -> None:
        self.home = home
        """The communicator that the user gave."""
        self.coll = reducer.data
        """The duplicate for reductions."""
        self.side = side
        """The duplicate for collectives of the user, also while reductions are in flight."""
        self.arguments = arguments
        self.shared = arguments.shared
        self.settings = settings
        self.joined = joined
        """State from the other ranks for drivers and schedulers that are still to be made."""
        self.reducer = reducer
        self.compute = Compute(stream, reducer)
        self.optimizer: Optimizer | Driver | None = None
        """The optimizer of the last step."""
        self.ended: str | None = None
        """The reason why calls raise, or None while the net is open."""
        self.busy_seconds = 0.0
        """Seconds in steps and backwards of the user, summed."""
        self._work: Handle[Any] | None = None
        """The newest step or backward that the user asked for."""
        self._passes: set[asyncio.Future[None]] = set()
        """Passes of `backward_iter` in flight."""
        reducer.steps.keep_own(settings.per_rank)
        self.step_log = self._step_log(settings)
        """The user's callback after steps, or None without one on this rank."""
        self._resources.tallies[self.coll.name] = self._tally

    def _step_log(self, settings: StepSettings) -> StepLog | None:
        if settings.log is None:
            return None
        log = StepLog(settings.log, settings.log_every, lambda: self.reducer.statistics.exposed_seconds)
        return log if self.home.rank == 0 else None

    def _tally(self) -> dict[str, float]:
        """Return the numbers of this net for metrics (any thread)."""
        statistics = self.reducer.statistics
        return {
            "aiodist_steps_total": statistics.passes,
            "aiodist_step_seconds_total": self.busy_seconds,
            "aiodist_exposed_reduction_seconds_total": statistics.exposed_seconds,
        }

    @property
    def _resources(self) -> Resources:
        resources: Resources = parts_of(self.coll).registry.resources
        return resources

    def __repr__(self) -> str:
        return f"<DataParallel of {type(self.shared.module).__name__} on {self.coll!r}>"

    @property
    def elastic(self) -> bool:
        """True if the world may lose and gain ranks."""
        return parts_of(self.coll).registry.elastic is not None

    def configure(self, changes: Changes) -> None:
        """Change the settings."""
        settings = self.settings.changed(self.shared, changes)
        self.settings, self.step_log = settings, self._step_log(settings)
        self.joined.change(self.settings.stateful)
        self.reducer.steps.keep_own(self.settings.per_rank)

    # --- work ---------------------------------------------------------------------------------------------------

    def note(self, work: Handle[T]) -> Handle[T]:
        """Return `work`, which is now the newest step or backward."""
        self._work = work
        return work

    async def finish(self, work: Handle[T]) -> T:
        """Return the result of `work`; raise `OperationTimeout` if a reduction of it is late: the work continues."""
        self._work = work
        began = perf_counter()
        try:
            return await (work if self.coll.timeout is None else self._finish_in_time(work))
        finally:
            self.busy_seconds += perf_counter() - began
            if self._work is work and work.done():
                self._work = None

    async def _finish_in_time(self, work: Handle[T]) -> T:
        ended = FutureWaiter(self.reducer.loop.progress.loop.create_future())
        self.reducer.loop.waiting.append(ended.future)
        internals.add_waiter(work, ended)
        try:
            await ended.future
            return work.result()
        finally:
            internals.remove_waiter(work, ended)
            self.reducer.loop.waiting.remove(ended.future)

    async def backward_iter(self, loss: Tensor) -> AsyncGenerator[tuple[nn.Parameter, Tensor], None]:
        """Run backward, and yield each parameter with its reduced gradient."""
        self.check()
        self.check_reduces("backward_iter")
        arrivals: asyncio.Queue[Bucket | None] = asyncio.Queue()
        work = self.compute.submit(self.compute.reduce, lambda: loss, on_arrival=arrivals.put_nowait)
        # The pass continues if the caller leaves early, and asyncio reports its error then.
        ended = asyncio.ensure_future(_ended(work, arrivals))
        self._passes.add(ended)
        ended.add_done_callback(self._passes.discard)
        unused: list[Slot] = []
        while (bucket := await arrivals.get()) is not None:
            unused += bucket.unused
            bucket.scale()
            for pair in _pairs([slot for slot in bucket.slots if slot not in bucket.unused]):
                yield pair
        await ended
        for pair in _pairs(unused):
            yield pair

    # --- checks -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise RuntimeError if the net has ended, or the call comes from another thread than the loop's."""
        if self.ended is not None:
            raise RuntimeError(f"this DataParallel {self.ended}")
        self.check_loop()

    def check_loop(self) -> None:
        """Raise RuntimeError on another thread than the loop's."""
        self.reducer.loop.progress.check_here(self)

    def check_updated(self) -> None:
        """Raise RuntimeError while the optimizer of the last step has pending updates."""
        if isinstance(self.optimizer, Driver) and self.optimizer.pending:
            raise RuntimeError("the last updates are still to be made: `await opt.flush()` first")

    def check_loads(self) -> None:
        """Raise RuntimeError if a state cannot be loaded now."""
        self.check_updated()
        if not self.compute.is_current() and (self._passes or not (self._work is None or self._work.done())):
            raise RuntimeError(
                "a step or a backward is in flight, on the compute thread, and uses the parameters: await it first, or "
                "load after it, `await net.submit(net.load_state_dict, state)`"
            )

    def check_reduces(self, call: str, opt: object = None) -> None:
        """Raise RuntimeError if a pass would not bring reduced gradients to the parameters, or to `opt`."""
        if self.reducer.sums.blocks:
            raise RuntimeError(f"net.{call} inside net.no_sync(): there, `await net.backward(loss)` adds up gradients")
        if self.reducer.owner not in (None, opt):
            raise RuntimeError(
                f"the gradients of this net go to the shards of {self.reducer.owner!r}, and never to the parameters: "
                "expected `await net.step(forward, sharded)` with that, or its close() first"
            )

    def check_kept(self) -> None:
        """Raise RuntimeError if a step would drop gradients that `no_sync` has accumulated."""
        if not self.reducer.sums.kept:
            return
        gradients = [p.grad for p in self.shared.parameters() if p.grad is not None]
        if any(gradient.is_sparse or bool(gradient.any()) for gradient in gradients):
            raise RuntimeError(
                "net.step forgets gradients before it computes new ones, also those that backwards in net.no_sync() "
                "have added up: give it all forwards as a list, `await net.step([forward, …], opt)`, or have the next "
                "backward reduce the sum, `await net.backward(loss)`, and then `await net.submit(opt.step)`. "
                "`net.zero_grad()` drops them"
            )
        self.reducer.sums.kept = False

    # --- the end ------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        failed: Exception | None = None
        try:
            if isinstance(self.optimizer, Driver):
                await self.optimizer.flush()
            if self.reducer.devices:
                await self.compute.submit(self.compute.finish)
            with suppress(CommunicatorError, PeerError):  # aborted: no rank is left to wait for
                await self.compute.submit(self.compute.end)
        except DeadlockError:  # raised by the call of each rank that waited
            pass
        except Exception as error:  # noqa: BLE001  - raised below
            if not (self.reducer.consensus.parted and isinstance(error, CommunicatorError)):
                failed = error
        self.ended = "is closed"
        self._resources.end_tally(self.coll.name)
        await self.compute.stream.aclose()
        await self.reducer.hook.aclose()
        self.reducer.release()
        if failed is not None:
            raise failed

    def abort(self) -> None:
        self.ended = self.ended or "was aborted"  # a failed close has set it
        self._resources.end_tally(self.coll.name)
        self.compute.stream.abort()
        self.reducer.hook.abort()
        self.reducer.release()


def _pairs(slots: Iterable[Slot]) -> Iterator[tuple[nn.Parameter, Tensor]]:
    for slot in slots:
        if slot.result is not None:
            slot.parameter.grad, slot.given = slot.result, True
            yield cast(nn.Parameter, slot.parameter), slot.result


async def _ended(work: Handle[tuple[Tensor, Pass]], arrivals: asyncio.Queue[Bucket | None]) -> None:
    """Wait for the end of a pass, and mark the end of its buckets."""
    try:
        _, reduction = await work
        await reduction.finished
    finally:
        arrivals.put_nowait(None)
