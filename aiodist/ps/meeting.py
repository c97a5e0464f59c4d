"""Where the ranks of a parameter server meet: barriers, syncs in which all wait for one another, and the end."""

from __future__ import annotations

import json
from collections import deque
from typing import TYPE_CHECKING, Any

from aiodist.ps.requests import Mark
from aiodist.ps.wire import Kind

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from aiodist.ps.answers import Answers
    from aiodist.ps.context import Context
    from aiodist.ps.directory import Directory
    from aiodist.ps.shard import Shard
    from aiodist.ps.shards import Shards

_Standing = list[list[int]]
"""Of each worker that has not left: its rank, and the number of the sync or barrier in which it waits."""


class Meeting:
    """One server's part; every method runs with the transport lock held.

    Every server has the barriers for itself: who is there rests on the clocks of the tensors that it leads, and what it
    sends afterwards is kept back until all are there. So when a worker hears that all are, from every server, all that
    was pushed before is applied.

    A sync waits for the steps of its worker's pushes. Where all workers wait, each for pushes that another will not
    make before, steps are made of what there is. That cannot be seen on one server. Each tells the first when all
    workers have come to a sync or a barrier with all that they sent before, and which of them it keeps waiting. If all
    servers speak of the same syncs, and every worker is kept waiting by one of them, none can ever have gone on.
    """

    def __init__(self, context: Context, answers: Answers, shards: Shards, directory: Directory) -> None:
        self._context = context
        self._answers = answers
        self._shards = shards
        self._directory = directory
        self._at_barrier: dict[int, deque[Mark]] = {}
        """Where each worker waits: who asks again before the first is answered waits twice."""
        self.syncs: dict[int, Mark] = {}
        """The last sync of each worker that has pushed nothing since."""
        self.parted: set[int] = set()
        """They come to no barrier any more."""
        self._told: tuple[int, _Standing] | None = None
        self._reports: dict[int, tuple[_Standing, list[int]]] = {}
        self._goodbyes: dict[int, int] = {}
        self._over = False

    # --- barriers --------------------------------------------------------------------------------------------

    def barrier(self, client: int, call: dict[str, Any]) -> None:
        """A worker waits for the others."""
        mark = Mark(client, call["n"], stops=True)
        self._at_barrier.setdefault(client, deque()).append(mark)
        self._shards.mark(mark)
        self.check()

    def stop_at(self, shard: Shard) -> None:
        """A shard is new: those who wait at a barrier rest there too."""
        for line in self._at_barrier.values():
            for mark in line:
                shard.arrivals.mark(mark)

    def stops(self, client: int) -> bool:
        """Return whether it waits at a barrier."""
        return client in self._at_barrier

    def part(self, client: int) -> None:
        """A worker comes to no barrier any more; what it has pushed may still wait for others."""
        self.parted.add(client)
        self.syncs.pop(client, None)

    def leave(self, client: int, *, gone: bool) -> None:
        """A worker has finished, or a rank died: nobody waits for it."""
        self.part(client)
        if gone:
            self._at_barrier.pop(client, None)
            self._check_over()
        self.check()
        for standing, _ in list(self._reports.values()) if gone else ():
            self._compare(standing)

    def check(self) -> None:
        """Let go those who wait for nobody any more."""
        while self._at_barrier and self._all_there():
            marks = [line.popleft() for line in self._at_barrier.values()]
            self._at_barrier = {client: line for client, line in self._at_barrier.items() if line}
            self._resume([mark.client for mark in marks], marks)
            for mark in marks:
                self._answers.answer(mark.client, mark.number)
        if self.syncs:
            self._tell()

    def _resume(self, clients: Collection[int], past: Sequence[Mark] = ()) -> None:
        """Have steps wait for `clients` again, all at once; then let what they sent behind these marks go on."""
        for shard in self._shards.led():
            refused = self._directory.refused(shard.name)
            shard.resume([client for client in clients if client not in refused])
        for mark in past:
            mark.ready = True
            for shard in self._shards.led():
                shard.arrivals.go_on(mark.client)

    def _all_there(self) -> bool:
        if self._context.servers[0] in self._context.gone:
            return True  # who comes to a barrier is told so, and nobody knows who that was
        first = {client: line[0] for client, line in self._at_barrier.items()}
        return all(
            worker in first and not first[worker].behind
            for worker in self._context.workers
            if worker not in self.parted
        )

    # --- syncs -----------------------------------------------------------------------------------------------

    def sync(self, client: int, call: dict[str, Any]) -> None:
        """A worker waits until its pushes are applied."""
        if client not in self.parted:
            self.syncs[client] = mark = Mark(client, call["n"])
            self._shards.mark(mark)
            self.check()

    def _standing(self) -> _Standing | None:
        """Return where all workers wait; None where one goes on, or something that it sent is still to come."""
        standing = []
        for worker in self._context.workers:
            if worker in self.parted:
                continue
            line = self._at_barrier.get(worker)
            mark = line[0] if line else self.syncs.get(worker)
            if mark is None or mark.behind:
                return None
            standing.append([worker, mark.number])
        return standing

    def _tell(self) -> None:
        """Tell the first server, once, where all wait and who is kept waiting here."""
        standing = self._standing()
        first = self._context.living()[0]
        if standing is None or (first, standing) == self._told:
            return
        self._told = (first, standing)
        self._say(first, "standing", at=standing, held=sorted(self._shards.held() | set(self._at_barrier)))

    def _say(self, rank: int, op: str, **said: Any) -> None:  # noqa: ANN401
        self._context.coalescer.put(rank, Kind.CALL, json.dumps({"op": op, **said}).encode())

    def compare(self, src: int, call: dict[str, Any]) -> None:
        """Server `src` says where all wait; if nobody can go on by itself, have all servers settle."""
        self._reports[src] = (call["at"], call["held"])
        self._compare(call["at"])

    def _compare(self, standing: _Standing) -> None:
        held: set[int] = set()
        for rank in self._context.living():
            at, kept = self._reports.get(rank, (None, ()))
            if at != standing:
                return
            held.update(kept)
        if all(worker in held for worker, _ in standing):
            for rank in self._context.living():
                self._say(rank, "settle", at=standing)

    def settle(self, src: int, call: dict[str, Any]) -> None:
        """All wait for one another: make steps of what there is."""
        if call["at"] != self._standing():
            return
        waiting = [worker for worker, _ in call["at"] if worker not in self._at_barrier]
        self._shards.rest(waiting)
        self._resume(waiting)
        self.syncs.clear()

    # --- the end ---------------------------------------------------------------------------------------------

    def bye(self, client: int, call: dict[str, Any]) -> None:
        """A rank waits for the end: nothing it asked for is open."""
        self._goodbyes[client] = call["n"]
        self._check_over()

    def _check_over(self) -> None:
        missing = set(range(len(self._context.world_ranks))) - set(self._context.gone) - set(self._goodbyes)
        if missing or self._over or not self._goodbyes:
            return
        self._over = True
        for client, number in self._goodbyes.items():
            self._answers.answer(client, number)
            if client != self._context.rank:
                self._context.coalescer.say_last(client)
