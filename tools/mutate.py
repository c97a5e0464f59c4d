"""Change one statement at a time, and see if the tests notice: `python -m tools.mutate --seed 1` prints a table.

A mutation deletes a statement, negates a condition, adds 1 to a number or swaps two calls, in the files of the folders
given. Each file is as before afterwards, also after Ctrl-C. Exit code 1 says that a mutation was not noticed.

With `--coverage FILE` the mutations are drawn among the lines of Python that ran, and with `--counts FOLDER` among
those of C. The tests that ran the line run first, 40 at most, then those of the package, then the whole tier unless
`--near` is given: until one fails. pytest-cov, which is to be installed for it, and gcov measure what ran:

    make core CFLAGS='--coverage -fprofile-update=atomic'
    python -m pytest --cov --cov-context=test tests/core tests/nn tests/ps; make core
    python -m tools.mutate --seed 1 --coverage .coverage --counts build --near
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, zip_longest
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_FOLDERS = ("core", "aiodist/communicator", "nn", "aiodist/ps", "aiodist/backends")
_TIERS = {"contract": "not soak and not thorough", "all": "not soak"}
_C_CALL = re.compile(r"^\s+[a-z]\w*\(.*\);$")
_C_STATEMENT = re.compile(r"^\s+[a-z][\w>.\[\]*-]*( [-+|&]?= .*|\(.*\)|\+\+|--);$")
_C_CONDITION = re.compile(r"^(\s+(?:\} else )?(?:if|while) )(\(.*)$")


@dataclass(frozen=True)
class Mutation:
    """One change of one file: the text in place of a span of its characters."""

    path: Path
    line: int
    kind: str
    first: int
    last: int
    text: str

    @property
    def below(self) -> list[str]:
        """The path below `aiodist`, or of the packages at the root."""
        return [part for part in self.path.relative_to(ROOT).with_suffix("").parts if part != "aiodist"]

    def __str__(self) -> str:
        texts = self.path.read_text(encoding="utf-8")[self.first : self.last], self.text
        old, new = (" ".join(text.split()) for text in texts)
        return f"{self.path.relative_to(ROOT)}:{self.line} {self.kind}: `{old}` becomes `{new}`"


def mutations_of_python(path: Path) -> Iterator[Mutation]:
    """Yield each mutation of a module, within its functions."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for node in dict.fromkeys(inner for function in functions for inner in ast.walk(function)):
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
            is_text = isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant)
            if is_text or not isinstance(one, ast.Expr | ast.Assign | ast.AugAssign | ast.Delete | ast.Raise):
                continue
            first, last = _span(one, source)
            yield "delete", first, last, "pass"
            if isinstance(one, ast.Expr) and isinstance(other, ast.Expr) and _is_call(one) and _is_call(other):
                start, end = _span(other, source)
                yield "swap", first, end, source[start:end] + source[last:start] + source[first:last]


def _is_call(node: ast.Expr) -> bool:
    return isinstance(node.value.value if isinstance(node.value, ast.Await) else node.value, ast.Call)


def _span(node: ast.expr | ast.stmt, source: str) -> tuple[int, int]:
    lines, starts = _lines(source)
    ends = (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)
    first, last = (starts[line - 1] + len(lines[line - 1].encode()[:column].decode()) for line, column in ends)
    return first, last


@cache
def _lines(source: str) -> tuple[list[str], list[int]]:
    lines = source.splitlines(keepends=True)
    return lines, [0, *accumulate(map(len, lines))]  # the character at which each begins


def mutations_of_c(path: Path) -> Iterator[Mutation]:
    """Yield each mutation of a file in C, by its lines: they are formatted one statement a line."""
    lines, starts = _lines(path.read_text(encoding="utf-8"))
    for number, line in enumerate(lines):
        text, end = line.rstrip("\n"), starts[number] + len(line)
        if condition := _C_CONDITION.match(text):
            depths = list(accumulate((c == "(") - (c == ")") for c in condition[2]))
            if 0 in depths:  # the condition ends in this line
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


Ran = dict[str, set[int]]  # the lines of each file that ran
Data = Any  # coverage.CoverageData


def ran_of_python(data: Data) -> Ran:
    """Return what ran by the data of coverage.py."""
    return {str(Path(name).relative_to(ROOT)): set(data.lines(name)) for name in data.measured_files()}


def tests_of(mutation: Mutation, data: Data) -> list[str]:
    """Return tests that ran its line: of each file one, then of each another one, its package's first."""
    files: defaultdict[str, list[str]] = defaultdict(list)
    contexts = data.contexts_by_lineno(str(mutation.path)).get(mutation.line, [])
    for test in sorted({context.partition("|")[0] for context in contexts if context}):
        files[test.partition("::")[0]].append(test)
    names = sorted(files, key=lambda name: (not name.startswith(f"tests/{mutation.below[0]}/"), name))
    return [test for row in zip_longest(*(files[name] for name in names)) for test in row if test][:40]


def ran_of_c(folder: Path) -> Ran:
    """Return what ran by the counts that the core has left in a folder, when built with `--coverage`."""
    command = ["gcov", "-j", "-t", *map(str, folder.rglob("*.gcda"))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    ran: Ran = defaultdict(set)
    for file in (file for report in map(json.loads, done.stdout.splitlines()) for file in report["files"]):
        ran[file["file"]] |= {line["line_number"] for line in file["lines"] if line["count"]}
    return ran


def draw(folders: list[str], count: int, seed: int, ran: Ran) -> list[Mutation]:
    """Return `count` mutations, each of another statement; in a language that was measured, of one that ran."""
    measured = {Path(name).suffix for name in ran}
    found: dict[tuple[Path, int], list[Mutation]] = {}
    for folder in folders:
        for path in sorted(path for suffix in ("c", "py") for path in (ROOT / folder).rglob(f"*.{suffix}")):
            lines = ran.get(str(path.relative_to(ROOT)), ())
            for mutation in (mutations_of_c if path.suffix == ".c" else mutations_of_python)(path):
                if mutation.line in lines or path.suffix not in measured:
                    found.setdefault((path, mutation.line), []).append(mutation)
    dice = random.Random(seed)
    return [dice.choice(found[place]) for place in dice.sample(sorted(found), count)]


def noticed(mutation: Mutation, tier: str, first: list[str], near: bool) -> str | None:
    """Return the test that fails with a mutation, "import" or "build" where there is no such program, or None."""
    before = mutation.path.read_text(encoding="utf-8")
    mutation.path.write_text(before[: mutation.first] + mutation.text + before[mutation.last :], encoding="utf-8")
    is_c, own = mutation.path.suffix == ".c", f"tests/{mutation.below[0]}"
    imports = [sys.executable, "-c", f"import {'.'.join(['aiodist', *mutation.below])}"]
    try:
        if _run(["make", "core"] if is_c else imports)[0]:
            return "build" if is_c else "import"
        pytest = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m"]
        runs = [["thorough or not thorough", *first]] if first else []
        runs += [[_TIERS[tier], own]] if (ROOT / own).is_dir() else []
        runs += [] if near else [[_TIERS[tier], "-n", "3", "tests"]]
        for options in runs:
            code, output = _run([*pytest, *options])
            if code == 4:  # the tests are others than those that were measured
                sys.exit(output)
            if code not in (0, 5):  # 5: there is none
                found = re.search("^(FAILED|ERROR) tests.*", output, re.MULTILINE)
                return found[0] if found else f"exit code {code}"
        return None
    finally:
        mutation.path.write_text(before, encoding="utf-8")
        if is_c:
            _run(["make", "core"])


def _run(command: list[str]) -> tuple[int, str]:
    """Return the exit code and the output of a command; end it and its children after a time limit."""
    # A file, as a pipe would stay open in children of its children; no bytecode, as that of a mutation could stay.
    env = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.TemporaryFile("w+", errors="replace") as out:
        child = subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=out, start_new_session=True)
        try:
            code = child.wait(1200)
        except subprocess.TimeoutExpired:
            code = 1
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        out.seek(0)
        return code, out.read()


def main(arguments: list[str]) -> int:
    """Print each mutation and the test that noticed it; return 1 if one was not noticed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--tier", choices=_TIERS, default="contract")
    parser.add_argument("--coverage", type=Path, help="the lines of Python that ran: the data of coverage.py")
    parser.add_argument("--counts", type=Path, help="the lines of C that ran: a folder with the counts of gcov")
    parser.add_argument("--near", action="store_true", help="run the tests of the line and of the package alone")
    parser.add_argument("--list", action="store_true", help="print the mutations alone")
    parser.add_argument("folders", nargs="*", default=list(_FOLDERS))
    options = parser.parse_args(arguments)
    ran = ran_of_c(options.counts) if options.counts else {}
    if options.coverage:
        data = importlib.import_module("coverage").CoverageData(str(options.coverage))
        data.read()
        ran |= ran_of_python(data)
    missed = 0
    for mutation in draw(options.folders, options.count, options.seed, ran):
        first = tests_of(mutation, data) if options.coverage else []
        found = "" if options.list else noticed(mutation, options.tier, first, options.near)
        missed += found is None
        print(f"{mutation}: {'NOT NOTICED' if found is None else found}", flush=True)
    print(f"{options.count - missed} of {options.count} noticed")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
