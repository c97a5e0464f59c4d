"""Object files that the programs in C share, compiled once; the kernels take longest."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

KERNELS = Path(__file__).resolve().parents[2] / "core" / "kernels.c"

Objects = Callable[..., tuple[str, ...]]


@pytest.fixture(scope="session")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Objects:
    """Return the files that a command of the compiler makes of some sources; each command runs once."""

    @cache
    def compiled(sources: tuple[Path, ...], *command: str) -> tuple[str, ...]:
        folder = tmp_path_factory.mktemp("objects")
        subprocess.run([*command, "-c", *map(str, sources)], check=True, capture_output=True, text=True, cwd=folder)
        return tuple(map(str, folder.iterdir()))

    return compiled


@pytest.fixture(scope="session")
def kernels(objects: Objects) -> Callable[..., str]:
    """Return what a command of the compiler makes of the kernels."""
    return lambda *command: objects((KERNELS,), *command)[0]
