"""Tests reach into the product by what users have, by `aiodist.testing` with its ten seams, and by modules of rules.

A module of rules has values go in and values come out: it has no thread, loop, socket or process. The tests of its own
package may import it. So the code below the public calls can be cut in another way, and its tests stay.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

from tests.packaging.test_public import MODULES

ROOT = Path(__file__).resolve().parents[2]
SEAMS = sorted(f"aiodist.testing.seams.{path.stem}" for path in (ROOT / "aiodist/testing/seams").glob("[a-z]*.py"))
PUBLIC = {*MODULES, *SEAMS, *(f"aiodist.{name}" for name in ("c10d", "communicator", "compat.mpi", "errors", "types"))}
MACHINERY = {"asyncio", "concurrent", "mmap", "multiprocessing", "queue", "select", "socket", "subprocess", "threading"}
"""What no module of rules imports."""
RULES = {
    "backends": "inplace matching shm.peers words",
    "bench": "plan records timing tuning_worker",
    "checkpoints": "format parts values",
    "codecs": "gradients",
    "collectives": "arithmetic choice.availability choice.selector choice.table cuda.staging hierarchical primitives "
    "program scheduled traffic",
    "communicator": "claims facts fingerprint levels messages oplog",
    "control": "generations roster wire",
    "data": "queue_machine shards",
    "doctor": "report",
    "launch": "tracebacks verdict",
    "nn": "blocks layout pass_machine pass_status",
    "ps": "machines optimizers row_store rows rules settings wire",
    "schedules": "",
    "topology": "",
    "watch": "graph merging",
}
"""The modules of rules of each package; an empty text is the package itself."""
TESTED_IN = {
    "collectives": {"collectives", "communicator"},
    "control": {"control", "launch"},
    "doctor": {"launch"},
    "schedules": {"bench", "collectives", "communicator", "lifecycle", "schedules"},
    "topology": {"communicator", "control", "launch"},
}
"""The folders of the tests of a package, where that is not the one of its name."""
PARTS: dict[str, str] = {}
"""Other modules that the tests of their own package import, and why."""


def rules() -> Iterator[str]:
    for package, names in RULES.items():
        yield from (f"aiodist.{package}.{name}" for name in names.split()) if names else (f"aiodist.{package}",)


def imports(path: Path) -> set[str]:
    """Return the modules of ours that a file imports."""
    return {name for name in _modules(path) if name.split(".")[0] == "aiodist"}


def _modules(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {_home(node.module, alias.name) for alias in node.names}
    return found


def _home(module: str, name: str) -> str:
    inner = ROOT / f"{module}.{name}".replace(".", "/")
    public = module in PUBLIC and hasattr(importlib.import_module(module), name)
    return module if public or not (inner.is_dir() or inner.with_suffix(".py").exists()) else f"{module}.{name}"


def files() -> Iterator[Path]:
    yield from sorted((ROOT / "tests").rglob("*.py"))


def allowed(module: str, folder: str) -> bool:
    package = module.split(".")[1]
    own = folder in TESTED_IN.get(package, {package})
    return own and (module in PARTS or module in set(rules()))


def test_tests_import_what_is_public_seams_and_rules() -> None:
    bad = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files()
        for name in sorted(imports(path) - PUBLIC)
        if not allowed(name, path.relative_to(ROOT / "tests").parts[0])
    ]
    assert not bad, "\n".join(bad)


def test_modules_of_rules_have_no_machinery() -> None:
    for name in rules():
        path = ROOT / name.replace(".", "/")
        parts = path.rglob("*.py") if path.is_dir() else [path.with_suffix(".py")]
        for part in parts:
            assert not MACHINERY & {node.split(".")[0] for node in _modules(part)}, part


def test_there_are_ten_seams_of_at_most_eight_names() -> None:
    assert len(SEAMS) <= 10
    for name in SEAMS:
        seam = importlib.import_module(name)
        assert 0 < len(seam.__all__) <= 8
        assert all(hasattr(seam, one) for one in seam.__all__)
