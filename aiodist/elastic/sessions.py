"""The launcher's part of an elastic job: a hub for each generation, and new processes if the job grows.

The launcher numbers processes in the order of their start. These numbers are fixed, and are in its output. The ranks of
a generation are other numbers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple

from aiodist.control import Hub
from aiodist.control.places import listen_now
from aiodist.control.roster import Exit
from aiodist.elastic.generations import GenerationMembers, Generations
from aiodist.env import Generation
from aiodist.errors import LaunchError


def joiner_variables(generation: Generation, rank: int, address: str) -> dict[str, str]:
    """Return the variables of a new rank: its place in a generation, and the address of the hub."""
    return {
        "AIODIST_RANK": str(rank),
        "AIODIST_SIZE": str(generation.size),
        "AIODIST_RENDEZVOUS": address,
        "AIODIST_GENERATION": str(generation.number),
        "AIODIST_PREVIOUS": ",".join("" if before is None else str(before) for before in generation.previous),
    }


class ElasticSession(NamedTuple):
    """The hub of one generation, and the process of each of its ranks."""

    hub: Hub
    processes: tuple[int, ...]


class ElasticSessions:
    """The sessions of one job. `Generations` opens and ends them."""

    def __init__(self, size: int, host: str, token: str) -> None:
        self.generations = Generations(size, self)
        self.count = size
        """Number of processes that were started."""
        self.dismissed: set[int] = set()
        """New processes of generations that never began."""
        self.ended: set[int] = set()
        """Processes that have ended, and dismissed ones."""
        self.start: Callable[[Mapping[int, dict[str, str]], Sequence[int]], Mapping[int, Coroutine[Any, Any, None]]]
        """Starts processes. Gets the variables of each by number, and the numbers of the live processes."""
        self.kill: Callable[[int], None]
        self._host = host
        self._token = token
        hub = Hub(size, host=host, token=token, members=GenerationMembers(self.generations))
        self._sessions = {0: ElasticSession(hub, tuple(range(size)))}
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Hub:
        """Return the hub of the first generation."""
        return await self._sessions[0].hub.__aenter__()

    async def __aexit__(self, *raised: object) -> None:
        for session in list(self._sessions.values()):
            await session.hub.aclose()
        while self._tasks:
            await asyncio.wait(self._tasks)

    @property
    def begun(self) -> bool:
        """True once all ranks have joined. Before that the job is not elastic."""
        return self.generations.machine.begun

    # --- for the verdict: processes in place of a `Roster`'s ranks ---------------------------------------------

    @property
    def joined(self) -> set[int]:
        """Processes that have joined the current generation."""
        session = self._current()
        return {session.processes[rank] for rank in session.hub.roster.joined}

    @property
    def exits(self) -> dict[int, Exit]:
        """Exits of processes from the current generation."""
        session = self._current()
        return {session.processes[rank]: exit for rank, exit in session.hub.roster.exits.items()}

    def _current(self) -> ElasticSession:
        return self._sessions[self.generations.machine.current.number]

    # --- see `Sessions` ------------------------------------------------------------------------------------------

    def form(self, generation: Generation, members: GenerationMembers) -> str:
        """Open the hub of a generation, and start its new ranks. Return the hub's address."""
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
        """Close the hub of a generation that never begins, and kill its new ranks."""
        session = self._sessions.pop(generation.number)
        self._spawn(session.hub.aclose(why))
        for rank in generation.joiners:
            self.dismissed.add(session.processes[rank])
            self.ended.add(session.processes[rank])
            self.kill(session.processes[rank])

    def end(self, process: int, why: str) -> None:
        """Note the end of a process, which may not have joined yet."""
        self.ended.add(process)
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
            self.end(process, str(error))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
