"""Python as a shell starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.environ import python_path

__all__ = ["python"]


def python(*arguments: str, cwd: Path, timeout: float = 100, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run Python on this checkout until it ends, and return its status and the text of its output and errors."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": python_path(), **environ},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
