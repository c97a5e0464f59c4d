"""W9: each fault once under each launcher: who survives, who is named, and that nothing is left behind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchmarks.faults import FAULTS, WORKER, observe

if TYPE_CHECKING:
    from tests.lifecycle.conftest import Run


@pytest.mark.parametrize("fault", FAULTS)
def test_w9_processes_survive_or_name_the_rank_and_leave_nothing(run: Run, fault: str, repeat: int) -> None:
    seed = repeat + list(FAULTS).index(fault)  # not the same rank for all
    outcome = observe(fault, run.backend, seed, lambda arguments: run.command(str(WORKER), *arguments, n=4))
    assert outcome.how == FAULTS[fault], outcome.why
