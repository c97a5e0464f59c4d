"""The instruction sets of this machine's processor."""

from __future__ import annotations

from pathlib import Path


def best_kernels() -> str:
    """Return the best kernels of the core that the processor runs, according to Linux."""
    flags = set(Path("/proc/cpuinfo").read_text().split())
    if {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= flags:
        return "avx512"
    return "avx2" if "avx2" in flags else "baseline"
