"""C14: a rank that is killed while named operations are in flight."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.lifecycle.conftest import Run

pytestmark = pytest.mark.drawn(1)

GONE = 10.0  # seconds; a silent rank counts as lost after 30


@pytest.mark.parametrize("run", ["none"], indirect=True)
@pytest.mark.parametrize("phase", ["absent", "meeting", "moving"])
def test_c14_a_rank_that_is_killed_is_lost_to_all(run: Run, phase: str) -> None:
    ended = run("named.py", phase, n=3)
    assert (ended.code, ended.codes()) == (137, [1, 1, -9]), ended
    (mark,) = [float(line.removeprefix("mark: ")) for line in ended.said(2)]
    for rank in range(2):
        assert ended.value(rank, "told") in ("PeerLost", "RemoteError")
        assert 0 <= float(ended.value(rank, "lost")) - mark < GONE
