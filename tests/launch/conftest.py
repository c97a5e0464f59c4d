"""Starts `aiodist run` as a user does: a process, its output, its exit code, and remaining processes.

AIODIST_TEST_MPICH names the prefix of an MPICH (the folder with bin/mpirun); without it, the tests of MPICH look for
one that `--mpi mpich` would find, and are skipped where there is none.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import psutil
import pytest

import aiodist
from tests.support.mpi import find

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMIT = 60.0
MARK = "AIODIST_TEST_MARK"


@dataclass
class Launcher:
    """`aiodist run --mpi MPI` in a folder of its own, with a mark in the environment of all it starts."""

    mpi: str
    folder: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def environ(self) -> dict[str, str]:
        root = str(Path(aiodist.__file__).parents[1])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        return {**os.environ, "PYTHONPATH": path, MARK: self.mark}

    def script(self, text: str, name: str = "script.py") -> str:
        """Write a script that knows its `rank` and `size`, how to `say` a line at once, and how to `stay`."""
        (self.folder / name).write_text(_BEFORE + textwrap.dedent(text))
        return name

    def command(self, *arguments: str, n: int = 2) -> list[str]:
        return [sys.executable, "-m", "aiodist.cli", "run", "-n", str(n), "--mpi", self.mpi, *arguments]

    def run(self, *arguments: str, n: int = 2, **options: Any) -> subprocess.CompletedProcess[Any]:
        return subprocess.run(
            self.command(*arguments, n=n),
            **{
                "cwd": self.folder,
                "env": self.environ,
                "timeout": LIMIT,
                "capture_output": True,
                "text": True,
                "stdin": subprocess.DEVNULL,
                **options,
            },
        )

    @contextlib.contextmanager
    def started(self, *arguments: str, n: int = 2, **options: Any) -> Iterator[subprocess.Popen[Any]]:
        """A running launcher; what is left of it at the end is killed."""
        process = subprocess.Popen(
            self.command(*arguments, n=n),
            **{
                "cwd": self.folder,
                "env": self.environ,
                "stdout": subprocess.PIPE,
                "stderr": subprocess.PIPE,
                "text": True,
                "stdin": subprocess.DEVNULL,
                **options,
            },
        )
        try:
            yield process
        finally:
            for left in self.processes():
                with contextlib.suppress(psutil.NoSuchProcess):
                    left.kill()
            process.kill()
            process.communicate()

    @staticmethod
    def read_until(stream: IO[Any] | None, *wanted: str) -> list[str]:
        """Read lines until each of `wanted` has been one of them."""
        assert stream is not None
        lines: list[str] = []
        for line in stream:
            lines.append(line.rstrip("\n"))
            if set(wanted) <= set(lines):
                return lines
        raise AssertionError(f"the output ended without {sorted(set(wanted) - set(lines))}: {lines}")

    def processes(self) -> list[psutil.Process]:
        """All processes with the mark of the test: the launcher, mpirun, guards, ranks, and their children."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return bool(process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == self.mark)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return False

    def left_after(self, seconds: float) -> list[psutil.Process]:
        """Return the processes that still run after a wait, in seconds."""
        _, alive = psutil.wait_procs(self.processes(), timeout=seconds)
        return list(alive)


_BEFORE = """\
import os, signal, sys, time

def of(*names):
    return int(next(os.environ[name] for name in names if name in os.environ))

rank = of("OMPI_COMM_WORLD_RANK", "PMI_RANK", "AIODIST_RANK")
size = of("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "AIODIST_SIZE")

def say(*words, file=sys.stdout):
    print(*words, file=file, flush=True)

def stay():
    while True:  # until it is killed, or a handler raises
        signal.pause()

"""


@pytest.fixture(params=["none", "openmpi", "mpich"])
def launcher(request: pytest.FixtureRequest, tmp_path: Path) -> Launcher:
    """A launcher without MPI, and for each MPI that is installed."""
    return Launcher(find(request.param), tmp_path)


@pytest.fixture(params=["openmpi", "mpich"])
def mpi_launcher(request: pytest.FixtureRequest, tmp_path: Path) -> Launcher:
    """A launcher for each MPI that is installed."""
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    return Launcher(find(request.param), tmp_path)


@pytest.fixture
def plain(tmp_path: Path) -> Launcher:
    """A launcher without MPI, for tests that do not depend on it."""
    return Launcher("none", tmp_path)
