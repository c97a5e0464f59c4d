"""The machine of one pass: which bucket is sent when, and what becomes of the pass; no handles, no tensors, no I/O.

What happens to the pass on this rank goes in as a call, and what is to be done comes out as calls of the methods that
`nn/reduction` has for it. The machines of all ranks send the same buckets in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Generic, Protocol, TypeVar

from aiodist.errors import AiodistError, CommunicatorError, MismatchError, PeerError
from aiodist.nn.pass_status import PassAccount, PassStatus, StatusKind, explained, some_in_join


class Phase(Enum):
    """How far a pass is; the table stands at `PassMachine`."""

    WAITING = auto()
    HELD = auto()
    BACKWARD = auto()
    AGREEING = auto()
    ENDING = auto()
    OVER = auto()


class Stage(Enum):
    """How far a bucket is."""

    FILLING = auto()
    FULL = auto()
    MOVING = auto()
    """It waits for leave to be sent, or is under way."""
    QUEUED = auto()
    """The same, and the device on which it lies may be told to wait for it."""
    REDUCED = auto()
    FAILED = auto()


class Load(Protocol):
    """A bucket, as far as the machine looks at it."""

    nbytes: int


@dataclass(frozen=True)
class Terms:
    """What is known of a pass when it begins."""

    members: Sequence[float]
    """1.0 for each parameter of the module that is in a bucket, else 0.0."""
    active: bool = True
    """This rank brings data."""
    prompt: bool = True
    """A bucket has arrived when it is reduced; else only when the pass status, which may change it, is known too."""
    header: bool = False
    """The ranks tell each other a status before all else."""
    refused: PassStatus | None = None
    """What the ranks told before backward, where that shows that this pass cannot count: zeros are sent."""


L = TypeVar("L", bound=Load)


class PassMachine(Generic[L]):
    """One pass on one rank; every method is an event, and belongs to the loop.

    ========  ==========  =============================================  =============================================
    phase     backward    buckets are sent                               what leads on
    ========  ==========  =============================================  =============================================
    WAITING   goes on     not yet: the pass before is not over           begin: BACKWARD; backward_ended: HELD
    HELD      is over     not yet                                        begin: AGREEING or ENDING
    BACKWARD  goes on     when they are full, in `sequence`              backward_ended: AGREEING where there is a
                                                                         `window` and buckets are left, else ENDING
    AGREEING  is over     none, while the ranks agree on an order        told: ENDING, once `sequence` is that of all
                                                                         ranks; also when nothing more can be sent
    ENDING    is over     all that are left                              OVER, when the last answer is there
    OVER      is over     none are left                                  nothing
    ========  ==========  =============================================  =============================================

    What comes of a thing that is done may be reported at once, within the call that does it. `error` is what the pass
    failed with, as far as is known; a pass that has failed goes on to its end, since the other ranks wait for what it
    sends, unless the communicator is lost. `status` is what the ranks have told each other.
    """

    def __init__(
        self, buckets: Sequence[L], terms: Terms, *, rank: int, window: int | None = None, waits: bool = False
    ) -> None:
        """Where the order may still change `window` says how many bytes may be in flight; two buckets may, in any case.

        Without a header, and unless it `waits` for the pass before, it has begun.
        """
        self.phase = Phase.WAITING if waits or terms.header else Phase.BACKWARD
        self.stages = [Stage.FILLING for _ in buckets]
        self.sequence = list(range(len(buckets)))
        """In which buckets are sent."""
        self.status: PassStatus | None = None
        self.error: BaseException | None = None
        self.buckets = tuple(buckets)
        self.terms = terms
        self._rank = rank
        self._window = window
        self._next = 0
        """How many of `sequence` were sent, or cannot be."""
        self._moving: set[int] = set()
        self._answers = 0
        """How many of other ranks' answers are still to come, to header, status and accounts."""
        self._failure: str | None = None
        """The traceback of what this rank raised."""
        self._unsendable: Exception | None = None
        """Why this rank cannot send what the others wait for."""

    # --- what is to be done; a subclass does it -----------------------------------------------------------------

    def _send(self, index: int) -> None:
        """Send bucket `index`, behind those that were sent before: `queued`, then `reduced`, `failed` or `unsent`."""
        raise NotImplementedError

    def _send_header(self) -> None:
        """Add up the headers of all ranks: `header_told` or `untold`."""
        raise NotImplementedError

    def _send_status(self, issued: int, *, failed: bool) -> None:
        """Add up the status of all ranks, of which this one has sent `issued` buckets: `told` or `untold`."""
        raise NotImplementedError

    def _send_account(self, failure: str | None) -> None:
        """Exchange accounts with all ranks, `failure` is what this one raised: `explained` or `untold`."""
        raise NotImplementedError

    def _settle(self, index: int) -> None:
        """Bucket `index` may be used: give its gradients to the parameters, as `status` says."""
        raise NotImplementedError

    def _arrive(self, index: int) -> None:
        """Tell the user that bucket `index` is reduced."""
        raise NotImplementedError

    def _tell_failed(self, error: BaseException) -> None:
        """Tell those who wait for the pass, or for one of its buckets; what is in flight goes on."""
        raise NotImplementedError

    def _abort(self, why: str, *, wholly: bool) -> None:
        """Give up the communicator of the gradients, with `wholly` that of the status too."""
        raise NotImplementedError

    def _end(self) -> None:
        """Nothing is in flight any more: the pass is over, with or without an error."""
        raise NotImplementedError

    # --- backward -----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """The pass before is over."""
        held, self.phase = self.phase is Phase.HELD, Phase.BACKWARD
        if self.terms.header:
            self._answers += 1
            self._send_header()
        if held:
            self._close()
        else:
            self._issue()

    def filled(self, index: int) -> None:
        if self.stages[index] is Stage.FILLING:
            self.stages[index] = Stage.FULL
        self._issue()

    def backward_ended(
        self, error: BaseException | None = None, failure: str | None = None, unsendable: Exception | None = None
    ) -> None:
        """Backward is over, and every bucket full; it raised `error`, which `failure` tells to the others.

        `unsendable` says why some bucket is not full in spite of that.
        """
        self.stages = [Stage.FULL if stage is Stage.FILLING else stage for stage in self.stages]
        self.error = self.error if error is None else error
        self._failure, self._unsendable = failure, unsendable
        if self.phase is Phase.WAITING:
            self.phase = Phase.HELD
        else:
            self._close()

    def _close(self) -> None:
        self.phase = Phase.ENDING
        if self._unsendable is not None:
            self._leave_out(self._unsendable)
        if self._window is not None and self._next < len(self.sequence):
            self.phase = Phase.AGREEING
        refused = self.terms.refused
        if refused is not None and StatusKind.JOIN not in refused.kinds:
            self._take(refused)  # the others have taken what this rank asked for its status in this pass
        else:
            self._answers += 1
            self._send_status(self._next, failed=self._failure is not None or refused is not None)
        self._issue()

    # --- buckets ------------------------------------------------------------------------------------------------

    def queued(self, index: int) -> None:
        """The reduction of bucket `index`, which was sent, is queued on its device."""
        self.stages[index] = Stage.QUEUED
        if self._counts:
            self._settle(index)

    def reduced(self, index: int) -> None:
        queued = self.stages[index] is Stage.QUEUED
        self.stages[index] = Stage.REDUCED
        self._moving.remove(index)
        if self.terms.prompt:
            self._arrive(index)
        if self._counts:
            if not queued:  # else it was settled before
                self._settle(index)
            if not self.terms.prompt:
                self._arrive(index)
        self._issue()
        self._conclude()

    def failed(self, index: int, error: BaseException) -> None:
        self._fail_bucket(index)
        self._fail(error)
        self._issue()
        self._conclude()

    def unsent(self, index: int, error: Exception) -> None:
        """Bucket `index` could not be sent; where the communicator still works the others would wait for it."""
        self._fail_bucket(index)
        if isinstance(error, (CommunicatorError, PeerError)):
            self._fail(error)
        else:
            self._leave_out(error)
        self._conclude()

    def _fail_bucket(self, index: int) -> None:
        self.stages[index] = Stage.FAILED
        self._moving.remove(index)

    def _issue(self) -> None:
        while self.phase in (Phase.BACKWARD, Phase.ENDING) and self._next < len(self.sequence):
            index = self.sequence[self._next]
            if self.stages[index] is not Stage.FULL or not self._fits(index):
                return
            self._next += 1
            self.stages[index] = Stage.MOVING
            self._moving.add(index)
            self._send(index)

    def _fits(self, index: int) -> bool:
        if self._window is None or len(self._moving) < 2:
            return True
        return sum(self.buckets[i].nbytes for i in (*self._moving, index)) <= self._window

    @property
    def _counts(self) -> bool:
        """All ranks have made the pass, as far as is known."""
        return self.status is not None and self.error is None and self.status.sound

    # --- what the ranks tell each other ---------------------------------------------------------------------------

    def header_told(self, status: PassStatus) -> None:
        self._answers -= 1
        if not status.all_are(StatusKind.JOIN):
            self._part(status)
        self._conclude()

    def told(self, status: PassStatus) -> None:
        self._answers -= 1
        self._take(status)
        self._conclude()

    def explained(self, accounts: Sequence[PassAccount]) -> None:
        self._answers -= 1
        assert self.status is not None
        self._fail(explained(self.status, accounts, self._rank), lost=False)
        self._conclude()

    def untold(self, error: BaseException) -> None:
        """Header, status or accounts could not be exchanged."""
        self._answers -= 1
        self._fail(error)
        if self.phase is Phase.AGREEING:  # nobody will say in which order to go on
            self._lose()
        self._conclude()

    def _take(self, status: PassStatus) -> None:
        ready = [i for i, stage in enumerate(self.stages) if stage in (Stage.QUEUED, Stage.REDUCED)]
        self.status = status
        if StatusKind.JOIN in status.kinds:
            self._part(status)
        elif not status.sound:
            self._answers += 1
            self._send_account(self._failure)
        if self.phase is Phase.AGREEING:
            # No rank has sent more than so many: all go on from there in the order in which forward wants them.
            self.sequence[status.issued :] = reversed(self.sequence[status.issued :])
            self.phase = Phase.ENDING
            self._issue()
        for index in ready if self._counts else ():
            self._settle(index)
            if self.stages[index] is Stage.REDUCED and not self.terms.prompt:
                self._arrive(index)

    def _part(self, status: PassStatus) -> None:
        """Some ranks are in a `join` block, and some are not: they have no pass in common."""
        text = some_in_join(status)
        self._fail(MismatchError(text, rank=self._rank))
        self._abort(text, wholly=True)

    # --- the end --------------------------------------------------------------------------------------------------

    def _leave_out(self, error: Exception) -> None:
        """Send no more, which the others would wait for: nobody can go on."""
        self._lose()
        self._abort(f"rank {self._rank} cannot send its gradients: {error}", wholly=False)
        self._fail(error)

    def _fail(self, error: BaseException, *, lost: bool = True) -> None:
        """Keep the first error; with `lost` one of the communicator means that nothing more can be sent."""
        self.error = error if self.error is None else self.error
        if lost and isinstance(error, AiodistError):
            self._lose()
        self._tell_failed(self.error)

    def _lose(self) -> None:
        self._next = len(self.sequence)
        if self.phase is Phase.AGREEING:
            self.phase = Phase.ENDING

    def _conclude(self) -> None:
        if self.phase is Phase.ENDING and not self._moving and not self._answers and self._next == len(self.sequence):
            self.phase = Phase.OVER
            if self.error is not None:
                self._tell_failed(self.error)
            self._end()
