"""P7: a worker that is stopped during a read or a push delays no other worker, with real processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.lifecycle.conftest import Run


@pytest.mark.thorough
def test_p7_a_stopped_reader_holds_up_no_push_and_reads_one_version(run: Run) -> None:
    """The reader continues only after all pushes, and reads the values from before them."""
    ended = run("stopped.py", "reader", n=3)
    assert ended.codes() == [0, 0, 0], ended
    read = [line for line in ended.said(2) if line != "over"]
    if run.backend == "gloo":  # the data may leave before or after a push
        assert not any("mixed" in line for line in read), read
        assert [line for line in read if "last" in line] == ["add last: 20", "copy last: 1", "adam last: -20"]
        return
    assert read == [
        "add read: 0 of version 0",
        "add read: 10 of version 10",
        "add last: 20",
        "copy read: 0 of version 0",
        "copy read: 1 of version 10",
        "copy last: 1",
        "adam read: 0 of version 0",
        "adam read: -10 of version 10",
        "adam last: -20",
    ]


@pytest.mark.thorough
@pytest.mark.drawn(1)
def test_p7_a_stopped_reader_of_a_table_holds_up_no_push(run: Run) -> None:
    ended = run("stopped.py", "table", n=3)
    assert ended.codes() == [0, 0, 0], ended
    assert "rows read: 1" in ended.said(2)


@pytest.mark.thorough
@pytest.mark.drawn(1)
def test_p7_a_stopped_worker_stops_no_reader(run: Run) -> None:
    ended = run("stopped.py", "pusher", n=3)
    assert ended.codes() == [0, 0, 0], ended
    assert "read: True" in ended.said(2)
