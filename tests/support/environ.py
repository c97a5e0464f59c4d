"""The environment of processes that tests start."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["python_path"]

ROOT = Path(__file__).resolve().parents[2]


def python_path() -> str:
    """Return a PYTHONPATH that has this checkout first and then the present entries."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
