"""P12: data messages that are lost, and links that are dead, end operations with errors, with and without deadlines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import aiodist
from aiodist.errors import CommunicatorAborted, OperationTimeout
from aiodist.handles import Progress
from aiodist.ps import ParameterServer, Table
from aiodist.ps.settings import place
from aiodist.testing import run_ranks
from aiodist.testing.seams.carriers import LocalTransport
from aiodist.testing.seams.transport import Done
from tests.ps.frames import Frames

NUMEL = 120_000  # more than fits into a frame
ROWS = 20_000
IDS = torch.arange(ROWS)

CALLS: dict[str, tuple[tuple[int, int], Callable[[ParameterServer, Table], Any]]] = {
    "push of float32[120000] 'w'": ((0, 1), lambda ps, _: ps.push("w", torch.ones(NUMEL))),
    "pull of float32[120000] 'w'": ((1, 0), lambda ps, _: ps.pull("w", torch.empty(NUMEL))),
    "push of float32[-1, 2] 't'": ((0, 1), lambda _, table: table.push(IDS, torch.ones(ROWS, 2))),
    "pull of float32[-1, 2] 't'": ((1, 0), lambda _, table: table.pull(IDS)),
    "pull of float32[-1, 2] 't', ids": ((0, 1), lambda _, table: table.pull(IDS)),
}
"""Operations, each with the link that loses its data, by their names in errors."""


def ends_with_lost_data(frames: Frames, what: str, timeout: float | None) -> list[Any]:
    """Return the errors of a worker and of a server, after the loss of one data message."""
    link, call = CALLS[what]
    left: list[tuple[int, int]] = []

    def lost(src: int, dst: int) -> bool:
        if (src, dst) not in left:
            return False
        left.remove((src, dst))
        return True

    frames.lost_data = lost

    async def main() -> BaseException | None:
        try:
            async with (
                aiodist.init(timeout=None) as coll,
                ParameterServer(coll, {"w": torch.zeros(NUMEL)}, servers=[1], workers=[0], timeout=timeout) as ps,
            ):
                if ps.is_worker:
                    table = await ps.embedding("t", 2)
                    left.append(link)
                    await call(ps, table)
        except aiodist.AiodistError as error:
            return error
        return None

    ends = run_ranks(2, main, timeout=400)
    assert not left
    return ends


@pytest.mark.parametrize("what", CALLS)
def test_p12_lost_data_are_an_error_at_the_deadline(frames: Frames, what: str) -> None:
    worker, server = ends_with_lost_data(frames, what, 30)
    assert isinstance(worker, OperationTimeout)
    assert worker.late[1].startswith(what.partition(", ids")[0])
    assert isinstance(server, CommunicatorAborted)


@pytest.mark.parametrize("what", CALLS)
def test_p12_lost_data_are_an_error_without_a_deadline(frames: Frames, what: str) -> None:
    """A ping is answered after the data before it, so its deadline shows the loss."""
    for end in ends_with_lost_data(frames, what, None):
        assert isinstance(end, CommunicatorAborted)
        assert f"late: rank 1 ({what.partition(', ids')[0]}" in str(end)


def test_p12_data_that_take_long_are_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data of 300 s, longer than the deadline of a ping, end nothing."""
    isend = LocalTransport.isend

    def send_slowly(transport: LocalTransport, t: Tensor, dst: int, tag: int, done: Done) -> None:
        if t.nbytes == 4 * NUMEL:
            start = Progress.current().start
            asyncio.get_running_loop().call_later(300, start, isend, transport, t, dst, tag, done)
        else:
            isend(transport, t, dst, tag, done)

    async def main() -> float:
        async with (
            aiodist.init(timeout=None) as coll,
            ParameterServer(coll, {"w": torch.zeros(NUMEL)}, servers=[1], workers=[0]) as ps,
        ):
            if ps.is_worker:
                await ps.push("w", torch.ones(NUMEL))
                assert (await ps.pull("w", torch.empty(NUMEL))).unique().tolist() == [1.0]
        return asyncio.get_running_loop().time()

    monkeypatch.setattr(LocalTransport, "isend", send_slowly)
    assert min(run_ranks(2, main)) > 900  # first values, pulled values, a push and a pull


@pytest.mark.parametrize("call", ["push", "save"])
def test_p12_a_dead_link_between_servers_ends_a_call(frames: Frames, tmp_path: Path, call: str) -> None:
    """The links of rank 0, which calls, are sound. Server 2 misses the order of the leader, server 1."""

    async def main() -> BaseException | None:
        try:
            async with aiodist.init(timeout=None) as coll:
                name = next(name for name in "abcdefghijklmnopqrst" if place(name, 8, 4, (0, 1, 2), 4)[0].rank == 1)
                async with ParameterServer(coll, {name: torch.zeros(8)}, servers=[0, 1, 2], split_bytes=4) as ps:
                    if ps.rank == 0:
                        frames.dead |= {(1, 2), (2, 1)}
                        await (ps.push(name, torch.ones(8)) if call == "push" else ps.save(tmp_path))
                    while True:
                        await asyncio.sleep(1)
                        await ps.sync()  # sends nothing, and raises after an abort
        except aiodist.AiodistError as error:
            return error
        return None

    ends = run_ranks(3, main, timeout=400)
    for end in ends:
        assert isinstance(end, CommunicatorAborted)
        assert "late: rank 1 (order for " in str(end)


def test_p12_a_server_receives_the_ids_of_a_read_that_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    isend = LocalTransport.isend
    ends: list[BaseException | None] = []

    def send(transport: LocalTransport, t: Tensor, dst: int, tag: int, done: Done) -> None:
        def ended(error: BaseException | None) -> None:
            if t.nbytes == IDS.nbytes:
                ends.append(error)
            done(error)

        isend(transport, t, dst, tag, ended)

    async def main() -> None:
        async with aiodist.init(timeout=30) as coll, ParameterServer(coll, servers=[1], workers=[1]) as ps:
            table = await ps.embedding("t", 2)
            await coll.barrier()
            if ps.is_worker:
                await ps.free("t")
            await coll.barrier()
            if not ps.is_worker:
                with pytest.raises(KeyError, match="was freed"):
                    await table.pull(IDS)
                assert ends == [None]

    monkeypatch.setattr(LocalTransport, "isend", send)
    run_ranks(2, main)
