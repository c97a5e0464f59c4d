"""T7: examples/service.py answers while it trains, and all ranks stop at the same step."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.nursed import stub

pytestmark = pytest.mark.skipif(not all(map(find_spec, ("aiohttp", "sklearn"))), reason="they are not installed")

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.drawn(1)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("way", ["request", "signal"])
def test_t7_a_service_answers_while_training_goes_on_and_all_stop_together(nursery: str, way: str) -> None:
    command = [sys.executable, "-m", "aiodist.cli", "run", "-n", "2", "--mpi", "none", "--kill-after", "30"]
    with subprocess.Popen(
        [*command, *stub(nursery, "examples/service.py", "--port", "0")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as job:
        try:
            assert job.stdout is not None
            address = re.search(r"http://\S+", job.stdout.readline())
            assert address is not None
            answers = [_post(f"{address[0]}/predict", [0.5] * 64) for _ in range(20)]
            assert all(0 <= answer["digit"] <= 9 for answer in answers)
            assert answers[-1]["step"] > answers[0]["step"]
            wrong: object
            for wrong in ([0.5], "text", {}):  # a bad request ends neither the service nor the training
                with pytest.raises(urllib.error.HTTPError, match="400") as refused:
                    _post(f"{address[0]}/predict", wrong)
                refused.value.close()
            if way == "request":
                assert _post(f"{address[0]}/stop", None) == {"stopping": True}
            else:
                job.send_signal(signal.SIGTERM)
            output = job.communicate(timeout=60)[0]
        finally:
            job.kill()
    stopped = dict(re.findall(r"rank (\d) stops after (\d+) steps", output))
    assert len(stopped) == 2, output
    assert len(set(stopped.values())) == 1
    assert int(stopped["0"]) >= answers[-1]["step"]
    assert way == "signal" or job.returncode == 0


def _post(address: str, body: object) -> dict[str, int]:
    with urllib.request.urlopen(address, json.dumps(body).encode(), timeout=30) as answer:
        found = json.load(answer)
    assert isinstance(found, dict)
    return found
