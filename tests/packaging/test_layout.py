"""The traps of a layout with three packages at the root, each held by a test."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
AT_THE_ROOT = ("handles", "streams", "nn")
LIGHT = (
    "env",
    "errors",
    "frames",
    "handshake",
    "types",
    "handles",
    "schedules",
    "control",
    "launch",
)  # no torch, no MPI


def folders_with_code() -> dict[str, Path]:
    """Return each folder that holds modules, relative to the root, by its name as a package."""
    found = {}
    for top in ("aiodist", *AT_THE_ROOT):
        for path in (ROOT / top).rglob("*.py"):  # rglob does not follow the links
            folder = path.parent.relative_to(ROOT)
            found[".".join(folder.parts if top == "aiodist" else ("aiodist", *folder.parts))] = folder
    return found


def test_packages_are_the_folders() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = folders_with_code()
    assert settings["packages"] == sorted(folders)
    mapped = {f"aiodist.{name}": name for name in AT_THE_ROOT if f"aiodist.{name}" in folders}
    assert settings["package-dir"] == {"aiodist": "aiodist", **mapped}


def test_light_layers_are_under_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (light,) = [contract for contract in contracts if contract["id"] == "light"]
    modules = {f"aiodist.{path.stem}" for path in (ROOT / "aiodist").glob("*.py")} | folders_with_code().keys()
    assert light["source_modules"] == [f"aiodist.{name}" for name in LIGHT if f"aiodist.{name}" in modules]


def test_packages_have_an_init() -> None:
    folders = folders_with_code().values()
    assert [str(folder) for folder in folders if not (ROOT / folder / "__init__.py").exists()] == []


def test_no_init_below_tests() -> None:
    assert [str(path) for path in (ROOT / "tests").rglob("__init__.py")] == []


@pytest.mark.thorough
def test_root_folders_are_not_imported_under_their_short_names() -> None:
    assert not set(AT_THE_ROOT) & sys.modules.keys()  # not by pytest's collection
    code = f"import sys, aiodist.handles, aiodist.streams; print({set(AT_THE_ROOT)} & sys.modules.keys())"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)
    assert (done.stdout.strip(), done.stderr) == ("set()", "")
