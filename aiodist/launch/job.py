"""`run(job)`: opens the control hub, starts the ranks, prints their output, and ends all its processes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import secrets
import signal
import socket
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from aiodist.control import Hub
from aiodist.elastic.sessions import ElasticSessions
from aiodist.env import variables
from aiodist.errors import ConfigError, LaunchError
from aiodist.launch import commands, discover, hosts
from aiodist.launch.commands import Job, Mpi
from aiodist.launch.output import Streams
from aiodist.launch.processes import Command, ProcessEnded, Processes
from aiodist.launch.ranks import Ranks
from aiodist.launch.scratch import scratch_folder
from aiodist.launch.start import Start, Stdin
from aiodist.launch.supervisor import START_TIMEOUT, Event, Signalled, Supervisor
from aiodist.terminal import lent

_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")


async def run(job: Job, environ: Mapping[str, str] | None = None) -> int:
    """Run the job to its end, and return its exit code. No process of the job is left then.

    Meanwhile, SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1 and SIGUSR2 go to the ranks. Failed ranks and their exits are
    printed on standard error. Raises `ConfigError` or `BackendUnavailable` if the job cannot run here, and
    `LaunchError` if it cannot be started.
    """
    environ = variables() if environ is None else environ
    _allow_descriptors(job.ranks)
    try:
        cwd = Path.cwd()
    except FileNotFoundError:
        raise LaunchError("the working directory is gone: expected one in which ranks can be started") from None
    exports = commands.exported(job.exports, environ)
    mpi = await asyncio.to_thread(discover.find_mpi, job.mpi, environ.get("PATH", os.defpath))
    commands.check_mpi(job, mpi)
    here = await asyncio.to_thread(_meeting_address, job)
    events: asyncio.Queue[Event] = asyncio.Queue()
    token = secrets.token_hex(16)
    async with AsyncExitStack() as stack:
        exports = {"AIODIST_TERMINAL": stack.enter_context(lent()), **exports}
        beside = "rsh" if mpi is None else "mpirun"

        def broken(error: OSError) -> None:
            if error.errno != errno.EPIPE:
                output.say(f"aiodist run: standard output: {error.strerror}")
            events.put_nowait(Signalled(signal.SIGPIPE))

        output = Streams(job, broken, beside=beside)
        stack.push_async_callback(output.aclose)
        elastic = None if job.elastic is None else ElasticSessions(job.ranks, here, token)
        sessions = elastic or Hub(job.ranks, host=here, token=token)
        hub = await stack.enter_async_context(sessions)
        common = _common_variables(job, mpi, environ, hub.address, token)
        if job.hosts:
            common = {**commands.GUARD_NEEDS, **common}
            exports = {**commands.travelling(common), **commands.network_variables(mpi, job.iface, environ), **exports}
        starts = _starts(job, mpi, exports, cwd, exports.get("PYTHONPATH", environ.get("PYTHONPATH", "")))
        ranks = await stack.enter_async_context(Ranks(token, starts, output, events.put_nowait, host=here))
        supervisor = Supervisor(job, ranks, elastic or hub.roster, output.say)

        async def overheard(data: bytes) -> None:
            if not (supervisor.stopping and ranks.came):  # else it repeats the launcher's line at length
                await output.overheard(data)

        stack.enter_context(_signals(partial(_heard, output, events)))
        guard = commands.guard_command(ranks.address, cwd)
        if mpi is None:
            guards = await asyncio.to_thread(_Guards, job, guard, common)
            todo = [guards.first(rank) for rank in range(job.ranks)]
        else:
            todo = [_mpirun(job, mpi, guard, common, stack)]
        processes = Processes(todo, sink=overheard, notify=events.put_nowait)
        if elastic is not None:
            guards = _Guards(job, guard, common) if mpi else guards  # an mpirun starts no ranks later
            growth = _Growth(elastic, guards, starts, output, supervisor, ranks, processes, events.put_nowait)
            elastic.start, elastic.kill = growth.start, growth.kill
        await stack.enter_async_context(processes)
        try:
            code = await supervisor.watch(events)
        finally:
            processes.patience = 1.0 if supervisor.stopping else processes.patience
            ranks.release()
    return code


def _starts(job: Job, mpi: Mpi | None, exports: dict[str, str], cwd: Path, python_path: str) -> list[Start]:
    """Return the program of each rank."""
    with socket.create_server((hosts.LOOPBACK, 0)) as server:
        port = server.getsockname()[1]  # for torch.distributed, as torchrun chooses it
    # An mpirun may not give rank 0 this standard input, so the launcher sends it. A local guard inherits it.
    first: Stdin = "same" if mpi is None and not job.hosts else "sent"
    return [
        Start(
            job.command_of(rank),
            {**exports, **commands.alias_variables(job, rank, port, python_path)},
            "null" if rank else first,
            commands.folder(job, cwd),
        )
        for rank in range(job.ranks)
    ]


def _mpirun(job: Job, mpi: Mpi, guard: list[str], common: dict[str, str], stack: AsyncExitStack) -> Command:
    """Return the command of the mpirun, with folders that `stack` removes."""
    session = stack.enter_context(scratch_folder(tempfile.gettempdir()))
    shm = commands.segments_in(job, mpi, common)
    segments = stack.enter_context(scratch_folder(shm)) if shm else ""
    return Command(commands.mpirun_command(job, mpi, guard, session, segments), common)


def _common_variables(
    job: Job, mpi: Mpi | None, environ: Mapping[str, str], address: str, token: str
) -> dict[str, str]:
    """Return the variables of every process of the job, also of an mpirun."""
    common = commands.common_variables(environ, address, token, job.servers, job.elastic)
    common["AIODIST_JOB"] = str(os.getpid())
    return common if mpi is None else common | commands.mpirun_environment(mpi, environ, root=os.geteuid() == 0)


def _allow_descriptors(ranks: int) -> None:
    """Raise this process's limit of open files for the ranks. Raises `LaunchError` if the system refuses."""
    needed = 64 + 8 * ranks  # per rank two connections, up to two pipes and two logs, and the watch of a process
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise LaunchError(f"{ranks} ranks: expected a limit of at least {needed} open files (ulimit -n), it is {hard}")
    if soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _meeting_address(job: Job) -> str:
    """Return the address of this host at which ranks and guards reach the launcher."""
    if not job.hosts:
        return hosts.LOOPBACK
    names = [host.name for host in job.hosts]
    hosts.check_known(names, job.rsh)
    return hosts.meeting_address(names, job.iface)


class _Guards:
    """Starts guards without MPI, here or by a remote shell. Processes are numbered in the order of their start."""

    def __init__(self, job: Job, guard: list[str], environ: Mapping[str, str]) -> None:
        self._job = job
        self._guard = guard
        self._environ = environ
        script = commands.guard_script(guard, Path.cwd())
        self._shells = {host.name: hosts.shell_on(host.name, job.rsh, script) for host in job.hosts}
        self._on = [hosts.host_of(job.hosts, rank) if job.hosts else "" for rank in range(job.ranks)]
        """Host of each process, or "" for this one."""

    def first(self, rank: int) -> Command:
        """Return the command of the guard of one of the first ranks."""
        return self._command(rank, commands.place_variables(rank, self._job.ranks, self._job.hosts))

    def choose(self, living: Iterable[int], missed: Iterable[int]) -> None:
        """Choose the host of one more process: the one that has lost most of its processes.

        `missed` were not started. Their hosts come last.
        """
        there, never = (Counter(self._on[other] for other in others) for others in (living, missed))
        places = [(never[host.name], there[host.name] - (host.ranks or 0)) for host in self._job.hosts]
        self._on.append(self._job.hosts[places.index(min(places))].name if places else "")

    def beside(self, process: int, ranks: Iterable[int]) -> dict[str, str]:
        """Return the variables for the place of a process on its host. `ranks` are the processes in rank order."""
        here = [other for other in ranks if self._on[other] == self._on[process]]
        return {"AIODIST_LOCAL_RANK": str(here.index(process)), "AIODIST_LOCAL_SIZE": str(len(here))}

    def another(self, process: int) -> Command:
        """Return the command of the guard of one more process, on the chosen host."""
        return self._command(process, {"AIODIST_RANK": str(process), "AIODIST_SIZE": str(process + 1)})

    def _command(self, process: int, place: Mapping[str, str]) -> Command:
        if not self._job.hosts:
            return Command(self._guard, {**self._environ, **place}, process)
        needed = {name: self._environ[name] for name in commands.GUARD_NEEDS}
        for name in (name for name, value in needed.items() if "\n" in value):
            raise ConfigError(f"{name} has a line break: it cannot be given to another host")
        environ = {name: value for name, value in self._environ.items() if name != "AIODIST_TOKEN"}
        return Command(self._shells[self._on[process]], environ, process, told={**place, **needed})


@dataclass(frozen=True)
class _Growth:
    """Starts more processes of an elastic job, and kills those that do not connect."""

    elastic: ElasticSessions
    guards: _Guards
    starts: list[Start]
    output: Streams
    supervisor: Supervisor
    ranks: Ranks
    processes: Processes
    notify: Callable[[Event], None]

    def start(
        self, places: Mapping[int, dict[str, str]], living: Sequence[int]
    ) -> dict[int, Coroutine[Any, Any, None]]:
        """See `ElasticSessions.start`."""
        for i, number in enumerate(places):
            self.output.add(number)
            self.supervisor.started(number)
            self.guards.choose([*living, *list(places)[:i]], self.elastic.ended - self.ranks.came)
            asyncio.get_running_loop().call_later(START_TIMEOUT, self._kill_late, number)
        usual = self.starts[0]
        for number, place in places.items():
            environ = {**usual.environ, **place, **self.guards.beside(number, [*living, *places])}
            self.starts.append(replace(usual, environ=environ, stdin="null"))
        return {number: self._started(self.guards.another(number)) for number in places}

    async def _started(self, command: Command) -> None:
        try:
            await self.processes.start(command)
        except LaunchError:
            self.notify(ProcessEnded(command.rank, 127))
            raise

    def kill(self, number: int) -> None:
        """See `ElasticSessions.kill`. The start of its guard may hang."""
        self.ranks.kill(number)
        self._kill_late(number)

    def _kill_late(self, number: int) -> None:
        if number not in self.ranks.came:
            self.processes.kill(number)


def _heard(output: Streams, events: asyncio.Queue[Event], signum: int) -> None:
    if signum == signal.SIGINT:
        output.interrupted()
    events.put_nowait(Signalled(signum))


@contextlib.contextmanager
def _signals(tell: Callable[[int], None]) -> Iterator[None]:
    """Handle signals in this block. Outside the main thread the program handles them."""
    loop = asyncio.get_running_loop()
    heard = []
    for signum in map(signal.Signals.__getitem__, _SIGNALS):
        if signum == signal.SIGHUP and signal.getsignal(signum) == signal.SIG_IGN:
            continue  # nohup
        with contextlib.suppress(RuntimeError, ValueError):
            loop.add_signal_handler(signum, tell, signum)
            heard.append(signum)
    try:
        yield
    finally:
        for signum in heard:
            loop.remove_signal_handler(signum)
