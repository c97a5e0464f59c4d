"""Starts examples with `aiodist run`, in a nursery, and sorts their output by rank."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from aiodist.errors import BackendUnavailable
from aiodist.testing.seams.mpi import find_mpi
from tests.support.nursed import stub

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Output:
    """The outcome of a job: its exit code, the lines of each rank, and the text on standard error."""

    code: int
    lines: dict[int, list[str]]
    errors: str


@pytest.fixture(params=["openmpi", "mpich", "none"])
def mpi(request: pytest.FixtureRequest) -> str:
    """The value of `--mpi`."""
    name: str = request.param
    if name == "mpich" and (prefix := os.environ.get("AIODIST_TEST_MPICH")):
        return str(Path(prefix) / "bin" / "mpirun")
    try:
        find_mpi(name, os.environ.get("PATH", os.defpath))
    except BackendUnavailable as error:
        pytest.skip(str(error))
    return name


@pytest.fixture
def launch(nursery: str, tmp_path: Path) -> Callable[..., Output]:
    """Run a script on `n` ranks, and `servers` more, in an empty folder; fail when it takes more than a minute."""
    return partial(start, nursery, tmp_path)


@pytest.fixture(scope="session")
def launched(nursery: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Output, Path]]:
    """As `launch`, for several tests that look at one job: returns the folder too, and runs the same job once."""

    @cache
    def run(n: int, script: Path, *arguments: str, mpi: str) -> tuple[Output, Path]:
        folder = tmp_path_factory.mktemp("launched")
        return start(nursery, folder, n, script, *arguments, mpi=mpi), folder

    return run


def start(
    nursery: str,
    folder: Path,
    n: int,
    script: Path,
    *arguments: str,
    mpi: str,
    servers: int = 0,
    joiners: int = 0,
    elastic: str = "",
    seconds: float = 60,
) -> Output:
    ranks = ["-n", str(n), "--servers", str(servers), *(["--elastic", elastic] if elastic else [])]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "aiodist.cli", "run", *ranks, "--mpi", mpi, *stub(nursery, script, *arguments)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "NURSERY_ENDS": "soon"},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    lines: dict[int, list[str]] = {rank: [] for rank in range(n + servers + joiners)}
    for line in done.stdout.splitlines():
        rank, _, text = line.removeprefix("[").partition("] ")
        lines[int(rank)].append(text)
    return Output(done.returncode, lines, done.stderr)
