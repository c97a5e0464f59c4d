"""How `aiodist._core` is built: with the machine's compiler and without one, for this machine and for others."""

from __future__ import annotations

import os
import platform
import re
import runpy
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from aiodist.errors import BackendUnavailable
from build_backend import aiodist_build as build
from tests.support.processor import best_kernels

WHEEL_BYTES = 5 << 18
_ELF_MACHINE = {"x86_64": 62, "aarch64": 183}
_ASK = "import aiodist._core; print(aiodist._core.__file__, aiodist._core.kernels())"

needs_compiler = pytest.mark.skipif(not build.compiler(), reason="there is no C compiler that compiles the core")


@pytest.fixture(autouse=True)
def _looked_for_anew() -> Iterator[None]:
    build.compiler.cache_clear()
    yield
    build.compiler.cache_clear()


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on a machine that has no compiler."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))


@needs_compiler
def test_where_there_is_a_compiler_none_is_fetched() -> None:
    assert build.fetched() == []


@pytest.mark.usefixtures("no_compiler")
def test_where_there_is_no_compiler_one_is_fetched() -> None:
    assert build.fetched() == [build.ZIGLANG]


@pytest.mark.usefixtures("no_compiler")
def test_without_any_compiler_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="install gcc, clang or ziglang"):
        build.zig()


def test_a_compiler_that_was_asked_for_and_does_not_work_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "false --much")
    with pytest.raises(SystemExit, match="CC=false --much does not compile C11 with atomics"):
        build.compiler()


def test_other_systems_are_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    with pytest.raises(SystemExit, match=r"^aiodist is for Linux only, and this is Darwin$"):
        build.fetched()


def test_where_the_core_is_not_built_its_import_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = str(build.ROOT / "aiodist" / "_core.py")
    with pytest.raises(BackendUnavailable, match="`make core` in a checkout"):
        runpy.run_path(absent)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    with pytest.raises(BackendUnavailable, match="for Linux only, and this is Darwin"):
        runpy.run_path(absent)


@needs_compiler
def test_a_free_threaded_python_gets_a_wheel_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_config_var", {"Py_GIL_DISABLED": 1}.get)
    settings = build.settings()
    (extension,) = settings["ext_modules"]
    assert (extension.py_limited_api, extension.define_macros, settings["options"]) == (False, [], {"bdist_wheel": {}})
    monkeypatch.setenv("AIODIST_MANYLINUX", "another")
    with pytest.raises(SystemExit, match="needs the limited API"):
        build.settings()
    monkeypatch.undo()
    flags = [*build.FLAGS, *build.WARNINGS, "-Werror", "-fsyntax-only", f"-I{sysconfig.get_path('include')}"]
    subprocess.run([*build.compiler(), *flags, *map(str, build.BINDING)], check=True)


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("by", [pytest.param("the machine's compiler", marks=needs_compiler), "zig"])
def test_pip_installs_the_sdist_into_an_empty_environment(
    by: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    _run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", str(tmp_path), str(build.ROOT))
    (sdist,) = tmp_path.glob("*.tar.gz")
    venv.create(tmp_path / "venv", with_pip=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    if by == "zig":
        request.getfixturevalue("no_compiler")
    _run(python, "-m", "pip", "install", "--no-deps", str(sdist))  # torch and the others are large, and not asked here
    file, kernels = _run(python, "-I", "-c", _ASK).split()
    assert Path(file).is_relative_to(tmp_path / "venv")
    assert kernels == best_kernels()


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(sysconfig.get_config_var("Py_GIL_DISABLED")), reason="it has no limited API")
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_a_wheel_for_every_linux_is_small_and_needs_nothing_else(
    machine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIODIST_MANYLINUX", machine)
    _run(sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path), str(build.ROOT))
    (wheel,) = tmp_path.iterdir()
    assert wheel.name.endswith(f"-cp311-abi3-manylinux_2_28_{machine}.whl")
    assert wheel.stat().st_size < WHEEL_BYTES
    said = _run(sys.executable, "-m", "auditwheel", "show", str(wheel))
    minor, of = re.findall(r'tag:\s+"manylinux_2_(\d+)_(\w+)"', said)[0]
    assert (int(minor) <= 28, of) == (True, machine)
    _run(sys.executable, "-m", "zipfile", "-e", str(wheel), str(tmp_path / "unpacked"))
    header = (tmp_path / "unpacked" / "aiodist" / "_core.abi3.so").read_bytes()[:20]
    assert int.from_bytes(header[18:20], "little") == _ELF_MACHINE[machine]


def _run(*command: str) -> str:
    environ = os.environ | {"PYTHONPATH": ""}  # the checkout must not replace the installed package
    done = subprocess.run(command, cwd="/", env=environ, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
