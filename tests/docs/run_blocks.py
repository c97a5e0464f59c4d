"""Runs the Python blocks of Markdown files, given as arguments: a program for a process of its own, not a test.

The blocks of a file share one namespace, in order. A block with an `await` at its top level runs as in a notebook,
inside `async with aiodist.init() as coll`. For each file that went well, `ok FILE` is printed; otherwise a
traceback with the line in that file.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import traceback
import warnings
from collections.abc import Coroutine, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import aiodist

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(text: str, language: str) -> Iterator[tuple[int, str]]:
    """Yield each fenced block of a language with the number of its first line."""
    for match in FENCE.finditer(text):
        if match[1] == language:
            yield text.count("\n", 0, match.start(2)) + 1, match[2]


async def with_world(code: CodeType, names: dict[str, Any]) -> None:
    async with aiodist.init() as coll:
        names["coll"] = coll
        step = eval(code, names)
        assert isinstance(step, Coroutine)
        await step


def run_file(file: Path) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    for line, block in blocks(file.read_text(), "python"):
        code = compile("\n" * (line - 1) + block, str(file), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if code.co_flags & inspect.CO_COROUTINE:
            aiodist.run(with_world, code, names)
        else:
            exec(code, names)


if __name__ == "__main__":
    # The end of the world closes what a short program leaves open.
    warnings.filterwarnings("ignore", "communicator .* was never closed", ResourceWarning)
    for name in sys.argv[1:]:
        try:
            run_file(Path(name))
        except BaseException:  # noqa: BLE001  - the other files are to run too
            traceback.print_exc()
        else:
            print(f"ok {name}", flush=True)
