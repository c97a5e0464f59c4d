"""The examples of README.md and docs/: Python runs, commands exist, links have targets."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import typer.main

import benchmarks.__main__ as benchmarks_main
from aiodist import cli
from aiodist.bench import cli as bench_cli
from aiodist.bench.plan import COLLECTIVES
from benchmarks import faults, gpu, ps_convergence, recovery, results, scale, suite, tails

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
RUN_BLOCKS = Path(__file__).with_name("run_blocks.py")
OTHERS = ("README.md", "examples/README.md", "tests/CONTRACT.md", "benchmarks/RESULTS.md", "CONTRIBUTING.md")
FILES = sorted([*(ROOT / name for name in OTHERS), *(ROOT / "docs").rglob("*.md")])
EVERY_FILE = pytest.mark.parametrize(
    "file", FILES, ids=lambda file: "examples" if file.parent.name == "examples" else file.name
)
LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")
INLINE = re.compile(r"`((?:aiodist|make|python\s+-m\s+benchmarks)\s[^`]+)`")
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


@pytest.mark.drawn(5)
@EVERY_FILE
def test_python_blocks_run(file: Path, ran: subprocess.CompletedProcess[str]) -> None:
    assert f"ok {file}" in ran.stdout.splitlines(), ran.stderr


def test_python_blocks_run_in_silence(ran: subprocess.CompletedProcess[str]) -> None:
    assert (ran.returncode, ran.stderr) == (0, "")


@EVERY_FILE
def test_blocks_that_other_tests_run_can_be_parsed(file: Path, markdown: ModuleType) -> None:
    for line, block in markdown.blocks(file.read_text(), "py"):
        compile("\n" * (line - 1) + block, str(file), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.drawn(28)
@EVERY_FILE
def test_commands_exist(file: Path, markdown: ModuleType) -> None:
    for line, command in commands(file.read_text(), markdown):
        words = shlex.split(command, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words = words[1:]
        assert check(words) is None, f"{file.name}:{line}: {command}: {check(words)}"


def commands(text: str, markdown: ModuleType) -> Iterator[tuple[int, str]]:
    """Yield each command with its line: those of console blocks, and of inline code, tables included."""
    for line, block in markdown.blocks(text, "console"):
        for command in re.findall(r"^\$ (.*)$", block, re.MULTILINE):
            yield line, command
    prose = markdown.FENCE.sub(lambda match: "\n" * match[0].count("\n"), text)
    for match in INLINE.finditer(prose):
        yield prose.count("\n", 0, match.start()) + 1, " ".join(match[1].split())


def check(words: list[str]) -> str | None:
    """Return what is wrong with a command that the documentation shows."""
    if words[0] == "aiodist":
        return check_aiodist(words[1:])
    if words[:3] == ["python", "-m", "benchmarks"]:
        return check_benchmark(words[3:])
    if words[0] == "make":
        targets = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return None if all(word in targets or "=" in word for word in words[1:]) else "no such target"
    return check_extras(" ".join(words))


def check_aiodist(words: list[str]) -> str | None:
    known = getattr(typer.main.get_command(cli.app), "commands", {})
    if words[0] not in known:
        return f"there is no aiodist {words[0]}"
    if words[0] == "bench":  # it parses its own
        named, wrong = parsed(typer.main.get_command(bench_cli.app), words[1:])
        unknown = set(named) - {*COLLECTIVES, "OP"}
        return wrong or (f"there is no benchmark {', '.join(unknown)}" if unknown else None)
    named, wrong = parsed(known[words[0]], words[1:])
    scripts = [word for word in named[:1] if word.endswith(".py") and "/" in word]
    return wrong or next((f"there is no {word}" for word in scripts if not (ROOT / word).exists()), None)


def check_benchmark(words: list[str]) -> str | None:
    own = {
        "scale": scale.app,
        "ps-convergence": ps_convergence.app,
        "gpu": gpu.app,
        "faults": faults.app,
        "recovery": recovery.app,
        "results": results.app,
        "tails": tails.app,
    }
    if words[0] not in {*suite.BENCHMARKS, *own}:
        return f"there is no benchmark {words[0]}"
    named, wrong = parsed(typer.main.get_command(own.get(words[0], benchmarks_main.app)), words[1:])
    return wrong or (f"what is {named[0]}?" if named else None)


def parsed(command: Any, words: list[str]) -> tuple[list[str], str | None]:
    """Return the words that are no options, and the mistake if any; a usage such as `[--servers S]` is read as well."""
    options = {name: one for one in command.params for name in (*one.opts, *one.secondary_opts) if name[0] == "-"}
    left = [word.strip("[]") for word in words if word != "/"]
    named = []
    while left:
        word = left.pop(0)
        name, given, _ = word.partition("=")
        if not word.startswith("-"):
            named.append(word)
            if not command.context_settings.get("allow_interspersed_args", True):
                return named + left, None
        elif name not in options:
            return named, f"there is no option {name}"
        elif not getattr(options[name], "is_flag", False) and not given and left and not left[0].startswith("-"):
            left.pop(0)
    return named, None


def test_commands_that_do_not_exist_are_found(markdown: ModuleType) -> None:
    text = "`aiodist run -n 2 --fast t.py`\n\n| `python -m benchmarks gpo` |\n`aiodist bench scan\n--impl x --no 3`\n"
    found = [(line, check(shlex.split(command))) for line, command in commands(text, markdown)]
    assert found == [
        (1, "there is no option --fast"),
        (3, "there is no benchmark gpo"),
        (4, "there is no option --no"),
    ]
    assert check_aiodist(["bench", "allreduse"]) == "there is no benchmark allreduse"
    assert check_aiodist(["run", "examples/no.py"]) == "there is no examples/no.py"
    assert check_aiodist(["run", "-n", "N", "[--hosts", "a:2,b:2", "/", "--hostfile", "F]", "script", "--any"]) is None


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
