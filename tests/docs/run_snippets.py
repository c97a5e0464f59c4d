"""Runs what pages of docs/ show on each rank of a job: a program for `aiodist run`, not a test.

The first program of the first page, `train.py`, is the frame. A `py` block replaces its training loop, or its whole
`async with` block if the snippet calls `aiodist.init` itself. A `python` block is a program of its own. Each rank
writes what each block printed, by page and line, to a JSON file. An error ends a block, and is printed last.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent, indent
from typing import NamedTuple

import aiodist

FENCE = re.compile(r"^ *```(?P<language>\w+)\n(?P<text>.*?)^ *```\n\n?", re.MULTILINE | re.DOTALL)
OF_SNIPPETS = {"py": "text", "python": "console"}
"""The language of the block with the output, by that of the code."""
BLOCK, LOOP, END = (re.compile(f"^{begin}", re.MULTILINE) for begin in (" {4}async with", " {8}for ", "if __name__"))
CAUGHT = "try:\n{}\nexcept Exception as error:\n    print(f'{{type(error).__name__}}: {{error}}')"


class Shown(NamedTuple):
    """A block of code on a page, with the block of output that follows it, if there is one."""

    line: int
    language: str
    code: str
    output: str

    @property
    def runs(self) -> int:
        """How often the page runs it: once for each command."""
        return max(1, self.output.count("$ aiodist run"))


def shown(text: str) -> Iterator[Shown]:
    fences = list(FENCE.finditer(text))
    for fence, following in zip(fences, [*fences[1:], None], strict=True):
        if fence["language"] not in OF_SNIPPETS:
            continue
        answered = following is not None and following.start() == fence.end()
        of_it = answered and following["language"] == OF_SNIPPETS[fence["language"]]  # type: ignore[index]
        output = dedent(following["text"]) if of_it and following is not None else ""
        yield Shown(text.count("\n", 0, fence.start()) + 2, fence["language"], dedent(fence["text"]), output)


def framed(frame: str, snippet: str) -> str:
    """Return the program `frame` with `snippet` in place of its loop."""
    whole = "aiodist.init(" in snippet
    begin, end = (BLOCK if whole else LOOP).search(frame), END.search(frame)
    assert begin is not None
    assert end is not None
    body = indent(CAUGHT.format(indent(snippet, "    ")), " " * (4 if whole else 8))
    return f"{frame[: begin.start()]}{body}\n\n\n{frame[end.start() :]}"


async def own_rank() -> int:
    async with aiodist.init() as coll:
        return coll.rank


def main(out: Path, pages: list[Path]) -> None:
    rank = aiodist.run(own_rank)
    frame = next(shown(pages[0].read_text(encoding="utf-8"))).code
    printed = {}
    for page in pages:
        for block in shown(page.read_text(encoding="utf-8")):
            name, into = f"{page.name}:{block.line}", io.StringIO()
            code = block.code if block.language == "python" else framed(frame, block.code)
            with contextlib.redirect_stdout(into):
                for _ in range(block.runs):
                    exec(compile(code, name, "exec"), {"__name__": "__main__"})
            printed[name] = into.getvalue()
    (out / f"rank{rank}.json").write_text(json.dumps(printed))


if __name__ == "__main__":
    main(Path(sys.argv[1]), list(map(Path, sys.argv[2:])))
