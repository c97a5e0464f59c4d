"""docs/debugger.md: the session of the page, typed in a terminal, prints what the page shows."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from tests.support.environ import python_path
from tests.support.nursed import stub
from tests.support.terminals import in_terminal

PAGE = Path(__file__).resolve().parents[2] / "docs" / "debugger.md"


def test_w12_the_session_of_the_page(nursery: str, tmp_path: Path) -> None:
    text = PAGE.read_text(encoding="utf-8")
    [program] = re.findall(r"^```py\n# train\.py\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    [session] = re.findall(r"^```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "train.py").write_text(f"# train.py\n{program}")
    command = ["-m", "aiodist.cli", "run", "-n", "2", "--mpi", "none", *stub(nursery, tmp_path / "train.py")]
    with in_terminal([sys.executable, *command], tmp_path, {**os.environ, "PYTHONPATH": python_path()}) as terminal:
        for line in re.findall(r"^\(Pdb\) (.*)$", session, re.MULTILINE):
            terminal.until("(Pdb) ")
            terminal.type(f"{line}\n")
        assert terminal.finish() == 0, terminal.text
    assert terminal.text.replace(f"{tmp_path}/", "") == session
