"""N17: a save that is cut off anywhere leaves the checkpoint before it, or is whole."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import aiodist
from aiodist.checkpoints import folders
from aiodist.testing import run_ranks
from tests.support.crashing import Crash, CrashingOs

ROOT = Path(__file__).resolve().parents[2]


class Constant(nn.Module):
    """All of its weights are the same number, so a mixture of two checkpoints is seen."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.full((n,), value) for n in (1, 40_000, 7, 100_001))

    def value(self) -> float:
        values = {float(v) for w in self.weights for v in w.detach().unique()}
        (value,) = values
        return value


def save(path: Path, ranks: int, value: float) -> None:
    async def main() -> None:
        async with aiodist.init() as coll:
            await aiodist.save(path, Constant(value), coll=coll, metadata=value, keep_last=1)

    run_ranks(ranks, main)


def load(path: Path, ranks: int) -> float:
    async def main() -> float:
        async with aiodist.init() as coll:
            net = Constant(0.0)
            found = await aiodist.load(path, net, coll=coll)
            assert found.metadata == net.value()
            return net.value()

    (value,) = set(run_ranks(ranks, main))
    return value


def save_on(disk: CrashingOs, path: Path, ranks: int, value: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folders, "os", disk)
        patch.setattr(shutil, "rmtree", disk.rmtree)
        try:
            save(path, ranks, value)
        finally:
            for thread in threading.enumerate():
                if thread.name.startswith("aiodist-files"):
                    thread.join(10)


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [1, 3])
def test_n17_a_crash_at_any_call_leaves_the_one_before(
    tmp_path: Path, ranks: int, caplog: pytest.LogCaptureFixture
) -> None:
    seed = random.randrange(1 << 32)
    draw = random.Random(seed)
    path = tmp_path / "checkpoints"
    save(path, ranks, 1.0)
    values = {1.0}
    for stop in itertools.count(1):
        disk = CrashingOs(stop, draw)
        value = 1.0 + stop
        try:
            save_on(disk, path, ranks, value)
        except (Crash, aiodist.RemoteError):
            assert disk.crashed
        ended = not disk.crashed
        disk.crash()
        caplog.clear()
        found = load(path, draw.choice([1, ranks]))
        assert found in values | {value}, f"stop {stop}, seed {seed}"
        assert "is not used" not in caplog.text, f"stop {stop}, seed {seed}"
        values = {found}
        if ended:
            assert found == value
            assert disk.calls >= 10 + 3 * ranks, f"{disk.calls} calls, seed {seed}"
            break
    assert [p.name for p in path.iterdir() if p.suffix] == []


KILLED = """
import os, signal, sys
import torch
from tests.checkpoints import test_n17_crash as crash
from aiodist.checkpoints import folders

class Telling:
    def __getattr__(self, name):
        return getattr(os, name)
    def write(self, fd, data):
        os.write(out, b".")
        return os.write(fd, data[: max(1, len(data) // 3)])
    def fsync(self, fd):
        os.write(out, b".")
        os.fsync(fd)
    def rename(self, a, b):
        os.write(out, b".")
        os.rename(a, b)

torch.set_num_threads(1)
folders.os = Telling()
for line in sys.stdin:
    value, dots = map(int, line.split())
    told, out = os.pipe()
    if not (child := os.fork()):
        while True:
            value += 1
            crash.save(crash.Path(sys.argv[1]), 1, float(value))
            os.write(out, f"{value} ".encode())
    os.close(out)
    said = b"".join(os.read(told, 1) for _ in range(dots))
    os.kill(child, signal.SIGKILL)
    while more := os.read(told, 1000):
        said += more
    os.close(told)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    done = [int(each) for each in said.replace(b".", b" ").decode().split() if each] or [0]
    print(max(done), flush=True)
"""


@pytest.mark.thorough
def test_n17_killed_at_any_time_the_one_before_loads(tmp_path: Path) -> None:
    path = tmp_path / "checkpoints"
    save(path, 1, 1.0)
    sure = 1
    command = [sys.executable, "-c", KILLED, str(path)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for _ in range(5):
            process.stdin.write(f"{sure} {random.randint(1, 60)}\n")
            process.stdin.flush()
            sure = max(sure, int(process.stdout.readline()))
            found = load(path, 1)
            assert found in (sure, sure + 1)
            sure = int(found)
        process.stdin.close()
        assert process.wait() == 0


DIES = """
import os, signal, sys
import aiodist
from aiodist.checkpoints import folders
from aiodist.errors import AiodistError
from tests.checkpoints.test_n17_crash import Constant, Path

path = Path(sys.argv[1])

async def main():
    async with aiodist.init() as coll:
        await aiodist.save(path, Constant(1.0), coll=coll, metadata=1.0)
        if coll.rank == 1:
            folders.write_past_cache = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        try:
            await aiodist.save(path, Constant(2.0), coll=coll, metadata=2.0)
        except AiodistError as error:
            print(type(error).__name__, "rank 1" in str(error), flush=True)
            os._exit(0)

aiodist.run(main())
"""


def test_n17_when_a_rank_dies_the_others_hear_of_it_and_the_one_before_loads(tmp_path: Path) -> None:
    script = tmp_path / "dies.py"
    script.write_text(DIES)
    path = tmp_path / "checkpoints"
    command = [sys.executable, "-m", "aiodist.cli", "run", "-n", "2", "--mpi", "none", "--keep-going"]
    done = subprocess.run(
        [*command, str(script), str(path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "[0] PeerLost True" in done.stdout.splitlines(), done.stdout + done.stderr
    assert load(path, 2) == 1.0
