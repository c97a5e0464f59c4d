"""`TrainingClient`: the parameters that are trained, their traffic, and the begin and end of all training clients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch.optim import Optimizer

from aiodist.communicator import Communicator
from aiodist.errors import RemoteError
from aiodist.handles.calls import located
from aiodist.types import check_trains, first_unknown

Key = str | Tensor
"""A tensor of the server: its name, or the tensor that was passed to `init`."""
Parameters = Any
"""A module, parameters in a list, or parameters in a dict by their names on the server."""
Run = Callable[[Callable[[], None]], Awaitable[None]]
"""Runs a function, perhaps on another thread, as the `run` of a DataParallel does."""

_NOTE_BYTES = 512


class PendingCall(Awaitable[Any], Protocol):
    """A call in flight, such as a Handle."""

    def done(self) -> bool:
        """Return True if the call has ended."""


class Centre(Protocol):
    """The part of `ParameterServer` that clients use."""

    def push(self, what: Any, values: Any, *, rule: str | None = None) -> PendingCall:  # noqa: ANN401
        """Send `values`, which must not change until the end. None is the default rule of each tensor."""

    def pull(self, what: Any, out: Any, *, reads: Any = None) -> PendingCall:  # noqa: ANN401
        """Fetch into `out`. The values include earlier pushes of this rank."""


class TrainingClient(ABC):
    """The base of the clients: `loss.backward(); await client.step()`.

    `async with client:` calls `start` at the begin and `aclose` at the end. Without the block a client continues from
    the present weights. Frozen parameters do not take part, and shared ones count once. At most one push and one pull
    are in flight. In a group all calls are collective, and only rank 0 calls the server. A cancelled await stops no
    transfer, and the next call waits for the same transfer.
    """

    def __init__(
        self,
        ps: Centre,
        params: Parameters,
        optimizer: Optimizer | None = None,
        group: Communicator | None = None,
        run: Run | None = None,
    ) -> None:
        """`optimizer` makes the local steps, if there are any."""
        if group is not None and group.rank < 0:
            raise ValueError(f"group={group!r}: expected a communicator that this rank belongs to")
        self._keys, self._params = _trained(params)
        self._known = frozenset(map(id, self._params))
        self._optimizer = optimizer
        if optimizer is not None:
            check_trains(optimizer, self._params, "this client")
            self._check_known(optimizer)
        self._ps = ps
        self._group = group
        self._talks = group is None or group.rank == 0
        self._run = run
        self._fetched = like(self._params)
        self._pushing: PendingCall | None = None
        self._pulling: PendingCall | None = None
        self._steps = 0
        self._closed = False

    @property
    def steps(self) -> int:
        """Number of steps."""
        return self._steps

    @located
    async def start(self) -> None:
        """Take the centre's weights; in a group collective.

        Call it again after `ps.rebind`: the client then forgets its calls in flight, and local steps that were not
        pushed. Raises the error of the pull; nothing has changed then.
        """
        self._check()
        self._pushing = self._pulling = None
        await self._receive()
        await self._compute(self._begin)

    @located
    async def step(self) -> None:
        """Make a local step with the current gradients, and communicate with the server when that is due.

        In a group every rank calls it. A cancellation stops no transfer and loses no update.

        Raises:
            Exception: the optimizer's error, and the errors of pushes and pulls.
        """
        self._check()
        if self._pushing is not None and self._pushing.done():
            await self._settle()
        await self._step(self._steps + 1)

    @contextmanager
    def weights(self) -> Iterator[None]:
        """Let the parameters hold this client's weights in the block, for an evaluation or a checkpoint."""
        yield

    @located
    async def aclose(self) -> None:
        """Wait for calls in flight and leave this client's weights in the parameters; idempotent.

        Raises the error of a push or a pull that no call has raised before.
        """
        if not self._closed:
            self._closed = True
            self._end()
            try:
                await self._settle()
            finally:
                if self._pulling is not None:
                    pulling, self._pulling = self._pulling, None
                    await pulling

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        if error[0] is None:
            await self.aclose()
        elif not self._closed:  # calls in flight may wait without an end for ranks that fail too
            self._closed = True
            self._end()
            self._pushing = self._pulling = None

    @abstractmethod
    async def _step(self, step: int) -> None:
        """Make step number `step`, and count the step when the weights change."""

    def _begin(self) -> None:
        copy_all(self._params, self._fetched)

    def _end(self) -> None:  # noqa: B027 - most clients have nothing to do
        """Leave this client's weights in the parameters."""

    def _local_step(self) -> None:
        assert self._optimizer is not None
        self._optimizer.step()

    async def _compute(self, fn: Callable[[], None]) -> None:
        """Run `fn`. No cancellation comes before its start."""
        if self._run is None:
            fn()
        else:
            await self._run(fn)

    def _check(self) -> None:
        if self._closed:
            raise RuntimeError(f"this {type(self).__name__} is closed")
        if self._optimizer is not None:
            self._check_known(self._optimizer)

    def _check_known(self, optimizer: Optimizer) -> None:
        """Raise ValueError if `optimizer` trains parameters that this client does not exchange.

        Costs 40 us for 1,000 parameters.
        """
        if self._known.isdisjoint(id(p) for group in optimizer.param_groups for p in group["params"]):
            return  # the optimizer has copies
        if (place := first_unknown(optimizer, self._known)) is not None:
            raise ValueError(
                f"{type(optimizer).__name__} has a parameter that this client does not exchange: {place}. The server "
                "would never have it, and workers would come to differ. Register it with the server, and give it to "
                "the client too; or train parameters of one worker by an optimizer of their own"
            )

    def _push(self, keys: Sequence[Key], values: Sequence[Tensor], rule: str | None = None) -> None:
        """Push `values`, if this rank calls the server. The last push must have ended."""
        if self._talks and keys:
            assert self._pushing is None, "the last push is still in flight"
            self._pushing = self._ps.push(list(keys), list(values), rule=rule)

    async def _settle(self) -> None:
        """Wait for the last push, and raise its error."""
        if (pushing := self._pushing) is None:
            return
        try:
            await pushing
        finally:
            if pushing.done():  # a push continues after a timeout or a cancellation
                self._pushing = None

    def _pull(self, reads: str | None = None) -> None:
        """Begin to pull the centre, unless a pull is in flight."""
        if self._talks and self._pulling is None:
            self._pulling = self._ps.pull(list(self._keys), list(self._fetched), reads=reads)

    async def _receive(self, reads: str | None = None, *, settle: bool = True) -> None:
        """Wait for the pull in flight, or for a new one, until `_fetched` has the centre on every rank of the group.

        With `settle` the last push has ended then. Raises the error of the push or the pull on rank 0 of the group,
        and RemoteError on its other ranks.
        """
        error: Exception | None = None
        try:
            self._pull(reads)
            if settle:
                await self._settle()
        except Exception as raised:  # noqa: BLE001 - reported to the group, then raised
            error = raised
        if self._pulling is not None:
            try:
                await self._pulling
            except Exception as raised:  # noqa: BLE001 - as above
                error = error or raised
            if self._pulling.done():  # a pull continues after a timeout
                self._pulling = None
        if self._group is not None and self._group.size > 1:
            await self._share(self._group, error)
        if error is not None:
            raise error

    async def _share(self, group: Communicator, error: Exception | None) -> None:
        """Broadcast the fetched tensors or the `error` of rank 0 to the group."""
        note = torch.zeros(_NOTE_BYTES, dtype=torch.uint8, device="cpu")
        if error is not None:
            text = f"{type(error).__name__}: {error}".encode()[:_NOTE_BYTES]
            note[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        await group.broadcast([note, *self._fetched], 0)
        if group.rank != 0 and note[0]:
            text_of_0 = bytes(note.tolist()).rstrip(b"\0").decode(errors="replace")
            seen = f"rank 0 of the group, which calls the server, raised {text_of_0}"
            raise RemoteError(seen, raised_by=0, comm=group.name, rank=group.rank)


def _trained(params: Parameters) -> tuple[list[Key], list[Tensor]]:
    """Return the keys on the server and the parameters that require a gradient, each once."""
    if hasattr(params, "parameters"):
        params = params.parameters()
    elif isinstance(params, Tensor) or not isinstance(params, Iterable):
        raise TypeError(f"params is {type(params).__name__}: expected a module, or parameters in a list or a dict")
    pairs: list[tuple[Key, Tensor]] = list(params.items()) if isinstance(params, Mapping) else [(p, p) for p in params]
    distinct: dict[int, tuple[Key, Tensor]] = {}
    for key, p in pairs:
        if not isinstance(p, Tensor):
            raise TypeError(f"params holds {type(p).__name__}: expected parameters")
        if p.requires_grad:
            distinct.setdefault(id(p), (key, p))
    if not distinct:
        raise ValueError(f"params holds {len(pairs)} tensors without requires_grad: expected at least one with")
    return [key for key, _ in distinct.values()], [p for _, p in distinct.values()]


def like(params: Sequence[Tensor]) -> list[Tensor]:
    """Return new contiguous tensors of the shapes and dtypes of `params`, for transfers."""
    return [torch.empty_like(p, memory_format=torch.contiguous_format, requires_grad=False) for p in params]


def copy_all(into: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for t, s in zip(into, source, strict=True):
            t.copy_(s)
