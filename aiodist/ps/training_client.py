"""What all clients share: the parameters that are trained, their traffic, the beginning and the end."""

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
"""How the server knows a tensor: by name, or as the tensor that was registered with it."""

Parameters = Any
"""What has `parameters()`, such as a module; or parameters, as registered with the server, or by the names it knows."""

Run = Callable[[Callable[[], None]], Awaitable[None]]
"""Where to compute, such as the `run` of a DataParallel: its compute thread."""

_NOTE_BYTES = 512


class PendingCall(Awaitable[Any], Protocol):
    """A call that is on its way; a Handle."""

    def done(self) -> bool:
        """Return whether it is over."""


class Centre(Protocol):
    """The part of `ParameterServer` that clients use."""

    def push(self, what: Any, values: Any, *, rule: str | None = None) -> PendingCall:  # noqa: ANN401
        """Send `values`, which stay untouched until it is over; `rule` None is that of each tensor."""

    def pull(self, what: Any, out: Any, *, reads: Any = None) -> PendingCall:  # noqa: ANN401
        """Fetch into `out`; it sees what this rank has pushed before."""


class TrainingClient(ABC):
    """The base of the clients: `loss.backward(); await client.step()`.

    `async with client:` begins with `start` and ends with `aclose`; without it a client goes on from the weights that
    it finds. Frozen parameters are left alone, shared ones count once. At most one push and one pull are in flight. In
    a group calls are collective: every rank makes the same ones in the same order, and rank 0 alone talks to the
    server. Cancelling an await never stops a transfer, and the same call made again waits for the same one.
    """

    def __init__(
        self, ps: Centre, params: Parameters, group: Communicator | None = None, run: Run | None = None
    ) -> None:
        if group is not None and group.rank < 0:
            raise ValueError(f"group={group!r}: expected a communicator that this rank belongs to")
        self._keys, self._params = _trained(params)
        self._known = frozenset(map(id, self._params))
        self._checked: Optimizer | None = None
        """The optimizer of the local steps, if there is one."""
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
        """How many steps were made."""
        return self._steps

    @located
    async def start(self) -> None:
        """Take the centre's weights; in a group collective.

        Again behind `ps.rebind`: then what was under way before is forgotten, and local steps that were not pushed too.
        Raises what the pull raises, with nothing changed.
        """
        self._check()
        self._pushing = self._pulling = None
        await self._receive()
        await self._compute(self._begin)

    @located
    async def step(self) -> None:
        """Make a local step with the current gradients, and communicate with the server when that is due.

        In a group every rank calls it. Cancelling it stops no transfer and loses no update.

        Raises:
            Exception: what the optimizer raises, and the errors of pushes and pulls.
        """
        self._check()
        await self._settle(wait=False)
        await self._step(self._steps + 1)

    @contextmanager
    def weights(self) -> Iterator[None]:
        """Have the parameters hold this client's weights, for evaluation or a checkpoint, where they hold others."""
        yield

    @located
    async def aclose(self) -> None:
        """Wait for what is in flight and leave this client's weights in the parameters; idempotent.

        Raises what a push or a pull raised that nobody has heard of.
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
        elif not self._closed:  # what is in flight may wait for ever for those that fail with us
            self._closed = True
            self._end()
            self._pushing = self._pulling = None

    @abstractmethod
    async def _step(self, step: int) -> None:
        """Make step number `step`, and count it once the weights move."""

    def _train_by(self, optimizer: Optimizer) -> None:
        """Let `optimizer` make the local steps; raise ValueError if it trains none of this client, or others."""
        check_trains(optimizer, self._params, "this client")
        self._check_known(optimizer)
        self._checked = optimizer

    def _begin(self) -> None:
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
        if self._checked is not None:
            self._check_known(self._checked)

    def _check_known(self, optimizer: Optimizer) -> None:
        """Raise ValueError if the optimizer has parameters to train that this client does not exchange.

        Costs 40 us for 1,000 parameters.
        """
        if self._known.isdisjoint(id(p) for group in optimizer.param_groups for p in group["params"]):
            return  # it has copies of them
        if (place := first_unknown(optimizer, self._known)) is not None:
            raise ValueError(
                f"{type(optimizer).__name__} has a parameter that this client does not exchange: {place}. The server "
                "would never have it, and workers would come to differ. Register it with the server, and give it to "
                "the client too; or train what each worker keeps for itself by an optimizer of its own"
            )

    def _push(self, keys: Sequence[Key], values: Sequence[Tensor], rule: str | None = None) -> None:
        """Send `values`; the last push must have been settled. Rank 0 of the group alone does it."""
        if self._talks and keys:
            assert self._pushing is None, "the last push is still in flight"
            self._pushing = self._ps.push(list(keys), list(values), rule=rule)

    async def _settle(self, *, wait: bool = True) -> None:
        """Return once the last push is over, and raise what it raised; with `wait=False` look only if it is."""
        if self._pushing is None or not (wait or self._pushing.done()):
            return
        pushing = self._pushing
        try:
            await pushing
        finally:
            if pushing.done():  # after a time-out, or when cancelled, it goes on
                self._pushing = None

    def _ask(self, reads: str | None = None) -> None:
        """Begin to fetch the centre, unless that is under way; `_receive` ends it."""
        if self._talks and self._pulling is None:
            self._pulling = self._ps.pull(list(self._keys), list(self._fetched), reads=reads)

    async def _receive(self, reads: str | None = None, *, settle: bool = True) -> None:
        """Return once `_fetched` has the centre, on every rank of the group: what was asked for, else what is there.

        With `settle` the last push is over by then. Raises what that or the pull raised on the rank that talks, and
        RemoteError on the other ranks of the group.
        """
        error: Exception | None = None
        try:
            self._ask(reads)
            if settle:
                await self._settle()
        except Exception as raised:  # noqa: BLE001 - told to the group, then raised
            error = raised
        if self._pulling is not None:
            try:
                await self._pulling
            except Exception as raised:  # noqa: BLE001 - as above
                error = error or raised
            if self._pulling.done():  # after a time-out it goes on
                self._pulling = None
        if self._group is not None and self._group.size > 1:
            await self._share(self._group, error)
        if error is not None:
            raise error

    async def _share(self, group: Communicator, error: Exception | None) -> None:
        """Give all ranks of the group what rank 0 has fetched, or word of its `error`."""
        note = torch.zeros(_NOTE_BYTES, dtype=torch.uint8, device="cpu")
        if error is not None:
            text = f"{type(error).__name__}: {error}".encode()[:_NOTE_BYTES]
            note[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        await group.broadcast([note, *self._fetched], 0)
        if group.rank != 0 and note[0]:
            said = bytes(note.tolist()).rstrip(b"\0").decode(errors="replace")
            seen = f"rank 0 of the group, which talks to the server, raised {said}"
            raise RemoteError(seen, raised_by=0, comm=group.name, rank=group.rank)


async def _nothing() -> None:
    pass


def _trained(params: Parameters) -> tuple[list[Key], list[Tensor]]:
    """Return the parameters that have gradients, each once, with what the server knows them by."""
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
        raise ValueError(f"params holds {len(pairs)} tensors, none of which requires a gradient: expected at least one")
    return [key for key, _ in distinct.values()], [p for _, p in distinct.values()]


def like(params: Sequence[Tensor]) -> list[Tensor]:
    """Return new tensors of the shapes and dtypes of `params`, contiguous, for transfers."""
    return [torch.empty_like(p, memory_format=torch.contiguous_format, requires_grad=False) for p in params]


def copy_all(into: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for t, s in zip(into, source, strict=True):
            t.copy_(s)
