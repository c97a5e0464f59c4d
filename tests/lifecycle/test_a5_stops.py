"""A5: a rank that stops and continues, or is killed, at each place within the core; the others run Python.

The core is built once more, with CORE_STOPS: then a process can have itself signalled where it is just about to say, or
has just said, something to the others.
"""

from __future__ import annotations

import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from build_backend import aiodist_build as build
from tests.lifecycle.conftest import Run, slowness
from tests.support.nursed import nursed

RANKS, PLACES = 3, 11
HEARD = 1.0  # seconds from a death until the others are notified

pytestmark = pytest.mark.skipif(not build.compiler(), reason="there is no C compiler that compiles the core")


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`aiodist._core` with stops."""
    target = tmp_path_factory.mktemp("core") / "_core.abi3.so"
    include = {sysconfig.get_path(name) for name in ("include", "platinclude")}
    command = [
        *build.compiler(),
        *build.FLAGS,
        *build.WARNINGS,
        "-Werror",
        "-O1",
        "-DCORE_STOPS",
        "-DPy_LIMITED_API=0x030B0000",
    ]
    command += [*[f"-I{folder}" for folder in include], "-shared", *map(str, build.SOURCES)]
    subprocess.run(
        [*command, str(build.ROOT / "core" / "tests" / "stops.c"), "-o", str(target)], check=True, timeout=300
    )
    return target


@pytest.fixture(scope="module")
def stopping(core: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a nursery whose programs have that core."""
    with nursed(tmp_path_factory.mktemp("stopping"), LIFECYCLE_CORE=str(core)) as address:
        yield address


@pytest.fixture
def run(stopping: str, tmp_path: Path) -> Run:
    return Run(stopping, tmp_path)


@pytest.mark.timeout(120)
def test_a5_a_rank_stops_at_every_place_and_goes_on(run: Run) -> None:
    ended = run("stops.py", "stopped", n=RANKS)
    assert (ended.code, ended.codes()) == (0, [0] * RANKS), ended
    for rank in range(RANKS):
        assert ended.said(rank) == [f"stopped: {place}" for place in range(rank, PLACES, RANKS)]


@pytest.mark.timeout(120)
@pytest.mark.drawn(3)
@pytest.mark.parametrize("hits", [1, 5])
@pytest.mark.parametrize("place", range(PLACES))
def test_a5_of_a_rank_killed_at_any_place_the_others_hear_within_a_second(run: Run, place: int, hits: int) -> None:
    ended = run("stops.py", "killed", str(place), str(hits), n=RANKS)
    assert (ended.code, ended.codes()) == (137, [*[1] * (RANKS - 1), -9]), ended
    _, death = ended.exits[RANKS - 1]
    for rank in range(RANKS - 1):
        assert ended.value(rank, "told") in ("PeerLost", "RemoteError")
        assert float(ended.value(rank, "lost")) - death < HEARD * slowness()
