"""Faults of other ranks: in `core/tests/test_faults.c` they write nonsense, stop and die, at every place."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from build_backend import aiodist_build as build

CORE = Path(__file__).resolve().parents[2] / "core"
COMPILER = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-DCORE_STOPS", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", "-g"]
SANITIZED = ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")


Build = Callable[..., Path]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, kernels: Callable[..., str]) -> Build:
    """Return the program of flags for the compiler, and of the core or a changed copy; each is built once."""

    @cache
    def program(*flags: str, core: Path = CORE) -> Path:
        file = tmp_path_factory.mktemp("faults") / "test_faults"
        names = [path.name for path in build.LIBRARY if path.name != "kernels.c"]
        sources = [*(core / name for name in names), core / "tests" / "test_faults.c"]
        command = [str(COMPILER), *FLAGS, *flags]
        unoptimised = kernels(*command, "-O0")
        whole = [*command, *map(str, sources), unoptimised, "-o", str(file), "-lm", "-lpthread"]
        subprocess.run(whole, check=True, capture_output=True, text=True)
        return file

    return program


def run(program: Path, *words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, *map(str, words)], capture_output=True, text=True, timeout=500)


def test_c2_faults_random_words_of_peers_do_no_harm(built: Build) -> None:
    done = run(built(*SANITIZED), "fuzz", 1, 200)
    assert done.returncode == 0, done.stderr
    counts = [int(part.split()[0]) for part in done.stdout.split(", ")]
    assert len(counts) == 4  # done, different, abandoned, broken
    assert min(counts) > 0


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("file", "line", "wrong"),
    [
        ("ways.c", "if (offset > length || nbytes > length - offset) return OUTSIDE;", "(void)length, (void)nbytes;"),
        ("ways.c", "if (place > lane->stage_bytes || length > lane->stage_bytes - place) return OUTSIDE;", ""),
        ("ways.c", "if (!aligned(op, lane->windows[q])) return FAILED;", ""),
        (
            "lane.c",
            "if (place.offset > segment->nbytes || nbytes > segment->nbytes - place.offset) return OUTSIDE;",
            "(void)nbytes;",
        ),
    ],
)
def test_c2_faults_each_bound_is_needed(file: str, line: str, wrong: str, built: Build, tmp_path: Path) -> None:
    core = tmp_path / "core"
    shutil.copytree(CORE, core)
    text = (core / file).read_text()
    assert text.count(line) == 1
    (core / file).write_text(text.replace(line, wrong))
    assert run(built(*SANITIZED, core=core), "fuzz", 1, 4000).returncode != 0


@pytest.mark.parametrize("ranks", [2, 3])
def test_c2_faults_a_rank_stops_or_dies_at_every_place(ranks: int, built: Build) -> None:
    """The others continue with a rank that continues; they learn of a dead rank, and then every operation ends."""
    done = run(built("-O2"), "stops", ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    seen = [int(line.split()[0]) for line in done.stdout.splitlines()]
    assert len(seen) == 11
    assert 0 not in seen


@pytest.mark.parametrize("operations", [100_000, pytest.param(1_000_000, marks=pytest.mark.thorough)])
def test_c2_faults_memory_stays_flat(operations: int, built: Build) -> None:
    done = run(built("-O2"), "soak", operations)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr
