"""docs/train.md, scale.md and data.md: their programs and snippets print on two ranks what the pages say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.run_snippets import Shown, framed, shown
from tests.support.nursed import stub

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "docs" / name for name in ("train.md", "scale.md", "data.md")]
BLOCKS = {f"{page.name}:{block.line}": block for page in PAGES for block in shown(page.read_text(encoding="utf-8"))}


@pytest.fixture(scope="module")
def printed(nursery: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """By rank: what each block printed. One job runs all of them."""
    folder = tmp_path_factory.mktemp("pages")
    program = stub(nursery, ROOT / "tests/docs/run_snippets.py", folder, *PAGES)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    ended = subprocess.run(
        [sys.executable, "-m", "aiodist.cli", "run", "-n", "2", "--mpi", "none", *program],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("place", BLOCKS)
def test_blocks_print_what_the_page_says(place: str, printed: list[dict[str, str]]) -> None:
    assert differs(BLOCKS[place], [of_rank[place] for of_rank in printed]) is None


def differs(block: Shown, printed: list[str]) -> str | None:
    """Return what another output than that of the page is; an error is that of rank 0."""
    said = " ".join(line for line in block.output.splitlines() if not line.startswith("$ "))
    found = printed[0] if "Error: " in said else "".join(printed)
    pattern = r".*".join(re.escape(" ".join(part.split())) for part in said.split("…"))
    return None if re.fullmatch(pattern.replace(r"\ .*", ".*"), " ".join(found.split())) else found


def test_another_output_is_found() -> None:
    block = Shown(1, "py", "", "rank 0: loss …\nrank 1: loss 2\n")
    assert differs(block, ["rank 0: loss 1.5\n", "rank 1: loss 2\n"]) is None
    assert differs(block, ["rank 0: loss 1.5\n", "rank 1: loss 3\n"]) == "rank 0: loss 1.5\nrank 1: loss 3\n"
    assert differs(block._replace(output=""), ["one", ""]) == "one"
    assert differs(block._replace(output="$ aiodist run a.py\nValueError: …\n"), ["ValueError: x", "y"]) is None


def test_pages_show_an_output_for_all_that_is_printed() -> None:
    assert [place for place, block in BLOCKS.items() if "print(" in block.code and not block.output] == []


def test_a_snippet_replaces_the_loop() -> None:
    frame = "async def main():\n    async with aiodist.init() as coll:\n        for _ in x:\n            y\n\n\n"
    frame += 'if __name__ == "__main__":\n    aiodist.run(main)\n'
    assert "        try:\n            z = 1\n" in framed(frame, "z = 1\n")
    assert "coll:\n" not in framed(frame, "async with aiodist.init(timeout=1): pass\n")
