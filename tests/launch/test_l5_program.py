"""The program after the options of `aiodist run`: a script, a module, `python x.py`, another program."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from aiodist.errors import ConfigError
from aiodist.testing.seams.mpi import command_of

if TYPE_CHECKING:
    from tests.launch.conftest import Launcher

SAY = "say(rank, sys.argv[1:], sys.flags.optimize)"


def executable(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").write_text("")
    (tmp_path / "bin").mkdir()
    executable(tmp_path / "bin" / "tool", "#!/bin/sh\n")
    executable(tmp_path / "bin" / "python2.7", "#!/bin/sh\n")
    executable(tmp_path / "bin" / "pypy3", "#!/bin/sh\n")
    executable(tmp_path / "by_hand", "#!/usr/bin/env python3\n")
    executable(tmp_path / "shell.sh", "#!/bin/sh\n")
    executable(tmp_path / "binary", "\x7fELF")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text("")
    (tmp_path / "empty").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["x.py", "-a"], ["PYTHON", "x.py", "-a"]),
        (["package"], ["PYTHON", "package"]),
        (["by_hand", "1"], ["PYTHON", "by_hand", "1"]),
        (["python", "x.py", "-a"], ["PYTHON", "x.py", "-a"]),
        (["python3", "-O", "-m", "package"], ["PYTHON", "-O", "-m", "package"]),
        (["python{}.{}".format(*sys.version_info), "-c", "1"], ["PYTHON", "-c", "1"]),
        (["bin/pypy3", "x.py"], ["HERE/bin/pypy3", "x.py"]),
        (["python2.7", "x.py"], ["HERE/bin/python2.7", "x.py"]),
        (["tool", "x.py"], ["HERE/bin/tool", "x.py"]),
        (["./shell.sh", "a"], ["HERE/shell.sh", "a"]),
        (["./binary"], ["HERE/binary"]),
    ],
)
def test_l5_what_the_words_mean(here: Path, words: list[str], expected: list[str]) -> None:
    found = [str(word).replace(str(here), "HERE") for word in command_of(words, module=False, search=f"{here}/bin")]
    assert ["PYTHON" if word == sys.executable else word for word in found] == expected


def test_l5_a_module_is_one_under_any_name(here: Path) -> None:
    assert command_of(["python", "a"], module=True, search="") == (sys.executable, "-m", "python", "a")


@pytest.mark.parametrize(
    ("word", "problem"),
    [
        ("y.py", "y.py: there is no such file"),
        ("no/such", "no/such: there is no such file"),
        ("nothing", "nothing: there is no such file, and no such program in PATH; for a module say -m nothing"),
        ("a.b", "a.b: there is no such file, and no such program in PATH; for a module say -m a.b"),
        ("python", "python: expected a script after it"),
        ("pypy3.9", "pypy3.9: there is no such file, and no such program in PATH"),
        ("empty", "empty is a folder without __main__.py: expected a script, or -m and the name of a module"),
    ],
)
def test_l5_what_they_cannot_mean(here: Path, word: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        command_of([word], module=False, search=f"{here}/bin")
    assert str(caught.value).startswith(problem)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("first", ["python", "python3", sys.executable])
def test_l5_python_may_stand_before_the_script(launcher: Launcher, first: str) -> None:
    done = launcher.run(first, "-O", launcher.script(SAY), "--lr", "1")
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] {rank} ['--lr', '1'] 1" for rank in range(2)]


def test_l5_python_may_stand_before_a_module(plain: Launcher) -> None:
    plain.script(SAY, name="module.py")
    done = plain.run("python", "-m", "module", "x")
    assert sorted(done.stdout.splitlines()) == ["[0] 0 ['x'] 0", "[1] 1 ['x'] 0"], done


@pytest.mark.thorough
def test_l5_any_program_is_run(plain: Launcher) -> None:
    executable(plain.folder / "end.sh", "#!/bin/sh\nexit $1\n")
    assert plain.run("./end.sh", "7").returncode == 7
    done = plain.run("sh", "-c", "echo $AIODIST_RANK of $AIODIST_SIZE")
    assert sorted(done.stdout.splitlines()) == ["[0] 0 of 2", "[1] 1 of 2"], done


def test_l5_it_is_found_by_the_path_of_the_user(plain: Launcher) -> None:
    folder = plain.folder / "tools"
    folder.mkdir()
    executable(folder / "mine", "#!/bin/sh\necho mine\n")
    path = os.pathsep.join([str(folder), os.environ["PATH"]])
    done = plain.run("mine", env={**plain.environ, "PATH": path})
    assert sorted(done.stdout.splitlines()) == ["[0] mine", "[1] mine"], done
