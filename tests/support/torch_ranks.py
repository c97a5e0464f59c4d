"""Ranks of programs that `torch.distributed` starts by its variables, without a launcher."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.support.environ import python_path
from tests.support.nursed import stub

__all__ = ["free_port", "run_alone", "started"]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def started(
    program: Path, *args: object, size: int = 2, seconds: float = 110, nursery: str = ""
) -> list[tuple[int, str]]:
    """Run `size` ranks of a program in a nursery, with torch's variables; return the exit code and output of each.

    Processes that still run after the time limit are killed.
    """
    command = stub(nursery, program, *args) if nursery else [str(program), *map(str, args)]
    place = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environ = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", "NURSERY_ENDS": "soon", **place}
    ranks = [
        subprocess.Popen(
            [sys.executable, *command],
            env={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    end = time.monotonic() + seconds
    found = []
    try:
        for rank in ranks:
            try:
                output, _ = rank.communicate(timeout=max(end - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                for other in ranks:
                    other.kill()
                output = f"{rank.communicate()[0]}killed after {seconds:g} s"
            found.append((rank.returncode, output))
    finally:
        for rank in ranks:
            rank.kill()
    return found


def run_alone(*command: object, seconds: float = 100) -> str:
    """Return what Python prints with these arguments; it ends well."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env={**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Exception ignored" not in done.stderr, done.stderr
    return done.stdout
