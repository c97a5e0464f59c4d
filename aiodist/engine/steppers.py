"""How an engine makes steps: by the passes of a `DataParallel`, or by a client of a parameter server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, nullcontext, suppress
from typing import Any, NoReturn, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from aiodist.communicator import Communicator
from aiodist.errors import AiodistError
from aiodist.handles import Handle
from aiodist.nn import DataParallel
from aiodist.nn.data_parallel import Driver, check_one_pass
from aiodist.nn.forward import Forward, plain_step
from aiodist.nn.reduction import Reduction
from aiodist.ps.training.base import TrainingClient
from aiodist.streams import HostStream

T = TypeVar("T")


class Stepper(ABC):
    """Makes the steps of one training on this rank; what concerns other ranks does nothing unless overridden."""

    base: Communicator | None = None
    """The ranks that train together, as far as it knows."""
    waits = False
    """No rank makes a step without the others."""
    joins = False
    """Ranks whose data have ended can wait for the others in `join`."""
    asks = False
    """Ranks must ask one another before each step whether one has stopped or failed: no pass tells."""
    alike = False
    """All ranks have the same parameters after each step."""
    midway = True
    """It tells when gradients are reduced, before the update."""
    lag = 0
    """How many more steps the other ranks begin before they hear that one has failed."""
    behind = False
    """The last step raised when gradients were reduced already, so the other ranks have made it."""
    client: TrainingClient | None = None
    """It steps once the gradients are there."""

    @abstractmethod
    def run(self, fn: Callable[..., T], /, *args: Any) -> Handle[T]:  # noqa: ANN401
        """Return a handle of `fn(*args)`, which runs where steps compute."""

    async def step(self, work: Callable[[], Tensor]) -> Tensor:
        """Return the loss of one step, detached; `work` computes it."""
        self.behind = False
        loss = await self._make(work)
        if self.client is not None:
            try:
                await self.client.step()
            except Exception as error:
                self.behind = not isinstance(error, AiodistError)
                raise
        return loss

    @abstractmethod
    async def _make(self, work: Callable[[], Tensor]) -> Tensor:
        """Do what `step` does without a client."""

    def stopping(self) -> bool:
        """Return whether all ranks stop behind the step that was just made, since one of them has asked."""
        return False

    async def tell(self, error: Exception) -> None:  # noqa: B027
        """Have the next step of the other ranks fail because of `error`."""

    def tell_later(self, error: BaseException) -> None:  # noqa: B027
        """As `tell`, and wait for nothing."""

    def join(self) -> AbstractAsyncContextManager[object]:
        """Return the block in which ranks whose data have ended wait for the others."""
        return nullcontext()

    async def flush(self) -> None:  # noqa: B027
        """Return when all updates are made."""

    def weights(self) -> AbstractContextManager[object]:
        """Return the block in which the parameters are those to be evaluated."""
        return nullcontext() if self.client is None else self.client.weights()

    @abstractmethod
    def open(self, stop: Callable[[], bool]) -> AbstractAsyncContextManager[None]:
        """Return the block in which steps are made; `stop` tells whether this rank asks to stop."""


# --- by passes ------------------------------------------------------------------------------------------------------


class _Plain:
    """The driver of a plain step, with a call when the gradients are reduced."""

    pending = False
    pass_lag = 0

    def __init__(self, net: DataParallel, optimizer: Any, reduced: Callable[[], None]) -> None:  # noqa: ANN401
        self._net = net
        self._optimizer = optimizer
        self._reduced = reduced

    def train(self, forward: Forward) -> None:
        """See `Driver`."""
        plain_step(forward, self._optimizer, self._net.compute, self._reduced)

    async def flush(self) -> None:
        """Nothing is left."""

    def state_dict(self) -> Any:  # noqa: ANN401
        """Return that of the optimizer."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state: Any, /) -> object:  # noqa: ANN401
        """Have the optimizer take it."""
        return self._optimizer.load_state_dict(state)


class PassStepper(Stepper):
    """Synchronous steps: one pass of the net for each, on all of its ranks."""

    waits = joins = True

    def __init__(self, net: DataParallel, optimizer: Optimizer | Driver, reduced: Callable[[], None]) -> None:
        self.base = net.coll
        self._net = net
        if isinstance(optimizer, Driver):
            self._driver = optimizer
        else:
            check_one_pass(optimizer)
            self._driver = _Plain(net, optimizer, reduced)
        lag = getattr(self._driver, "pass_lag", None)
        self.asks, self.alike = lag is None, lag is not None
        self.lag = 1 if lag is None else lag
        self.midway = isinstance(self._driver, _Plain)
        self._old: Reduction | None = None
        """The last pass before this training."""
        self._before: Reduction | None = None
        """The pass before the last one: it is over by now."""

    def run(self, fn: Callable[..., T], /, *args: Any) -> Handle[T]:  # noqa: ANN401
        """Return a handle of `fn(*args)` on the compute thread."""
        return self._net.run(fn, *args)

    async def _make(self, work: Callable[[], Tensor]) -> Tensor:
        """Make a pass and an update."""
        self._before = self._net.reducer.last
        try:
            return await self._net.step(work, self._driver)
        except Exception as error:
            made = self._net.reducer.last
            status = None if self.lag or made is None or made is self._before else made.status
            self.behind = status is not None and status.sound and not isinstance(error, AiodistError)
            raise

    def stopping(self) -> bool:
        """Return what the ranks have said in a pass that is over on all of them."""
        # Where the last one may be under way all ranks look at the one before.
        seen = self._before if self.lag else self._net.reducer.last
        if self.asks:  # not every step of such a driver is a pass
            return False
        return seen is not None and seen is not self._old and seen.status is not None and seen.status.stops > 0

    async def tell(self, error: Exception) -> None:
        """Make a pass whose forward raises `error`."""
        with suppress(Exception):  # who had it raises it; other errors say that the ranks have no pass in common
            await self._failing(error)

    def tell_later(self, error: BaseException) -> None:
        """As `tell`, and wait for nothing."""
        with suppress(RuntimeError):  # the net is closed
            self._failing(error).outcome_error()  # nobody waits for it

    def _failing(self, error: BaseException) -> Handle[object]:
        def forward() -> NoReturn:
            raise error

        compute = self._net.compute
        return compute.submit(self._driver.train, Forward([forward], self._net.settings(), compute))

    def join(self) -> AbstractAsyncContextManager[object]:
        """Return `net.join` with the optimizer."""
        return self._net.join(self._driver)

    async def flush(self) -> None:
        """Have a driver make the updates that are left."""
        await self._driver.flush()

    @asynccontextmanager
    async def open(self, stop: Callable[[], bool]) -> AsyncIterator[None]:
        """Have each pass say whether this rank asks to stop."""
        reducer = self._net.reducer
        self._old = reducer.last
        before, reducer.asks_stop = reducer.asks_stop, stop
        try:
            yield
        finally:
            reducer.asks_stop = before
            self._old = self._before = None


# --- with a client of a parameter server ----------------------------------------------------------------------------


class _NoUpdate:
    """In the place of an optimizer: the client makes the update, once the gradients are there."""

    def __init__(self, net: DataParallel) -> None:
        self._net = net
        self.param_groups = [{"params": list(net.parameters())}]

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self._net.zero_grad()

    def step(self) -> None:
        """Leave the parameters."""


class _AloneStepper(Stepper):
    """The gradients of a module on this rank alone, computed on a thread of their own."""

    def __init__(self, module: nn.Module, reduced: Callable[[], None]) -> None:
        self._module = module
        self._reduced = reduced
        self._stream: HostStream

    def run(self, fn: Callable[..., T], /, *args: Any) -> Handle[T]:  # noqa: ANN401
        """Return a handle of `fn(*args)` on that thread."""
        return self._stream.submit(fn, *args)

    async def _make(self, work: Callable[[], Tensor]) -> Tensor:
        """Compute gradients."""
        return await self._stream.submit(self._compute, work)

    def _compute(self, work: Callable[[], Tensor]) -> Tensor:
        self._module.zero_grad()
        loss = work()
        loss.backward()
        self._reduced()
        return loss.detach()

    @asynccontextmanager
    async def open(self, stop: Callable[[], bool]) -> AsyncIterator[None]:
        """Have the thread."""
        async with HostStream("engine") as self._stream:
            yield


def client_stepper(net: DataParallel | nn.Module, client: TrainingClient, reduced: Callable[[], None]) -> Stepper:
    """Return asynchronous steps: the gradients of this rank, or of its group, and then a step of the client."""
    stepper: Stepper
    if isinstance(net, DataParallel):
        stepper = PassStepper(net, _Plain(net, _NoUpdate(net), reduced), reduced)
        stepper.joins = stepper.alike = False
    else:
        stepper = _AloneStepper(net, reduced)
    stepper.client = client
    return stepper
