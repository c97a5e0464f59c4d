"""Which rank the others wait for, told by `aiodist run --stragglers` and by `coll.statistics()`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.lifecycle.conftest import slowness

if TYPE_CHECKING:
    from tests.lifecycle.conftest import Run

pytestmark = pytest.mark.drawn(1)
NONE = pytest.mark.parametrize("run", ["none"], indirect=True)


def test_w5_the_report_points_at_the_rank_that_comes_late(run: Run) -> None:
    ended = run("traced.py", "late", n=3, options=("--stragglers",))
    assert (ended.code, ended.codes()) == (0, [0, 0, 0]), ended
    report = ended.errors
    found = re.search(r"others waited for rank 1: ([\d.]+) s, (\d+)% of all waiting", report)
    assert found is not None
    assert 10 * 2 * 0.2 <= float(found[1]) < 16  # two others wait, each time
    assert int(found[2]) >= 80
    assert re.search(r"the cause is rank 1, which comes late to allreduce .* at .*traced.py:\d+ in late", report)
    compared = re.search(r"who waited for whom: (\d+) of (\d+) collectives compared, by clocks to (\d+) us", report)
    assert compared is not None
    assert 400 <= int(compared[1]) <= int(compared[2])


@NONE
def test_w5_no_cause_is_named_where_ranks_are_late_in_turn(run: Run) -> None:
    ended = run("traced.py", "late_in_turn", n=3, options=("--stragglers",))
    assert ended.code == 0, ended
    assert [f"others waited for rank {rank}: " in ended.errors for rank in range(3)] == [True] * 3
    assert "no rank alone is the cause" in ended.errors


@pytest.mark.parametrize("run", ["none", "openmpi"], indirect=True)
def test_w5_all_ranks_know_it_by_operation(run: Run) -> None:
    ended = run("traced.py", "asked", n=2)
    assert (ended.code, ended.codes()) == (0, [0, 0]), ended
    for rank in range(2):
        cause, compared, *kinds = ended.value(rank, "waited").split()
        assert (cause, int(compared) >= 5) == ("1", True)
        assert kinds[::3] == ["allreduce", "broadcast"]
        for waited, late in zip(map(float, kinds[1::3]), map(float, kinds[2::3]), strict=True):
            assert abs(waited - late) < 0.05 * slowness(), ended  # each may be held up, in between
    assert "who waited" not in ended.errors  # no report was requested
