"""Interface of a backend to the layers above.

A *transport* is one communicator's share of a backend. A transport moves whole tensors between ranks. All other layers
use transports. `Native`, an optional second protocol, has the collectives of a library.

A method that starts a transfer is called with the transport lock held (see `aiodist.handles.progress`) and does not
block. The method calls `done(error)` exactly once, also under the lock, possibly before the method returns. The caller
keeps the tensors alive until that call. A failure of the network or of another rank raises nothing. An exception of a
method is the error of that transfer alone.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple, Protocol, TypeVar, TypeVarTuple

import torch
from torch import Tensor, dtype

from aiodist._core import KEY_BITS
from aiodist.errors import BackendError
from aiodist.handles import Done as Done
from aiodist.handles.kernel import ours as ours
from aiodist.handles.polling import CallbackFailed
from aiodist.streams.memory import dtype_name as dtype_name
from aiodist.types import REDUCTIONS, ReduceOp

E = TypeVar("E", bound=BaseException)
T = TypeVar("T")
Ts = TypeVarTuple("Ts")
Begin = Callable[[Tensor, int, Done], None]
"""Function of (tensor, number of the operation, done) that starts a planned allreduce."""

NAMED = 1 << 58
"""Lowest number of a named operation: see `number_of_use`."""
MOST_NAMES = (1 << 16) - 1
"""Most names of one communicator."""

_NAMED_TAGS = (1 << 20) + 1  # above the tags of the mailbox
_COLLECTIVE_TAGS = 1 << 21  # above the tags of names
_TAGS_OF_A_NAME = 16
_MOST_USES = 1 << 32


def number_of_use(name: int, count: int) -> int:
    """Return the number of a named operation, from the number of its name and the count of earlier uses."""
    return NAMED + name * _MOST_USES + count % _MOST_USES


def name_in(number: int) -> int:
    """Return the number of the name of operation `number`, or a negative number for an operation without a name."""
    return (number - NAMED) // _MOST_USES


def tag_of(number: int) -> int:
    """Return the tag of a communicator's collective `number`."""
    if number < NAMED:
        return _COLLECTIVE_TAGS + number % _COLLECTIVE_TAGS
    return _NAMED_TAGS + name_in(number) * _TAGS_OF_A_NAME + number % _TAGS_OF_A_NAME


def key_of(number: int) -> int:
    """Return the key of a communicator's collective `number`. The next keys are for parts of the collective."""
    return number << KEY_BITS


class Stopped(Exception):
    """A rank takes no part in an operation that has failed there. That rank reports the cause to the other ranks."""


def once(done: Done) -> Done:
    """Return a callback that calls `done` the first time only."""
    left = [done]

    def call_first(error: BaseException | None) -> None:
        if left:
            left.pop()(error)

    return call_first


def ignore(_: object) -> None:
    """Ignore the outcome of a transfer."""


class PeerGone(BackendError):
    """The other end of a connection has left."""


def again(error: E) -> E:
    """Return a copy of `error`, to which an operation adds its own details."""
    copied = copy(error)
    copied.__cause__ = error.__cause__
    return copied


def tell(ended: Iterable[tuple[Done, BaseException | None]]) -> None:
    """Call each `done(error)`, then raise CallbackFailed from the first exception of these calls."""
    raised: Exception | None = None
    for done, error in ended:
        try:
            done(error)
        except Exception as caught:  # noqa: BLE001  - the others must be called too
            raised = raised or caught
    if raised is not None:
        raise CallbackFailed(f"{raised!r}") from raised


def started(fn: Callable[[*Ts], T], *args: *Ts) -> concurrent.futures.Future[T]:
    """Call `fn`, which may block for long, in a new daemon thread, and return the future of its result."""
    future: concurrent.futures.Future[T] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()
    threading.Thread(target=_call, args=(future, fn, args), name="aiodist-native-call", daemon=True).start()
    return future


def _call(future: concurrent.futures.Future[T], fn: Callable[..., T], args: tuple[object, ...]) -> None:
    try:
        value = fn(*args)
    except BaseException as error:  # noqa: BLE001  - the error belongs to the code that waits for `future`
        future.set_exception(error)
    else:
        future.set_result(value)


async def in_thread(fn: Callable[[*Ts], T], *args: *Ts) -> T:
    """Call `fn` in a new thread and return the result."""
    return await asyncio.wrap_future(started(fn, *args))


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
"""The dtypes in the order of their codes on the wire: append only."""
dtype_code = {kind: code for code, kind in enumerate(DTYPES)}.__getitem__


class Wanted(NamedTuple):
    """The facts that choose the implementation of an operation, equal on all ranks."""

    operation: str
    kind: dtype
    op: ReduceOp | None
    numel: int
    device: str = "cpu"
    """Device type of the tensors, "cpu" or "cuda"."""

    @property
    def nbytes(self) -> int:
        return self.numel * self.kind.itemsize

    def __str__(self) -> str:
        what = f"{self.operation} of {self.numel} {dtype_name(self.kind)}"
        what += f" with {self.op}" if self.op else ""
        return what if self.device == "cpu" else f"{what} on {self.device}"


@dataclass(eq=False, slots=True)
class Primitive:
    """A collective on flat tensors of one rank, the unit that an implementation runs.

    The tensors are flat, dense and of one dtype. All ranks know the counts. n is the number of elements of `t`.

    | kind           | `t`: n elements           | `out`                                   | in addition       |
    |----------------|---------------------------|-----------------------------------------|-------------------|
    | allreduce      | reduced in place          | `t`                                     | op                |
    | broadcast      | overwritten with root's   | `t`                                     | root              |
    | reduce         | root's reduced in place   | `t`                                     | op, root          |
    | scan           | reduced over ranks 0 to me| `t`                                     | op                |
    | allgather      | my elements               | of all, in rank order; may contain `t`  | counts of ranks   |
    | reduce_scatter | only read                 | my block, may be that of `t`            | op, counts        |
    | alltoall       | my blocks, in rank order  | the blocks for me, in rank order        | counts, received  |
    """

    kind: str
    t: Tensor
    out: Tensor = None  # type: ignore[assignment]
    """The result, by default `t`."""
    _: KW_ONLY
    op: ReduceOp = ReduceOp.SUM
    root: int = 0
    counts: Sequence[int] = ()
    """Elements of each block, for an alltoall of each sent block."""
    received: Sequence[int] = ()
    """Elements of each block received by an alltoall."""

    def __post_init__(self) -> None:
        self.out = self.t if self.out is None else self.out

    @property
    def wanted(self) -> Wanted:
        """Return the facts that choose the implementation."""
        t = self.out if self.kind == "allgather" else self.t  # the one that defines the size
        op = self.op if self.kind in REDUCTIONS else None
        return Wanted(self.kind, t.dtype, op, t.numel(), "cpu" if t.is_cpu else "cuda")


class Exchange(Primitive):
    """Tensors of any sizes between pairs of ranks. Both ranks of a pair know the sizes.

    A rank's receives from another rank match the sends of that rank in order. Some ranks may have no transfer.
    """

    __slots__ = ("receives", "sends")

    def __init__(
        self, like: Tensor, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> None:
        """Each transfer is (rank, tensor). Empty tensors are skipped. `like` is on the device of the tensors."""
        super().__init__("exchange", like)
        self.sends = [(rank, t) for rank, t in sends if t.numel()]
        self.receives = [(rank, t) for rank, t in receives if t.numel()]


@dataclass(frozen=True)
class Capabilities:
    """Features of a transport."""

    short_receives: bool
    """True if a receive may be longer than its message."""
    devices: frozenset[str] = frozenset({"cpu"})
    overruns: bool = False
    """True if a message longer than its receive may crash the library."""
    kept_from: int | None = None
    """Smallest send to another rank, in bytes, that completes only after its receive was posted, or None if unknown."""
    send_now: Callable[[bytearray, int, int], bool] | None = None
    """Function of (data, dst, tag) that sends a few bytes in order with `isend`, or returns False if they must wait."""
    receive_each: Callable[[Tensor, int, Callable[[bytearray], object], Done], None] | None = None
    """Function of (t, tag, each, done) that receives from any source as `irecv`.

    Before the end, short messages go to `each(data)`, in order. A longer one is written into `t` and ends the receive.
    """


class Native(Protocol):
    """Non-blocking collectives, in a library or in memory that all ranks map."""

    finishes: bool
    """True if allreduce and reduce_scatter take 16-bit floats and means directly with one rounding."""
    in_order: bool
    """True if operations match by the order of the calls alone, not by their keys."""
    recallable: bool
    """True if an operation ends with `Stopped` on all ranks after one rank stops that operation.

    False if the ranks that have begun the operation hang.
    """

    def supports(self, wanted: Wanted) -> bool:
        """Return True if the library has this operation."""

    def start(self, operation: Primitive, key: int, done: Done) -> None:
        """Start a supported operation. All ranks give the same key, which no operation in flight has."""

    def plan_allreduce(self, kind: dtype, numel: int, op: ReduceOp) -> Begin | None:
        """Return a function that starts an allreduce of `numel` elements of `kind`; None if one call is not enough."""


class Transport(Protocol):
    """The connections of one communicator."""

    name: str
    rank: int
    size: int
    native: Native | None

    def capabilities(self) -> Capabilities:
        """Return the features of the transport."""

    def isend(self, t: Tensor, dst: int, tag: int, done: Done) -> None:
        """Send all of `t`. Done when `t` may be reused. Messages of equal (src, dst, tag) keep their order."""

    def irecv(self, t: Tensor, src: int, tag: int, done: Done) -> None:
        """Receive into `t` from `src`, or from `ANY` source."""

    async def split(self, ranks: Sequence[int], name: str) -> Transport:
        """Return a transport among `ranks` of this one, in that order. Only these ranks make this call.

        `name` is the same on all these ranks and unique in this transport.
        """

    async def aclose(self, *, drained: bool) -> None:
        """Release the transport. `drained` is True if every rank makes this call and no transfer is in flight."""
