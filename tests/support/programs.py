"""Output and waits of the programs that tests start as ranks."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tests.support.blocking import blocked_until

__all__ = ["mark", "say", "until_stopped"]


def say(*words: object) -> None:
    """Write a line."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")  # at once: ranks may share a pipe
    sys.stdout.flush()


def mark(name: str = "mark") -> None:
    """Write what time it is."""
    say(f"{name}: {time.monotonic()}")


def until_stopped(pid: int) -> None:
    """Wait until a process was stopped."""
    stat = Path(f"/proc/{pid}/stat")
    assert blocked_until(lambda: stat.read_text().rpartition(") ")[2][0] == "T", 60)
