"""Collectives of the ranks of a host, in C: the binding of core/."""

from typing import Literal

def kernels() -> Literal["baseline", "avx2", "avx512"]:
    """Return which kernels reduce on this processor."""
