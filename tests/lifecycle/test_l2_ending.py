"""The end of a job: exit code of each rank, time until all processes have ended, and their errors."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.lifecycle.conftest import Ended, Jobs, Run

pytestmark = pytest.mark.drawn(1)

GONE = 15.0  # seconds in which every rank is gone; less than a drain has, and than a kill is put off here


def all_gone(ended: Ended, seconds: float = GONE) -> bool:
    return all(ended.gone_after(rank, "mark") < seconds for rank in ended.exits)


def test_l2_clean_end_drains_and_reports_what_was_left(run: Run) -> None:
    ended = run("ending.py", "clean")
    assert (ended.code, ended.codes()) == (0, [0, 0]), ended
    for rank in range(2):
        said = ended.said(rank)
        assert "drained: True 2.0 2.0" in said
        assert "unmatched: True" in said
        assert said.count("closed: communicator 'world' is closed [communicator world]") == 3
        assert "the user's thread has ended" in said
        warned = [line for line in ended.errors.splitlines() if f"[{rank}]" in line and "Warning: " in line]
        assert any("RuntimeWarning: scan issued at" in line and "was never awaited" in line for line in warned)
        assert any(
            "RuntimeWarning: recv #3 issued at" in line and "never matched nor awaited" in line for line in warned
        )


@pytest.mark.thorough
def test_l2_body_raised_and_the_others_are_told(run: Run) -> None:
    ended = run("ending.py", "raised")
    assert (ended.code, ended.codes()) == (1, [1, 1]), ended
    assert ended.said(0) == [
        "raised by: 1",
        "boom: True",
        "in a task: RemoteError",
        "then world: refused",
        "then dup: refused",
        "released: yes",
    ]
    assert all_gone(ended)
    assert "rank 1: exit code 1" in ended.errors.splitlines()


@pytest.mark.thorough
@pytest.mark.parametrize("run", ["openmpi", "none"], indirect=True)
def test_l2_sys_exit_in_a_task(run: Run) -> None:
    ended = run("ending.py", "exit_in_task")
    assert (ended.code, ended.codes()) == (3, [1, 3]), ended
    assert ended.value(0, "told") == "rank 1 failed: SystemExit: 3"
    assert all_gone(ended)


@pytest.mark.thorough
@pytest.mark.parametrize("run", ["none"], indirect=True)
def test_l2_sys_exit_in_a_task_under_asyncios_own_loop(run: Run) -> None:
    ended = run("ending.py", "exit_in_task", "asyncio")
    assert (ended.code, ended.codes()) == (3, [1, 3]), ended
    assert ended.value(0, "told") == "rank 1 failed: SystemExit: 3"


@pytest.mark.thorough
@pytest.mark.parametrize("run", ["openmpi", "none"], indirect=True)
def test_l2_sys_exit_in_a_task_group(run: Run) -> None:
    ended = run("ending.py", "exit_in_group")
    assert (ended.code, ended.codes()) == (4, [1, 4]), ended
    assert all_gone(ended)


@pytest.mark.thorough
@pytest.mark.parametrize("run", ["openmpi", "none"], indirect=True)
@pytest.mark.parametrize(("program", "code"), [("executor_in_native_code", 5), ("user_thread", 6)])
def test_l2_threads_that_do_not_end(run: Run, program: str, code: int) -> None:
    ended = run("ending.py", program, options=("--kill-after", "20"))
    assert (ended.code, ended.codes()) == (code, [1, code]), ended
    assert all_gone(ended)


@pytest.mark.parametrize("run", ["openmpi", "none"], indirect=True)
def test_l2_ctrl_c(run: Run) -> None:
    with run.started(run.command("ending.py", "interrupted", n=2)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "[0] ready\n"
        process.send_signal(signal.SIGINT)
        ended = run.finish(process, limit=GONE)
    assert ended.code == 130, ended
    assert -signal.SIGINT in ended.codes()
    assert set(ended.codes()) <= {-signal.SIGINT, 1}  # 1: it heard of the other one before its own signal
    for rank in range(2):
        assert ended.value(rank, "released") == "yes"
    assert len(ended.errors.splitlines()) == 3, ended.errors  # which ranks are stopped, and where each was


@pytest.mark.thorough
@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_l2_forked_child_exits_and_the_job_goes_on(run: Run, loop: str) -> None:
    ended = run("ending.py", "forked", loop)
    assert (ended.code, ended.codes()) == (0, [0, 0]), ended
    assert "Exception" not in ended.errors, ended.errors
    refused = "in the child: communicator 'world' was opened before os.fork: a child cannot use it"
    for rank in range(2):
        assert ended.said(rank) == [*[refused] * 4, "child: 7", "sums: 2.0 2", "child: 0", "sums: 2.0 2", "end: 8"]


@pytest.mark.drawn(2)
@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_l2_forked_child_leaves_the_connections_of_the_loop_to_the_parent(jobs: Jobs, loop: str) -> None:
    """Both loops wait at an epoll, which a fork shares."""
    ended = jobs.alone("ending.py", "forked_with_a_connection", loop)
    assert (ended.code, ended.text.splitlines()) == (0, ["child: 7", "read: b'!'", "end: 8"]), ended


@pytest.mark.thorough
@pytest.mark.parametrize("run", ["openmpi", "none"], indirect=True)
def test_l2_what_is_not_drained_in_time_is_named(run: Run) -> None:
    ended = run("ending.py", "not_drained")
    assert (ended.code, ended.codes()) == (1, [1, 1]), ended
    assert "OperationTimeout: still pending after 0.5 s: allreduce #0 issued at" in ended.errors
    assert all_gone(ended)


def test_l2_killed_rank_is_lost_to_the_others(run: Run) -> None:
    ended = run("ending.py", "killed", n=3)
    assert (ended.code, ended.codes()) == (137, [1, 1, -9]), ended
    (mark,) = [float(line.removeprefix("mark: ")) for line in ended.said(2)]
    for rank in (0, 1):
        who, when = ended.value(rank, "lost").split()
        assert (who, float(when) - mark < GONE) == ("2", True)
        assert ended.value(rank, "then") == "2"
    assert all_gone(ended)
    assert "rank 2: signal SIGKILL" in ended.errors.splitlines()


@pytest.mark.parametrize("run", ["openmpi", "none"], indirect=True)
def test_l2_no_thread_is_left_when_the_interpreter_is_taken_apart(run: Run) -> None:
    """One that wants the GIL then may crash it: CPython 3.11 frees the state of the thread, and uses it afterwards."""
    program = str(Path(__file__).parent / "programs" / "threads_left.py")
    command = [sys.executable, "-m", "aiodist.cli", "run", "-n", "2", "--mpi", run.mpi, program]
    with run.started(command) as process:
        ended = run.finish(process)
    assert ended.code == 1, ended
    assert [ended.said(rank) for rank in range(2)] == [["left: []"]] * 2


def test_l2_alone_the_program_may_catch_and_go_on(jobs: Jobs) -> None:
    ended = jobs.alone("ending.py", "caught")
    assert (ended.code, ended.text) == (0, "went on: yes\n"), ended
