"""Every order in which two and three ranks can take their steps through a lane: `core/tests/test_model.c` drives the C.

Builds with few entries and places and with portions of some bytes reach the ends of each within few steps. Tests of
the checker change one line of the protocol, and the run must fail.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

CORE = Path(__file__).resolve().parents[2] / "core"
COMPILER = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", "-O2", "-DCORE_ENTRIES=2"]

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")


Kernels = Callable[..., str]


def checker(kernels: Kernels, folder: Path, places: int, portion: int, core: Path = CORE) -> Path:
    program = folder / "test_model"
    sizes = [f"-DCORE_PLACES={places}", f"-DCORE_PORTION_BYTES={portion}", "-DCORE_WHOLE_BYTES=512"]
    sources = [kernels(str(COMPILER), *FLAGS, "-O0"), str(core / "tests" / "test_model.c")]
    command = [str(COMPILER), *FLAGS, *sizes, "-DCORE_LEAST_STAGE_BYTES=64", *sources, "-o", str(program)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return program


def run(program: Path, ranks: int, sequences: int) -> subprocess.CompletedProcess[str]:
    command = [str(program), str(ranks), str(sequences), "1"]
    return subprocess.run(command, capture_output=True, text=True, timeout=500)


@pytest.mark.parametrize(
    ("ranks", "places", "portion", "sequences"),
    [
        (2, 1, 256, 8),
        (2, 2, 512, 8),
        (3, 2, 512, 30),
        pytest.param(2, 1, 256, 66, marks=[pytest.mark.thorough, pytest.mark.timeout(600)]),
        pytest.param(2, 2, 512, 66, marks=[pytest.mark.thorough, pytest.mark.timeout(600)]),
        pytest.param(3, 4, 512, 200, marks=[pytest.mark.thorough, pytest.mark.timeout(600)]),
    ],
)
def test_c2_model_holds_in_every_order(
    ranks: int, places: int, portion: int, sequences: int, kernels: Kernels, tmp_path: Path
) -> None:
    done = run(checker(kernels, tmp_path, places, portion), ranks, sequences)
    assert done.returncode == 0, done.stderr
    assert f"{ranks} ranks: {sequences} sequences" in done.stdout


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("file", "line", "wrong"),
    [
        ("lane.c", "if (lane->first != NULL && k - lane->first->number >= ENTRIES) return false;", ""),
        ("lane.c", "if (portion - oldest->portion >= PLACES)", "if (portion - oldest->portion > PLACES)"),
        ("lane.c", "if (lane->unsettled) return false;", ""),
        ("lane.c", "% PLACES].portion < consumed", "% PLACES].portion <= consumed"),
        ("lane.c", "if (lane->consumed < consumed) consumed = lane->consumed;", ""),
        ("lane.c", "if (!alike(entry, op)) other = q;", "(void)alike;"),
        (
            "ways.c",
            "&& op->reduced == 0 && !reached(lane, op, false, 0, who)) return WAITS;",
            "&& false) return WAITS;",
        ),
        ("ways.c", "<= op->base + j) {", "< op->base + j) {"),
        ("ways.c", "memory_order_acquire) <= op->base) {", "memory_order_acquire) < op->base) {"),
        ("ways.c", "reached(lane, op, halves, op->taken, who)", "reached(lane, op, false, op->taken, who)"),
    ],
)
def test_c2_model_sees_what_is_wrong(file: str, line: str, wrong: str, kernels: Kernels, tmp_path: Path) -> None:
    copied = tmp_path / "core"
    shutil.copytree(CORE, copied)
    text = (copied / file).read_text()
    assert text.count(line) == 1
    (copied / file).write_text(text.replace(line, wrong))
    assert run(checker(kernels, tmp_path, 1, 256, copied), 2, 8).returncode == 1
