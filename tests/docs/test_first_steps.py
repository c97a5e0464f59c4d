"""docs/first-steps.md typed from top to bottom: its programs are saved under their names, its commands are run.

README.md shows an error of one of them.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.nursed import stub

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "first-steps.md"
BLOCK = re.compile(r"(?:as `(?P<name>\w+\.py)`:\n\n)?^```(?P<kind>python|console)\n(?P<text>.*?)^```$", re.M | re.S)


def steps() -> list[re.Match[str]]:
    return list(BLOCK.finditer(PAGE.read_text(encoding="utf-8")))


def test_t4_first_steps_do_what_the_page_says(nursery: str, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    [error] = re.findall(r"^```text\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    outputs = []
    for step in steps():
        if step["kind"] == "python":
            assert step["name"], f"a program without a name: {step['text'][:60]}"
            (tmp_path / step["name"]).write_text(step["text"])
            continue
        command, *expected = step["text"].splitlines()
        ended = _run(nursery, shlex.split(command.removeprefix("$ ")), tmp_path)
        for line in expected:
            pattern = ".*".join(map(re.escape, line.split("…")))
            assert re.search(f"^{pattern}$", ended.stdout, re.MULTILINE), f"{command}: {line}\n{ended.stdout}"
        assert (ended.returncode == 0) == ("Error: " not in step["text"]), ended.stdout
        outputs.append(ended.stdout.replace(f"{tmp_path}/", ""))
    assert len(outputs) == 4
    assert " ".join(error.split()) in outputs[1], outputs[1]


def _run(nursery: str, words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    assert words[0] == "aiodist"
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    [program] = [number for number, word in enumerate(words) if word.endswith(".py")]
    words[program:] = stub(nursery, *words[program:])
    return subprocess.run(
        [sys.executable, "-m", "aiodist.cli", *words[1:]],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
        check=False,
    )
