"""The fixture `nursery`: Python processes that start with torch imported, which saves a second of CPU for each."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.environ import python_path

__all__ = ["nursed", "nursery", "stub"]

HERE = Path(__file__).parent


def stub(socket: str, program: object, *arguments: object) -> list[str]:
    """Return the arguments of a Python interpreter that has the nursery run `PROGRAM ARGUMENTS`."""
    return [str(HERE / "stub.py"), socket, str(program), *map(str, arguments)]


@contextlib.contextmanager
def nursed(folder: Path, **environ: str) -> Iterator[str]:
    """The address of a nursery that runs meanwhile."""
    with subprocess.Popen(
        [sys.executable, str(HERE / "nursery.py"), str(folder / "socket")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": python_path(), **environ},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield str(folder / "socket")


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a running nursery."""
    if address := os.environ.get("NURSERY_OF_JOBS"):
        yield address
        return
    with nursed(tmp_path_factory.mktemp("nursery")) as address:
        yield address
