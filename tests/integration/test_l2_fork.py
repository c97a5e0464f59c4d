"""An `os.fork` child of a rank ends by `sys.exit` while a reduction is in flight. The ranks run this file."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import aiodist
from tests.support.forked import still_in

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(60)
def test_l2_forked_child_exits_and_the_job_goes_on_with_openmpi() -> None:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "aiodist.cli", "run", "-n", "2", "--mpi", "openmpi", __file__],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=45,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    for rank in range(2):
        assert [line for line in lines if line.startswith(f"[{rank}]")] == [
            f"[{rank}] child: communicator 'world' was opened before os.fork: a child cannot use it",
            f"[{rank}] the child ended with 7",
            f"[{rank}] the sums are 2.0 and 2.0",
        ]


async def main() -> None:
    async with aiodist.init() as coll:
        t = torch.ones(1 << 21)
        pending = coll.allreduce(t)
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork with other threads, from Python 3.12 on
        child = os.fork()
        if child == 0:
            still_in(loop, task)
            try:
                coll.allreduce(1.0)
            except RuntimeError as error:
                print("child:", error, flush=True)
            sys.exit(7)  # through the block, the event loop and the handlers of atexit
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
        print("the child ended with", os.waitstatus_to_exitcode(status))
        await pending
        print(f"the sums are {t[0].item()} and {await coll.allreduce(1.0)}")


if __name__ == "__main__":
    aiodist.run(main)
