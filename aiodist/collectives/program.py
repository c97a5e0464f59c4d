"""Programs: operations of several steps, written as generators and run by whoever makes progress.

A program yields the transfers of one step, a list of `Call`s, and is resumed when all of them are over; what it
returns is the operation's result. So a collective goes on while nobody awaits it and while user code holds the
loop's thread: no task of the loop is needed between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from torch import Tensor

from aiodist.backends.base import Done, Transport

__all__ = ["Call", "Courier", "Endpoint", "Nested", "Program", "concurrently", "lockstep", "run", "tag_of"]

T = TypeVar("T")
_COLLECTIVE_TAGS = 1 << 21  # above those of the mailbox
Call = Callable[[Done], None]
Program = Generator[Sequence[Call], None, T]


def tag_of(seq: int) -> int:
    """Return the tag of a communicator's collective number `seq`."""
    return _COLLECTIVE_TAGS + seq % _COLLECTIVE_TAGS


class Courier(Protocol):
    """Takes tensors that lie on a device to and from a transport, which moves memory of the host."""

    def send(self, transport: Transport, t: Tensor, dst: int, tag: int, done: Done) -> None:
        """As `Transport.isend`, behind what is queued on the current stream."""

    def recv(self, transport: Transport, t: Tensor, src: int, tag: int, done: Done) -> None:
        """As `Transport.irecv`; done when what is queued on the current stream from now on finds it there."""

    def fetch(self, t: Tensor, then: Callable[[Tensor | None, BaseException | None], None]) -> None:
        """Call `then` with a copy of `t` in memory of the host, or with an error."""

    def cut(self, t: Tensor) -> Sequence[Tensor]:
        """Return the pieces in which flat `t` travels, each in a message of its own."""


class Endpoint:
    """A transport with one operation's tag: messages of different operations never meet."""

    __slots__ = ("courier", "rank", "size", "tag", "transport")

    def __init__(self, transport: Transport, tag: int, courier: Courier | None = None) -> None:
        """`courier` is for tensors on a device."""
        self.transport = transport
        self.courier = courier
        self.rank = transport.rank
        self.size = transport.size
        self.tag = tag

    def send(self, t: Tensor, dst: int) -> Call:
        """Return the call that sends `t` to rank `dst`."""
        if self.courier is not None and not t.is_cpu:
            return partial(self.courier.send, self.transport, t, dst, self.tag)
        return partial(self.transport.isend, t, dst, self.tag)

    def recv(self, t: Tensor, src: int) -> Call:
        """Return the call that receives `t` from rank `src`."""
        if self.courier is not None and not t.is_cpu:
            return partial(self.courier.recv, self.transport, t, src, self.tag)
        return partial(self.transport.irecv, t, src, self.tag)


def run(program: Program[T], finish: Callable[[T | None, BaseException | None], None]) -> None:
    """Run `program` to its end and call `finish(result, error)`; with the transport lock held, now and later."""
    _Run(program, finish).advance(None)


class _Run:
    """One program on its way."""

    __slots__ = ("_calls", "_error", "_finish", "_left", "_program")

    def __init__(self, program: Program[Any], finish: Callable[[Any, BaseException | None], None]) -> None:
        self._program = program
        self._finish = finish
        self._left = 0
        self._error: BaseException | None = None
        self._calls: Sequence[Call] = ()

    def advance(self, error: BaseException | None) -> None:
        """Take steps until one has to wait."""
        while True:
            try:
                calls = self._program.send(None) if error is None else self._program.throw(error)
            except StopIteration as stop:
                self._finish(stop.value, None)
                return
            except BaseException as raised:  # noqa: BLE001  - it belongs to whoever awaits the operation
                self._finish(None, raised)
                return
            self._error = None
            # Kept until all are over: a call may hold the only reference to what is on its way.
            self._calls = calls
            # One more than there are, so that calls that finish at once do not resume us from within.
            self._left = len(calls) + 1
            for call in calls:
                call(self._one_done)
            self._left -= 1
            if self._left:
                return
            error = self._error

    def _one_done(self, error: BaseException | None) -> None:
        self._error = self._error or error
        self._left -= 1
        if self._left == 0:
            self.advance(self._error)


def concurrently(programs: Sequence[Program[None]]) -> Program[None]:
    """Run several programs at once, each at its own speed; their messages must have tags of their own."""
    if len(programs) == 1:
        yield from programs[0]
    else:
        yield [Nested(program) for program in programs]


class Nested:
    """The call that runs a program of its own; whoever wraps calls can wrap that too."""

    __slots__ = ("program",)

    def __init__(self, program: Program[None]) -> None:
        self.program = program

    def __call__(self, done: Done) -> None:
        """Run it."""
        run(self.program, lambda _, error: done(error))


def lockstep(programs: Sequence[Program[T]]) -> Program[list[T]]:
    """Run several programs side by side, their steps joined; the result is the list of their results."""
    results: list[Any] = [None] * len(programs)
    active = dict(enumerate(programs))
    while active:
        calls: list[Call] = []
        for i, program in list(active.items()):
            try:
                calls.extend(program.send(None))
            except StopIteration as stop:
                results[i] = stop.value
                del active[i]
        if active:
            yield calls
    return results
