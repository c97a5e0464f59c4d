"""No package uses private names of another one, and no test uses private names of any.

A name with an underscore belongs to the package that defines it: `aiodist.world`, `aiodist.handles`, and so on. A name
that another package needs is public. Private names of torch's and Python's classes are not checked.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("aiodist", "handles", "streams", "nn")

EXCEPTIONS = {
    # Not ours, though a package of ours has a name like it.
    ("aiodist/backends/gloo/library.py", "_Options"): "torch's, of a process group of gloo",
    ("aiodist/backends/gloo/library.py", "_timeout"): "the same",
    ("aiodist/testing/clock.py", "_ready"): "asyncio's, of its event loop",
    ("aiodist/testing/clock.py", "_selector"): "the same",
    ("aiodist/c10d/lines.py", "_base"): "torch's, of views, which share a version",
    ("aiodist/watch/stillness.py", "_ready"): "asyncio's, of its event loop",
    ("aiodist/watch/stillness.py", "_selector"): "the same",
    ("handles/forks.py", "_selector"): "the same",
    ("aiodist/testing/ranks.py", "_context"): "asyncio's, of one of its handles",
    ("aiodist/world/isolation.py", "_children"): "asyncio's, of a gather",
    ("aiodist/world/isolation.py", "_tasks"): "asyncio's and anyio's, of a task group",
    ("nn/pipelined.py", "_version"): "torch's, of tensors",
    ("nn/bucket_plan.py", "_version"): "the same",
    ("aiodist/checkpoints/kinds.py", "_schedulers"): "torch's, of a scheduler of schedulers",
    ("handles/handle.py", "_origin"): "its own: the compiled base has it",
    ("handles/handle.py", "_account"): "the same",
    ("handles/handle.py", "_look"): "the same",
    ("handles/handle.py", "_rest"): "the same",
}
"""Why a module may use a private name all the same, by the module and the name."""


TORCHS = {
    *("_apply", "_comm", "_count", "_free", "_get_backend", "_has_hooks", "_sleep", "_source_rank", "_timeout"),
    *("_get_sequence_number_for_group", "_set_sequence_number_for_group", "_version", "_world"),
}
"""Names of torch's that tests use, and that ours have too."""
IN_TESTS = {
    ("tests/conftest.py", "_report"): "what each loop without a handler is told",
    ("tests/conftest.py", "_of_loop"): "whether something holds a loop that has closed",
    ("tests/judges/fronts/packages/torchcomms.py", "_allgather_base"): "the name of torch's call",
    ("tests/judges/fronts/packages/torchcomms.py", "_reduce_scatter_base"): "the name of torch's call",
}
"""Why a test may use a private name of ours all the same, by the file and the name."""


class Module(NamedTuple):
    """One file of ours, read."""

    path: str
    package: str
    tree: ast.Module


class Use(NamedTuple):
    """One use of a private name."""

    path: str
    line: int
    name: str


@cache
def modules(root: Path) -> list[Module]:
    paths = [path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py"))]  # follows no links
    return [Module(str(p.relative_to(root)), package_of(p.relative_to(root)), ast.parse(p.read_text())) for p in paths]


@pytest.fixture(scope="module", autouse=True)
def _no_tree_is_left() -> Iterator[None]:
    """Drop the syntax trees, whose objects would slow each later garbage collection by half a second."""
    yield
    modules.cache_clear()


def package_of(path: Path) -> str:
    """Return the name of the package right below `aiodist` that a file belongs to, or of the module there.

    >>> [package_of(Path(path)) for path in ("aiodist/ps/training/base.py", "nn/reducer.py", "aiodist/cli.py")]
    ['ps', 'nn', 'cli']
    """
    parts = path.with_suffix("").parts
    return parts[1] if parts[0] == "aiodist" else parts[0]


def is_private(name: str) -> bool:
    """Return whether it is; the compiled core is private to users alone: all packages are built on it."""
    return name.startswith("_") and not name.startswith("__") and name != "_core"


def defined(tree: ast.Module) -> Iterator[str]:
    """Yield the private names that a module gives its classes, their objects and itself."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                yield name
        if isinstance(node, ast.Module | ast.ClassDef):
            for statement in node.body:
                yield from assigned(statement)


def assigned(statement: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement of a class or module assigns, those in `__slots__` too."""
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    names = [node.id for target in targets if target for node in ast.walk(target) if isinstance(node, ast.Name)]
    yield from names
    if names == ["__slots__"] and isinstance(statement, ast.Assign):
        yield from ast.literal_eval(statement.value)


def used(module: Module) -> Iterator[Use]:
    """Yield the private names that a module reads from objects, asks for by name, or imports from ours."""
    for node in ast.walk(module.tree):
        match node:
            case ast.Attribute(attr=name):
                yield Use(module.path, node.lineno, name)
            case ast.Call(
                func=ast.Name(id="getattr" | "setattr" | "hasattr" | "delattr"),
                args=[_, ast.Constant(value=str(name)), *_],
            ):
                yield Use(module.path, node.lineno, name)
            case ast.ImportFrom(module=str(origin), names=aliases) if origin.split(".")[0] == "aiodist":
                yield from (Use(module.path, node.lineno, alias.name) for alias in aliases)


def reaches(found: list[Module]) -> list[Use]:
    """Return each use of a private name that only packages other than the user's define."""
    owners: dict[str, set[str]] = {}
    for module in found:
        for name in filter(is_private, defined(module.tree)):
            owners.setdefault(name, set()).add(module.package)
    return [
        use
        for module in found
        for use in used(module)
        if is_private(use.name) and module.package not in owners.get(use.name, {module.package})
    ]


def reaches_of_tests() -> Iterator[Use]:
    """Yield each use in tests of a private name that the product defines and the file does not; patches too."""
    ours = {name for module in modules(ROOT) for name in filter(is_private, defined(module.tree))} - TORCHS
    for path in sorted((ROOT / "tests").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if not ours.intersection(re.findall(r"[.\"'](_\w+)", text)):
            continue
        tree = ast.parse(text)
        module = Module(str(path.relative_to(ROOT)), "tests", tree)
        own = set(defined(tree))
        for use in (*used(module), *patched(module)):
            if use.name in ours - own:
                yield use


def patched(module: Module) -> Iterator[Use]:
    """Yield the names that a test patches by their texts."""
    for node in ast.walk(module.tree):
        match node:
            case ast.Call(func=ast.Attribute(attr="setattr" | "setitem" | "object"), args=[first, *rest]):
                texts = [arg.value for arg in (first, *rest[:1]) if isinstance(arg, ast.Constant)]
                yield from (
                    Use(module.path, node.lineno, text.rpartition(".")[2]) for text in texts if type(text) is str
                )


@pytest.mark.thorough
def test_no_package_uses_private_names_of_another() -> None:
    found = [use for use in reaches(modules(ROOT)) if (use.path, use.name) not in EXCEPTIONS]
    assert [f"{use.path}:{use.line}: {use.name}" for use in found] == []


def test_no_test_uses_private_names_of_ours() -> None:
    found = list(reaches_of_tests())
    assert [f"{use.path}:{use.line}: {use.name}" for use in found if (use.path, use.name) not in IN_TESTS] == []
    assert IN_TESTS.keys() == {(use.path, use.name) for use in found}, "every exception is needed"


def test_every_exception_is_needed() -> None:
    needed = {(use.path, use.name) for use in reaches(modules(ROOT))}
    assert EXCEPTIONS.keys() - needed == set()


def with_a_user(tmp_path: Path, code: str) -> list[Module]:
    """Return two packages, `handles` and `nn`; the second has `code`."""
    owner = """
class Handle:
    __slots__ = ("_slot",)
    _CONSTANT = 1

    def __init__(self):
        self._secret = 1

def _helper(): pass
"""
    for path, text in {"handles/handle.py": owner, "nn/reducer.py": code}.items():
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_text(text)
    return modules(tmp_path)


@pytest.mark.parametrize(
    "code",
    [
        "def look(handle): return handle._secret",
        "def look(handle): handle._slot = 1",
        "def look(handle): return getattr(handle, '_secret')",
        "class Mine(Handle):\n    def look(self): return self._secret",
        "from aiodist.handles.handle import _helper",
        "from aiodist.handles import handle\nhandle._helper()",
        "def look(handle): return handle._CONSTANT",
    ],
)
def test_a_new_use_is_found(tmp_path: Path, code: str) -> None:
    assert [use.path for use in reaches(with_a_user(tmp_path, code))] == ["nn/reducer.py"]


@pytest.mark.parametrize(
    "code",
    [
        "import torch\ntorch._foreign()",
        "class Mine:\n    def __init__(self, other: Mine):\n        self._secret = other._secret",
    ],
)
def test_what_is_not_of_another_package_is_not(tmp_path: Path, code: str) -> None:
    assert reaches(with_a_user(tmp_path, code)) == []
