"""State that a process has one of: docs/design.md lists all of it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("aiodist", "handles", "streams", "nn")
TOOLS = ("bench", "testing", "cli.py")  # commands, and the tools of tests
NEVER_CHANGED = {
    "TypeVar",
    "TypeVarTuple",
    "ParamSpec",
    "Struct",
    "nullcontext",
    "torch.empty",
    "logging.getLogger",
    "_memmove",
}


def found_state() -> dict[str, set[str]]:
    """Return the names that hold state, by module: those not in capitals that are given an object that can change."""
    state: dict[str, set[str]] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):  # it does not follow the links
            module = path.relative_to(ROOT).with_suffix("").as_posix().removeprefix("aiodist/")
            if module.startswith(tuple(tool.removesuffix(".py") for tool in TOOLS)):
                continue
            if names := set(_state_in(ast.parse(path.read_text()).body)):
                state[module] = names
    return state


def _state_in(body: list[ast.stmt], owner: str = "") -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _state_in(node.body, f"{node.name}.")
        if isinstance(node, ast.Assign):
            target, value, shared = node.targets[0], node.value, not owner
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            target, value, shared = node.target, node.value, not owner or "ClassVar" in ast.unparse(node.annotation)
        else:
            continue
        named = isinstance(target, ast.Name) and target.id != "__all__" and re.search("[a-z]", target.id)
        if shared and named and _can_change(value):
            yield f"{owner}{ast.unparse(target)}"


def _can_change(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        return ast.unparse(value.func) not in NEVER_CHANGED
    return isinstance(value, (ast.List, ast.Dict, ast.Set))


def listed_state() -> dict[str, set[str]]:
    """Return the same as docs/design.md has it."""
    _, _, section = (ROOT / "docs" / "design.md").read_text().partition("## State of a process")
    rows = re.findall(r"^\| `([a-z0-9_/]+)` ((?:`[\w.]+`(?:, )?)+)", section.partition("\n## ")[0], re.MULTILINE)
    state: dict[str, set[str]] = {}
    for module, names in rows:
        state.setdefault(module, set()).update(re.findall(r"`([\w.]+)`", names))
    return state


def test_state_of_a_process_is_what_the_design_lists() -> None:
    assert found_state() == listed_state()


def test_state_is_found_where_it_is_made() -> None:
    code = "_seen = []\nLIMITS = {}\nclass A:\n    _all: ClassVar[set[int]] = set()\n    other: list[int] = []\n"
    assert list(_state_in(ast.parse(code).body)) == ["_seen", "A._all"]
