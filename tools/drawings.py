"""Write the drawing and the list of modules of each package into the pages of docs/ that ask for them.

A page asks with a line `<!-- modules: aiodist.ps -->`; what stands between it and the next `<!-- end -->` is written
anew. `<!-- statistics -->` asks for the records that owners return. An arrow is an import, left out where a longer way
leads there too. The lines are the first ones of the docstrings. Modules are parsed, not imported: this needs nothing
but Python.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_BLOCK = re.compile(r"(<!-- (?:modules: (aiodist[\w.]*)|statistics) -->\n).*?(<!-- end -->)", re.DOTALL)

Graph = dict[str, set[str]]
"""Each module or folder of a package, with those beside it that it leads to."""


def pages() -> list[Path]:
    """Return the files that may ask for drawings."""
    return sorted((ROOT / "docs").rglob("*.md"))


def packages() -> set[str]:
    """Return the packages that have more than one module."""
    top = [path for path in (ROOT / "aiodist").iterdir() if path.is_dir()]  # three of them are links
    folders = [ROOT / "aiodist", *(init.parent for path in top for init in path.rglob("__init__.py"))]
    return {".".join(path.relative_to(ROOT).parts) for path in folders if len(_members(path)) > 1}


def asked(text: str) -> list[str]:
    """Return the packages whose drawings a page asks for."""
    return [package for _, package, _ in _BLOCK.findall(text) if package]


def rewritten(text: str) -> str:
    """Return a page with its drawings as the code is now."""
    return _BLOCK.sub(
        lambda block: f"{block[1]}\n{drawing(block[2]) if block[2] else statistics()}\n\n{block[3]}", text
    )


@cache
def drawing(package: str) -> str:
    """Return the modules of a package in layers: as a drawing in mermaid, and as a table in reading order."""
    members = _members(ROOT.joinpath(*package.split(".")))
    imports = {name: set(_imported(path, package)) & members.keys() - {name} for name, path in members.items()}
    below = _closure(imports)
    depths = _depths(below)
    order = sorted(members, key=lambda name: (-depths[name], name))
    number = {name: f"m{place}" for place, name in enumerate(order)}
    boxes = [f'    {number[name]}["{_shown(members[name])}"]' for name in order]
    arrows = [
        f"    {number[name]} --> {number[other]}"
        for name in order
        for other in order
        if other in imports[name] and not any(_between(below, name, via, other) for via in imports[name])
    ]
    rows = [f"| `{_shown(members[name])}` | {_first_line(members[name])} |" for name in order]
    return "\n".join(["```mermaid", "flowchart TD", *boxes, *arrows, "```", "", "| | |", "|---|---|", *rows])


@cache
def statistics() -> str:
    """Return the records `<class>Statistics`, which `statistics()` of each class returns, as a drawing in mermaid."""
    paths = [path for folder in ("aiodist", "handles", "streams", "nn") for path in (ROOT / folder).rglob("*.py")]
    top = [node for path in sorted(paths) for node in _parsed(path).body]
    lines = []
    for node in top:
        if isinstance(node, ast.ClassDef) and (owner := node.name.removesuffix("Statistics")) not in ("", node.name):
            lines.append(f"    {owner} --> {node.name} : statistics()")
            fields = [field for field in node.body if isinstance(field, ast.AnnAssign)]
            types = [re.sub(r"[\[\]]", "~", ast.unparse(field.annotation)) for field in fields]
            lines += [
                f"    {node.name} : {of} {ast.unparse(field.target)}" for field, of in zip(fields, types, strict=True)
            ]
    return "\n".join(["```mermaid", "classDiagram", *lines, "```"])


def _members(folder: Path) -> dict[str, Path]:
    found = {path.stem: path for path in sorted(folder.glob("[!_]*.py"))}
    return found | {path.name: path for path in sorted(folder.iterdir()) if (path / "__init__.py").exists()}


def _shown(path: Path) -> str:
    return path.stem if path.is_file() else f"{path.name}/"


def _first_line(path: Path) -> str:
    tree = _parsed(path if path.is_file() else path / "__init__.py")
    return " ".join((ast.get_docstring(tree) or "").partition("\n\n")[0].split()).replace("|", "\\|")


def _imported(path: Path, package: str) -> Iterator[str]:
    """Yield the names below `package` that a module, or any module of a folder, imports where it runs."""
    for file in [path] if path.is_file() else path.rglob("*.py"):
        for name in _imports(file.resolve()):
            if name.startswith(f"{package}."):
                yield name.split(".")[package.count(".") + 1]


@cache
def _imports(file: Path) -> list[str]:
    """Return the full names that a module imports where it runs."""
    found = []
    for node in _running(_parsed(file)):
        names = [alias.name for alias in node.names]
        found += [f"{node.module}.{name}" for name in names] if isinstance(node, ast.ImportFrom) else names
    return found


def _running(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the imports that are not there for type checkers alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif not isinstance(node, ast.expr) and not (isinstance(node, ast.If) and _is_for_types(node)):
            yield from _running(node)


def _is_for_types(node: ast.If) -> bool:
    return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


@cache
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _closure(graph: Graph) -> Graph:
    """Return where each leads to over any number of steps."""
    below = {name: set(others) for name, others in graph.items()}
    for via in graph:
        for others in below.values():
            if via in others:
                others |= below[via]
    return below


def _between(below: Graph, name: str, via: str, other: str) -> bool:
    """Whether `via` leads on to `other`, and is on a layer with neither."""
    return other in below[via] and via not in below[other] and name not in below[via]


def _depths(below: Graph) -> dict[str, int]:
    """Return how long the longest way down is; those that lead to one another are equally deep."""

    @cache
    def depth(name: str) -> int:
        lower = [other for other in below[name] if name not in below[other]]
        return 1 + max(map(depth, lower), default=-1)

    return {name: depth(name) for name in below}


if __name__ == "__main__":
    for page in pages():
        page.write_text(rewritten(page.read_text(encoding="utf-8")), encoding="utf-8")
