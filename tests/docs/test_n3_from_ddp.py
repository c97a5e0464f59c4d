"""docs/from-ddp.md: its diff makes the second script of the first, and both train the same weights."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "from-ddp.md"
HUNK = re.compile(r"@@ -(\d+),(\d+) \+(\d+),(\d+) @@")


def block(language: str) -> str:
    """Return the first one of a language: the page begins with both scripts."""
    found = re.search(rf"^```{language}\n(.*?)^```$", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def patched(old: str, diff: str) -> str:
    """Apply a unified diff of one hunk that shows the whole file; raise where it does not fit."""
    header, hunk = diff.splitlines()[:2], diff.splitlines()[2:]
    assert [line[:4] for line in header] == ["--- ", "+++ "]
    match = HUNK.fullmatch(hunk[0])
    assert match is not None
    before = [line[1:] for line in hunk[1:] if line[:1] != "+"]
    after = [line[1:] for line in hunk[1:] if line[:1] != "-"]
    assert [int(number) for number in match.groups()] == [1, len(before), 1, len(after)]
    assert before == old.splitlines()
    return "\n".join(after) + "\n"


def test_n3_as_many_lines_change_as_the_document_says() -> None:
    lines = block("diff").splitlines()[3:]
    added, removed = ([line for line in lines if line[:1] == sign and line.strip() != sign] for sign in "+-")
    assert (len(added), len(removed)) == (10, 15)
    assert "ten lines in place of fifteen" in DOCUMENT.read_text()


def test_n3_a_diff_that_does_not_fit_is_noticed() -> None:
    diff = "--- a\n+++ a\n@@ -1,2 +1,2 @@\n same\n-old\n+new\n"
    assert patched("same\nold\n", diff) == "same\nnew\n"
    with pytest.raises(AssertionError):
        patched("same\nother\n", diff)


def test_n3_both_scripts_train_the_same_weights(tmp_path: Path) -> None:
    old = block("py")
    scripts = {"ddp": old, "ours": patched(old, block("diff"))}
    for name, script in scripts.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text(script)
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        ports = [str(free.getsockname()[1]) for free in (one, other)]
    ranks = [start(rank, tmp_path, *ports) for rank in range(2)]
    try:
        printed = [rank.communicate(timeout=60)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], printed
    assert printed[1] == ""
    first, second = (float(loss) for loss in re.findall(r"^loss (\d\.\d{4})$", printed[0], re.MULTILINE))
    assert first == pytest.approx(second, abs=1e-3)
    assert 0 < first < 0.5  # an untrained one has 2.3
    weights = [torch.load(tmp_path / name / "digits.pt", weights_only=True) for name in scripts]
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-5)


BOTH = """
import os, runpy, sys
for name, port in zip(["ddp", "ours"], sys.argv[1:], strict=True):
    os.environ["MASTER_PORT"] = port
    os.chdir(os.path.join(os.environ["FOLDER"], name))
    runpy.run_path("train.py", run_name="__main__")
"""


def start(rank: int, folder: Path, *ports: str) -> subprocess.Popen[str]:
    """Start a rank as torchrun does, without the seconds that it takes; it runs one script after the other."""
    variables = {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "FOLDER": str(folder),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
    }
    return subprocess.Popen(
        [sys.executable, "-c", BOTH, *ports],
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
