"""What all clients share: the parameters that are trained, the loop around them, the beginning and the end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from aiodist.communicator import Communicator
from aiodist.ps.training.link import Centre, CentreLink, Key


@runtime_checkable
class Module(Protocol):
    """A torch module, or what wraps one."""

    def parameters(self) -> Iterator[Tensor]:
        """Yield its parameters."""


@runtime_checkable
class Optimizer(Protocol):
    """Any of torch's that needs no closure, or what steps as they do."""

    def step(self) -> object:
        """Move the parameters along their gradients."""


Parameters = Module | Mapping[str, Tensor] | Iterable[Tensor]
"""A module, or parameters that were registered with the server; or parameters by the names that it knows."""

Run = Callable[[Callable[[], None]], Awaitable[None]]
"""Where to compute, such as the `run` of a DataParallel: its compute thread."""


class TrainingClient(ABC):
    """The base of the clients: `loss.backward(); await client.step()`.

    `async with client:` begins with `start` and ends with `aclose`; without it a client goes on from the weights that
    it finds. Frozen parameters are left alone, shared ones count once.
    """

    def __init__(
        self, ps: Centre, params: Parameters, group: Communicator | None = None, run: Run | None = None
    ) -> None:
        self._keys, self._params = _trained(params)
        self._link = CentreLink(ps, group)
        self._run = run
        self._fetched = like(self._params)
        self._steps = 0
        self._closed = False
        self._apart = False

    @property
    def steps(self) -> int:
        """How many steps were made."""
        return self._steps

    async def start(self) -> None:
        """Take the centre's weights; in a group collective.

        Raises what the pull raises, with nothing changed.
        """
        self._check()
        await self._link.receive(self._keys, self._fetched)
        await self._compute(self._begin)

    async def step(self) -> None:
        """Make a local step with the gradients that are there, and talk to the server where it is due.

        In a group collective. Raises what the optimizer raises, what a push raised that was still in flight, and what a
        pull raises. Cancelling it stops no transfer and loses no update.
        """
        self._check()
        await self._link.settle(wait=False)
        await self._step(self._steps + 1)

    @contextmanager
    def weights(self) -> Iterator[None]:
        """Have the parameters hold this client's weights, for evaluation or a checkpoint, where they hold others."""
        if self._apart:
            raise RuntimeError("client.weights() inside itself: expected one at a time")
        self._apart = True
        try:
            yield
        finally:
            self._apart = False

    async def aclose(self) -> None:
        """Wait for what is in flight and leave this client's weights in the parameters; idempotent.

        Raises what a push or a pull raised that nobody has heard of.
        """
        if not self._closed:
            self._closed = True
            self._end()
            await self._link.drain()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        if error[0] is None:
            await self.aclose()
        elif not self._closed:  # what is in flight may wait for ever for those that fail with us
            self._closed = True
            self._end()
            self._link.forget()

    # --- for the clients --------------------------------------------------------------------------------------------

    @abstractmethod
    async def _step(self, step: int) -> None:
        """Make step number `step`, and count it once the weights move."""

    def _begin(self) -> None:
        """Take what was fetched as this client's weights."""
        copy_all(self._params, self._fetched)

    def _end(self) -> None:  # noqa: B027 - most have them there
        """Leave this client's weights in the parameters."""

    def _compute(self, fn: Callable[[], None]) -> Awaitable[None]:
        """Return what ends once `fn` has run; it is asked for at the call, so no cancellation comes before it."""
        if self._run is not None:
            return self._run(fn)
        fn()
        return _nothing()

    def _check(self) -> None:
        if self._closed:
            raise RuntimeError(f"this {type(self).__name__} is closed")
        if self._apart:
            raise RuntimeError("a step inside client.weights(): expected it after")


async def _nothing() -> None:
    pass


def _trained(params: Parameters) -> tuple[list[Key], list[Tensor]]:
    """Return the parameters that have gradients, each once, with what the server knows them by."""
    pairs: list[tuple[Key, Tensor]]
    if isinstance(params, Mapping):
        pairs = list(params.items())
    elif isinstance(params, Module):
        pairs = [(p, p) for p in params.parameters()]
    elif isinstance(params, Tensor) or not isinstance(params, Iterable):
        raise TypeError(f"params is {type(params).__name__}: expected a module, or parameters in a list or a dict")
    else:
        pairs = [(p, p) for p in params]
    distinct: dict[int, tuple[Key, Tensor]] = {}
    for key, p in pairs:
        if not isinstance(p, Tensor):
            raise TypeError(f"params holds {type(p).__name__}: expected parameters")
        if p.requires_grad:
            distinct.setdefault(id(p), (key, p))
    if not distinct:
        raise ValueError(f"params holds {len(pairs)} tensors, none of which requires a gradient: expected at least one")
    return [key for key, _ in distinct.values()], [p for _, p in distinct.values()]


def like(params: Sequence[Tensor]) -> list[Tensor]:
    """Return new tensors of the shapes and dtypes of `params`, contiguous, for transfers."""
    return [torch.empty_like(p, memory_format=torch.contiguous_format, requires_grad=False) for p in params]


def copy_all(into: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    """Copy each tensor into its counterpart."""
    with torch.no_grad():
        for t, s in zip(into, source, strict=True):
            t.copy_(s)
