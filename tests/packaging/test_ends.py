"""Methods that end an object have one of four names, and class names are unique within a package.

`close` (collective, orderly), `abort` (pending operations fail on all ranks), `cancel` (withdrawn before its start),
`release` (memory, a hook, a place in a queue: free for reuse). Verbs of torch, asyncio and Python stay: `remove` a
hook, `discard` from a set.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("aiodist", "handles", "streams", "nn")
OTHER_WORDS = re.compile(
    r"_?(give(_up|_back|_away|_piece)?|let_go|withdraw\w*|destroy|dispose|retire|shut|forgo|abandon|drop|quit|stop|terminate"
    r"|shutdown|teardown|dismiss|free)"
)
EXCEPTIONS = {
    "aiodist/backends/shm": "the compiled core replaces it",
    "aiodist/c10d/calls.py": "torch's name",
    "aiodist/launch/supervisor.py": "it stops processes",
    "aiodist/ps/naming.py": "what `ParameterServer.free` asks for: this rank uses a name no more",
    "aiodist/ps/directory.py": "the same",
    "aiodist/schedules": "`stop` is where a chunk ends",
    "aiodist/testing/cuda/memory.py": "of memory, as in C",
}


def modules() -> Iterator[tuple[Path, ast.Module]]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            here = path.relative_to(ROOT)
            if not any(str(here).startswith(known) for known in EXCEPTIONS):
                yield here, ast.parse(path.read_text())


def test_ends_have_one_of_four_names() -> None:
    found = [
        f"{path}:{node.lineno}: {node.name}"
        for path, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and OTHER_WORDS.fullmatch(node.name)
    ]
    assert not found, "\n".join(found)


def test_the_name_of_a_class_occurs_once_in_a_package() -> None:
    places = defaultdict(list)
    for path, tree in modules():
        package = path.parts[1] if path.parts[0] == "aiodist" and len(path.parts) > 2 else path.parts[0]
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                places[package, node.name].append(str(path))
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_the_name_of_a_class_occurs_once_in_the_packages_of_an_operation() -> None:
    places = defaultdict(list)
    for package in ("aiodist/communicator", "aiodist/collectives", "handles", "aiodist/backends"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
