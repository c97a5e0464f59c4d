"""What README.md and docs/ show: Python runs, commands exist, links lead somewhere."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import typer.main

from aiodist import cli
from benchmarks import suite

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
RUN_BLOCKS = Path(__file__).with_name("run_blocks.py")
FILES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
EVERY_FILE = pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")
EXTRAS = re.compile(r"aiodist\[([\w,]+)\]|\.\[([\w,]+)\]")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """All Python blocks of all files, run in one process, which imports torch once."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, str(RUN_BLOCKS), *map(str, FILES)],
        cwd=tmp_path_factory.mktemp("docs"),
        env={**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture(scope="module")
def markdown() -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_blocks", RUN_BLOCKS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@EVERY_FILE
def test_python_blocks_run(file: Path, ran: subprocess.CompletedProcess[str]) -> None:
    assert f"ok {file}" in ran.stdout.splitlines(), ran.stderr


def test_python_blocks_run_in_silence(ran: subprocess.CompletedProcess[str]) -> None:
    assert (ran.returncode, ran.stderr) == (0, "")


@EVERY_FILE
def test_commands_exist(file: Path, markdown: ModuleType) -> None:
    for line, block in markdown.blocks(file.read_text(), "console"):
        for command in re.findall(r"^\$ (.*)$", block, re.MULTILINE):
            words = shlex.split(command, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words = words[1:]
            assert check(words) is None, f"{file.name}:{line}: {command}: {check(words)}"


def check(words: list[str]) -> str | None:
    """Return what is wrong with a command that the documentation shows."""
    if words[0] == "aiodist":
        return check_aiodist(words[1:])
    if words[:3] == ["python", "-m", "benchmarks"]:
        known = [*suite.BENCHMARKS, "scale", "ps-convergence", "gpu"]
        return None if words[3] in known else f"there is no benchmark {words[3]}"
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return None if all(word in targets or "=" in word for word in words[1:]) else "no such target"
    return check_extras(" ".join(words))


def check_aiodist(words: list[str]) -> str | None:
    commands = getattr(typer.main.get_command(cli.app), "commands", {})
    if words[0] not in commands:
        return f"there is no aiodist {words[0]}"
    if words[0] == "bench":  # it parses its own
        return None
    options = {name for parameter in commands[words[0]].params for name in (*parameter.opts, *parameter.secondary_opts)}
    for word in words[1:]:
        if word.endswith(".py"):
            return None if (ROOT / word).exists() or "/" not in word else f"there is no {word}"
        if word.startswith("-") and word.partition("=")[0] not in options:
            return f"there is no option {word}"
    return None


def check_extras(command: str) -> str | None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = [name for match in EXTRAS.finditer(command) for name in (match[1] or match[2]).split(",")]
    return None if set(named) <= set(known) else f"extras are {', '.join(known)}"


@EVERY_FILE
def test_links_lead_somewhere(file: Path) -> None:
    for link in LINK.findall(file.read_text()):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (file.parent / path).resolve() if path else file
        assert target.exists(), f"{file.name}: {link}"
        if anchor:
            assert anchor in anchors(target), f"{file.name}: {link}"


def anchors(file: Path) -> set[str]:
    """Return what headings are called in links: lower case, no punctuation, dashes for spaces."""
    headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
