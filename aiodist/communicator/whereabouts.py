"""Where a rank is: its last operation, what it waits in now, and the lines of its program."""

from __future__ import annotations

import asyncio
import sysconfig
from collections.abc import Iterable
from sys import _current_frames
from types import CodeType, FrameType
from typing import Any, NamedTuple

from aiodist.handles.origin import is_ours

__all__ = ["Wait", "Whereabouts", "line_of_task", "line_of_thread", "lines_of_tasks", "ranked"]

_SHOWN = 4
_LIBRARIES = tuple({f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")})


class Wait(NamedTuple):
    """An operation that a rank waits in."""

    what: str
    """The operation, with the line that issued it."""
    seconds: float
    """For how long, to a tenth of a second."""
    ranks: list[int]
    """The world ranks that it is known to wait for."""

    def __str__(self) -> str:
        whom = f"for {ranked(self.ranks)} " if self.ranks else ""
        return f"waits {whom}in {self.what}{f', for {self.seconds:.0f} s' if self.seconds >= 1 else ''}"


class Whereabouts(NamedTuple):
    """What a rank says of itself when it is asked; it travels as a list."""

    last: str
    """Its last collective on the communicator in question."""
    lines: list[str]
    """The lines at which its tasks are suspended, or the one that its loop's thread executes."""
    waits: list[Wait]

    @classmethod
    def read(cls, told: list[Any]) -> Whereabouts:
        """Return what another rank has sent."""
        last, lines, waits = told
        return cls(last, lines, [Wait(*wait) for wait in waits])

    def text(self, *, loop_answers: bool | None) -> str:
        """Return it as words; None where it is not known yet whether the rank's loop answers."""
        parts = [self.last, *map(str, self.waits)]
        if loop_answers is not None:
            parts.append(f"its loop {'answers' if loop_answers else 'does not answer'}")
        known = " ".join(parts)
        if lines := [line for line in self.lines if line not in known]:
            parts.append(f"it is at {' and at '.join(lines)}")
        return "; ".join(filter(None, parts))


def ranked(ranks: Iterable[int]) -> str:
    """Return numbers of ranks as words.

    >>> ranked([1]), ranked([3, 1])
    ('rank 1', 'ranks 1, 3')
    """
    numbers = sorted(ranks)
    more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers[:8]))}{more}"


def line_of_thread(thread_id: int) -> str:
    """Return the innermost line of the program that a thread executes just now."""
    frames: list[FrameType] = []
    frame = _current_frames().get(thread_id)
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return _innermost([(frame.f_code, frame.f_lineno) for frame in reversed(frames)])


def line_of_task(task: asyncio.Task[Any]) -> str:
    """Return the innermost line of the program at which a task is suspended, or "" before its start."""
    places: list[tuple[CodeType, int]] = []
    coroutine: Any = task.get_coro()
    while coroutine is not None:
        frames = (getattr(coroutine, name, None) for name in ("cr_frame", "gi_frame", "ag_frame"))
        places += [(frame.f_code, frame.f_lineno) for frame in frames if frame is not None]
        awaits = (getattr(coroutine, name, None) for name in ("cr_await", "gi_yieldfrom", "ag_await"))
        coroutine = next((inner for inner in awaits if inner is not None), None)
    return _innermost(places)


def lines_of_tasks(tasks: Iterable[asyncio.Task[Any]]) -> list[str]:
    """Return the lines of the first few of them, each line once."""
    return list(dict.fromkeys(filter(None, map(line_of_task, tasks))))[:_SHOWN]


def _innermost(places: list[tuple[CodeType, int]]) -> str:
    """Return the last place of the program's, else of a library's, but never of ours."""
    theirs = [place for place in places if not is_ours(place[0].co_filename)]
    program = [place for place in theirs if not place[0].co_filename.startswith(_LIBRARIES)]
    if not theirs:
        return ""
    code, line = (program or theirs)[-1]
    return f"{code.co_filename}:{line} in {code.co_qualname}"
