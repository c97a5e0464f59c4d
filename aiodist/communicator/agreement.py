"""The ranks of a communicator compare each collective, so that all ranks run the same one.

A collective has a *signature*: the hash of its number and of the facts that must be equal on all ranks. Ranks that
share memory compare signatures in a lane. Then the first rank of each host, its *leader*, compares the signature with
the other leaders by messages. The leader sends the verdict to its host in another lane.

    entered - the host compares - [the hosts compare] - all agree: the result counts
                                                      - some differ: the collective fails on every rank

`When` names the ranks that must agree before a collective begins. Collectives are compared in the order of their
numbers. The thread that has the transport lock compares, which is the loop's or the progress thread. So ranks also
compare while user code computes. Operations of lanes do not enter, since the lane compares their signatures.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch

from aiodist.backends.base import Primitive, Transport, again, ignore, tag_of
from aiodist.backends.shm import ShmLane
from aiodist.collectives.endpoint import LANE_TAGS, Differ
from aiodist.communicator.fingerprint import merged
from aiodist.communicator.operation import CommunicatorOperation, Event, When
from aiodist.errors import MismatchError
from aiodist.handles import Progress
from aiodist.handles.kernel import run, transfers
from aiodist.schedules.plan import MAX_LANES

_FRAME = struct.Struct("<Q?")  # signature, True if ranks differ
_LANE = MAX_LANES * LANE_TAGS  # above the lanes of schedules


@dataclass(eq=False, slots=True)
class Comparison:
    """Comparison of one operation by messages."""

    known: Event = field(default_factory=Event)
    """Set when `differs` is known, possibly before all ranks have entered."""
    ended: Event = field(default_factory=Event)
    """Set when all ranks have entered and no message of the comparison is in flight here."""
    differs: bool = False
    """True if ranks differ."""


@dataclass(eq=False)
class Dissemination:
    """Comparison by messages, between the leaders of the hosts or between all ranks."""

    _transport: Transport
    _ranks: Sequence[int]
    """Ranks of the transport that compare, including this one."""
    _broken: Callable[[BaseException], None]
    """Callback for an error of its messages."""

    @cached_property
    def _neighbours(self) -> list[tuple[int, int]]:
        """For each step, the rank to receive from and the rank to send to, in the transport."""
        rank, size = self._ranks.index(self._transport.rank), len(self._ranks)
        distances = [1 << step for step in range((size - 1).bit_length())]
        return [(self._ranks[(rank - d) % size], self._ranks[(rank + d) % size]) for d in distances]

    def compare(self, tag: int, signature: int, *, differs: bool = False) -> Comparison:
        """Start to compare the operation with this `tag` (transport lock held).

        `differs` is True if ranks of this host are known to differ.
        """
        comparison = Comparison(differs=differs)
        run(self._disseminate(tag + _LANE, signature, comparison), partial(self._ended, comparison))
        return comparison

    async def _disseminate(self, tag: int, signature: int, comparison: Comparison) -> None:
        """Run a dissemination barrier whose messages carry the signature.

        In step k rank i sends to rank i + 2^k and receives from rank i - 2^k, modulo the number of ranks. A rank that
        has received a different signature reports the difference in all its later messages. Source: Hensgen, Finkel,
        Manber 1988, Two algorithms for barrier synchronization.
        """
        transport = self._transport
        for before, after in self._neighbours:
            if comparison.differs:
                comparison.known.set()
            sent = torch.frombuffer(bytearray(_FRAME.pack(signature, comparison.differs)), dtype=torch.uint8)
            frame = bytearray(_FRAME.size)
            received = torch.frombuffer(frame, dtype=torch.uint8)  # on the host for any default device
            await transfers([(transport.irecv, received, before, tag), (transport.isend, sent, after, tag)])
            other, differs = _FRAME.unpack(frame)
            if other != signature:
                both = merged(signature, other)
                differs, signature = (True, signature) if both is None else (differs, both)
            comparison.differs = comparison.differs or differs
        comparison.known.set()

    def _ended(self, comparison: Comparison, _: object, error: BaseException | None) -> None:
        if error is None:
            comparison.ended.set()
        else:
            self._broken(error)


class Agreement:
    """Compares the collectives of one communicator (transport lock held)."""

    def __init__(
        self,
        progress: Progress,
        lane: ShmLane | None,
        verdicts: ShmLane | None,
        between: Dissemination | None,
        several: bool,
        on_differ: Callable[[CommunicatorOperation], None],
    ) -> None:
        """`lane` is the lane of this host, if its ranks share memory.

        `verdicts` is the lane for verdicts of the leader.

        `between` is the comparison of a leader with the other leaders. `several` is True if there are several hosts.
        `on_differ` is called with each operation on which ranks differ, once.
        """
        self.several = several
        self._progress = progress
        self._lane = lane
        self._verdicts = verdicts
        self._between = between
        self._on_differ = on_differ
        self._undecided: dict[int, CommunicatorOperation] = {}
        """Operations in comparison, by number, in order."""
        self._in_thread: deque[tuple[CommunicatorOperation, bool]] = deque()
        """Operations that continue in the progress thread, in order, each with True if ranks of this host differ."""
        self._between_hosts: deque[tuple[CommunicatorOperation, Comparison]] = deque()
        """On a leader: operations that the hosts compare, in order."""
        self._closed: BaseException | None = None

    def enter(self, operation: CommunicatorOperation) -> None:
        """Compare the next operation, and admit the operation as its `When` says."""
        if self._closed is not None:
            operation.decide(again(self._closed))
            return
        if operation.when is When.NOW:
            operation.admit()
        self._undecided[operation.number] = operation
        if self._lane is None:
            self._continue(operation, differs=False)
        else:
            operation.compared = self._lane.compare(operation.signature, partial(self._host_compared, operation))
            self._lane.call_ended()  # the last rank of the host need not wait for a poll

    def _host_compared(self, operation: CommunicatorOperation, error: BaseException | None) -> None:
        """Continue after the comparison within this host, in the progress thread if the operation is large."""
        if error is not None and not isinstance(error, MismatchError):
            self._failed(operation, error)
            return
        if self._in_thread or (operation.large and self._progress.owns_thread()):  # later operations keep their order
            self._in_thread.append((operation, error is not None))
            if self._progress.owns_thread():
                self._progress.start_in_thread(self._continue_in_thread)
        else:
            self._continue(operation, differs=error is not None)

    def _continue_in_thread(self) -> None:
        while self._in_thread:
            operation, differs = self._in_thread.popleft()
            self._continue(operation, differs=differs)

    def _continue(self, operation: CommunicatorOperation, *, differs: bool) -> None:
        """Decide the operation, or compare between hosts."""
        if not self.several:
            self._decide(operation, differs=differs)
            return
        if operation.when is When.HOST and not differs:
            operation.admit()
        if self._between is not None:
            signature = operation.signature if operation.compared is None else operation.compared.met
            comparison = self._between.compare(tag_of(operation.number), signature, differs=differs)
            self._between_hosts.append((operation, comparison))
            comparison.known.wait(self._hosts_compared)
        elif self._verdicts is not None:
            verdict = Primitive("broadcast", torch.zeros(1, dtype=torch.bool, device="cpu"))
            self._verdicts.submit(verdict, 0, 0, partial(self._verdict_received, operation, verdict))

    def _hosts_compared(self, _: BaseException | None) -> None:
        """Decide, in order, the operations that the hosts have compared, and notify the host (leader)."""
        while self._between_hosts and self._between_hosts[0][1].known.is_set:
            operation, comparison = self._between_hosts.popleft()
            if self._verdicts is not None:
                verdict = Primitive("broadcast", torch.tensor([comparison.differs], device="cpu"))
                self._verdicts.submit(verdict, 0, 0, ignore)  # the lane keeps the tensor alive
            self._decide(operation, differs=comparison.differs)

    def _verdict_received(
        self, operation: CommunicatorOperation, verdict: Primitive, error: BaseException | None
    ) -> None:
        if error is None:
            self._decide(operation, differs=bool(verdict.t))
        else:
            self._failed(operation, error)

    def _failed(self, operation: CommunicatorOperation, error: BaseException) -> None:
        """Fail an operation whose comparison failed."""
        self._undecided.pop(operation.number, None)
        if operation.agreed.is_set:  # the operation has failed on another rank before
            operation.error = error
        else:
            operation.decide(error)

    def _decide(self, operation: CommunicatorOperation, *, differs: bool) -> None:
        self._undecided.pop(operation.number, None)
        if not operation.agreed.is_set:
            operation.decide(Differ(operation.number) if differs else None)
            if differs:
                self._on_differ(operation)

    def close(self, error: BaseException) -> None:
        """Stop comparisons. Operations in comparison, and later operations, end with `error`."""
        if self._closed is None:
            self._closed = error
            undecided, self._undecided = self._undecided, {}
            for operation in undecided.values():
                if not operation.agreed.is_set:
                    operation.decide(again(error))
