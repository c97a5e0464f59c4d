"""Rules of a run: its failure, the process of each test, the CPU time of tests, and no sleeping."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
import re
import sys
import time
import tomllib
from collections.abc import Generator
from pathlib import Path
from typing import Any

import psutil
import pytest
from xdist.scheduler import LoadScopeScheduling

from aiodist.testing import FakeClockLoop

__all__ = ["Cpu", "FilesAndJobs", "NoSleeping", "note_quarantine", "quarantine"]

_TESTS = str(Path(__file__).parent.parent)
_QUARANTINE = Path(_TESTS) / "quarantine.toml"
_MOST = 10
_DAYS = 14
_JOB = re.compile(r"\[(?:.*-)?(\d+-(?:openmpi|mpich|mpi|gloo|shm))\b")


def quarantine(text: str, today: datetime.date) -> dict[str, str]:
    r"""Return the tests that may fail, by their ids, with the failure seen of each; raise UsageError for a bad list.

    >>> text = "[[test]]\nid = 'tests/a.py::test_a'\nseen = 'a race'\nsince = 2026-01-01\n"
    >>> quarantine(text, datetime.date(2026, 1, 15))
    {'tests/a.py::test_a': 'a race'}
    >>> quarantine(text, datetime.date(2026, 1, 16))
    Traceback (most recent call last):
    ...
    pytest.UsageError: tests/a.py::test_a is in quarantine since 2026-01-01, 14 days are the most
    """
    tests = tomllib.loads(text).get("test", [])
    if len(tests) > _MOST:
        raise pytest.UsageError(f"{len(tests)} tests are in quarantine, {_MOST} are the most")
    for test in tests:
        if (today - test["since"]).days > _DAYS:
            raise pytest.UsageError(f"{test['id']} is in quarantine since {test['since']}, {_DAYS} days are the most")
    return {test["id"]: test["seen"] for test in tests}


def note_quarantine(items: list[pytest.Item]) -> None:
    """Let the tests of tests/quarantine.toml fail."""
    listed = quarantine(_QUARANTINE.read_text(encoding="utf-8"), datetime.datetime.now(tz=datetime.UTC).date())
    for item in items:
        if item.nodeid in listed:
            item.add_marker(pytest.mark.xfail(reason=listed[item.nodeid], strict=False))


class FilesAndJobs(LoadScopeScheduling):  # type: ignore[misc]
    """Has pytest-xdist run the tests of a file in one process, and those that share a job of ranks too."""

    def _split_scope(self, nodeid: str) -> str:
        job = _JOB.search(nodeid)
        return nodeid.partition("::")[0] if job is None else job[1]


class Cpu:
    """The CPU seconds of this process and of its children, those that have ended included."""

    def __init__(self) -> None:
        self._process = psutil.Process(os.getpid())
        self._before = self._now()

    def _now(self) -> float:
        seconds = 0.0
        for process in (self._process, *self._process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                seconds += sum(process.cpu_times()[:4])
        return seconds

    def lap(self) -> float:
        """Return the seconds since the last lap."""
        before, self._before = self._before, self._now()
        return max(self._before - before, 0.0)


class NoSleeping:
    """Fails a test that is not marked `processes` when it sleeps in real time; a virtual clock may jump.

    A test waits for an event, with a limit: it is as quick as the machine, and right on one that is slow.
    """

    def __init__(self) -> None:
        self._test: pytest.Item | None = None
        self._sleep: Any = time.sleep
        self._sleep_in_loop: Any = asyncio.sleep
        vars(time)["sleep"], vars(asyncio)["sleep"] = self._checked, self._checked_in_loop

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Note which test runs."""
        self._test = item
        return (yield)

    def _checked(self, seconds: float) -> None:
        self._check(seconds)
        self._sleep(seconds)

    def _checked_in_loop(self, delay: float, result: object = None) -> Any:
        if not isinstance(asyncio._get_running_loop(), FakeClockLoop):
            self._check(delay)
        return self._sleep_in_loop(delay, result)

    def _check(self, seconds: float) -> None:
        test, code = self._test, sys._getframe(2).f_code
        if test is None or seconds <= 0 or any(map(test.get_closest_marker, ("processes", "soak"))):
            return
        if code.co_filename.startswith(_TESTS) and "/support/" not in code.co_filename:
            place = f"{code.co_filename}:{code.co_firstlineno}"
            raise AssertionError(f"a test sleeps for {seconds:g} s in {place}: wait for an event, or have a clock jump")
