"""docs/debug.md, docs/handles.md: their outputs are those of the programs there, or of the programs here."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from textwrap import indent

import pytest

from tests.support.environ import python_path
from tests.support.nursed import stub

ROOT = Path(__file__).resolve().parents[2]


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


[SAVES] = blocks("debug.md", "python")[:1]
PROFILED = blocks("debug.md", "py")[-1]
DEADLOCK, LATE, UNLESS, TABLE, BLOCKED = blocks("debug.md", "text")
OVERLAPS, STOPPED = blocks("handles.md", "python")
MESSAGES, POLLED = blocks("handles.md", "py")
COMPUTED, STATES, SENT, GOT, TIMEOUT = blocks("handles.md", "text")
TRAIN = """import asyncio, time, torch, aiodist

def load(seconds):
    time.sleep(seconds)

async def main():
    async with aiodist.init(report_lag_over=0.1) as coll:
        for seconds in (3, 9) if coll.rank else ():
            load(seconds); await asyncio.sleep(0)
        await coll.allreduce(torch.ones(3))

aiodist.run(main)
"""
UNLIKE = """import asyncio, os, torch, aiodist

async def beat():
    for _ in range(12):
        await asyncio.sleep(1)
    os._exit(0)

async def main():
    async with aiodist.init() as coll:
        t = torch.ones(4)
        beating = asyncio.create_task(beat())
        await coll.allreduce(t)
        if coll.rank == 0:
            await coll.recv(t, src=1)
        else:
            await coll.allreduce(t)

aiodist.run(main)
"""
STEPS = """import torch, aiodist

async def main():
    async with aiodist.init() as coll:
        net = await aiodist.nn.DataParallel.create(torch.nn.Linear(4, 1), coll)
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        x = torch.ones(8, 4)
        def loss():
            return net(x).sum()
{}
aiodist.run(main)
"""
LOST = """import asyncio, signal, torch, aiodist

def stuck():
    signal.pause()

async def late():
    await asyncio.sleep(90)

async def main():
    async with aiodist.init() as coll:
        await coll.barrier()
        if coll.rank == 1:
            print("ready", flush=True); await late()
        if coll.rank == 2:
            print("ready", flush=True); stuck()
        await coll.broadcast(torch.ones(4))

aiodist.run(main)
"""


def started(nursery: str, folder: Path, name: str, text: str, ranks: int) -> subprocess.Popen[str]:
    (folder / name).write_text(text)
    run = [sys.executable, "-m", "aiodist.cli", "run", "-n", str(ranks), "--mpi", "none", "--no-prefix"]
    return subprocess.Popen(
        [*run, *stub(nursery, name)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def printed(nursery: str, folder: Path, name: str, text: str) -> str:
    with started(nursery, folder, name, text, 2) as job:
        try:
            return timeless(job.communicate(timeout=60)[0].replace(f"{folder}/", ""))
        finally:
            job.kill()


def timeless(text: str) -> str:
    return re.sub(r"for [\d.]+ s\b", "for … s", text)


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("name", "program", "shown"),
    [
        ("train.py", SAVES, [DEADLOCK]),
        ("blocked.py", STOPPED, [TIMEOUT]),
        ("overlap.py", OVERLAPS, [COMPUTED]),
        ("messages.py", MESSAGES, [SENT]),
        ("poll.py", POLLED, [GOT]),
        pytest.param("train.py", TRAIN, [LATE, BLOCKED], marks=pytest.mark.thorough),
        pytest.param("train.py", UNLIKE, [UNLESS], marks=pytest.mark.thorough),
    ],
    ids=["deadlock", "timeout", "overlap", "messages", "polled", "late", "report"],
)
def test_t4_a_wait_is_told_as_the_page_shows(
    nursery: str, tmp_path: Path, name: str, program: str, shown: list[str]
) -> None:
    output = printed(nursery, tmp_path, name, program)
    assert [text for text in shown if " ".join(timeless(text).split()) not in " ".join(output.split())] == [], output


def test_t4_a_profiler_sees_the_steps(nursery: str, tmp_path: Path) -> None:
    assert "aten::addmm" in printed(nursery, tmp_path, "profiled.py", STEPS.format(indent(PROFILED, 8 * " ")))


@pytest.mark.thorough
def test_t4_inspect_shows_the_table_of_the_page(nursery: str, tmp_path: Path) -> None:
    with started(nursery, tmp_path, "prog.py", LOST, 3) as job:
        try:
            assert job.stdout is not None
            assert [job.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
            wanted, found = rows(TABLE), [["no job yet"]]
            for _ in range(40):
                told = subprocess.run(
                    [sys.executable, "-m", "aiodist.cli", "inspect", str(job.pid)],
                    env={**os.environ, "PYTHONPATH": python_path(), "COLUMNS": "400"},
                    capture_output=True,
                    text=True,
                    check=False,
                )
                found = rows(re.sub(rf"{tmp_path}/|\S*nursery\.py:\d+ in <module> > ", "", told.stdout))
                if [row[:3] + row[4:] for row in found] == wanted:  # the page leaves one column out
                    break
            assert [row[:3] + row[4:] for row in found] == wanted
        finally:
            job.send_signal(signal.SIGINT)
            job.send_signal(signal.SIGINT)
            job.communicate(timeout=20)


def rows(table: str) -> list[list[str]]:
    """Return the cells of each row below the head, whose lines may be wrapped anywhere."""
    found = []
    for row in re.split(r"^├.*$", table.partition("┩")[2], flags=re.MULTILINE):
        lines = [line.strip("│").split("│") for line in row.splitlines() if line.startswith("│")]
        found.append([timeless(" ".join(" ".join(cell).split())) for cell in zip(*lines, strict=True)])
    return found
