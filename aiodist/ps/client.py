"""The client of one rank: its pushes and pulls, and its calls, which servers answer.

A call is a step of a program, in JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from aiodist.backends.base import DTYPES, Done
from aiodist.errors import AiodistError, CheckpointDamaged, MismatchError, PeerLost, RemoteError
from aiodist.handles import Handle, Operation, internals
from aiodist.handles.kernel import Transfer, together, transfer, transfers
from aiodist.ps.answers import Freed
from aiodist.ps.coalescer import Handler
from aiodist.ps.context import Context
from aiodist.ps.encoding import Codes
from aiodist.ps.names import NameEntry
from aiodist.ps.requests import RequestQueue
from aiodist.ps.settings import Span
from aiodist.ps.traffic import Pulls, Pushes
from aiodist.ps.wire import Kind

_Said = dict[str, Any]


class _Asked(NamedTuple):
    """A call that waits for its answer."""

    op: str
    answers: list[_Said]
    """List that gets the answer."""
    done: Done


class Client:
    """The client of one rank. Handlers of entries run with the transport lock held."""

    def __init__(self, context: Context, first: int = 1) -> None:
        """`first` is the number of the first request."""
        self._context = context
        self.queue = RequestQueue(context, self.lose, first)
        self.codes = Codes(context)
        self.pushes = Pushes(self.queue, self.codes)
        self.pulls = Pulls(self.queue, self.codes)
        self.programs: set[Handle[Any]] = set()
        """Handles of the programs that run."""
        self._asked: dict[tuple[int, int], _Asked] = {}
        """Calls that wait, by server and number."""
        self.handlers: dict[int, Handler] = {
            Kind.ANSWER: self._answer,
            Kind.DONE: self.pushes.done,
            Kind.DATA: self.pulls.data,
        }
        """Functions that handle the entries from servers, by kind."""

    @property
    def busy(self) -> bool:
        """True while a request is open."""
        return bool(self.programs or self.pushes.numbers() or self.pulls.numbers())

    def oldest(self) -> int | None:
        """Return the number of the oldest open request, or None."""
        numbers = [*self.pushes.numbers(), *self.pulls.numbers(), *(number for _, number in list(self._asked))]
        return min(numbers, default=None)

    def late(self) -> dict[int, str]:
        """Return the servers that have not answered, each with an open request."""
        calls = {rank: asked.op for (rank, _), asked in self._asked.copy().items()}  # a list of items is not atomic
        return calls | self.pulls.late() | self.pushes.late()

    def waits(self) -> dict[Handle[Any], set[int]]:
        """Return the calls that wait, each with the servers. A rank that leaves may wait for long (any thread)."""
        asked = {rank for rank, _ in list(self._asked)}
        programs = [(handle, asked) for handle in list(self.programs) if handle.op not in ("leave", "ping")]
        waits: dict[Handle[Any], set[int]] = {}
        for handle, servers in (*self.pushes.waits(), *self.pulls.waits(), *programs):
            if internals.is_pending(handle):
                waits[handle] = waits.get(handle, set()) | servers
        return waits

    async def call(self, dst: int, op: str, **said: Any) -> _Said:  # noqa: ANN401
        """Ask server `dst`, in a program, and return its answer."""
        answers: list[_Said] = []
        await transfers([self.asking(dst, answers, op, **said)])
        return answers[0]

    async def asking_all(self, op: str) -> None:
        """Ask all servers that are not lost."""
        for rank in self._context.living():
            await self.ask_living(rank, op)

    async def ask_living(self, rank: int, op: str) -> bool:
        """Ask a server. Return False if the server is lost."""
        try:
            await self.call(rank, op)
        except PeerLost:
            return False
        return True

    async def pinging(self, ranks: Iterable[int]) -> None:
        """Ask ranks for an answer after the arrival of the data that this rank has sent, and wait for their data.

        Without an end of this program, a frame or data message is lost, or a rank does not answer.
        """
        await together(*[self._ping(rank) for rank in ranks if rank not in self._context.gone])

    async def _ping(self, rank: int) -> None:
        coalescer = self._context.coalescer
        with suppress(PeerLost):
            said = await self.call(rank, "ping", sent=coalescer.ended_sends(rank))
            await transfer(coalescer.when_received, rank, said["sent"])

    def asking(self, dst: int, answers: list[_Said], op: str, **said: Any) -> Transfer:  # noqa: ANN401
        """Return the transfer that asks server `dst`, and adds its answer to `answers`."""
        return self._ask, dst, next(self.queue.numbers), {"op": op, **said}, answers

    async def meeting(self) -> None:
        """Meet the other workers at all servers. Raises PeerLost if the first server is lost."""
        number = next(self.queue.numbers)

        def ask(dst: int, done: Done) -> None:
            def answered(error: BaseException | None) -> None:
                done(None if isinstance(error, PeerLost) and dst != self._context.servers[0] else error)

            self._ask(dst, number, {"op": "barrier"}, [], answered)

        await transfers([(ask, rank) for rank in self._context.servers])
        if (error := self.pushes.late_error()) is not None:
            raise error

    async def configuring(self, entry: NameEntry, settings: dict[str, float]) -> None:
        """Change settings of a tensor's rule, on all of its shards, as one request."""
        number = next(self.queue.numbers)
        said = {"op": "configure", "key": entry.key, "settings": settings}
        await transfers([(self._ask, rank, number, said, []) for rank in entry.servers])

    async def making(self, entry: NameEntry, spans: Sequence[Span]) -> None:
        """Make the shards of a name on some of its servers."""
        said = {
            "key": entry.key,
            "name": entry.name,
            "dtype": DTYPES.index(entry.dtype),
            "shape": entry.shape,
            "spans": [list(span) for span in entry.spans],
            "rule": entry.rule_number,
            "codec": entry.codec is not None,
            "table": None if entry.table is None else entry.table.said,
        }
        await transfers([self.asking(span.rank, [], "make", numel=span.stop - span.start, **said) for span in spans])

    def _ask(self, dst: int, number: int, said: _Said, answers: list[_Said], done: Done) -> None:
        if self._context.refusal is not None or dst in self._context.gone:
            done(self._context.refusal or self._context.lost(dst))
            return
        self._asked[(dst, number)] = _Asked(said["op"], answers, done)
        self.say(dst, {**said, "n": number})
        self._context.coalescer.flush()

    def say(self, dst: int, said: _Said) -> None:
        """Send server `dst` a call without an answer, with the next `flush`."""
        self._context.put_json(dst, Kind.CALL, said, request=True)

    def when_over(self, entry: NameEntry, done: Done) -> None:
        """Call `done` after the end of all pushes and pulls of a tensor, and drop the tensor's codes and log."""

        def over() -> None:
            self.codes.forget(entry)
            if self._context.log is not None:
                self._context.log.forget(entry.name)
            done(None)

        entry.when_over(over)

    def _answer(self, src: int, body: memoryview) -> None:
        said = json.loads(bytes(body))
        error = _error_of(said, src)
        if (asked := self._asked.pop((src, said["n"]), None)) is not None:
            asked.answers.append(said)
            asked.done(error)
        elif error is not None and not self.pushes.refuse(said["n"], error):
            self.pulls.over(said["n"], src, error)

    def lose(self, rank: int) -> None:
        """End the requests that wait for a lost server."""
        error = self._context.lost(rank)
        self.pushes.lose(rank, error)
        self.pulls.lose(rank, error)
        for key in [key for key in self._asked if key[0] == rank]:
            self._asked.pop(key).done(error)

    def abort(self, error: AiodistError) -> None:
        """End all requests and programs."""
        self._context.refusal = error  # also for calls and syncs that wait for the holder of the lock
        self.pushes.abort(error)
        self.pulls.abort(error)
        asked, self._asked = self._asked, {}
        for call in asked.values():
            call.done(error)
        for handle in list(self.programs):  # also those that have not begun
            if (operation := Operation.of(handle)).is_pending:
                operation.reject(error)


def _error_of(said: _Said, src: int) -> BaseException | None:
    """Return the error of a server's answer, or None."""
    if "error" not in said:
        return None
    text = f"{said['error']}"
    if "lost" in said:
        return PeerLost(text, lost=said["lost"])
    for known in (MismatchError, CheckpointDamaged):
        if said["type"] == known.__name__:
            return known(text)
    if said["type"] == Freed.__name__:
        return Freed(text)
    return RemoteError(f"server {src} raised {said['type']}: {text}", raised_by=src)
