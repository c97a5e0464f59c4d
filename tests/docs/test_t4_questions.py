"""docs/questions.md: every text that it quotes is what aiodist says, and each has the program that provokes it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.nursed import stub

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "questions.md"
QUOTED = re.compile(r"^> `(.*)`$", re.MULTILINE)
HEAD = "import asyncio, os, signal, warnings, torch, aiodist\nt = torch.ones(4)\n"
ONE = """
async def main():
    async with aiodist.init() as coll:
        {body}
    {after}
try:
    aiodist.run(main)
except Exception as error:
    print(f"{{type(error).__name__}}: {{error}}", flush=True)
"""
BOTH = """
async def main():
    async with aiodist.init() as coll:
        {body}
        await coll.barrier()
aiodist.run(main)
"""
ALONE = {
    "BufferInFlight": "h = coll.recv(t, src=0); coll.send(t, 0)",
    "RuntimeError: communicator": "await asyncio.to_thread(coll.allreduce, t)",
    "ValueError": "await coll.allreduce(torch.ones(4, 4).t())",
    "AttributeError": "aiodist.init().allreduce(t)",
    "TypeError: mean": "await coll.allreduce(torch.ones(3, dtype=torch.int32), op='mean')",
    "TypeError: t holds": "await coll.allreduce(torch.ones(3, dtype=torch.uint16))",
    "TypeError: DataParallel": "aiodist.nn.DataParallel(torch.nn.Linear(4, 1), coll)",
    "RuntimeError: recv": "await asyncio.to_thread(asyncio.run, asyncio.wait_for(coll.recv(t, src=0), 1))",
    "RuntimeWarning": "coll.allreduce(t); await asyncio.sleep(0.5)",
    "ResourceWarning": "warnings.simplefilter('default', ResourceWarning); await coll.dup()",
    "RuntimeError: run": "aiodist.run(main)",
    "RuntimeError: wait": "coll.allreduce(t).wait()",
    "InvalidStateError": "coll.recv(torch.ones(4), src=0).result()",
    "RuntimeError: parameter": "(await aiodist.nn.DataParallel.create(torch.nn.Linear(4, 1), coll))(t).backward()",
}
AFTER = {"CommunicatorClosed": "await coll.allreduce(t)"}
TWO = {
    "MismatchError: ranks": "await coll.allreduce(t, op='sum' if coll.rank else 'max')",
    "MismatchError: rank 1": "coll.rank or await coll.send(t[:3], dst=1, tag=7)",
    "OperationTimeout": "await asyncio.sleep(3 * coll.rank); await coll.allreduce(t, timeout=1)",
    "DeadlockError": "await coll.recv(t, src=1 - coll.rank)",
    "RemoteError": "if coll.rank: raise ValueError('broken')",
    "PeerLost": "coll.rank and os.kill(os.getpid(), signal.SIGKILL)",
}


def quoted() -> list[str]:
    return QUOTED.findall(PAGE.read_text(encoding="utf-8"))


def said(nursery: str, folder: Path, program: str, *start: str) -> str:
    (folder / "program.py").write_text(HEAD + program)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    ended = subprocess.run(
        [sys.executable, *start, *stub(nursery, "program.py")],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "NURSERY_ENDS": "soon"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
    return ended.stdout


def is_said(text: str, output: str) -> bool:
    return re.search(".*".join(map(re.escape, text.split("…"))), output) is not None


def test_t4_each_question_has_its_program() -> None:
    starts = [*ALONE, *TWO, *AFTER]
    assert len(starts) == len(quoted())
    assert all(sum(text.startswith(start) for start in starts) == 1 for text in quoted())


def test_t4_one_rank_says_what_the_page_quotes(nursery: str, tmp_path: Path) -> None:
    programs = [ONE.format(body=body, after="") for body in ALONE.values()]
    programs += [ONE.format(body="pass", after=after) for after in AFTER.values()]
    output = said(nursery, tmp_path, "".join(programs))
    assert [text for text in quoted() if not text.startswith(tuple(TWO)) and not is_said(text, output)] == [], output


@pytest.mark.thorough
@pytest.mark.parametrize("start", TWO)
def test_t4_two_ranks_say_what_the_page_quotes(nursery: str, start: str, tmp_path: Path) -> None:
    [text] = [text for text in quoted() if text.startswith(start)]
    output = said(nursery, tmp_path, BOTH.format(body=TWO[start]), "-m", "aiodist.cli", "run", "-n", "2")
    assert is_said(text, output), output
