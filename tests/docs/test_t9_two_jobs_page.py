"""T9: the two programs of docs/two-jobs.md print what the page shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.nursed import stub

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.thorough
@pytest.mark.timeout(120)
def test_t9_the_programs_of_the_page_print_what_it_shows(nursery: str, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "two-jobs.md").read_text(encoding="utf-8")
    for program in re.findall(r"^```py\n(# \w+\.py\n.*?)^```$", page, re.MULTILINE | re.DOTALL):
        (tmp_path / program.split()[1]).write_text(program, encoding="utf-8")
    commands = re.findall(r"^\$ aiodist run -n (\d) (\w+\.py)", page, re.MULTILINE)
    (shown,) = re.findall(r"^```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_RUNTIME_DIR": str(tmp_path), "NURSERY_ENDS": "soon"}
    jobs = [
        subprocess.Popen(
            [sys.executable, "-m", "aiodist.cli", "run", "-n", n, "--mpi", "none", *stub(nursery, tmp_path / program)],
            cwd=tmp_path,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for n, program in commands
    ]
    try:
        printed = [job.communicate(timeout=60)[0] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    assert [job.returncode for job in jobs] == [0, 0], printed
    assert sorted("".join(printed).splitlines()) == sorted(shown.splitlines())
