"""W3 between processes: ranks are killed, the others continue, and the launcher starts new ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.lifecycle.conftest import Ended, Jobs, Run

pytestmark = pytest.mark.parametrize("run", ["none"], indirect=True)


def causes(ended: Ended) -> list[str]:
    """Return the launcher's own lines."""
    return [line for line in ended.errors.splitlines() if not line.startswith("[")]


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_w3_two_are_killed_two_join_and_the_weights_are_as_if_nothing_had_happened(run: Run, backend: str) -> None:
    run.environ["AIODIST_BACKEND"] = backend
    ended = run("elastic.py", "train", n=4, options=("--elastic", "2:4"))
    assert (ended.code, causes(ended)) == (0, ["rank 0: signal SIGKILL", "rank 2: signal SIGKILL"]), ended
    for process, rank in ((1, 0), (3, 1), (4, 2), (5, 3)):
        lost = ["lost: 0 of 4", "lost: 1 of 3"] if process < 4 else []
        assert ended.said(process) == [*lost, f"equal: True {rank} of 4"]


@pytest.mark.thorough
def test_w3_a_script_without_asyncio_loses_two_and_gets_two(run: Run) -> None:
    """A signal that comes after all other events of that world."""
    ended = run("elastic.py", "script", n=4, options=("--elastic", "2:4"))
    assert ended.code == 0, ended
    assert causes(ended) == ["rank 0: signal SIGKILL", "rank 2: signal SIGKILL"], ended
    for process, rank in ((1, 0), (3, 1), (4, 2), (5, 3)):
        lost = ["lost: 0 of 4", "lost: 1 of 3"] if process < 4 else []
        said = [line for line in ended.said(process) if "asked to stop" not in line]
        assert said == [*lost, f"equal: True {rank} of 4"]


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_w3_a_net_and_its_queue_go_on_and_each_record_is_trained_on_once(run: Run, backend: str) -> None:
    run.environ["AIODIST_BACKEND"] = backend
    ended = run("elastic.py", "count", n=4, options=("--elastic", "2:4"))
    assert (ended.code, causes(ended)) == (0, ["rank 0: signal SIGKILL", "rank 2: signal SIGKILL"]), ended
    for process, rank in ((1, 0), (3, 1), (4, 2)):
        lost = ["lost: 0 of 4", "lost: 1 of 3"] if process < 4 else []
        assert ended.said(process) == [*lost, f"once: True {rank} of 3"]


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_w3_regrouping_leaves_no_descriptor_thread_or_memory(run: Run, backend: str) -> None:
    run.environ["AIODIST_BACKEND"] = backend
    ended = run("elastic.py", "again", options=("--elastic", "1:2"))
    assert (ended.code, causes(ended)) == (0, []), ended
    assert ended.said(0) == ended.said(1) == ["held: True "]


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_w3_a_group_without_the_lost_rank_raises_the_loss_when_its_ranks_leave(run: Run, backend: str) -> None:
    run.environ["AIODIST_BACKEND"] = backend
    ended = run("elastic.py", "group", n=3, options=("--elastic", "2:3"))
    assert (ended.code, causes(ended)) == (0, ["rank 2: signal SIGKILL"]), ended
    assert ended.said(0) == ended.said(1) == ["lost: 2", "sum: 2.0"]


def test_w3_the_job_ends_with_fewer_than_it_needs_and_names_them(run: Run) -> None:
    ended = run("elastic.py", "too_few", n=3, options=("--elastic", "2:3"))
    assert ended.code == 137, ended
    *lines, last = causes(ended)
    assert sorted(lines) == ["rank 1: signal SIGKILL", "rank 2: signal SIGKILL"]
    assert last == "1 of at least 2 ranks are left: ranks 1, 2 failed"


@pytest.mark.thorough
def test_w3_a_rank_that_comes_late_to_a_shrink_is_named(run: Run) -> None:
    ended = run("elastic.py", "late", n=3, options=("--elastic", "1:3"))
    assert (ended.code, causes(ended)) == (0, []), ended
    warned, size = ended.said(0)
    assert warned.startswith("rank 0 waits in shrink #0 issued at ")
    assert warned.endswith(": rank 1: it has not asked to regroup")
    assert (size, ended.said(1)[-1]) == ("size: 3", "size: 3")  # an earlier report may be another
    assert "late: {1: 'it has not asked to regroup'}" in ended.said(2)


def test_w3_a_death_before_all_have_met_ends_the_job(run: Run) -> None:
    ended = run("elastic.py", "early", options=("--elastic", "1:2"))
    assert ended.code == 137, ended
    assert causes(ended)[0] == "rank 1: signal SIGKILL"


@pytest.mark.thorough
def test_w3_the_others_may_go_on_where_one_raised_too(run: Run) -> None:
    ended = run("elastic.py", "raises", n=3, options=("--elastic", "1:3"))
    assert (ended.code, causes(ended)) == (0, ["rank 1: exit code 1"]), ended
    assert ended.said(0) == ended.said(2) == ["told: 1 True", "sum: 2.0"]


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_w3_a_death_while_the_others_close_is_no_error_to_them(run: Run, backend: str) -> None:
    run.environ["AIODIST_BACKEND"] = backend
    ended = run("elastic.py", "closes", n=3, options=("--elastic", "1:3"))
    assert (ended.code, causes(ended)) == (0, ["rank 1: signal SIGKILL"]), ended
    assert ended.said(0) == ended.said(2) == ["closed"]


@pytest.mark.thorough
def test_w3_other_worlds_say_why_they_are_not_elastic(run: Run, jobs: Jobs) -> None:
    ended = run("elastic.py", "plain", options=("--elastic", "1:2"))
    why = "communicator 'world' is not elastic: expected aiodist.init(elastic=True) under aiodist run --elastic MIN:MAX"
    assert (ended.code, ended.said(0), ended.said(1)) == (0, [f"refused: {why}"], [f"refused: {why}"]), ended
    why = (
        "refused: init(elastic=True), and the job is not elastic: expected aiodist run --elastic MIN:MAX, whose "
        "launcher has the hub, so that any rank may die"
    )
    assert run("elastic.py", "elastic").said(0) == [why]
    assert jobs.alone("elastic.py", "elastic").text == f"{why}\n"
