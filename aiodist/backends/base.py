"""What a backend implements, and all that the layers above know of it.

A *transport* is one communicator's share of a backend. It moves whole tensors between ranks; everything else is
built on that. Collectives that the library has natively are a second protocol, which is optional.

Every method that starts a transfer is called with the transport lock held (see `aiodist.handles.progress`), does
not block, does not raise for failures of the world, and calls `done(error)` exactly once, also under the lock,
possibly before it returns. The caller keeps the tensors alive until then. What a method raises all the same is the
error of that transfer alone: callers use `guarded`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, dtype

from aiodist._core import KEY_BITS
from aiodist.errors import BackendError
from aiodist.handles import Done as Done
from aiodist.handles.kernel import ours as ours
from aiodist.streams.memory import dtype_name as dtype_name
from aiodist.types import REDUCTIONS, ReduceOp

E = TypeVar("E", bound=BaseException)
T = TypeVar("T")
Begin = Callable[[Tensor, int, Done], None]
"""(tensor, number of the operation, done): what begins an allreduce that was planned ahead."""

NAMED = 1 << 58
"""From here on numbers are those of named operations: see `number_of_use`."""
MOST_NAMES = (1 << 16) - 1
"""How many names a communicator may have."""

_NAMED_TAGS = (1 << 20) + 1  # above those of the mailbox
_COLLECTIVE_TAGS = 1 << 21  # above those of names
_TAGS_OF_A_NAME = 16
_MOST_USES = 1 << 32


def number_of_use(name: int, count: int) -> int:
    """Return the number of a named operation: that of its name, from 0, and how often the name was used before."""
    return NAMED + name * _MOST_USES + count % _MOST_USES


def name_in(number: int) -> int:
    """Return the number of the name in that of a named operation; negative for one that has a place in the order."""
    return (number - NAMED) // _MOST_USES


def tag_of(number: int) -> int:
    """Return the tag of a communicator's collective `number`: its place in the order, or that of a named one."""
    if number < NAMED:
        return _COLLECTIVE_TAGS + number % _COLLECTIVE_TAGS
    return _NAMED_TAGS + name_in(number) * _TAGS_OF_A_NAME + number % _TAGS_OF_A_NAME


def key_of(number: int) -> int:
    """Return the key of a communicator's collective `number`; those above it are for parts that go on apart."""
    return number << KEY_BITS


class Refused(Exception):
    """A rank takes no part in an operation that it knows to have failed: why, it tells the others by itself."""


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


def once(done: Done) -> Done:
    """Return what calls `done` the first time it is called."""
    left = [done]

    def told(error: BaseException | None) -> None:
        if left:
            left.pop()(error)

    return told


def keeping(t: Tensor, done: Done) -> Done:
    """Return `done`, holding on to `t` until it is called."""

    def over(error: BaseException | None, _t: Tensor = t) -> None:
        done(error)

    return over


def ignore(_: object) -> None:
    """Take what nobody waits for."""


class PeerGone(BackendError):
    """A carrier has found that the other end has left."""


def again(error: E) -> E:
    """Return `error` anew: each operation writes its own place into its error."""
    renewed = copy(error)
    renewed.__cause__ = error.__cause__
    return renewed


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


def started(fn: Callable[[], T]) -> concurrent.futures.Future[T]:
    """Run `fn` in a daemon thread of its own: it may block for long, and nobody must wait for it at exit."""
    future: concurrent.futures.Future[T] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            value = fn()
        except BaseException as error:  # noqa: BLE001  - it belongs to the code that waits for `future`
            future.set_exception(error)
        else:
            future.set_result(value)

    threading.Thread(target=run, name="aiodist-native-call", daemon=True).start()
    return future


async def in_thread(fn: Callable[[], T]) -> T:
    """Return what `fn` does, once its thread is over."""
    return await asyncio.wrap_future(started(fn))


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
dtype_code = {kind: code for code, kind in enumerate(DTYPES)}.__getitem__


class Wanted(NamedTuple):
    """What decides how an operation is run; the same on all ranks."""

    operation: str
    kind: dtype
    op: ReduceOp | None
    numel: int
    device: str = "cpu"
    """Where the tensors lie, "cpu" or "cuda"."""

    @property
    def nbytes(self) -> int:
        return self.numel * self.kind.itemsize

    def __str__(self) -> str:
        what = f"{self.operation} of {self.numel} {dtype_name(self.kind)}"
        what += f" with {self.op}" if self.op else ""
        return what if self.device == "cpu" else f"{what} on {self.device}"


@dataclass(eq=False, slots=True)
class Primitive:
    """A collective on flat tensors of one rank: the unit that an implementation runs.

    They are flat, dense and of one dtype; all ranks know the counts. n is the number of elements of `t`.

    | kind           | `t`: n elements           | `out`                                   | besides           |
    |----------------|---------------------------|-----------------------------------------|-------------------|
    | allreduce      | reduced in place          | `t`                                     | op                |
    | broadcast      | overwritten with root's   | `t`                                     | root              |
    | reduce         | root's reduced in place   | `t`                                     | op, root          |
    | scan           | reduced over ranks 0 to me| `t`                                     | op                |
    | allgather      | my elements               | everybody's, in rank order; may hold `t`| counts of ranks   |
    | reduce_scatter | only read                 | my block, may be that of `t`            | op, counts        |
    | alltoall       | my blocks, in rank order  | the blocks for me, in rank order        | counts, received  |
    """

    kind: str
    t: Tensor
    out: Tensor = None  # type: ignore[assignment]
    """`t` unless it is given."""
    _: KW_ONLY
    op: ReduceOp = ReduceOp.SUM
    root: int = 0
    counts: Sequence[int] = ()
    """The elements of each block, of alltoall those sent."""
    received: Sequence[int] = ()
    """Those that come."""

    def __post_init__(self) -> None:
        self.out = self.t if self.out is None else self.out

    @property
    def _whole(self) -> Tensor:
        """The tensor that counts as its size: of an allgather, that of all ranks."""
        return self.out if self.kind == "allgather" else self.t

    @property
    def nbytes(self) -> int:
        return self._whole.nbytes

    @property
    def wanted(self) -> Wanted:
        """Return the facts that decide which implementation runs it."""
        t = self._whole
        op = self.op if self.kind in REDUCTIONS else None
        return Wanted(self.kind, t.dtype, op, t.numel(), "cpu" if t.is_cpu else "cuda")


class Exchange(Primitive):
    """Tensors of any sizes between pairs of ranks, which both know them.

    What one rank sends to another, in order, is what that one receives from it. Some ranks may have nothing to do.
    """

    __slots__ = ("receives", "sends")

    def __init__(
        self, like: Tensor, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> None:
        """Each is (rank, tensor); those without elements are left out. `like` lies where they should."""
        super().__init__("exchange", like)
        self.sends = [(rank, t) for rank, t in sends if t.numel()]
        self.receives = [(rank, t) for rank, t in receives if t.numel()]


@dataclass(frozen=True)
class Capabilities:
    """What a transport can do beyond moving bytes."""

    short_receives: bool
    """A receive may be given more room than the message fills."""
    devices: frozenset[str] = frozenset({"cpu"})
    overruns: bool = False
    """A message that is longer than its receive may crash the library, instead of failing."""
    kept_from: int | None = None
    """Least size, in bytes, of a send to another rank that ends only after its receive was posted; None if unknown."""
    send_now: Callable[[bytearray, int, int], bool] | None = None
    """(data, dst, tag): send a few bytes, in order with `isend`; False where they would have to wait."""


class Native(Protocol):
    """Non-blocking collectives of a library, or of memory that all ranks map."""

    finishes: bool
    """Allreduce and reduce_scatter take 16-bit floats and means as they are, and round once."""
    in_order: bool
    """It tells operations apart by the order of its calls alone, not by their keys."""
    recallable: bool
    """An operation that some ranks refuse ends on all, with `Refused`; else those that have begun it wait in it."""

    def supports(self, wanted: Wanted) -> bool:
        """Return True when it has this operation."""

    def start(self, operation: Primitive, key: int, done: Done) -> None:
        """Begin an operation that it supports; all ranks give it the same key, another one than those under way."""

    def plan_allreduce(self, kind: dtype, numel: int, op: ReduceOp) -> Begin | None:
        """Return what begins an allreduce of `numel` elements of `kind`: the hot path. None: no single call does."""


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
