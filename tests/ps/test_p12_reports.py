"""P12: a call that waits for long is reported with its line and the server."""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch

import aiodist
from aiodist import Communicator
from aiodist.communicator import parts_of
from aiodist.errors import CommunicatorAborted, OperationTimeout
from aiodist.handles import Progress
from aiodist.ps import Bounded, ParameterServer, Synchronous, Table
from aiodist.testing import run_ranks
from aiodist.testing.seams.carriers import LocalTransport
from aiodist.testing.seams.transport import Done
from tests.ps.frames import Frames


def reports(
    main: Callable[[Communicator, ParameterServer], Any],
    caplog: pytest.LogCaptureFixture,
    n: int,
    after: float = 10.0,
    **settings: Any,
) -> list[str]:
    """Run the ranks of a parameter server, and return what they reported."""

    async def rank() -> None:
        with suppress(OperationTimeout, CommunicatorAborted):
            async with (
                aiodist.init(timeout=None, report_after=after) as coll,
                ParameterServer(coll, {"w": torch.zeros(4)}, **settings) as ps,
            ):
                await main(coll, ps)

    run_ranks(n, rank, timeout=400)
    assert all(record.name == "aiodist" and record.levelno == logging.WARNING for record in caplog.records)
    return [record.getMessage() for record in caplog.records]


CALLS: dict[str, Callable[[ParameterServer, Table], Any]] = {
    "push": lambda ps, _: ps.push("w", torch.ones(4)),
    "pull": lambda ps, _: ps.pull("w"),
    "pull_rows": lambda _, table: table.pull(torch.arange(3)),
    "sync": lambda ps, _: aiodist.gather(ps.push("w", torch.ones(4)), ps.sync()),
    "barrier": lambda ps, _: ps.barrier(),
    "init": lambda ps, _: ps.init("v", torch.ones(2)),
}


@pytest.mark.parametrize("op", CALLS)
def test_p12_a_call_to_a_server_that_does_not_answer_is_reported(
    frames: Frames, caplog: pytest.LogCaptureFixture, op: str
) -> None:
    async def main(_: Communicator, ps: ParameterServer) -> None:
        if ps.is_worker:
            table = await ps.embedding("t", 2)
            frames.dead.add((0, 1))
            await CALLS[op](ps, table)

    (report,) = reports(main, caplog, 2, servers=[1], workers=[0], timeout=25)
    assert report.startswith(("an operation has waited for 10 s:", "an operation has waited for 11 s:"))
    assert re.search(rf"  rank 0 waits for rank 1 in {op} #\d+ issued at {__file__}:", report)
    assert "  rank 1: " in report
    assert "a deadlock, unless" not in report


def test_p12_a_server_that_is_stopped_is_reported_as_silent(frames: Frames, caplog: pytest.LogCaptureFixture) -> None:
    """This rank has asked the server 0.1 s before the question for the report."""

    async def main(coll: Communicator, ps: ParameterServer) -> None:
        if ps.is_worker:
            frames.dead.add((0, 1))
            await ps.pull("w")
        else:
            parts_of(coll).dispatcher.watch.inquiry.close()

    (report,) = reports(main, caplog, 2, 1.95, servers=[1], workers=[0], timeout=8)
    assert "  rank 1: does not answer" in report


@pytest.mark.parametrize("consistency", [Synchronous("sum"), Bounded(1)])
def test_p12_a_call_that_waits_for_another_worker_is_reported(
    caplog: pytest.LogCaptureFixture, consistency: Any
) -> None:
    async def main(_: Communicator, ps: ParameterServer) -> None:
        for _step in range(3):
            if ps.rank == 2:
                await asyncio.sleep(25)
            if ps.is_worker:
                await ps.push("w", torch.ones(4))
                await ps.pull("w")

    found = reports(main, caplog, 3, servers=[0], workers=[1, 2], consistency=consistency)
    assert len(found) in (2, 3)
    line = inspect.getsourcelines(main)[1]
    for report in found:
        assert "rank 1 waits for rank 0 in pu" in report
        assert "waits for rank 2 in a step of 'w' on 'world/dup1.0', for 1" in report
        assert f"its loop answers; it is at {__file__}:{line + 3} in" in report
        assert "a deadlock, unless" not in report


def test_p12_a_late_worker_is_reported_each_minute(caplog: pytest.LogCaptureFixture) -> None:
    """The servers wait for one another's answers."""

    async def main(_: Communicator, ps: ParameterServer) -> None:
        if ps.rank == 2:
            await asyncio.sleep(100)
        await ps.barrier()

    found = reports(main, caplog, 3, servers=[0, 1], workers=[0, 1, 2])
    assert len(found) == 2
    for report in found:
        assert "rank 0 waits for rank 1 in barrier #" in report
        assert "rank 0 waits for rank 2 in the barrier on " in report
        assert "a deadlock, unless" not in report


def test_p12_a_server_that_waits_for_its_client_is_no_deadlock(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The server sends slowly, and its program waits for a message of the client after the pull."""
    isend = LocalTransport.isend

    def send_slowly(transport: LocalTransport, t: torch.Tensor, dst: int, tag: int, done: Done) -> None:
        if t.nbytes == 400_000 and transport.rank == 1:
            start = Progress.current().start
            asyncio.get_running_loop().call_later(20, start, isend, transport, t, dst, tag, done)
        else:
            isend(transport, t, dst, tag, done)

    monkeypatch.setattr(LocalTransport, "isend", send_slowly)

    async def main(coll: Communicator, ps: ParameterServer) -> None:
        await ps.init("v", torch.ones(100_000))
        if coll.rank == 0:
            await ps.pull("v", torch.empty(100_000))
            await coll.send(torch.ones(1), 1)
        else:
            await coll.recv(src=0)

    (report,) = reports(main, caplog, 2, servers=[1], workers=[0, 1])
    assert "rank 0 waits for rank 1 in pull #" in report
    assert "waits for rank 0 in recv #" in report
    assert "a deadlock, unless" not in report


def test_p12_ranks_that_serve_or_have_ended_are_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    async def main(_: Communicator, ps: ParameterServer) -> None:
        for _step in range(40 * ps.rank):
            await asyncio.sleep(1)
            await ps.push("w", torch.ones(4))
            await ps.pull("w")

    assert reports(main, caplog, 3, servers=[0], workers=[1, 2]) == []


@pytest.mark.parametrize("consistency", [Synchronous("sum"), Bounded(1)])
def test_p12_short_waits_one_after_the_other_are_not_reported(
    caplog: pytest.LogCaptureFixture, consistency: Any
) -> None:
    async def main(_: Communicator, ps: ParameterServer) -> None:
        for _step in range(60):
            await asyncio.sleep(0.5 * (ps.rank == 2))
            if ps.is_worker:
                await ps.push("w", torch.ones(4))
                await ps.pull("w")
                await ps.barrier()

    assert reports(main, caplog, 3, servers=[0], workers=[1, 2], consistency=consistency) == []


def test_p12_pushes_that_a_server_holds_are_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    """The program of the worker does not wait for their step."""

    async def main(_: Communicator, ps: ParameterServer) -> None:
        if ps.rank == 1:
            await ps.push("w", torch.ones(4))
        if ps.is_worker:
            await asyncio.sleep(30)
        if ps.rank == 2:
            await ps.push("w", torch.ones(4))

    assert reports(main, caplog, 3, servers=[0], workers=[1, 2], consistency=Synchronous("sum")) == []
