"""`aiodist.open()`: a world without a block, also if it is never closed."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import pytest

import aiodist

if TYPE_CHECKING:
    from tests.lifecycle.conftest import Ended, Jobs, Run

pytestmark = pytest.mark.drawn(1)

WARNING = "RuntimeWarning: the world that aiodist.open() opened here was never closed: expected `await coll.aclose()`"
LOOPS = pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
NONE = pytest.mark.parametrize("run", ["none"], indirect=True)


def test_l10_it_takes_the_keywords_of_init() -> None:
    assert inspect.signature(aiodist.open).parameters == inspect.signature(aiodist.init).parameters


def warnings(ended: Ended) -> int:
    return ended.errors.count(WARNING)


def test_l10_aclose_does_what_the_end_of_the_block_does(run: Run) -> None:
    ended = run("kept.py", "closed")
    assert (ended.code, ended.codes(), ended.errors) == (0, [0, 0], ""), ended
    for rank in range(2):
        assert sorted(ended.said(rank)) == ["again: 2", "closed: world", "closed: world/dup1.0", "drained: 2.0"]


def test_l10_closed_at_exit_it_was_not_forgotten(run: Run) -> None:
    ended = run("kept.py", "closed_at_exit")
    assert (ended.code, ended.codes(), ended.errors) == (0, [0, 0], ""), ended


def test_l10_alone(jobs: Jobs) -> None:
    ended = jobs.alone("kept.py", "closed")
    assert (ended.code, ended.errors) == (0, ""), ended
    assert ended.text.splitlines()[-1] == "again: 1"


def test_l10_forgotten_everywhere_it_is_closed_with_a_warning(run: Run) -> None:
    ended = run("kept.py", "forgotten")
    assert (ended.code, ended.codes()) == (0, [0, 0]), ended
    assert [ended.said(rank) for rank in range(2)] == [["sum: 2"]] * 2
    assert warnings(ended) == 2, ended
    assert ended.errors.count("  coll = await aiodist.open()\n") == 2


@pytest.mark.thorough
@NONE
def test_l10_forgotten_on_asyncios_own_loop(run: Run) -> None:
    ended = run("kept.py", "forgotten", "asyncio")
    assert (ended.code, ended.codes()) == (0, [0, 0]), ended
    assert warnings(ended) == 2, ended


@pytest.mark.thorough
@NONE
def test_l10_forgotten_by_one_rank_the_other_closes_in_peace(run: Run) -> None:
    ended = run("kept.py", "one_forgets")
    assert (ended.code, ended.codes()) == (0, [0, 0]), ended
    assert ended.said(1) == ["sum: 2", "closed"]
    assert warnings(ended) == 1, ended


@NONE
@LOOPS
def test_l10_what_the_program_raised_is_told_to_the_others(run: Run, loop: str) -> None:
    ended = run("kept.py", "raised", loop)
    assert (ended.code, ended.codes()) == (1, [1, 1]), ended
    assert ended.said(0) == ["told: rank 1 failed: ValueError: boom True"], ended
    assert "rank 1: exit code 1" in ended.errors
    assert warnings(ended) == 0, ended
    assert "GeneratorExit" not in ended.errors


@NONE
@LOOPS
def test_l10_the_exit_code_is_kept(run: Run, loop: str) -> None:
    ended = run("kept.py", "left", loop)
    assert ended.code == 3, ended
    assert ended.codes()[1] == 3
    assert "rank 1: exit code 3" in ended.errors
