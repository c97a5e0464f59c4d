"""The processes of an elastic job: a session of the hub for each generation, and new ranks where it grows.

The launcher numbers its processes in the order in which it started them, and keeps these numbers: they are what stands
before a line of output and in what it says. The ranks of a generation are others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple

from aiodist.control import Hub
from aiodist.control.generations import Generation, Generations, Members
from aiodist.control.places import listen_now
from aiodist.control.roster import Exit
from aiodist.errors import LaunchError
from aiodist.launch.commands import joiner_variables


class ElasticSession(NamedTuple):
    """Where one generation meets, and which process is which of its ranks."""

    hub: Hub
    processes: tuple[int, ...]


class ElasticSessions:
    """The sessions of one job, as `Generations` has them opened and ended."""

    def __init__(self, size: int, host: str, token: str) -> None:
        self.generations = Generations(size, self)
        self.count = size  # how many processes there were
        self.dismissed: set[int] = set()  # those that were to join a generation that never began
        self.over: set[int] = set()  # those that ended, and those that were dismissed
        self.start: Callable[[Mapping[int, dict[str, str]], Sequence[int]], Mapping[int, Coroutine[Any, Any, None]]]
        """Starts processes, by their numbers and the variables that say their places, beside those that live."""
        self.kill: Callable[[int], None]
        self._host = host
        self._token = token
        hub = Hub(size, host=host, token=token, members=Members(self.generations))
        self._sessions = {0: ElasticSession(hub, tuple(range(size)))}
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Hub:
        """Return the hub at which the ranks meet that are started first."""
        return await self._sessions[0].hub.__aenter__()

    async def __aexit__(self, *raised: object) -> None:
        for session in list(self._sessions.values()):
            await session.hub.aclose()
        while self._tasks:
            await asyncio.wait(self._tasks)

    @property
    def begun(self) -> bool:
        """Whether all ranks have met; until then the job is like any other."""
        return self.generations.machine.begun

    # --- what the verdict knows of processes, as of a `Roster`'s ranks ----------------------------------------

    @property
    def joined(self) -> set[int]:
        """The processes that have come to the current generation."""
        session = self._current()
        return {session.processes[rank] for rank in session.hub.roster.joined}

    @property
    def exits(self) -> dict[int, Exit]:
        """How processes left the current generation."""
        session = self._current()
        return {session.processes[rank]: exit for rank, exit in session.hub.roster.exits.items()}

    def _current(self) -> ElasticSession:
        return self._sessions[self.generations.machine.current.number]

    # --- see `Sessions` ------------------------------------------------------------------------------------------

    def form(self, generation: Generation, members: Members) -> str:
        """Open the hub of a generation, and start those who join; return the hub's address."""
        current = self.generations.machine.current.number
        for number in [number for number in self._sessions if number < current]:
            self._spawn(self._sessions.pop(number).hub.aclose())
        hub = Hub(generation.size, host=self._host, token=self._token, members=members)
        hub.listen_at(listen_now(self._host))
        before = self._current().processes
        new = range(self.count, self.count + len(generation.joiners))
        self.count += len(new)
        survivors = [before[rank] for rank in generation.survivors]
        self._sessions[generation.number] = ElasticSession(hub, (*survivors, *new))
        places = [joiner_variables(generation, rank, hub.address) for rank in generation.joiners]
        for process, work in self.start(dict(zip(new, places, strict=True)), survivors).items():
            self._spawn(self._run(work, process))
        return hub.address

    def cancel(self, generation: Generation, why: str) -> None:
        """Close the hub of a generation that will never begin, and kill those who were to join it."""
        session = self._sessions.pop(generation.number)
        self._spawn(session.hub.aclose(why))
        for rank in generation.joiners:
            self.dismissed.add(session.processes[rank])
            self.over.add(session.processes[rank])
            self.kill(session.processes[rank])

    def ended(self, process: int, why: str) -> None:
        """A process is over: one that has not joined yet never will."""
        self.over.add(process)
        machine = self.generations.machine
        if (forming := machine.forming) is not None:
            processes = self._sessions[forming.number].processes
            if process in processes:
                rank = processes.index(process)
                self.generations.do(machine.left(forming.number, rank, f"its process ended: {why}"))

    async def _run(self, work: Coroutine[Any, Any, None], process: int) -> None:
        try:
            await work
        except LaunchError as error:
            self.ended(process, str(error))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
