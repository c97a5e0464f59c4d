"""What a figure is to reach, and whether it does; and how it is printed."""

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
    """One line of the table: `reached` is `value` against `target`, at most or at least."""

    what: str
    value: float
    unit: str
    target: float
    at_least: bool = False

    @property
    def reached(self) -> bool:
        """The target is reached."""
        return self.value >= self.target if self.at_least else self.value <= self.target


def verdict_table(verdicts: Sequence[Verdict]) -> Table:
    """Return each figure beside its target."""
    result = Table(title="speeds to reach", title_justify="left")
    for name in ("what", "here", "target", "reached"):
        result.add_column(name, justify="left" if name == "what" else "right")
    for verdict in verdicts:
        bound = f"{'>=' if verdict.at_least else '<='} {verdict.target:g}"
        reached = "yes" if verdict.reached else "NO"
        here = f"{verdict.value:.3g} {verdict.unit}"
        result.add_row(verdict.what, here, bound, reached, style=None if verdict.reached else "red")
    return result


def terminal() -> tuple[int, bool]:
    """Return the width of tables that are printed, and whether they have colours."""
    colour = sys.stdout.isatty() and "NO_COLOR" not in variables()
    return max(100, shutil.get_terminal_size((120, 40)).columns), colour
