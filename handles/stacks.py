"""Finds the lines at which threads and tasks are, for a task down to its innermost await."""

from __future__ import annotations

import asyncio
import sysconfig
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType
from typing import Any

from aiodist import _core
from aiodist.handles.calls import call_of
from aiodist.handles.origin import is_ours

_SHOWN = 4
_LIBRARIES = tuple({f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_FRAMES = ("cr_frame", "gi_frame", "ag_frame")
_AWAITS = ("cr_await", "gi_yieldfrom", "ag_await")

Place = tuple[CodeType, int]
"""Code object and line."""


def frames_of_task(task: asyncio.Task[Any]) -> Iterator[FrameType]:
    """Yield the frames of a suspended task, the outermost first."""
    coroutine: Any = task.get_coro()
    while coroutine is not None:
        yield from (frame for name in _FRAMES if (frame := getattr(coroutine, name, None)) is not None)
        if (call := call_of(coroutine)) is not None:  # Python does not show the await of this generator
            coroutine = call.coroutine
            continue
        awaits = (getattr(coroutine, name, None) for name in _AWAITS)
        coroutine = next((inner for inner in awaits if inner is not None), None)


def line_of_thread(thread_id: int) -> str:
    """Return the innermost line of the program that a thread executes now, or "" if there is none."""
    return _innermost(_places_of_thread(thread_id))


def line_of_task(task: asyncio.Task[Any]) -> str:
    """Return the innermost line of the program at which a task is suspended, or "" before its start."""
    return _innermost(_places_of_task(task))


def lines_of_tasks(tasks: Iterable[asyncio.Task[Any]]) -> list[str]:
    """Return the lines of the first few tasks, each line once."""
    return list(dict.fromkeys(filter(None, map(line_of_task, tasks))))[:_SHOWN]


def stack_of_task(task: asyncio.Task[Any]) -> list[str]:
    """Return the lines of the program, and of libraries, at which a task is suspended, the outermost first."""
    return [_text(place) for place in _places_of_task(task) if not is_ours(place[0].co_filename)]


def stack_of_thread(thread_id: int) -> list[str]:
    """Return the lines of the program, and of libraries, that a thread executes, the outermost first."""
    return [_text(place) for place in _places_of_thread(thread_id) if not is_ours(place[0].co_filename)]


def _places_of_task(task: asyncio.Task[Any]) -> list[Place]:
    return [(frame.f_code, frame.f_lineno) for frame in frames_of_task(task)]


def _places_of_thread(thread_id: int) -> list[Place]:
    """Return the places of all frames at one moment, the outermost first, or [] for a thread without Python."""
    return [(frame.f_code, line) for frame, line in _core.frames_of_thread(thread_id)]


def _innermost(places: list[Place]) -> str:
    """Return the innermost place in the program, else in a library, but never in aiodist."""
    theirs = [place for place in places if not is_ours(place[0].co_filename)]
    program = [place for place in theirs if not place[0].co_filename.startswith(_LIBRARIES)]
    return _text((program or theirs)[-1]) if theirs else ""


def _text(place: Place) -> str:
    code, line = place
    return f"{code.co_filename}:{line} in {code.co_qualname}"
