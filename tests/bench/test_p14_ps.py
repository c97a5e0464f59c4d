"""`benchmarks ps`: pushes and pulls by size, small pushes a second, and the cost of serving for a training step."""

import json
import os
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import aiodist
from aiodist.bench.records import dumps, table
from aiodist.bench.session import Session
from aiodist.testing import run_ranks
from aiodist.testing.seams.mpi import find_mpi
from benchmarks import __main__ as command
from benchmarks import ps, ps_saving, ps_serving
from benchmarks.figures import COLUMNS, Figure, figures
from benchmarks.ps_ways import SPLIT_BYTES, Roles
from benchmarks.suite import Study
from benchmarks.targets import verdicts
from tests.bench.written import loads
from tests.support.environ import python_path

OURS = ("aiodist:ps", "aiodist:ps-arena")


async def measure(plan: Study) -> list[Figure]:
    async with aiodist.init() as coll:
        return figures(await ps.measure(Session(plan, coll, plan.impls, (), coll.barrier)))


@pytest.mark.thorough
@pytest.mark.parametrize(("ranks", "servers"), [(3, 2)])
def test_p14_bench_ps_measures_every_call(monkeypatch: pytest.MonkeyPatch, ranks: int, servers: int) -> None:
    monkeypatch.setattr(ps, "COUNT", 20)
    monkeypatch.setattr(ps_serving, "PULLS", 1)
    plan = Study("ps", ranks, ("ps", "ps-arena"), (), sizes=(64, 2 << 20), repeat=1, own={"servers": servers})
    found, *others = run_ranks(ranks, partial(measure, plan))
    assert others == [[]] * (ranks - 1)
    calls = [("push", "copy"), ("push", "add"), ("pull", None), ("push_pull", "copy"), ("push_pull", "add")]
    timed = [(nbytes, op, rule, impl) for nbytes in (64, 2 << 20) for op, rule in calls for impl in OURS]
    timed += [(nbytes, "ps_ops", "add", impl) for nbytes in (64, 4 << 10) for impl in OURS]
    assert [(r.nbytes, r.op, r.rule, r.impl) for r in found[: len(timed)]] == timed
    for record in found[: len(timed)]:
        assert record.seconds
        assert record.nbytes
        assert record.algbw_gbps == pytest.approx(record.nbytes / record.seconds / 1e9)
        assert record.busbw_gbps is None
        assert record.value == (pytest.approx(1 / record.seconds) if record.op == "ps_ops" else None)
    assert [(r.op, r.impl) for r in found[len(timed) :]] == [
        *[("serving_step", impl) for impl in ("none", "aiodist:ps", "aiodist:ps:lock-free")],
        *[(op, impl) for op in ("serving_pull", "serving") for impl in ("aiodist:ps", "aiodist:ps:lock-free")],
    ]
    slowed = {record.impl: record.value for record in found if record.op == "serving"}
    steps = {record.impl: record.seconds or 0.0 for record in found if record.op == "serving_step"}
    for impl, value in slowed.items():  # of one round, which is the median
        assert value == pytest.approx(steps[impl] / steps["none"])
    assert loads(dumps(found)) == found
    assert "rule" in [column.header for column in table(found, "ps", COLUMNS).columns]


@pytest.mark.thorough
def test_p14_bench_ps_saving_tells_what_a_save_costs_pushes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"NBYTES": 4096, "ROUNDS": 1, "SECONDS": 0.01}.items():
        monkeypatch.setattr(ps_saving, name, value)
    monkeypatch.setattr(sys, "argv", ["ps_saving", "3e-5"])
    run_ranks(2, ps_saving.main)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        f"pushes to {what} beside the {way}" for what in ("one of 64 KiB", "all of 4 MiB") for way in ("save", "writer")
    ]
    assert all("0.00 GB in" in line for line in lines)


def test_p14_bench_ps_cuts_tensors_for_all_as_ours_does() -> None:
    roles = Roles(0, (1, 2), (0,))
    t = torch.arange(SPLIT_BYTES // 4 + 1)
    parts = roles.parts(t)
    assert sorted(rank for rank, _ in parts) == [1, 2]
    assert torch.equal(torch.cat([part for _, part in parts]), t)
    assert [(rank in (1, 2), part.numel()) for rank, part in roles.parts(t[:16])] == [(True, 16)]


@pytest.mark.thorough
@pytest.mark.parametrize("mpi", ["openmpi"])
def test_p14_bench_ps_beside_rpc_and_mpi(
    outside: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path, mpi: str
) -> None:
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    found = find_mpi("auto", os.environ.get("PATH", os.defpath))
    if found is None or found.flavour != mpi:
        pytest.skip("no Open MPI")
    monkeypatch.setenv("PYTHONPATH", python_path())
    monkeypatch.chdir(tmp_path)
    options = ["--sizes", "64", "--impl", "ps-arena", "--repeat", "1", "--mpi", mpi, "--json", "out.json"]
    assert command.main(["ps", *options]) == 0
    records = loads((tmp_path / "out.json").read_text())
    impls = ["aiodist:ps-arena", "rpc", "mpi"]
    assert [r.impl for r in records] == impls * 7
    assert all(r.seconds for r in records)
    assert [r["rule"] for r in json.loads((tmp_path / "out.json").read_text()) if r["op"] == "push"] == [
        *["copy"] * 3,
        *["add"] * 3,
    ]
    assert "ps_ops" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["ps", "--ranks", "1"], "--servers 1: expected fewer than --ranks 1"),
        (["ps", "--ranks", "4", "--servers", "4"], "--servers 4: expected fewer than --ranks 4"),
        (["ps", "--servers", "0"], "--servers"),
        (["train", "--servers", "1"], "--servers: in train no rank serves"),
        (["ps", "--dtype", "bool", "--sizes", "64"], "--dtype bool: ps adds"),
        (["ps", "--impl", "auto"], "--impl auto: expected some of ps, ps-arena"),
        (["ps", "--against", "gloo"], "--against gloo: expected some of rpc, mpi"),
        (["ps", "--mpi", "none", "--against", "rpc,mpi"], "--against mpi: no MPI"),
        (["ps", "--sizes", "6"], "--sizes 6: expected a multiple of 4"),
    ],
)
def test_p14_bench_ps_bad_arguments(
    outside: None, capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    assert command.main(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert expected in said.err


def records(**seconds: float) -> list[Figure]:
    """Pushes of 64 MiB by rule copy, in milliseconds."""
    return [Figure("push", impl.replace("_", ":"), 2, 64 << 20, ms / 1e3, rule="copy") for impl, ms in seconds.items()]


def test_p14_bench_ps_is_judged_against_others_of_the_same_run() -> None:
    found = records(aiodist_ps=10, rpc=25, mpi=8)
    found += [Figure("push", "aiodist:ps", 2, 64 << 20, 1.0, rule="add")]  # beside it
    found += [Figure("push", "aiodist:ps", 2, 4 << 10, 50e-6, rule="copy")]
    found += [Figure("ps_ops", "aiodist:ps", 2, 64, 1 / 60_000, value=60_000.0, rule="add")]
    found += [Figure("serving", "aiodist:ps", 2, 1 << 20, value=1.2)]
    lines = {line.what: (line.value, line.reached) for line in verdicts(found)}
    assert lines == {
        "push 64 MiB aiodist:ps against rpc": (pytest.approx(2.5), True),
        "push 64 MiB aiodist:ps against mpi": (pytest.approx(0.8), False),
        "push 4 KiB aiodist:ps": (pytest.approx(50), False),
        "pushes of 64 B, a second": (60_000, True),
        "step beside 10 pulls/s of aiodist:ps": (1.2, False),
    }
