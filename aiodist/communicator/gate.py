"""The gate of a communicator: an operation passes once the ranks are known to have issued the same one.

Every collective enters in the order of its number, with a *word*: its fingerprint, mixed with that number. Ranks that
share memory compare it in a lane; then the first of them, the *leader* of its host, compares with the leaders of the
others in messages (`Between`) and tells the verdict in a lane of its own.

    entered - the host compares - [the hosts compare] - all agree: it begins, if it has not, and counts
                                                      - some differ: it is refused, on every rank

What an operation has to wait for before it may begin, `When` says. Each step is made in the order of numbers, by the
thread that holds the transport lock: on the loop's thread or on the progress thread, so also while user code computes.
What a lane does from the call on (`direct`) does not enter: its word travels with its data, and is compared there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import torch

from aiodist.backends.base import Primitive, again, tag_of
from aiodist.backends.shm import Lane
from aiodist.collectives.between import Between
from aiodist.collectives.traffic import Differ
from aiodist.communicator.operation import CommunicatorOperation, When
from aiodist.errors import MismatchError
from aiodist.handles import Progress


class Gate:
    """See the module; everything runs with the transport lock held."""

    def __init__(
        self,
        progress: Progress,
        lane: Lane | None,
        verdicts: Lane | None,
        between: Between | None,
        several: bool,
        on_differ: Callable[[CommunicatorOperation], None],
    ) -> None:
        """`lane` is that of this host, where other ranks share its memory, and `verdicts` is for what its leader finds.

        `between` is for leaders. `several`: there are ranks elsewhere. `on_differ` is told of each operation that is
        refused, once.
        """
        self.several = several
        self._progress = progress
        self._lane = lane
        self._verdicts = verdicts
        self._between = between
        self._on_differ = on_differ
        self._line: deque[CommunicatorOperation] = deque()
        """Those that wait for their host, in order."""
        self._met: deque[tuple[CommunicatorOperation, bool]] = deque()
        """Those on which the host agrees, or not, and which the progress thread is to begin; and those behind them."""
        self._undecided: deque[CommunicatorOperation] = deque()
        """Those that wait for the other hosts, in order."""
        self._closed: BaseException | None = None

    def enter(self, operation: CommunicatorOperation) -> None:
        """Take the next operation."""
        if self._closed is not None:
            operation.decide(again(self._closed))
            return
        if operation.when is When.NOW:
            operation.admit()
        if self._lane is None:
            self._of_host(operation, differs=False)
            return
        self._line.append(operation)
        operation.compared = self._lane.compare(operation.signature, self._host_compared)

    def _host_compared(self, error: BaseException | None) -> None:
        """The ranks of this host have been compared on the operation that came first."""
        operation = self._line.popleft()
        if error is not None and not isinstance(error, MismatchError):
            if not operation.agreed.is_set:
                operation.decide(error)
            return
        on_loop = self._progress.owns_thread()
        if self._met or (operation.large and on_loop):
            self._met.append((operation, error is not None))
            if on_loop:
                self._progress.start_in_thread(self._go_on)
        else:
            self._of_host(operation, differs=error is not None)

    def _go_on(self) -> None:
        """Go on with those that the progress thread is to begin."""
        while self._met:
            operation, differs = self._met.popleft()
            self._of_host(operation, differs=differs)

    def _of_host(self, operation: CommunicatorOperation, *, differs: bool) -> None:
        """The ranks of this host have been compared."""
        if not self.several:
            self._settle(operation, differs)
            return
        if operation.when is When.HOST and not differs:
            operation.admit()
        self._undecided.append(operation)
        if self._between is not None:
            word = operation.signature if operation.compared is None else operation.compared.met
            told = partial(self._between_hosts, operation)
            self._between.compare(tag_of(operation.number), word, differs=differs, told=told)
        elif self._verdicts is not None:
            self._tell_verdict(torch.zeros(1, dtype=torch.bool, device="cpu"), self._verdict_told)

    def _between_hosts(self, operation: CommunicatorOperation, differs: bool) -> None:
        """As a leader: the hosts have been compared, on operations that may overtake one another."""
        if operation.differs is not None:
            return
        operation.differs = differs
        while self._undecided and (verdict := self._undecided[0].differs) is not None:
            first = self._undecided.popleft()
            if self._verdicts is not None:
                self._tell_verdict(torch.tensor([verdict], device="cpu"), lambda _, __: None)
            self._settle(first, verdict)

    def _tell_verdict(self, verdict: torch.Tensor, then: Callable[[torch.Tensor, BaseException | None], None]) -> None:
        """Have all ranks of this host know what its leader found about the next operation."""
        assert self._verdicts is not None
        self._verdicts.submit(Primitive("broadcast", verdict), 0, 0, partial(then, verdict))

    def _verdict_told(self, verdict: torch.Tensor, error: BaseException | None) -> None:
        """As another rank of the host: do as the leader found."""
        operation = self._undecided.popleft() if self._undecided else None
        if operation is not None and error is not None:
            operation.decide(error)
        elif operation is not None:
            self._settle(operation, bool(verdict))

    def _settle(self, operation: CommunicatorOperation, differs: bool) -> None:
        if not operation.agreed.is_set:
            operation.decide(Differ(operation.number) if differs else None)
            if differs:
                self._on_differ(operation)

    def doubt(self, seq: int) -> None:
        """Ranks are known to differ on operation `seq`, though not all have come: it keeps its place in the line.

        What a host begins as soon as it agrees waits for that: its other ranks may have begun, and meet this one there.
        """
        beginning = [operation for operation in self._line if operation.when is When.ALL]
        for operation in (*self._undecided, *beginning):
            if operation.number == seq:
                self._settle(operation, differs=True)

    def close(self, error: BaseException) -> None:
        """Compare nothing any more: what has not begun is refused with `error`, and so is what comes."""
        if self._closed is not None:
            return
        self._closed = error
        met, self._met = self._met, deque()
        undecided, self._undecided = self._undecided, deque()
        for operation in (*undecided, *(operation for operation, _ in met), *self._line):
            if not operation.agreed.is_set:
                operation.decide(again(error))
