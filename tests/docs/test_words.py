"""Who does it: neither docs nor comments say "whoever" or "whatever", and lines are short enough to read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("docs", "aiodist", "handles", "nn", "streams", "examples", "benchmarks", "tests", "tools")
VAGUE = re.compile(r"\b(?:who|what)ever\b|\bwhomever\b", re.IGNORECASE)
TOLERATED = {"CHANGELOG.md": 1, "test_words.py": 2}
"""How many there are in what was written before, and here."""
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
PROSE = 120
TABLE = 160
"""Characters of a line; a table's row cannot be broken."""
GENERATED = re.compile(r"<!-- (?:modules|drawing|statistics).*?<!-- end -->", re.DOTALL)
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def files() -> list[Path]:
    inside = [
        path for folder in FOLDERS for path in (ROOT / folder).rglob("*.*") if path.suffix in {".py", ".md", ".c", ".h"}
    ]
    return [*sorted(inside), *sorted(ROOT.glob("*.md")), ROOT / "conftest.py"]


def test_docs_and_comments_say_who() -> None:
    found = {}
    for path in files():
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if VAGUE.search(line)]
        if len(lines) > TOLERATED.get(path.name, 0):
            found[str(path.relative_to(ROOT))] = lines
    assert not found, "say who or what it is"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_are_short_enough_to_read(page: Path) -> None:
    text = FENCED.sub("", GENERATED.sub("", page.read_text(encoding="utf-8")))
    long = [line for line in text.splitlines() if len(line) > (TABLE if line.startswith("|") else PROSE)]
    assert not long, f"{len(long)} lines"
