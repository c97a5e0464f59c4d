"""Threads of aiodist that never run code of the program."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class OwnThread(threading.Thread):
    """A daemon thread that never runs code of the program. The check for stalled ranks ignores the thread.

    The thread affects the program only by ends of operations and by messages, which the check counts.
    """

    def __init__(self, name: str, run: Callable[..., object], *args: Any) -> None:  # noqa: ANN401
        super().__init__(name=name, target=run, args=args, daemon=True)
