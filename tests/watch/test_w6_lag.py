"""W6: `init(lag=)` tells when the loop of a rank was blocked, for how long and at which line."""

from __future__ import annotations

import asyncio
import inspect
import re
import threading
import time

import pytest

import aiodist


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "aiodist-lag"]


def _block(seconds: float) -> None:
    time.sleep(seconds)


def _told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for record in caplog.records if "event loop" in (message := record.getMessage())]


async def test_w6_a_blocked_loop_is_told_with_its_line(caplog: pytest.LogCaptureFixture) -> None:
    async with aiodist.init(lag=0.1):
        await asyncio.sleep(0.05)
        _block(0.7)
        await asyncio.sleep(0.2)
        (told,) = _told(caplog)
        assert _threads() == ["aiodist-lag"]
    line = inspect.getsourcelines(_block)[1] + 1
    found = re.fullmatch(rf"rank 0: its event loop was blocked for ([0-9.]+) s at {__file__}:{line} in _block", told)
    assert found, told
    assert 0.5 < float(found[1]) < 5
    assert not _threads()


async def test_w6_a_block_that_ends_at_once_loses_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    async with aiodist.init(lag=0.1) as coll:
        await asyncio.sleep(0.05)
        _block(0.7)
        assert await coll.allreduce(1) == 1
    (told,) = _told(caplog)
    assert told.endswith("in _block")


async def test_w6_once_a_minute(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiodist.watch.lag._AGAIN_SECONDS", 1.5)
    async with aiodist.init(lag=0.1):
        for _ in range(2):
            _block(0.4)
            await asyncio.sleep(0.2)
        assert len(_told(caplog)) == 1
        await asyncio.sleep(1.5)
        _block(0.4)
        await asyncio.sleep(0.2)
        assert len(_told(caplog)) == 2
        assert "times more since it was told last)" in _told(caplog)[1]


async def test_w6_off_costs_no_thread_and_a_loop_that_runs_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    async with aiodist.init():
        assert not _threads()
    async with aiodist.init(lag=5):
        await asyncio.sleep(0.2)
    assert not _told(caplog)


@pytest.mark.parametrize("lag", [0, -1.0, float("nan")])
async def test_w6_lag_is_a_time(lag: float) -> None:
    with pytest.raises(ValueError, match="lag="):
        async with aiodist.init(lag=lag):
            pass
