"""What a backend implements, and all that the layers above know of it.

A *transport* is one communicator's share of a backend. It moves whole tensors between ranks; everything else is
built on that. Collectives that the library has natively are a second protocol, which is optional.

Every method that starts a transfer is called with the transport lock held (see `aiodist.handles.progress`), does
not block, does not raise for failures of the world, and calls `done(error)` exactly once, also under the lock,
possibly before it returns. The caller keeps the tensors alive until then. What a method raises all the same is the
error of that transfer alone: callers use `guarded`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, dtype

from aiodist.errors import AiodistError, BackendError
from aiodist.handles import Done
from aiodist.types import ReduceOp

__all__ = [
    "DTYPES",
    "Begin",
    "Capabilities",
    "Done",
    "Native",
    "Transport",
    "dtype_name",
    "guarded",
    "ours",
    "tell",
]

Begin = Callable[[Tensor, int, Done], None]
"""(tensor, number of the operation, done): what begins an allreduce that was planned ahead."""


def guarded(call: Callable[[Done], object], done: Done) -> None:
    """Make `call(done)`; what it raises goes to `done`, which is called at most once.

    Raises what comes when `done` was called already, by `done` itself perhaps.
    """
    told = False

    def tell_once(error: BaseException | None) -> None:
        nonlocal told
        if not told:
            told = True
            done(error)

    try:
        call(tell_once)
    except Exception as error:
        if told:
            raise
        tell_once(ours(error))


def ours(error: Exception) -> AiodistError:
    """Return `error`, which nobody expected, as one of ours, raised from it."""
    if isinstance(error, AiodistError):
        return error
    wrapped = BackendError(f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


def tell(ended: Iterable[tuple[Done, BaseException | None]]) -> None:
    """Call each `done(error)`; what the first of them raises is raised when all are told."""
    raised: Exception | None = None
    for done, error in ended:
        try:
            done(error)
        except Exception as caught:  # noqa: BLE001  - those behind it must be told
            raised = raised or caught
    if raised is not None:
        raise raised


DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)
"""In the order of their codes on the wire: append only."""


def dtype_name(kind: dtype) -> str:
    """Return "float32" for `torch.float32`: in messages, and where ranks compare dtypes."""
    return str(kind).removeprefix("torch.")


@dataclass(frozen=True)
class Capabilities:
    """What a transport can do beyond moving bytes."""

    short_receives: bool
    """A receive may be given more room than the message fills."""
    devices: frozenset[str] = frozenset({"cpu"})
    overruns: bool = False
    """A message that is longer than its receive may crash the library, instead of failing."""


class Native(Protocol):
    """Non-blocking collectives of the library itself; tensors are dense, contiguous and of equal dtype."""

    def supports(self, operation: str, kind: dtype, op: ReduceOp | None, numel: int) -> bool:
        """Return True when the method named `operation` takes such tensors."""

    def plan_allreduce(self, kind: dtype, numel: int, op: ReduceOp) -> Begin:
        """Return what `allreduce` does to tensors of `kind` and `numel`: the hot path."""

    def allreduce(self, t: Tensor, op: ReduceOp, done: Done) -> None:
        """Reduce `t` in place on every rank."""

    def broadcast(self, t: Tensor, root: int, done: Done) -> None:
        """Overwrite `t` with root's."""

    def reduce(self, t: Tensor, op: ReduceOp, root: int, done: Done) -> None:
        """Reduce into root's `t`; leave the others' alone."""

    def allgather(self, t: Tensor, out: Tensor, counts: Sequence[int], done: Done) -> None:
        """Fill flat `out` with every rank's `counts[rank]` elements, in rank order; `t` may be its own block."""

    def reduce_scatter(self, t: Tensor, out: Tensor, counts: Sequence[int], op: ReduceOp, done: Done) -> None:
        """Reduce `t` and give rank r the `counts[r]` elements of block r in `out`."""

    def scan(self, t: Tensor, op: ReduceOp, done: Done) -> None:
        """Reduce `t` in place over the ranks up to this one."""


class Transport(Protocol):
    """One communicator's connection to its peers."""

    name: str
    rank: int
    size: int
    native: Native | None

    def capabilities(self) -> Capabilities:
        """Return what it can do."""

    def isend(self, t: Tensor, dst: int, tag: int, done: Done) -> None:
        """Send all of `t`; done when `t` may be reused. Messages of equal (src, dst, tag) keep their order."""

    def irecv(self, t: Tensor, src: int, tag: int, done: Done) -> None:
        """Receive into `t` from `src`, or from `ANY` source."""

    async def split(self, ranks: Sequence[int], name: str) -> Transport:
        """Return a transport among `ranks` of this one, in that order; called by those ranks alone.

        `name` is the same on all of them and unique among this transport's.
        """

    async def aclose(self, *, drained: bool) -> None:
        """Release it; with `drained` every rank calls it and nothing is in flight, else it is just given up."""
