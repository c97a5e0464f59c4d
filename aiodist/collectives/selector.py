"""Which implementation runs an operation of a given size, unless the call says."""

from __future__ import annotations

from collections.abc import Container

__all__ = ["Selector"]


class Selector:
    """The choice by operation and size."""

    def __init__(self, available: Container[str], *, several_hosts: bool) -> None:
        self._available = available
        self._several_hosts = several_hosts

    def choose(self, operation: str, nbytes: int) -> str:
        """Return the name of what runs `operation` on `nbytes`."""
        for name in self._wanted(operation, nbytes):
            if name in self._available:
                return name
        return "direct"

    def _wanted(self, operation: str, nbytes: int) -> tuple[str, ...]:
        if self._several_hosts and operation in ("allreduce", "broadcast", "reduce") and nbytes >= 1 << 18:
            return ("hierarchical",)
        if nbytes >= 1 << 18:
            return ("shm", "mpi", "gloo")
        return ("mpi", "shm", "gloo")
