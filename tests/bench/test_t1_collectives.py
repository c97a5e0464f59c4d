"""Every operation is measured, on ranks of this process, and on two processes with the peers."""

import importlib
import json
import os
from functools import partial
from pathlib import Path

import pytest

import aiodist
from aiodist.bench import cli, collectives
from aiodist.bench.plan import COLLECTIVES, Plan
from aiodist.bench.records import Record
from aiodist.bench.session import Session
from aiodist.errors import BackendUnavailable, ConfigError
from aiodist.testing import run_ranks
from aiodist.testing.seams.mpi import find_mpi
from benchmarks import awaits, beside, reductions, suite
from benchmarks.suite import Study
from tests.support.commands import python

CUT = ("scatter", "reduce_scatter", "alltoall", "alltoall_single")  # blocks of equal size


async def measure(op: str, sizes: tuple[int, ...]) -> list[Record]:
    async with aiodist.init() as coll:
        plan = Plan(op, coll.size, ("auto",), (), sizes=sizes, repeat=2)
        session = Session(plan, coll, ("auto",), (), coll.barrier)
        # What is cut into blocks has at least one element for each rank.
        assert collectives.buffers(coll, op, 4).t.nbytes == 4 * (coll.size if op in CUT else 1)
        return await collectives.measure(session)


@pytest.mark.drawn(3)
@pytest.mark.parametrize("op", COLLECTIVES)
@pytest.mark.parametrize("ranks", [1, 3])
def test_t1_every_operation_is_measured(op: str, ranks: int) -> None:
    found, *others = run_ranks(ranks, partial(measure, op, (128 << 10, (1 << 20) + 4)))
    assert others == [[]] * (ranks - 1)
    assert [(r.op, r.impl, r.ranks) for r in found] == [(op, "aiodist:auto", ranks)] * (1 if op == "barrier" else 2)
    for record in found:
        assert record.seconds is not None
        assert record.seconds > 0
        assert record.torch_threads is not None
    last = (1 << 20) + 4
    assert found[-1].nbytes == (0 if op == "barrier" else last // (4 * ranks) * 4 * ranks if op in CUT else last)


async def measure_awaits() -> list[Record]:
    async with aiodist.init() as coll:
        plan = Study("await", coll.size, ("auto",), (), sizes=(4,), repeat=1)
        return await awaits.measure(Session(plan, coll, ("auto",), (), coll.barrier))


@pytest.mark.thorough
def test_t1_handles_at_once_are_gathered_beside_what_is_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(session: Session) -> list[Record]:
        return []

    monkeypatch.setattr(awaits, "COUNTS", {10: 1, 30: 1})
    monkeypatch.setattr(beside, "LARGE", 64 << 10)
    monkeypatch.setattr(beside, "measure", nothing)
    found, others = run_ranks(2, measure_awaits)
    assert others == []
    many = [
        (f"{op}_{count}", impl)
        for count in (10, 30)
        for op, impl in (
            ("gather", "aiodist:auto"),
            ("gather", "asyncio:finished"),
            ("aiodist_gather", "aiodist:auto"),
            ("issue", "aiodist:auto"),
            ("issue", "torch:increment_version"),
        )
    ]
    assert [(r.op, r.impl) for r in found] == [
        ("await_small", "aiodist:auto"),
        ("await_each", "aiodist:auto"),
        *many,
        ("allreduce", "aiodist:auto"),
    ]
    assert all(record.seconds for record in found)


def test_t1_every_benchmark_can_be_loaded() -> None:
    for benchmark in suite.BENCHMARKS.values():
        assert callable(importlib.import_module(benchmark.module).measure)
    with pytest.raises(ConfigError, match=r"^sync: expected one of allreduce, .*, ps"):
        suite.studied("sync", cli.Options())


def test_t1_a_copy_is_measured_beside_a_collective() -> None:
    async def main() -> list[Record]:
        async with aiodist.init() as coll:
            study = Study("allgather", coll.size, ("auto",), ("copy",), sizes=(4, 128 << 10), repeat=1)
            return await reductions.measure(Session(study, coll, ("auto",), (), coll.barrier))

    found, others = run_ranks(2, main)
    assert others == []
    assert [(r.nbytes, r.impl) for r in found] == [(n, i) for n in (4, 128 << 10) for i in ("aiodist:auto", "copy")]
    assert all(record.seconds for record in found)


ALL_BESIDE_PEERS = """
import asyncio, json, aiodist
from aiodist.bench import collectives, peers
from aiodist.bench.plan import Plan
from aiodist.bench.records import Record
from aiodist.bench.plan import COLLECTIVES
from aiodist.bench.session import Session

async def main():
    async with aiodist.init() as coll, peers.opened(("mpi4py", "gloo"), coll) as opened:
        async def fence() -> None:
            opened[0].barrier()
        found = {}
        for op in COLLECTIVES:
            plan = Plan(op, coll.size, ("auto", "direct"), (), sizes=(128 << 10,), repeat=1)
            records = await collectives.measure(Session(plan, coll, plan.impls, opened, fence))
            found[op] = [record.impl for record in records]
        if coll.rank == 0:
            print(json.dumps(found))

aiodist.run(main)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("mpi", ["openmpi"])
def test_t1_peers_do_every_operation(mpi: str, tmp_path: Path) -> None:
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    try:
        find_mpi(mpi, os.environ.get("PATH", os.defpath))
    except BackendUnavailable as error:
        pytest.skip(str(error))
    (tmp_path / "script.py").write_text(ALL_BESIDE_PEERS)
    done = python("-m", "aiodist.cli", "run", "-n", "2", "--mpi", mpi, "--no-prefix", "script.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for op in COLLECTIVES:
        ours = ["aiodist:auto"] if op in ("barrier", "sendrecv") else ["aiodist:auto", "aiodist:direct"]
        gloo = [] if op in ("scan", "exscan") else ["gloo"]
        assert found[op] == [*ours, f"mpi4py:{op}", f"mpi4py:i{op}", *gloo]
