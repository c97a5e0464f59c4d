"""Tracebacks without frames of aiodist and asyncio.

AIODIST_TRACEBACK=full shows them all. Causes, notes and the parts of exception groups stay.
"""

from __future__ import annotations

import asyncio
import difflib
import inspect
import os
import sys
import traceback
from collections.abc import Iterator
from itertools import groupby, takewhile
from types import TracebackType
from typing import Any

from aiodist.env import is_launched, wants_full_tracebacks
from aiodist.errors import AiodistError, pointer
from aiodist.handles.origin import is_ours

_OTHERS = ("uvloop/", "<frozen runpy>")
_EXPLAINED = (AiodistError, asyncio.CancelledError, TimeoutError, BaseExceptionGroup)
"""Errors with a complete text, for which the raising line of aiodist is not needed."""


def fold_tracebacks() -> None:
    """Fold the exception that ends the program when the interpreter prints it, unless `sys.excepthook` is set."""
    if sys.excepthook is sys.__excepthook__ and not wants_full_tracebacks():
        sys.excepthook = _print_folded


def folded(error: BaseException, *, programs: bool = False, pointed: bool = False) -> str:
    """Return the traceback of `error` as text, with its causes and its parts.

    True for `programs` folds also without a frame of a program. True for `pointed` includes the pointer of the
    outermost error to the debug page, which texts for other ranks do not have.
    """
    text = traceback.TracebackException.from_exception(error)
    every = list(_every(text, error))
    for part, told in every:
        if isinstance(told, AiodistError) and pointer(told):
            part.__notes__ = told.__notes__ if pointed else told.__notes__[:-1]
            pointed = False
    if wants_full_tracebacks():
        every = []
    # Without a program, as in aiodist's own tools, no frame is folded.
    if programs or any(not _is_ours(frame) for part, _ in every for frame in part.stack):
        for part, told in every:
            if isinstance(told, AttributeError):
                part.__notes__ = [*(part.__notes__ or ()), *_hints(told)]
            part.stack = _Folded(part.stack)
            part.stack.explained = isinstance(told, _EXPLAINED)
            cause = told.__cause__
            if isinstance(cause, AiodistError) and str(cause) and str(cause) in str(told):
                part.__cause__ = None  # `told` is the same in the words of another library
    return "".join(text.format())


def _hints(error: AttributeError) -> list[str]:
    """Return a hint for a missing attribute: an await, or another name, which Python itself adds from 3.12 on."""
    if error.obj is None:  # the message has it
        return []
    if inspect.isawaitable(error.obj):
        return ["it is awaitable: `await` it first"]
    known = dir(error.obj) if sys.version_info < (3, 12) else ()
    return [f"Did you mean: {name!r}?" for name in difflib.get_close_matches(error.name or "", known, 1)]


def cause_in(text: str) -> str:
    r"""Return the exception's line of a traceback: the first line after the frames. Notes come later.

    For a group it is the line of its first exception.

    >>> cause_in("Traceback (most recent call last):\n  File …\nValueError: no\nseen by rank 0")
    'ValueError: no'
    >>> cause_in("  | ExceptionGroup: all (1 sub-exception)\n  +-+--- 1 ---\n    | ValueError: no\n    +---")
    'ValueError: no'
    """
    lines = text.rpartition(" exception occurred:\n\n")[2].rpartition(" following exception:\n\n")[2].splitlines()
    inside = next((number for number, line in enumerate(lines, 1) if line.startswith("  +-+-")), None)
    if inside is not None:
        first = takewhile(lambda line: not line.startswith("    +---"), lines[inside:])
        return cause_in("\n".join(line[2:].removeprefix("  | ") for line in first))
    frames = [number for number, line in enumerate(lines[:-1]) if line.startswith("  ")]
    return lines[frames[-1] + 1 if frames else 0]


def _print_folded(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    try:
        error = error.with_traceback(trace)
        text = _interrupted(error) if kind is KeyboardInterrupt and is_launched() else folded(error, pointed=True)
    except Exception:  # noqa: BLE001  - it must be shown in any case
        sys.__excepthook__(kind, error, trace)
        return
    _show(text)


def print_error(error: Exception) -> None:
    """Print an error that ends a program when no frame of the program is left, as at exit."""
    if sys.excepthook is _print_folded:
        _show(folded(error, programs=True, pointed=True))
    else:
        sys.excepthook(type(error), error, error.__traceback__)


def _show(text: str) -> None:
    hint = "(AIODIST_TRACEBACK=full shows these frames too)\n" if _MARK in text else ""
    print(text + hint, end="", file=sys.stderr)  # noqa: T201


def _interrupted(error: BaseException) -> str:
    """Return the position of the program in one line, since each rank of a job is interrupted."""
    parts = _every(traceback.TracebackException.from_exception(error), error)
    frames = [frame for part, _ in parts for frame in part.stack if not _is_ours(frame)]
    place = f" at {frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
    return f"KeyboardInterrupt{place}\n"


def _every(
    text: traceback.TracebackException, error: BaseException
) -> Iterator[tuple[traceback.TracebackException, BaseException]]:
    """Yield a traceback and those of its causes and parts, each with its exception."""
    yield text, error
    parts = zip(text.exceptions or (), getattr(error, "exceptions", ()), strict=False)
    for other, told in ((text.__cause__, error.__cause__), (text.__context__, error.__context__), *parts):
        if other is not None and told is not None:
            yield from _every(other, told)


def _is_ours(frame: traceback.FrameSummary) -> bool:
    return is_ours(frame.filename) or frame.filename.startswith(_OTHERS)


_MARK = "  … "


class _Folded(traceback.StackSummary):
    """Frames. The printed text has the number of frames that are not the program's."""

    explained = False

    def format(self, **options: Any) -> list[str]:  # noqa: ANN401  - grew in Python 3.13
        """Return the lines of the program's frames, and one for each run of others."""
        lines: list[str] = []
        for plumbing, run in groupby(self, _is_ours):
            frames = list(run)
            if plumbing:
                end, last = "", frames[-1]
                if last is self[-1] and not self.explained:
                    end = f", to {'/'.join(last.filename.split(os.sep)[-2:])}:{last.lineno} in {last.name}"
                lines.append(f"{_MARK}{len(frames)} frame{'s' * (len(frames) > 1)} of aiodist and asyncio{end}\n")
            else:
                lines += traceback.StackSummary.from_list(frames).format(**options)
        return lines
