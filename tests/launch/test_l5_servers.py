"""`aiodist run --servers S` and `--keep-going`: who is there, and who stays. The scripts load no torch."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

from aiodist.testing.seams.mpi import find_mpi

if TYPE_CHECKING:
    from tests.launch.conftest import Launcher

pytestmark = pytest.mark.timeout(90)

ROLE = """
from aiodist.env import servers
say(rank, size, servers(size))
"""


@pytest.mark.drawn(1)
def test_l5_servers_come_beside_the_workers(launcher: Launcher) -> None:
    done = launcher.run("--servers", "2", launcher.script(ROLE), n=1)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] {rank} 3 2" for rank in range(3)]


def test_l5_servers_come_beside_as_many_workers_as_cores(plain: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    command = plain.command("--servers", "1", plain.script(ROLE))
    command[command.index("-n") + 1] = "auto"
    done = subprocess.run(command, cwd=plain.folder, env=plain.environ, capture_output=True, text=True, timeout=60)
    size = len(os.sched_getaffinity(0)) + 1
    assert sorted(done.stdout.splitlines()) == sorted(f"[{rank}] {rank} {size} 1" for rank in range(size))


def test_l5_servers_of_another_job_are_not_inherited(plain: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIODIST_SERVERS", "1")
    assert sorted(plain.run(plain.script(ROLE)).stdout.splitlines()) == ["[0] 0 2 None", "[1] 1 2 None"]


@pytest.mark.drawn(1)
def test_l5_a_server_that_dies_ends_the_job_and_is_called_so(launcher: Launcher) -> None:
    script = launcher.script("if rank == 2: sys.exit(3)\nstay()")
    done = launcher.run("--servers", "1", script)
    assert (done.returncode, done.stderr.splitlines()) == (3, ["rank 2 (server): exit code 3"])


def test_l5_keep_going_reports_each_death_at_once_and_the_others_go_on(plain: Launcher) -> None:
    script = plain.script("""
        if rank == 2:
            sys.exit(3)
        if rank == 1:
            open("now").close()  # a pipe: until rank 0 opens it too
            os.kill(os.getpid(), signal.SIGKILL)
        for line in sys.stdin:
            if line == "kill\\n":
                open("now", "w").close()
        say("to the end")
    """)
    os.mkfifo(plain.folder / "now")
    with plain.started("--keep-going", "--servers", "1", script, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        plain.read_until(process.stderr, "rank 2 (server): exit code 3")
        process.stdin.write("kill\n")
        process.stdin.flush()
        plain.read_until(process.stderr, "rank 1: signal SIGKILL")
        stdout, stderr = process.communicate(timeout=20)
    assert (process.returncode, stdout, stderr) == (3, "[0] to the end\n", "")


def test_l5_keep_going_ends_with_ctrl_c(plain: Launcher) -> None:
    script = plain.script("if rank == 1: sys.exit(3)\nstay()")
    with plain.started("--keep-going", script) as process:
        plain.read_until(process.stderr, "rank 1: exit code 3")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=10)
        assert process.returncode == 130
        assert plain.left_after(0) == []


def test_l5_keep_going_is_refused_under_an_mpirun(plain: Launcher) -> None:
    if find_mpi("auto", os.environ.get("PATH", os.defpath)) is None:
        pytest.skip("no mpirun was found")
    done = plain.run("--mpi", "auto", "--keep-going", plain.script("say('never')"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "which --mpi auto found: MPI ends every rank when one dies; say --mpi none" in done.stderr
