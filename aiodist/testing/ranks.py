"""`run_ranks`: N ranks of a program as tasks of one event loop, again and again in the same order."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from asyncio import _get_running_loop
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Generic, TypeVar, cast

from aiodist.backends.local import LocalHub, LocalTransport
from aiodist.communicator.dispatcher import Dispatcher
from aiodist.control import Channel, InProcessChannel, in_process
from aiodist.elastic.generations import GenerationMembers, Generations
from aiodist.env import Generation
from aiodist.errors import DeadlockError, LaunchError, PeerError, PeerLost
from aiodist.handles import listed
from aiodist.handles.stacks import line_of_task
from aiodist.testing.clock import FakeClockLoop, TimeLimit
from aiodist.testing.faults import Faults, FaultyHub
from aiodist.testing.hub import DrawnHub
from aiodist.testing.races import same_results
from aiodist.types import check_timeout
from aiodist.world.isolation import isolate, isolated
from aiodist.world.opening import RankPlace, current_place

T = TypeVar("T")
Main = Callable[..., Coroutine[Any, Any, T]]

_DAY = 86_400.0
_KILLED = "it was killed"
_PATIENCE = 10  # deadlocks while the ranks end; after them the ranks are left alone


class Deadlock(DeadlockError):
    """No rank can continue, for reasons other than operations; the message names the wait of each rank."""


def run_ranks(
    n: int,
    main: Main[T],
    seed: int = 0,
    *,
    seeds: Iterable[int] | None = None,
    timeout: float | None = _DAY,
    elastic: tuple[int, int] | None = None,
    faults: Faults | None = None,
) -> list[T]:
    """Run `main` on `n` ranks in this process and return the results by rank.

    `main` is the unmodified program, a coroutine function without arguments or with one, the rank. It calls
    `aiodist.init()` itself, as often as it likes, and finds its place there. Tensors, collectives, messages,
    objects and errors are real; only the wire is not.

    The same `seed` gives the same interleaving of ranks and deliveries, so a failure comes again; another seed
    gives another one. Time stands still while code runs and jumps when all wait, so `asyncio.sleep(3600)` and
    time-outs take no time; functions in an executor and sockets are waited for in real time.

    `seeds`, such as `range(20)`, runs the program once with each seed in place of `seed`, and returns the results of
    the first. A receive from `ANY` then takes a message only when no rank can continue, and the seed draws one of those
    that have come: such a run differs from that of `seed`. Raises `RaceError` if the results of another seed differ;
    the message names two seeds, and the first receive from `ANY` that took another message. Tensors and floats are
    compared by their bits, containers by their items, and objects without equality by their type. The random generators
    start each run in the same state.

    `elastic`, (MIN, MAX), makes an elastic job (`init(elastic=True)`). Ranks that `grow` starts get the numbers from
    `n` on, and their results come last. A rank that `kill_rank` or `faults` kills ends no other rank, and its result
    is None.

    An exception of one rank ends the others and is raised, with a note that names the rank. Raises `DeadlockError` if
    ranks wait for the operations of one another, `Deadlock` if no rank can continue for other reasons, and TimeoutError
    after `timeout` seconds of the jumping clock (None: never); the messages name the wait of each rank. Raises
    RuntimeError if a loop runs already: use `await gather_ranks(n, main)` there.
    """
    if _get_running_loop() is not None:
        raise RuntimeError("run_ranks makes its own event loop, and one is running here: await gather_ranks() instead")
    check_timeout(timeout)
    if faults is not None:
        faults.check(local=True, ranks=n if elastic is None else None)
    run = partial(_run_once, n, main, timeout, elastic, faults)
    return run(seed) if seeds is None else same_results(partial(run, holds=True), seeds)


def _run_once(
    n: int,
    main: Main[T],
    timeout: float | None,
    elastic: tuple[int, int] | None,
    faults: Faults | None,
    seed: int,
    *,
    holds: bool = False,
) -> list[T]:
    """Run `main` with one seed. `holds` is that of `DrawnHub`."""
    hub, story = DrawnHub(seed, holds=holds), f"seeds=[{seed}]" if holds else f"seed {seed}"
    if faults is not None:
        hub, story = FaultyHub(seed, faults, holds=holds), f"{story}, {faults}"
    job: _RanksJob[T] = _RanksJob(n, main, hub, story=story, elastic=elastic)
    on_quiet = hub.release if holds else None
    loop = FakeClockLoop(seed=seed, group_of=_rank_of, on_quiet=on_quiet, on_deadlock=job.deadlocked)
    hub.progress = loop.progress
    with faults or nullcontext(), asyncio.Runner(loop_factory=lambda: loop) as runner:
        isolate(runner.get_loop())
        return runner.run(job.run(timeout))


async def gather_ranks(n: int, main: Main[T], *, elastic: tuple[int, int] | None = None) -> list[T]:
    """Run `main` on `n` ranks as tasks of the running loop and return the results by rank.

    As `run_ranks`, in the order and at the speed of that loop: real time, any loop, no deadlock found.
    """
    with isolated():
        return await _RanksJob(n, main, LocalHub(), story="gather_ranks", elastic=elastic).run(None)


def kill_rank(number: int | None = None) -> None:
    """Kill a rank of `run_ranks`, whose task is cancelled: the others see what they see of a process that is killed.

    `number` is that of the task, from 0 in the order in which they were started; None is the one that calls, which ends
    at its next `await`. Raises RuntimeError outside, ValueError where there is no such rank.
    """
    seat = current_place.get()
    if not isinstance(seat, Seat):
        raise RuntimeError("kill_rank() is for ranks under run_ranks()")
    seat.job.kill(seat.number if number is None else number)


class Seat:
    """A rank's place, good for any number of `init` in a row."""

    def __init__(self, job: _RanksJob[Any], number: int, generation: Generation, rank: int) -> None:
        self.job = job
        self.number = number  # of its task
        self.channels: list[InProcessChannel] = []
        """Channels that an elastic rank has taken, one for each generation."""
        self.started_for = generation
        self.started_as = rank
        self._opened = 0

    def take(self) -> RankPlace:
        """Return the place of the rank's next `init`."""
        number, self._opened = self._opened, self._opened + 1
        transport = LocalTransport(self.job.hub, self.started_as, self.job.size, f"world.{number}")
        return RankPlace(transport, self.job.channels(number)[self.started_as], self.hosts)

    @property
    def hosts(self) -> tuple[int, ...]:
        """For each rank the first of its host: they are all in this process."""
        return (0,) * self.job.size

    @property
    def elastic(self) -> tuple[int, int] | None:
        """The fewest and the most ranks of a job that may change."""
        return self.job.elastic

    async def first(self) -> tuple[InProcessChannel, Generation]:
        """Return the channel of its first generation, and that generation."""
        return await self.next(self.started_for, self.started_as), self.started_for

    async def next(self, generation: Generation, rank: int) -> InProcessChannel:
        """Return the channel of `generation`, in which it is `rank`."""
        return await self.job.connect(self, generation, rank)

    def place(self, channel: Channel, generation: Generation) -> RankPlace:
        """Return its place in `generation`."""
        transport = LocalTransport(self.job.hub, channel.rank, channel.size, f"generation.{generation.number}")
        return RankPlace(transport, channel, (0,) * channel.size)

    def leave(self) -> None:
        """Kill the channels of a killed task; the other ranks get only that news."""
        for channel in self.channels:
            channel.kill(_KILLED)


def _rank_of(handle: asyncio.Handle) -> object:
    """Return whose callback it is."""
    context: contextvars.Context = handle._context  # type: ignore[attr-defined]
    return context.get(current_place)


class _RanksJob(Generic[T]):
    """The ranks of one call."""

    def __init__(
        self, size: int, main: Main[T], hub: LocalHub, *, story: str, elastic: tuple[int, int] | None = None
    ) -> None:
        if size < 1:
            raise ValueError(f"{size} ranks: expected at least 1")
        if elastic is not None and not 1 <= elastic[0] <= size <= elastic[1]:
            raise ValueError(f"elastic={elastic} with {size} ranks: expected (MIN, MAX) around them")
        self.size = size
        self.hub = hub
        self.elastic = elastic
        self._generations = Generations(size, self)
        self._sessions: dict[int, tuple[Sequence[InProcessChannel], asyncio.Future[None]]] = {}
        self._seats: list[Seat] = []
        self._killed: set[int] = set()
        self._main = main
        self._takes_rank = _takes_rank(main)
        self._story = story
        self._meetings: list[Sequence[InProcessChannel]] = []
        self._tasks: list[asyncio.Task[T]] = []
        self._failed: asyncio.Future[BaseException] | None = None
        self._deadlocks = 0

    def channels(self, number: int) -> Sequence[InProcessChannel]:
        """Return those of the `number`-th `init` of all ranks, made by the rank that comes first."""
        if number == len(self._meetings):
            self._meetings.append(channels := in_process(self.size))
            for killed in self._killed:
                channels[killed].kill(_KILLED)
        return self._meetings[number]

    async def run(self, timeout: float | None) -> list[T]:
        """Run them all to their ends; the first failure ends the others."""
        loop = asyncio.get_running_loop()
        self._failed = loop.create_future()
        limit = None if timeout is None else loop.call_later(timeout, TimeLimit(self._late, timeout))
        first = Generation(0, (None,) * self.size)
        if self.elastic is not None:
            self.form(first, GenerationMembers(self._generations))
        else:
            for rank in range(self.size):
                self._start(first, rank)
        try:
            while not self._failed.done() and (left := [task for task in self._tasks if not task.done()]):
                either: list[asyncio.Future[Any]] = [*left, self._failed]
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if limit is not None:
                limit.cancel()
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)
            for task in self._tasks:
                task.cancelled() or task.exception()  # a later error is in a note of the first one
        if not self._failed.done():
            # A task that was cancelled before it began has no result of its own.
            return [cast(T, None) if n in self._killed else task.result() for n, task in enumerate(self._tasks)]
        error = self._failed.result()
        try:
            raise error
        finally:
            del error, self._failed  # a cycle of traceback and frame would keep all tensors alive

    def _start(self, generation: Generation, rank: int) -> None:
        number = len(self._tasks)
        seat = Seat(self, number, generation, rank)
        self._seats.append(seat)
        context = contextvars.copy_context()
        context.run(current_place.set, seat)
        work = self._one(number)
        self._tasks.append(asyncio.get_running_loop().create_task(work, name=f"rank {number}", context=context))

    async def _one(self, rank: int) -> T:
        try:
            return await (self._main(rank) if self._takes_rank else self._main())
        except BaseException as error:
            if rank in self._killed:
                return cast(T, None)
            self._rank_failed(rank, error)
            if isinstance(error, (SystemExit, KeyboardInterrupt)):
                # They would end the loop; run() raises them.
                raise asyncio.CancelledError from error
            raise
        finally:
            self._seats[rank].channels = []

    # --- an elastic job: see `Sessions` --------------------------------------------------------------------

    def form(self, generation: Generation, members: GenerationMembers) -> None:
        """Open the session of a generation, and start those who join."""
        current = self._generations.machine.current.number
        self._sessions = {number: session for number, session in self._sessions.items() if number >= current}
        ready = asyncio.get_running_loop().create_future()
        ready.add_done_callback(lambda ready: ready.cancelled() or ready.exception())  # mark the error as retrieved
        self._sessions[generation.number] = in_process(generation.size, members), ready
        for rank in generation.joiners:
            self._start(generation, rank)

    def cancel(self, generation: Generation, why: str) -> None:
        """End the session of a generation that never begins, and those who were to join it."""
        _, ready = self._sessions.pop(generation.number)
        if not ready.done():
            ready.set_exception(PeerLost(why, lost=-1))
        for seat in self._seats:
            if seat.started_for is generation:
                self.kill(seat.number)

    async def connect(self, seat: Seat, generation: Generation, rank: int) -> InProcessChannel:
        """Return the channel of a rank of a generation, once all its ranks have asked for theirs."""
        if generation.number not in self._sessions:
            raise PeerLost(f"generation {generation.number} was aborted", lost=-1)
        channels, ready = self._sessions[generation.number]
        seat.channels = [*seat.channels[-1:], channels[rank]]
        machine = self._generations.machine
        self._generations.do(machine.joined(generation.number, rank))
        if machine.begun and machine.current.number == generation.number and not ready.done():
            ready.set_result(None)
        await asyncio.shield(ready)
        return channels[rank]

    def kill(self, number: int) -> None:
        """Kill a rank, by the number of its task."""
        if not 0 <= number < len(self._tasks):
            raise ValueError(f"rank {number}: expected one of the {len(self._tasks)} that were started")
        if number in self._killed or self._tasks[number].done():
            return
        self._killed.add(number)
        seat = self._seats[number]
        seat.leave()
        machine = self._generations.machine
        if not seat.channels and machine.forming is seat.started_for:
            self._generations.do(machine.left(machine.forming.number, seat.started_as, _KILLED))
        self._tasks[number].cancel()
        if self.elastic is None:
            for channels in self._meetings:
                channels[number].kill(_KILLED)
            return
        live = len(self._tasks) - len(self._killed)
        if live < self.elastic[0] and self._failed is not None and not self._failed.done():
            lost = ", ".join(map(str, sorted(self._killed)))
            why = f"{live} of at least {self.elastic[0]} ranks are left: {lost} were killed"
            self._failed.set_result(LaunchError(why))

    def _rank_failed(self, rank: int, error: BaseException) -> None:
        assert self._failed is not None
        if not self._failed.done():
            error.add_note(f"raised by rank {rank} of {self.size} (aiodist.testing, {self._story})")
            self._failed.set_result(error)
        elif not isinstance(error, (asyncio.CancelledError, PeerError)):
            self._failed.result().add_note(f"then by rank {rank}: {type(error).__name__}: {error}")

    # --- deadlocks -----------------------------------------------------------------------------------------

    def deadlocked(self) -> None:
        """Called by the loop when no event can happen."""
        self._deadlocks += 1
        if self._deadlocks > _PATIENCE:
            raise RuntimeError(f"the ranks do not end ({self._story})\n{self._waiting()}")
        if self._failed is not None and not self._failed.done():
            self._failed.set_result(Deadlock(f"no rank can go on ({self._story})\n{self._waiting()}"))
        else:
            for task in self._tasks:
                task.cancel()

    def _late(self, timeout: float) -> None:
        if self._failed is not None and not self._failed.done():
            self._failed.set_result(TimeoutError(f"not over after {timeout:g} s ({self._story})\n{self._waiting()}"))

    def _waiting(self) -> str:
        return "\n".join(f"  rank {rank}: {self._waits_for(rank, task)}" for rank, task in enumerate(self._tasks))

    def _waits_for(self, rank: int, task: asyncio.Task[T]) -> str:
        loop = task.get_loop()
        dispatchers = [i for i in Dispatcher.of_loop(loop) if i.ranks[i.transport.rank] == rank]
        pending = [
            f"{some} on {dispatcher.name!r}"
            for dispatcher in dispatchers
            if (some := listed(dispatcher.lifetime.pending()))
        ]
        where = "has ended" if task.done() else f"waits at {line_of_task(task) or 'its start'}"
        return f"{where}; pending: {'; '.join(pending) or 'nothing'}"


def _takes_rank(main: Main[Any]) -> bool:
    try:
        parameters = inspect.signature(main).parameters.values()
    except ValueError:  # a callable that does not tell
        return False
    return any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
