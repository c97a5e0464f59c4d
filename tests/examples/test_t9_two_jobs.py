"""T9: examples/two_jobs_serve.py answers with the weights of two_jobs_train.py, which is killed and comes back."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.nursed import stub

pytestmark = pytest.mark.skipif(not all(map(find_spec, ("aiohttp", "sklearn"))), reason="they are not installed")

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 60


@pytest.mark.thorough
@pytest.mark.timeout(180)
def test_t9_a_service_follows_a_training_that_is_killed_and_comes_back(nursery: str, tmp_path: Path) -> None:
    with ExitStack() as stack:

        def start(*program: str) -> subprocess.Popen[str]:
            command = [sys.executable, "-m", "aiodist.cli", "run", "-n", "2", "--mpi", "none", "--kill-after", "30"]
            job = stack.enter_context(
                subprocess.Popen(
                    [*command, *stub(nursery, *program, "--folder", str(tmp_path))],
                    cwd=ROOT,
                    env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "NURSERY_ENDS": "soon"},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
            stack.callback(job.kill)
            return job

        serve = start("examples/two_jobs_serve.py", "--port", "0")
        addresses = [line_with(serve, r"http://\S+") for _ in range(2)]
        train = start("examples/two_jobs_train.py")
        assert all(predicted(address, after=0) > 0 for address in addresses)
        train.kill()
        losses = [line_with(serve, r"the training was lost: rank [01] of the job at the other end") for _ in range(2)]
        assert len(losses) == 2
        assert all(predicted(address, after=0) > 0 for address in addresses), "the last weights still answer"
        again = start("examples/two_jobs_train.py")
        line_with(again, "training")
        before = max(predicted(address, after=0) for address in addresses)
        assert all(predicted(address, after=5) for address in addresses)
        again.send_signal(signal.SIGTERM)
        text = again.communicate(timeout=SECONDS)[0]
        assert "test accuracy" in text, text
        for _ in range(2):
            line_with(serve, "the training has ended")
        assert max(predicted(address, after=0) for address in addresses) != before
        serve.send_signal(signal.SIGTERM)
        serve.communicate(timeout=SECONDS)
        assert serve.returncode == 128 + signal.SIGTERM


def line_with(job: subprocess.Popen[str], pattern: str) -> str:
    assert job.stdout is not None
    seen = []
    for line in job.stdout:
        seen.append(line)
        if found := re.search(pattern, line):
            return found[0]
    raise AssertionError("".join(seen))


def predicted(address: str, after: int) -> int:
    """Return the step of a prediction with weights of a later step than `after`."""
    while True:
        body = json.dumps([0.5] * 64).encode()
        with urllib.request.urlopen(f"{address}/predict", body, timeout=SECONDS) as answer:
            found: dict[str, Any] = json.load(answer)
        assert 0 <= found["digit"] <= 9
        if found["step"] > after:
            return int(found["step"])
