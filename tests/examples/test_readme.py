"""examples/README.md: every example is in it, and its commands print the outputs that it shows.

In an output, `…` stands for text that varies, and a line of `…` alone for any number of lines.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.nursed import stub

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "examples" / "README.md"
SECTION = re.compile(r"^### \d+\. \[(\w+)\.py\]\(\1\.py\)\n(.*?)(?=^##|\Z)", re.MULTILINE | re.DOTALL)
CONSOLE = re.compile(r"^```console\n\$ ([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHORT = ("hello", "ddp_unchanged")
"""The programs that run in the contract tier."""


def sections() -> dict[str, str]:
    return dict(SECTION.findall(README.read_text(encoding="utf-8")))


def by_rank(lines: list[str]) -> dict[int, list[str]]:
    """Return the lines of each rank, in order, without the prefix of the launcher; a plain program is rank 0."""
    found: dict[int, list[str]] = {}
    for line in lines:
        prefix = re.match(r"\[(\d+)\] ", line)
        found.setdefault(int(prefix[1]) if prefix else 0, []).append(line[prefix.end() :] if prefix else line)
    return found


def pattern(lines: list[str]) -> str:
    """Return a regular expression for the whole output of a rank."""
    return "".join(
        r"(?:.*\n)*?" if line == "…" else ".*".join(map(re.escape, line.split("…"))) + r"\n" for line in lines
    )


def test_every_example_is_listed_once() -> None:
    text = README.read_text(encoding="utf-8")
    shown = list(sections())
    others = re.findall(r"^\| \[(\w+)\.py\]\(\1\.py\) \|", text, re.MULTILINE)
    assert len(shown) == 16
    assert sorted([*shown, *others]) == sorted(path.stem for path in (ROOT / "examples").glob("*.py"))
    numbers = re.findall(r"^### (\d+)\.", text, re.MULTILINE)
    assert numbers == [str(number) for number in range(1, 17)]


@pytest.mark.parametrize("name", sections())
def test_an_example_has_one_sentence_and_its_own_output(name: str) -> None:
    section = sections()[name]
    sentence = CONSOLE.sub("", section).strip()
    assert sentence.endswith(".")
    assert not re.search(r"[.?!] ", sentence)
    blocks = CONSOLE.findall(section)
    assert blocks
    assert all(f"examples/{name}.py" in command and output.strip() for command, output in blocks)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.thorough) for name in sections()]
)
def test_an_example_prints_what_the_page_shows(name: str, nursery: str, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    for command, shown in CONSOLE.findall(sections()[name]):
        printed, errors = run(shlex.split(command), nursery, tmp_path)
        expected = by_rank(shown.splitlines())
        assert set(printed) == set(expected), f"{command}:\n{printed}{errors}"
        for rank, lines in expected.items():
            output = "".join(f"{line}\n" for line in printed[rank])
            assert re.fullmatch(pattern(lines), output), f"{command}, rank {rank}:\n{output}{errors}"


def run(words: list[str], nursery: str, folder: Path) -> tuple[dict[int, list[str]], str]:
    """Run a command of the page in `folder`; return the lines of each rank that printed, and the errors."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    [script] = [number for number, word in enumerate(words) if word.endswith(".py")]
    program = [str(ROOT / words[script]), *words[script + 1 :]]
    if words[0] == "python":
        command = [sys.executable, *program]
    else:
        assert words[:2] == ["aiodist", "run"]
        command = [sys.executable, "-m", "aiodist.cli", *words[1:script], *stub(nursery, *program)]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "NURSERY_ENDS": "soon"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return by_rank(done.stdout.splitlines()), done.stderr
