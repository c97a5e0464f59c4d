"""The scripts behind `make rows` and the summary of `make test`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> ModuleType:
    name = f"tool_{request.param}"
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{request.param}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    (tmp_path / "tests" / "handles").mkdir(parents=True)
    (tmp_path / "docs" / "features.md").write_text("| id | feature |\n|---|---|\n| H1 | issued |\n| H10 | threads |\n")
    (tmp_path / "tests" / "handles" / "test_handle.py").write_text(
        "import pytest\n"
        "async def test_h1_issued_at_once(): ...\n"
        "class TestThreads:\n"
        "    @pytest.mark.parametrize('n', [1, 2])\n"
        "    def test_h10_wait_blocks(self, n): ...\n"
        "def test_helper(): ...\n"
    )
    return tmp_path


@pytest.mark.parametrize("tool", ["rows"], indirect=True)
def test_rows_prints_each_id_with_its_tests(
    tool: ModuleType, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tool, "ROOT", project)
    assert tool.main() == 0
    assert capsys.readouterr().out.splitlines() == [
        "H1",
        "    tests/handles/test_handle.py::test_h1_issued_at_once",
        "H10",
        "    tests/handles/test_handle.py::test_h10_wait_blocks[…]",
        "2 rows, 2 test functions that bear them",
    ]


@pytest.mark.parametrize("tool", ["rows"], indirect=True)
def test_rows_fails_and_names_what_does_not_fit(
    tool: ModuleType, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tool, "ROOT", project)
    (project / "docs" / "features.md").write_text("| C1 | a |\n| C2 | b |\n| H1 | issued |\n")
    assert tool.main() == 1
    assert capsys.readouterr().err.splitlines() == [
        "rows that have no test: C1 C2",
        "rows that have tests but no row: H10",
    ]


@pytest.mark.parametrize("tool", ["check"], indirect=True)
def test_summary_counts_tests_by_outcome_and_mpi(tool: ModuleType) -> None:
    report = ElementTree.fromstring(
        """<testsuites><testsuite>
        <testcase name="test_a[openmpi-2]"/>
        <testcase name="test_a[mpich-2]"/>
        <testcase name="test_b"><properties><property name="mpi" value="MPICH"/></properties></testcase>
        <testcase name="test_c"><failure message="no"/></testcase>
        <testcase name="test_d[mpich-4]"><skipped message="absent"/></testcase>
        </testsuite></testsuites>"""
    )
    assert str(tool.tally(report)).splitlines() == [
        "tests: 1 failed, 3 passed, 1 skipped",
        "       of those that ran: 2 under MPICH, 1 under Open MPI, 1 under no MPI",
    ]


@pytest.mark.parametrize("tool", ["check"], indirect=True)
@pytest.mark.parametrize("thorough", [False, True])
def test_each_test_is_in_one_part(tool: ModuleType, thorough: bool) -> None:
    parts = [part.command for part in tool.tests([], thorough=thorough)]
    named = [{word for word in part if word.startswith("tests/")} for part in parts]
    left = {word.removeprefix("--ignore=") for part in parts for word in part if word.startswith("--ignore=")}
    assert left == set().union(*named), "what the first part leaves out is named in another"
    assert sum(map(len, named)) == len(left), "and in one alone"
    assert all((TOOLS.parent / folder).is_dir() for folder in left)
    assert [any(word.endswith(" and processes") for word in part) for part in parts].count(True) == 1


@pytest.fixture
def main(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[[str], tuple[int, str]]:
    """`main(body)`: what `make test` comes to and prints for a test of this body, and one more beside it."""
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    soak\n    thorough\n")

    def part(arguments: list[str], *, thorough: bool) -> list[object]:
        return [tool._pytest("part", ["test_it.py"])]

    for name, value in {"ROOT": tmp_path, "BUILD": tmp_path / "build", "steps": list, "tests": part}.items():
        monkeypatch.setattr(tool, name, value)
    monkeypatch.setattr(tool, "_MYPY", tool.Step("mypy", [sys.executable, "-c", ""]))

    def main(body: str) -> tuple[int, str]:
        (tmp_path / "test_it.py").write_text(
            "import ctypes, pathlib\n"
            "FILE = pathlib.Path('ran')\n"
            f"def test_it():\n    ran = FILE.exists() or FILE.touch()\n    {body}\n"
            "def test_other(): ...\n"
        )
        return tool.main([]), capfd.readouterr().out

    return main


@pytest.mark.parametrize("tool", ["check"], indirect=True)
def test_a_test_that_failed_runs_once_more(tool: ModuleType, main: Callable[[str], tuple[int, str]]) -> None:
    code, out = main("assert ran")
    assert code == 0
    name, _, met = out.partition("failed at first, and passed when it ran once more: ")[2].partition("\n")
    assert name == "test_it.test_it"
    assert met.startswith("    assert None"), "and what it met at first"
    assert "run-last-failure" in out, "and it alone"


@pytest.mark.parametrize("tool", ["check"], indirect=True)
def test_a_run_that_crashed_runs_once_more_and_is_told_of(
    tool: ModuleType, main: Callable[[str], tuple[int, str]]
) -> None:
    code, out = main("ran or ctypes.string_at(0)")
    assert code == 0
    summary = out.partition("=== summary")[2]
    assert "FAILED (-11)" in summary
    assert "failed at first, and passed when it ran once more: part, which crashed" in summary.splitlines()
    assert "tests: 2 passed" in summary.splitlines()
    assert "in test_it" in summary.partition("=== what part was at when it crashed")[2]


@pytest.mark.parametrize("tool", ["check"], indirect=True)
@pytest.mark.parametrize(
    ("body", "said"), [("assert False", "tests: 1 failed, 1 passed"), ("ctypes.string_at(0)", "tests: none")]
)
def test_what_fails_twice_has_failed(
    tool: ModuleType, main: Callable[[str], tuple[int, str]], body: str, said: str
) -> None:
    code, out = main(body)
    assert code == 1
    assert said in out.splitlines()
    assert "passed when it ran once more" not in out


@pytest.mark.parametrize("tool", ["release"], indirect=True)
def test_release_finds_each_python_once_and_hides_compilers(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, name, says in (
        (first, "python3.13", "13 None"),
        (first, "python3.14t", "14 1"),
        (first, "python3.9", "9 None"),
        (first, "python3.13-config", "13 None"),
        (second, "python3.13", "13 0"),
        (second, "python3.11", "11 None"),
        (second, "gcc-12", ""),
        (second, "x86_64-linux-gnu-gcc", ""),
        (second, "sh", ""),
    ):
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(f"#!/bin/sh\necho {says}\n")
        (folder / name).chmod(0o755)
    (second / "python3.12").write_text("#!/bin/sh\nexit 1\n")  # without the module that makes environments
    (second / "python3.12").chmod(0o755)
    monkeypatch.setenv("PATH", f"{first}:{second}")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    found = [(python.version, python.path) for python in tool.pythons()]
    assert found == [
        ("3.11", f"{second}/python3.11"),
        ("3.13", f"{first}/python3.13"),
        ("3.14t", f"{first}/python3.14t"),
    ]
    shown = {path.name for path in tool.without_compilers(tmp_path / "shown").iterdir()}
    assert {"sh", "python3.13", "python3.13-config"} <= shown
    assert not {"gcc-12", "x86_64-linux-gnu-gcc"} & shown


@pytest.mark.parametrize("tool", ["policies_picture"], indirect=True)
def test_policies_let_workers_do_what_the_picture_shows(tool: ModuleType) -> None:
    done = {name: tool.done(tool.run(policy)) for name, policy in tool.POLICIES.items()}
    assert done == {
        "Asynchronous()": [12, 8, 4],
        "Bounded(1)": [5, 5, 4],
        'Quorum(2, "mean", stale="drop")': [8, 8, 4],
        'Synchronous("mean")': [4, 4, 4],
    }
