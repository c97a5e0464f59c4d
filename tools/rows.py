"""Print each row id of tests/CONTRACT.md with its tests; exit 1 when a row has none.

A test bears a row when its name begins with `test_<id>_`, the id in lower case:
`test_h6_cancelled_wait_leaves_the_transfer` bears H6. Test files are parsed, not imported, so this needs
nothing but Python.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_ROW = re.compile(r"^\|\s*([A-Z]\d+)\s*\|", re.MULTILINE)
_TEST = re.compile(r"test_([a-z]\d+)_")


def row_ids(text: str) -> list[str]:
    """Return the ids in the first column of the tables in `text`, in order."""
    return _ROW.findall(text)


def tests_in(source: str) -> dict[str, list[str]]:
    """Return the tests that bear a row, by upper-case id; a parametrised one ends in `[…]`."""
    found: dict[str, list[str]] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (match := _TEST.match(node.name)):
            name = f"{node.name}[…]" if _is_parametrised(node) else node.name
            found.setdefault(match[1].upper(), []).append(name)
    return found


def _is_parametrised(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("parametrize" in ast.unparse(decorator) for decorator in function.decorator_list)


def collect(folder: Path) -> dict[str, list[str]]:
    """Return `path::test` of every test below `folder` that bears a row, by id."""
    found: dict[str, list[str]] = {}
    for path in sorted(folder.rglob("test_*.py")):
        for row, names in tests_in(path.read_text(encoding="utf-8")).items():
            found.setdefault(row, []).extend(f"{path.relative_to(folder.parent)}::{name}" for name in names)
    return found


def main() -> int:
    """Print the rows with their tests, and the problems; return the exit code."""
    rows = row_ids((ROOT / "tests" / "CONTRACT.md").read_text(encoding="utf-8"))
    tests = collect(ROOT / "tests")
    for row in rows:
        print(row)
        for name in tests.get(row, []):
            print(f"    {name}")
    bare = [row for row in rows if row not in tests]
    unlisted = sorted(tests.keys() - set(rows))
    twice = sorted({row for row in rows if rows.count(row) > 1})
    for problem, ids in (
        ("have no test", bare),
        ("have tests but no row", unlisted),
        ("are listed twice", twice),
    ):
        if ids:
            print(f"rows that {problem}: {' '.join(ids)}", file=sys.stderr)
    if bare or unlisted or twice:
        return 1
    print(f"{len(rows)} rows, {sum(map(len, tests.values()))} test functions that bear them")
    return 0


if __name__ == "__main__":
    sys.exit(main())
