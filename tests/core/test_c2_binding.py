"""The module `aiodist._core`, as it was built."""

from __future__ import annotations

import aiodist._core as core
from tests.support.processor import best_kernels


def test_c2_kernels_are_the_best_that_the_processor_runs() -> None:
    assert core.kernels() == best_kernels()
