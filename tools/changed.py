"""The tests that the difference to a commit concerns, by the graph of imports.

A test is concerned if its file, a program in its folder, or a module that one of them imports, directly or not, has
changed. Other changes, such as those of the core, the settings or the common helpers of tests, concern all tests.
"""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

import grimp

_LINKED = ("handles", "streams", "nn")
"""Packages at the root that are imported as those of aiodist."""
_NO_CODE = (".md", ".svg", ".png", ".cff", ".ipynb")


def tests_of_changes(root: Path, commit: str) -> list[str]:
    """Return the arguments for pytest; none if no test is concerned."""
    changed = _files(root, commit)
    modules = {_module(path) for path in changed if _is_module(path)}
    tests = {path for path in changed if path.startswith("tests/") and path.endswith(".py")}
    rest = {path for path in changed if not (_is_module(path) or path in tests or path.endswith(_NO_CODE))}
    if rest or any(path.endswith("conftest.py") or path.startswith("tests/support/") for path in tests):
        return ["tests"]
    graph = grimp.build_graph("aiodist")
    for module in modules & graph.modules:
        modules |= graph.find_downstream_modules(module)
    found = {"tests/docs"} if any(path.endswith(_NO_CODE) for path in changed) else set()
    for test in (root / "tests").rglob("test_*.py"):
        programs = [test, *test.parent.glob("programs/*.py")]
        names = {str(path.relative_to(root)) for path in programs}
        if names & tests or any(modules.intersection(_imports(path)) for path in programs):
            found.add(str(test.relative_to(root)))
    return sorted(found)


def _files(root: Path, commit: str) -> list[str]:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout

    base = git("merge-base", commit, "HEAD").strip()
    names = git("diff", "--name-only", base) + git("ls-files", "--others", "--exclude-standard")
    return [name for name in names.splitlines() if name]


def _is_module(path: str) -> bool:
    return path.endswith(".py") and path.split("/")[0] in ("aiodist", *_LINKED)


def _module(path: str) -> str:
    name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return name if name.split(".")[0] == "aiodist" else f"aiodist.{name}"


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
