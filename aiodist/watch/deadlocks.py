"""Stalled ranks report pending operations to one rank, which finds deadlocks and notifies all.

    stalled at two checks in a row -> report -> second question -> the same report -> the verdict

The judge is the first rank that has not left. The judge decides on its listener thread, so its program may compute
meanwhile. Reports may be from different times, so the judge asks all ranks of a deadlock again. If all report the same,
there was a time between the first answers and the second questions at which all ranks were in these states. See [Note:
no false alarm] in docs/design/watch.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from aiodist.communicator.facts import Facts
from aiodist.communicator.watchdog import Watch
from aiodist.control import Channel
from aiodist.errors import DeadlockError
from aiodist.handles.stacks import stack_of_task
from aiodist.handles.timers import Quiet
from aiodist.watch.graph import Lock, drawn, locked
from aiodist.watch.stillness import why_not_stalled

_TOPIC = "deadlocks"
_PAUSE_SECONDS = 1e-3  # before a check or a message, so that the other ranks of the loop can act
_ROUND_SECONDS = 1.0  # after this time, a rank without an answer is asked again
_STACKS = 4


class _Round(NamedTuple):
    """The judge's second question to the ranks of a deadlock."""

    number: int
    asked: float
    lock: Lock
    reports: Mapping[int, Facts]
    answers: dict[int, list[list[str]]]  # stacks of the ranks that reported the same again


class Deadlocks(Quiet):
    """One rank's part in the search for deadlocks."""

    def __init__(self, watch: Watch, channel: Channel) -> None:
        self._watch = watch
        self._channel = channel
        self._progress = watch.progress
        # On the loop's thread.
        self._issued = -1
        self._seen: Facts | None = None  # pending operations at the last check, or None if this rank was not stalled
        self._reported: tuple[int, Facts] | None = None  # the last report, with the judge
        self._asked = (0, 0)  # the asking judge, with the round
        self._outbox: list[tuple[int, list[Any]]] = []
        # On the listener thread.
        self._known: dict[int, Facts] = {}
        self._round: _Round | None = None
        self._rounds = 0
        watch.observers.append(self.look)
        channel.subscribe(_TOPIC, self._heard)

    # --- a waiting rank, on the loop's thread ----------------------------------------------------------------

    def look(self) -> None:
        """Report to the judge if this rank is stalled. Called while operations are pending."""
        before, self._issued = self._issued, sum(member.issued for member in self._watch.members.values())
        facts = self._facts() if self._issued == before else None  # skips the costly check for a running program
        judge = next(rank for rank in range(self._channel.size) if rank not in self._channel.exits())
        if facts is None or facts != self._seen:
            self._seen = facts
        elif self._reported != (judge, facts):
            self._reported = judge, facts
            self._send(judge, ["waits", 0, facts, []])

    def _facts(self) -> Facts | None:
        """Return the pending operations, or None if this rank may continue."""
        self._watch.report.may_continue = reason = why_not_stalled(self._progress, self._channel)
        found = [member.facts() for member in self._watch.members.values()]
        if None in found or reason:
            return None
        facts = [one for one in found if one is not None]
        return Facts([op for _, ops in facts for op in ops], [comm for comm, _ in facts])

    def _on_question(self, judge: int, number: int) -> None:
        # The last question is answered: `run_ranks` shuffles callbacks and messages.
        self._asked = judge, number if judge != self._asked[0] else max(number, self._asked[1])
        self._progress.loop.call_later(_PAUSE_SECONDS, self._answer)

    def _answer(self) -> None:
        judge, number = self._asked
        facts = self._facts()
        if facts is None:
            self._reported = None  # the rank reports again after its next stall
        stacks = [stack_of_task(task) for task in self._watch.tasks()]
        self._send(judge, ["answer", number, facts, [stack for stack in stacks if stack][:_STACKS]])

    def _send(self, rank: int, message: list[Any]) -> None:
        self._outbox.append((rank, message))
        self._progress.loop.call_later(_PAUSE_SECONDS, self._flush)

    def _flush(self) -> None:
        outbox, self._outbox = self._outbox, []
        for rank, message in outbox:
            with suppress(RuntimeError):  # the channel was closed
                self._channel.send(rank, _TOPIC, message)

    def _raise(self, text: str, cycle: list[int], comms: list[str]) -> None:
        """Abort `comms` and the communicators in which this rank waits, all with the same error."""
        for name, member in list(self._watch.members.items()):
            if member.pending or name in comms:
                member.abort(DeadlockError(text, cycle=tuple(cycle)))

    # --- the judge, on the listener thread -------------------------------------------------------------------

    def _heard(self, src: int, message: list[Any]) -> None:
        what, number, content, more = message
        if what == "again":
            self._progress.post(partial(self._on_question, src, number))
        elif what == "lock":
            if self._channel.rank in content:
                self._progress.post(partial(self._raise, *more))
        else:
            facts = None if content is None else Facts.read(content)
            if facts is None:
                self._known.pop(src, None)
            else:
                self._known[src] = facts
            if what == "waits":
                self._judge()
            elif self._round is not None and number == self._round.number:
                self._count_answer(self._round, src, facts, more)

    def _judge(self) -> None:
        """Ask the ranks of a deadlock again, unless the last question is recent."""
        exits = self._channel.exits()
        reports = {rank: facts for rank, facts in self._known.items() if rank not in exits}
        lock, now = locked(reports), self._progress.loop.time()
        if lock is None or (self._round and self._round.lock == lock and now < self._round.asked + _ROUND_SECONDS):
            return
        self._rounds += 1
        self._round = _Round(self._rounds, now, lock, reports, {})
        for rank in lock.waits:
            self._channel.send(rank, _TOPIC, ["again", self._rounds, None, None])

    def _count_answer(self, the_round: _Round, src: int, facts: Facts | None, stacks: list[list[str]]) -> None:
        if facts != the_round.reports[src]:
            self._round = None
            self._judge()
            return
        the_round.answers[src] = stacks
        if the_round.answers.keys() == the_round.lock.waits.keys():
            self._round = None
            text = "\n".join(drawn(the_round.lock, the_round.answers))
            comms = list(dict.fromkeys(wait.op.comm for waits in the_round.lock.waits.values() for wait in waits))
            message = ["lock", 0, [*the_round.lock.waits], [text, the_round.lock.cycle, comms]]
            self._channel.broadcast(_TOPIC, message)
            self._heard(self._channel.rank, message)
