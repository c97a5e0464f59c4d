"""docs/quickstart.md and README.md: programs are saved under their names, commands are run, outputs compared."""

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
PAGE = ROOT / "docs" / "quickstart.md"
README = ROOT / "README.md"
BLOCK = re.compile(r"(?:as `(?P<name>\w+\.py)`:\n\n)?^```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.M | re.S)


def blocks(page: Path, *kinds: str) -> list[re.Match[str]]:
    return [block for block in BLOCK.finditer(page.read_text(encoding="utf-8")) if block["kind"] in kinds]


def test_t4_first_steps_do_what_the_page_says(nursery: str, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    outputs = []
    for step in blocks(PAGE, "python", "console"):
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
        outputs.append(ended.stdout)
    assert len(outputs) == 4


def test_t4_readme_programs_print_what_it_shows(nursery: str, tmp_path: Path) -> None:
    [mistake], [training] = blocks(README, "py"), blocks(README, "python")
    [error, learned, *_] = blocks(README, "console")
    (tmp_path / "mistake.py").write_text(mistake["text"])
    (tmp_path / "train.py").write_text(training["text"])
    failed = _told(_run(nursery, ["aiodist", "run", "-n", "2", "mistake.py"], tmp_path), tmp_path)
    assert _shown(error) in failed, failed
    assert "aiodist/c10d" not in failed  # folded
    trained = _run(nursery, ["aiodist", "run", "-n", "2", "train.py"], tmp_path)
    assert sorted(trained.stdout.splitlines()) == learned["text"].splitlines()[1:], trained.stdout


@pytest.mark.thorough
def test_t4_readme_shows_gloo_and_a_rank_that_is_late(nursery: str, tmp_path: Path) -> None:
    [mistake], [report] = blocks(README, "py"), blocks(README, "text")
    text = README.read_text(encoding="utf-8")
    [result] = re.findall(r"gloo prints\s`(.*?)` on both", text)
    [sleep] = re.findall(r"rank 1 first calls `(.*?)`", text)
    (tmp_path / "gloo.py").write_text(mistake["text"].replace('"aiodist"', '"gloo"'))
    agreed = _run(nursery, ["aiodist", "run", "-n", "2", "gloo.py"], tmp_path)
    assert sorted(agreed.stdout.splitlines()) == [f"[0] {result}", f"[1] {result}"], agreed.stdout
    (tmp_path / "mistake.py").write_text(
        mistake["text"].replace("dist.all_reduce(t, op=dist.ReduceOp.MAX)", f"{sleep}; dist.all_reduce(t)")
    )
    late = _told(_run(nursery, ["aiodist", "run", "-n", "2", "mistake.py"], tmp_path), tmp_path)
    assert " ".join(report["text"].split()) in late, late


def _shown(block: re.Match[str]) -> str:
    """Return the output that a block shows below its command, as one line, up to an omission."""
    return " ".join(block["text"].partition("\n")[2].partition("…")[0].split())


def _told(ended: subprocess.CompletedProcess[str], folder: Path) -> str:
    return " ".join(ended.stdout.replace(f"{folder}/", "").split())


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
