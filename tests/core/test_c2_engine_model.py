"""Every order in which the threads of two ranks can take their steps: `core/tests/test_engine_model.c` schedules them.

The code of the engine, the lanes and the doorbells is unchanged; another thread may continue at each of their atomics,
mutexes and futexes. Tests of the checker change one line of the code, and the run must fail.
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
SIZES = ["-DCORE_PLACES=2", "-DCORE_PORTION_BYTES=512", "-DCORE_WHOLE_BYTES=512", "-DCORE_LEAST_STAGE_BYTES=1024"]
SCENARIOS = range(10)
MOST_ORDERS = 7

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")


Kernels = Callable[..., str]


def checker(kernels: Kernels, folder: Path, core: Path = CORE) -> Path:
    program = folder / "test_engine_model"
    sources = [kernels(str(COMPILER), *FLAGS, "-O0"), str(core / "tests" / "test_engine_model.c")]
    command = [str(COMPILER), *FLAGS, *SIZES, *sources, "-o", str(program)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return program


@pytest.fixture(scope="module")
def program(kernels: Kernels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checker(kernels, tmp_path_factory.mktemp("model"))


def run(program: Path, scenario: int, preemptions: int) -> subprocess.CompletedProcess[str]:
    command = [str(program), str(scenario), str(preemptions)]
    return subprocess.run(command, capture_output=True, text=True, timeout=500)


@pytest.mark.thorough
def test_c2_engine_loses_no_wake_up_in_any_order(program: Path) -> None:
    for scenario in SCENARIOS:
        done = run(program, scenario, 0)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"scenario {scenario}, 0 preemptions: ")


@pytest.mark.parametrize(
    "scenario", [pytest.param(s, marks=pytest.mark.thorough if s == MOST_ORDERS else ()) for s in SCENARIOS]
)
def test_c2_engine_loses_no_wake_up_with_a_preemption(scenario: int, program: Path) -> None:
    done = run(program, scenario, 1)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"scenario {scenario}, 1 preemptions: ")


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("scenario", [0, 1, 5, 8, 9])
def test_c2_engine_loses_no_wake_up_with_two_preemptions(scenario: int, program: Path) -> None:
    done = run(program, scenario, 2)
    assert done.returncode == 0, done.stderr


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("file", "line", "wrong", "scenario", "preemptions"),
    [
        (
            "engine.c",
            "look found = look(engine);\n    bool",
            "look found = (int)how == (int)CORE_LISTENS ? STUCK : IDLE;\n    bool",
            3,
            1,
        ),
        ("engine.c", "sleep == CORE_SLEEPS || ", "", 3, 0),
        ("engine.c", " || sleep == CORE_LISTENS", "", 7, 1),
        (
            "engine.c",
            "drive = lane_drive(lane, SLICE);",
            "drive = lane_drive(lane, SLICE) == DROVE ? DROVE : STILL;",
            2,
            2,
        ),
        ("engine.c", "how == CORE_DOZES || engine->others ? DOZE : 0", "how == CORE_DOZES ? DOZE : 0", 4, 1),
        ("engine.c", "core_doorbell_ring(engine->doorbell);\n    pthread_join", "pthread_join", 3, 0),
        ("lane.c", "memory_order_relaxed) == CORE_LISTENS)", "memory_order_relaxed) == CORE_SLEEPS)", 3, 0),
        ("lane.c", "if (watched) core_word_wake(&op->state);", "(void)watched;", 0, 0),
        (
            "lane.c",
            "lane->spoke = true;\n    atomic_store_explicit(&lane->mine->consumed",
            "atomic_store_explicit(&lane->mine->consumed",
            1,
            1,
        ),
        ("lane.c", "end_waiting(lane);\n    if (lane->spoke) ring(lane);", "end_waiting(lane);", 5, 1),
        (
            "doorbell.c",
            "atomic_store(&doorbell->sleep, CORE_RESTS);",
            "atomic_store_explicit(&doorbell->sleep, CORE_RESTS, memory_order_relaxed);",
            8,
            2,
        ),
        ("doorbell.c", "if (atomic_load(&doorbell->loop_waits)) core_doorbell_wait", "core_doorbell_wait", 8, 1),
        ("doorbell.c", "if (atomic_load(&doorbell->sleep) == CORE_RESTS) ", "if (doorbell == NULL) ", 8, 0),
    ],
)
def test_c2_engine_model_sees_what_is_wrong(
    file: str, line: str, wrong: str, scenario: int, preemptions: int, kernels: Kernels, tmp_path: Path
) -> None:
    copied = tmp_path / "core"
    shutil.copytree(CORE, copied)
    text = (copied / file).read_text()
    assert text.count(line) == 1
    (copied / file).write_text(text.replace(line, wrong))
    assert run(checker(kernels, tmp_path, copied), scenario, preemptions).returncode == 1
