"""The hub: accepted ranks, reported exits, and the end of its connections."""

import asyncio
import gc
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from aiodist.control.link import Link, Pulse, dial
from aiodist.control.roster import HUB
from aiodist.errors import ConfigError, OperationTimeout, PeerLost
from aiodist.frames import FrameKind, frame, pack
from aiodist.handshake import Hello, Refused
from aiodist.testing import FakeClockLoop
from aiodist.testing.seams.channel import Hub, SocketChannel, connect, host
from tests.support.news import News

pytestmark = pytest.mark.timeout(20)


@pytest.fixture(autouse=True)
def _no_socket_forgotten() -> Iterator[None]:
    """Collect what the test has left: a socket that is open then warns."""
    yield
    gc.collect()


async def join(hub: Hub, size: int, **settings: Any) -> list[Any]:
    return await asyncio.gather(*(connect(hub.address, rank=r, size=size, **settings) for r in range(size)))


async def test_the_hub_knows_who_came_and_who_left() -> None:
    async with Hub(2) as hub:
        a, b = await join(hub, 2)
        assert hub.roster.joined == {0, 1}
        await a.aclose()
        assert (hub.roster.exits[0].rank, hub.roster.exits[0].clean) == (0, True)
        await asyncio.to_thread(b.fail, "bad", "trace", 9)  # it waits for the hub, which is on this loop
        assert (hub.roster.exits[1].rank, hub.roster.exits[1].clean, hub.roster.exits[1].exitcode) == (1, False, 9)
        await b.aclose()


async def test_a_wrong_token_is_refused() -> None:
    async with Hub(1, token="right") as hub:
        with pytest.raises(ConfigError, match="wrong token"):
            await connect(hub.address, rank=0, size=1, token="wrong")
        await (await connect(hub.address, rank=0, size=1, token="right")).aclose()


async def test_a_hub_that_does_not_know_the_token_is_refused() -> None:
    """A stranger that lets everybody in cannot prove that it knows the token."""

    async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(frame(FrameKind.GREETING, body=pack(["aiodist control 4", b"challenge"])))
        writer.write(frame(FrameKind.WELCOME, body=pack([b"a guess", {"heartbeat": 30, "host_rank": None}])))
        await reader.read()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(pretend, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(ConfigError, match="does not know this job's token"):
        await connect(f"tcp://127.0.0.1:{port}", rank=0, size=1, token="secret")
    server.close()
    await server.wait_closed()


async def test_a_second_process_with_the_same_rank_is_refused() -> None:
    async with Hub(2) as hub:
        a, b = await join(hub, 2)
        with pytest.raises(ConfigError, match=rf"this process is rank 1 of the job at {hub.address} already"):
            await connect(hub.address, rank=1, size=2)
        elsewhere = Hello(1, 2, "")
        with pytest.raises(Refused, match=r"rank 1 has joined already: two processes, or two init\(\) of one"):
            await dial("127.0.0.1", hub.port, elsewhere, lambda *_: None)
        assert await b.add("still works") == 1
        await asyncio.gather(a.aclose(), b.aclose())


async def test_another_size_is_refused() -> None:
    async with Hub(2) as hub:
        with pytest.raises(ConfigError, match="rank 0 expects 3 ranks, this hub 2"):
            await connect(hub.address, rank=0, size=3)


async def test_strangers_are_sent_away_and_nobody_else_notices() -> None:
    async with Hub(1) as hub:
        (a,) = await join(hub, 1)
        for words in (b"GET / HTTP/1.1\r\n\r\n", bytes(9), b"\0\0\0\4\2\0\0\0\0junk"):
            reader, writer = await asyncio.open_connection("127.0.0.1", hub.port)
            writer.write(words)
            assert b"aiodist control" in await reader.read()  # the greeting, then the end
            writer.close()
            await writer.wait_closed()
        assert await a.add("n") == 1
        await a.aclose()


async def test_who_never_says_hello_is_sent_away_when_the_hub_closes() -> None:
    async with Hub(1) as hub:
        reader, writer = await asyncio.open_connection("127.0.0.1", hub.port)
        await reader.readexactly(9)
    await reader.read()
    writer.close()
    await writer.wait_closed()


async def test_a_broken_connection_is_a_loss() -> None:
    async with Hub(2) as hub:
        a, b = await join(hub, 2)
        lost = News()
        a.on_lost(lost)
        SocketChannel.cut(rank=1)
        exit = await lost.take()
        assert (exit.rank, exit.clean, exit.exitcode) == (1, False, None)
        assert "left without a goodbye" in exit.cause
        assert isinstance(exit.error(), PeerLost)
        with pytest.raises(PeerLost, match=r"the job is over: rank 1 left"):
            await connect(hub.address, rank=1, size=2)
        await asyncio.gather(a.aclose(), b.aclose())


async def test_a_rank_without_heartbeats_is_lost_and_told_so() -> None:
    async with Hub(2, heartbeat=0.3) as hub:
        a, b = await join(hub, 2)
        lost, told = News(), News()
        a.on_lost(lost)
        b.on_lost(told)
        stuck = threading.Event()
        b.subscribe("stuck", lambda *_: stuck.wait(15))  # on the thread that sends its heartbeats
        a.send(1, "stuck", None)
        exit = await lost.take()
        assert (exit.rank, exit.clean) == (1, False)
        assert "no heartbeat for" in exit.cause
        stuck.set()
        exit = await told.take()
        assert (exit.rank, exit.clean) == (HUB, False)
        assert "the hub gave this rank up: no heartbeat" in exit.cause
        assert await a.add("healthy ranks stay") == 1
        await asyncio.gather(a.aclose(), b.aclose())


def test_a_starved_watcher_blames_nobody() -> None:
    ended: list[str] = []

    class Quiet(Link):
        def abort(self, cause: str) -> None:
            ended.append(cause)

    async def main() -> None:
        link = Quiet(lambda frame: None, lambda cause: None)
        pulse = Pulse(0.6, lambda: [link])
        loop.now += 5  # as if this process had been stopped for five seconds
        await asyncio.sleep(0.05)
        assert not ended
        await asyncio.sleep(1)
        assert "no heartbeat for 0.7 s (the limit is 0.6 s)" in ended[0]
        pulse.cancel()

    loop = FakeClockLoop()
    loop.run_until_complete(main())
    loop.close()


async def test_a_closed_hub_ends_what_waits_for_it_and_is_no_failure() -> None:
    async with Hub(1) as hub:
        (a,) = await join(hub, 1)
        waiting = asyncio.ensure_future(a.get("never"))
        await a.add("let the question out")
    with pytest.raises(PeerLost, match="the hub left: the hub was closed"):
        await waiting
    with pytest.raises(PeerLost, match="the hub was closed"):
        await a.set("k", b"v")
    a.send(0, "t", "dropped")
    a.fail("nobody hears it, and it does not wait")
    assert a.exits()[HUB].clean
    await a.aclose()


async def test_a_hub_that_goes_while_a_rank_says_goodbye_is_no_error() -> None:
    async with Hub(1) as hub:
        (a,) = await join(hub, 1)
        await asyncio.gather(hub.aclose(), a.aclose())  # the hub may go before it can answer


async def test_sessions_follow_each_other_under_one_hub() -> None:
    async with Hub(2) as hub:
        for _ in range(3):
            a, b = await join(hub, 2)
            assert await a.add("a fresh store each time") == 1
            await a.aclose()
            again = asyncio.ensure_future(connect(hub.address, rank=0, size=2))
            await b.add("rank 0 is early for the next session")
            await b.aclose()
            b = await connect(hub.address, rank=1, size=2)
            a = await again
            await asyncio.gather(a.aclose(), b.aclose())


async def test_the_hosting_rank_stays_until_the_others_have_left() -> None:
    hub = await host(2)
    a, b = await asyncio.gather(connect(hub.address, rank=0, size=2, hub=hub), connect(hub.address, rank=1, size=2))
    leaving = asyncio.ensure_future(a.aclose())
    while 0 not in b.exits():
        await b.add("time passes, and the hub still answers")
    assert not leaving.done()
    await b.aclose()
    await leaving


async def test_the_hosting_rank_does_not_stay_for_ever() -> None:
    hub = await host(2, linger=0.05)
    a, b = await asyncio.gather(connect(hub.address, rank=0, size=2, hub=hub), connect(hub.address, rank=1, size=2))
    await a.aclose()
    with pytest.raises(PeerLost, match="the hub was closed"):
        await b.get("k")
    assert b.exits()[HUB].clean
    assert b.exits()[0].clean
    await b.aclose()


async def test_a_hosted_hub_can_be_closed_before_anybody_came() -> None:
    hub = await host(2)
    await hub.aclose()
    with pytest.raises(RuntimeError, match="has ended"):
        await connect(hub.address, rank=0, size=2, hub=hub)


async def test_a_port_in_use_is_an_error_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        await host(1, port=taken.getsockname()[1])


async def test_a_rank_that_gives_up_before_all_have_come_may_come_again() -> None:
    async with Hub(2) as hub:
        for _ in range(3):
            with pytest.raises(OperationTimeout):
                await connect(hub.address, rank=0, size=2, timeout=0.05)
        assert hub.roster.missing() == {1: "never came"}  # rank 0 left after a wait for rank 1
        a, b = await join(hub, 2)
        assert not hub.roster.missing()
        await asyncio.gather(a.aclose(), b.aclose())
