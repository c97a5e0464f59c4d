"""T5: `with aiodist.start() as coll:`, for scripts that do not use asyncio."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING

import pytest

import aiodist

if TYPE_CHECKING:
    from tests.lifecycle.conftest import Jobs, Run

pytestmark = pytest.mark.drawn(1)
NONE = pytest.mark.parametrize("run", ["none"], indirect=True)


def test_t5_it_takes_the_keywords_of_init() -> None:
    expected = dict(inspect.signature(aiodist.init).parameters)
    del expected["thread"]  # it is always so
    assert dict(inspect.signature(aiodist.start).parameters) == expected


@pytest.mark.thorough
def test_t5_its_calls_return_the_same_handles(run: Run) -> None:
    ended = run("started.py", "calls")
    assert (ended.code, ended.codes(), ended.errors) == (0, [0, 0], ""), ended
    assert [ended.said(rank) for rank in range(2)] == [["sum: 1", "then: CommunicatorClosed"]] * 2


def test_t5_alone(jobs: Jobs) -> None:
    ended = jobs.alone("started.py", "calls")
    assert (ended.code, ended.errors) == (0, ""), ended
    assert ended.text.splitlines() == ["sum: 0", "then: CommunicatorClosed"]


@NONE
def test_t5_a_rank_that_closes_is_told_with_the_line_of_its_program(run: Run) -> None:
    ended = run("started.py", "uneven")
    assert ended.code == 1, ended
    assert re.search(r"rank 0: allreduce .* rank 1: close at \S+/started\.py:\d+ in uneven", ended.errors), ended
    assert "Thread.run" not in ended.errors


@pytest.mark.thorough
@NONE
def test_t5_what_is_made_of_coroutines_runs_by_the_portal(run: Run) -> None:
    ended = run("started.py", "trains")
    assert (ended.code, ended.errors) == (0, ""), ended
    assert [ended.said(rank) for rank in range(2)] == [["trained"]] * 2


def test_t5_an_exception_is_told_to_the_others(run: Run) -> None:
    ended = run("started.py", "raised")
    assert (ended.code, ended.codes()) == (1, [1, 1]), ended
    (heard,) = ended.said(0)
    assert heard == "heard: RemoteError: rank 1 failed: ValueError: rank 1 has had enough"
    assert "ValueError: rank 1 has had enough" in ended.errors


@pytest.mark.thorough
def test_t5_ctrl_c_ends_the_job(run: Run) -> None:
    ended = run("started.py", "interrupted")
    assert ended.code != 0, ended
    assert ended.codes()[0] in (130, -2), ended
    assert ended.codes()[1] != 0
    assert ended.gone_after(1, "raised") < 10, ended
    assert "KeyboardInterrupt" in ended.errors


@NONE
def test_t5_a_report_has_the_line_of_a_rank_that_is_late(run: Run) -> None:
    """The loop of the late rank, in another thread, answers."""
    ended = run("started.py", "late")
    assert (ended.code, ended.codes()) == (0, [0, 0]), ended
    (line,) = [said for said in (ended.text + ended.errors).splitlines() if "rank 1: after" in said]
    assert re.search(r"its loop answers; it is at \S*started\.py:\d+ in late$", line), line


@pytest.mark.thorough
@NONE
def test_t5_threads_take_turns(run: Run) -> None:
    ended = run("started.py", "threads")
    assert (ended.code, ended.errors) == (0, ""), ended
    assert [ended.said(rank) for rank in range(2)] == [["turns: [2.0, 4.0]", "told: True"]] * 2


@pytest.mark.thorough
@NONE
def test_t5_as_in_a_notebook_a_loop_may_run_in_the_thread_that_starts_it(run: Run) -> None:
    ended = run("started.py", "within_a_loop")
    assert (ended.code, ended.errors) == (0, ""), ended
    assert [ended.said(rank) for rank in range(2)] == [["cell: 2"]] * 2


@pytest.mark.thorough
@NONE
def test_t5_a_program_that_ends_inside_leaves_it_then(run: Run) -> None:
    ended = run("started.py", "left_open")
    assert (ended.code, ended.codes(), ended.errors) == (0, [0, 0], ""), ended
    assert [ended.said(rank) for rank in range(2)] == [["sum: 2"]] * 2


@pytest.mark.thorough
@NONE
def test_t5_the_others_hear_of_what_ended_a_program_inside(run: Run) -> None:
    ended = run("started.py", "left_open_by_an_error")
    assert ended.codes()[1] == 1, ended
    assert ended.said(0) == ["heard: rank 1 failed: ValueError: rank 1 has had enough"]


def test_t5_without_start_there_is_no_portal(jobs: Jobs) -> None:
    ended = jobs.alone("started.py", "no_portal")
    assert (ended.code, ended.errors) == (0, ""), ended
    assert "only a world of aiodist.start() has one" in ended.text


@pytest.mark.thorough
@pytest.mark.drawn(2)
@pytest.mark.parametrize("how", ["script", "loop"])
def test_t5_the_default_device_of_a_program_is_its_own(run: Run, how: str) -> None:
    ended = run("default_device.py", how, "meta")
    assert (ended.code, ended.errors) == (0, ""), ended
    assert [ended.said(rank) for rank in range(2)] == [["all alike [2, 1]"]] * 2
