"""T6: `aiodist.compat.mpi`, a front shaped like mpi4py."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from aiodist.errors import BackendUnavailable
from aiodist.testing.seams.mpi import find_mpi
from tests.support.environ import python_path
from tests.support.nursed import stub

HERE = Path(__file__).parent
PROGRAMS = HERE / "programs"
MODULES = ("cco_buf", "cco_obj", "cco_vec", "cco_nb_buf", "cco_nb_vec", "p2p_buf", "p2p_obj")


def run(ranks: int, *command: object, mpi: str = "none", seconds: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "aiodist.cli", "run", "-n", str(ranks), "--mpi", mpi, *map(str, command)],
        env={**os.environ, "PYTHONPATH": python_path(), "NURSERY_ENDS": "soon"},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [2, 3])
def test_t6_the_tutorial_prints_what_it_prints_with_mpi4py(nursery: str, ranks: int) -> None:
    try:
        find_mpi("openmpi", os.environ.get("PATH", os.defpath))
    except BackendUnavailable as error:
        pytest.skip(str(error))
    theirs = run(ranks, *stub(nursery, PROGRAMS / "tutorial.py", "mpi4py.MPI"), mpi="openmpi")
    ours = run(ranks, *stub(nursery, PROGRAMS / "tutorial.py", "aiodist.compat.mpi"))
    assert (theirs.returncode, ours.returncode, ours.stderr) == (0, 0, ""), (theirs, ours)
    assert "pi 3.141593" in ours.stdout
    assert ours.stdout == theirs.stdout


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("reductions", 3),
        ("tensors", 3),
        ("versions", 2),
        ("awaited", 2),
        ("mistakes", 2),
        ("synchronous", 2),
        ("overlaps", 2),
        ("errors", 1),
        ("errors", 3),
    ],
)
def test_t6_over_processes(nursery: str, name: str, ranks: int) -> None:
    done = run(ranks, *stub(nursery, PROGRAMS / "compat.py", name))
    assert (done.returncode, done.stderr) == (0, ""), done
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] {name}" for rank in range(ranks)]


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [2, 3])
def test_t6_buffers_that_overlap_give_what_copies_give_or_are_refused(nursery: str, ranks: int) -> None:
    done = run(ranks, *stub(nursery, PROGRAMS / "overlaps.py"))
    assert done.returncode == 0, done
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] overlaps" for rank in range(ranks)]


AGREEING = ["disagreements", "lengths", "messages", "orders", "nulls", "nulls_of_calls", "arguments", "windows"]


@pytest.mark.thorough
@pytest.mark.parametrize("mpi", ["none", "openmpi"])
@pytest.mark.parametrize("name", AGREEING)
def test_t6_what_ranks_agree_on(nursery: str, name: str, mpi: str) -> None:
    """Other datatypes, counts, operators and null objects are an `MPI.Exception` on each rank, as is a short block."""
    ranks = 3 if mpi == "none" else 2
    done = run(ranks, *stub(nursery, PROGRAMS / "agreeing.py", name), mpi=mpi)
    assert done.returncode == 0, done
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] {name}" for rank in range(ranks)]


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", ["reductions", "tensors", "synchronous", "mistakes"])
def test_t6_alone(nursery: str, name: str) -> None:
    command = [sys.executable, *stub(nursery, PROGRAMS / "compat.py", name)]
    environ = {**os.environ, "PYTHONPATH": python_path()}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", f"{name}\n"), done


@pytest.mark.thorough
def test_t6_the_others_hear_of_what_ends_one_rank(nursery: str) -> None:
    done = run(2, *stub(nursery, PROGRAMS / "compat.py", "raised"), seconds=30)
    assert done.returncode == 1
    assert "[0] told" in done.stdout
    assert "rank 1 failed: ValueError: rank 1 has had enough" in done.stderr


@pytest.mark.thorough
def test_t6_a_mismatch_is_told_once_by_each_rank(nursery: str) -> None:
    done = run(3, *stub(nursery, PROGRAMS / "compat.py", "mismatched"), seconds=60)
    assert done.returncode == 1
    of_ranks = [[line for line in done.stderr.splitlines() if line.startswith(f"[{rank}] ")] for rank in range(3)]
    for lines in of_ranks:
        assert sum("ranks disagree on operation #" in line for line in lines) == 1
        assert sum("of aiodist and asyncio" in line for line in lines) == 1
        assert len(lines) <= 12
    assert len(done.stderr.splitlines()) <= sum(map(len, of_ranks)) + 1  # and an exit code


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """mpi4py's own tests, of the version that is installed."""
    import mpi4py

    folder = tmp_path_factory.mktemp("mpi4py")
    what = ["--no-deps", "--no-build-isolation", "--no-binary", "mpi4py", f"mpi4py=={mpi4py.__version__}"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(folder), *what]
    if (done := subprocess.run(command, capture_output=True, text=True, check=False)).returncode:
        pytest.skip(f"the source of mpi4py {mpi4py.__version__} could not be had: {done.stderr[-200:]}")
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    (tests,) = folder.glob("*/test")
    return tests


@pytest.mark.thorough
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("module", MODULES)
def test_t6_mpi4pys_own_tests_pass(theirs: Path, module: str, ranks: int) -> None:
    done = run(ranks, HERE / "mpi4py_tests.py", theirs, f"test_{module}", seconds=280)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stdout.splitlines() if "] error" in line or "] failure" in line]
    assert lines == []
    assert int(done.stdout.splitlines()[-1].split()[-2]) >= 18
