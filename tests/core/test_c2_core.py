"""The collectives of a host in C, with threads as ranks: correct, and without errors under the sanitizers.

`core/tests/test_core.c` draws operations of every kind, size and dtype, on tensors that other ranks can map and on
private ones, up to 40 in flight, including mismatches; one rank leaves in the middle. `core/tests/test_rings.c` sends
records both ways, and overwrites the content of a ring. `core/tests/test_files.c` writes files.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from build_backend import aiodist_build as build

TESTS = build.ROOT / "core" / "tests"

pytestmark = pytest.mark.skipif(not build.compiler(), reason="there is no C compiler that compiles the core")


Build = Callable[..., Path]


@pytest.fixture
def built(tmp_path: Path, kernels: Callable[..., str], objects: Callable[..., tuple[str, ...]]) -> Build:
    """Return the program that comes of one file, of the core, and of flags for the compiler; others may be its own.

    The kernels are not optimised, which takes longer than a run; those of the module are, and all tests call them.
    """

    def program(*flags: str, name: str = "test_core", own: tuple[str, ...] = ()) -> Path:
        file = tmp_path / name
        command = [*build.compiler(), *build.FLAGS, *build.WARNINGS, "-Werror", "-g", *flags]
        library = objects(tuple(path for path in build.LIBRARY if path.name != "kernels.c"), *command, *own)
        slow = any("sanitize" in flag for flag in flags)  # and without optimisation ten times slower
        parts = [
            str(TESTS / f"{name}.c"),
            *library,
            kernels(*command, *(() if slow else ("-O0",))),
            "-o",
            str(file),
            "-lm",
        ]
        whole = [*command, *own, *parts]
        subprocess.run(whole, check=True, capture_output=True, text=True)
        return file

    return program


def run(program: Path, **given: int | Path) -> str:
    done = subprocess.run([program, *map(str, given.values())], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_c2_core_what_is_drawn_is_right(built: Build) -> None:
    said = run(built("-O2"), seed=2, operations=20)
    assert [line.split()[0] for line in said.splitlines()] == ["1", "2", "3", "5", "8", "16", "32"]


def test_c2_core_stores_past_the_caches_are_right(built: Build) -> None:
    always = ("-DCORE_PAST_BYTES=4096", "-DCORE_NEAR_BYTES_PER_US=4000000000u")
    run(built("-O2", own=always), seed=4, operations=20, most_ranks=5)


def test_c1_core_records_arrive_whole_and_in_order(built: Build) -> None:
    assert run(built("-O2", name="test_rings"), records=50_000) == "50000 records each way\n"


def test_n17_core_files_have_what_was_written_and_its_checksums(built: Build, tmp_path: Path) -> None:
    assert run(built("-O2", name="test_files"), file=tmp_path / "written", times=50) == "50 files\n"


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "flags", [("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"), ("-fsanitize=thread",)]
)
def test_c2_core_under_a_sanitizer(flags: tuple[str, ...], built: Build, tmp_path: Path) -> None:
    program = built("-O1", *flags)
    run(program, seed=3, operations=20)
    assert run(built("-O1", *flags, name="test_rings"), records=50_000)
    assert run(built("-O1", *flags, name="test_files"), file=tmp_path / "written", times=50)
