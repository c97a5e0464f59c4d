"""Several hosts, without processes: places of ranks, arguments of mpirun, and errors."""

from __future__ import annotations

import itertools
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodist.errors import ConfigError
from aiodist.launch import commands, hosts
from aiodist.launch.hosts import Host, host_of, parse_hosts, placed, read_hostfile
from aiodist.testing.seams.mpi import Flavour, Job, Mpi
from tests.launch.conftest import MARK
from tests.support.nursed import stub

if TYPE_CHECKING:
    from tests.launch.conftest import Launcher

OPENMPI = Mpi("/opt/ompi/bin/mpirun", Flavour.OPENMPI, "5.0.11", None)
OLD_OPENMPI = Mpi("/opt/ompi/bin/mpirun", Flavour.OPENMPI, "4.1.6", None)
MPICH = Mpi("/opt/mpich/bin/mpirun", Flavour.MPICH, "5.0.2", None, ("ucx", "ofi"))
OTHER = Mpi("/opt/x/bin/mpirun", Flavour.OTHER, "X 1", None)
HOSTS = (Host("a", 2), Host("b", 3))
GUARD = ["python", "-m", "guard"]
JOB = Job(("train.py",), 5, hosts=HOSTS)


# Reading


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a:2,a:3", "host a is given twice"),
        ("a:0", "'0' ranks: expected a whole number of at least 1"),
        ("a:two", "'two' ranks"),
        ("a:-1", "'-1' ranks"),
        ("a:", "expected a number of ranks after the colon"),
        ("a,,b", "expected the name of a host"),
        ("-oProxyCommand=x", "expected the name of a host"),
        ("a b", "expected the name of a host"),
        ("fe80::1:2", "an IPv6 address in brackets"),
    ],
)
def test_l5_bad_hosts_are_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as seen:
        parse_hosts(text)
    assert f"--hosts {text}" in str(seen.value)


def test_l5_a_hostfile_has_a_host_a_line(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# ours\n\na slots=2  # first\n  b:3\nc\r\n[fe80::1]:4\n")
    assert read_hostfile(file) == (Host("a", 2), Host("b", 3), Host("c"), Host("fe80::1", 4))


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("a\nb slots=x\n", 2, "'x' ranks"),
        ("a:2 slots=2\n", 1, "expected name, name:N or name slots=N"),
        ("a\n\nb max_slots=2\n", 3, "expected name, name:N or name slots=N"),
        ("a\nb\na\n", 3, "host a is given twice"),
    ],
)
def test_l5_a_bad_line_of_a_hostfile_is_named(tmp_path: Path, text: str, line: int, message: str) -> None:
    file = tmp_path / "hosts"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as seen:
        read_hostfile(file)
    assert f"{file}, line {line}" in str(seen.value)


def test_l5_a_hostfile_without_hosts_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("# nobody\n")
    with pytest.raises(ConfigError, match="it names no host"):
        read_hostfile(tmp_path / "empty")
    with pytest.raises(ConfigError, match="No such file"):
        read_hostfile(tmp_path / "missing")


def test_l5_the_number_of_ranks_agrees_with_the_hosts() -> None:
    assert placed([Host("a", 2), Host("b")], None) == (Host("a", 2), Host("b", 1))
    assert placed(HOSTS, 5) == HOSTS
    with pytest.raises(ConfigError, match=r"-n 4: the hosts have 5 ranks \(a:2, b:3\)"):
        placed(HOSTS, 4)
    with pytest.raises(ConfigError, match="-n 1: fewer ranks than the 2 hosts"):
        placed([Host("a"), Host("b")], 1)


def test_l5_servers_are_the_last_ranks_of_the_last_hosts() -> None:
    two = [Host("a", 2), Host("b", 2)]
    for n in (None, 4):  # the numbers are those of the workers
        assert placed(two, n, servers=2) == (Host("a", 2), Host("b", 4))
    assert placed([*two, Host("c", 2)], 4, servers=2) == (*two, Host("c", 2))  # they are those of all
    assert placed([Host("a"), Host("b"), Host("c")], 4, servers=2) == tuple(Host(name, 2) for name in "abc")
    assert placed([Host("a"), Host("b")], None, servers=1) == (Host("a", 1), Host("b", 2))
    with pytest.raises(ConfigError, match=r"-n 4 --servers 2: the hosts have 5 ranks \(a:2, b:3\): expected 4, or 6 w"):
        placed(HOSTS, 4, servers=2)
    with pytest.raises(ConfigError, match="-n 1 --servers 1: fewer ranks than the 3 hosts"):
        placed([Host("a"), Host("b"), Host("c")], 1, servers=1)


@given(hosts=st.integers(1, 9), more=st.integers(0, 40))
def test_l5_ranks_are_shared_out_over_hosts_without_numbers(hosts: int, more: int) -> None:
    ranks = hosts + more
    counts = [host.ranks or 0 for host in placed([Host(str(i)) for i in range(hosts)], ranks)]
    assert sum(counts) == ranks
    assert sorted(counts, reverse=True) == counts
    assert counts[0] - counts[-1] <= 1
    dealt = [Host(str(i), count) for i, count in enumerate(counts)]
    assert [host_of(dealt, rank) for rank in range(ranks)] == [
        host.name for host in dealt for _ in range(host.ranks or 0)
    ]


# Arguments of mpirun


def test_l5_openmpi_fills_one_host_after_the_other() -> None:
    assert commands.mpirun_command(JOB, OPENMPI, GUARD) == [
        OPENMPI.mpirun,
        *("-n", "5"),
        *("--map-by", "slot:OVERSUBSCRIBE"),
        *("--bind-to", "none"),
        *("--host", "a:2,b:3"),
        *("-x", "AIODIST_TOKEN", "-x", "LD_LIBRARY_PATH", "-x", "PYTHONPATH"),
        *GUARD,
    ]


def test_l5_openmpi_takes_a_remote_shell_and_a_network() -> None:
    job = replace(JOB, rsh="ssh -p 2222", iface="10.0.0.0/24", mpi_args=("--map-by", "node"))
    command = commands.mpirun_command(job, OPENMPI, GUARD)
    assert command[3:] == [
        *("--bind-to", "none"),
        *("--host", "a:2,b:3"),
        *("--prtemca", "plm_ssh_agent", "ssh -p 2222"),
        *("--prtemca", "prte_if_include", "10.0.0.0/24", "--mca", "btl_tcp_if_include", "10.0.0.0/24"),
        *("-x", "AIODIST_TOKEN", "-x", "LD_LIBRARY_PATH", "-x", "PYTHONPATH"),
        *("--map-by", "node"),
        *GUARD,
    ]
    old = commands.mpirun_command(job, OLD_OPENMPI, GUARD)
    assert ("--mca", "plm_rsh_agent") in itertools.pairwise(old)
    assert ("--mca", "oob_tcp_if_include") in itertools.pairwise(old)


def test_l5_mpich_takes_hosts_a_remote_shell_and_an_interface() -> None:
    job = replace(JOB, rsh="/opt/agent", iface="lo")
    assert commands.mpirun_command(job, MPICH, GUARD) == [
        MPICH.mpirun,
        *("-n", "5"),
        *("-hosts", "a:2,b:3"),
        *("-launcher", "ssh", "-launcher-exec", "/opt/agent"),
        *("-iface", "lo"),
        *("-genvlist", "AIODIST_TOKEN,LD_LIBRARY_PATH,PYTHONPATH"),
        *GUARD,
    ]
    assert "lo" in commands.mpirun_command(replace(job, iface="127.0.0.0/8"), MPICH, GUARD)


def test_l5_what_belongs_to_a_host_stays_there() -> None:
    environ = {"HOME": "/root", "SSH_AUTH_SOCK": "/tmp/s", "SLURM_NODEID": "0", "TMPDIR": "/t", "OMP_NUM_THREADS": "4"}
    assert commands.travelling({**environ, "PATH": "/bin"}) == {"OMP_NUM_THREADS": "4", "PATH": "/bin"}


def test_l5_libraries_use_the_interface_that_was_named() -> None:
    named = {"FI_TCP_IFACE": "eth1", "GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "eth1"}
    assert commands.network_variables(OPENMPI, "eth1", {}) == named
    assert commands.network_variables(OPENMPI, "eth1", {"NCCL_SOCKET_IFNAME": "ib0"})["NCCL_SOCKET_IFNAME"] == "ib0"
    assert commands.network_variables(OPENMPI, "10.0.0.0/24", {}) == {}
    assert commands.network_variables(MPICH, "", {}) == {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "^sockets"}
    assert commands.network_variables(MPICH, "", {"FI_PROVIDER": "verbs"})["FI_PROVIDER"] == "verbs"


def test_l5_ranks_go_to_the_same_folder_unless_mpirun_is_told_another() -> None:
    assert commands.folder(JOB, Path("/work")) == "/work"
    assert commands.folder(replace(JOB, mpi_args=("--wdir", "/tmp")), Path("/work")) is None
    assert commands.folder(replace(JOB, hosts=()), Path("/work")) is None


# Without MPI


_RSH = """#!/bin/sh
echo "$@" >> {folder}/asked
case $1 in
away) shift; exec env -i PATH="$PATH" {mark}="${mark}" sh -c "$*";;
esac
echo "rsh: no host $1" >&2
exit 255
"""


def rsh(plain: Launcher) -> str:
    """Return a remote shell that knows the host `away`, which is this one, and notes what it is asked."""
    agent = plain.folder / "rsh"
    agent.write_text(_RSH.format(folder=plain.folder, mark=MARK))
    agent.chmod(0o755)
    return str(agent)


def test_l5_a_remote_shell_starts_ranks_where_there_is_no_mpi(plain: Launcher) -> None:
    script = plain.script("""
        place = [os.environ[f"AIODIST_{name}"] for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
        say(*place, os.getcwd(), os.environ.get("GIVEN"), sys.stdin.read().strip() or None)
    """)
    options = ("--hosts", "localhost:1,away:2", "--rsh", rsh(plain), "-x", "GIVEN=a b")
    done = plain.run(*options, script, n=3, stdin=None, input="a word")
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == [
        f"[0] 0 3 0 1 {plain.folder} a b a word",
        f"[1] 1 3 0 2 {plain.folder} a b None",
        f"[2] 2 3 1 2 {plain.folder} a b None",
    ]
    asked = (plain.folder / "asked").read_text()
    assert len(asked.splitlines()) == 2
    assert "AIODIST_" not in asked, "command lines show no secret, nor any value"
    assert plain.left_after(3) == []


def test_l5_a_host_that_starts_nothing_is_named(plain: Launcher) -> None:
    done = plain.run("--hosts", "localhost:1,gone:1", "--rsh", rsh(plain), plain.script("stay()"))
    assert done.returncode == 2
    assert "rsh: no host gone" in done.stderr
    assert "rank 1 was not started on gone; aiodist doctor --hosts localhost:1,gone:1" in done.stderr
    assert plain.left_after(3) == []


GROWS = """
    import asyncio, os, signal, time
    import aiodist

    async def main():
        async with aiodist.init(elastic=True, timeout=20) as coll:
            if coll.generation == 0:
                try:
                    await coll.barrier()
                    if coll.rank == 1:
                        open("gone", "w").close()
                        os.kill(os.getpid(), signal.SIGKILL)
                    await coll.barrier()
                except aiodist.PeerError:
                    coll = await coll.shrink()
                for _ in range(2):
                    try:
                        coll = await coll.grow(1)
                        break
                    except aiodist.LaunchError:
                        say("none came")
            say("ends with", coll.size)

    aiodist.run(main())
"""


_IMPATIENT = """
import sys
from aiodist.launch import job
job.START_TIMEOUT = 1.0
from aiodist.cli import main
sys.exit(main())
"""


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["exit 255", "exec sleep 600"], ids=["the host is gone", "the remote shell hangs"])
def test_w3_a_host_from_which_no_rank_comes_ends_no_job(nursery: str, plain: Launcher, how: str) -> None:
    agent = plain.folder / "rsh"
    agent.write_text(f'#!/bin/sh\n[ -e {plain.folder}/gone ] && {how}\nshift; exec env -i PATH="$PATH" sh -c "$*"\n')
    agent.chmod(0o755)
    hosts = ("--mpi", "none", "--hosts", "localhost:1,away:1", "--rsh", str(agent), "--elastic", "1:2")
    command = [sys.executable, "-c", _IMPATIENT, "run", *hosts, *stub(nursery, plain.script(GROWS))]
    done = subprocess.run(command, cwd=plain.folder, env=plain.environ, capture_output=True, text=True, timeout=40)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[:1] == ["[0] none came"]
    assert plain.left_after(3) == []


PLACES = """
    import asyncio, os, signal
    import aiodist

    async def main():
        async with aiodist.init(elastic=True, timeout=20) as coll:
            if coll.generation == 0:
                try:
                    await coll.barrier()
                    if coll.rank in (1, 3):
                        os.kill(os.getpid(), signal.SIGKILL)
                    while True:
                        await coll.barrier()
                except aiodist.PeerError:
                    while coll.size > 2:
                        coll = await coll.shrink()
                coll = await coll.grow(3)
            else:
                told = [int(os.environ[f"AIODIST_LOCAL_{name}"]) for name in ("RANK", "SIZE")]
                say(coll.rank, *told, told == [coll.local_rank, coll.local_size], len(coll.topology.hosts))
            await coll.barrier()

    aiodist.run(main())
"""


@pytest.mark.thorough
def test_w3_ranks_that_join_on_hosts_are_told_their_place_there(nursery: str, plain: Launcher) -> None:
    """Both hosts are this one to the ranks, but not to the launcher, which tells the places that it has chosen."""
    hosts = ("--hosts", "localhost:2,away:2", "--rsh", rsh(plain), "--elastic", "1:5")
    done = plain.run(*hosts, *stub(nursery, plain.script(PLACES)), n=4, timeout=40)
    assert done.returncode == 0, done.stdout + done.stderr
    said = sorted(line.split()[1:4] for line in done.stdout.splitlines() if " True" in line or " False" in line)
    assert said == [["2", "1", "3"], ["3", "1", "2"], ["4", "2", "3"]], done.stdout


@pytest.mark.thorough
def test_w3_a_rank_comes_to_another_host_where_one_is_gone(nursery: str, plain: Launcher) -> None:
    agent = plain.folder / "rsh"
    agent.write_text(
        f'#!/bin/sh\n[ -e {plain.folder}/gone ] && [ "$1" = away ] && exit 255\n'
        f'shift; exec env -i PATH="$PATH" sh -c "$*"\n'
    )
    agent.chmod(0o755)
    hosts = ("--hosts", "localhost:1,away:1,spare:1", "-n", "3", "--rsh", str(agent), "--elastic", "1:3")
    done = plain.run(*hosts, *stub(nursery, plain.script(GROWS)), n=3, timeout=40)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[0] ends with 3" in done.stdout.splitlines(), "it came here in its place"
    assert plain.left_after(3) == []


@pytest.mark.thorough
def test_w3_a_remote_shell_that_cannot_be_run_any_more_ends_no_job(nursery: str, plain: Launcher) -> None:
    agent = plain.folder / "rsh"
    agent.write_text('#!/bin/sh\nshift; exec env -i PATH="$PATH" sh -c "$*"\n')
    agent.chmod(0o755)
    script = plain.script(GROWS.replace('open("gone", "w").close()', f'os.unlink("{agent}")'))
    hosts = ("--hosts", "localhost:1,away:1", "--rsh", str(agent), "--elastic", "1:2")
    done = plain.run(*hosts, *stub(nursery, script), timeout=40)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[0] none came" in done.stdout
    assert plain.left_after(3) == []


def test_l5_a_remote_shell_that_hangs_ends_with_a_launcher_that_is_killed(plain: Launcher) -> None:
    agent = plain.folder / "rsh"
    agent.write_text(f"#!/bin/sh\necho hangs >&2\n{MARK}=${MARK} exec sleep 600\n")
    agent.chmod(0o755)
    with plain.started("--hosts", "localhost:1,away:1", "--rsh", str(agent), plain.script("stay()")) as process:
        plain.read_until(process.stderr, "[rsh] hangs")
        process.kill()
        assert plain.left_after(5) == []


@pytest.mark.parametrize(
    ("agent", "variable", "why"),
    [
        ("ssh '", "", '--rsh "ssh \'": No closing quotation'),
        ("ssh", "a\n\nb", "LD_LIBRARY_PATH has a line break"),
    ],
)
def test_l5_what_no_remote_shell_can_be_given_is_refused(plain: Launcher, agent: str, variable: str, why: str) -> None:
    options = ("--hosts", "localhost:1,away:1", "--rsh", agent, plain.script("say('never')"))
    done = plain.run(*options, env=plain.environ | ({"LD_LIBRARY_PATH": variable} if variable else {}))
    assert (done.returncode, done.stdout) == (2, "")
    assert why in done.stderr
    assert len(done.stderr.splitlines()) == 1


# What is refused


def test_l5_an_mpi_for_several_hosts_is_one_that_is_known() -> None:
    commands.check_mpi(JOB, OPENMPI)
    commands.check_mpi(replace(JOB, mpi="none"), None)
    commands.check_mpi(JOB, None)
    with pytest.raises(ConfigError, match="with --mpi-arg"):
        commands.check_mpi(JOB, OTHER)
    with pytest.raises(ConfigError, match="put them into a script"):
        commands.check_mpi(replace(JOB, rsh="ssh -p 2222"), MPICH)
    for job in (replace(JOB, hosts=(), mpi="none"), replace(JOB, hosts=())):
        commands.check_mpi(job, None)


def test_l5_options_for_hosts_need_hosts() -> None:
    with pytest.raises(ConfigError, match="--rsh is for several hosts"):
        Job(("train.py",), 2, rsh="ssh")
    with pytest.raises(ConfigError, match="--iface is for several hosts"):
        Job(("train.py",), 2, iface="eth0")
    with pytest.raises(ConfigError, match="4 ranks, but a:2, b:3"):
        Job(("train.py",), 4, hosts=HOSTS)


def test_l5_an_unknown_host_is_named() -> None:
    hosts.check_known(["localhost", "127.0.0.1"], "")
    hosts.check_known(["nobody.invalid"], "/opt/agent")
    with pytest.raises(ConfigError, match=r"host nobody\.invalid is not known here"):
        hosts.check_known(["localhost", "nobody.invalid"], "")


def test_l5_an_unknown_interface_lists_those_there_are() -> None:
    assert hosts.interface("lo") == ("lo", "127.0.0.1")
    assert hosts.interface("127.0.0.0/8") == ("lo", "127.0.0.1")
    with pytest.raises(ConfigError, match=r"--iface eth99: expected an interface .*lo 127\.0\.0\.1"):
        hosts.interface("eth99")


def test_l5_the_launcher_is_met_where_the_others_reach_it() -> None:
    assert hosts.meeting_address(["localhost"], "") == hosts.LOOPBACK
    assert hosts.meeting_address(["localhost"], "lo") == "127.0.0.1"
    assert hosts.is_this_host("localhost")
    assert not hosts.is_this_host("192.0.2.77")
    outward = hosts.meeting_address(["nobody.invalid"], "")
    socket.create_server((outward, 0), family=socket.AF_INET6 if ":" in outward else socket.AF_INET).close()


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--hosts", "a:1", "--hostfile", "f"), "give one of them"),
        (("--hosts", "a:1,b:1", "-n", "3"), "-n 3: the hosts have 2 ranks"),
        (("--hosts", "nobody.invalid:1", "--mpi", "none"), "host nobody.invalid is not known here"),
        (("--rsh", "ssh", "--mpi", "none"), "--rsh is for several hosts"),
        (("--report",), "--report: use --stragglers"),
    ],
)
def test_l5_the_command_line_refuses_in_one_line(plain: Launcher, options: tuple[str, ...], message: str) -> None:
    script = plain.script("say('never')")
    command = [sys.executable, "-m", "aiodist.cli", "run", *options, script]
    done = subprocess.run(command, cwd=plain.folder, env=plain.environ, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
