"""The peer `shm-c`: what it sums, and that it is left out with its reason where it cannot be compiled."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import aiodist
from aiodist.bench.plan import Plan
from aiodist.bench.records import Record
from aiodist.bench.session import Session
from aiodist.errors import BackendUnavailable
from aiodist.testing import run_ranks
from benchmarks import collectives, shm_c
from tests.support.commands import python

ROOT = Path(aiodist.__file__).parents[1]
SHORT = (1 << 20) // 4
LONG = (32 << 20) // 4


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [2, 3])
def test_t1_shm_c_sums(ranks: int) -> None:
    """Ranks as threads: a call into C leaves the interpreter to the others."""
    memory = os.memfd_create("slots")

    def rank_sums(library: str, rank: int) -> list[torch.Tensor]:
        peer = shm_c.ShmC(library, f"/proc/self/fd/{memory}", rank, ranks)
        # One meeting and slices with a rest, each in both buffers and again in the first; then more than one chunk.
        sizes = (*3 * (1, SHORT, SHORT + 5), LONG + 7)
        tensors = [torch.arange(numel, dtype=torch.float32) % 97 + rank for numel in sizes]
        for t in tensors:
            peer.allreduce(t)
        peer.close()
        return tensors

    try:
        with shm_c.compiled() as library, ThreadPoolExecutor(ranks) as threads:
            by_rank = list(threads.map(lambda rank: rank_sums(library, rank), range(ranks)))
    except BackendUnavailable as error:
        pytest.skip(str(error))
    finally:
        os.close(memory)
    for tensors in by_rank:
        for t in tensors:
            expected = ranks * (torch.arange(t.numel()) % 97) + sum(range(ranks))
            assert torch.equal(t, expected.float())


async def measure(notes: list[str]) -> list[Record]:
    async with aiodist.init() as coll:
        plan = Plan("allreduce", coll.size, ("auto", "arena"), ("shm-c", "copy"), sizes=(64 << 10,), repeat=1)
        return await collectives.measure(Session(plan, coll, plan.impls, (), coll.barrier, notes=notes))


def test_t1_without_a_compiler_shm_c_is_left_out_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm_c, "COMPILERS", ("no-such-compiler",))
    notes: list[str] = []
    found, others = run_ranks(2, lambda: measure(notes))
    assert others == []
    assert [record.impl for record in found] == ["aiodist:auto", "aiodist:arena", "copy"]
    assert set(notes) == {"shm-c is left out: no C compiler, expected one of no-such-compiler"}


def test_t1_shm_c_is_measured_on_processes(tmp_path: Path) -> None:
    options = ["--sizes", "64KiB", "--repeat", "1", "--mpi", "none", "--against", "shm-c,copy"]
    done = python("-m", "benchmarks", "allreduce", *options, "--json", str(tmp_path / "out.json"), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    if "shm-c is left out" in done.stdout:
        pytest.skip("no C compiler")
    records = json.loads((tmp_path / "out.json").read_text())
    assert [record["impl"] for record in records] == ["aiodist:auto", "aiodist:arena", "shm-c", "copy"]
    assert "shm-c: DeepSpeed's csrc/cpu/comm/shm.cpp, rebuilt" in done.stdout
    assert "allreduce 64 KiB aiodist:auto against shm-c, 2 ranks" in done.stdout
