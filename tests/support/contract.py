"""What makes a run of the tests red, in which process a test runs, and the CPU time that tests take."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import tomllib
from pathlib import Path

import psutil
import pytest
from xdist.scheduler import LoadScopeScheduling

__all__ = ["Cpu", "FilesAndJobs", "note_quarantine", "quarantine"]

_QUARANTINE = Path(__file__).parent.parent / "quarantine.toml"
_MOST = 10
_DAYS = 14
_JOB = re.compile(r"\[(?:.*-)?(\d+-(?:openmpi|mpich|mpi|gloo|shm))\b")


def quarantine(text: str, today: datetime.date) -> dict[str, str]:
    r"""Return the tests that may fail, by their ids, and what was seen of each; raise UsageError for a bad list.

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
