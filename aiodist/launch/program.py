"""What the words behind the options of `aiodist run` mean: a script, a module, an interpreter, or another program."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from aiodist.errors import ConfigError

_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_INTERPRETER = re.compile(r"(python|pypy)(3(\.\d+)?)?")


def command_of(words: Sequence[str], *, module: bool, search: str) -> tuple[str, ...]:
    """Return the command line of each rank; raise `ConfigError` where there is no such file or program.

    A file is a script for this Python, unless it is a program of its own: an executable that is no Python. `python`
    and its like are this Python, where a path does not say which. Other words are looked for in `search`, a PATH.
    """
    first, *rest = words
    if module:
        return (sys.executable, "-m", *words)
    name = os.path.basename(first)
    if _INTERPRETER.fullmatch(name):
        if first == name and _is_this(name):
            return (sys.executable, *_something(first, rest))
        return (_found(first, search), *_something(first, rest))
    path = Path(first)
    if path.is_dir() and not (path / "__main__.py").is_file():
        raise ConfigError(f"{first} is a folder without __main__.py: expected a script, or -m and the name of a module")
    if path.exists() and not _is_program(path):
        return (sys.executable, *words)
    return (_found(first, search), *rest)


def _something(interpreter: str, rest: list[str]) -> list[str]:
    """Return the words behind an interpreter; alone it would wait for what is typed, on each rank."""
    if not rest:
        raise ConfigError(f"{interpreter}: expected a script behind it")
    return rest


def _is_this(name: str) -> bool:
    """Whether the name of an interpreter, as one types it, is this one's too.

    >>> _is_this("python"), _is_this("python3"), _is_this("python2.7"), _is_this("pypy3")
    (True, True, False, False)
    """
    return name in ("python", f"python{sys.version_info[0]}", "python{}.{}".format(*sys.version_info))


def _is_program(path: Path) -> bool:
    """Whether the system runs this file by itself, and not as Python."""
    if not path.is_file() or path.suffix == ".py" or not os.access(path, os.X_OK):
        return False
    with path.open("rb") as file:
        start = file.readline(256)
    return start.startswith(b"\x7fELF") or (start.startswith(b"#!") and b"python" not in start)


def _found(word: str, search: str) -> str:
    found = shutil.which(word, path=search)
    if found is not None:
        return os.path.abspath(found)
    if os.path.exists(word):
        raise ConfigError(f"{word} is not executable")
    if word.endswith(".py") or os.sep in word:
        raise ConfigError(f"{word}: there is no such file")
    advice = f"; for a module say -m {word}" if _MODULE.fullmatch(word) else ""
    raise ConfigError(f"{word}: there is no such file, and no such program in PATH{advice}")
