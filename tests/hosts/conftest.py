"""Two hosts on one machine: network namespaces with their own name, shared memory and network between them.

Each host is the set of namespaces of one process (`unshare`). No part of it has a name on the machine, and all of it
is gone when that process and its children have ended, also after a failed test. The remote shell is a script that
enters a host with an almost empty environment, as ssh does.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import aiodist
from aiodist.bench.plan import Plan
from aiodist.bench.records import Record
from tests.bench.written import loads
from tests.support.blocking import blocked_until
from tests.support.mpi import find

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

LIMIT = 60.0
ROOT = Path(aiodist.__file__).parents[1]
NAMES = {"openmpi": "Open MPI", "mpich": "MPICH", "none": "no MPI"}
NETWORK = "10.77.0.0/24"

_HOLD = """
hostname {name} && mount -t tmpfs none /dev/shm && mount --bind {hosts} /etc/hosts && mount -t sysfs none /sys &&
ip link set lo up && echo ready && exec cat
"""
_RSH = """\
#!/bin/sh
# RSH [OPTIONS] HOST COMMAND...
while [ "${{1#-}}" != "$1" ]; do shift; done
case $1 in
{cases}
*) echo "rsh: no host $1" >&2; exit 255;;
esac
shift
exec nsenter --target $pid --net --uts --mount --ipc env -i HOME=/ PATH=/usr/bin:/bin sh -c "$*"
"""


@dataclass
class Host:
    """One of the two; `process` keeps it."""

    name: str
    address: str
    process: subprocess.Popen[bytes]

    @property
    def entering(self) -> list[str]:
        """The words before a command that run it on this host."""
        return ["nsenter", f"--target={self.process.pid}", "--net", "--uts", "--mount", "--ipc"]

    def do(self, command: str) -> None:
        """Run a shell command here."""
        done = subprocess.run([*self.entering, "sh", "-c", command], capture_output=True, text=True, timeout=LIMIT)
        assert done.returncode == 0, f"{self.name}: {command}: {done.stderr}"

    def read(self, path: str) -> str:
        """Return what a file says here."""
        return subprocess.check_output([*self.entering, "cat", path], text=True, timeout=LIMIT).strip()

    def processes(self) -> list[int]:
        """The processes that run here, apart from the one that keeps it."""
        here = os.readlink(f"/proc/{self.process.pid}/ns/net")
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdecimal() and os.readlink(entry / "ns/net") == here:
                    found.append(int(entry.name))
        return [pid for pid in found if pid != self.process.pid]


@dataclass
class TwoHosts:
    """`alpha` and `beta`, and a folder that both see; jobs are started on `alpha`."""

    alpha: Host
    beta: Host
    folder: Path
    mpi: str = "auto"

    @property
    def rsh(self) -> str:
        """The remote shell."""
        return str(self.folder / "rsh")

    def script(self, text: str, name: str = "script.py") -> str:
        """Write a script into the folder."""
        (self.folder / name).write_text(textwrap.dedent(text))
        return name

    def aiodist(self, *arguments: str, environ: dict[str, str] | None = None) -> list[str]:
        """Return the command that calls `aiodist` on `alpha`, in the folder."""
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        variables = [f"{name}={value}" for name, value in {"PYTHONPATH": path, **(environ or {})}.items()]
        call = ["env", *variables, sys.executable, "-m", "aiodist.cli", *arguments]
        return [*self.alpha.entering, "sh", "-c", f"cd {shlex.quote(str(self.folder))} && exec {shlex.join(call)}"]

    def command(
        self, *arguments: str, hosts: str = "alpha:2,beta:2", environ: dict[str, str] | None = None
    ) -> list[str]:
        """Return the command that runs a job on both."""
        run = ["run", "--mpi", self.mpi, "--hosts", hosts, "--rsh", self.rsh, "--iface", NETWORK]
        return self.aiodist(*run, *arguments, environ=environ)

    def run(
        self,
        *arguments: str,
        hosts: str = "alpha:2,beta:2",
        environ: dict[str, str] | None = None,
        timeout: float = LIMIT,
    ) -> subprocess.CompletedProcess[str]:
        """Run a job on both to its end."""
        return finish(self.command(*arguments, hosts=hosts, environ=environ), timeout)

    def doctor(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Ask `aiodist doctor` on `alpha` about hosts; what it prints is JSON."""
        return finish(self.aiodist("doctor", "--json", "-", "--rsh", self.rsh, *arguments), LIMIT)

    def bench(
        self, op: str, impls: tuple[str, ...], peers: tuple[str, ...], sizes: tuple[int, ...]
    ) -> Sequence[Record]:
        """Return the records of `aiodist bench` on four ranks of both; sizes in bytes of one rank's input."""
        file = self.folder / "bench.json"
        plan = Plan(op, 4, impls, peers, sizes, repeat=5, json=str(file))
        done = self.run("-m", "aiodist.bench.worker", plan.to_json(), timeout=2 * LIMIT)
        assert done.returncode == 0, done.stdout + done.stderr
        return loads(file.read_text())

    @contextlib.contextmanager
    def slow(self, rate: str = "1gbit") -> Iterator[None]:
        """Limit the link between the hosts, each way; skip the test where the kernel cannot."""
        try:
            for host in (self.alpha, self.beta):
                host.do(f"tc qdisc replace dev net0 root tbf rate {rate} burst 256kb latency 50ms")
        except (AssertionError, OSError) as error:
            pytest.skip(f"no link can be limited here: {error}")
        try:
            yield
        finally:
            for host in (self.alpha, self.beta):
                host.do("tc qdisc del dev net0 root")

    def bytes_sent(self, device: str = "net0") -> int:
        """Return how many bytes the hosts have sent to each other over a device."""
        return sum(int(host.read(f"/sys/class/net/{device}/statistics/tx_bytes")) for host in (self.alpha, self.beta))

    def left_after(self, seconds: float) -> list[int]:
        """Return the processes that still run on the hosts after at most `seconds`."""
        blocked_until(lambda: not self.alpha.processes() + self.beta.processes(), seconds)
        return self.alpha.processes() + self.beta.processes()


def finish(command: list[str], timeout: float) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; kill it and its session at the time limit."""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)
            out, err = process.communicate(timeout=10)
            raise AssertionError(f"not over within {timeout:g} s:\n{out}\n{err}") from None
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[TwoHosts]:
    """Two hosts with one link; raises `OSError` or `RuntimeError` where they cannot be made."""
    with contextlib.ExitStack() as stack:
        table = folder / "etc-hosts"
        table.write_text("127.0.0.1 localhost\n10.77.0.1 alpha\n10.77.0.2 beta\n")
        alpha, beta = (
            stack.enter_context(_host(name, address, table))
            for name, address in (("alpha", "10.77.0.1"), ("beta", "10.77.0.2"))
        )
        _connect(alpha, beta)
        cases = "\n".join(f"{host.name}|{host.address}) pid={host.process.pid};;" for host in (alpha, beta))
        rsh = folder / "rsh"
        rsh.write_text(_RSH.format(cases=cases))
        rsh.chmod(0o755)
        yield TwoHosts(alpha, beta, folder)


@contextlib.contextmanager
def _host(name: str, address: str, table: Path) -> Iterator[Host]:
    hold = _HOLD.format(name=name, hosts=shlex.quote(str(table)))
    with subprocess.Popen(
        ["unshare", "--net", "--uts", "--mount", "--ipc", "sh", "-c", hold],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        host = Host(name, address, process)
        try:
            assert process.stdout is not None
            if process.stdout.readline() != b"ready\n":
                _, why = process.communicate(timeout=LIMIT)
                raise RuntimeError(why.decode(errors="replace").strip() or "unshare said nothing")
            yield host
        finally:
            if process.returncode is None:
                for pid in host.processes():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                process.kill()


def _connect(a: Host, b: Host) -> None:
    """Put one end of a link into each."""
    ends = f"ip link add net0 netns {a.process.pid} type veth peer name net0 netns {b.process.pid}"
    done = subprocess.run(ends.split(), capture_output=True, text=True, timeout=LIMIT)
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip())
    for host in (a, b):
        host.do(f"ip addr add {host.address}/24 dev net0 && ip link set net0 up")
    for host in (a, b):
        # The kernel reports a new link with a delay, and an MPI that starts meanwhile takes it for one that is down.
        if not blocked_until(lambda host=host: host.read("/sys/class/net/net0/operstate") == "up", LIMIT):  # type: ignore[misc]
            raise RuntimeError(f"the link of {host.name} does not come up")


@pytest.fixture(scope="session")
def any_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoHosts]:
    """Two hosts for all tests, with each MPI; skip them where hosts cannot be made."""
    if sys.platform != "linux":
        pytest.skip("network namespaces are Linux's")
    with contextlib.ExitStack() as stack:
        try:
            hosts = stack.enter_context(two_hosts(tmp_path_factory.mktemp("hosts")))
        except (OSError, RuntimeError, AssertionError) as error:
            pytest.skip(f"no network namespaces can be made here: {error}")
        yield hosts


@pytest.fixture(params=["openmpi", "mpich", "none"])
def hosts(
    request: pytest.FixtureRequest,
    any_hosts: TwoHosts,
    record_property: Callable[[str, object], None],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[TwoHosts]:
    """Two hosts, for each MPI that is installed and without; nothing may be left running there."""
    if request.param != "none":
        pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    monkeypatch.setattr(any_hosts, "mpi", find(request.param))
    record_property("mpi", NAMES[request.param])
    yield any_hosts
    assert any_hosts.left_after(5) == []
