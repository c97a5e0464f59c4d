"""Figures, their targets, and the table of both."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from aiodist.env import variables

__all__ = ["Verdict", "terminal", "verdict_table"]


@dataclass(frozen=True)
class Verdict:
    """A figure and its target, an upper bound by default; `at_least` makes it a lower one."""

    what: str
    value: float
    unit: str
    target: float | None = None
    at_least: bool = False
    why: str = ""
    """The reason for a missing value, which is NaN."""

    @property
    def reached(self) -> bool:
        """True if the target is reached, or there is none."""
        if self.target is None:
            return not self.why
        return self.value >= self.target if self.at_least else self.value <= self.target

    @property
    def bound(self) -> str:
        """The target, as text."""
        return "" if self.target is None else f"{'>=' if self.at_least else '<='} {self.target:g}"


def verdict_table(verdicts: Sequence[Verdict]) -> Table:
    """Return each figure with its target."""
    result = Table(title="targets", title_justify="left")
    for name in ("what", "here", "target", "reached"):
        result.add_column(name, justify="left" if name == "what" else "right")
    for verdict in verdicts:
        here = "" if verdict.why else f"{verdict.value:.3g} {verdict.unit}"
        reached = verdict.why or ("" if verdict.target is None else "yes" if verdict.reached else "NO")
        result.add_row(verdict.what, here, verdict.bound, reached, style=None if verdict.reached else "red")
    return result


def terminal() -> tuple[int, bool]:
    """Return the width of printed tables, and whether they have colours."""
    colour = sys.stdout.isatty() and "NO_COLOR" not in variables()
    return max(100, shutil.get_terminal_size((120, 40)).columns), colour
