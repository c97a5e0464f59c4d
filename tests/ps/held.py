"""The held requests of a machine."""

from __future__ import annotations

from aiodist.ps.machines import Machine, Pull, Push

__all__ = ["waiting"]


def waiting(machine: Machine) -> tuple[tuple[Push, ...], tuple[Pull, ...]]:
    """Return the pushes and the pulls that a machine holds."""
    pushes = tuple(push for line in machine.held.values() for push in line)
    return pushes, tuple(pull for pull, _ in machine.reads.values())
