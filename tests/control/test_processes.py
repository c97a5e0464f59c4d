"""Real processes: killed ranks, dead hubs, forked children, exits without a goodbye."""

import asyncio
import functools
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

import aiodist
from aiodist.control.roster import HUB
from aiodist.errors import PeerLost
from aiodist.testing.seams.channel import Hub, connect
from tests.support.environ import python_path
from tests.support.news import News

ROOT = Path(aiodist.__file__).parents[1]

pytestmark = pytest.mark.timeout(40)


PRELUDE = """
import asyncio, os, sys, time, threading
from aiodist import control
from aiodist.errors import *
address, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
def say(*words):
    os.write(1, (" ".join(map(str, words)) + chr(10)).encode())  # at once as a whole: a forked child writes here too
"""


class Child:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def line(self) -> str:
        assert self.process.stdout
        return (await self.process.stdout.readline()).decode().strip()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)


@asynccontextmanager
async def child(body: str, *args: object) -> AsyncIterator[Child]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-W", "error", "-c", PRELUDE + body, *map(str, args),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": python_path()},
    )  # fmt: skip
    try:
        yield Child(process)
        assert process.stdin
        process.stdin.close()
        _, errors = await process.communicate()
        assert errors == b""
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


STAY = """
async def main():
    channel = await control.connect(address, rank=rank, size=size)
    say("in")
    threading.Event().wait()  # stuck: the loop of this thread never runs again
asyncio.run(main())
"""


async def test_a_killed_rank_is_lost_at_once() -> None:
    async with Hub(2) as hub, child(STAY, hub.address, 1, 2) as other:
        channel = await connect(hub.address, rank=0, size=2)
        assert await other.line() == "in"
        lost = News()
        channel.on_lost(lost)
        other.kill()
        exit = await lost.take()
        assert (exit.rank, exit.clean, exit.exitcode) == (1, False, None)
        assert exit.error().lost == 1
        assert hub.roster.exits[1] == exit
        await channel.aclose()


async def test_a_stopped_rank_is_lost_when_its_heartbeats_stop() -> None:
    async with Hub(2, heartbeat=0.5) as hub, child(STAY, hub.address, 1, 2) as other:
        channel = await connect(hub.address, rank=0, size=2)
        assert await other.line() == "in"
        lost = News()
        channel.on_lost(lost)
        other.process.send_signal(signal.SIGSTOP)
        assert "no heartbeat" in (await lost.take()).cause
        other.kill()
        await channel.aclose()


FORGOTTEN = """
import atexit
channel = asyncio.run(control.connect(address, rank=rank, size=size))
channel.subscribe("to itself", lambda *_: say("it ran on"))
atexit._run_exitfuncs()
channel.send(0, "to itself", None)
channel.fail("over")  # waits for the thread, for a while
say("it rests")
"""


async def test_the_thread_of_a_channel_that_nobody_closed_rests_while_the_interpreter_ends() -> None:
    async with Hub(1) as hub, child(FORGOTTEN, hub.address, 0, 1) as forgetful:
        assert await forgetful.line() == "it rests"


HUB_ALONE = """
async def main():
    async with control.Hub(size) as hub:
        say(hub.address)
        await asyncio.Event().wait()
asyncio.run(main())
"""


def _seconds_of(call: Callable[[], None]) -> float:
    began = time.monotonic()
    call()
    return time.monotonic() - began


async def test_a_dead_hub_is_told_to_everybody_and_get_raises_at_once() -> None:
    async with child(HUB_ALONE, "-", 0, 2) as launcher:
        address = await launcher.line()
        channels = await asyncio.gather(*(connect(address, rank=rank, size=2) for rank in range(2)))
        lost = [News(), News()]
        for channel, news in zip(channels, lost, strict=True):
            channel.on_lost(news)
        waiting = asyncio.ensure_future(channels[1].get("never"))
        await channels[1].add("let the question out")
        launcher.kill()
        for news in lost:
            exit = await news.take()
            assert (exit.rank, exit.clean) == (HUB, False)
            assert "the hub was lost" in exit.cause
        with pytest.raises(PeerLost, match="the hub left: the hub was lost"):
            await waiting
        assert (
            min(_seconds_of(functools.partial(channels[0].fail, "nobody hears it")) for _ in range(3)) < 1
        )  # it does not wait
        await asyncio.gather(*(channel.aclose() for channel in channels))


HOST = """
async def main():
    channel = await control.connect(address, rank=0, size=size)
    say("in")
    threading.Event().wait()
asyncio.run(main())
"""


async def test_the_death_of_the_rank_that_hosts_the_hub_names_it(tmp_path: Path) -> None:
    address = (tmp_path / "meet").as_uri()
    async with child(HOST, address, 0, 2) as first:
        channel = await connect(address, rank=1, size=2)
        lost = News()
        channel.on_lost(lost)
        assert await first.line() == "in"
        first.kill()
        exit = await lost.take()
        assert (exit.rank, exit.clean) == (0, False)
        assert "the hub, which rank 0 hosted, was lost" in exit.cause
        then = await lost.take()
        assert (then.rank, then.clean) == (HUB, False)
        with pytest.raises(PeerLost) as caught:
            await channel.get("k")
        assert caught.value.lost == 0
        await channel.aclose()
    channels = asyncio.gather(*(connect(address, rank=rank, size=2) for rank in range(2)))
    await asyncio.gather(*(channel.aclose() for channel in await channels))  # its old file misleads no rank
    assert not os.listdir(tmp_path)


FAILING = """
async def main():
    channel = await control.connect(address, rank=rank, size=size)
    channel.fail("ValueError: no", "Traceback of rank %d" % rank, 3)
    os._exit(3)
asyncio.run(main())
"""


@pytest.mark.parametrize("failing", [0, 1])
async def test_a_failure_is_told_though_the_process_ends_at_once(tmp_path: Path, failing: int) -> None:
    address = (tmp_path / "meet").as_uri()
    async with child(FAILING, address, failing, 2) as other:
        channel = await connect(address, rank=1 - failing, size=2)
        lost = News()
        channel.on_lost(lost)
        exit = await lost.take()
        assert (exit.rank, exit.cause, exit.exitcode) == (failing, "ValueError: no", 3)
        assert exit.traceback == f"Traceback of rank {failing}"
        assert await other.process.wait() == 3
        await channel.aclose()


EXITING = """
async def main():
    channel = await control.connect(address, rank=rank, size=size)
    say("in")
    sys.stdin.read()
    return channel
channel = asyncio.run(main())
sys.exit(5)
"""


async def test_a_rank_that_exits_without_closing_ends_and_is_lost() -> None:
    async with Hub(2) as hub, child(EXITING, hub.address, 1, 2) as other:
        channel = await connect(hub.address, rank=0, size=2)
        assert await other.line() == "in"
        lost = News()
        channel.on_lost(lost)
        assert other.process.stdin
        other.process.stdin.close()
        assert "without a goodbye" in (await lost.take()).cause
        assert await other.process.wait() == 5
        await channel.aclose()


FORKING = """
async def main():
    channel = await control.connect(address, rank=rank, size=size)
    to_child, from_parent = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(from_parent)
        refused = 0
        for call in (
            lambda: channel.send(0, "t", 1),
            lambda: channel.broadcast("t", 1),
            lambda: channel.subscribe("t", print),
            lambda: channel.on_lost(print),
            lambda: channel.fail("x"),
            lambda: channel.exits(),
            lambda: channel.aclose().send(None),
            lambda: channel.add("k").send(None),
            lambda: channel.set("k", b"").send(None),
        ):
            try:
                call()
            except RuntimeError as error:
                refused += "forked child" in str(error)
        say("refused", refused)
        os.read(to_child, 1)  # outlives its parent, until there is nobody who could write
        os._exit(0)
    say("in", await channel.add("the parent goes on"))
    threading.Event().wait()
asyncio.run(main())
"""


def _peers() -> set[tuple[str, int]]:
    """Return what this process is connected with."""
    return {tuple(each.raddr) for each in psutil.Process().net_connections("tcp") if each.raddr}


async def test_a_forked_child_has_no_channel_and_holds_none_open(tmp_path: Path) -> None:
    """The child lives on while its parent, which hosts the hub, is killed: that must be seen all the same."""
    address = (tmp_path / "meet").as_uri()
    async with child(FORKING, address, 0, 2) as first:
        before = _peers()
        channel = await connect(address, rank=1, size=2)
        ((_, port),) = _peers() - before
        lost = News()
        channel.on_lost(lost)
        assert sorted([await first.line(), await first.line()]) == ["in 1", "refused 9"]
        first.kill()
        assert (await lost.take()).rank == 0
        await first.process.wait()
        async with Hub(1, port=port):  # the port is free again
            pass
        await channel.aclose()


IMPORTS = """
banned = {"torch", "numpy", "mpi4py"} & sys.modules.keys()
say("banned", *banned)
"""


async def test_control_imports_neither_torch_nor_numpy_nor_mpi4py() -> None:
    async with child(IMPORTS, "-", 0, 1) as other:
        assert await other.line() == "banned"
