"""The watchdog asks all ranks about a slow operation, so that reports and errors name the late ranks.

An operation that is pending at two checks in a row is published to the other ranks. A rank that has not issued the
operation answers with its last operation, and answers again at the issue. A rank that still waits after a second, or at
half of the nearest deadline, asks the others for their states, repeatedly with growing pauses. A healthy program sends
none of these messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from threading import get_ident, main_thread
from typing import Any
from weakref import WeakKeyDictionary, ref

from aiodist.collectives.mailbox import Mailbox
from aiodist.communicator.facts import CommFacts, PendingOp
from aiodist.communicator.holds import Holds
from aiodist.communicator.inquiry import Inquiry, Wait, Whereabouts
from aiodist.communicator.operation import Peer, Pending, Use
from aiodist.communicator.oplog import OpLog
from aiodist.communicator.report import StallReporter
from aiodist.control import Channel
from aiodist.errors import AiodistError
from aiodist.handles import Handle, Origin, Progress, internals
from aiodist.handles.deadline import SHORT_SECONDS, Scopes
from aiodist.handles.stacks import line_of_thread, lines_of_tasks
from aiodist.handles.timers import Quiet
from aiodist.types import ANY

_LOOK_SECONDS = 0.1  # between two checks
_ASK_SECONDS = 1.0
_LATEST_SECONDS = 0.8  # before a deadline: largest age of the answers in its error
_LONGEST_SECONDS = 10.0  # between two questions
_POLLED_SECONDS = 2.0  # after a call of `done()` the program counts as waiting
_SHOWN = 3
_RECENT = 32
_MOST_NAMES = 256


@dataclass
class _Stalled:
    """A slow operation, with times of the loop's clock."""

    since: float
    ends: float
    """Deadline of the operation."""
    waited: float = inf
    """Time since which the program waits for the operation, or inf without a wait."""
    published: bool = False
    asked: float = -inf
    polled: float = -inf
    """Time of the last call of `done()`."""

    def is_due(self, now: float, scopes: Mapping[Any, tuple[float, float]]) -> bool:
        """Return True if the other ranks should be asked for their states."""
        pause = _ASK_SECONDS
        if self.asked > -inf:
            pause = min(max(_ASK_SECONDS, self.asked - self.since), _LONGEST_SECONDS)
        if now >= max(self.since, self.asked) + pause:
            return True
        for began, ends in (*scopes.values(), (self.since, self.ends)):
            halfway = max(began, self.since) + (ends - max(began, self.since)) / 2
            if now < ends and any(now >= moment > self.asked for moment in (halfway, ends - _LATEST_SECONDS)):
                return True
        return False

    def note_wait(self, handle: Handle[Any], is_message: bool, now: float) -> None:
        """Record the time since which the program waits, which may be later than the post of a receive."""
        if internals.was_looked_at(handle):
            self.polled = now
        waits = internals.is_awaited(handle) or now - self.polled < _POLLED_SECONDS
        if not is_message:
            self.waited = self.since
        elif internals.is_detached(handle) or not waits:
            self.waited = inf
        elif self.waited == inf:
            self.waited = max(self.since, now - _LOOK_SECONDS)


class Watch(Quiet):
    """Checks the pending operations of one rank ten times a second, while there are any (loop's thread)."""

    def __init__(self, channel: Channel, progress: Progress) -> None:
        self.watching = False
        self.members: dict[str, Watchdog] = {}
        """Watchdogs of the communicators, by name."""
        self.on_look: list[Callable[[], object]] = []
        """Callbacks at each check, also at the last one without pending operations."""
        self.progress = progress
        self._thread_id = get_ident()
        self.scopes = Scopes.of(progress)
        self.scopes.watchers.add(self)
        self.inquiry = Inquiry(channel, progress, self._here)
        self.holds = Holds(channel)
        self.report = StallReporter(self.inquiry, self._ages, self.waits)
        self.observers: list[Callable[[], None]] = []
        """Callbacks at each check with pending operations."""
        task = asyncio.current_task()
        self._opener = None if task is None else ref(task)

    @classmethod
    def of(cls, progress: Progress, channel: Channel) -> Watch:
        """Return the watch of this rank, which lives as long as the communicators."""
        of_loop: dict[Channel, Watch] = progress.belongings.setdefault(cls, {})
        if channel not in of_loop:
            of_loop[channel] = cls(channel, progress)
        return of_loop[channel]

    def leave(self, name: str) -> None:
        """Stop checking a communicator."""
        if self.members.pop(name, None) is not None and not self.members:
            self.inquiry.close()
            self.holds.close()
            self.scopes.watchers.discard(self)
            self.progress.belongings[Watch].pop(self.inquiry.channel, None)

    def keep_watch(self) -> None:
        """Schedule the next check after an operation is pending (any thread)."""
        if self.watching:
            return
        self.watching = True
        self.progress.on_loop(partial(self.progress.loop.call_later, _LOOK_SECONDS, self._look))

    def hurry(self) -> None:
        """Publish and ask now, since a deadline is near."""
        for member in list(self.members.values()):
            member.look(self.inquiry.now(), hurry=True)

    def _look(self) -> None:
        self.watching = False  # before the check: other threads add an operation first, then read this flag
        for call in self.on_look:
            call()
        if not any(member.pending or member.requests for member in self.members.values()):
            return
        self.keep_watch()
        self.progress.stir()
        now = self.inquiry.now()
        for member in list(self.members.values()):
            member.look(now)
        self.report.look(now)
        for look in self.observers:
            look()

    def _ages(self) -> list[float]:
        return [age for member in list(self.members.values()) for age in member.ages()]

    def waits(self) -> list[Wait]:
        """Return the waits of this rank (any thread)."""
        return [wait for member in list(self.members.values()) for wait in member.waits(self.report.covered)]

    def here(self) -> str:
        """Return the state of this rank as text (loop's thread)."""
        return self._here("", True).text(loop_answers=None)

    def _here(self, comm: str, on_loop: bool) -> Whereabouts:
        """Return the state of this rank for another rank."""
        lines = lines_of_tasks(self.tasks()) if on_loop else [line_of_thread(self._thread_id)]
        if on_loop and not lines and (main := main_thread().ident) not in (None, self._thread_id):
            lines = [line_of_thread(main)]  # a script with its loop in the background
        return Whereabouts(self._last(comm), lines, self.waits())

    def _last(self, comm: str) -> str:
        """Return this rank's last operation on one communicator, or on each, as text."""
        if (member := self.members.get(comm)) is not None:
            return member.last()
        parts = [f"communicator {comm!r} is not open there"] if comm else []
        active = [(name, member) for name, member in list(self.members.items()) if member.has_issued]
        parts += [f"{member.last()}{'' if member.is_inner else f' on {name!r}'}" for name, member in active[:_SHOWN]]
        return "; ".join(dict.fromkeys(parts) if active else [*parts, "has issued nothing yet"])

    def tasks(self) -> Iterator[asyncio.Task[Any]]:
        """Yield the tasks of this rank: first the opening task, then all others if the loop has no other rank."""
        opener = None if self._opener is None else self._opener()
        if opener is not None and not opener.done():
            yield opener
        if len(self.progress.belongings[Watch]) == 1:
            yield from (task for task in asyncio.all_tasks(self.progress.loop) if task is not opener)


class Watchdog:
    """Watches the pending operations of one communicator, and finds the ranks that block them (loop's thread)."""

    def __init__(
        self,
        name: str,
        pending: Pending,
        oplog: OpLog,
        ranks: Sequence[int],
        mailbox: Mailbox,
        watch: Watch,
        uses: Callable[[], Mapping[str, int]],
    ) -> None:
        """The dispatcher changes `pending`. `ranks` are the world ranks of the communicator's ranks.

        `uses` returns the number of uses of each name on this rank.
        """
        self.pending = pending
        self.watch = watch
        self.messages = 0
        """Number of issued messages."""
        self.on_receive: Callable[[Handle[Any], int], None] | None = None
        """Function called with the handle and the source of each issued receive from one rank, or None."""
        self.mailbox = mailbox
        self.serves = False
        """True if this rank also exchanges messages outside of operations, as a parameter server does."""
        self.requests: list[tuple[Wait, float]] = []
        """Waits of calls to a parameter server, and of requests that wait here, each with its start in loop time."""
        self.abort: Callable[[AiodistError], None] = lambda _: None
        """Function that aborts the communicator on all ranks."""
        self._last_use: Use | None = None
        self._uses = uses
        self._name = name
        self._topic = f"watchdog:{name}"
        self._oplog = oplog
        self._ranks = ranks
        self._inquiry = watch.inquiry
        self._rank = ranks.index(self._inquiry.channel.rank)
        self._reached = dict.fromkeys((rank for rank in range(len(ranks)) if rank != self._rank), 0)
        """Least number of collectives that each other rank has issued."""
        self._old: set[tuple[int, int]] = set()
        """Ids and numbers of handles pending at the last check. References would keep their tensors alive."""
        self._stalled: WeakKeyDictionary[Handle[Any], _Stalled] = WeakKeyDictionary()
        self._asked: dict[tuple[str, int], set[int]] = {}
        """Ranks that wait for this rank, by name and number of uses (see the comment on the conversation)."""
        watch.members[name] = self
        self._inquiry.channel.subscribe(self._topic, self._heard)

    def close(self) -> None:
        """Stop watching, since the communicator is aborted or closed."""
        if self.watch.members.get(self._name) is self:
            self.watch.leave(self._name)
            with suppress(RuntimeError):  # the channel is closed
                self._inquiry.channel.unsubscribe(self._topic)

    def expect(self, seconds: float) -> None:
        """Find the late ranks before the deadline of a new operation, in `seconds`."""
        if seconds < SHORT_SECONDS:
            progress = self.watch.progress
            progress.on_loop(partial(progress.loop.call_later, seconds / 2, self.watch.hurry))

    # --- checking ------------------------------------------------------------------------------------------

    def look(self, now: float, *, hurry: bool = False) -> None:
        """Publish stalled operations, and ask about long waits. True for `hurry` includes all pending operations."""
        pending = list(self.pending)
        old = [handle for handle in pending if hurry or (id(handle), handle.seq) in self._old]
        self._old = {(id(handle), handle.seq) for handle in pending}
        asked: dict[int, None] = {}
        for handle in old:
            if handle not in self._stalled and internals.is_pending(handle):
                left = internals.seconds_left(handle)
                self._stalled[handle] = _Stalled(now - _LOOK_SECONDS * (not hurry), inf if left is None else now + left)
        watched = self._watched(old)
        self._publish(watched)
        for handle in watched:
            stalled = self._stalled.get(handle)
            if stalled is None:
                continue
            stalled.note_wait(handle, isinstance(self.pending.get(handle), Peer), now)
            if hurry or stalled.is_due(now, self.watch.scopes.ends):
                stalled.asked = now
                asked.update(dict.fromkeys(self._missing(handle)))
                if not asked and not isinstance(self.pending.get(handle), Peer):
                    asked.update(dict.fromkeys(self._reached))
        self._inquiry.ask([self._ranks[rank] for rank in asked], self._name)

    def _publish(self, handles: Sequence[Handle[Any]]) -> None:
        """Notify the other ranks of slow collectives, once of each."""
        for handle in handles:
            stalled, meets = self._stalled.get(handle), self.pending.get(handle)
            if stalled is None or stalled.published:
                continue
            stalled.published = True
            if isinstance(meets, Use):
                self._send(list(self._reached), "stalled", meets.name, meets.count + 1)
            elif meets is True:
                self._send(list(self._reached), "stalled", "", handle.seq + 1)

    def _watched(self, handles: Sequence[Handle[Any]]) -> list[Handle[Any]]:
        """Return the first collective, which the later ones wait for, and the operations without an order.

        These are named operations, and messages except detached ones.
        """
        collective = next((handle for handle in handles if self.pending.get(handle) is True), None)
        unordered = [
            h
            for h in handles
            if isinstance(meets := self.pending.get(h), Use)
            or (isinstance(meets, Peer) and not (internals.is_detached(h) and internals.seconds_left(h) is None))
        ]
        return [*([] if collective is None else [collective]), *unordered]

    def _missing(self, handle: Handle[Any]) -> list[int]:
        """Return the ranks that have not issued the collective or the other end of the message."""
        what = self.pending.get(handle)
        if isinstance(what, Peer):
            if self._message_of(handle) is not None:  # matched, so the receive waits for its bytes, not for a call
                return []
            ends = [end for end in (what.src, what.dst) if end is not None]
            return list(self._reached) if ANY in ends else [end for end in dict.fromkeys(ends) if end in self._reached]
        if isinstance(what, Use):
            return [rank for rank in self._reached if rank not in what.came]
        return [rank for rank, reached in self._reached.items() if what and reached <= handle.seq]

    # --- queries -------------------------------------------------------------------------------------------

    def late(self, handle: Handle[Any]) -> dict[int, str]:
        """Return the ranks for which the pending operation of `handle` is known to wait, each with its state."""
        if self.watch.members.get(self._name) is not self or (since := self._since(handle)) is None:
            return {}
        missing = self._missing(handle)
        if not missing and not isinstance(self.pending.get(handle), Peer):  # all have issued: one may be stopped
            missing = [rank for rank in self._reached if self._inquiry.is_silent(self._ranks[rank])]
        texts = {rank: self._inquiry.text(self._ranks[rank], since) for rank in missing}
        return {rank: text for rank, text in texts.items() if text is not None}

    def details(self, handle: Handle[Any]) -> str:
        """Return other reasons why the operation of `handle` is pending, or "" if there are none."""
        what = self.pending.get(handle)
        if not isinstance(what, Peer):
            return ""
        if what.src is None:
            return f"the message goes {what}"
        came = [what for _, _, what in self.mailbox.leftovers()]
        more = f" and {len(came) - 8} more" if len(came) > 8 else ""
        arrived = f"; arrived unmatched: {', '.join(came[:8])}{more}" if came else ""
        return f"it waits for a message {Peer(what.src, None, what.tag)}{arrived}"

    @property
    def issued(self) -> int:
        """Number of operations that this rank has issued here, except named ones."""
        return self._oplog.seq + self.messages

    @property
    def has_issued(self) -> bool:
        """True if this rank has issued an operation here."""
        return self.issued > 0 or self._last_use is not None

    @property
    def is_inner(self) -> bool:
        """True if this rank's last operation here is a part of a user's call such as "net.step"."""
        return (last := self._oplog.last()) is not None and bool(last.call)

    def last(self) -> str:
        """Return the last operation of this rank as text (any thread)."""
        last, use = self._oplog.last(), self._last_use
        after = []
        if last is not None:
            after.append(f"after {f'{last.call} at {Origin(*last.origin)}' if last.call else last.text()}")
        after += [] if use is None else [f"by name after {use.name!r}, {use.text()}"]
        return ", ".join(after) or ("has issued no collective yet" if self.has_issued else "has issued nothing yet")

    def as_json(self) -> dict[str, Any]:
        """Return the waiting ranks, with the last operations of this rank, as values of JSON (any thread)."""
        seq = self._oplog.seq
        records = (self._oplog.find(number) for number in range(max(0, seq - _RECENT), seq))
        pending = {h.seq for h, meets in self.pending.items() if meets is True and internals.is_pending(h)}
        operations = [record.as_json(pending=record.seq in pending) for record in records if record is not None]
        return {"ranks": list(self._ranks), "last": self.last(), "operations": operations}

    def ages(self) -> list[float]:
        """Return the ages, in seconds, of this rank's waits in slow operations."""
        now = self._inquiry.now()
        stalled = (self._stalled.get(handle) for handle in list(self.pending))
        ages = [now - each.waited for each in stalled if each is not None and each.waited < inf]
        return ages + [now - since for _, since in self.requests]

    def waits(self, covered: float) -> list[Wait]:
        """Return the waits of this rank, first the earliest ones after the time `covered` (any thread)."""
        now = self._inquiry.now()
        found = []
        for handle in self._watched([handle for handle in list(self.pending) if internals.is_pending(handle)]):
            stalled = self._stalled.get(handle)
            if stalled is not None and stalled.waited < inf:
                found.append((handle, stalled.waited))
            elif not isinstance(self.pending.get(handle), Peer) or internals.is_awaited(handle):
                found.append((handle, now))
        collectives = [each for each in found if self.pending.get(each[0]) is True]
        others: list[tuple[Handle[Any] | Wait, float]] = [*(e for e in found if e not in collectives), *self.requests]
        others.sort(key=lambda each: (each[1] <= covered, abs(each[1] - covered)))
        return [self._wait(what, now - since) for what, since in (*collectives, *others[:_SHOWN])]

    def _wait(self, handle: Handle[Any] | Wait, seconds: float) -> Wait:
        if isinstance(handle, Wait):
            return handle._replace(seconds=round(seconds, 1))
        what = self.pending.get(handle)
        whom = [self._ranks[rank] for rank in self._missing(handle)] if seconds >= _LOOK_SECONDS else []
        nbytes = self._message_of(handle) if isinstance(what, Peer) else None
        in_flight = "" if nbytes is None else f": its message of {nbytes} bytes is in flight"
        return Wait(f"{self._text(handle, what)}{in_flight}", round(seconds, 1), whom)

    def _message_of(self, handle: Handle[Any]) -> int | None:
        """Return the bytes of the matched message of a receive, which is in flight, or None for other operations."""
        taking = self.mailbox.taking.copy()
        return next((nbytes for wanted, nbytes in taking.items() if wanted.handle is handle), None)

    def _text(self, handle: Handle[Any], meets: bool | Peer | Use | None) -> str:
        """Return the text of a pending operation for reports, or of the user's call that the operation is a part of."""
        if call := self._call(handle):
            return f"{call} issued at {handle.origin}"
        return f"{handle}{f' {meets}' if isinstance(meets, Peer) else ''} on {self._name!r}"

    def _call(self, handle: Handle[Any]) -> str:
        return self._oplog.calls.get(internals.issued_at(handle), "") if self._oplog.calls else ""

    def facts(self) -> tuple[CommFacts, list[PendingOp]] | None:
        """Return the facts for the search for deadlocks, or None if an operation may end without the other ranks."""
        pending = [(handle, meets) for handle, meets in self.pending.items() if internals.is_pending(handle)]
        receives = sum(isinstance(meets, Peer) and meets.src is not None for _, meets in pending)
        sends = [meets for _, meets in pending if isinstance(meets, Peer) and meets.src is None]
        uses, mailbox = self._uses(), self.mailbox
        if self.serves or len(uses) > _MOST_NAMES:
            return None
        # A message is in flight, or a send may end before another rank receives it.
        if receives != len(mailbox.wanted) or not all(s.answered or s.kept for s in sends):
            return None
        if len(sends) != mailbox.unanswered + mailbox.kept:
            return None
        world = self._ranks
        counts = mailbox.sent, mailbox.heard, mailbox.kept_sent, mailbox.kept_matched
        sent, heard, kept, matched = ([[world[rank], n] for rank, n in sorted(of.items())] for of in counts)
        names = [[name, count] for name, count in uses.items()]
        comm = CommFacts(self._name, [*world], self._oplog.seq, names, sent, heard, self.messages, kept, matched)
        return comm, [self._op(handle, meets) for handle, meets in pending]

    def _op(self, handle: Handle[Any], meets: bool | Peer | Use) -> PendingOp:
        number, name, peers, kept = handle.seq, "", list[int](), False
        if isinstance(meets, Use):
            number, name = meets.count, meets.name
        elif isinstance(meets, Peer):
            end = meets.dst if meets.src is None else meets.src
            peers = [*self._ranks] if end == ANY or end is None else [self._ranks[end]]
            kept = meets.kept
        return PendingOp(self._name, self._text(handle, meets), number, name, peers, self._call(handle), kept)

    def _since(self, handle: Handle[Any]) -> float | None:
        """Return the time since which the operation, or for a collective the first pending one, is slow, or None."""
        stalled = self._stalled.get(handle)
        if self.pending.get(handle) is True:
            first = next((h for h in list(self.pending) if self.pending.get(h) is True), handle)
            stalled = self._stalled.get(first, stalled)
        return None if stalled is None else stalled.since

    # --- the conversation ----------------------------------------------------------------------------------
    # Messages are about the uses of a name. The name "" means all collectives without a name.

    def _issued(self, name: str) -> int:
        """Return the number of uses of `name` that this rank has issued."""
        return self._uses().get(name, 0) if name else self._oplog.seq

    def _send(self, ranks: Sequence[int], what: str, name: str, issued: int, last: str = "") -> None:
        """Send `ranks` the number of uses of `name` that this rank has issued. For "stalled" the receiver answers."""
        for rank in ranks:
            self._inquiry.channel.send(self._ranks[rank], self._topic, [what, name, issued, last])

    def _heard(self, world_rank: int, message: list[Any]) -> None:
        """Handle a message (listener thread)."""
        what, name, issued, last = message
        src = self._ranks.index(world_rank)
        self._record_issued(src, name, issued)
        if last:
            self._inquiry.hint(world_rank, last)
        if what == "stalled":
            late = issued > self._issued(name)
            self._send([src], "reached", name, self._issued(name), self.last() if late and not name else "")
            if late:
                self._notify_later(src, name, issued)

    def _record_issued(self, src: int, name: str, issued: int) -> None:
        """Record that rank `src` has issued this number of uses of `name`."""
        if not name:
            self._reached[src] = max(self._reached[src], issued)
            return
        for meets in [one.meets for one in self.pending.others.copy().values()]:
            if isinstance(meets, Use) and meets.name == name and meets.count < issued:
                meets.came.add(src)

    def _notify_later(self, src: int, name: str, issued: int) -> None:
        """Notify rank `src` when this rank has issued this number of uses of `name`."""
        self._asked.setdefault((name, issued), set()).add(src)
        if not name:
            self._oplog.awaited[issued - 1] = partial(self._notify, name, issued)
        if issued <= self._issued(name):  # issued meanwhile on the loop's thread, perhaps without a notice to this rank
            self._send([src], "reached", name, issued)
            self._notify(name, issued)

    def use_issued(self, use: Use) -> None:
        """Notify the ranks that wait for `use`, which this rank has issued."""
        self._last_use = use
        if self._asked:
            self._notify(use.name, use.count + 1)

    def _notify(self, name: str, issued: int) -> None:
        """Notify the ranks that wait for this issue (any thread)."""
        if not name:
            self._oplog.awaited.pop(issued - 1, None)  # an entry slows every record down
        self._send(list(self._asked.pop((name, issued), ())), "reached", name, issued)
