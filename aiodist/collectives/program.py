"""Programs: operations of several steps, written as generators and run by the thread that makes progress.

A program yields the transfers of one step, a list of `Call`s, and is resumed when all of them are over; what it
returns is the operation's result. So a collective goes on while nobody awaits it and while user code holds the
loop's thread: no task of the loop is needed between two steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from torch import Tensor, dtype

from aiodist.backends.base import Begin, Done, Exchange, Primitive, Transport, Wanted, key_of, ours
from aiodist.collectives.traffic import Traffic
from aiodist.types import ReduceOp

T = TypeVar("T")
_UNEXPECTED = (RuntimeError, AssertionError, LookupError, AttributeError, ArithmeticError, MemoryError, OSError)
"""What a program does not raise to say something: it becomes a `BackendError`, of which the other ranks are told."""
Call = Callable[[Done], None]
Program = Generator[Sequence[Call], None, T]


class DeviceMessages(Protocol):
    """Takes tensors that lie on a device to and from a transport, which moves memory of the host."""

    def send(self, transport: Transport, t: Tensor, dst: int, tag: int, done: Done) -> None:
        """As `Transport.isend`, behind what is queued on the current stream."""

    def recv(self, transport: Transport, t: Tensor, src: int, tag: int, done: Done) -> None:
        """As `Transport.irecv`; done when what is queued on the current stream from now on finds it there."""

    def fetch(self, t: Tensor, then: Callable[[Tensor | None, BaseException | None], None]) -> None:
        """Call `then` with a copy of `t` in memory of the host, or with an error."""

    def put(self, host: Tensor, t: Tensor, done: Done) -> None:
        """Copy `host` to `t`, of the same shape and dtype, behind what is queued on the current stream."""

    def cut(self, t: Tensor) -> Sequence[Tensor]:
        """Return the pieces in which flat `t` travels, each in a message of its own."""


class Endpoint:
    """A transport with one operation's tag: messages of different operations never meet."""

    __slots__ = ("device_messages", "key", "rank", "shared", "size", "tag", "traffic", "transport")

    def __init__(
        self,
        transport: Transport,
        tag: int,
        device_messages: DeviceMessages | None = None,
        traffic: Traffic | None = None,
        key: int | None = None,
        *,
        shared: bool = False,
    ) -> None:
        """`device_messages` is for tensors on a device, `traffic` takes note of what goes between hosts.

        `key` is what collectives of a library have in place of the tag, which comes back after some operations.
        `shared`: several programs in lockstep use it, so the programs of each schedule go apart, on a lane of its own.
        """
        self.transport = transport
        self.device_messages = device_messages
        self.traffic = traffic
        self.rank = transport.rank
        self.size = transport.size
        self.tag = tag
        self.key = key_of(tag) if key is None else key
        self.shared = shared

    def send(self, t: Tensor, dst: int) -> Call:
        """Return the call that sends `t` to rank `dst`."""
        if self.device_messages is not None and not t.is_cpu:
            return partial(self.device_messages.send, self.transport, t, dst, self.tag)
        if self.traffic is not None:
            self.traffic.check()
            return partial(self.traffic.send, self.transport, t, dst, self.tag)
        return partial(self.transport.isend, t, dst, self.tag)

    def recv(self, t: Tensor, src: int) -> Call:
        """Return the call that receives `t` from rank `src`."""
        if self.device_messages is not None and not t.is_cpu:
            return partial(self.device_messages.recv, self.transport, t, src, self.tag)
        if self.traffic is not None:
            self.traffic.check()
            return partial(self.traffic.recv, self.transport, t, src, self.tag)
        return partial(self.transport.irecv, t, src, self.tag)

    def known(self) -> Program[None]:
        """Go on when the ranks are known to agree: what has been received may be of another operation until then."""
        if self.traffic is not None:
            yield [self.traffic.agreed]


class Implementation(ABC):
    """A way in which a communicator can run collectives, known by a name."""

    name: str
    finishes: bool = False
    """Its allreduce and reduce_scatter take 16-bit floats and means as they are, and round once."""
    in_order: bool = False
    """It tells operations apart by the order of its calls alone, so it is for the first step of an operation only."""
    recallable: bool = False
    """It can be stopped on all ranks when one fails; else those that have begun it wait there for that one."""
    compares: bool = False
    """It has hosts compare large operations by itself, between what it does within a host and what it does beyond."""

    @abstractmethod
    def lacks(self, wanted: Wanted) -> str | None:
        """Return why it cannot do that, None where it can; the same on all ranks."""

    def plan_allreduce(self, kind: dtype, numel: int, op: ReduceOp) -> Begin | None:
        """Return what reduces such tensors, as they are, in place and with a single call; None where there is none."""
        return None

    @abstractmethod
    def run(self, ep: Endpoint, operation: Primitive) -> Program[None]:
        """Run an operation that it does not lack."""


class Exchanger(Implementation):
    """It runs an `Exchange` too, without messages of the endpoint, where all ranks can."""

    @abstractmethod
    def takes(self, ep: Endpoint, exchange: Exchange) -> bool:
        """Return True where this rank can."""

    @abstractmethod
    def release(self, ep: Endpoint) -> None:
        """Know that the operation will do none."""


def run(
    program: Program[T],
    finish: Callable[[T | None, BaseException | None], None],
    ended: Callable[[], None] = lambda: None,
) -> None:
    """Run `program` to its end; with the transport lock held, now and later. Raises nothing but what `finish` does.

    Both are called exactly once: `finish(result, error)` with the outcome, `ended()` when no transfer of the program
    uses its tensors any more. That comes first, but for a step of which one call fails as it is made: the others of
    the step may then be under way for ever, since what failed here is what another rank waits for.
    """
    _Run(program, finish, ended).advance(None)


@dataclass(eq=False, slots=True)
class _Part:
    """What one call of a step is to call when it is over; the first time counts."""

    _run: _Run | None

    def __call__(self, error: BaseException | None) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.part_over(error)

    def fails(self, error: BaseException) -> None:
        """The call will be over with `error`, perhaps never."""
        if self._run is not None:
            self._run.fail(error)


@dataclass(eq=False, slots=True)
class _Run:
    """One program on its way."""

    _program: Program[Any]
    _finish: Callable[[Any, BaseException | None], None] | None
    _ended: Callable[[], None]
    _left: int = 0
    _error: BaseException | None = None
    _calls: Sequence[Call] = ()

    def advance(self, error: BaseException | None) -> None:
        """Take steps until one has to wait."""
        while True:
            try:
                calls = self._program.send(None) if error is None else self._program.throw(error)
            except StopIteration as stop:
                self._end(stop.value, None)
                return
            except BaseException as raised:  # noqa: BLE001  - it belongs to the task that awaits the operation
                self._end(None, ours(raised) if isinstance(raised, _UNEXPECTED) else raised)
                return
            self._error = None
            # Kept until all are over: a call may hold the only reference to what is on its way.
            self._calls = calls
            # One more than there are, so that calls that finish at once do not resume us from within.
            self._left = len(calls) + 1
            for call in calls:
                part = _Part(self)
                try:
                    call(part)
                except Exception as raised:  # noqa: BLE001  - as above; the others are made: ranks wait for them
                    self._error = self._error or ours(raised)
                    part(self._error)
            self._left -= 1
            if self._left:
                if self._error is not None:
                    self.fail(self._error)
                return
            error = self._error

    def part_over(self, error: BaseException | None) -> None:
        """A call of this step is over."""
        self._error = self._error or error
        self._left -= 1
        if self._left == 0:
            self.advance(self._error)

    def fail(self, error: BaseException) -> None:
        """Tell the outcome before the end."""
        finish, self._finish = self._finish, None
        if finish is not None:
            finish(None, error)

    def _end(self, result: object, error: BaseException | None) -> None:
        finish, self._finish = self._finish, None
        self._ended()
        if finish is not None:
            finish(result, error)


def concurrently(programs: Sequence[Program[None]]) -> Program[None]:
    """Run several programs at once, each at its own speed; their messages must have tags of their own."""
    if len(programs) == 1:
        yield from programs[0]
    else:
        yield [Nested(program) for program in programs]


@dataclass(eq=False, slots=True)
class Nested:
    """The call that runs a program of its own; code that wraps calls can wrap that program's too."""

    program: Program[Any]

    def __call__(self, done: Done) -> None:
        over = False
        failed: BaseException | None = None

        def finish(_: object, error: BaseException | None) -> None:
            nonlocal failed
            if over:
                done(error)
                return
            failed = error
            if error is not None and isinstance(done, _Part):
                done.fails(error)

        def ended() -> None:
            nonlocal over
            over = True
            if failed is not None:
                done(failed)

        run(self.program, finish, ended)


@dataclass(eq=False, slots=True)
class Apart(Nested):
    """A nested program that is in lockstep with those of its key alone, of all that begin in the same step.

    Their messages must have tags of their own.
    """

    key: Hashable


@dataclass(eq=False, slots=True)
class Joint:
    """A call that is made as one with those of its key, which other programs in lockstep make in the same step."""

    key: Hashable
    items: Sequence[Any]
    start: Callable[[Sequence[Any], Done], None]

    def __call__(self, done: Done) -> None:
        """Make it."""
        self.start(self.items, done)


def _joined(calls: Sequence[Call]) -> list[Call]:
    """Return the calls, all joint ones of a key as one, and all programs of a key."""
    items: dict[Hashable, list[Any]] = {}
    apart: dict[Hashable, list[Program[None]]] = {}
    joined: list[Call] = []
    for call in calls:
        if isinstance(call, Apart):
            apart.setdefault(call.key, []).append(call.program)
        elif not isinstance(call, Joint):
            joined.append(call)
        elif call.key in items:
            items[call.key] += call.items
        else:
            items[call.key] = list(call.items)
            joined.append(Joint(call.key, items[call.key], call.start))
    return joined + [Nested(lockstep(programs)) for programs in apart.values()]


def meet(done: Done) -> None:
    """Do nothing: a step with this call alone is where programs in lockstep wait for one another.

    Some ranks take more steps than others to get there, and behind it all ranks make the same calls in one order.
    """
    done(None)


def lockstep(programs: Sequence[Program[T]]) -> Program[list[T]]:
    """Run several programs side by side, their steps joined; the result is the list of their results.

    A step is over when all calls of it are. So programs that take other steps than one another, such as two schedules,
    have to be `Apart`: a rank would wait in the one for what another rank does behind a step of the other. Programs
    that take the same steps, each rank its own, may share a tag: their messages meet in order.
    """
    results: list[Any] = [None] * len(programs)
    active = dict(enumerate(programs))
    there: set[int] = set()
    while active:
        if there.issuperset(active):
            there.clear()
        calls: list[Call] = []
        for i, program in list(active.items()):
            if i in there:
                continue
            try:
                step = program.send(None)
            except StopIteration as stop:
                results[i] = stop.value
                del active[i]
            else:
                there.update([i] if meet in step else [])
                calls.extend(step)
        if active:
            yield _joined(calls)
    return results
