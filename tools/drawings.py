"""Write the drawing and the list of modules of each package into the pages of docs/ that ask for them.

A page asks with a line `<!-- modules: aiodist.ps -->`; the text between this line and the next `<!-- end -->` is
replaced. `<!-- drawing: aiodist.ps -->` asks for the drawing alone. A large package is drawn in groups, one box each,
which the page names in its marker:

    <!-- modules: aiodist.ps
    the client: client calls pulls pushes
    the server: server shard
    -->

A module that is in no group has a box of its own; one that is no more is taken out of its group. An arrow is an import,
left out where a longer way leads there too. The lines are the first ones of the docstrings. Modules are parsed, not
imported: this needs nothing but Python. With Graphviz's `dot`, tools/pictures.py draws the changed ones.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_BLOCK = re.compile(
    r"(<!-- (?P<what>modules|drawing): (?P<package>aiodist[\w.]*)(?P<groups>(?:\n\w[^\n]*)*)\s*-->\n)"
    r".*?(<!-- end -->)",
    re.DOTALL,
)
MOST_BOXES = 20
"""A page groups the modules of a larger package."""

Graph = dict[str, set[str]]
"""Each module or folder of a package, with the ones that it imports."""


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
    return [block["package"] for block in _BLOCK.finditer(text)]


def rewritten(text: str) -> str:
    """Return a page with its drawings as the code is now."""
    return _BLOCK.sub(_block, text)


def _block(block: re.Match[str]) -> str:
    what, package, end = block["what"], block["package"], block[5]
    groups = _known(block["groups"].strip(), _members(ROOT.joinpath(*package.split("."))))
    marker = f"<!-- {what}: {package}\n{groups}\n-->" if groups else f"<!-- {what}: {package} -->"
    return f"{marker}\n\n{drawing(package, groups, listed=what == 'modules')}\n\n{end}"


def _known(groups: str, members: dict[str, Path]) -> str:
    """Return `groups` without the modules that are no more, and without those that are empty then."""
    lines = [line.partition(":") for line in groups.splitlines()]
    known = [(title, [name for name in names.split() if name in members]) for title, _, names in lines]
    return "\n".join(f"{title}: {' '.join(names)}" for title, names in known if names)


@cache
def drawing(package: str, groups: str = "", *, listed: bool = True) -> str:
    """Return the modules of a package in layers: as a drawing in mermaid and, if `listed`, as a table in that order.

    A line of `groups` is a title, a colon and the modules that share a box.
    """
    members = _members(ROOT.joinpath(*package.split(".")))
    boxes = _boxes(members, groups)
    box_of = {name: title for title, names in boxes.items() for name in names}
    imports = {name: set(_imported(path, package)) & members.keys() - {name} for name, path in members.items()}
    order = _in_layers(imports)
    between = {title: {box_of[other] for name in names for other in imports[name]} for title, names in boxes.items()}
    between = {title: others - {title} for title, others in between.items()}
    below = _closure(between)
    titles = _in_layers(between)
    number = {title: f"m{place}" for place, title in enumerate(titles)}
    lines = ["```mermaid", "flowchart TD"]
    for title in titles:
        inside = [_shown(members[name]) for name in order if box_of[name] == title]
        text = inside[0] if title in members else f"{title}<br/>{', '.join(inside)}"
        lines.append(f'    {number[title]}["{text}"]')
    for title in titles:
        others = [
            number[other]
            for other in titles
            if other in between[title] and not any(_between(below, title, via, other) for via in between[title])
        ]
        lines += [f"    {number[title]}-->{' & '.join(others)}"] if others else []
    lines.append("```")
    if listed:
        lines += ["", "| | |", "|---|---|"]
        for title in titles:
            names = [name for name in order if box_of[name] == title]
            lines += [] if title in members else [f"| **{title}** | |"]
            lines += [f"| `{_shown(members[name])}` | {_first_line(members[name])} |" for name in names]
    return "\n".join(lines)


def _boxes(members: dict[str, Path], groups: str) -> dict[str, list[str]]:
    """Return the boxes of a drawing, by title; the title of a module that is in no group is its name."""
    boxes = {}
    for line in groups.splitlines():
        title, _, names = line.partition(":")
        boxes[title] = names.split()
    grouped = [name for names in boxes.values() for name in names]
    if twice := {name for name in grouped if grouped.count(name) > 1}:
        raise ValueError(f"in two groups: {', '.join(twice)}")
    if taken := boxes.keys() & members.keys():
        raise ValueError(f"groups that are called as modules are: {', '.join(taken)}")
    return boxes | {name: [name] for name in members if name not in grouped}


def _in_layers(imports: Graph) -> list[str]:
    """Return the names, those that lead to others before these."""
    depths = _depths(_closure(imports))
    return sorted(imports, key=lambda name: (-depths[name], name))


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
    if shutil.which("dot"):
        subprocess.run([sys.executable, Path(__file__).with_name("pictures.py")], check=True)
