"""T9: two jobs of real processes; one is killed and comes back."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.lifecycle.conftest import slowness
from tests.support.nursed import stub
from tests.support.programs import until_stopped

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(nursery: str, tmp_path: Path) -> Iterator[Start]:
    """Start a job on n ranks; it is killed at the end of the test."""
    with ExitStack() as stack:

        def job(n: int, role: str, meets: str, place: str, dies: str, **environ: str) -> subprocess.Popen[str]:
            program = stub(nursery, HERE / "programs" / "job.py", role, meets, place, dies)
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", "aiodist.cli", "run", "-n", str(n), "--mpi", "none", *program],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    cwd=tmp_path,
                    env={**os.environ, "PYTHONPATH": str(ROOT), "NURSERY_ENDS": "soon", **environ},
                )
            )
            stack.callback(process.kill)
            return process

        yield job


def ended(process: subprocess.Popen[str], code: int | None = 0) -> str:
    text = process.communicate(timeout=60 * slowness())[0]
    assert code is None or process.returncode == code, text
    return text


def of(text: str, rank: int, name: str) -> list[str]:
    return re.findall(rf"^\[{rank}\] {name}: (.*)$", text, re.MULTILINE)


CASES = [
    # who listens, ranks that publish and read, which side dies, its ranks that die, wire
    pytest.param("publishes", 2, 2, "reads", "1", "shm", id="a-reader"),
    pytest.param("reads", 2, 1, "publishes", "01", "shm", marks=pytest.mark.thorough, id="all-writers"),
    pytest.param("publishes", 3, 2, "publishes", "0", "shm", marks=pytest.mark.thorough, id="the-writer-with-the-hub"),
    pytest.param("reads", 1, 3, "reads", "2", "sockets", marks=pytest.mark.thorough, id="a-reader-that-listens"),
    pytest.param("publishes", 1, 2, "publishes", "0", "sockets", marks=pytest.mark.thorough, id="over-sockets"),
    pytest.param("publishes", 2, 2, "reads", "0", "address", marks=pytest.mark.thorough, id="by-address"),
]


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("listens", "p", "q", "side", "dies", "wire"), CASES)
def test_t9_a_killed_job_comes_back_while_the_other_one_lives_on(
    start: Start, tmp_path: Path, listens: str, p: int, q: int, side: str, dies: str, wire: str
) -> None:
    place = str(tmp_path / "meeting")
    if wire == "address":
        with socket.create_server(("127.0.0.1", 0)) as free:
            place = f"127.0.0.1:{free.getsockname()[1]}"
    sizes = {"publishes": p, "reads": q}
    other = "reads" if side == "publishes" else "publishes"
    environ = {"AIODIST_SHM": "0"} if wire == "sockets" else {}

    def begin(role: str, dies: str) -> subprocess.Popen[str]:
        return start(sizes[role], role, "listen" if role == listens else "connect", place, dies, **environ)

    lives = begin(other, "")
    killed = ended(begin(side, dies), code=None)
    again = ended(begin(side, "-" if side == "reads" else ""))
    text = ended(lives)

    names = "|".join(dies)
    times = [float(when) for rank in range(sizes[side]) for when in of(killed, rank, "dies")]
    assert len(times) == len(dies), killed
    for rank in range(sizes[other]):
        (lost,) = of(text, rank, "lost")
        when, number, words = lost.split(" ", 2)
        assert float(when) - min(times) < 1 * slowness(), (killed, text)
        assert number in dies
        assert re.match(
            rf"rank ({names}) of the job at the other end of bridge .* \(host \S+, process \d+\) left", words
        )
        assert f"[{rank}] ended" in text
    for rank in range(q):
        read = (
            [*of(killed, rank, "version"), *of(again, rank, "version")]
            if side == "reads"
            else of(text, rank, "version")
        )
        versions = list(map(int, read))
        assert versions == sorted(set(versions)), "a version after the reconnection is newer"
        assert len(versions) >= 4
    assert f"[{sizes[side] - 1}] ended" in again
    assert wire == "address" or os.listdir(place) == ["weights.lock"]


@pytest.mark.thorough
@pytest.mark.timeout(180)
def test_t9_a_stopped_reader_holds_up_no_writer(start: Start, tmp_path: Path) -> None:
    writer = start(2, "publishes", "listen", str(tmp_path / "meeting"), "")
    reader = start(1, "reads", "connect", str(tmp_path / "meeting"), "s")
    process = int(line_with(reader, r"stops: (\d+)"))
    until_stopped(process)
    stopped, steps = time.monotonic(), 0
    while steps < 20:  # tens of steps after the stop; the pipe still holds earlier lines
        steps += float(line_with(writer, r"step: (\S+)")) > stopped
    os.kill(process, signal.SIGCONT)
    assert "ended" in ended(reader)
    assert "lost" not in ended(writer)


def line_with(process: subprocess.Popen[str], pattern: str) -> str:
    """Return the first group of the next line that has the pattern."""
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(pattern, line):
            return found[1]
    pytest.fail("the job has ended")
