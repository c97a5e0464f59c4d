"""Jobs whose ranks are real processes: `run("ending.py", "raised")` starts one, waits for its end and tells how it was.

The ranks come from the nursery (see there), so a job takes about a second. Each test of a job runs once; `-m soak` has
twenty times more.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import aiodist
from aiodist.testing.seams.mpi import find_mpi
from tests.support.mpi import find
from tests.support.nursed import stub

HERE = Path(__file__).parent
ROOT = Path(aiodist.__file__).parents[1]
ROUNDS = 20
NAMES = {"openmpi": "Open MPI", "mpich": "MPICH"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "run" in metafunc.fixturenames and metafunc.config.getoption("markexpr") == "soak":
        rounds = [pytest.param(i, marks=pytest.mark.soak, id=f"round{i}") for i in range(1, ROUNDS + 1)]
        metafunc.parametrize("repeat", rounds)


@pytest.fixture(autouse=True)
def _ends(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How programs end is seen whole where tests are about that."""
    if not request.path.name.startswith(("test_h10", "test_l", "test_t5")):
        monkeypatch.setenv("NURSERY_ENDS", "soon")


@pytest.fixture
def repeat() -> int:
    """Which round this is; tests that have `run` are repeated."""
    return 0


def shared_files() -> set[str]:
    """Return the names of this project's files in /dev/shm; its folders there are those of launchers that run now."""
    return {file.name for file in Path("/dev/shm").iterdir() if "aiodist" in file.name and not file.is_dir()}


def slowness() -> float:
    """Return the number of running processes per core in the last minute, a factor by which processes are slower."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


@dataclass
class Ended:
    """How a job ended."""

    code: int
    text: str
    errors: str
    seconds: float
    exits: dict[int, tuple[int, float]]
    """By rank: its own exit code (minus the signal), and when."""

    def said(self, rank: int) -> list[str]:
        """Return the lines of one rank."""
        prefix = f"[{rank}] "
        return [line.removeprefix(prefix) for line in self.text.splitlines() if line.startswith(prefix)]

    def value(self, rank: int, name: str) -> str:
        """Return what a rank said after `name: `."""
        (found,) = [line for line in self.said(rank) if line.startswith(f"{name}: ")]
        return found.removeprefix(f"{name}: ")

    def codes(self) -> list[int]:
        """Return the exit codes by rank; 1 also for a rank that was killed for its slow exit after a failure."""
        codes = [self.exits[rank][0] for rank in sorted(self.exits)]
        return [1 if code == -signal.SIGTERM else code for code in codes]

    def gone_after(self, rank: int, mark: str) -> float:
        """Return the seconds from when some rank said `mark: TIME` until this one had ended, were it alone."""
        times = [line.partition(f"{mark}: ")[2] for line in self.text.splitlines() if f"] {mark}: " in line]
        return (self.exits[rank][1] - float(times[0])) / slowness()


@dataclass
class Jobs:
    """Starts programs of ours in the nursery."""

    socket: str
    folder: Path
    environ: dict[str, str] = field(default_factory=dict)

    def stub(self, program: str, *arguments: str) -> list[str]:
        """Return the arguments of a Python interpreter that has the nursery run `PROGRAM ARGUMENTS`."""
        path = program if program.startswith("-") else HERE / "programs" / program
        return stub(self.socket, path, *arguments)

    @contextlib.contextmanager
    def started(self, command: list[str], **environ: str) -> Iterator[subprocess.Popen[str]]:
        """A running command; what it leaves is killed by the nursery and by the launcher."""
        base = {name: value for name, value in os.environ.items() if not name.startswith(("COV_", "PYTEST_"))}
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            env={**base, "LIFECYCLE_REPORT": str(self.folder), "PYTHONPATH": str(ROOT), **self.environ, **environ},
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()

    def finish(self, process: subprocess.Popen[str], limit: float = 30.0) -> Ended:
        """Wait for its end."""
        started = time.monotonic()
        try:
            text, errors = process.communicate(timeout=limit * slowness())
        except subprocess.TimeoutExpired:
            process.terminate()
            text, errors = process.communicate(timeout=10)
            pytest.fail(f"not over after {limit:g} s; it said:\n{text}\n{errors}", pytrace=False)
        exits = {}
        for file in self.folder.iterdir():
            if file.name.isdecimal() and (lines := file.read_text().splitlines()):  # not killed as it wrote that
                code, when = json.loads(lines[-1])
                exits[int(file.name)] = (code, when)
                file.unlink()
        print(text, errors, sep="\n")  # whole, where the test fails: pytest cuts what an assertion shows
        return Ended(process.returncode, text, errors, time.monotonic() - started, exits)

    def alone(self, program: str, *arguments: str, **environ: str) -> Ended:
        """Run one process without a launcher."""
        with self.started([sys.executable, *self.stub(program, *arguments)], **environ) as process:
            return self.finish(process)


@dataclass
class Run(Jobs):
    """Starts jobs with `aiodist run` over one backend."""

    backend: str = "none"
    mpi: str = "none"

    def command(self, program: str, *arguments: str, n: int, options: tuple[str, ...] = ()) -> list[str]:
        """Return the launcher's command line; the launcher comes from the nursery too."""
        run = ("run", "-n", str(n), "--mpi", self.mpi, *options)
        return [sys.executable, *self.stub("-m", "aiodist.cli", *run, *self.stub(program, *arguments))]

    def __call__(self, program: str, *arguments: str, n: int = 2, options: tuple[str, ...] = ()) -> Ended:
        """Run a job to its end."""
        with self.started(self.command(program, *arguments, n=n, options=options)) as process:
            return self.finish(process)


@pytest.fixture
def jobs(nursery: str, tmp_path: Path) -> Jobs:
    """Single processes."""
    return Jobs(nursery, tmp_path)


def note_mpi(backend: str, record: Callable[[str, object], None]) -> None:
    """Count the test under its MPI."""
    if backend in NAMES:
        record("mpi", NAMES[backend])


@pytest.fixture(params=["openmpi", "mpich", "none", pytest.param("gloo", marks=pytest.mark.thorough)])
def run(
    request: pytest.FixtureRequest,
    nursery: str,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
    repeat: int,
) -> Run:
    """`aiodist run` over each backend; "none" is without MPI, "gloo" without it as between hosts."""
    note_mpi(request.param, record_property)
    mpi = "none" if request.param in ("none", "gloo") else find(request.param)
    run = Run(nursery, tmp_path, backend=request.param, mpi=mpi)
    if request.param == "gloo":
        run.environ["AIODIST_BACKEND"] = "gloo"
    return run


@pytest.fixture
def singleton(request: pytest.FixtureRequest, jobs: Jobs, record_property: Callable[[str, object], None]) -> Jobs:
    """Single processes that find one MPI, which `request.param` names."""
    note_mpi(request.param, record_property)
    found = find_mpi(find(request.param), os.environ.get("PATH", os.defpath))
    assert found is not None
    jobs.environ = mpi_environment(found)
    return jobs


def mpi_environment(mpi: Any) -> dict[str, str]:
    """Return the variables with which an mpirun and its ranks find that MPI."""
    from aiodist.testing.seams.mpi import mpirun_environment

    return mpirun_environment(mpi, dict(os.environ), root=os.geteuid() == 0)
