"""What the processor of this machine runs."""

from __future__ import annotations

from pathlib import Path


def best_kernels() -> str:
    """Return which kernels of the core are the best that it runs, by what Linux says of it."""
    flags = set(Path("/proc/cpuinfo").read_text().split())
    if {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= flags:
        return "avx512"
    return "avx2" if "avx2" in flags else "baseline"
