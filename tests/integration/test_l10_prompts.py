"""`aiodist.open()` where there is no block to leave: `python -m asyncio`, and the cells of a notebook."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.drawn(1)

ROOT = Path(__file__).resolve().parents[2]
WARNING = "the world that aiodist.open() opened here was never closed"
RANKS = pytest.mark.parametrize("size", [1, 2])

TYPED = """\
import torch, aiodist
coll = await aiodist.open()
print("sum", await coll.allreduce(1))
handle = coll.allreduce(torch.ones(1 << 20), op="mean")
print("mean", (await handle).sum().item())
"""
CLOSED = """\
await coll.aclose()
again = await aiodist.open()
print("again", await again.allreduce(1))
await again.aclose()
"""


def environ(folder: Path, rank: int, size: int) -> dict[str, str]:
    """Return the variables of one of `size` processes that are started apart."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    base = {"PYTHONPATH": path, "IPYTHONDIR": str(folder), "PYTHONUNBUFFERED": "1"}
    if size == 1:
        return base
    place = {"AIODIST_RANK": str(rank), "AIODIST_SIZE": str(size), "AIODIST_TOKEN": "it"}
    return {**base, **place, "AIODIST_RENDEZVOUS": f"file://{folder}/meet"}


def prompts(folder: Path, size: int, text: str, *program: str) -> list[subprocess.CompletedProcess[str]]:
    """Type `text` at a prompt of each rank, that of asyncio or of a program."""
    command = [sys.executable, *(program or ("-m", "asyncio"))]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    started = [
        subprocess.Popen(command, text=True, env={**os.environ, **environ(folder, rank, size)}, cwd=folder, **pipes)
        for rank in range(size)
    ]
    try:
        for process in started:
            assert process.stdin is not None
            process.stdin.write(text)
            process.stdin.close()
            process.stdin = None
        ended = _all_ended(started)
    finally:
        for process in started:
            process.kill()
    return [
        subprocess.CompletedProcess(command, process.returncode, *texts)
        for process, texts in zip(started, ended, strict=True)
    ]


def _all_ended(started: list[subprocess.Popen[str]]) -> list[tuple[str, str]]:
    """Return what each wrote: of one that fails alone the others' texts tell, too."""
    try:
        return [process.communicate(timeout=170) for process in started]
    finally:
        for process in started:
            process.kill()
            process.communicate()


@pytest.mark.thorough
@RANKS
@pytest.mark.timeout(180)
def test_l10_at_a_prompt(tmp_path: Path, size: int) -> None:
    for done in prompts(tmp_path, size, TYPED + CLOSED):
        assert done.returncode == 0, done
        assert f"sum {size}\n" in done.stdout, done
        assert "mean 1048576.0\n" in done.stdout
        assert f"again {size}\n" in done.stdout
        assert "Error" not in done.stderr, done
        assert "Warning" not in done.stderr, done


@pytest.mark.thorough
@RANKS
@pytest.mark.timeout(180)
def test_l10_a_prompt_that_is_left_without_aclose(tmp_path: Path, size: int) -> None:
    for done in prompts(tmp_path, size, TYPED):
        assert done.returncode == 0, done
        assert f"sum {size}\n" in done.stdout
        assert done.stderr.count(WARNING) == 1, done
        assert "Error" not in done.stderr, done


@pytest.mark.thorough
@pytest.mark.timeout(180)
def test_l10_a_prompt_where_something_raises_goes_on(tmp_path: Path) -> None:
    wrong = "await coll.allreduce('text')\nprint('then', await coll.allreduce(3))\n"
    (done,) = prompts(tmp_path, 1, TYPED + wrong + CLOSED)
    assert "TypeError" in done.stderr
    assert "then 3\n" in done.stdout
    assert "again 1\n" in done.stdout
    assert WARNING not in done.stderr


@RANKS
@pytest.mark.timeout(180)
def test_l10_in_the_cells_of_notebooks(tmp_path: Path, size: int) -> None:
    cells = [*TYPED.splitlines(keepends=True), *CLOSED.splitlines(keepends=True)]
    for text in notebooks(tmp_path, size, cells):
        assert text.splitlines() == [f"sum {size}", "mean 1048576.0", f"again {size}"]


@RANKS
@pytest.mark.timeout(180)
def test_t5_start_in_the_cells_of_notebooks(tmp_path: Path, size: int) -> None:
    """A block in one cell, and one that is entered in a cell and left in another."""
    cells = [
        "import aiodist, torch",
        "with aiodist.start() as coll:\n    print('sum', coll.allreduce(1).wait())",
        "block = aiodist.start(); coll = block.__enter__(); handle = coll.allreduce(torch.ones(1 << 18))",
        "print('then', handle.wait().sum().item())",
        "print('closed', block.__exit__(None, None, None))",
    ]
    for text in notebooks(tmp_path, size, cells):
        assert text.splitlines() == [f"sum {size}", f"then {size * float(1 << 18)}", "closed False"]


@pytest.mark.thorough
@RANKS
@pytest.mark.timeout(180)
def test_t5_start_in_the_debugger(tmp_path: Path, size: int) -> None:
    """pdb stops inside the block: commands typed there communicate, and the program continues."""
    program = tmp_path / "debugged.py"
    program.write_text(DEBUGGED)
    for done in prompts(tmp_path, size, "p t.tolist()\np coll.allreduce(2.0).wait()\nn\nc\n", str(program)):
        assert (done.returncode, done.stderr) == (0, ""), done
        assert f"[{size}.0, {size}.0]" in done.stdout, done
        assert f"(Pdb) {2.0 * size}\n" in done.stdout, done
        assert f"after {3.0 * size}\n" in done.stdout, done


DEBUGGED = """
import aiodist, torch
with aiodist.start() as coll:
    t = coll.allreduce(torch.ones(2)).wait()
    breakpoint()
    value = coll.allreduce(3.0).wait()
    print("after", value)
"""


def notebooks(folder: Path, size: int, cells: list[str]) -> list[str]:
    """Run `cells` in a notebook of each rank; return what each printed."""
    program = folder / "notebook.py"
    program.write_text(NOTEBOOK)
    started = [
        subprocess.Popen(
            [sys.executable, str(program), *cells],
            env={**os.environ, **environ(folder, rank, size)},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    ended = _all_ended(started)
    assert [process.returncode for process in started] == [0] * size, ended
    return [text for text, _ in ended]


NOTEBOOK = """
import os, sys
import jupyter_client, nbclient, nbformat

cells = [
    {"cell_type": "code", "id": str(i), "source": text, "metadata": {}, "outputs": [], "execution_count": None}
    for i, text in enumerate(sys.argv[1:])
]
notebook = nbformat.from_dict({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": cells})
# By sockets of this folder: ports that are found to be free may be another kernel's when this one takes them.
kernel = jupyter_client.AsyncKernelManager(kernel_name="python3", transport="ipc", ip=f"kernel-{os.getpid()}")
nbclient.NotebookClient(notebook, km=kernel, timeout=None, startup_timeout=150, iopub_timeout=150).execute()
for cell in notebook.cells:
    for output in cell.outputs:
        print(output.get("text") or output.get("data", {}).get("text/plain"), end="")
"""
