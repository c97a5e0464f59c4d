"""A8: `aiodist tune` measures and writes the table; the next start uses it, and never a bad one."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import aiodist
from aiodist import cli
from aiodist.bench.tuning import Tuning, tuning
from aiodist.bench.tuning_worker import best_of, edits_from, main
from aiodist.errors import ConfigError
from aiodist.testing import run_ranks
from aiodist.types import OPERATIONS
from tests.support.commands import python

SHORT = Tuning(("allreduce",), (64, 1 << 18), repeat=2)


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of this user's tables."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("AIODIST_SELECTOR", raising=False)
    return tmp_path / "cache" / "aiodist" / "selector"


def tune(todo: Tuning, ranks: int = 2) -> None:
    """Measure on ranks of this process."""
    run_ranks(ranks, partial(main, todo))


def start(ranks: int = 2) -> list[str]:
    """Return what each rank of the next start uses, or why it does not start."""

    async def program() -> str:
        try:
            async with aiodist.init() as coll:
                await coll.barrier()
                return coll.selector.show(operation="allreduce", hosts="one")
        except ConfigError as error:
            return str(error)

    return run_ranks(ranks, program)


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line.split()[:1] == ["cpu"]]


def test_a8_the_next_start_uses_what_was_measured(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = start()
    tune(SHORT)
    (file,) = cache.iterdir()
    written = file.read_text()
    said = capsys.readouterr().out
    assert f"{written}# written to {file}: the next start here uses it" in said
    figures = r"allreduce 64: \w+ [\d.e+]+ us(, \w+ [\d.e+]+ us)*\nallreduce 256KiB: "
    assert re.match(figures, said), said
    assert [line.split()[1] for line in written.splitlines() if line.startswith("made-for")] == [
        *("aiodist", "torch", "library", "hosts", "ranks-per-host", "cores", "implementations")
    ]
    assert [rows(text) for text in start()] == [rows(written)] * 2
    # an unlikely table shows that this file is used
    file.write_text(written[: written.index("  cpu")] + "cpu one allreduce 0 100 tree\ncpu one allreduce 100 - ring\n")
    assert [rows(text) for text in start()] == [rows(file.read_text())] * 2
    assert start(3) == [before[0]] * 3  # another topology, about which nothing is known


def test_a8_a_bad_table_is_an_error_and_not_used_by_half(cache: Path) -> None:
    tune(SHORT)
    (file,) = cache.iterdir()
    good = file.read_text()
    lines = good.splitlines()
    torch_line = next(i for i, line in enumerate(lines, 1) if line.startswith("made-for torch"))
    for bad, where, cause in (
        (f"{good}cpu one scan 0 - magic\n", len(lines) + 1, "implementation of scan 'magic': expected one of mpi"),
        (f"{good}cpu one allreduce 0 1KiB ring\n", len(lines) + 1, "are about the same sizes"),
        (good.replace("made-for torch ", "made-for torch 0."), torch_line, "made for torch 0."),
        (good[:-3] + "\0\n", len(lines), "expected"),
    ):
        file.write_text(bad)
        for said in start():
            assert f"{file}:{where}: " in said
            assert cause in said
            assert rows(said) == []


def test_a8_a_table_elsewhere_or_nowhere(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine.txt"
    tune(replace(SHORT, output=str(mine), dry=True))
    said = capsys.readouterr().out
    assert f"# not written: --dry-run; it would go to {mine}" in said
    assert rows(said)[0][:4] == ["cpu", "one", "allreduce", "0"]
    assert list(tmp_path.iterdir()) == []
    tune(replace(SHORT, output=str(mine)))
    assert f"AIODIST_SELECTOR={mine} uses it" in capsys.readouterr().out
    assert rows(mine.read_text())
    assert list(tmp_path.iterdir()) == [mine]


@pytest.mark.thorough
def test_a8_the_command_starts_ranks(cache: Path, tmp_path: Path) -> None:
    wanted = ("--operations", "allreduce,scan", "--sizes", "64,64KiB", "--quick", "--mpi", "none")
    done = python("-m", "aiodist.cli", "tune", "-n", "2", *wanted, cwd=tmp_path, AIODIST_SHM="0")
    assert done.returncode == 0, done.stderr
    (file,) = cache.iterdir()
    written = file.read_text()
    assert {row[2] for row in rows(written)} == {"allreduce", "scan"}
    assert "made-for library gloo\nmade-for hosts 1\nmade-for ranks-per-host 2\n" in written
    assert "made-for implementations gloo,ring," in written  # shared memory was turned off


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["-n", "1"], "-n 1: there is nothing to choose with fewer than 2 ranks"),
        (["-n", "x"], "-n x: expected a number of ranks, or auto"),
        (["-n", "2", "--operations", "allredcue"], "--operations allredcue: expected some of allreduce"),
        (["-n", "2", "--sizes", "6"], "--sizes 6: expected a multiple of 4"),
        (["-n", "2", "--output", "no/such/folder/t"], "--output no/such/folder/t: expected a file"),
    ],
)
def test_a8_bad_arguments_are_one_clear_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["aiodist", "tune", *arguments])
    assert cli.main() == 2
    assert expected in capsys.readouterr().err


def test_a8_the_best_is_chosen_by_size() -> None:
    figures = {
        256: {"mpi": 1.0, "shm": 9.0},
        1024: {"mpi": 1.04, "shm": 1.0},  # hardly better: it stays
        4096: {"mpi": 2.0, "shm": 1.0, "ring": 1.5},
        16384: {"ring": 1.0, "shm": 3.0},  # mpi was not measured any more
    }
    assert best_of(figures) == [(0, "mpi"), (2048, "shm"), (8192, "ring")]
    assert [str(edit) for edit in edits_from("allreduce", "one", figures)] == [
        "cpu one allreduce 0 2KiB mpi",
        "cpu one allreduce 2KiB 8KiB shm",
        "cpu one allreduce 8KiB - ring",
    ]


def test_a8_a_tuning_travels_as_text() -> None:
    usual = tuning(None, None, None, quick=False, dry=False)
    assert Tuning.from_json(usual.to_json()) == usual
    assert (usual.operations, usual.sizes[0], usual.sizes[-1]) == (OPERATIONS, 256, 64 << 20)
    some = tuning("scan,reduce", "1MiB,64,64", None, quick=True, dry=True)
    assert (some.operations, some.sizes, some.dry) == (("scan", "reduce"), (64, 1 << 20), True)
    with pytest.raises(ConfigError):
        tuning("scan,sort", None, None, quick=True, dry=False)
