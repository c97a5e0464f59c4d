"""The line of the user's program that issued an operation, captured in well under a microsecond."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import importlib.util
import threading
from collections.abc import Iterable
from pathlib import Path
from sys import _getframe
from types import CodeType
from typing import NamedTuple

from aiodist import _core, errors

_SHOWN = 3


def _folders() -> tuple[str, ...]:
    """Return the folders of aiodist, asyncio, anyio and Python's threads, whose lines no report names.

    An editable install imports `handles`, `streams` and `nn` from the root, or through the links in the package.
    """
    here = Path(__file__).parent
    package = Path(errors.__file__).parent
    folders = [package, *(parent / name for parent in (here.parent, here.resolve().parent) for name in _ROOT_FOLDERS)]
    asyncios = Path(asyncio.__file__).parent
    packages = (*folders, asyncios, Path(concurrent.futures.__file__).parent, _folder_of("anyio"))
    return (*(f"{folder}/" for folder in packages), contextlib.__file__, threading.__file__)


def _folder_of(package: str) -> Path:
    """Return the folder of `package`, found without an import, or this file if the package is not installed."""
    spec = importlib.util.find_spec(package)
    return Path(__file__) if spec is None or spec.origin is None else Path(spec.origin).parent


_ROOT_FOLDERS = ("handles", "streams", "nn")
_OURS = _folders()
_CALLS_OURS = f"{_folder_of('torch')}/"
"""Folder of torch, whose lines no report names: its modules, autograd and `torch.distributed` call aiodist."""


class _Files(dict[str, bool | None]):
    """A cache by file name: True for files whose lines no report names, False for files of the program.

    None is for the file of `Call`, whose frames know the line of the call.
    """

    def __missing__(self, filename: str) -> bool:
        ours = self[filename] = is_ours(filename) or filename.startswith(_CALLS_OURS)
        return ours


known_files = _Files()
"""Cache of the files seen so far."""


def is_ours(filename: str) -> bool:
    """Return True for a file of aiodist, asyncio, anyio or Python's threads, whose lines no report names."""
    return filename.startswith(_OURS)


def whence(depth: int) -> tuple[CodeType, int]:
    """Return the fields of `Origin.here(depth)`. Only a report makes the object."""
    frame = _getframe(depth)
    while True:
        code = frame.f_code
        ours = known_files[code.co_filename]
        if not ours or frame.f_back is None:
            return (code, frame.f_lasti) if ours is not None else frame.f_locals["self"].origin
        frame = frame.f_back


class Origin(NamedTuple):
    """A place in a program. The line number is computed only for a report."""

    code: CodeType
    lasti: int

    @classmethod
    def here(cls, depth: int = 2) -> Origin:
        """Return the innermost place outside aiodist, starting `depth` frames up. Costs half a microsecond."""
        return cls(*whence(depth + 1))

    @property
    def filename(self) -> str:
        """Path of the file as in Python's code object."""
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


def described(op: str, seq: int, origin: Origin | None) -> str:
    """Return the name of an operation in messages."""
    return f"{op} #{seq} issued at {origin}" if origin else f"{op} #{seq}"


def listed(handles: Iterable[_core.Handle]) -> str:
    """Return the names of operations for a message.

    More than three of a kind are counted, and the first three named.
    """
    kinds: dict[str, dict[str, None]] = {}
    for handle in handles:
        kinds.setdefault(handle.op, {})[str(handle)] = None
    return "; ".join(_some(kind, list(names)) for kind, names in kinds.items())


def _some(kind: str, names: list[str]) -> str:
    if len(names) <= _SHOWN:
        return ", ".join(names)
    return f"{len(names)} {kind} operations, the first of them {', '.join(names[:_SHOWN])}"
