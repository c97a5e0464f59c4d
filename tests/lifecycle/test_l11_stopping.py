"""Ranks that stop together: a signal at one of them, or at the launcher, ends all in order, at the same place."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.lifecycle.conftest import Run

pytestmark = pytest.mark.drawn(1)
NONE = pytest.mark.parametrize("run", ["none"], indirect=True)


def pids(process: subprocess.Popen[str], n: int) -> dict[int, int]:
    """Return the ids of the ranks' processes, once all have said them."""
    assert process.stdout is not None
    found: dict[int, int] = {}
    while len(found) < n:
        rank, pid = process.stdout.readline().removeprefix("[").split("] pid: ")
        found[int(rank)] = int(pid)
    return found


@pytest.mark.parametrize("program", ["asked", "trained", "scripted"])
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_l11_a_signal_at_one_rank_stops_all_at_the_same_place(run: Run, program: str, signum: int) -> None:
    with run.started(run.command("stopping.py", program, n=3)) as process:
        os.kill(pids(process, 3)[1], signum)
        ended = run.finish(process)
    assert (ended.code, ended.codes()) == (0, [0, 0, 0]), ended
    what = "steps" if program == "trained" else "rounds"
    assert len({ended.value(rank, what) for rank in range(3)}) == 1
    assert [ended.value(rank, "closed") for rank in range(3)] == ["yes"] * 3
    told = f"rank 1 was asked to stop by {signal.Signals(signum).name}, and asks all: at their next look"
    assert [line for line in ended.errors.splitlines() if "asked to stop" in line] == [f"[1] {told}"]


@pytest.mark.parametrize("program", ["asked", "trained"])
def test_l11_ctrl_c_at_the_launcher_stops_all_in_order_and_its_code_says_so(run: Run, program: str) -> None:
    with run.started(run.command("stopping.py", program, n=2, options=("--kill-after", "25"))) as process:
        pids(process, 2)
        process.send_signal(signal.SIGINT)
        ended = run.finish(process)
    assert (ended.code, ended.codes()) == (130, [0, 0]), ended
    assert [ended.value(rank, "closed") for rank in range(2)] == ["yes"] * 2


@NONE
@pytest.mark.parametrize("program", ["late", "late_in_asyncio"])
def test_l11_a_signal_that_comes_to_a_rank_which_closes_already_is_no_failure(run: Run, program: str) -> None:
    ended = run("stopping.py", program)
    assert (ended.code, ended.codes()) == (0, [0, 0]), ended
    assert [ended.value(rank, "closed") for rank in range(2)] == ["yes"] * 2


@NONE
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_l11_a_second_signal_has_its_usual_meaning(run: Run, signum: int, code: int) -> None:
    with run.started(run.command("stopping.py", "deaf", n=2)) as process:
        assert process.stderr is not None
        pid = pids(process, 2)[1]
        os.kill(pid, signum)
        assert "asked to stop" in process.stderr.readline()
        os.kill(pid, signum)
        ended = run.finish(process)
    assert (ended.code, ended.exits[1][0]) == (code, -signum), ended
    assert ended.value(0, "released") == "yes"
