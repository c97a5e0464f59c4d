"""The start-up hook of this Python: a file in its site-packages, for torchrun and other starters with AIODIST_AS."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

from aiodist.env import START_UP
from aiodist.errors import ConfigError


def install(folder: Path | None = None) -> str:
    """Write the hook into `folder`, by default the site-packages of this Python. Return a line for the user.

    Raises `ConfigError` if the folder cannot be written.
    """
    path = _place(folder)
    if path.exists() and path.read_text() == START_UP:
        return f"the hook is installed already: {path}"
    try:
        path.write_text(START_UP)
    except OSError as error:
        raise _unwritable(path, error) from error
    return f"installed {path}: programs of {sys.executable} now follow AIODIST_AS"


def uninstall(folder: Path | None = None) -> str:
    """Remove the hook. Return a line for the user. Raises `ConfigError` if the folder cannot be written."""
    path = _place(folder)
    if not path.exists():
        return f"the hook is not installed: there is no {path}"
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise _unwritable(path, error) from error
    return f"removed {path}: programs of {sys.executable} no longer follow AIODIST_AS"


def _place(folder: Path | None) -> Path:
    return (folder or Path(sysconfig.get_path("purelib"))) / "aiodist-as.pth"


def _unwritable(path: Path, error: OSError) -> ConfigError:
    how = "use a virtual environment of your own, or aiodist run --as, which needs no hook"
    return ConfigError(f"cannot change {path}: {error.strerror}; {how}")
