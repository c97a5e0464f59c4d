"""W12: `await coll.breakpoint()` in the ranks of `aiodist run` in a terminal."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.lifecycle.conftest import ROOT, slowness
from tests.support.terminals import Terminal, in_terminal

if TYPE_CHECKING:
    from tests.lifecycle.conftest import Run

NONE = pytest.mark.parametrize("run", ["none"], indirect=True)
WITH_MPI = [pytest.param(name, marks=pytest.mark.thorough) for name in ("openmpi", "mpich", "gloo")]
ALL = pytest.mark.parametrize("run", ["none", *WITH_MPI], indirect=True)
PAUSE = 3.5


@contextlib.contextmanager
def job(run: Run, how: str, n: int, *options: str) -> Iterator[Terminal]:
    """A job in a terminal."""
    command = ["-m", "aiodist.cli", "run", "-n", str(n), "--mpi", run.mpi, *options, *run.stub("breakpoints.py", how)]
    environ = {**os.environ, "LIFECYCLE_REPORT": str(run.folder), "PYTHONPATH": str(ROOT), **run.environ}
    with in_terminal([sys.executable, *command], run.folder, environ, 40 * slowness()) as terminal:
        yield terminal


def total(n: int) -> int:
    return sum(10 * (rank + 1) + 1 for rank in range(n))


@ALL
def test_w12_deadlines_stand_still_at_the_prompt_and_go_on_after(run: Run) -> None:
    with job(run, "deadlines", 3) as terminal:
        assert "await coll.breakpoint(rank=HELD)" in terminal.until("(Pdb) ")
        assert terminal.ask("coll.rank, coll.size") == "(1, 3)\n"
        assert terminal.ask(f"import time; time.sleep({PAUSE})") == ""
        assert terminal.ask("print('to the terminal')") == "to the terminal\n"
        assert "has waited for" not in terminal.text
        terminal.type("c\n")
        assert terminal.finish() == 0, terminal.text
    lines = terminal.text.splitlines()
    assert "[0] came [0.0, 1.0, 2.0] [1.0, 1.0]" in lines, terminal.text
    assert {f"[{rank}] sum 3" for rank in range(3)} < set(lines)
    (paused, counted) = map(float, re.findall(r"paused (\S+) counted (\S+)", terminal.text)[0])
    assert paused >= PAUSE
    assert counted >= PAUSE + 1.4  # the whole timeout, without the pause
    assert all(float(blocked) < PAUSE for blocked in re.findall(r"blocked for (\S+) s", terminal.text))
    assert "DeadlockError" not in terminal.text


@NONE
def test_w12_a_step_lets_the_ranks_go_on_and_quit_ends_the_job(run: Run) -> None:
    with job(run, "plain", 2) as terminal:
        terminal.until("-> await coll.breakpoint(HELD)\n(Pdb) ")
        assert terminal.ask("mine") == "20\n"
        assert terminal.ask("mine = 40") == ""
        assert "-> mine += 1\n" in terminal.ask("n")
        assert "-> total = await coll.allreduce(mine)\n" in terminal.ask("n")
        assert "-> say(" in terminal.ask("n")
        assert terminal.ask("p total").endswith(f"{total(2) + 20}\n")
        terminal.type("c\n")
        assert terminal.finish() == 0, terminal.text
    assert all(f"[{rank}] total {total(2) + 20}\n" in terminal.text for rank in range(2)), terminal.text
    with job(run, "plain", 2) as terminal:
        terminal.until("(Pdb) ")
        terminal.type("q\n")
        assert terminal.finish() == 1, terminal.text
    assert "Traceback" not in terminal.text
    assert "total" not in terminal.text


@NONE
def test_w12_without_a_terminal_all_ranks_raise(run: Run) -> None:
    ended = run("breakpoints.py", "refused", n=2)
    assert ended.codes() == [0, 0], ended
    for rank in range(2):
        error, after = ended.said(rank)
        assert error.startswith("breakpoint(rank=1): pdb needs a terminal, and the rank has none.")
        assert "`aiodist run --debug 1 ...`" in error
        assert after == "total 2"


@pytest.mark.thorough
def test_w12_an_interrupt_at_the_prompt_ends_the_job(run: Run) -> None:
    with job(run, "plain", 2) as terminal:
        terminal.until("(Pdb) ")
        terminal.type("\x03")
        assert terminal.finish() == 130, terminal.text
    assert "aiodist run: interrupted; stopping ranks 0, 1" in terminal.text
    assert "killed" not in terminal.text


@pytest.mark.thorough
@NONE
def test_w12_prompts_of_two_ranks_take_turns(run: Run) -> None:
    with job(run, "turns", 4) as terminal:
        terminal.until("(Pdb) ")
        first = terminal.ask("coll.rank")
        assert "(Pdb) " not in first
        terminal.type("c\n")
        terminal.until("(Pdb) ")
        second = terminal.ask("coll.rank")
        assert {first, second} == {"1\n", "3\n"}
        terminal.type("c\n")
        assert terminal.finish() == 0, terminal.text
    assert all(f"[{rank}] total 4\n" in terminal.text for rank in range(4)), terminal.text


@pytest.mark.thorough
@NONE
def test_w12_a_deadlock_is_found_after_the_prompt(run: Run) -> None:
    with job(run, "deadlock", 3) as terminal:
        terminal.until("(Pdb) ")
        assert terminal.ask(f"import time; time.sleep({PAUSE})") == ""
        terminal.type("c\n")
        terminal.finish()
    assert all(f"[{rank}] found deadlock" in terminal.text for rank in (0, 2)), terminal.text


@pytest.mark.thorough
def test_w12_a_killed_rank_releases_the_others(run: Run) -> None:
    """Rank 1 dies at the prompt: the others learn of it, their deadlines run, and keys are shown again."""
    with job(run, "plain", 3) as terminal:
        before = terminal.settings()
        terminal.until("(Pdb) ")
        pid = int(terminal.ask("import os; os.getpid()"))
        assert terminal.settings() != before
        os.kill(pid, signal.SIGKILL)
        assert terminal.finish() == 137, terminal.text
        assert terminal.settings() == before
    assert "rank 1 " in terminal.text
