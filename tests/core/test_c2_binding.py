"""The module `aiodist._core`, as it was built."""

from __future__ import annotations

from pathlib import Path

import aiodist._core as core


def test_c2_kernels_are_the_best_that_the_processor_runs() -> None:
    flags = {word for line in Path("/proc/cpuinfo").read_text().splitlines() for word in line.split()}
    wide = {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= flags
    assert core.kernels() == ("avx512" if wide else "avx2" if {"avx2", "f16c"} <= flags else "baseline")
