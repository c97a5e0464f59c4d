"""Messages that settle an operation on which ranks disagree, or that failed on one rank.

They show each other what they called, so that each can raise an error with all sides; what was sent for it is taken off
the wire, and the communicator goes on. After `_MOST_IN_A_ROW` numbers in a row each rank gives it up by itself.
Everything here runs on the loop's thread, but `begin`, which runs where the gate does, and `_heard`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from aiodist.backends.base import NAMED, Transport
from aiodist.collectives.traffic import Traffic
from aiodist.communicator.operation import CommunicatorOperation, When
from aiodist.communicator.oplog import LEFT, Latest
from aiodist.control import Channel, ChannelClosed, name_ranks
from aiodist.errors import AiodistError, CommunicatorAborted, MismatchError, RemoteError
from aiodist.handles import Progress

_SIDES_SECONDS = 0.5  # how long the other ranks have to show what they issued
_MOST_IN_A_ROW = 3


class Judge(Protocol):
    """Answers for the operations of a communicator; all of it on the loop's thread."""

    def called(self, number: int) -> str:
        """Return what messages call operation `number`."""

    def text(self, number: int) -> str:
        """Return what this rank issued as operation `number`, and where."""

    def has_issued(self, number: int) -> bool:
        """Return whether this rank has issued operation `number`."""

    def reject(self, seq: int, error: AiodistError) -> None:
        """Operation `seq` failed, if it is still pending."""

    def doubt(self, seq: int) -> None:
        """Ranks differ on operation `seq`, as one of them found: do not wait until this one finds it too."""

    def refuse(self, seq: int, error: AiodistError | None) -> Traffic | None:
        """Have operation `seq` send and ask for nothing more; return what it has, None where none left this host.

        With `error` it failed on another rank: reject it, or where it cannot be stopped give the communicator up.
        """

    def cleared(self, number: int) -> None:
        """All ranks have told what they had sent for operation `number`, which failed, and nothing of it is left."""

    def abort(self, error: AiodistError) -> None:
        """The communicator is given up."""

    def undisturbed(self) -> AbstractContextManager[object]:
        """Have no thread issue meanwhile."""


@dataclass
class _Dispute:
    """An operation that ranks differ on, as this rank knows it."""

    operation: CommunicatorOperation
    sides: dict[int, str]
    """What each rank issued."""
    over: bool = False


@dataclass
class _Stopped:
    """An operation that failed on some rank."""

    traffic: Traffic | None
    """What this rank had on the wire."""
    told: set[int] = field(default_factory=set)
    """The other ranks that have said what they had there."""


class Disputes:
    """One rank's part in the disputes of one communicator."""

    def __init__(
        self,
        name: str,
        channel: Channel,
        ranks: Sequence[int],
        transport: Transport,
        judge: Judge,
        progress: Progress,
    ) -> None:
        """`ranks` are the world ranks of the communicator's, in order."""
        self.to_fail: Latest[AiodistError] = Latest()
        """Operations that failed on another rank before this one issued them."""
        self._stopped: Latest[_Stopped] = Latest()
        self._name = name
        self._topic = f"disputes:{name}"
        self._channel = channel
        self._ranks = list(ranks)
        self._rank = self._ranks.index(channel.rank)
        self._transport = transport
        self._judge = judge
        self._progress = progress
        self._open: Latest[_Dispute] = Latest()
        self._early: Latest[list[tuple[int, list[Any]]]] = Latest()
        """What others showed of operations that this rank does not know to be disputed yet."""
        self._early_stops: Latest[list[tuple[int, list[Any]]]] = Latest()
        """The same of operations that failed there."""
        channel.subscribe(self._topic, self._heard)

    def close(self) -> None:
        """Listen no more."""
        self._channel.unsubscribe(self._topic)

    # --- what this rank finds -----------------------------------------------------------------------------------

    def begin(self, operation: CommunicatorOperation) -> None:
        """Ranks differ on `operation`: send the others this rank's side, even if its loop is busy."""
        seq, mine = operation.number, self._judge.text(operation.number)
        for rank in self._others():
            self.send(rank, "side", seq, [mine, *_lists(operation.traffic, rank)])
        self._progress.post(partial(self._opened, operation, mine))

    def _opened(self, operation: CommunicatorOperation, mine: str) -> None:
        seq = operation.number
        self._open[seq] = _Dispute(operation, {self._rank: mine})
        self._progress.loop.call_later(_SIDES_SECONDS, self._conclude, seq)
        for src, payload in self._early.pop(seq, []):
            self._take_side(src, seq, payload)

    def tell_failed(self, seq: int, error: BaseException) -> None:
        """Operation `seq` failed on this rank, and only here as far as it knows: have the others stop it."""
        self._refuse(seq, f"rank {self._rank}'s part failed: {type(error).__name__}: {error}", None)

    def refuse(self, seq: int) -> AiodistError | None:
        """Return why operation `seq`, which is about to enter, failed on another rank already; None if it did not."""
        error = self.to_fail.pop(seq, None)
        if error is not None:
            self._progress.post(partial(self._refuse, seq, str(error.args[0]), None))
        return error

    def _refuse(self, seq: int, text: str, error: AiodistError | None) -> None:
        """Tell every other rank what this one has sent for `seq`, and asked for, and take the rest off the wire."""
        if seq in self._stopped:
            return
        stopped = self._stopped[seq] = _Stopped(self._judge.refuse(seq, error))
        for rank in self._others():
            self.send(rank, "stop", seq, [text, *_lists(stopped.traffic, rank)])
        for src, (_, sent, asked) in self._early_stops.pop(seq, []):
            self._clear_stopped(src, seq, sent, asked)

    def tell_abort(self, text: str, *, differ: bool = False) -> None:
        """Tell every other rank that this one gave the communicator up, and whether since ranks `differ`."""
        with suppress(ChannelClosed):  # the world is closed, which told them
            for rank in self._others():
                self.send(rank, "abort", 0, [text, differ])

    # --- what it hears --------------------------------------------------------------------------------------------

    def _heard(self, world_rank: int, message: list[Any]) -> None:
        """On the listener thread."""
        self._progress.post(partial(self._take_undisturbed, self._ranks.index(world_rank), *message))

    def _take_undisturbed(self, src: int, what: str, seq: int, payload: list[Any]) -> None:
        """Whether this rank has issued operation `seq` or is still to must not change meanwhile."""
        with self._judge.undisturbed():
            self._take(src, what, seq, payload)

    def _take(self, src: int, what: str, seq: int, payload: list[Any]) -> None:
        if what == "abort":
            text, differ = payload
            self._judge.abort(MismatchError(text) if differ else CommunicatorAborted(text))
        elif what == "stop":
            self._take_stop(src, seq, payload)
        elif seq in self._open:
            self._take_side(src, seq, payload)
        else:
            self._early[seq] = [*self._early.get(seq, []), (src, payload)]
            if self._judge.has_issued(seq):
                self._judge.doubt(seq)

    def _take_side(self, src: int, seq: int, payload: list[Any]) -> None:
        dispute = self._open[seq]
        text, sent, asked = payload
        if not dispute.over:
            dispute.sides[src] = text
        self._clear(dispute.operation.traffic, src, sent, asked)
        if len(dispute.sides) == len(self._ranks):
            self._conclude(seq)

    def _take_stop(self, src: int, seq: int, payload: list[Any]) -> None:
        text, sent, asked = payload
        if seq in self._stopped:
            self._judge.refuse(seq, None)  # it may have begun a step there before it heard of this
            self._clear_stopped(src, seq, sent, asked)
            return
        self._early_stops[seq] = [*self._early_stops.get(seq, []), (src, payload)]
        error = RemoteError(f"{self._judge.called(seq)}: {text}", raised_by=src, comm=self._name)
        if self._judge.has_issued(seq):
            self._refuse(seq, text, error)
        else:
            self.to_fail[seq] = self.to_fail.get(seq, error)

    def _clear_stopped(self, src: int, seq: int, sent: list[Any], asked: list[Any]) -> None:
        stopped = self._stopped[seq]
        self._clear(stopped.traffic, src, sent, asked)
        stopped.told.add(src)
        if len(stopped.told) == len(self._ranks) - 1:
            self._judge.cleared(seq)

    def _clear(self, traffic: Traffic | None, src: int, sent: list[Any], asked: list[Any]) -> None:
        if sent or asked:
            met = traffic or Traffic()  # what went by a library sends nothing before all agree
            self._progress.start(partial(met.clear, self._transport, src, dict(sent), dict(asked)))

    # --- verdicts -------------------------------------------------------------------------------------------------

    def _conclude(self, seq: int) -> None:
        dispute = self._open.get(seq)
        if dispute is None or dispute.over:
            return
        dispute.over = True
        since = ""
        if seq < NAMED:
            first = self._first_of(seq)
            since = "" if first == seq else f" (out of step since #{first})"
        unspecified = dispute.operation.traffic is not None and dispute.operation.admitted.error is None
        data = "; what the operation was to fill is unspecified" if unspecified else ""
        what = f"{self._judge.called(seq)}{since}"
        error = MismatchError(f"ranks disagree on {what}: {_sides(dispute.sides)}{data}")
        if self._is_third(seq):  # as each rank finds by itself
            self._judge.abort(error)
        elif dispute.operation.when is When.NOW:
            self._judge.abort(error)
            self.tell_abort(str(error), differ=True)
        else:
            self._judge.reject(seq, error)

    def _is_third(self, seq: int) -> bool:
        """Return whether so many in a row have differed that the ranks are out of step; named ones are in no row."""
        first, end = self._first_of(seq), seq + 1
        while self._is_over(end):
            end += 1
        return seq < NAMED and end - first >= _MOST_IN_A_ROW

    def _first_of(self, seq: int) -> int:
        """Return the first of the operations in a row, up to `seq`, on which ranks have differed."""
        while self._is_over(seq - 1):
            seq -= 1
        return seq

    def _is_over(self, seq: int) -> bool:
        dispute = self._open.get(seq)
        return dispute is not None and dispute.over

    def _others(self) -> list[int]:
        return [rank for rank in range(len(self._ranks)) if rank != self._rank]

    def send(self, rank: int, what: str, seq: int, payload: list[Any]) -> None:
        """Tell `rank` something about operation `seq`."""
        self._channel.send(self._ranks[rank], self._topic, [what, seq, payload])


def _lists(traffic: Traffic | None, rank: int) -> list[list[tuple[int, list[int]]]]:
    """Return what `traffic` has sent to `rank` and asked of it, as it travels."""
    return [[], []] if traffic is None else [list(lists.items()) for lists in traffic.with_rank(rank)]


def _sides(texts: dict[int, str]) -> str:
    """Return what each rank issued; ranks that issued the same at the same line are named together."""
    by_text: dict[str, list[int]] = {}
    for rank, text in sorted(texts.items()):
        by_text.setdefault(text, []).append(rank)
    differ = ", edited in different ways" if len(by_text) == 1 else ""  # what a table holds no text says
    said = {text: f": {text}{differ}" for text in by_text}
    if LEFT in by_text:
        said[LEFT] = f" {LEFT if len(by_text[LEFT]) == 1 else 'have left'}"
    return "; ".join(f"{name_ranks(ranks)}{said[text]}" for text, ranks in by_text.items())
