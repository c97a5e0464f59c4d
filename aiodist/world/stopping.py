"""A signal that asks all ranks to stop together: `init(stop_on_signal=True)`."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from aiodist.communicator import Communicator
from aiodist.errors import ConfigError

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def stopping_by_signals(world: Communicator) -> Iterator[None]:
    """In this block the first SIGTERM or SIGINT of this process is `world.request_stop()`; a second does as without it.

    Raises `ConfigError` in another thread than the main one, which hears no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("stop_on_signal=True in another thread than the main one, which alone hears signals")
    before = {signum: signal.getsignal(signum) for signum in _SIGNALS}

    def restore() -> None:
        for signum, handler in before.items():
            if signal.getsignal(signum) is heard:  # else somebody has set another since
                signal.signal(signum, handler)

    def heard(signum: int, _frame: Any) -> None:  # noqa: ANN401
        restore()
        world.request_stop()
        told = f"rank {world.rank} was asked to stop by {signal.Signals(signum).name}, and asks all: at their next look"
        # Not here: what was interrupted may hold the lock of a handler of logging.
        world.parts.dispatcher.progress.post(partial(logging.getLogger("aiodist").warning, told))

    for signum in _SIGNALS:
        signal.signal(signum, heard)
    try:
        yield
    finally:
        restore()
