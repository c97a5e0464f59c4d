"""Fixtures of the tests of benchmarks."""

from __future__ import annotations

import os

import pytest


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher's variables: as if typed in a shell."""
    for name in list(os.environ):
        if name.startswith(("OMPI_COMM_WORLD", "PMI_", "AIODIST_", "SLURM_")) or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)
