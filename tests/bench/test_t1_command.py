"""`aiodist bench` as a user runs it."""

import json
import os
import sys
from pathlib import Path

import pytest

from aiodist.bench import cli
from aiodist.testing.seams.mpi import find_mpi
from tests.support.commands import python

FIELDS = {"op", "impl", "ranks", "nbytes", "seconds", "mean", "p50", "p99", "algbw_gbps", "busbw_gbps"}
FIELDS |= {"affinity", "torch_threads"}


@pytest.mark.thorough
@pytest.mark.parametrize("mpi", ["openmpi"])
def test_t1_bench_writes_records_and_a_plot(outside: None, tmp_path: Path, mpi: str) -> None:
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    found = find_mpi("auto", os.environ.get("PATH", os.defpath))
    if found is None or found.flavour != mpi:
        pytest.skip("no Open MPI")
    options = ["--sizes", "64,1KiB", "--impl", "auto,mpi", "--against", "mpi4py,gloo", "--repeat", "2", "--mpi", mpi]
    options += ["--json", "out.json", "--plot", "out.png"]
    done = python("-m", "aiodist.cli", "bench", "allreduce", "--ranks", "2", *options, cwd=tmp_path, timeout=200)
    assert done.returncode == 0, done.stderr
    records = json.loads((tmp_path / "out.json").read_text())
    impls = ["aiodist:auto", "aiodist:mpi", "mpi4py:allreduce", "mpi4py:iallreduce", "gloo"]
    assert [(r["nbytes"], r["impl"]) for r in records] == [(n, impl) for n in (64, 1024) for impl in impls]
    for record in records:
        assert set(record) == FIELDS
        assert (record["op"], record["ranks"]) == ("allreduce", 2)
        assert 0 < record["seconds"] == record["p50"] <= record["p99"]
        assert record["algbw_gbps"] == pytest.approx(record["nbytes"] / record["seconds"] / 1e9)
        assert record["busbw_gbps"] == pytest.approx(record["algbw_gbps"])
        assert record["affinity"]
        assert record["torch_threads"] >= 1
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert "aiodist:mpi" in done.stdout
    assert "1 KiB" in done.stdout


@pytest.mark.thorough
@pytest.mark.parametrize("mpi", ["openmpi"])
def test_t1_bench_await_writes_every_record(outside: None, tmp_path: Path, mpi: str) -> None:
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    found = find_mpi("auto", os.environ.get("PATH", os.defpath))
    if found is None or found.flavour != mpi:
        pytest.skip("no Open MPI")
    options = ["--impl", "auto", "--against", "mpi4py,gloo", "--repeat", "1", "--mpi", mpi, "--sizes", "4,1KiB"]
    done = python("-m", "benchmarks", "await", *options, "--json", "out.json", cwd=tmp_path, timeout=200)
    assert done.returncode == 0, done.stderr
    records = json.loads((tmp_path / "out.json").read_text())
    timed = [(r["op"], r["nbytes"]) for r in records if r["impl"] == "aiodist:auto" and "value" not in r]
    assert timed == [
        *[("await_small", nbytes) for nbytes in (4, 1024)],
        ("comparing", 4),
        ("await_each", 4),
        *[(f"{op}_{count}", 4) for count in (1000, 20_000) for op in ("gather", "aiodist_gather", "issue")],
        ("allreduce", 64 << 20),
        ("wake_up", 4),
    ]
    assert [r["impl"] for r in records if r["op"] == "comparing"] == ["aiodist:auto", "gloo", "gloo:detail"]
    values = {r["op"]: r["value"] for r in records if "value" in r}
    assert list(values) == [
        *("parked_cpu", "peer_computes_cpu", "loop_lag_idle", "loop_lag", "loop_lag_small"),
        *("progress_busy", "backward_beside_pending"),
        *("await_busy", "await_busy_processes", "await_busy_held", "await_busy_handovers"),
    ]
    assert all(value >= 0 for value in values.values())
    beside = {r["nbytes"] for r in records if r["op"] == "await_small" and r["impl"] == "mpi4py:iallreduce"}
    assert beside == {4, 1024}


@pytest.mark.thorough
@pytest.mark.parametrize("mpi", ["openmpi"])
def test_t1_bench_await_beside_busy_cores(outside: None, tmp_path: Path, mpi: str) -> None:
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    found = find_mpi("auto", os.environ.get("PATH", os.defpath))
    if found is None or found.flavour != mpi:
        pytest.skip("no Open MPI")
    options = ["--impl", "auto", "--against", "mpi4py", "--repeat", "1", "--mpi", mpi, "--busy"]
    done = python("-m", "benchmarks", "await", *options, "--json", "out.json", cwd=tmp_path, timeout=200)
    assert done.returncode == 0, done.stderr
    records = json.loads((tmp_path / "out.json").read_text())
    impls = ["aiodist:auto", "mpi4py:allreduce", "mpi4py:iallreduce"]
    assert [(r["op"], r["impl"]) for r in records] == [("await_small:busy", impl) for impl in impls]
    assert "each core has a process that spins" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["sync"], "aiodist bench: sync: expected one of allreduce"),
        (["allreduce", "--sizes", "64,many"], "--sizes 'many': expected bytes"),
        (["allreduce", "--sizes", "6"], "--sizes 6: expected a multiple of 4"),
        (["allreduce", "--impl", "magic"], "--impl magic: expected some of auto"),
        (["allreduce", "--against", "horovod"], "--against horovod: expected some of mpi4py, gloo"),
        (["allreduce", "--dtype", "float"], "--dtype float: expected one of"),
        (["allreduce", "--mpi", "none", "--against", "mpi4py"], "--against mpi4py: no MPI"),
        (["allreduce", "--mpi", "none", "--impl", "mpi"], "--impl mpi: no MPI"),
        (["allreduce", "--impl", "local"], "--impl local: it has one process"),
        (["allreduce", "--json", "no/such/folder/out.json"], "--json no/such/folder/out.json: expected a file"),
        (["allreduce", "--json", f"{__file__}/out.json"], "out.json: expected a file that can be written"),
        (["allreduce", "--plot", "out.txt"], "--plot out.txt: expected FILE.png or FILE.svg"),
        (["scan", "--dtype", "bool"], "--dtype bool: a scan is measured as a sum, which bool has not"),
        (["barrier", "--sizes", "64"], "--sizes: barrier has no sizes"),
        (["allreduce", "--ranks", "0"], "--ranks"),
        (["allreduce", "--repeat", "x"], "--repeat"),
        (["allreduce", "--wrong"], "--wrong"),
        ([], "OP"),
    ],
)
def test_t1_bad_arguments_are_one_clear_error(
    outside: None, capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    assert cli.called(cli.app, arguments, "aiodist bench") == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert expected in said.err


def test_t1_plot_without_matplotlib_is_refused_before_measuring(
    outside: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.called(cli.app, ["allreduce", "--plot", str(tmp_path / "out.png")], "aiodist bench") == 2
    assert "aiodist[plot]" in capsys.readouterr().err


def test_t1_help(outside: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.called(cli.app, ["--help"], "aiodist bench") == 0
    assert "--against" in capsys.readouterr().out
