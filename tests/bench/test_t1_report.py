"""What is printed and drawn."""

import io
import shutil
import sys
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from aiodist.bench import report, versions
from aiodist.bench.plan import Plan
from aiodist.bench.records import Record
from aiodist.errors import BackendUnavailable
from benchmarks.await_targets import verdicts

RECORDS = [
    Record("allreduce", "aiodist:auto", 2, 64, 4e-6, 4e-6, 4e-6, 5e-6, 0.016, 0.016, (0, 1), 1),
    Record("allreduce", "mpi4py:iallreduce", 2, 64, 2e-6, 2e-6, 2e-6, 3e-6, 0.032, 0.032, (0, 1), 1),
    Record("allreduce", "aiodist:auto", 2, 1024, 5e-6, 5e-6, 5e-6, 6e-6, 0.2, 0.2, (0, 1), 1),
]
PLAN = Plan("allreduce", 2, ("auto",), ("mpi4py",))


def printed(renderable: RenderableType) -> str:
    out = io.StringIO()
    Console(file=out, width=140).print(renderable)
    return out.getvalue()


def test_t1_table_shows_every_record() -> None:
    text = printed(report.table([*RECORDS, Record("parked_cpu", "aiodist:auto", 2, value=0.0312)], "what ran"))
    for expected in ("what ran", "64 B", "1 KiB", "mpi4py:iallreduce", "4 us", "0.032", "parked_cpu", "0.0312"):
        assert expected in text


def test_t1_table_of_targets_says_what_was_reached() -> None:
    records = [Record("parked_cpu", "aiodist:auto", 2, value=0.005), Record("await_busy", "aiodist:auto", 2, value=3.0)]
    lines = printed(report.verdict_table(verdicts(records))).splitlines()
    assert [("yes" in line, "NO" in line) for line in lines if "parked_cpu" in line or "await_busy" in line] == [
        (True, False),
        (False, True),
    ]


@pytest.mark.parametrize("op", ["allreduce", "barrier"])
def test_t1_plot_is_a_picture(tmp_path: Path, op: str) -> None:
    pytest.importorskip("matplotlib")
    records = RECORDS if op == "allreduce" else [Record("barrier", "aiodist:auto", 2, 0, 1e-6)]
    report.plot(records, Plan(op, 2, ("auto",), ()), str(tmp_path / "out.png"))
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_t1_plot_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BackendUnavailable, match=r"pip install 'aiodist\[plot\]'"):
        report.plot(RECORDS, PLAN, str(tmp_path / "out.png"))


def test_t1_cpu_of_threads_has_a_table_of_its_own() -> None:
    cpu = Record("train:conv:cpu", "ddp", 2, batch=32, thread="MainThread", cpu=0.012)
    steps, threads = report.tables([Record("train:conv", "ddp", 2, seconds=0.05, batch=32), cpu], "what ran")
    assert "MainThread" not in printed(steps)
    assert [column.header for column in threads.columns] == ["op", "batch", "impl", "thread", "CPU"]
    assert "12 ms" in printed(threads)
    assert len(report.tables(RECORDS, "what ran")) == 1


MPICH_SAYS = "MPICH Version:      5.0.2\nMPICH Device:       ch4:ucx ofi\nMPICH CC: cc\0"
OPEN_MPI_SAYS = "Open MPI v5.0.11, package: Open MPI user@localhost Distribution, ident: 5.0.11\0"


def test_t1_peers_say_their_versions_and_transports(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    assert versions.described_mpi(MPICH_SAYS).endswith("over MPICH 5.0.2 (device ch4:ucx ofi)")
    assert versions.described_mpi("Other MPI 2026\n").endswith("over Other MPI 2026 (transports unknown)")
    monkeypatch.setattr(shutil, "which", lambda _: None)
    described = versions.described_mpi(OPEN_MPI_SAYS)
    assert described.startswith("mpi4py ")
    assert described.endswith(" over Open MPI 5.0.11 (transports unknown: no ompi_info)")
