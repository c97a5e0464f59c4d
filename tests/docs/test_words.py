"""The project's English: plain words, short lines and paragraphs, and a count of unusual phrases that may only fall.

`tests/words.toml` has the count of each folder. A phrase of `UNUSUAL` is correct English, but slow to read. Docstrings,
comments, messages of errors, help texts, and the prose of Markdown files are searched.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
TABLE_OF_WORDS = ROOT / "tests" / "words.toml"
FOLDERS = ("docs", "aiodist", "handles", "nn", "streams", "core", "examples", "benchmarks", "tests", "tools")
VAGUE = re.compile(r"\b(?:who|what)ever\b|\bwhomever\b", re.IGNORECASE)
TOLERATED = {"CHANGELOG.md": 1, "lane.h": 1, "ledger.c": 1, "test_words.py": 2}
"""Uses of VAGUE in older text, and in this file."""
FIRST = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/README.md")]
USERS = [path for path in sorted((ROOT / "docs").glob("*.md")) if path.name != "design.md"]
USERS += sorted((ROOT / "docs" / "reference").glob("*.md"))
PAGES = sorted([*FIRST, *(ROOT / "docs").rglob("*.md")])
PROSE = 120
TABLE = 160
"""Characters of a line; a table's row cannot be broken."""
PARAGRAPH = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )")
WORDS = 90
"""Words of a paragraph, or of an item of a list."""
GENERATED = re.compile(r"<!-- (?:modules|drawing).*?<!-- end -->", re.DOTALL)
FENCED = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)

UNUSUAL = {
    "a sentence begins with its subject": r"^(?:Of|Who|Whose|Those|Told|What|Where|Have)\b(?! is\b)",
    "name the person or thing": r"\b(?i:nobody|somebody)\b",
    "use a noun, not 'what …'": r"\b(?:of|at|for|with|in|to|by|from|than|and|is|are) what\b",
    "report, notify": r"\b(?:is|are|be|been|was|were) told\b|\btells? (?:of|it|them|the others)\b",
    "after": r"\bbehind (?:it|that|the|a|all|this|which|them|those)\b",
    "finished": r"\b(?:is|are|be|was|were) (?:not )?over\b",
    "in flight": r"\bunder way\b|\bon (?:its|their) way\b",
    "again, always": r"\banew\b|\bfor ever\b",
    "abort, cancel": r"\bg(?:ive|ives|iven|ave|iving)(?: it| them)? up\b",
    "continue": r"\b(?:goes|go|went) on\b",
    "fixed": r"\b(?i:mended)\b",
    "say the condition with 'if' at the end": r"[;,] None where\b",
    "is stored": r"\b(?:lie|lies|lay) (?:in|on|at)\b",
    "next to, with": r"\b(?i:beside)\b",
    "also": r"\b(?i:likewise|thereof|whereof|therein)\b",
    "a count or a size": r"\bso (?:many|much)\b",
    "split the sentence": r"\bof (?:which|whom)\b",
}
"""Patterns, by the plain form to use instead."""
PATTERNS = {plain: re.compile(pattern) for plain, pattern in UNUSUAL.items()}
SENTENCE = re.compile(r"(?<=[.;:?!])\s+")
SHORTEST = 12
"""Characters of a sentence that counts."""
LIMITED = {
    "user docs": USERS,
    "README.md": FIRST[:1],
    "CONTRIBUTING.md": FIRST[1:2],
    "examples": sorted((ROOT / "examples").glob("*.*")),
    "errors.py": [ROOT / "aiodist" / "errors.py"],
}
LIMIT = 1.5
"""Unusual phrases in 100 sentences of the pages that users read first."""


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_are_short_enough_to_read(page: Path) -> None:
    text = FENCED.sub("", GENERATED.sub("", page.read_text(encoding="utf-8")))
    long = [line for line in text.splitlines() if len(line) > (TABLE if line.startswith("|") else PROSE)]
    assert not long, f"{len(long)} lines"


@pytest.mark.parametrize("page", [*FIRST, *USERS], ids=lambda page: str(page.relative_to(ROOT)))
def test_paragraphs_are_short_enough_to_read(page: Path) -> None:
    paragraphs = PARAGRAPH.split(FENCED.sub("", page.read_text(encoding="utf-8")))
    counts = {text[:60]: len(text.split()) for text in paragraphs if not text.lstrip().startswith(("|", "<"))}
    assert {start: count for start, count in counts.items() if count > WORDS} == {}


# --- unusual phrases -------------------------------------------------------------------------------------------------


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield texts with their line: docstrings, comments and messages, or lines of Markdown."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        kept = FENCED.sub(lambda fence: "\n" * fence[0].count("\n"), text)
        yield from ((number, line.strip(" -|*#")) for number, line in enumerate(kept.splitlines(), 1))
        return
    mark = "#" if path.suffix == ".py" else "//"
    for number, line in enumerate(text.splitlines(), 1):
        code, found, comment = line.partition(mark + " ")
        if found and code.count('"') % 2 == 0:
            yield number, comment
    if path.suffix == ".py":
        yield from strings(ast.parse(text))


def strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield docstrings, help texts, and messages of exceptions with each formatted value as `x`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
        elif isinstance(node, ast.keyword) and node.arg == "help" and isinstance(node.value, ast.Constant):
            yield node.value.lineno, str(node.value.value)
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            for given in node.exc.args:
                parts = given.values if isinstance(given, ast.JoinedStr) else [given]
                values = [getattr(part, "value", None) for part in parts]
                yield node.lineno, "".join(value if isinstance(value, str) else "x" for value in values)


@cache
def phrases(path: Path) -> tuple[int, tuple[str, ...]]:
    """Return the number of sentences of a file, and its unusual ones with place and advice."""
    count, found = 0, []
    for line, text in prose(path):
        for sentence in SENTENCE.split(" ".join(text.split())):
            count += len(sentence) >= SHORTEST
            for plain, pattern in PATTERNS.items():
                if len(sentence) >= SHORTEST and pattern.search(sentence):
                    found.append(f"{path.relative_to(ROOT)}:{line}: {plain}: {sentence[:100]}")
    return count, tuple(found)


def folder_of(path: Path) -> str:
    """Return the entry of a file in `tests/words.toml`: its folder, and in `aiodist` the package."""
    parts = path.relative_to(ROOT).parts
    if path == ROOT / "docs" / "design.md":
        return "docs/design"
    return "/".join(parts[: 2 if parts[0] in ("aiodist", "docs") and len(parts) > 2 else 1])


def counted() -> Counter[str]:
    counts = Counter[str]()
    for path in files():
        counts[folder_of(path)] += len(phrases(path)[1])
    return counts


def test_unusual_phrases_become_fewer() -> None:
    counts = counted()
    known = tomllib.loads(TABLE_OF_WORDS.read_text(encoding="utf-8"))["phrases"]
    more = {folder: count for folder, count in counts.items() if count > known.get(folder, 0)}
    new = [line for path in files() if folder_of(path) in more for line in phrases(path)[1]]
    assert not more, "\n".join(["more unusual phrases than tests/words.toml has; use plain words:", *new[-40:]])
    fewer = [folder for folder, count in known.items() if count - counts[folder] > max(2, count // 10)]
    table = "\n".join(f'"{folder}" = {min(counts[folder], known[folder])}' for folder in known if counts[folder])
    assert not fewer, f"fewer unusual phrases in {', '.join(fewer)}: lower tests/words.toml to\n[phrases]\n{table}"


@pytest.mark.parametrize("group", LIMITED)
def test_what_users_read_is_plain(group: str) -> None:
    found = [phrases(path) for path in LIMITED[group]]
    sentences, unusual = sum(count for count, _ in found), [line for _, lines in found for line in lines]
    assert 100 * len(unusual) <= LIMIT * sentences, "\n".join(unusual)
    assert sentences


def test_an_unusual_phrase_is_found_with_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    program, page = tmp_path / "program.py", tmp_path / "page.md"
    program.write_text('"""Told of each rank."""\nx = 1  # it is not over\nraise ValueError(f"rank {x} lies in it")\n')
    page.write_text("Ranks continue.\n\n```python\nit is over  # no prose\n```\n\nOthers went on for ever.\n")
    assert [line.split(": ")[0] for line in phrases(program)[1]] == ["program.py:2", "program.py:1", "program.py:3"]
    assert [line.split(": ")[:2] for line in phrases(page)[1]] == [
        ["page.md:7", "again, always"],
        ["page.md:7", "continue"],
    ]
