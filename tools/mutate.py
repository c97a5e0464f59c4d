"""Change one statement at a time, and see if the tests notice: `python -m tools.mutate --seed 1` prints a table.

A mutation deletes a statement, negates a condition, adds 1 to a number or swaps two calls, in the files of the folders
given; they are drawn by the seed, with `--coverage FILE` (of `coverage json`) among the lines that ran. The module must
still import, and the core build. The tests of the package run first, then the whole tier, until one fails. Each file
is as before afterwards, also after Ctrl-C. Exit code 1 says that a mutation was not noticed.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, zip_longest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_FOLDERS = ("core", "aiodist/communicator", "nn", "aiodist/ps", "aiodist/backends")
_TIERS = {"contract": "not soak and not thorough", "all": "not soak"}
_C_CALL = re.compile(r"^\s+[a-z]\w*\(.*\);$")
_C_STATEMENT = re.compile(r"^\s+[a-z][\w>.\[\]*-]*( [-+|&]?= .*|\(.*\)|\+\+|--);$")
_C_CONDITION = re.compile(r"^(\s+(?:\} else )?(?:if|while) )(\(.*)$")
_SECONDS = 1200


@dataclass(frozen=True)
class Mutation:
    """One change of one file: the text in place of a span of its characters."""

    path: Path
    line: int
    kind: str
    first: int
    last: int
    text: str

    def __str__(self) -> str:
        old = self.path.read_text(encoding="utf-8")[self.first : self.last]
        shown = [" ".join(text.split()) for text in (old, self.text)]
        return f"{self.path.relative_to(ROOT)}:{self.line} {self.kind}: `{shown[0]}` becomes `{shown[1]}`"


def mutations_of_python(path: Path) -> Iterator[Mutation]:
    """Yield each mutation of a module, within its functions."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    seen: set[ast.AST] = set()
    for node in (inner for function in functions for inner in ast.walk(function)):
        if node in seen:
            continue
        seen.add(node)
        for kind, first, last, text in _changes(node, source):
            yield Mutation(path, source.count("\n", 0, first) + 1, kind, first, last, text)


def _changes(node: ast.AST, source: str) -> Iterator[tuple[str, int, int, str]]:
    """Yield the kind of each change of a node, the span of characters that it replaces, and the text in its place."""
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        first, last = _span(node.test, source)
        yield "negate", first, last, f"(not ({source[first:last]}))"
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield "number", *_span(node, source), str(node.value + 1)
    for body in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
        statements = body if isinstance(body, list) else []
        for one, other in zip_longest(statements, statements[1:]):
            if _is_text(one) or not isinstance(one, ast.Expr | ast.Assign | ast.AugAssign | ast.Delete | ast.Raise):
                continue
            first, last = _span(one, source)
            yield "delete", first, last, "pass"
            if isinstance(one, ast.Expr) and isinstance(other, ast.Expr) and _is_call(one) and _is_call(other):
                start, end = _span(other, source)
                yield "swap", first, end, source[start:end] + source[last:start] + source[first:last]


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_call(node: ast.Expr) -> bool:
    return isinstance(node.value.value if isinstance(node.value, ast.Await) else node.value, ast.Call)


def _span(node: ast.expr | ast.stmt, source: str) -> tuple[int, int]:
    lines, starts = _lines(source)
    assert node.end_lineno is not None
    assert node.end_col_offset is not None

    def place(line: int, column: int) -> int:
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    return place(node.lineno, node.col_offset), place(node.end_lineno, node.end_col_offset)


@cache
def _lines(source: str) -> tuple[list[str], list[int]]:
    """Return the lines of a text, and the character at which each begins."""
    lines = source.splitlines(keepends=True)
    return lines, [0, *accumulate(map(len, lines))]


def mutations_of_c(path: Path) -> Iterator[Mutation]:
    """Yield each mutation of a file in C, by its lines: they are formatted one statement a line."""
    lines, starts = _lines(path.read_text(encoding="utf-8"))
    for number, line in enumerate(lines):
        text, end = line.rstrip("\n"), starts[number] + len(line)
        if condition := _C_CONDITION.match(text):
            depths = list(accumulate((c == "(") - (c == ")") for c in condition[2]))
            if 0 in depths:  # it does not go on in the next line
                close = depths.index(0) + 1
                negated = f"{condition[1]}(!{condition[2][:close]}){condition[2][close:]}\n"
                yield Mutation(path, number + 1, "negate", starts[number], end, negated)
        elif _C_STATEMENT.match(text):
            yield Mutation(path, number + 1, "delete", starts[number], end, ";\n")
            if figure := re.search(r"(?<![\w.])\d+(?![\w.])", text):
                more = f"{text[: figure.start()]}{int(figure[0]) + 1}{text[figure.end() :]}\n"
                yield Mutation(path, number + 1, "number", starts[number], end, more)
            if number + 1 < len(lines) and _C_CALL.match(text) and _C_CALL.match(lines[number + 1].rstrip("\n")):
                yield Mutation(path, number + 1, "swap", starts[number], starts[number + 2], lines[number + 1] + line)


def draw(folders: list[str], count: int, seed: int, ran: dict[str, set[int]] | None) -> list[Mutation]:
    """Return `count` mutations of statements, each of another one."""
    found: dict[tuple[Path, int], list[Mutation]] = {}
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.[cp]*")):
            if path.suffix not in (".c", ".py") or path.parent.name == "tests":
                continue
            lines = None if ran is None or path.suffix == ".c" else ran.get(str(path.relative_to(ROOT)), set())
            for mutation in (mutations_of_c if path.suffix == ".c" else mutations_of_python)(path):
                if lines is None or mutation.line in lines:
                    found.setdefault((path, mutation.line), []).append(mutation)
    dice = random.Random(seed)
    return [dice.choice(found[place]) for place in dice.sample(sorted(found), count)]


def noticed(mutation: Mutation, tier: str) -> str | None:
    """Return the test that fails with a mutation, "import" or "build" where there is no such program, or None."""
    before = mutation.path.read_text(encoding="utf-8")
    mutation.path.write_text(before[: mutation.first] + mutation.text + before[mutation.last :], encoding="utf-8")
    is_c = mutation.path.suffix == ".c"
    try:
        if is_c and _run(["make", "core"])[0]:
            return "build"
        if not is_c and _run([sys.executable, "-c", "import aiodist.nn, aiodist.ps, aiodist.world.runtime"])[0]:
            return "import"
        folder = mutation.path.relative_to(ROOT).parent.name if not is_c else "core"
        near = [f"tests/{folder}"] if (ROOT / "tests" / folder).is_dir() else []
        for tests in ([near] if near else []) + [["tests"]]:
            code, output = _run([sys.executable, "-m", "pytest", "-x", "-q", "-n", "3", "-m", _TIERS[tier], *tests])
            if code:
                return next((line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))), "a hang")
        return None
    finally:
        mutation.path.write_text(before, encoding="utf-8")
        if is_c:
            _run(["make", "core"])


def _run(command: list[str]) -> tuple[int, str]:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        return 1, ""
    return done.returncode, done.stdout + done.stderr


def main(arguments: list[str]) -> int:
    """Print each mutation and the test that noticed it; return 1 if one was not noticed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--tier", choices=_TIERS, default="contract")
    parser.add_argument("--coverage", type=Path, help="the lines that ran: the JSON of `coverage json`")
    parser.add_argument("--list", action="store_true", help="print the mutations alone")
    parser.add_argument("folders", nargs="*", default=list(_FOLDERS))
    options = parser.parse_args(arguments)
    ran = None
    if options.coverage:
        files = json.loads(options.coverage.read_text())["files"]
        ran = {name: set(file["executed_lines"]) for name, file in files.items()}
    missed = 0
    for mutation in draw(options.folders, options.count, options.seed, ran):
        found = "" if options.list else noticed(mutation, options.tier)
        missed += found is None
        print(f"{mutation}: {'NOT NOTICED' if found is None else found}", flush=True)
    print(f"{options.count - missed} of {options.count} noticed")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
