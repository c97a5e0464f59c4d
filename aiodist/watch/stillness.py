"""Whether a rank stands still: only the end of an operation can make its process run the program's code.

Everything that could do so is looked at: what the loop has ready, its timers, files and signal handlers, the work of
devices and streams, what was asked on the control channel, every other thread, and the process's signal handlers. What
is of a kind that is not known here counts as something that can. [Note: standing still] in docs/design/watch.md says
why that is enough.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` makes constants of handlers, which takes long
import asyncio
import dis
import functools
import gc
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Sequence, Sized
from concurrent.futures import thread as executors
from types import CodeType, FrameType
from typing import Any
from weakref import WeakValueDictionary

from aiodist.control import Channel
from aiodist.handles import Progress
from aiodist.handles.handle import AT_EVENT, blocks_at_pending, stays_blocked
from aiodist.handles.stacks import frames_of_thread, line_of_thread
from aiodist.handles.timers import is_quiet
from aiodist.handles.waiting import waits_for_work

_OWN_THREADS = (
    "aiodist-progress",
    "aiodist-control",
    "aiodist-gloo-",
    "aiodist-lag",
    "aiodist-leave",
    "aiodist-inspect",
    "aiodist-trace",
)
"""They run nothing of the program's; what they receive is told by the counts of messages."""
_OF_DISPLAYS = ("rich.live", "tqdm._monitor")
"""Modules whose threads only draw progress bars."""
_OF_WRITERS = ("tensorboard.summary.writer.event_file_writer",)
"""Modules whose threads only write files: one that waits, if with a time-out, waits for something to write."""
_OF_RUNNERS = ("execnet",)
"""Packages whose threads only carry messages between the processes of pytest-xdist."""
_NUMBERS = tuple(map(int, signal.valid_signals()))
_HANDLERS_OF = ("_signal", "asyncio", "uvloop", "aiodist", "torch", "lightning", "pytorch_lightning", "pytest_timeout")
"""Packages whose signal handlers end the program or note the signal; those of a loop are looked at with the loop."""
_TSTATE_WAIT = getattr(threading.Thread, "_wait_for_tstate_lock", threading.Thread.join).__code__
"""Where `Thread.join` waits; since Python 3.13 in itself."""


def _line_of_bare(call: Any, name: str) -> int:  # noqa: ANN401
    """Return the last line of a function at which it calls a method of that name without arguments, 0 for none."""
    found, asked = 0, False
    for instruction in dis.get_instructions(call):
        if instruction.argval == name:
            asked = True
        elif asked and instruction.opname == "CALL":
            asked = False
            if instruction.arg == 0 and instruction.positions is not None:
                found = instruction.positions.lineno or 0
    return found


_CONDITION_LINE = _line_of_bare(threading.Condition.wait, "acquire")
_JOIN_LINE = _line_of_bare(threading.Thread.join, "_wait_for_tstate_lock")
"""A thread that stands at one of these was given no time-out: it goes on only when another thread wakes it."""


def what_goes_on(progress: Progress, channel: Channel) -> str:
    """Return why this rank may go on though none of its operations ends, "" where it cannot; on the loop's thread."""
    if progress.busy():
        return "a transfer or a device is at work"
    if channel.asks:
        return "an answer on the control channel is to come"
    state = _state_of(progress)
    if state is None:
        return f"its event loop is {type(progress.loop).__qualname__}, which does not tell what it waits for"
    ready, timers, others = state
    if any(map(_is_loud, ready)):
        return "its loop has something to run"
    if any(map(_is_loud, timers)):
        return "its loop has set a timer"
    if any(others):
        return "its loop waits for a file, a socket or a signal"
    if thread := _thread_at_work(progress):
        return thread
    if any(_may_wake(_signal.getsignal(number)) for number in _NUMBERS):
        return "a signal handler of the program may wake it"
    return ""


def _thread_at_work(progress: Progress) -> str:
    """Return which thread does not stand still and where it is, "" where all do; the loop's is not looked at."""
    for thread in [*threading.enumerate(), *threading.enumerate()]:  # one may wake another after the look at that
        if thread.ident != progress.thread_id and (thread.ident is None or not stands_still(thread)):
            return f"thread {thread.name!r} is at {line_of_thread(thread.ident or 0) or 'work'}"
    if foreign := foreign_threads():
        return f"a thread that `threading` did not start is at {line_of_thread(min(foreign)) or 'work'}"
    return ""


def foreign_threads() -> set[int]:
    """Return the threads that run Python code and that `threading` does not know: those of libraries."""
    known = {thread.ident for thread in threading.enumerate()}
    others = {ident: frame.f_globals for ident, frame in sys._current_frames().items() if ident not in known}
    return {i for i, names in others.items() if str(names.get("__name__")).partition(".")[0] not in _OF_RUNNERS}


def _state_of(progress: Progress) -> tuple[list[Any], list[Any], list[Sized]] | None:
    """Return what the loop has ready, its timers, and its files, sockets, servers and signal handlers."""
    loop: Any = progress.loop
    if isinstance(progress.loop, asyncio.SelectorEventLoop):
        files = set(loop._selector.get_map()) - progress.own_files - {loop._ssock.fileno()}
        return list(loop._ready), list(loop._scheduled), [files, loop._signal_handlers]
    if type(loop).__module__.partition(".")[0] != "uvloop":
        return None
    # It shows nothing of that by name, and all of it to the garbage collector.
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
    """Return whether what the loop will call may run code of the program's."""
    if handle.cancelled():
        return False
    if (call := getattr(handle, "_callback", None)) is None:
        call = next(filter(callable, gc.get_referents(handle)), None)
    return not is_quiet(call, closing=True)


def _may_wake(handler: Any) -> bool:  # noqa: ANN401
    """Return whether a signal handler may wake the loop or a thread: it is the program's, and calls something."""
    if not callable(handler):
        return False
    call = handler.func if isinstance(handler, functools.partial) else handler
    if str(getattr(call, "__module__", "")).partition(".")[0] in _HANDLERS_OF:
        return False
    code = getattr(call, "__code__", None)
    return code is None or any("CALL" in instruction.opname for instruction in dis.get_instructions(code))


def stands_still(thread: threading.Thread) -> bool:
    """Return whether another thread goes on only where somebody wakes it, or runs nothing of the program's."""
    if thread.name.startswith(_OWN_THREADS) or type(thread).__module__ in _OF_DISPLAYS:
        return True
    frames = frames_of_thread(thread.ident or 0)
    if not frames:
        return not thread.is_alive()
    if _waits_for_work(thread, frames[-1][0].f_code):
        return True
    if type(thread).__module__ in _OF_WRITERS and frames[-1][0].f_code is threading.Condition.wait.__code__:
        return True
    blocked = stays_blocked(thread.ident or 0)
    return _waits_for_ever(frames) if blocked is None else blocked


def is_to_be_woken(thread: threading.Thread) -> bool:
    """Return whether it is a worker without work, or waits for a handle that is not over."""
    codes = [frame.f_code for frame, _ in frames_of_thread(thread.ident or 0)]
    if not codes or _waits_for_work(thread, codes[-1]):
        return bool(codes)
    # Which waits for an event, and that for a condition.
    at_event = codes[-1] is threading.Condition.wait.__code__ and codes[-3:][0] is AT_EVENT
    return at_event and blocks_at_pending(thread.ident or 0)


def _waits_for_work(thread: threading.Thread, code: CodeType) -> bool:
    """Return whether the worker of an executor, or a thread of ours, waits at its queue, which is empty."""
    if (code.co_filename, code.co_name) != (executors.__file__, "_worker"):
        return waits_for_work(thread.ident or 0)
    queue = executors._threads_queues.get(thread)
    return queue is not None and queue.empty()


def _waits_for_ever(frames: Sequence[tuple[FrameType, int]]) -> bool:
    """Return whether it is a wait of `threading`, without a time-out."""
    (frame, line), (caller, called_at) = frames[-1], frames[-2:][0]
    if sys.version_info >= (3, 13) and frame.f_code is _TSTATE_WAIT:
        return frame.f_locals.get("timeout") is None  # looks up this one, and copies nothing
    if frame.f_code is _TSTATE_WAIT:
        return caller.f_code is threading.Thread.join.__code__ and called_at == _JOIN_LINE
    return frame.f_code is threading.Condition.wait.__code__ and line == _CONDITION_LINE
