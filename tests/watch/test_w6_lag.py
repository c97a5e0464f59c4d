"""W6: `init(report_lag_over=)` tells when the loop of a rank was blocked, for how long and at which line."""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import pytest

import aiodist
from tests.support.blocking import blocked_until, rounds

Until = Callable[[Callable[[], object]], Awaitable[None]]


class Clock:
    """The clock of the thread that watches loops, which the test sets."""

    def __init__(self) -> None:
        self.now = 0.0
        self.looks = 0

    def __call__(self) -> float:
        self.looks += threading.current_thread().name == "aiodist-lag"
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("aiodist.watch.lag.deadline_clock", SimpleNamespace(now=clock))
    return clock


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "aiodist-lag"]


def _block(clock: Clock, seconds: float) -> None:
    """Block the loop: when it is watched, until that much later, and until the watcher has looked where it is."""
    for after in (0.0, seconds):
        clock.now += after
        before = clock.looks
        assert blocked_until(lambda before=before: clock.looks >= before + 3)  # type: ignore[misc]


def _told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for record in caplog.records if "event loop" in (message := record.getMessage())]


async def test_w6_a_blocked_loop_is_told_with_its_line(
    clock: Clock, until: Until, caplog: pytest.LogCaptureFixture
) -> None:
    async with aiodist.init(report_lag_over=0.1):
        _block(clock, 0.7)
        await until(lambda: _told(caplog))
        (told,) = _told(caplog)
        assert _threads() == ["aiodist-lag"]
    line = inspect.getsourcelines(blocked_until)[1]
    found = re.fullmatch(r"rank 0: its event loop was blocked for 0.70 s at (.+):([0-9]+) in blocked_until", told)
    assert found, told
    assert found[1] == inspect.getsourcefile(blocked_until)
    assert line < int(found[2]) < line + 10
    assert not _threads()


async def test_w6_a_block_that_ends_at_once_loses_no_warning(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    async with aiodist.init(report_lag_over=0.1) as coll:
        _block(clock, 0.7)
        assert await coll.allreduce(1) == 1
    (told,) = _told(caplog)
    assert told.endswith("in blocked_until")


async def test_w6_once_a_minute(clock: Clock, until: Until, caplog: pytest.LogCaptureFixture) -> None:
    async with aiodist.init(report_lag_over=0.1):
        for pause, times in ((0, 1), (0, 1), (60, 2)):
            clock.now += pause
            _block(clock, 0.4)
            seen = clock.looks
            await until(lambda seen=seen: clock.looks > seen + 3)  # type: ignore[misc]
            assert len(_told(caplog)) == times
    assert "(1 times more since the last warning)" in _told(caplog)[1]


async def test_w6_off_costs_no_thread_and_a_loop_that_runs_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    async with aiodist.init():
        assert not _threads()
    async with aiodist.init(report_lag_over=5):
        await rounds()
    assert not _told(caplog)


@pytest.mark.parametrize("lag", [0, -1.0, float("nan")])
async def test_w6_lag_is_a_time(lag: float) -> None:
    with pytest.raises(ValueError, match="report_lag_over="):
        async with aiodist.init(report_lag_over=lag):
            pass
