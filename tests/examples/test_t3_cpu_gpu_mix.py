"""T3: the example in which batches are prepared, copied, computed on and reduced at once."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import aiodist
from aiodist.testing import run_ranks
from tests.support.simulated_cuda.device import SimulatedCuda

Launch = Any  # conftest's fixture
SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "cpu_gpu_mix.py"


@pytest.fixture
def example() -> Iterator[Any]:
    """The example as a module, with little to do."""
    threads = torch.get_num_threads()
    spec = importlib.util.spec_from_file_location("cpu_gpu_mix", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    vars(module).update(STEPS=5, IMAGES=96, PIXELS=64)
    yield module
    torch.set_num_threads(threads)


def check(lines: list[str]) -> None:
    """Check the lines of rank 0; the program itself compares the sums with torch's, and fails if they differ."""
    stages = r", ".join(rf"{name} \d+\.\d\d s" for name in ("prepare", "copy", "compute", "reduce"))
    assert re.fullmatch(f"alone: {stages}", lines[0]), lines
    hidden = re.fullmatch(r"together \d+\.\d\d s: share hidden (\d+)%", lines[1])
    assert hidden is not None, lines
    assert 0 <= int(hidden[1]) <= 100
    assert lines[2:] == ["the sums are those of plain torch"]


@pytest.mark.thorough
def test_t3_cpu_gpu_mix_under_the_launcher(launch: Launch) -> None:
    done = launch(2, SCRIPT, mpi="none")
    assert (done.code, done.errors) == (0, "")
    check(done.lines[0])
    assert done.lines[1] == []


@pytest.mark.parametrize("n", [1, 3])
def test_t3_cpu_gpu_mix_on_any_number_of_ranks(n: int, example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(n, example.main)
    check(capsys.readouterr().out.splitlines())


@pytest.mark.parametrize("n", [1, 2])
def test_t3_cpu_gpu_mix_on_a_device(
    n: int, example: Any, simulated_cuda: SimulatedCuda, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()  # what the fixture says of itself
    run_ranks(n, example.main)
    check(capsys.readouterr().out.splitlines())
    batches = n * (1 + 2 * example.STEPS)
    copies = batches * (1 if n == 1 else 2)  # what is reduced goes by way of the host
    assert (simulated_cuda.launches["mm"], simulated_cuda.launches["copy_h2d"]) == (batches, copies)


def test_t3_cpu_gpu_mix_notices_wrong_sums(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = example.products
    monkeypatch.setattr(example, "products", lambda x, into: right(x, into).add_(1.0))
    with pytest.raises(AssertionError, match="not close"):
        aiodist.run(example.main)
