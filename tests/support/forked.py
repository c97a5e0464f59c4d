"""A child that a task has forked."""

from __future__ import annotations

import asyncio
import sys
from typing import Any


def still_in(loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any] | None) -> None:
    """From Python 3.14 on a forked child forgets what runs, and asyncio lets nothing out of the task."""
    if sys.version_info >= (3, 14):
        asyncio._set_running_loop(loop)
        asyncio.tasks._enter_task(loop, task)
