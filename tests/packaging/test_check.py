"""What `make test` runs once more, and what its summary says of that."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

TESTS = """
import ctypes, pathlib, pytest

def test_one():
    pass

def test_other():
    seen = pathlib.Path(__file__).with_suffix(".seen")
    before = seen.exists()
    seen.touch()
    if FAILS or not before:
        HOW
"""


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """`tools/check.py`, with no checks, and with each file in `tmp_path` for a part."""
    found = spec_from_file_location("check", ROOT / "tools" / "check.py")
    assert found is not None
    assert found.loader is not None
    module = module_from_spec(found)
    monkeypatch.setitem(sys.modules, "check", module)
    found.loader.exec_module(module)

    def parts(arguments: list[str], *, thorough: bool) -> list[Any]:
        files = sorted(tmp_path.glob("test_*.py"))
        return [module._pytest(file.stem, ["-p", "no:aiodist", str(file)]) for file in files]

    monkeypatch.setattr(module, "BUILD", tmp_path / "build")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "steps", list)
    monkeypatch.setattr(module, "tests", parts)
    monkeypatch.setattr(module, "_MYPY", module.Step("nothing", [sys.executable, "-c", ""]))
    return module


def write(folder: Path, name: str, how: str, *, fails: bool = False) -> None:
    (folder / f"test_{name}.py").write_text(TESTS.replace("HOW", how).replace("FAILS", str(fails)))


def test_what_fails_once_runs_again_and_is_named(check: Any, tmp_path: Path, capfd: Any) -> None:
    write(tmp_path, "shaky", "assert False")
    assert check.main([]) == 0
    said = capfd.readouterr().out
    assert "=== test_shaky again" in said
    assert "failed at first, and passed when it ran once more: test_shaky.test_other" in said
    assert "tests: 1 failed, 1 passed" in said


def test_what_crashes_once_runs_again_and_tells_where_it_was(check: Any, tmp_path: Path, capfd: Any) -> None:
    write(tmp_path, "crashing", "ctypes.string_at(0)")
    assert check.main([]) == 0
    summary = capfd.readouterr().out.rpartition("=== summary")[2]
    assert "FAILED (-11)" in summary
    assert "failed at first, and passed when it ran once more: test_crashing, which crashed" in summary
    assert "tests: 2 passed" in summary
    stacks = summary.partition("=== what test_crashing was at when it crashed")[2]
    assert "in test_other" in stacks


@pytest.mark.parametrize("how", ["assert False", "ctypes.string_at(0)"])
def test_what_fails_twice_has_failed(check: Any, tmp_path: Path, capfd: Any, how: str) -> None:
    write(tmp_path, "broken", how, fails=True)
    assert check.main([]) == 1
    assert "passed when it ran once more" not in capfd.readouterr().out
