"""What is printed and drawn."""

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from aiodist.bench import plots
from aiodist.bench import records as report
from aiodist.bench.records import Record
from aiodist.errors import BackendUnavailable
from benchmarks.await_targets import reached
from benchmarks.figures import COLUMNS, Figure, figures

RECORDS = [
    Record("allreduce", "aiodist:auto", 2, 64, 4e-6, 4e-6, 4e-6, 5e-6, 0.016, 0.016, (0, 1), 1),
    Record("allreduce", "mpi4py:iallreduce", 2, 64, 2e-6, 2e-6, 2e-6, 3e-6, 0.032, 0.032, (0, 1), 1),
    Record("allreduce", "aiodist:auto", 2, 1024, 5e-6, 5e-6, 5e-6, 6e-6, 0.2, 0.2, (0, 1), 1),
]


def printed(renderable: RenderableType) -> str:
    out = io.StringIO()
    Console(file=out, width=140).print(renderable)
    return out.getvalue()


def test_t1_table_shows_every_record() -> None:
    text = printed(
        report.table([*figures(RECORDS), Figure("parked_cpu", "aiodist:auto", 2, value=0.0312)], "what ran", COLUMNS)
    )
    for expected in ("what ran", "64 B", "1 KiB", "mpi4py:iallreduce", "4 us", "0.032", "parked_cpu", "0.0312"):
        assert expected in text


def test_t1_table_of_targets_says_what_was_reached() -> None:
    records = [Figure("parked_cpu", "aiodist:auto", 2, value=0.005), Figure("await_busy", "aiodist:auto", 2, value=3.0)]
    lines = printed(*reached(records)).splitlines()
    assert [("yes" in line, "NO" in line) for line in lines if "parked_cpu" in line or "await_busy" in line] == [
        (True, False),
        (False, True),
    ]


@pytest.mark.drawn(1)
@pytest.mark.parametrize("op", ["allreduce", "barrier"])
def test_t1_plot_is_a_picture(tmp_path: Path, op: str) -> None:
    pytest.importorskip("matplotlib")
    records = RECORDS if op == "allreduce" else [Record("barrier", "aiodist:auto", 2, 0, 1e-6)]
    plots.plot(records, op, str(tmp_path / "out.png"))
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_t1_plot_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BackendUnavailable, match=r"pip install 'aiodist\[plot\]'"):
        plots.plot(RECORDS, "allreduce", str(tmp_path / "out.png"))


def test_t1_the_table_has_a_column_for_what_some_record_has() -> None:
    cpu = Figure("train:conv:cpu", "ddp", 2, batch=32, thread="MainThread", cpu=0.012)
    both = report.table([Figure("train:conv", "ddp", 2, seconds=0.05, batch=32), cpu], "what ran", COLUMNS)
    assert [column.header for column in both.columns] == ["op", "batch", "impl", "thread", "median", "CPU"]
    assert "12 ms" in printed(both)
