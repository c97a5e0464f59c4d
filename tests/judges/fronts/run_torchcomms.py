"""Runs tests of torchcomms over the front, on this rank: a program, not a test."""

import importlib
import sys
from pathlib import Path

import pytest

if __name__ == "__main__":
    importlib.import_module("torch.distributed")  # first: torch would take the front for the real package
    sys.path.insert(0, str(Path(__file__).parent / "packages"))
    sys.exit(pytest.main())
