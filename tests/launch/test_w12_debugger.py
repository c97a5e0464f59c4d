"""W12: `aiodist run --debug RANK[:PORT]`, with a client that attaches as VS Code does, and time at a prompt."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

import pytest

from aiodist.errors import BackendUnavailable, ConfigError
from aiodist.launch.commands import Job, debug_place, inherited
from aiodist.launch.output import read_input
from aiodist.launch.supervisor import Supervisor
from aiodist.terminal import is_lent
from tests.support.debug_adapter import DebugClient, free_port

if TYPE_CHECKING:
    from aiodist.control.roster import Roster
    from aiodist.launch.ranks import Ranks
    from tests.launch.conftest import Launcher

LIGHT = """
mine = 10 * rank
mine += 1  # here
say("mine", mine)
"""
AT_A_BREAKPOINT = """
import asyncio, aiodist

async def main():
    async with aiodist.init(timeout=1, report_after=0.5) as coll:
        mine = coll.rank + 1
        await coll.breakpoint(1)
        mine += 1
        total = await coll.allreduce(mine)
        say("total", total)  # here

aiodist.run(main)
"""


@pytest.fixture
def port() -> int:
    pytest.importorskip("debugpy", reason="debugpy is not installed")
    return free_port()


def lines(text: str) -> list[int]:
    return [number for number, line in enumerate(text.splitlines(), 1) if line.endswith("# here")]


@pytest.mark.timeout(120)
def test_w12_a_debugger_attaches_to_one_rank_before_its_program(plain: Launcher, port: int) -> None:
    program = plain.folder / plain.script(LIGHT)
    here = lines(program.read_text())
    with plain.started(f"--debug=1:{port}", "--timeout=0.1", "--finish-within=0", str(program)) as process:
        with DebugClient.attached(port, program, here) as client:
            function, line, value = client.stopped()
            assert (function, line) == ("<module>", here[0])
            assert value("rank, mine") == "(1, 10)"
            client.go_on()
            client.event("terminated")
        out, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert sorted(out.splitlines()) == ["[0] mine 1", "[1] mine 11"]
    assert errors == f"aiodist run: rank 1 waits for a debugger at 127.0.0.1:{port}\n"
    assert not plain.left_after(5)


@pytest.mark.thorough
@pytest.mark.timeout(180)
def test_w12_a_breakpoint_stops_in_the_attached_debugger(launcher: Launcher, port: int) -> None:
    program = launcher.folder / launcher.script(AT_A_BREAKPOINT)
    here = lines(program.read_text())
    with launcher.started(f"--debug=1:{port}", str(program), n=3) as process:
        with DebugClient.attached(port, program, here) as client:
            function, line, value = client.stopped()
            assert (function, line) == ("main", here[0] - 2)
            assert value("mine") == "2"
            assert value("__import__('time').sleep(2)") == "None"  # longer than the timeout of the other ranks
            client.go_on()
            function, line, value = client.stopped()
            assert (function, line, value("total")) == ("main", here[0], "9")
            client.go_on()
            client.event("terminated")
        out, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert sorted(out.splitlines()) == [f"[{rank}] total 9" for rank in range(3)]
    assert "has waited" not in errors


def test_w12_options_of_debug() -> None:
    for wrong in ("x", "1:", ":5", "-1", "1:x"):
        with pytest.raises(ConfigError, match=f"--debug {re.escape(wrong)}: expected RANK or RANK:PORT"):
            debug_place(wrong)
    for place in ((2, 5678), (0, 0), (0, 1 << 16)):
        with pytest.raises(ConfigError, match="with 2 ranks: expected a rank below 2, and a port"):
            Job(("train.py",), 2, debug=place)
    for program, command in (("/bin/sh", ("x.sh",)), ("python3", ("-O", "train.py"))):
        with pytest.raises(ConfigError, match="expected a Python script, or -m and the name of a module"):
            Job(command, 2, program=program, debug=(0, 5678))


def test_w12_without_debugpy_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiodist.launch.commands.find_spec", lambda name: None)
    with pytest.raises(BackendUnavailable, match=re.escape("pip install 'aiodist[debug]'")):
        Job(("train.py",), 2, debug=(0, 5678))


def test_w12_only_that_rank_runs_under_the_debugger() -> None:
    pytest.importorskip("debugpy", reason="debugpy is not installed")
    job = Job(("-m", "train", "--lr", "1"), 3, program="python3", debug=(1, 4000))
    assert job.command_of(0) == job.command_of(2) == ["python3", "-m", "train", "--lr", "1"]
    before, _, after = " ".join(job.command_of(1)).partition(" -m debugpy ")
    assert before == "python3 -Xfrozen_modules=off"
    assert after.startswith("--listen 127.0.0.1:4000 --wait-for-client")
    assert after.endswith(" -m train --lr 1")


def test_w12_a_job_inside_a_rank_has_neither_its_debugger_nor_its_terminal() -> None:
    mine = {"AIODIST_TOKEN": "x", "AIODIST_DEBUG": "1", "AIODIST_TERMINAL": "t", "OTHER": "o"}
    assert inherited(mine) == {"OTHER": "o"}


class NoRanks:
    """Ranks that have come and ignore signals."""

    came = frozenset((0,))

    def signal(self, signum: int) -> None:
        """Send nothing."""


class NoRoster:
    """A hub that no rank has joined."""

    joined: frozenset[int] = frozenset()
    exits: dict[int, object] = {}  # noqa: RUF012


async def test_w12_the_time_at_a_prompt_does_not_count_for_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []
    said: list[str] = []

    def lent() -> bool:
        looks.append(time.monotonic())
        return time.monotonic() < looks[0] + 0.5

    monkeypatch.setattr("aiodist.launch.supervisor.is_lent", lent)
    monkeypatch.setattr("aiodist.launch.supervisor.os.isatty", lambda fd: True)
    job = Job(("train.py",), 1, timeout=0.2, kill_after=0.0)
    supervisor = Supervisor(job, cast("Ranks", NoRanks()), cast("Roster", NoRoster()), said.append)
    began = time.monotonic()
    assert await supervisor.watch(asyncio.Queue()) == 124
    assert time.monotonic() - began >= 0.6
    assert said == ["aiodist run: not finished within 0.2 s: rank 0"]


async def test_w12_a_line_that_a_rank_has_read_does_not_block_the_launcher(
    monkeypatch: pytest.MonkeyPatch, standard_input: int
) -> None:
    """The rank reads between the launcher's two looks."""
    looks: list[bytes] = []

    def lent() -> bool:
        if not looks:
            looks.append(os.read(0, 100))
            asyncio.get_running_loop().call_soon(os.write, standard_input, b"more\n")
        return False

    monkeypatch.setattr("aiodist.launch.output.is_lent", lent)
    os.write(standard_input, b"c\n")
    assert await read_input() == b"more\n"
    assert looks == [b"c\n"]


@pytest.fixture
def standard_input() -> Iterator[int]:
    """A pipe in place of standard input; the end to write."""
    kept, (read, write) = os.dup(0), os.pipe()
    os.dup2(read, 0)
    yield write
    os.dup2(kept, 0)
    for fd in (kept, read, write):
        os.close(fd)


def test_w12_the_terminal_of_another_user_is_lent_to_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> int:
        raise PermissionError

    monkeypatch.setattr("aiodist.terminal.os.isatty", lambda fd: True)
    monkeypatch.setattr("aiodist.terminal.os.open", refused)
    assert not is_lent()
