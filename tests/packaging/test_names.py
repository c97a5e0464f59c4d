"""`import aiodist` is light, and its names are the ones that are written down."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import aiodist
from aiodist import errors

ROOT = Path(__file__).resolve().parents[2]


def static_imports() -> dict[str, str]:
    """Return what `aiodist/__init__.py` imports for type checkers, name to module."""
    (block,) = [
        node
        for node in ast.parse(inspect.getsource(aiodist)).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    return {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }


def test_import_loads_no_heavy_library() -> None:
    code = "import sys, aiodist; print(sorted({'torch', 'numpy', 'mpi4py', 'asyncio'} & sys.modules.keys()))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_all_equals_the_sorted_public_names() -> None:
    assert aiodist.__all__ == sorted({*static_imports(), "__version__"})
    assert dir(aiodist) == aiodist.__all__
    assert set(errors.__all__) <= set(aiodist.__all__)


@pytest.mark.parametrize("name", aiodist.__all__)
def test_name_resolves(name: str) -> None:
    value, home = getattr(aiodist, name), static_imports().get(name)
    if home == "aiodist":
        assert value is importlib.import_module(f"aiodist.{name}")
    elif name != "__version__":
        assert value is getattr(importlib.import_module(home or ""), name)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'aiodist' has no attribute 'allreduce'"):
        _ = aiodist.allreduce  # type: ignore[attr-defined]


def test_missing_module_is_an_attribute_error_and_a_broken_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aiodist, "__path__", [str(tmp_path)])
    monkeypatch.delattr(aiodist, "ps", raising=False)
    monkeypatch.delitem(sys.modules, "aiodist.ps", raising=False)
    with pytest.raises(AttributeError, match="'ps'"):
        _ = aiodist.ps
    (tmp_path / "ps.py").write_text("import a_library_that_is_not_installed")
    importlib.invalidate_caches()
    with pytest.raises(ModuleNotFoundError, match="a_library_that_is_not_installed"):
        _ = aiodist.ps
