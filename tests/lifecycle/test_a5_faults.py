"""A5: shared memory if a rank is killed in the middle, if there is none, and after the end."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.lifecycle.conftest import shared_files, slowness

if TYPE_CHECKING:
    from tests.lifecycle.conftest import Run

pytestmark = pytest.mark.drawn(1)

GONE = 10.0  # seconds; a silent rank counts as lost after 30
HEARD = 1.0  # seconds from a death until the others are notified

none = pytest.mark.parametrize("run", ["none"], indirect=True)


@pytest.mark.thorough
@none
@pytest.mark.parametrize(("n", "place"), [(2, "arena"), (3, "arena"), (3, "ordinary")])
def test_a5_a_rank_killed_in_the_middle_is_lost_at_once(run: Run, n: int, place: str) -> None:
    files = shared_files()
    ended = run("memory.py", "killed", place, n=n)
    assert (ended.code, ended.codes()) == (137, [*[1] * (n - 1), -9]), ended
    (mark,) = [float(line.removeprefix("mark: ")) for line in ended.said(n - 1)]
    for rank in range(n - 1):
        assert ended.value(rank, "told") in ("PeerLost", "RemoteError")
        assert ended.value(rank, "left") == "0", "it still has memory of an arena"
        assert 0 <= float(ended.value(rank, "lost")) - mark < HEARD * slowness()
    assert all(ended.gone_after(rank, "mark") < GONE for rank in range(n))
    assert shared_files() <= files, "a file was left behind"


@pytest.mark.thorough
@none
def test_a5_everything_goes_back_and_init_may_come_again(run: Run) -> None:
    n = 3
    ended = run("memory.py", "clean", n=n)
    assert (ended.code, ended.codes()) == (0, [0] * n), ended
    for rank in range(n):
        assert ended.said(rank) == ["closed: yes", "left: 0"] * 2


@none
def test_a5_a_rank_that_has_no_memory_goes_on(run: Run) -> None:
    ended = run("memory.py", "lacking")
    assert (ended.code, ended.codes()) == (0, [0, 0]), ended
    assert ended.said(0) == ["sum: 20.0"]
    assert ended.said(1) == ["lack: True", "room: True", "sum: 20.0"]


@none
def test_a5_without_shared_memory_the_same_calls_work(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIODIST_SHM", "0")
    ended = run("memory.py", "without")
    assert (ended.code, ended.codes()) == (0, [0, 0]), ended
    for rank in range(2):
        said = ended.said(rank)
        assert said[:2] == ["sum: 10.0", "mapped: 0"]
        assert "it was turned off (AIODIST_SHM=0)" in said[2]


@none
def test_a5_one_rank_has_tensors_of_its_own(run: Run) -> None:
    ended = run("memory.py", "without", n=1)
    assert (ended.code, ended.codes()) == (0, [0]), ended
    assert ended.said(0)[:2] == ["sum: 5.0", "mapped: 0"]
    assert "there is one rank" in ended.said(0)[2]


@pytest.mark.thorough
@none
def test_l2_a_forked_child_leaves_its_parents_memory_alone(run: Run, tmp_path: Path) -> None:
    """The child takes no part in its parent's operations, whose memory both have."""
    ended = run("memory.py", "forked", str(tmp_path))
    assert (ended.code, ended.codes()) == (0, [0, 0]), ended
    waited, aborted, *rest = ended.said(0)
    assert re.fullmatch(r"in the child: RuntimeError allreduce #\d+ .*: a child cannot wait for it", waited)
    assert re.fullmatch(r"in the child: the control channel belongs to process \d+: a forked child has none", aborted)
    assert rest == ["child: 7", "sums: 3.0 3.0 3.0 2"], "the child did a part of it"
    assert ended.said(1) == ["sums: 3.0 3.0 3.0 2"]


@none
@pytest.mark.timeout(600)
@pytest.mark.parametrize("operations", [10_000, pytest.param(1_000_000, marks=pytest.mark.thorough)])
def test_a5_after_many_operations_no_memory_and_no_descriptor_is_missing(run: Run, operations: int) -> None:
    with run.started(run.command("memory.py", "many", str(operations), n=2)) as process:
        ended = run.finish(process, limit=200)
    assert (ended.code, ended.codes()) == (0, [0, 0]), ended
    for rank in range(2):
        assert ended.value(rank, "descriptors") == "0"
        assert int(ended.value(rank, "bytes")) < 1 << 20


@pytest.mark.thorough
@none
@pytest.mark.parametrize("how", ["returns", "exits", "thread"])
def test_l2_the_interpreter_ends_with_operations_in_flight(run: Run, how: str) -> None:
    """Short ones and long ones, those that the other rank takes part in and those that it does not."""
    ended = run("memory.py", "leave", how)
    code = {"returns": 0, "exits": 3, "thread": 0}[how]
    assert (ended.code, ended.codes()) == (code, [code, code]), ended
    for rank in range(2):
        assert ended.said(rank) == ["in flight: True", "the interpreter ends"]
