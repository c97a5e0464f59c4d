"""What the programs in C share: kernels, which take ten times as long to compile as all else."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

KERNELS = Path(__file__).resolve().parents[2] / "core" / "kernels.c"


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Return what a command of the compiler makes of the kernels; each command runs once."""

    @cache
    def compiled(*command: str) -> str:
        file = tmp_path_factory.mktemp("kernels") / "kernels.o"
        subprocess.run([*command, "-c", str(KERNELS), "-o", str(file)], check=True, capture_output=True, text=True)
        return str(file)

    return compiled
