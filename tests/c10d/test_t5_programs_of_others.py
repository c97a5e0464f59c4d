"""Programs of others over "aiodist": torch's own tests, Accelerate and Lightning."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest
import torch

from tests.support.torch_ranks import run_alone, started

PROGRAMS = Path(__file__).parent / "programs"

DRAWN = (
    *("test_all_gather_coalesced_simple", "test_all_reduce_full_group_sum", "test_all_to_all_single_unequal_split"),
    *("test_barrier_full_group", "test_broadcast", "test_gather", "test_irecv"),
    *("test_scatter", "test_send_recv_any_source", "test_send_recv_with_tag", "test_DistributedDataParallelCPU"),
)
"""One of torch's own tests of each kind."""


FAIL: Mapping[str, str] = MappingProxyType(
    {
        "test_monitored_barrier_gloo test_monitored_barrier_gloo_subgroup "
        "test_monitored_barrier_failure_order test_monitored_barrier_wait_all_ranks": "torch asks for gloo by its name",
    }
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14)
    else {}
)
"""torch's own tests that do not pass over "aiodist", and why."""

SKIPPED = (
    *("CUDA", "Nccl", "NCCL", "torchvision"),  # not here: LACKING in the program
    "https://github.com/pytorch/pytorch/",  # torch skips them itself
)
"""Why tests are skipped, over any backend on the CPU."""


class Outcome(NamedTuple):
    """How a test of torch's ended: "passed", "skipped" or "failed" on the rank where it ended worst, and why."""

    end: str
    why: str


def outcomes(nursery: str, folder: Path, size: int, names: Sequence[str], seconds: float) -> dict[str, Outcome]:
    """Return how torch's own tests ended, or those of `names`, in a world of `size` ranks."""
    folder.mkdir(exist_ok=True)
    ended = started(PROGRAMS / "torch_tests.py", folder, *names, size=size, seconds=seconds, nursery=nursery)
    assert [code for code, _ in ended] == [0] * size, ended
    found: dict[str, Outcome] = {}
    for rank in range(size):
        for line in (folder / f"rank{rank}.jsonl").read_text().splitlines():
            name, end, why, _ = json.loads(line)
            if name not in found or end == "failed":
                found[name] = Outcome(end, why)
    return found


def failures(found: Mapping[str, Outcome]) -> dict[str, str]:
    """Return the tests that failed, and why."""
    return {name: outcome.why for name, outcome in found.items() if outcome.end == "failed"}


@pytest.mark.thorough
@pytest.mark.processes
def test_t5_some_of_torchs_own_tests(nursery: str, tmp_path: Path) -> None:
    found = outcomes(nursery, tmp_path, 3, DRAWN, 110)
    assert {name: found[name].end for name in DRAWN} == dict.fromkeys(DRAWN, "passed"), failures(found)


@pytest.mark.thorough
@pytest.mark.processes
@pytest.mark.timeout(1500)
def test_t5_torchs_own_tests(nursery: str, tmp_path: Path) -> None:
    """All of them in a world of three, and those that want more ranks in the worlds that they want."""
    found = outcomes(nursery, tmp_path / "3", 3, (), 600)
    for size, wanted in ((4, "exact world size of 4"), (8, "small world size")):
        names = [name for name, outcome in found.items() if wanted in outcome.why]
        assert names, f"none wants a world of {size}"
        found |= outcomes(nursery, tmp_path / str(size), size, names, 400)
    assert failures(found).keys() == set(" ".join(FAIL).split()), "\n".join(failures(found).values())
    skipped = {outcome.why for outcome in found.values() if outcome.end == "skipped"}
    assert {why for why in skipped if not any(known in why for known in SKIPPED)} == set()
    assert {known for known in SKIPPED if not any(known in why for why in skipped)} == set()  # each still holds
    assert sum(outcome.end == "passed" for outcome in found.values()) >= 120


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
RUN_AS = ("-m", "aiodist.cli", "run", "-n", 2, "--as", "gloo")


@pytest.mark.thorough
@pytest.mark.processes
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["accelerate", "lightning"])
def test_t8_frameworks_come_to_what_gloo_comes_to(tmp_path: Path, name: str) -> None:
    """Unchanged under `run --as gloo`, and changed to "aiodist" under torchrun."""
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    found = {}
    for way, backend, launch in (
        ("gloo", "gloo", TORCHRUN),
        ("as gloo", "gloo", RUN_AS),
        ("aiodist", "aiodist", TORCHRUN),
    ):
        folder = tmp_path / way
        folder.mkdir()
        run_alone(*launch, PROGRAMS / f"with_{name}.py", backend, folder, seconds=130)
        found[way] = [json.loads((folder / f"{backend}-{rank}.json").read_text()) for rank in (0, 1)]
        assert all(result.pop("backend") == backend for result in found[way])
        group = "ProcessGroup" if way == "gloo" else "AiodistProcessGroup"
        assert all(result.pop("group") == group for result in found[way])
    assert found["aiodist"] == found["gloo"]
    assert found["as gloo"] == found["gloo"]
    assert all(len(result["losses"]) > 8 for result in found["gloo"])
