"""N14: Ctrl-C while an engine trains: all ranks end with 130, and a later program continues from a checkpoint."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.nursed import stub

ROOT = Path(__file__).resolve().parents[2]

TRAINS = """
import asyncio
import sys

import torch
from torch.nn.functional import mse_loss

import aiodist
from aiodist.nn import DataParallel


async def main():
    async with aiodist.init() as coll:
        torch.manual_seed(3)
        net = await DataParallel.create(torch.nn.Linear(5, 3), coll)
        opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        engine = aiodist.Engine(net, opt, mse_loss, progress=False)
        try:
            resumed = bool(await aiodist.load(sys.argv[1], net, opt, per_rank=[engine]))
        except FileNotFoundError:
            resumed = False
        print("begins with", engine.state_dict()["step"], flush=True)

        @engine.on("update")
        async def tell(state):
            if state.step % 5 == 0 and not resumed:
                await aiodist.save(sys.argv[1], net, opt, per_rank=[engine], keep_last=2)
            if not resumed:
                if state.step == 20:
                    print("is at 20", flush=True)

        await engine.train([(torch.ones(2, 5), torch.ones(2, 3))] * 200, epochs=1 if resumed else 1000)
        print("ends with", engine.state.step, flush=True)


aiodist.run(main())
"""


def started(nursery: str, script: Path, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "aiodist.cli", "run", "-n", "2", "--mpi", "none", *stub(nursery, script, folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.drawn(1)
@pytest.mark.parametrize("to", ["the launcher", "its group"])
def test_n14_ctrl_c_ends_all_ranks_and_training_goes_on_later(nursery: str, tmp_path: Path, to: str) -> None:
    script, folder = tmp_path / "trains.py", tmp_path / "checkpoints"
    script.write_text(TRAINS)
    with started(nursery, script, folder) as job:
        try:
            assert job.stdout is not None
            waiting = {0, 1}
            while waiting:
                line = job.stdout.readline()
                assert line, job.communicate()
                waiting -= {rank for rank in waiting if line.startswith(f"[{rank}] is at 20")}
            if to == "its group":  # as a terminal does
                os.killpg(job.pid, signal.SIGINT)
            else:
                job.send_signal(signal.SIGINT)
            out, err = job.communicate(timeout=60)
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
        assert job.returncode == 130, out + err
        assert "ends with" not in out
    numbers = sorted(p.name for p in folder.iterdir() if not p.suffix)
    assert numbers
    with started(nursery, script, folder) as job:
        out, err = job.communicate(timeout=100)
    assert job.returncode == 0, out + err
    begun = {int(line.rsplit(maxsplit=1)[1]) for line in out.splitlines() if "begins with" in line}
    assert len(begun) == 1
    assert begun.pop() in {5 * int(name.rsplit("-", 1)[1]) for name in numbers}
    for rank in (0, 1):
        assert f"[{rank}] ends with 200" in out.splitlines()
