"""docs/migrate.md: its diffs make the second script of the first, and both train the same weights."""

from __future__ import annotations

import contextlib
import functools
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
DOCUMENT = ROOT / "docs" / "migrate.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)


def patched(text: str, diff: str) -> str:
    """Apply a diff whose hunks, separated by `@@`, say no line numbers; raise if one fits nowhere or in two places."""
    for hunk in diff.split("@@\n"):
        lines = hunk.splitlines()
        before = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "+")
        after = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "-")
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    return text


def test_n3_as_many_lines_change_as_the_document_says() -> None:
    *rewrite, _ = blocks("diff")
    assert len(rewrite) == len(re.findall(r"^\*\*\d\. ", DOCUMENT.read_text(), re.MULTILINE)) == 4
    lines = "".join(rewrite).splitlines()
    added, removed = ([line for line in lines if line[:1] == sign and line.strip() != sign] for sign in "+-")
    assert (len(added), len(removed)) == (10, 15)


def test_n3_a_diff_that_does_not_fit_is_noticed() -> None:
    diff = " same\n-old\n+new\n"
    assert patched("same\nold\n", diff) == "same\nnew\n"
    for text in ("same\nother\n", "same\nold\nsame\nold\n"):
        with pytest.raises(AssertionError):
            patched(text, diff)


def test_n3_both_scripts_train_the_same_weights(tmp_path: Path) -> None:
    *rewrite, free = blocks("diff")
    old = blocks("py")[0]
    ours = functools.reduce(patched, rewrite, old)
    scripts = {"ddp": old, "ours": ours, "free": patched(ours, free)}
    for name, script in scripts.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text(script)
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in scripts]
        ports = [str(one.getsockname()[1]) for one in sockets]
    ranks = [start(rank, tmp_path, *ports) for rank in range(2)]
    try:
        printed = [rank.communicate(timeout=60)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], printed
    assert printed[1] == ""
    losses = [float(loss) for loss in re.findall(r"^loss (\d\.\d{4})$", printed[0], re.MULTILINE)]
    assert losses == pytest.approx([float(blocks("text")[0].removeprefix("loss "))] * 3, abs=1e-3)
    first, *others = (torch.load(tmp_path / name / "digits.pt", weights_only=True) for name in scripts)
    for weights in others:
        torch.testing.assert_close(weights, first, rtol=1e-4, atol=1e-5)


BOTH = """
import os, runpy, sys
for name, port in zip(["ddp", "ours", "free"], sys.argv[1:], strict=True):
    os.environ["MASTER_PORT"] = port
    os.chdir(os.path.join(os.environ["FOLDER"], name))
    runpy.run_path("train.py", run_name="__main__")
"""


def start(rank: int, folder: Path, *ports: str) -> subprocess.Popen[str]:
    """Start a rank as torchrun does, without the seconds that it takes; it runs the scripts one after the other."""
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
