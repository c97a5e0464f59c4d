"""W11: `aiodist inspect` says of a running job who is late, who waits for whom, and where each rank is."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from torch.distributed.flight_recorder import fr_trace

from aiodist import Communicator, gather
from aiodist.machine import job_socket
from aiodist.watch import jobs, shown
from tests.support.blocking import blocked_until, rounds
from tests.support.nursed import stub

pytestmark = pytest.mark.timeout(100)

PROGRAM = """
import asyncio, signal, torch, aiodist

def stuck(coll):
    signal.pause()

async def late(coll):
    await asyncio.Event().wait()

async def main():
    async with aiodist.init(report_after=None) as coll:
        await coll.allreduce(torch.ones(3, 2))
        print("ready", flush=True)
        if coll.rank == 1 or coll.size == 1:
            await late(coll)
        if coll.rank == 2:
            stuck(coll)
        await coll.broadcast(torch.ones(4))

aiodist.run(main)
"""


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime folder of its own, for this process and those that it starts; a socket's path has to be short."""
    with tempfile.TemporaryDirectory() as name:
        monkeypatch.setenv("XDG_RUNTIME_DIR", name)
        yield Path(name)


@contextmanager
def running(folder: Path, ranks: int, nursery: str = "") -> Iterator[subprocess.Popen[str]]:
    """Start a job of a nursery, or one process, wait until all of its ranks are ready, and end it."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    run = ["-m", "aiodist.cli", "run", "-n", str(ranks), "--mpi", "none"]
    words = [sys.executable, *([*run, *stub(nursery, program)] if nursery else [str(program)])]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as job:
        try:
            assert job.stdout is not None
            seen: list[str] = []
            while sum("ready" in line for line in seen) < ranks:
                line = job.stdout.readline()
                assert line, seen
                seen.append(line)
            yield job
        finally:
            job.send_signal(signal.SIGINT)
            job.send_signal(signal.SIGINT)
            job.communicate(timeout=20)


def until(what: Callable[[], Any]) -> Any:
    """Return what is true at last."""
    found: Any = None

    def see() -> Any:
        nonlocal found
        found = what()
        return found

    assert blocked_until(see)
    return found


def aiodist(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "aiodist.cli", *words], capture_output=True, text=True, timeout=60, check=False
    )


def _line(text: str) -> str:
    return f"program.py:{PROGRAM.splitlines().index(text) + 1} in"


@pytest.mark.drawn(1)
@pytest.mark.parametrize("killed", ["rank 0", "the launcher"])
def test_w11_a_job_that_was_killed_leaves_no_socket(nursery: str, folder: Path, killed: str) -> None:
    with running(folder, 2, nursery) as job:
        told = until(lambda: jobs.look(None)["ranks"])
        os.kill(told[0]["pid"] if killed == "rank 0" else job.pid, signal.SIGKILL)
        job.wait(20)
        if killed == "the launcher":  # its guards end then
            until(lambda: not list(folder.rglob("*.sock")))
        assert not list(folder.rglob("*.sock"))


@pytest.mark.thorough
def test_w11_a_running_job_says_who_is_late(nursery: str, folder: Path) -> None:
    with running(folder, 3, nursery) as job:
        told = until(lambda: (t := jobs.look(None))["ranks"][0]["waits"] and t["ranks"][0]["waits"][0]["ranks"] and t)
        assert told["job"] == job.pid
        waiting, late, stuck = told["ranks"]
        (wait,) = waiting["waits"]
        assert wait["ranks"] == [1, 2]
        assert wait["what"].startswith("broadcast #1 issued at")
        assert shown.late(told["ranks"]) == {1: [0], 2: [0]}
        assert not late["waits"]
        assert shown.state(late) == "its loop answers"
        (stack,) = [stack for _, stack in late["tasks"]]
        assert [
            _line("            await late(coll)") in stack[0],
            _line("    await asyncio.Event().wait()") in stack[1],
        ] == [1, 1]
        assert shown.state(stuck) == "its loop does not answer"
        assert _line("    signal.pause()") in stuck["thread"][-1]

        table = aiodist("inspect", str(job.pid))
        assert table.returncode == 0, table.stderr
        assert "late for rank 0" in " ".join(table.stdout.split())
        as_json = json.loads(aiodist("inspect", "--json").stdout)
        assert [rank["rank"] for rank in as_json["ranks"]] == [0, 1, 2]
        refused = aiodist("inspect", "--json", "--live")
        assert (refused.returncode, refused.stderr) == (
            2,
            "aiodist: --json and --live: expected one of the two (see: aiodist explain configerror)\n",
        )
        refused = aiodist("inspect", "--flight-recorder", f"{folder}/program.py")
        assert refused.returncode == 2
        assert refused.stderr == f"aiodist: [Errno 17] File exists: '{folder}/program.py'\n"

        dumps = folder / "dumps"
        assert aiodist("inspect", "--flight-recorder", str(dumps)).returncode == 0
        read = subprocess.run(
            [sys.executable, "-m", fr_trace.__name__, str(dumps)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert read.returncode == 0, read.stderr
        said = read.stdout + read.stderr
        assert "missing ranks: {1, 2}" in said
        assert "gloo:broadcast" in said
    assert jobs.running() == []


@pytest.mark.thorough
def test_w11_a_process_alone_is_its_own_job_and_one_that_was_killed_leaves_nothing(folder: Path) -> None:
    with running(folder, 1) as job:
        assert jobs.running() == [job.pid]
        told = jobs.look(job.pid)
        assert [rank["pid"] for rank in told["ranks"]] == [job.pid]
        job.kill()
        job.wait()
        path = job_socket(job.pid)
        assert path.exists()
        assert jobs.running() == []
        assert not path.exists()
    refused = aiodist("inspect", str(job.pid))
    assert refused.returncode == 2
    assert "does not answer here" in refused.stderr
    assert "no job is running here" in aiodist("inspect").stderr


def test_w11_who_watches_a_job_is_told_of_its_end(
    nursery: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    look, looked = jobs.look, threading.Event()

    def looking(job: int | None) -> dict[str, Any]:
        told = look(job)
        looked.set()
        return told

    monkeypatch.setattr(jobs, "look", looking)
    options = {"as_json": False, "live": True, "flight_recorder": None}
    with running(folder, 2, nursery) as job:
        until(jobs.running)
        watching = threading.Thread(target=shown.show, args=(job.pid,), kwargs=options)
        watching.start()
        assert looked.wait(20)
    watching.join(20)
    assert not watching.is_alive()
    assert f"job {job.pid} has ended\n" in capsys.readouterr().out


def test_w11_a_folder_of_another_user_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(PermissionError, match="another user"):
        jobs.claim(1)


def _wait(*ranks: int) -> dict[str, Any]:
    return {"what": "barrier #3 issued at x.py:1 in f on 'world'", "seconds": 2.5, "ranks": list(ranks)}


def test_w11_a_rank_that_is_late_and_waits_says_both() -> None:
    here: dict[str, Any] = {"thread": [], "tasks": [], "communicators": {}}
    ranks: list[dict[str, Any]] = [
        {"rank": 0, "waits": [_wait(1)], **here},
        {"rank": 1, "waits": [_wait(2)], **here},
        {"rank": 2, "waits": [], "thread": [], "communicators": {}},
        {"rank": 3},
        {"rank": 4, "left": "killed by SIGKILL"},
    ]
    assert shown.late(ranks) == {1: [0], 2: [1]}
    console = Console(width=250, record=True, file=io.StringIO())
    console.print(shown.table({"job": 7, "ranks": ranks}))
    rows = console.export_text()
    assert "late for rank 0" in rows
    assert "waits for rank 2 for 2.5 s in barrier #3" in rows
    assert "its loop does not answer" in rows
    assert "does not answer: it is stopped, or native code holds the GIL" in rows
    assert "has left: killed by SIGKILL" in rows


def test_w11_a_narrow_terminal_loses_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [f"{tmp_path}/here.py:12345 in main", f"/else/{'long' * 30}/there.py:67890 in late"]
    ranks = [{"rank": 0, "thread": lines, "tasks": [["Task-1", lines]], "communicators": {}}]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(shown.table({"job": 7, "ranks": ranks}))
    where = "".join(line.split("│")[-2].strip() for line in console.export_text().splitlines() if "│" in line)
    assert "Task-1:here.py:12345" in where.replace(" ", "")
    assert "/there.py:67890" in where


def test_w11_the_dumps_are_one_a_rank(tmp_path: Path) -> None:
    shown.write_flight([{"rank": 0, "communicators": {}}, {"rank": 1}], tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["rank_0"]


@pytest.mark.skipif(sys.version_info < (3, 14), reason="asyncio's own tools came with Python 3.14")
@pytest.mark.ranks(2)
async def test_w11_asyncios_own_tools_follow_handles(coll: Communicator) -> None:
    """`dup()` is carried out by a task of ours, which hangs below the task that awaits it, and below no other."""

    async def duplicate() -> None:
        await gather(coll.dup(), coll.barrier())

    def tree() -> list[str]:
        command = [sys.executable, "-m", "asyncio", "pstree", str(os.getpid())]
        ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
        if "permission" in ended.stderr.lower():
            pytest.skip("this machine lets no process look into its parent")
        assert ended.returncode == 0, ended.stderr
        return [line for line in ended.stdout.splitlines() if "(T) " in line]

    if coll.rank == 1:
        await coll.recv_object(0)
        await duplicate()
        return
    duplicating = asyncio.create_task(duplicate(), name="duplicates")
    idle = asyncio.create_task(asyncio.Event().wait(), name="idle")
    await rounds()
    lines = tree()
    of_ours = [i for i, line in enumerate(lines) if line.endswith(": dup")]
    assert [lines[i - 1].split("(T) ")[1] for i in of_ours] == ["duplicates"]
    assert lines[of_ours[0]].index("(T)") > lines[of_ours[0] - 1].index("(T)")
    await coll.send_object(None, 1)
    await duplicating
    idle.cancel()
    assert not [line for line in tree() if line.endswith(": dup")]


@pytest.mark.thorough
def test_w11_many_who_look_at_once_are_all_answered(folder: Path, nursery: str) -> None:
    """They share what the ranks are asked, which takes half a second where one does not answer."""
    with running(folder, 3, nursery) as job:
        until(lambda: jobs.look(job.pid)["ranks"])
        told: list[Any] = []
        threads = [threading.Thread(target=lambda: told.append(jobs.look(job.pid))) for _ in range(30)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(told) == 30  # one that looks is patient for five seconds
        assert all([answer["rank"] for answer in each["ranks"]] == [0, 1, 2] for each in told)
