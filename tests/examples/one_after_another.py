"""Runs several examples in the same processes, so that torch is imported once: a program for ranks, not a test."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

if __name__ == "__main__":
    names = sys.argv[1:]
    sys.path.insert(0, str(EXAMPLES))  # as for a script there: some import from a neighbour
    for name in names:
        print(f"--- {name}")
        sys.argv = [name]
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
