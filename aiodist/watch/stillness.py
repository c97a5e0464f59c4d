"""Checks if a rank is stalled: only the end of an operation can then make its process run the program's code.

The check covers the loop, devices and streams, the control channel, the process's signal handlers and all threads. A
thread counts as waiting if it has entered one of aiodist's waits (`threads.py`). Every other thread of the program
may wake this rank. [Note: standing still] in docs/design/watch.md has the argument.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` makes constants of handlers, which takes long
import asyncio
import functools
import gc
import signal
import socket
import threading
from collections import deque
from collections.abc import Sized
from typing import Any
from weakref import WeakValueDictionary

from aiodist.control import Channel
from aiodist.handles import Progress
from aiodist.handles.timers import is_quiet
from aiodist.pauses import deadline_clock
from aiodist.threads import OwnThread, current_frames, is_waiting

_DISPLAYS = ("rich.live", "tqdm._monitor", "tensorboard.summary.writer.event_file_writer")
"""Modules with classes of threads that only draw progress bars or write files."""
_NUMBERS = tuple(map(int, signal.valid_signals()))
_HANDLERS_OF = ("_signal", "asyncio", "uvloop", "aiodist", "torch", "lightning", "pytorch_lightning", "pytest_timeout")
"""Packages whose signal handlers end the program or note the signal. Handlers of a loop are checked with the loop."""


def why_not_stalled(progress: Progress, channel: Channel) -> str:
    """Return the reason why this rank may continue before its operations end, or "" (loop's thread)."""
    if deadline_clock.stands:
        return "a debugger holds the job"
    if progress.busy():
        return "a transfer or a device is at work"
    if channel.asks:
        return "an answer on the control channel is outstanding"
    state = _state_of(progress)
    if state is None:
        return f"its event loop is {type(progress.loop).__qualname__}, whose timers and files cannot be checked"
    ready, timers, others = state
    if any(map(_is_loud, ready)):
        return "its loop has a callback to run"
    if any(map(_is_loud, timers)):
        return "its loop has set a timer"
    if any(others):
        return "its loop waits for a file, a socket or a signal"
    if thread := thread_at_work(progress):
        return thread
    if any(_may_wake(_signal.getsignal(number)) for number in _NUMBERS):
        return "a signal handler of the program may wake it"
    return ""


def thread_at_work(progress: Progress) -> str:
    """Return the name of a thread that may wake this rank, as a sentence, or "" if all threads wait in aiodist.

    Threads are checked twice, since a thread may wake another thread after the check of that thread.
    """
    for _ in range(2):
        threads = {thread.ident: thread for thread in threading.enumerate()}
        # Threads of `_thread` and of libraries, such as autograd's, are only in this dict, while they run Python code.
        # Only the keys are read, no frames.
        for ident in threads.keys() | current_frames().keys():
            thread = threads.get(ident)
            if ident != progress.thread_id and not _is_harmless(thread) and not is_waiting(ident or 0):
                name = f"thread {thread.name!r}" if thread else "a thread that `threading` did not start"
                return f"{name} may wake it"
    return ""


def _is_harmless(thread: threading.Thread | None) -> bool:
    """Return True if the thread never runs the program's code, or only displays or writes."""
    return isinstance(thread, OwnThread) or type(thread).__module__ in _DISPLAYS


def _state_of(progress: Progress) -> tuple[list[Any], list[Any], list[Sized]] | None:
    """Return the ready callbacks, timers, files, sockets, servers and signal handlers of the loop."""
    loop: Any = progress.loop
    if isinstance(progress.loop, asyncio.SelectorEventLoop):
        files = set(loop._selector.get_map()) - progress.own_files - {loop._ssock.fileno()}
        return list(loop._ready), list(loop._scheduled), [files, loop._signal_handlers]
    if type(loop).__module__.partition(".")[0] != "uvloop":
        return None
    # uvloop has no attributes for these objects, but the garbage collector finds them.
    held = gc.get_referents(progress.loop)
    own = progress.own_files | {one.fileno() for one in held if isinstance(one, socket.socket)}
    ready = [handle for one in held if isinstance(one, deque) for handle in one]
    sets = [item for one in held if isinstance(one, set) for item in one]
    timers = [item for item in sets if hasattr(item, "when")]
    tables = [one for one in held if isinstance(one, dict)]
    files = {fd for table in tables for fd in table if fd not in own}
    transports = [one for one in held if isinstance(one, WeakValueDictionary)]
    return ready, timers, [files, *transports, [item for item in sets if not hasattr(item, "when")]]


def _is_loud(handle: Any) -> bool:  # noqa: ANN401
    """Return True if this callback of the loop may run code of the program."""
    if handle.cancelled():
        return False
    if (call := getattr(handle, "_callback", None)) is None:
        call = next(filter(callable, gc.get_referents(handle)), None)
    return not is_quiet(call, closing=True)


def _may_wake(handler: Any) -> bool:  # noqa: ANN401
    """Return True if a signal handler is a function of the program, which may wake the loop or a thread."""
    if not callable(handler):
        return False
    call = handler.func if isinstance(handler, functools.partial) else handler
    return str(getattr(call, "__module__", "")).partition(".")[0] not in _HANDLERS_OF
