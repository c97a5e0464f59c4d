"""Text in columns."""

from __future__ import annotations

from collections.abc import Sequence


def columns(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return lines with aligned columns. The first line is `#` and `heads`.

    >>> print(columns(("a", "word"), [("1", "one"), ("100", "hundred")]))
    # a    word
      1    one
      100  hundred
    """
    table = [heads, *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(heads))]

    def line(row: Sequence[str]) -> str:
        return "  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip()

    return "\n".join(["# " + line(heads), *("  " + line(row) for row in rows)])
