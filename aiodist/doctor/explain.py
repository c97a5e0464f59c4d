"""`aiodist explain`: the sections of docs/debug.md about one exception each, in the terminal, without a network.

A wheel has a copy of the page next to this file, which the build makes; a checkout has the page itself.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import TYPE_CHECKING

from aiodist.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

_SECTION = re.compile(r"^### (\w+)\n(.*?)(?=^#{1,3} |\Z)", re.MULTILINE | re.DOTALL)
"""A section of one exception: its heading is the name of the class."""
_LINK = re.compile(r"\[([^\]]+)\]\((?!\w+:)[^)]*\)")
"""A link to another page or section, which a terminal cannot open."""


def sections() -> dict[str, str]:
    """Return the Markdown of each section by the name of its exception."""
    copy = Path(__file__).with_name("debug.md")
    page = copy if copy.exists() else Path(__file__).resolve().parents[2] / "docs" / "debug.md"
    text = _LINK.sub(r"\1", page.read_text(encoding="utf-8"))
    return {name: section.strip() for name, section in _SECTION.findall(text)}


def explain(name: str | None, console: Console) -> None:
    """Print the section of an exception; without a name, list all names, each with its meaning."""
    from rich.markdown import Markdown
    from rich.table import Table

    known = sections()
    if name is None:
        table = Table.grid(padding=(0, 2))
        for title, text in known.items():
            first_sentence = re.split(r"(?<=\.)\s", " ".join(text.split()), maxsplit=1)[0]
            table.add_row(title.lower(), Markdown(first_sentence))
        console.print(table)
        return
    titles = {title.lower(): title for title in known}
    wanted = name.rpartition(".")[2].lower()  # a traceback has aiodist.errors.MismatchError
    if wanted not in titles:
        near = difflib.get_close_matches(wanted, titles, 1, cutoff=0.4)
        meant = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"there is no section {name!r}: {meant}`aiodist explain` lists all")
    console.print(Markdown(f"# {titles[wanted]}\n\n{known[titles[wanted]]}"))
