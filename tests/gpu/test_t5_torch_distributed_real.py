"""Programs of torch.distributed whose tensors are on a CUDA device, over "aiodist" (T5).

`python -m pytest -m gpu tests/gpu/test_t5_torch_distributed_real.py`. Two ranks share the first device; their results
are compared with gloo's on the CPU.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest
import torch

from tests.c10d.test_t5_torch_distributed import PROGRAMS, WAYS
from tests.support.torch_ranks import started

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
Found = Mapping[tuple[str, int], Mapping[str, object]]
ROUGH = ("bfloat16", "mixed", "powersgd", "hook")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The results of each rank: "cpu" by gloo, "cuda" by aiodist."""
    results = {}
    for backend, device in (("gloo", "cpu"), ("aiodist", "cuda")):
        folder = tmp_path_factory.mktemp(device)
        for code, output in started(PROGRAMS / "every_way.py", backend, folder, device):
            assert code == 0, output
        for rank in (0, 1):
            results[device, rank] = json.loads((folder / f"{backend}-{rank}.json").read_text())
    return results


@pytest.mark.parametrize("way", WAYS)
def test_t5_on_a_device_as_on_the_cpu(found: Found, way: str) -> None:
    for rank in (0, 1):
        ours, theirs = found["cuda", rank][way], found["cpu", rank][way]
        if not isinstance(theirs, list):
            pytest.skip(f"torch {torch.__version__} cannot do it by gloo")
        assert isinstance(ours, list), ours  # else a traceback
        same(ours, theirs, 3e-2 if any(word in way for word in ROUGH) else 1e-3)


def test_t5_a_killed_rank_is_named_on_a_device_too() -> None:
    (code, output), _ = started(PROGRAMS / "other_ways.py", "killed", "cuda", seconds=40)
    assert code == 0, output
    assert "the loss was told" in output


def same(ours: object, theirs: object, off: float) -> None:
    """Assert that both are alike, numbers up to `off`."""
    if isinstance(ours, list) and isinstance(theirs, list):
        assert len(ours) == len(theirs)
        for mine, other in zip(ours, theirs, strict=True):
            same(mine, other, off)
    elif isinstance(ours, float):
        assert ours == pytest.approx(theirs, rel=off, abs=off)
    else:
        assert ours == theirs
