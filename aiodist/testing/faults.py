"""Faults on purpose: `Faults` has ranks die, raise, stop or lose messages at an operation that a seed may draw.

    run_ranks(4, main, faults=Faults(Fault("kill", rank=2, at=10)))        # ranks of this process

    with Faults(Fault("kill", rank=2, at=10)):                             # in the program, in every process
        aiodist.run(main)

Within its block the calls of `Communicator` and `ParameterServer` are counted; outside nothing is added to them.
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import subprocess
import time
from asyncio import _get_running_loop
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from random import Random
from typing import Any, Final, Self

from aiodist.backends.base import tell
from aiodist.backends.local import Address, LocalMessage
from aiodist.communicator import Communicator, parts_of
from aiodist.control.client import SocketChannel
from aiodist.env import Environment
from aiodist.ps import ParameterServer
from aiodist.testing.clock import FakeClockLoop
from aiodist.testing.hub import DrawnHub
from aiodist.types import OPERATIONS
from aiodist.world.opening import current_place

_CALLS: Final = {
    Communicator: (
        *(*OPERATIONS, "barrier", "exscan", "gather", "scatter", "alltoall", "alltoall_single"),
        *("send", "recv", "sendrecv", "send_object", "recv_object"),
    ),
    ParameterServer: ("push", "pull", "push_pull", "sync", "barrier"),
}


class FaultKind(StrEnum):
    """Kinds of faults, at a call of a rank or of a message from it."""

    KILL = "kill"
    """SIGKILL. Under `run_ranks` its task is cancelled, and the others see what they see of a killed process."""
    RAISE = "raise"
    """The call raises `InjectedFault`."""
    STOP = "stop"
    """SIGSTOP, and SIGCONT after `seconds`; processes only."""
    BLOCK = "block"
    """The event loop stands still for `seconds`."""
    SLOW = "slow"
    """From then on each call blocks for `seconds`; under `run_ranks` each message from it takes so long."""
    STALL = "stall"
    """Data on the connection to the hub waits for `seconds`; processes only."""
    CUT = "cut"
    """The connection to the hub breaks; processes only."""
    DROP = "drop"
    """It never comes, nor what follows from that rank to the same one on that communicator, as where a link is dead.

    This and those below are for `run_ranks`.
    """
    DELAY = "delay"
    """The message comes after `seconds`, before later ones to the same rank, as on one connection."""
    REORDER = "reorder"
    """The message comes after `seconds`, after later ones with other tags, as on several connections."""
    DUPLICATE = "duplicate"
    """A copy comes after `seconds`: a collective is right all the same, another receive may take it."""


_OF_MESSAGES = frozenset({FaultKind.DROP, FaultKind.DELAY, FaultKind.REORDER, FaultKind.DUPLICATE})
_OF_PROCESSES = frozenset({FaultKind.STOP, FaultKind.STALL, FaultKind.CUT})


class InjectedFault(RuntimeError):
    """An error that a call raises on purpose."""


@dataclass(frozen=True)
class Fault:
    """One fault: `kind` at call, or message, number `at` of `rank`, from 0."""

    kind: str
    rank: int
    at: int = 0
    seconds: float = 1.0

    def __post_init__(self) -> None:
        """Raise ValueError for an invalid fault."""
        if self.kind not in set(FaultKind):
            raise ValueError(f"fault {self.kind!r}: expected one of {', '.join(FaultKind)}")
        if self.rank < 0 or self.at < 0 or self.seconds < 0:
            raise ValueError(f"{self}: expected a rank, a number and seconds of at least 0")


class Faults:
    """Faults that happen while its block is entered, on the ranks that run in it; it can be entered once at a time.

    Every rank is given the same. A rank's calls are counted from 0, those of all its communicators and parameter
    servers together; its messages too, those of all, by its rank in the communicator that sends.
    """

    def __init__(self, *faults: Fault) -> None:
        self.faults = faults
        self._calls: Counter[int] = Counter()
        self._messages: Counter[int] = Counter()
        self._originals: list[tuple[type, str, Any]] = []
        self._place: Any = None
        """The place of the rank of `run_ranks` that called last; None if ranks are processes."""

    @classmethod
    def drawn(
        cls, seed: int, kinds: Iterable[str], *, ranks: Iterable[int], calls: int, count: int = 1, seconds: float = 1.0
    ) -> Self:
        """Return `count` faults, each of one of `kinds`, at one of the first `calls` calls of one of `ranks`."""
        random, what, who = Random(seed), list(kinds), list(ranks)
        return cls(
            *[Fault(random.choice(what), random.choice(who), random.randrange(calls), seconds) for _ in range(count)]
        )

    def __repr__(self) -> str:
        return f"Faults({', '.join(map(repr, self.faults))})"

    def __enter__(self) -> Self:
        """Count calls from now on."""
        self._calls.clear()
        self._messages.clear()
        self._place = None
        for owner, names in _CALLS.items():
            for name in names:
                self._originals.append((owner, name, vars(owner).get(name)))
                setattr(owner, name, self._counted(getattr(owner, name)))
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the calls as they were."""
        while self._originals:
            owner, name, original = self._originals.pop()
            if original is None:  # a base has it
                delattr(owner, name)
            else:
                setattr(owner, name, original)

    def check(self, *, local: bool, ranks: int | None = None) -> None:
        """Raise ValueError for a fault that these ranks cannot have; `ranks` is None if the number can change."""
        for fault in self.faults:
            if ranks is not None and fault.rank >= ranks:
                raise ValueError(f"{fault}: expected one of the {ranks} ranks")
            if fault.kind in (_OF_PROCESSES if local else _OF_MESSAGES):
                raise ValueError(f"{fault} is for {'ranks that are processes' if local else 'run_ranks'}")

    def at_message(self, src: int) -> list[Fault]:
        """Count a message of `src`; return what is to happen to it."""
        number = self._messages[src]
        self._messages[src] += 1
        return [
            fault
            for fault in self.faults
            if fault.rank == src
            and (
                (fault.kind in _OF_MESSAGES and fault.at == number)
                or (fault.kind == FaultKind.SLOW and fault.at <= number)
            )
        ]

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def counted(*args: Any, **options: Any) -> Any:  # noqa: ANN401
            # The loop makes some calls of a net in the context of the thread that woke it, which has no place.
            place = self._place = current_place.get() or self._place
            rank = Environment.read().rank if place is None else _number(place, args[0])
            if place is None:
                self.check(local=False)
            number = self._calls[rank]
            self._calls[rank] += 1
            for fault in self.faults:
                if fault.rank == rank and (fault.at == number or (fault.kind == FaultKind.SLOW and fault.at <= number)):
                    _strike(fault, place)
            return call(*args, **options)

        return counted


def _number(place: Any, owner: Communicator | ParameterServer) -> int:  # noqa: ANN401
    """Return the number of the rank that calls: the loop may make a net's calls in the context of another rank."""
    if place.job.elastic is not None or isinstance(owner, ParameterServer):
        return int(place.number)
    return parts_of(owner).dispatcher.ranks[owner.rank]


def _strike(fault: Fault, place: Any) -> None:  # noqa: ANN401
    """Inject a fault at a call of this rank."""
    match fault.kind:
        case FaultKind.KILL if place is None:
            os.kill(os.getpid(), signal.SIGKILL)
        case FaultKind.KILL:
            place.job.kill(fault.rank)
            raise asyncio.CancelledError(str(fault))
        case FaultKind.RAISE:
            raise InjectedFault(str(fault))
        case FaultKind.STOP:
            subprocess.Popen(["/bin/sh", "-c", f"sleep {fault.seconds}; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        case FaultKind.SLOW if place is None:
            time.sleep(fault.seconds)
        case FaultKind.BLOCK if isinstance(loop := _get_running_loop(), FakeClockLoop):
            loop.now += fault.seconds
        case FaultKind.BLOCK:
            time.sleep(fault.seconds)
        case FaultKind.STALL:
            SocketChannel.stall(fault.seconds)
        case FaultKind.CUT:
            SocketChannel.cut()


@dataclass(eq=False)
class _HeldMessage:
    message: LocalMessage
    due: float
    overtakable: bool


class FaultyHub(DrawnHub):
    """A `DrawnHub` whose messages suffer what `faults` say."""

    def __init__(self, seed: int, faults: Faults, *, holds: bool = False) -> None:
        super().__init__(seed, holds=holds)
        self._faults = faults
        self._held: defaultdict[tuple[Address, int], deque[_HeldMessage]] = defaultdict(deque)
        self._dead: set[tuple[Address, int]] = set()

    def send(self, to: Address, message: LocalMessage) -> None:
        """Send, lose, double or hold it."""
        late, overtakable = 0.0, False
        for fault in self._faults.at_message(message.src):
            match fault.kind:
                case FaultKind.DROP:
                    self._dead.add((to, message.src))
                case FaultKind.DUPLICATE:
                    copy = LocalMessage(message.src, message.tag, message.data.clone(), lambda error: None)
                    self._at(self._now() + fault.seconds, partial(super().send, to, copy))
                case kind:
                    late, overtakable = fault.seconds, kind == FaultKind.REORDER
        if (to, message.src) in self._dead:
            tell([(message.done, None)])
            return
        held = self._held[to, message.src]
        ahead = [one for one in held if not one.overtakable or one.message.tag == message.tag]
        if not late and not ahead:
            super().send(to, message)
            return
        due = max([self._now() + late, *[one.due for one in ahead]])
        held.append(_HeldMessage(message, due, overtakable))

        def release() -> None:
            for one in [one for one in held if one.due <= due]:
                held.remove(one)
                super(FaultyHub, self).send(to, one.message)

        self._at(due, release)

    def _now(self) -> float:
        assert self.progress is not None
        return self.progress.loop.time()

    def _at(self, due: float, call: Callable[[], None]) -> None:
        """Call a function on the loop at a time, with the transport lock held; a little early, as timers are."""
        progress = self.progress
        assert progress is not None
        progress.loop.call_soon_threadsafe(progress.loop.call_at, due, lambda: progress.start(call))
