"""Handles on IPython's loop: cells of a notebook with `await` at their top level."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

CELLS = """\
import contextlib, torch, aiodist
stack = contextlib.AsyncExitStack()
coll = await stack.enter_async_context(aiodist.init())  # stays open from cell to cell
---
(await coll.allreduce(torch.full((3,), 2.0))).tolist()
---
handle = coll.allreduce(torch.ones(1 << 20), op="mean")
---
(await handle).sum().item()
---
await stack.aclose()
async with aiodist.init() as again:
    print(await again.allreduce(7))
"""


@pytest.mark.timeout(60)
def test_h5_notebook_cells_await_handles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    cells: list[dict[str, Any]] = [
        {"cell_type": "code", "id": str(i), "source": text, "metadata": {}, "outputs": [], "execution_count": None}
        for i, text in enumerate(CELLS.split("---\n"))
    ]
    import nbclient
    import nbformat

    content = {"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": cells}
    notebook = nbformat.from_dict(content)  # type: ignore[no-untyped-call]
    nbclient.NotebookClient(notebook, timeout=40, kernel_name="python3").execute(cwd=str(tmp_path))
    assert [shown(cell.outputs) for cell in notebook.cells] == ["", "[2.0, 2.0, 2.0]", "", "1048576.0", "7\n"]


def shown(outputs: list[Any]) -> str:
    """Return what a cell prints and its result; everything on standard error too, where nothing is expected."""
    return "".join(out.data["text/plain"] if out.output_type == "execute_result" else out.text for out in outputs)
