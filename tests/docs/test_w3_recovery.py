"""docs/recovery.md: rank 2 of three is killed in the loop and in each program of its table; the others end well."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from aiodist.testing import kill_rank, run_ranks
from tests.docs import recovery_programs
from tests.docs.run_blocks import blocks
from tests.support.environ import python_path
from tests.support.nursed import stub

FILE = Path(__file__).parents[2] / "docs" / "recovery.md"
PROGRAMS = ("main", "by_hand", "pipelined", "locally", "shards", "by_engine", "on_each_once")


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """The names that the blocks before the tests define."""
    found: dict[str, Any] = {"__name__": "recovery"}
    for _, block in blocks(FILE.read_text().partition("## Test recovery")[0], "python"):
        exec(block, found)
    return found


def program(names: dict[str, Any], name: str, folder: Path) -> Any:
    """Return the loop of the page, or one that its table describes."""
    match name:
        case "main":
            return names["main"]
        case "by_hand":
            return partial(recovery_programs.train_by_hand, names["agree"], 100)
        case "pipelined" | "locally":
            return partial(getattr(recovery_programs, f"train_{name}"), 30)
        case "shards":
            return partial(recovery_programs.train_shards, 30, str(folder))
        case _:
            return getattr(recovery_programs, f"train_{name}")


@pytest.mark.drawn(2)
@pytest.mark.parametrize("turns", [150, 600])
@pytest.mark.parametrize("name", PROGRAMS)
def test_w3_a_program_of_the_page_goes_on(names: dict[str, Any], name: str, turns: int, tmp_path: Path) -> None:
    begin = program(names, name, tmp_path)
    gone = False

    async def mortal(number: int) -> Any:
        nonlocal gone
        task = asyncio.create_task(begin())
        if number == 2:
            for _ in range(turns):
                await asyncio.sleep(0)
            gone = not task.done()
            if gone:
                kill_rank()
        return await task

    one, two, three = run_ranks(3, mortal, elastic=(1, 3))
    assert one is not None
    assert one == two
    assert gone is (three is None)
    expected = {"locally": 30, "shards": 30, "on_each_once": 1000}
    if gone and name in expected:
        assert one == expected[name]


def test_w3_the_table_shows_what_the_programs_do() -> None:
    [table] = re.findall(r"^\| you train with.*?\n\n", FILE.read_text(), re.MULTILINE | re.DOTALL)
    source = Path(recovery_programs.__file__).read_text()
    for call in ("engine.rebind(coll)", "queue.rebind(coll, net.steps_done)", "queue.agree(net.steps_done)"):
        assert call in table
        assert call in source
    for call in ("opt.flush()", "local.flush()", "local.steps", "opt.lost"):
        assert f"{call}" in table
        assert call in source


@pytest.mark.thorough
def test_w3_the_loop_continues_as_a_job(nursery: str, tmp_path: Path) -> None:
    text = FILE.read_text()
    [loop] = [block for _, block in blocks(text, "python") if block.startswith("# elastic.py")]
    dying = "                if coll.size == 3 and coll.rank == 1 and net.steps_done == 10:\n"
    dying += "                    __import__('os').kill(__import__('os').getpid(), 9)\n"
    step = "                await net.step("
    assert loop.count(step) == 1
    (tmp_path / "elastic.py").write_text(f"{loop.replace(step, dying + step)}\n\naiodist.run(main)\n")
    ended = subprocess.run(
        [sys.executable, "-m", "aiodist.cli", "run", "-n", "3", "--elastic", "2:4", *stub(nursery, "elastic.py")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    [shown] = [block for _, block in blocks(text, "text") if "SIGKILL" in block]
    assert (ended.returncode, ended.stderr) == (0, shown), ended.stdout


def test_w3_what_the_page_prints_of_its_tests(tmp_path: Path) -> None:
    """The figures under the blocks about `run_ranks` and `Faults` are those that the blocks print."""
    text = FILE.read_text()
    program = "\n".join(block.partition('if __name__ == "__main__"')[0] for _, block in blocks(text, "python"))
    (tmp_path / "page.py").write_text(program)
    ended = subprocess.run(
        [sys.executable, "page.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    shown = [block for _, block in blocks(text.partition("## Test recovery")[2], "text")]
    assert (ended.stdout.splitlines()[: len("".join(shown).splitlines())], ended.stderr) == (
        "".join(shown).splitlines(),
        "",
    )
