"""Steps by passes of a `DataParallel`, or by a client of a parameter server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, nullcontext
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from aiodist.communicator import Communicator
from aiodist.handles import Handle
from aiodist.nn import DataParallel
from aiodist.nn.data_parallel import check_optimizer, reducer_of
from aiodist.nn.drivers import Driver
from aiodist.ps.training import TrainingClient
from aiodist.streams import HostStream
from aiodist.types import Stateful

T = TypeVar("T")


class PassStepper:
    """Synchronous steps: one pass of the net for each, on all ranks."""

    waits = True
    """True if no rank makes a step without the others."""

    def __init__(self, net: DataParallel, optimizer: Optimizer | Driver) -> None:
        self.base: Communicator = net.coll
        self._net = net
        self._optimizer = optimizer
        check_optimizer(net, optimizer)
        lag = optimizer.pass_lag if isinstance(optimizer, Driver) else 0
        if lag is None:
            raise TypeError(
                f"{type(optimizer).__name__}: its steps are not one pass of all ranks each (`pass_lag`), so no rank "
                "would learn that another stops or fails: expected an optimizer of torch.optim, or another driver"
            )
        self._lag = lag
        self._made = 0
        self._known: tuple[int, int] | None = None
        """In an epoch, numbers of steps of the net and of the training at a time without pending updates."""
        self.midway = isinstance(optimizer, Optimizer)
        """True if `step` calls `reduced` between the reduction and the update."""

    def run(self, fn: Callable[..., T], /, *args: Any) -> Handle[T]:
        return self._net.submit(fn, *args)

    async def step(self, work: Callable[[], Tensor], reduced: Callable[[], None]) -> Tensor:
        """Return the loss of one step; with `midway` the compute thread calls `reduced` before the update."""
        self._made += 1
        if not isinstance(self._optimizer, Optimizer):
            return await self._net.step(work, self._optimizer)
        hook = self._optimizer.register_step_pre_hook(lambda *_: reduced())
        try:
            return await self._net.step(work, self._optimizer)
        finally:
            hook.remove()

    def note(self, step: int | None) -> None:
        """Note that `step` is the last step of the training so far, or with None that no epoch is in progress."""
        if step is None:
            self._known = None
        elif not (isinstance(self._optimizer, Driver) and self._optimizer.pending):
            self._known = self._net.steps_done, step

    def counted(self, step: int) -> int:
        """Return the net's number of steps after step number `step` of the training, in an epoch."""
        assert self._known is not None
        counted, known = self._known
        return counted + step - known

    def in_net(self, step: int) -> int:
        """Return the number of the last step in the parameters: outside of epochs `step`."""
        if self._known is None:
            return step
        counted, known = self._known
        return known + self._net.steps_done - counted

    async def rebind(self, coll: Communicator, state: Sequence[Stateful]) -> None:
        if self._lag and self._net.configure().scaler is not None:
            raise RuntimeError(
                "rebind with a scaler, and updates that are made later: the steps that the scaler skipped are unknown"
            )
        await self._net.rebind(coll, self._optimizer, *state)
        self.base = self._net.coll

    def stopping(self) -> bool:
        """Return True if all ranks stop after the last step, since one of them has asked."""
        return self._made > self._lag and self._net.stop_requested  # else it is from the training before

    def by_all(self) -> bool:
        """Return True if all ranks have made the last step, which is finished."""
        answer = reducer_of(self._net).consensus.answer
        return answer is not None and answer.sound and answer.active == self._net.coll.size

    def epoch(self) -> AbstractAsyncContextManager[object]:
        """Return the block of an epoch, where ranks without more data wait, and learn of a failed rank."""
        return self._net.join(self._optimizer)

    async def flush(self) -> None:
        """Return when all updates of a driver are made."""
        if isinstance(self._optimizer, Driver):
            await self._optimizer.flush()

    def weights(self) -> AbstractContextManager[object]:
        """Return the block in which the module has the parameters for an evaluation."""
        return nullcontext()

    @asynccontextmanager
    async def open(self, stop: Callable[[], bool]) -> AsyncIterator[None]:
        """Return the block of a training, in which each pass asks for a stop if `stop` returns True."""
        consensus = reducer_of(self._net).consensus
        self._made = 0
        before, consensus.asks_stop = consensus.asks_stop, stop
        try:
            yield
        finally:
            consensus.asks_stop = before


class ClientStepper:
    """Asynchronous steps: the gradients of a module on this rank alone, then a step of a client.

    It has the methods of `PassStepper`.
    """

    waits = False
    midway = True
    base: Communicator | None = None

    def __init__(self, module: nn.Module, client: TrainingClient) -> None:
        self._module = module
        self._client = client
        self._stop: Callable[[], bool] = lambda: False
        self._stream: HostStream

    def run(self, fn: Callable[..., T], /, *args: Any) -> Handle[T]:
        return self._stream.submit(fn, *args)

    async def step(self, work: Callable[[], Tensor], reduced: Callable[[], None]) -> Tensor:
        loss = await self._stream.submit(self._compute, work, reduced)
        await self._client.step()
        return loss

    def _compute(self, work: Callable[[], Tensor], reduced: Callable[[], None]) -> Tensor:
        self._module.zero_grad()
        loss = work()
        loss.backward()
        reduced()
        return loss.detach()

    def stopping(self) -> bool:
        return self._stop()

    def note(self, step: int | None) -> None:
        """Do nothing: no pass reports the step."""

    def by_all(self) -> bool:
        """Return False, since each rank makes its own steps."""
        return False

    def epoch(self) -> AbstractAsyncContextManager[object]:
        return nullcontext()

    async def flush(self) -> None:
        """Do nothing: no update is pending."""

    def weights(self) -> AbstractContextManager[object]:
        return self._client.weights()

    @asynccontextmanager
    async def open(self, stop: Callable[[], bool]) -> AsyncIterator[None]:
        self._stop = stop
        async with HostStream("engine") as self._stream:
            yield


Stepper = PassStepper | ClientStepper
