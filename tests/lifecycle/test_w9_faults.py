"""W9: each fault once under each launcher: who survives, who is named, and that nothing is left behind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchmarks.faults import FAULTS, WORKER, observe

if TYPE_CHECKING:
    from tests.lifecycle.conftest import Run


OF_ANY_LAUNCHER = ("stop", "block", "crossed", "mismatch", "absent", "stall")
"""Faults that no mpirun has a part in: a job of four ranks takes three seconds of CPU, so one is enough."""


@pytest.mark.parametrize(
    ("run", "fault"),
    [
        pytest.param(run, fault, marks=[pytest.mark.thorough] * (run != "none" and fault in OF_ANY_LAUNCHER))
        for run in ("openmpi", "mpich", "none")
        for fault in FAULTS
    ],
    indirect=["run"],
)
def test_w9_processes_survive_or_name_the_rank_and_leave_nothing(run: Run, fault: str, repeat: int) -> None:
    seed = repeat + list(FAULTS).index(fault)  # not the same rank for all
    outcome = observe(fault, run.backend, seed, lambda arguments: run.command(str(WORKER), *arguments, n=4))
    assert outcome.how == FAULTS[fault], outcome.why
