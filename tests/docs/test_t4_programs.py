"""docs/torch-distributed.md, frameworks.md, asyncio.md: programs there print what the pages show, on two ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.torch_ranks import started

DOCS = Path(__file__).resolve().parents[2] / "docs"
SHOWN = re.compile(
    r"^```py(?:thon)?\n(# (\w+\.py)\n(?:(?!```).*\n)*)```\n\s*"
    r"(?:^```console\n(?:\$.*\n)*```\n\s*)?^```text\n([^`]*)^```$",
    re.MULTILINE,
)
"""A program with its name, perhaps the command that starts it, and its output."""


class Program(NamedTuple):
    page: str
    name: str
    text: str
    output: list[str]


PROGRAMS = [
    Program(page, name, text, output.splitlines())
    for page in ("torch-distributed.md", "frameworks.md", "asyncio.md")
    for text, name, output in SHOWN.findall((DOCS / page).read_text(encoding="utf-8"))
]


def test_t4_the_pages_have_their_programs() -> None:
    assert [(program.page, program.name) for program in PROGRAMS] == [
        *(("torch-distributed.md", name) for name in ("train.py", "mistake.py", "late.py", "wrap.py")),
        ("frameworks.md", "mistake.py"),
        *(("asyncio.md", name) for name in ("sums.py", "train.py", "blocked.py", "modes.py", "worker.py")),
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: f"{program.page}-{program.name}")
def test_t4_programs_print_what_the_page_says(
    nursery: str, program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if program.page == "frameworks.md":
        monkeypatch.setenv("AIODIST_AS", "gloo")
    path = tmp_path / program.name
    path.write_text(program.text.replace('save("', f'save("{tmp_path}/'))
    ranks = started(path, nursery=nursery)
    printed = comparable("\n".join(text for _, text in ranks), tmp_path)
    failing = program.name == "mistake.py"
    assert [code != 0 for code, _ in ranks] == [failing, failing], printed
    for line in program.output:
        assert comparable(line, tmp_path) in printed


def comparable(text: str, folder: Path) -> str:
    """Return the text without the folder, line ends and changing values: seconds, the loss of a task's test."""
    joined = " ".join(re.sub(r"^\[\d\] ", "", text.replace(f"{folder}/", "")).split())
    return re.sub(r"\bloss 0\.[678]", "loss", re.sub(r"\d+\.\d\d s\b", "some s", joined))
