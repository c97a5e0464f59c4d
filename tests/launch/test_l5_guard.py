"""The guard of a rank and its connection: the handshake, and no more output in flight than the launcher takes."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

import pytest

from aiodist.control.link import Link, Listener
from aiodist.control.places import listen
from aiodist.frames import Frame, FrameKind, frame, pack, unpack
from aiodist.handshake import Hello
from aiodist.launch.start import Start

pytestmark = pytest.mark.timeout(30)

_PLACE = {"AIODIST_RANK": "0", "AIODIST_SIZE": "1", "AIODIST_TOKEN": "secret", "AIODIST_RENDEZVOUS": "tcp://none:1"}


class Launcher:
    """A launcher of one rank, whose frames the test reads."""

    def __init__(self, program: str) -> None:
        self.arrived: asyncio.Queue[Frame | None] = asyncio.Queue()
        self.link: Link | None = None
        self._start = Start([sys.executable, "-c", program], {})

    def admit(self, link: Link, hello: Hello, welcome: Callable[[dict[str, Any]], bytes]) -> None:
        link.trust()
        link.on_frame = self.arrived.put_nowait
        link.on_closed = lambda cause: self.arrived.put_nowait(None)
        link.write(welcome({}) + frame(FrameKind.START, body=pack(asdict(self._start))))
        self.link = link

    async def next(self) -> Frame:
        received = await self.arrived.get()
        assert received is not None, "the guard closed the connection"
        return received


@asynccontextmanager
async def guarded(launcher: Launcher, **variables: str) -> AsyncIterator[asyncio.subprocess.Process]:
    sock = await listen("127.0.0.1", 0, backlog=1)
    port = sock.getsockname()[1]
    listener = Listener(sock, "secret", launcher.admit)
    command = [sys.executable, "-P", "-m", "aiodist.launch.worker", f"127.0.0.1:{port}"]
    environ = {**os.environ, **_PLACE, **variables}
    guard = await asyncio.create_subprocess_exec(*command, env=environ, stderr=asyncio.subprocess.PIPE)
    try:
        yield guard
    finally:
        if launcher.link is not None:
            launcher.link.close("the end")
        elif guard.returncode is None:
            guard.kill()
        await guard.communicate()
        listener.close()
        await listener.wait_closed()


async def test_l5_output_waits_until_the_launcher_takes_it() -> None:
    """So the connection always has room. The kernel ends a connection that has none for half a minute."""
    total, least, most = 1 << 20, 2 << 16, 3 << 16
    launcher = Launcher(f"import os; os.write(1, b'x' * {total})")
    seen = taken = waits = 0
    done = False
    async with guarded(launcher):
        while not done:
            try:
                received = await asyncio.wait_for(launcher.next(), 0.1)
            except TimeoutError:  # the guard waits, or the rank starts or ends
                assert seen - taken <= most
                if launcher.link is None:
                    continue
                waits += seen - taken >= least
                launcher.link.write(frame(FrameKind.TAKEN, seen - taken))
                taken = seen
            else:
                seen += len(received.body) if received.kind == FrameKind.OUT else 0
                done = received.kind == FrameKind.DONE
    assert seen == total
    assert waits >= total // most


async def test_l5_signals_right_after_the_start_reach_the_rank() -> None:
    launcher = Launcher("import time; time.sleep(20)")
    admit = launcher.admit

    def admit_and_kill(link: Link, hello: Hello, welcome: Callable[[dict[str, Any]], bytes]) -> None:
        admit(link, hello, welcome)
        link.write(frame(FrameKind.SIGNAL, 9))

    launcher.admit = admit_and_kill  # type: ignore[method-assign]
    async with guarded(launcher):
        while (received := await launcher.next()).kind != FrameKind.ENDED:
            pass
        assert unpack(received.body) == [-9, True]


@pytest.mark.parametrize(
    ("token", "why"),
    [("", "does the remote shell pass standard input on?"), ("wrong", "wrong token: this hub belongs to another job")],
)
async def test_l5_a_guard_of_another_job_is_refused(token: str, why: str) -> None:
    launcher = Launcher("")
    async with guarded(launcher, AIODIST_TOKEN=token) as guard:
        _, said = await guard.communicate()
    assert f"refused the guard of rank 0: {why}" in said.decode()
    assert guard.returncode == 1
