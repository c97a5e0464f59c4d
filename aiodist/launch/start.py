"""`Start`: the program of one rank, as the launcher sends it to the guard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Stdin = Literal["null", "same", "sent"]
"""Standard input of a rank: none, that of its guard, or the input that the launcher sends."""


@dataclass(frozen=True)
class Start:
    """Arguments, variables and folder of a rank."""

    argv: list[str]
    environ: dict[str, str]
    """Variables in addition to the inherited ones."""
    stdin: Stdin = "null"
    folder: str | None = None
    """Working directory, or None for that of the guard."""
