"""What processes that tests start find in their environment."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["python_path"]

ROOT = Path(__file__).resolve().parents[2]


def python_path() -> str:
    """Return a PYTHONPATH with this checkout in front of what is there, if anything is."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
