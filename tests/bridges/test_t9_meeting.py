"""T9: two jobs meet and part, and the errors of both."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import aiodist
from aiodist.testing import gather_ranks
from tests.bridges.conftest import SECONDS, Meet
from tests.support.until import until


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


async def test_t9_the_short_form_uses_the_world_of_the_task_and_the_folder_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    file = tmp_path / "aiodist" / "bridges" / "weights.json"

    async def listens() -> int:
        async with aiodist.init(), aiodist.listen("weights") as door:
            assert [stat.S_IMODE(each.stat().st_mode) for each in (file, file.parent)] == [0o600, 0o700]
            bridges = [bridge async for bridge in _first(door)]
            return await bridges[0].recv_object(0)  # type: ignore[no-any-return]

    async def connects() -> None:
        async with aiodist.init() as outer:
            async with aiodist.init():
                pass
            async with aiodist.connect("weights", timeout=SECONDS) as bridge:
                await bridge.send_object(outer.size, 0)

    (got,), _ = await asyncio.gather(gather_ranks(1, listens), gather_ranks(1, connects))
    assert got == 1
    assert not file.exists()
    with pytest.raises(aiodist.ConfigError, match="no world is open in this task"):
        await aiodist.connect("weights").__aenter__()


async def _first(door: Any) -> Any:
    async for bridge in door:
        yield bridge
        return


async def test_t9_by_an_address_both_jobs_give_one_token(tmp_path: Path) -> None:
    name = f"127.0.0.1:{free_port()}"

    async def listens() -> None:
        async with aiodist.init() as coll, aiodist.listen(name, coll, token="secret") as door:
            bridge = await door.accept()
            await bridge.send(torch.tensor(coll.rank), 0)
            with pytest.raises(aiodist.ConfigError, match=rf"cannot listen at tcp://{name}"):
                async with aiodist.listen(name, coll, token="other"):
                    pass

    async def connects() -> None:
        async with aiodist.init() as coll:
            with pytest.raises(aiodist.ConfigError, match="wrong token"):
                async with aiodist.connect(name, coll, token="another"):
                    pass
            async with aiodist.connect(name, coll, token="secret") as bridge:
                assert [(await bridge.recv(src=src)).item() for src in range(2)] == [0, 1]

    await asyncio.gather(gather_ranks(2, listens), gather_ranks(1, connects))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("a/b", {}, "expected letters, digits"),
        ("host:x", {}, "expected a name, or host:port with a port"),
        ("host:70000", {"token": "x"}, "expected a name, or host:port with a port"),
        ("host:4000", {}, "without token="),
        ("host:4000", {"token": "x", "folder": "."}, "expected a folder for a name only"),
        ("weights", {"token": "x"}, "expected a token for host:port only"),
    ],
)
async def test_t9_wrong_places_are_errors(name: str, options: Any, message: str) -> None:
    async with aiodist.init() as coll:
        for opened in (aiodist.listen, aiodist.connect):
            with pytest.raises(aiodist.ConfigError, match=message):
                async with opened(name, coll, **options):
                    pass


async def test_t9_a_time_out_says_where_it_looked_and_which_ranks_are_missing(tmp_path: Path) -> None:
    async def alone() -> None:
        async with aiodist.init() as coll:
            with pytest.raises(
                aiodist.OperationTimeout, match=r"within 0.3 s: .*weights\.json is not there yet; expected"
            ):
                async with aiodist.connect("weights", coll, folder=tmp_path, timeout=0.3):
                    pass

    await gather_ranks(2, alone)
    over = asyncio.Event()

    async def listens() -> None:
        async with aiodist.init() as coll, aiodist.listen("weights", coll, folder=tmp_path):
            await over.wait()

    async def connects() -> None:
        async with aiodist.init() as coll:
            if coll.rank < 2:  # the third one never calls it
                missing = "rank 2 of this job had not come after"
                with pytest.raises(aiodist.OperationTimeout, match=missing):
                    async with aiodist.connect("weights", coll, folder=tmp_path, timeout=3):
                        pass
            await coll.barrier()
            over.set()

    await asyncio.gather(gather_ranks(2, listens), gather_ranks(3, connects))


async def test_t9_a_name_has_one_listener_and_the_file_of_a_killed_one_is_replaced(tmp_path: Path) -> None:
    stale = {"boot_id": "another", "hosts": ["127.0.0.1"], "port": free_port(), "nonce": "old"}
    (tmp_path / "weights.json").write_text(json.dumps(stale))

    async def listens() -> None:
        async with aiodist.init() as coll, aiodist.listen("weights", coll, folder=tmp_path) as door:
            with pytest.raises(aiodist.ConfigError, match=rf"process {os.getpid()} on \S+ listens as 'weights' in"):
                async with aiodist.listen("weights", coll, folder=tmp_path):
                    pass
            await door.accept()

    async def connects() -> None:
        async with aiodist.init() as coll, aiodist.connect("weights", coll, folder=tmp_path, timeout=SECONDS):
            assert json.loads((tmp_path / "weights.json").read_text())["nonce"] != "old"

    await asyncio.gather(gather_ranks(2, listens), gather_ranks(2, connects))
    assert os.listdir(tmp_path) == ["weights.lock"]


async def test_t9_what_was_sent_before_a_close_is_received_and_then_calls_say_who_closed(meet: Meet, wire: str) -> None:
    async def leaves(coll: aiodist.Communicator, door: Any) -> None:
        bridge = await door.accept()
        sends = [bridge.send(torch.full((70_001,), n + coll.rank), 0) for n in range(3)]
        await bridge.aclose()
        await aiodist.gather(*sends)
        await bridge.aclose()
        assert not bridge.is_open
        with pytest.raises(aiodist.CommunicatorClosed, match="bridge 'weights' was closed by this job"):
            bridge.send(torch.ones(1), 0)
        await coll.barrier()

    async def stays(coll: aiodist.Communicator, bridge: Any) -> None:
        if coll.rank == 0:
            receives = [bridge.recv(src=src) for _ in range(3) for src in range(2)]
            extra = bridge.recv(src=0)
            values = [(await receive).unique().item() for receive in receives]
            assert values == [0, 1, 1, 2, 2, 3]
            with pytest.raises(aiodist.CommunicatorClosed, match="bridge 'weights' was closed by the other job"):
                await extra
        else:
            assert [version async for version in bridge.subscribe()] == []
        with pytest.raises(aiodist.CommunicatorClosed, match="bridge 'weights' was closed by the other job"):
            bridge.recv_object(0)
        await until(lambda: not bridge.is_open)
        with pytest.raises(aiodist.CommunicatorClosed, match="bridge 'weights' was closed by the other job"):
            await bridge.publish({})
        assert await coll.allreduce(1) == coll.size

    await meet(2, 2, leaves, stays)


async def test_t9_a_rank_that_needs_nothing_more_does_not_end_the_bridge_of_the_others(meet: Meet, wire: str) -> None:
    released = asyncio.Event()

    async def leaves(coll: aiodist.Communicator, door: Any) -> None:
        bridge = await door.accept()
        sends = [bridge.send(torch.full((1_000_001,), n), 1) for n in range(5)]
        await bridge.aclose()
        await aiodist.gather(*sends)

    async def stays(coll: aiodist.Communicator, bridge: Any) -> None:
        if coll.rank == 0:
            await until(lambda: bridge.is_released)
            released.set()
        else:
            await released.wait()
            for _ in range(50):  # the other job hears of it meanwhile
                await asyncio.sleep(0)
            assert [(await bridge.recv()).unique().tolist() for _ in range(5)] == [[n] for n in range(5)]
        await coll.barrier()

    await meet(1, 2, leaves, stays)


@pytest.mark.parametrize("raises", ["listener", "caller"])
async def test_t9_an_error_of_one_job_is_raised_in_the_other_one(tmp_path: Path, raises: str) -> None:
    async def use(coll: aiodist.Communicator, bridge: Any, role: str) -> None:
        if role == raises:
            raise LookupError("the reason")
        with pytest.raises(
            aiodist.RemoteError, match=r"rank 0 of the job at the other end .*LookupError: the reason"
        ) as e:
            await bridge.recv()
        assert e.value.raised_by == 0
        with pytest.raises(aiodist.RemoteError, match="the reason"):
            await anext(bridge.subscribe())

    async def listens() -> None:
        async with aiodist.init() as coll, aiodist.listen("weights", coll, folder=tmp_path) as door:
            await use(coll, await door.accept(), "listener")

    async def connects() -> None:
        opened = aiodist.connect("weights", folder=tmp_path, timeout=SECONDS)
        async with aiodist.init() as coll, opened as bridge:
            await use(coll, bridge, "caller")

    ended = await asyncio.gather(gather_ranks(1, listens), gather_ranks(1, connects), return_exceptions=True)
    assert [type(one) for one in ended].count(LookupError) == 1, ended
    assert isinstance(ended[raises == "caller"], LookupError)


async def test_t9_many_jobs_are_at_one_door_and_wrong_ranks_are_errors(tmp_path: Path) -> None:
    async def listens() -> None:
        async with aiodist.init() as coll, aiodist.listen("weights", coll, folder=tmp_path) as door:
            await door.publish({"a": torch.arange(5)}, version=1)
            sizes = []
            async for bridge in door:
                sizes.append(bridge.size)
                if len(sizes) == 3:
                    break
            assert sorted(sizes) == [1, 1, 2]
            await door.publish({"a": torch.arange(6)}, version=2)

    def job(size: int) -> Callable[[], Any]:
        async def connects() -> None:
            opened = aiodist.connect("weights", folder=tmp_path, timeout=SECONDS)
            async with aiodist.init() as coll, opened as bridge:
                with pytest.raises(ValueError, match="to=2: expected 0 to 1"):
                    bridge.send(torch.ones(1), 2)
                with pytest.raises(ValueError, match="src=-1: expected 0 to 1"):
                    bridge.recv(src=-1)
                seen = [(version, state["a"].tolist()) async for version, state in bridge.subscribe()]
                assert seen in ([(1, [*range(5)]), (2, [*range(6)])], [(2, [*range(6)])])
                assert coll.size == size

        return connects

    jobs = [gather_ranks(size, job(size)) for size in (1, 2, 1)]
    await asyncio.gather(gather_ranks(2, listens), *jobs)


async def test_t9_a_cancelled_wait_for_a_version_loses_none(meet: Meet) -> None:
    async def publishes(coll: aiodist.Communicator, door: Any) -> None:
        bridge = await door.accept()
        await bridge.recv_object()
        await door.publish({"a": torch.arange(400_000)}, version=1)

    async def reads(coll: aiodist.Communicator, bridge: Any) -> None:
        waiting = asyncio.ensure_future(anext(bridge.subscribe()))
        await asyncio.sleep(0)  # it has asked for a version
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await bridge.send_object("now", 0)
        assert [(version, int(state["a"].sum())) async for version, state in bridge.subscribe()] == [
            (1, 400_000 * 399_999 // 2)
        ]

    await meet(1, 1, publishes, reads)
