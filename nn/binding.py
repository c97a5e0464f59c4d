"""A net on one communicator: the duplicates, buckets and compute thread that end with the communicator."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, TypeVar

from torch.optim import Optimizer

from aiodist.communicator import Communicator, parts_of
from aiodist.errors import CommunicatorError, DeadlockError, PeerError
from aiodist.handles import Handle, internals
from aiodist.handles.state import FutureWaiter
from aiodist.nn.compute import Compute
from aiodist.nn.drivers import Driver
from aiodist.nn.per_rank import Shared
from aiodist.nn.reducer import Reducer
from aiodist.streams import HostStream

T = TypeVar("T")


class Binding:
    """The parts of a net on one communicator (loop's thread). A guest of the duplicate that is closed first."""

    def __init__(
        self, home: Communicator, side: Communicator, shared: Shared, reducer: Reducer, stream: HostStream
    ) -> None:
        self.home = home
        """The communicator that the user gave."""
        self.coll = reducer.data
        """The duplicate for reductions."""
        self.side = side
        """The duplicate for collectives of the user, also while reductions are in flight."""
        self.shared = shared
        self.reducer = reducer
        self.compute = Compute(stream, reducer)
        self.optimizer: Optimizer | Driver | None = None
        """The optimizer of the last step."""
        self.passes: set[asyncio.Future[None]] = set()
        """Passes of `backward_iter` in flight."""
        self.ended: str | None = None
        """The reason why calls raise, or None while the net is open."""
        self._work: Handle[Any] | None = None
        """The newest step or backward that the user asked for."""

    def __repr__(self) -> str:
        return f"<DataParallel of {type(self.shared.module).__name__} on {self.coll!r}>"

    @property
    def elastic(self) -> bool:
        """True if the world may lose and gain ranks."""
        return parts_of(self.coll).registry.elastic is not None

    # --- work ---------------------------------------------------------------------------------------------------

    def note(self, work: Handle[T]) -> Handle[T]:
        """Return `work`, which is now the newest step or backward."""
        self._work = work
        return work

    async def finish(self, work: Handle[T]) -> T:
        """Return the result of `work`; raise `OperationTimeout` if a reduction of it is late: the work continues."""
        self._work = work
        try:
            return await (work if self.coll.timeout is None else self._finish_in_time(work))
        finally:
            if self._work is work and work.done():
                self._work = None

    async def _finish_in_time(self, work: Handle[T]) -> T:
        ended = FutureWaiter(self.reducer.progress.loop.create_future())
        self.reducer.waiting.append(ended.future)
        internals.add_waiter(work, ended)
        try:
            await ended.future
            return work.result()
        finally:
            internals.remove_waiter(work, ended)
            self.reducer.waiting.remove(ended.future)

    # --- checks -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise RuntimeError if the net has ended, or the call comes from another thread than the loop's."""
        if self.ended is not None:
            raise RuntimeError(f"this DataParallel {self.ended}")
        self.check_loop()

    def check_loop(self) -> None:
        """Raise RuntimeError on another thread than the loop's."""
        self.reducer.progress.check_here(repr(self))

    def check_updated(self) -> None:
        """Raise RuntimeError while the optimizer of the last step has pending updates."""
        if isinstance(self.optimizer, Driver) and self.optimizer.pending:
            raise RuntimeError("the last updates are still to be made: `await opt.flush()` first")

    def check_loads(self) -> None:
        """Raise RuntimeError if a state cannot be loaded now."""
        self.check_updated()
        if not self.compute.is_current() and (self.passes or not (self._work is None or self._work.done())):
            raise RuntimeError(
                "a step or a backward is in flight, on the compute thread, and uses the parameters: await it first, or "
                "load after it, `await net.submit(net.load_state_dict, state)`"
            )

    def check_reduces(self, call: str, opt: object = None) -> None:
        """Raise RuntimeError if a pass would not bring reduced gradients to the parameters, or to `opt`."""
        if self.reducer.local:
            raise RuntimeError(f"net.{call} inside net.no_sync(): there, `await net.backward(loss)` adds up gradients")
        if self.reducer.owner not in (None, opt):
            raise RuntimeError(
                f"the gradients of this net go to the shards of {self.reducer.owner!r}, and never to the parameters: "
                "expected `await net.step(forward, sharded)` with that, or its close() first"
            )

    def check_kept(self) -> None:
        """Raise RuntimeError if a step would drop gradients that `no_sync` has accumulated."""
        if not self.reducer.kept:
            return
        gradients = [p.grad for p in self.shared.parameters() if p.grad is not None]
        if any(gradient.is_sparse or bool(gradient.any()) for gradient in gradients):
            raise RuntimeError(
                "net.step forgets gradients before it computes new ones, also those that backwards in net.no_sync() "
                "have added up: give it all forwards as a list, `await net.step([forward, …], opt)`, or have the next "
                "backward reduce the sum, `await net.backward(loss)`, and then `await net.submit(opt.step)`. "
                "`net.zero_grad()` drops them"
            )
        self.reducer.kept = False

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
            if not (self.reducer.parted and isinstance(error, CommunicatorError)):
                failed = error
        self.ended = "is closed"
        await self.compute.stream.aclose()
        await self.reducer.hook.aclose()
        self.reducer.release()
        if failed is not None:
            raise failed

    def abort(self) -> None:
        self.ended = self.ended or "was given up"  # a failed close has set it
        self.compute.stream.abort()
        self.reducer.hook.abort()
        self.reducer.release()
