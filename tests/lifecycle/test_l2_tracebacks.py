"""The traceback of a program that fails has the frames of the program, and the number of aiodist's frames."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.lifecycle.conftest import Ended, Jobs, Run

pytestmark = pytest.mark.drawn(1)

LOOPS = pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
HINT = "(AIODIST_TRACEBACK=full shows these frames too)"


def frames(text: str) -> list[str]:
    """Return the functions whose lines are shown, outermost first; "…" stands for those that are not."""
    found = re.findall(r'File "([^"]+)", line \d+, in (\S+)|(…) \d+ frames? of aiodist and asyncio', text)
    return [dots or function for file, function, dots in found if not file.endswith("nursery.py")]


def of_rank(ended: Ended, rank: int) -> str:
    prefix = f"[{rank}] "
    return "".join(f"{line.removeprefix(prefix)}\n" for line in ended.errors.splitlines() if line.startswith(prefix))


@LOOPS
def test_l2_a_traceback_shows_the_frames_of_the_program(jobs: Jobs, loop: str) -> None:
    ended = jobs.alone("failing.py", "plain", loop)
    assert ended.code == 1
    first, second = ended.errors.split("The above exception was the direct cause of the following exception:")
    assert frames(first) == ["deeper"]
    assert first.rstrip().endswith("a note of the program")
    assert frames(second)[:4] == ["<module>", "…", "main", "plain"]
    assert frames(second)[-1] == "deeper"
    assert second.rstrip().endswith(f"LookupError: boom\n{HINT}")
    assert len(ended.errors.splitlines()) < 35, ended.errors


@LOOPS
def test_l2_the_parts_of_a_group_are_folded_too(jobs: Jobs, loop: str) -> None:
    ended = jobs.alone("failing.py", "grouped", loop)
    assert ended.code == 1
    assert "ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)" in ended.errors
    assert "| LookupError: boom" in ended.errors
    assert "| a note of the program" in ended.errors
    assert set(frames(ended.errors)) == {"<module>", "…", "main", "grouped", "deeper"}


def test_l2_all_frames_are_shown_to_who_asks(jobs: Jobs) -> None:
    short = jobs.alone("failing.py", "plain").errors
    full = jobs.alone("failing.py", "plain", AIODIST_TRACEBACK="full").errors
    assert "…" not in full
    assert HINT not in full
    assert {"run", "_steps"} <= set(frames(full))
    assert len(full.splitlines()) > len(short.splitlines())


def test_l2_a_mistake_at_a_call_shows_where_it_was_found(jobs: Jobs) -> None:
    ended = jobs.alone("failing.py", "wrong_call")
    assert frames(ended.errors)[-2:] == ["wrong_call", "…"]
    assert re.search(
        r"… \d+ frames of aiodist and asyncio, to communicator/arguments.py:\d+ in check_tensor", ended.errors
    )


def test_l2_a_missing_attribute_tells_what_is_meant(jobs: Jobs) -> None:
    told = jobs.alone("failing.py", "other_name").errors
    assert "no attribute 'all_reduce': use allreduce\n" in told
    assert "Did you mean" not in told
    told = jobs.alone("failing.py", "unawaited").errors
    assert "no attribute 'allreduce'\nit is awaitable: `await` it first\n" in told
    told = jobs.alone("failing.py", "unopened").errors
    assert "AttributeError: no allreduce here: aiodist.init() is a block" in told
    assert "`await` it" not in told


def test_l2_a_world_that_does_not_open_shows_the_frames_of_the_program(jobs: Jobs) -> None:
    ended = jobs.alone("failing.py", "opening")
    assert frames(ended.errors) == ["<module>", "…", "main", "…"]
    assert "ConfigError: init(elastic=True), and the job is not elastic" in ended.errors
    ended = jobs.alone("failing.py", "opening", AIODIST_PIN="maybe")
    assert frames(ended.errors) == ["<module>", "…", "main", "…"]
    assert "ConfigError: AIODIST_PIN='maybe': expected 0 or 1" in ended.errors


def test_l2_a_program_that_prints_tracebacks_itself_does(jobs: Jobs) -> None:
    ended = jobs.alone("failing.py", "hooked")
    assert (ended.code, ended.errors) == (1, "the program's own\n")


@pytest.mark.thorough
def test_l2_the_other_ranks_print_it_folded_too(run: Run) -> None:
    ended = run("failing.py", "grouped")
    assert ended.code == 1, ended
    failed, told = of_rank(ended, 1), of_rank(ended, 0)
    for text in (failed, told):
        assert set(frames(text)) == {"<module>", "…", "main", "grouped", "deeper"}, text
        assert text.count(HINT) == 1
    assert "RemoteError: rank 1 failed: LookupError: boom" in told
    assert 'raise LookupError("boom") from error' in told
    assert len(told.splitlines()) < 70, told
