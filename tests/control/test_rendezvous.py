"""L9: ranks find each other over a hub's address, a file or the environment, and a time-out names who never came."""

import asyncio
import errno
import functools
import gc
import json
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from aiodist.control.places import FilePlace, TcpPlace, parse
from aiodist.errors import ConfigError, OperationTimeout, PeerLost
from aiodist.testing.seams.channel import Channel, Hub, connect, host
from aiodist.testing.seams.memory import boot_id

Test = Callable[..., Coroutine[Any, Any, None]]


def sockets() -> int:
    """Return how many sockets this process has open."""
    with os.scandir("/proc/self/fd") as found:
        return sum(os.readlink(entry).startswith("socket:") for entry in found if os.path.lexists(entry))


def limited(test: Test) -> Test:
    @functools.wraps(test)
    async def run(*args: object, **kwargs: object) -> None:
        before = sockets()
        async with asyncio.timeout(60):
            await test(*args, **kwargs)
        assert not [thread for thread in threading.enumerate() if thread.name == "aiodist-control"]
        assert sockets() == before
        gc.collect()  # a socket that was forgotten warns

    return run


def free_port(address: str = "127.0.0.1") -> int:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port


def has_ipv6() -> bool:
    try:
        free_port("::1")
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="no IPv6 on this machine")


async def meet(address: str, size: int, **settings: Any) -> list[Channel]:
    return await asyncio.gather(*(connect(address, rank=rank, size=size, **settings) for rank in range(size)))


async def talk_and_part(channels: list[Channel]) -> None:
    await channels[-1].set("k", b"v")
    assert [await channel.get("k") for channel in channels] == [b"v"] * len(channels)
    await asyncio.gather(*(channel.aclose() for channel in channels))


@pytest.mark.parametrize("where", ["127.0.0.1", "localhost", "", pytest.param("::1", marks=needs_ipv6)])
@limited
async def test_l9_tcp(where: str) -> None:
    async with Hub(2, host=where, token="t") as hub:
        await talk_and_part(await meet(hub.address, 2, token="t"))


@needs_ipv6
@limited
async def test_l9_a_hub_at_every_address_is_reached_by_ipv4_and_ipv6() -> None:
    async with Hub(2, host="") as hub:
        addresses = [f"tcp://127.0.0.1:{hub.port}", f"tcp://[::1]:{hub.port}"]
        channels = await asyncio.gather(*(connect(a, rank=r, size=2) for r, a in enumerate(addresses)))
        await talk_and_part(channels)


@limited
async def test_l9_ranks_may_come_before_the_hub() -> None:
    port = free_port()
    waiting = asyncio.ensure_future(connect(f"tcp://127.0.0.1:{port}", rank=0, size=1))
    with pytest.raises(OperationTimeout, match=r"no hub let this rank in at .* last: .*nobody listens there"):
        await connect(f"tcp://127.0.0.1:{port}", rank=0, size=1, timeout=0.1)
    async with Hub(1, port=port):
        await talk_and_part([await waiting])


@limited
async def test_l9_file(tmp_path: Path) -> None:
    path = tmp_path / "a place with spaces"
    address = path.as_uri()
    for _ in range(2):  # opens again after close
        channels = await meet(address, 3, token="t")
        assert path.stat().st_mode & 0o777 == 0o600
        await talk_and_part(channels)
        assert not os.listdir(tmp_path)


@limited
async def test_l9_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    address = (tmp_path / "no" / "such").as_uri()
    with pytest.raises(ConfigError, match=r"rank 0 cannot write .*no/such: No such file or directory"):
        await connect(address, rank=0, size=2)
    assert not os.listdir(tmp_path)


@limited
async def test_l9_a_stale_file_fools_nobody(tmp_path: Path) -> None:
    """The file of an earlier job has the address of no process, of a stranger, or of another job's hub."""
    path = tmp_path / "meet"
    async with Hub(2, token="other") as other:
        left = {"boot_id": boot_id(), "hosts": ["127.0.0.1"], "port": free_port(), "nonce": "old"}
        for content in (
            "not even JSON",
            "[]",
            json.dumps(left),
            json.dumps(left | {"port": other.port}),
        ):
            path.write_text(content)
            second = asyncio.ensure_future(connect(path.as_uri(), rank=1, size=2, token="t"))
            with pytest.raises(OperationTimeout) as caught:
                await connect(path.as_uri(), rank=1, size=2, token="t", timeout=0.1)
            assert caught.value.late.keys() == {0}
            first = await connect(path.as_uri(), rank=0, size=2, token="t")
            await talk_and_part([first, await second])
        assert not other.roster.joined
        assert not path.exists()


@limited
async def test_l9_a_file_of_a_later_job_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "meet"
    (alone,) = await meet(path.as_uri(), 1)
    path.write_text('{"nonce": "of a later job"}')
    await alone.aclose()
    assert path.exists()


@limited
async def test_l9_environment() -> None:
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for _ in range(2):
        await talk_and_part(await meet("env://", 3, environ=environ, token="t"))


@limited
async def test_l9_environment_of_torchrun_whose_agent_has_the_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as agent:
        port = agent.getsockname()[1]
        environ = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        runs = [environ | {"TORCHELASTIC_RUN_ID": run} for run in ("a", "b")]
        both = await asyncio.gather(*(meet("env://", 2, environ=run) for run in runs))
        await asyncio.gather(*map(talk_and_part, both))


@limited
async def test_l9_environment_of_slurm() -> None:
    environ = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "2", "SLURM_STEP_NODELIST": "localhost,other[1-3]"}
    await talk_and_part(await meet("env://", 2, environ=environ))


@limited
async def test_l9_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        with pytest.raises(ConfigError, match="rank 0 cannot listen at port") as caught:
            await connect("env://", rank=0, size=1, environ=environ)
        assert isinstance(caught.value.__cause__, OSError)
        assert caught.value.__cause__.errno == errno.EADDRINUSE


@limited
async def test_l9_a_time_out_names_the_ranks_that_never_came() -> None:
    async with Hub(5) as hub:
        coming = (connect(hub.address, rank=rank, size=5, timeout=0.3) for rank in (0, 3))
        for error in await asyncio.gather(*coming, return_exceptions=True):
            assert isinstance(error, OperationTimeout)
            assert error.late.keys() == {1, 2, 4}, "one that gave up too is not to blame"
            assert "never came" in error.late[1]
            assert "of 5 had not joined" in str(error)
            assert "rank 1: never came" in str(error)


@limited
async def test_l9_the_host_tells_the_others_who_never_came(tmp_path: Path) -> None:
    address = (tmp_path / "meet").as_uri()
    patient = asyncio.ensure_future(connect(address, rank=1, size=3, timeout=15))
    with pytest.raises(OperationTimeout, match="rank 2 of 3 had not joined") as caught:
        await connect(address, rank=0, size=3, timeout=1)
    assert caught.value.late == {2: "never came"}
    with pytest.raises(OperationTimeout, match=r"rank 0 gave up after 1 s, before rank 2 had come") as caught:
        await patient
    assert caught.value.late == {2: "never came"}
    assert not os.listdir(tmp_path)


@limited
async def test_l9_where_the_host_never_came_rank_0_is_named(tmp_path: Path) -> None:
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for address in ("env://", (tmp_path / "meet").as_uri()):
        with pytest.raises(OperationTimeout, match="no hub let this rank in") as caught:
            await connect(address, rank=1, size=2, timeout=0.1, environ=environ)
        assert caught.value.late.keys() == {0}


@limited
async def test_l9_a_listener_that_is_no_hub_is_told_apart() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.9\r\n")
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(OperationTimeout, match="no hub of aiodist"):
        await connect(f"tcp://127.0.0.1:{port}", rank=0, size=1, timeout=0.2)
    server.close()
    await server.wait_closed()


@limited
async def test_l9_an_unknown_scheme_lists_the_known() -> None:
    with pytest.raises(ConfigError, match=r"'redis'.*tcp://host:port, file:///path, env://"):
        await connect("redis://host:1", rank=0, size=1)


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("127.0.0.1:80", "unknown scheme '127.0.0.1:80'"),
        ("tcp://host", r"expected tcp://host:port"),
        ("tcp://host:0", r"expected tcp://host:port"),
        ("tcp://host:99999", "out of range"),
        ("tcp://::1:80", r"\[address\]"),
        ("tcp://[::1:80", "Invalid IPv6"),
        ("tcp://host:80/path", "expected tcp://host:port"),
        ("file://relative/path", "three slashes"),
        ("file:///", "directory"),
        ("env://", "pass environ="),
    ],
)
def test_l9_an_address_that_makes_no_sense_is_refused(address: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse(address)


@pytest.mark.parametrize(
    ("environ", "problem"),
    [
        ({}, "MASTER_ADDR is not set"),
        ({"MASTER_ADDR": "h"}, "MASTER_PORT is not set"),
        ({"MASTER_ADDR": "h", "MASTER_PORT": "http"}, "MASTER_PORT='http': expected a port"),
        ({"SLURM_JOB_ID": "1"}, "SLURM_STEP_NODELIST"),
    ],
)
def test_l9_variables_that_make_no_sense_are_named(environ: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse("env://", environ)


def test_l9_addresses_are_understood() -> None:
    assert parse("tcp://[::1]:4000") == TcpPlace("::1", (4000,))
    assert parse("tcp://node-1.example:4000") == TcpPlace("node-1.example", (4000,))
    assert parse("file:///tmp/a%20b") == FilePlace(Path("/tmp/a b"))
    assert parse("env://", {"MASTER_ADDR": "h", "MASTER_PORT": "5"}) == TcpPlace("h", (5,), hosted=True)


@limited
async def test_a_rank_outside_the_job_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rank 2 of 2: expected 0 <= rank < size"):
        await connect("tcp://127.0.0.1:1", rank=2, size=2)


@pytest.mark.parametrize("moment", ["at once", "while nobody listens", "while others are awaited"])
@limited
async def test_cancelling_connect_leaves_nothing(tmp_path: Path, moment: str) -> None:
    """The number of threads and descriptors is checked around each test here."""
    path = tmp_path / "meet"
    if moment == "while others are awaited":
        joining = asyncio.ensure_future(connect(path.as_uri(), rank=0, size=2))
        other = asyncio.ensure_future(connect(path.as_uri(), rank=1, size=3))
        with pytest.raises(ConfigError):  # it got as far as a hub, so that is there
            await other
    else:
        joining = asyncio.ensure_future(connect(path.as_uri(), rank=1, size=2))
        if moment == "while nobody listens":
            with pytest.raises(OperationTimeout):
                await connect(path.as_uri(), rank=1, size=2, timeout=0.05)
        else:
            await asyncio.sleep(0)
    joining.cancel()
    with pytest.raises(asyncio.CancelledError):
        await joining
    assert not os.listdir(tmp_path)


@limited
async def test_cancelling_connect_at_any_moment_leaves_nothing(tmp_path: Path) -> None:
    address = (tmp_path / "meet").as_uri()
    moments = random.Random(7)
    for _ in range(20):
        joining = [asyncio.ensure_future(connect(address, rank=rank, size=2)) for rank in range(2)]
        for _ in range(moments.randrange(1500)):
            await asyncio.sleep(0)
        for joiner in joining:
            joiner.cancel()
        for channel in await asyncio.gather(*joining, return_exceptions=True):
            if isinstance(channel, BaseException):
                assert isinstance(channel, asyncio.CancelledError)
            else:
                await channel.aclose()
        assert not os.listdir(tmp_path)


@limited
async def test_cancelling_host_leaves_nothing() -> None:
    opening = asyncio.ensure_future(host(2))
    await asyncio.sleep(0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening


@limited
async def test_a_hub_that_closes_meanwhile_is_no_hang() -> None:
    async with Hub(2) as hub:
        waiting = asyncio.ensure_future(connect(hub.address, rank=0, size=2))
        while not hub.roster.joined:  # noqa: ASYNC110  - the hub tells its ranks alone
            await asyncio.sleep(0)
    with pytest.raises(OperationTimeout, match="the hub was closed, before rank 1 had come"):
        await waiting


@pytest.mark.thorough
@limited
async def test_the_loop_is_not_blocked_while_ranks_are_awaited(tmp_path: Path) -> None:
    waiting = asyncio.ensure_future(connect((tmp_path / "meet").as_uri(), rank=0, size=2, timeout=2))
    ticks = longest = before = 0
    pause = threading.Event()

    def tick() -> None:  # the measure: where the machine stands still, so does this
        nonlocal ticks
        while not waiting.done():
            pause.wait(0.001)
            ticks += 1

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    while not waiting.done():
        await asyncio.sleep(0)
        now = ticks
        longest, before = max(longest, now - before), now
    thread.join(10)
    assert isinstance(waiting.exception(), OperationTimeout)
    assert ticks > 0
    assert longest < 0.5 * ticks  # all that is blocking here would block for the two seconds


def test_l9_under_uvloop(tmp_path: Path) -> None:
    uvloop = pytest.importorskip("uvloop")

    async def main() -> None:
        async with asyncio.timeout(20):
            await talk_and_part(await meet((tmp_path / "meet").as_uri(), 2))
            async with Hub(2, heartbeat=5) as hub:
                await talk_and_part(await meet(hub.address, 2))
            async with Hub(1) as hub:
                (alone,) = await meet(hub.address, 1)
            with pytest.raises(PeerLost):
                await alone.get("k")
            await alone.aclose()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
    gc.collect()


@limited
async def test_t5_ranks_meet_without_a_wait_for_delayed_acknowledgements() -> None:
    """The hub's words leave as they are written: a system delays an acknowledgement by 40 ms."""
    fastest = 1.0
    for _ in range(12):
        began = time.monotonic()
        hub = await host(2)
        channels = await asyncio.gather(
            connect(hub.address, rank=0, size=2, hub=hub), connect(hub.address, rank=1, size=2)
        )
        fastest = min(fastest, time.monotonic() - began)
        for channel in reversed(channels):
            await channel.aclose()
    assert fastest < 0.035  # a promise of seconds: T5
