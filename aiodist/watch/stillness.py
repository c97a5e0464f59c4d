"""Whether a rank stands still: nothing in its process can run code of the program but the end of an operation.

Everything that can is looked at: what the loop has ready, its timers, files and signal handlers, the work of devices
and streams, what was asked on the control channel, and every other thread. What is of a kind that is not known here
counts as something that can. [Note: standing still] in docs/design/watch.md says why that is enough.
"""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
from collections import deque
from collections.abc import Sized
from concurrent.futures import thread as executors
from types import FrameType
from typing import Any
from weakref import WeakValueDictionary

from aiodist.control import Channel
from aiodist.handles import Handle, Progress
from aiodist.handles.origin import is_ours
from aiodist.handles.stacks import frames_of_thread, line_of_thread
from aiodist.handles.timers import is_quiet

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
_WAITS = frozenset(
    code
    for call in (
        threading.Condition.wait,
        threading.Thread.join,
        getattr(threading.Thread, "_wait_for_tstate_lock", threading.Thread.join),
    )
    if (code := getattr(call, "__code__", None)) is not None
)
"""A thread that is in one of these without a time-out goes on only when another thread wakes it."""


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
    for thread in threading.enumerate():
        if thread.ident != progress.thread_id and thread.ident is not None and not stands_still(thread):
            return f"thread {thread.name!r} is at {line_of_thread(thread.ident) or 'work'}"
    return ""


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


def stands_still(thread: threading.Thread) -> bool:
    """Return whether another thread goes on only where somebody wakes it, or runs nothing of the program's."""
    if thread.name.startswith(_OWN_THREADS):
        return True
    frames = frames_of_thread(thread.ident or 0)
    if not frames:
        return not thread.is_alive()
    frame = frames[-1][0]
    code = frame.f_code
    if _waits_for_work(frame):
        return True
    if code in _WAITS:
        return frame.f_locals.get("timeout") in (None, -1)
    return code is Handle.block.__code__ and frame.f_locals.get("until", 0) is None


def is_to_be_woken(thread: threading.Thread) -> bool:
    """Return whether it is a worker without work, or waits for a handle that is not over."""
    frames = [frame for frame, _ in frames_of_thread(thread.ident or 0)]
    if not frames or _waits_for_work(frames[-1]):
        return bool(frames)
    call, known = frames[-3:][0].f_code, frames[-3:][0].f_locals  # which waits for an event, and that for a condition
    at_handle = frames[-1].f_code in _WAITS and is_ours(call.co_filename) and call.co_qualname == "Handle._block_at"
    return at_handle and known["self"].is_pending and not known["event"].is_set()


def _waits_for_work(frame: FrameType) -> bool:
    """Return whether the worker of an executor, a stream or a parameter server has none, in hand or in its queue.

    What a server's is given is counted, see `Progress.busy`.
    """
    code, known = frame.f_code, frame.f_locals
    if code is executors._worker.__code__:
        return known.get("work_item") is None and bool(known["work_queue"].empty())
    if not is_ours(code.co_filename) or known.get("item") is not None:
        return False
    name = code.co_qualname
    return name == "Service._serve" or (name in ("_Worker.run", "_Workers._serve") and known["self"].queue.empty())
