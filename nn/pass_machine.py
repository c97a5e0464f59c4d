"""The rules of one pass: which bucket is sent when, and how the pass ends. There are no handles, tensors or I/O here.

Each event of the pass on this rank is a method, which returns the actions to carry out, in their order. `Pass` carries
out the actions. The machines of all ranks send the same buckets in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple, Protocol

from aiodist.errors import AiodistError, CommunicatorError, MismatchError, PeerError
from aiodist.nn.pass_status import PassAccount, PassStatus, StatusKind, explained, some_in_join


class Phase(Enum):
    """Phase of a pass; the table is in `PassMachine`."""

    WAITING = auto()
    HELD = auto()
    BACKWARD = auto()
    AGREEING = auto()
    ENDING = auto()
    OVER = auto()


class Stage(Enum):
    """Stage of a bucket."""

    FILLING = auto()
    FULL = auto()
    MOVING = auto()
    """Waiting for a permit, or in flight."""
    QUEUED = auto()
    """In flight, and queued on its device, whose streams can wait for the reduction."""
    REDUCED = auto()
    FAILED = auto()


class Load(Protocol):
    """A bucket, as the machine sees it."""

    nbytes: int


@dataclass(frozen=True)
class Terms:
    """Facts that are known when a pass begins."""

    members: Sequence[float]
    """1.0 for each parameter of the module that is in a bucket, else 0.0."""
    active: bool = True
    """True if this rank has data."""
    prompt: bool = True
    """True if a bucket arrives when it is reduced, False if a bucket also waits for the pass status."""
    header: Any = None
    """Status that ranks sum before all else, or None."""
    refused: PassStatus | None = None
    """Answer of the ranks before backward, if this pass cannot count: the rank then sends zeros."""


# --- actions ---------------------------------------------------------------------------------------------------------


class Send(NamedTuple):
    """Send a bucket, after all buckets that were sent before; next are `queued`, `reduced`, `failed` or `unsent`.

    `unsent` must be handled before another bucket is sent, which the ranks would take for this one.
    """

    bucket: int


class SumHeader(NamedTuple):
    """Sum the headers of all ranks; next is `header_summed` or `unanswered`."""


class SumStatus(NamedTuple):
    """Sum the pass status of all ranks, when this rank has sent `issued` buckets; next is `summed` or `unanswered`."""

    issued: int
    failed: bool


class ExchangeAccounts(NamedTuple):
    """Exchange accounts with all ranks; next is `explained` or `unanswered`."""

    failure: str | None
    """Traceback of this rank's error."""


class Settle(NamedTuple):
    """Give the parameters the gradients of a bucket, as the pass status says."""

    bucket: int


class Arrive(NamedTuple):
    """Report to the user that a bucket is reduced."""

    bucket: int


class Fail(NamedTuple):
    """Raise the error in all waits for the pass or for a bucket; operations in flight continue."""

    error: BaseException


class Abort(NamedTuple):
    """Abort the communicator of the gradients, and that of the status too if `wholly`."""

    why: str
    wholly: bool


Action = Send | SumHeader | SumStatus | ExchangeAccounts | Settle | Arrive | Fail | Abort


class PassMachine:
    """One pass on one rank.

    ========  ==========  =============================================  =============================================
    phase     backward    buckets are sent                               next phase
    ========  ==========  =============================================  =============================================
    WAITING   runs        not yet: the pass before has not ended         begin: BACKWARD; backward_ended: HELD
    HELD      has ended   not yet                                        begin: AGREEING or ENDING
    BACKWARD  runs        when they are full, in `sequence`              backward_ended: AGREEING if there is a
                                                                         `window` and buckets are left, else ENDING
    AGREEING  has ended   none, while the ranks agree on an order        summed: ENDING, once `sequence` is that of all
                                                                         ranks; also if nothing more can be sent
    ENDING    has ended   all that are left                              OVER, when the last answer is there
    OVER      has ended   none are left                                  none
    ========  ==========  =============================================  =============================================

    `error` is the first error of the pass. A failed pass continues to its end, since the other ranks wait for what it
    sends, unless the communicator is lost. `status` is the sum of all ranks' pass status.
    """

    def __init__(
        self, buckets: Sequence[Load], terms: Terms, *, rank: int, window: int | None = None, waits: bool = False
    ) -> None:
        """Start in BACKWARD, unless the pass has a header or `waits` for the pass before.

        `window` limits the bytes in flight while the order may still change; two buckets are always allowed.
        """
        self.phase = Phase.WAITING if waits or terms.header is not None else Phase.BACKWARD
        self.stages = [Stage.FILLING for _ in buckets]
        self.sequence = list(range(len(buckets)))
        """Order in which buckets are sent."""
        self.status: PassStatus | None = None
        self.error: BaseException | None = None
        self.counts = False
        """True if, as far as is known, all ranks have made the pass."""
        self.terms = terms
        self._loads = buckets
        self._rank = rank
        self._window = window
        self._next = 0
        """Number of buckets in `sequence` that were sent, or cannot be sent."""
        self._moving: set[int] = set()
        self._answers = 0
        """Number of missing answers of the other ranks: to header, status and accounts."""
        self._failure: str | None = None
        """Traceback of this rank's error."""
        self._unsendable: BaseException | None = None
        """Reason why this rank cannot send a bucket that the others wait for."""
        self._actions: list[Action] = []
        """Actions of the current event."""

    # --- backward ----------------------------------------------------------------------------------------------------

    def begin(self) -> list[Action]:
        """The pass before has ended."""
        held, self.phase = self.phase is Phase.HELD, Phase.BACKWARD
        if self.terms.header is not None:
            self._answers += 1
            self._actions.append(SumHeader())
        return self._close() if held else self._advance()

    def filled(self, index: int) -> list[Action]:
        """Bucket `index` is full."""
        if self.stages[index] is Stage.FILLING:
            self.stages[index] = Stage.FULL
        return self._advance()

    def backward_ended(
        self, error: BaseException | None = None, failure: str | None = None, unsendable: BaseException | None = None
    ) -> list[Action]:
        """Backward has ended, with `error` (which `failure` describes to the others), and every bucket is full.

        `unsendable` is the reason if a bucket is not full in spite of that.
        """
        self.stages = [Stage.FULL if stage is Stage.FILLING else stage for stage in self.stages]
        self.error = self.error if error is None else error
        self._failure, self._unsendable = failure, unsendable
        if self.phase is Phase.WAITING:
            self.phase = Phase.HELD
            return []
        return self._close()

    def _close(self) -> list[Action]:
        self.phase = Phase.ENDING
        if self._unsendable is not None:
            self._stop_sending(self._unsendable)
        if self._window is not None and self._next < len(self.sequence):
            self.phase = Phase.AGREEING
        self._answers += 1
        refused = self.terms.refused
        if refused is not None and StatusKind.JOIN not in refused.kinds:
            return self.summed(refused)  # the others have taken this rank's question as its status in this pass
        self._actions.append(SumStatus(self._next, self._failure is not None or refused is not None))
        return self._advance()

    # --- buckets -----------------------------------------------------------------------------------------------------

    def queued(self, index: int) -> list[Action]:
        """The reduction of bucket `index` is queued on its device."""
        self.stages[index] = Stage.QUEUED
        if self.counts:
            self._actions.append(Settle(index))
        return self._advance()

    def reduced(self, index: int) -> list[Action]:
        """Bucket `index` is reduced."""
        queued = self.stages[index] is Stage.QUEUED
        self.stages[index] = Stage.REDUCED
        self._moving.remove(index)
        if self.terms.prompt:
            self._actions.append(Arrive(index))
        if self.counts:
            if not queued:  # else it was settled before
                self._actions.append(Settle(index))
            if not self.terms.prompt:
                self._actions.append(Arrive(index))
        return self._advance()

    def failed(self, index: int, error: BaseException) -> list[Action]:
        """The reduction of bucket `index` failed."""
        self._fail_bucket(index)
        self._fail(error)
        return self._advance()

    def unsent(self, index: int, error: Exception) -> list[Action]:
        """Bucket `index` could not be sent. If the communicator still works, the others would wait for the bucket."""
        self._fail_bucket(index)
        if isinstance(error, (CommunicatorError, PeerError)):
            self._fail(error)
        else:
            self._stop_sending(error)
        return self._advance()

    def _fail_bucket(self, index: int) -> None:
        self.stages[index] = Stage.FAILED
        self._moving.remove(index)

    # --- answers of the ranks ----------------------------------------------------------------------------------------

    def header_summed(self, status: PassStatus) -> list[Action]:
        """All ranks have sent a header."""
        self._answers -= 1
        if not status.all_are(StatusKind.JOIN):
            self._part(status)
        return self._advance()

    def summed(self, status: PassStatus) -> list[Action]:
        """All ranks have sent a pass status."""
        ready = [i for i, stage in enumerate(self.stages) if stage in (Stage.QUEUED, Stage.REDUCED)]
        self._answers -= 1
        self.status, self.counts = status, self.error is None and status.sound
        if StatusKind.JOIN in status.kinds:
            self._part(status)
        elif not status.sound:
            self._answers += 1
            self._actions.append(ExchangeAccounts(self._failure))
        if self.phase is Phase.AGREEING:
            # No rank has sent more than `issued` buckets. All send the others in the order of the next forward.
            self.sequence[status.issued :] = reversed(self.sequence[status.issued :])
            self.phase = Phase.ENDING
        for index in ready if self.counts else ():
            self._actions.append(Settle(index))
            if self.stages[index] is Stage.REDUCED and not self.terms.prompt:
                self._actions.append(Arrive(index))
        return self._advance()

    def explained(self, accounts: Sequence[PassAccount]) -> list[Action]:
        """All ranks have sent an account."""
        self._answers -= 1
        assert self.status is not None
        self._fail(explained(self.status, accounts, self._rank), lost=False)
        return self._advance()

    def unanswered(self, error: BaseException) -> list[Action]:
        """The exchange of headers, status or accounts failed."""
        self._answers -= 1
        self._fail(error)
        if self.phase is Phase.AGREEING:  # no order will be agreed on
            self._lose()
        return self._advance()

    def _part(self, status: PassStatus) -> None:
        """Fail, since only some ranks are in a `join` block: the ranks have no pass in common."""
        text = some_in_join(status)
        self._fail(MismatchError(text, rank=self._rank))
        self._actions.append(Abort(text, wholly=True))

    # --- after each event --------------------------------------------------------------------------------------------

    def _advance(self) -> list[Action]:
        """Send full buckets, in the order of `sequence`, as far as the window allows. Return the event's actions.

        End the pass if nothing is left.
        """
        while self.phase in (Phase.BACKWARD, Phase.ENDING) and self._next < len(self.sequence):
            index = self.sequence[self._next]
            if self.stages[index] is not Stage.FULL:
                break
            if self._window is not None and len(self._moving) >= 2:
                in_flight = sum(self._loads[i].nbytes for i in self._moving)
                if in_flight + self._loads[index].nbytes > self._window:
                    break
            self._next += 1
            self.stages[index] = Stage.MOVING
            self._moving.add(index)
            self._actions.append(Send(index))
        if self.phase is Phase.ENDING and not (self._moving or self._answers) and self._next == len(self.sequence):
            self.phase = Phase.OVER
            if self.error is not None:
                self._actions.append(Fail(self.error))
        actions, self._actions = self._actions, []
        return actions

    def _stop_sending(self, error: BaseException) -> None:
        """Abort, since the others would wait for buckets that this rank cannot send."""
        self._lose()
        self._actions.append(Abort(f"rank {self._rank} cannot send its gradients: {error}", wholly=False))
        self._fail(error)

    def _fail(self, error: BaseException, *, lost: bool = True) -> None:
        """Keep the first error. If `lost`, an error of the communicator means that nothing more can be sent."""
        self.error, self.counts = error if self.error is None else self.error, False
        if lost and isinstance(error, AiodistError):
            self._lose()
        self._actions.append(Fail(self.error))

    def _lose(self) -> None:
        self._next = len(self.sequence)
        if self.phase is Phase.AGREEING:
            self.phase = Phase.ENDING
