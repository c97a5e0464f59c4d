"""The scripts behind `make rows` and the summary of `make test`."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import Mock

import pytest

if TYPE_CHECKING:
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
    (tmp_path / "tests" / "handles").mkdir(parents=True)
    (tmp_path / "tests" / "CONTRACT.md").write_text("| id | feature |\n|---|---|\n| H1 | issued |\n| H10 | threads |\n")
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
    (project / "tests" / "CONTRACT.md").write_text("| C1 | a |\n| C2 | b |\n| H1 | issued |\n")
    assert tool.main() == 1
    assert capsys.readouterr().err.splitlines() == [
        "rows that have no test: C1 C2",
        "rows that have tests but no row: H10",
    ]


@pytest.mark.parametrize("tool", ["check"], indirect=True)
def test_summary_counts_tests_by_outcome_and_mpi(tool: ModuleType, tmp_path: Path) -> None:
    (report := tmp_path / "report.xml").write_text(
        """<testsuites><testsuite>
        <testcase name="test_a[openmpi-2]"/>
        <testcase name="test_a[mpich-2]"/>
        <testcase name="test_b"><properties><property name="mpi" value="MPICH"/></properties></testcase>
        <testcase name="test_c"><failure message="no"/></testcase>
        <testcase name="test_d[mpich-4]"><skipped message="absent"/></testcase>
        </testsuite></testsuites>"""
    )
    assert tool.tally(report).splitlines() == [
        "tests: 1 failed, 3 passed, 1 skipped",
        "       of those that ran: 2 under MPICH, 1 under Open MPI, 1 under no MPI",
    ]


def checked(folder: Path, body: str, *options: str) -> tuple[int, str]:
    """Return the exit code and the output of a run whose first test has this body."""
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    soak\n    thorough\n")
    (folder / "test_it.py").write_text(
        "import os, pathlib\n"
        f"FILE = pathlib.Path({str(folder / 'ran')!r})\n"
        f"def test_it():\n    ran = FILE.exists() or FILE.touch()\n    {body}\n"
        "def test_other(): ...\n"
    )
    planted = ["-c", str(folder / "pytest.ini"), "--rootdir", str(folder), str(folder / "test_it.py")]
    command = [sys.executable, "-m", "tools.check", "--build", str(folder / "build"), *options, *planted]
    done = subprocess.run(command, cwd=TOOLS.parent, capture_output=True, text=True, check=False, timeout=100)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("body", "options", "ends", "said"),
    [
        ("assert ran", "", 1, "failed, and passed when it ran once more: test_it.test_it"),
        ("assert ran", "--forgive 1", 0, "failed, and passed when it ran once more: test_it.test_it"),
        ("assert False", "--forgive 1", 1, "failed, and failed again when it ran once more: test_it.test_it"),
        ("ran or os.abort()", "--forgive 1", 1, "failed, and passed when it ran once more: "),
    ],
)
def test_one_failure_fails_the_run_and_so_does_a_crash(
    tmp_path: Path, body: str, options: str, ends: int, said: str
) -> None:
    code, output = checked(tmp_path, body, *options.split())
    assert code == ends
    assert "tests: 1 failed, 1 passed" in output
    assert said in output
    if "abort" in body:
        assert re.search(r"Fatal Python error: Aborted(?s:.)*in test_it", output), "the stacks of its threads"
        assert "core" in output


@pytest.mark.thorough
def test_a_run_without_failures_passes(tmp_path: Path) -> None:
    code, output = checked(tmp_path, "pass")
    assert (code, "tests: 2 passed" in output, "failed" in output) == (0, True, False)


@pytest.mark.parametrize("tool", ["check"], indirect=True)
def test_a_folder_far_over_its_budget_is_named(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "budget.toml").write_text("[seconds]\nhandles = 10\nnn = 20\n")
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    assert tool.over_budget({"handles": 15.1, "nn": 29.9, "new": 1.0}) == ["handles"]
    assert "handles          15.1    10.0" in capsys.readouterr().out


@pytest.mark.parametrize("tool", ["changed"], indirect=True)
def test_what_changed_chooses_the_tests_that_import_it(tool: ModuleType, tmp_path: Path) -> None:
    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a", *words], cwd=tmp_path, check=True)

    files = {
        "tests/engine/test_a.py": "from aiodist.engine import Trainer",
        "tests/nn/test_b.py": "import aiodist.schedules",
        "aiodist/engine/__init__.py": "",
        "README.md": "",
        "core/core.c": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        git(*words)
    assert tool.tests_of_changes(tmp_path, "HEAD") == []
    (tmp_path / "aiodist/engine/__init__.py").write_text("x = 1")
    assert tool.tests_of_changes(tmp_path, "HEAD") == ["tests/engine/test_a.py"]
    (tmp_path / "README.md").write_text("x")
    assert tool.tests_of_changes(tmp_path, "HEAD") == ["tests/docs", "tests/engine/test_a.py"]
    (tmp_path / "core/core.c").write_text("x")
    assert tool.tests_of_changes(tmp_path, "HEAD") == ["tests"]


@pytest.mark.parametrize("tool", ["mutate"], indirect=True)
def test_mutations_change_one_statement(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    (tmp_path / "a.py").write_text("x = 1\ndef f(y):\n    if y:\n        g(é)\n        h()\n    return 2\n")
    (tmp_path / "b.c").write_text("int x = 1;\nint f(int y) {\n    if (!y) return (3);\n    g(2);\n    h();\n}\n")
    found = [
        str(each) for each in (*tool.mutations_of_python(tmp_path / "a.py"), *tool.mutations_of_c(tmp_path / "b.c"))
    ]
    assert sorted(found) == [
        "a.py:3 negate: `y` becomes `(not (y))`",
        "a.py:4 delete: `g(é)` becomes `pass`",
        "a.py:4 swap: `g(é) h()` becomes `h() g(é)`",
        "a.py:5 delete: `h()` becomes `pass`",
        "a.py:6 number: `2` becomes `3`",
        "b.c:3 negate: `if (!y) return (3);` becomes `if (!(!y)) return (3);`",
        "b.c:4 delete: `g(2);` becomes `;`",
        "b.c:4 number: `g(2);` becomes `g(3);`",
        "b.c:4 swap: `g(2); h();` becomes `h(); g(2);`",
        "b.c:5 delete: `h();` becomes `;`",
    ]
    assert tool.main(["--list", "--count", "3", "."]) == 0
    assert capsys.readouterr().out.count("\n") == 4


@pytest.mark.parametrize("tool", ["mutate"], indirect=True)
def test_mutations_are_drawn_among_what_ran_and_tried_by_what_ran_it(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("aiodist/ps", "core", "tests/ps", "tests/nn"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "aiodist/__init__.py").touch()
    (tmp_path / "aiodist/ps/__init__.py").write_text("def f():\n    return 1\n\ndef g():\n    return 3\n")
    (tmp_path / "core/a.c").write_text("void f(void) {\n    g(2);\n}\n")
    say = "from aiodist.ps import f\n\ndef test_f():\n    assert f() == 1\n"
    (tmp_path / "tests/ps/test_a.py").write_text("def test_nothing():\n    pass\n")
    (tmp_path / "tests/ps/test_b.py").write_text(say)
    (tmp_path / "tests/nn/test_a.py").write_text(say)
    contexts = ["", *(f"{test}|run" for test in ("tests/nn/test_a.py::test_f", "tests/ps/test_b.py::test_f"))]
    module = tmp_path / "aiodist/ps/__init__.py"
    measured = Mock()  # what coverage.py tells
    measured.measured_files.return_value = [str(module)]
    measured.lines.return_value = [2]
    measured.contexts_by_lineno.return_value = {2: contexts}
    monkeypatch.setitem(sys.modules, "coverage", Mock(CoverageData=Mock(return_value=measured)))
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    (mutation,) = tool.draw(["aiodist/ps"], 1, 1, ran := tool.ran_of_python(measured))
    assert tool.tests_of(mutation, measured) == ["tests/ps/test_b.py::test_f", "tests/nn/test_a.py::test_f"]
    assert str(tool.draw(["core"], 1, 1, ran)[0]).startswith("core/a.c:2")  # C was not measured
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    command = ["--coverage", str(tmp_path / ".coverage"), "--count", "1", "--near", "aiodist/ps"]
    assert tool.main(command) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("aiodist/ps/__init__.py:2 number: `1` becomes `2`: FAILED tests/ps/test_b.py::test_f")
    assert last == "1 of 1 noticed"
    (tmp_path / "tests/ps/test_b.py").write_text(say.replace("== 1", "> 0"))
    (tmp_path / "tests/nn/test_a.py").write_text(say.replace("== 1", "> 0"))
    assert tool.main(command) == 1
    assert "NOT NOTICED" in capsys.readouterr().out
    assert "return 1" in module.read_text()


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
