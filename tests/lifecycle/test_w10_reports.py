"""The report of a late rank on standard error, in a program without any configuration."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.lifecycle.conftest import HERE

if TYPE_CHECKING:
    from tests.lifecycle.conftest import Ended, Run

pytestmark = pytest.mark.drawn(1)

PROGRAM = HERE / "programs" / "late.py"
NONE = pytest.mark.parametrize("run", ["none"], indirect=True)


def place(comment: str) -> str:
    """Return how a report names the line of the program that ends with this comment."""
    (line,) = [
        i
        for i, line in enumerate(PROGRAM.read_text().splitlines(), 1)
        if line.endswith((f"  # {comment}", f": W10, {comment}"))
    ]
    return f"{PROGRAM}:{line} in main"


def report(ended: Ended) -> list[str]:
    """Return the lines of standard error; rank 0 wrote all of them."""
    assert (ended.code, ended.codes()) == (0, [0] * len(ended.exits)), ended
    lines = ended.errors.splitlines()
    assert all(line.startswith("[0] ") for line in lines), ended
    return [line.removeprefix("[0] ") for line in lines]


def check(ended: Ended, seconds: int, loop: str, where: str) -> None:
    """Check that the report has the waiting ranks, their operation, the time, and the late rank with its line."""
    operation = re.escape(f"allreduce #1 issued at {place('the one that waits')} on 'world'")
    after = re.escape(f"after barrier at {place('the last one in time')}")
    expected = [
        r"an operation has waited for (\d+) s:",
        rf"  rank 0 waits for rank 1 in {operation}, for (\d+) s",
        rf"  rank 1: {after}( on 'world')?; its loop {loop}; it is at {re.escape(place(where))}",
        rf"  rank 2 waits for rank 1 in {operation}(?:, for (\d+) s)?",  # where it began that long ago
    ]
    lines = report(ended)
    assert len(lines) == len(ended.exits) + 1, ended
    for line, pattern in zip(lines, expected, strict=False):
        found = re.fullmatch(pattern, line)
        assert found, (line, pattern)
        if (told := found[1]) and told.isdecimal():
            assert seconds <= int(told), line


def test_w10_a_rank_that_is_asleep_is_reported(run: Run) -> None:
    check(run("late.py", "2.9", "asleep", "1", n=3), 1, "answers", "where it is asleep")


@pytest.mark.thorough
def test_w10_a_rank_that_is_busy_is_reported(run: Run) -> None:
    check(run("late.py", "2.9", "busy", "1"), 1, "does not answer", "where it is busy")


@pytest.mark.thorough
@NONE
def test_w10_after_ten_seconds_without_any_option(run: Run) -> None:
    check(run("late.py", "12", "asleep", "default"), 10, "answers", "where it is asleep")


@NONE
@pytest.mark.parametrize("asked", ["default", "none"])
def test_w10_nothing_is_said_before_or_when_none_is_wanted(run: Run, asked: str) -> None:
    assert report(run("late.py", "3", "asleep", asked)) == []
