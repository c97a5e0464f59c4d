"""W10: one rank reports the waits of all ranks, and messages that were not received."""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import aiodist
from aiodist import Communicator
from aiodist.communicator import parts_of
from aiodist.handles import internals
from aiodist.ps import ParameterServer
from aiodist.testing import run_ranks
from aiodist.testing.seams.carriers import LocalTransport
from aiodist.types import check_period
from tests.support.hearing import heard
from tests.support.looks import Looks

pytestmark = pytest.mark.timeout(60)


def _reports(
    main: Callable[[Communicator], Any], caplog: pytest.LogCaptureFixture, n: int = 2, **settings: Any
) -> list[str]:
    """Run ranks that report after a second, and return what they reported."""

    async def rank() -> None:
        async with aiodist.init(**{"report_after": 1.0, **settings}) as coll:
            await main(coll)

    run_ranks(n, rank)
    assert all(record.name == "aiodist" and record.levelno == logging.WARNING for record in caplog.records)
    return [record.getMessage() for record in caplog.records]


def test_w10_a_late_rank_is_reported_by_one_that_waits(caplog: pytest.LogCaptureFixture) -> None:
    async def main(coll: Communicator) -> None:
        await coll.barrier()
        if coll.rank == 1:
            await asyncio.sleep(2.5)
        await coll.allreduce(torch.ones(3))

    (report,) = _reports(main, caplog, 3)
    line = inspect.getsourcelines(main)[1]
    assert f"rank 0 waits for rank 1 in allreduce #1 issued at {__file__}:{line + 4} in" in report
    assert f"rank 2 waits for rank 1 in allreduce #1 issued at {__file__}:{line + 4} in" in report
    assert f"rank 1: after barrier at {__file__}:{line + 1} in" in report
    assert f"its loop answers; it is at {__file__}:{line + 3} in" in report


def test_w10_two_that_receive_from_each_other(caplog: pytest.LogCaptureFixture) -> None:
    async def main(coll: Communicator) -> None:
        handle = coll.recv(src=1 - coll.rank, tag=coll.rank)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.5):
                await handle
        assert handle.cancel()

    (report,) = _reports(main, caplog)
    assert "rank 0 waits for rank 1 in recv #0" in report
    assert "from rank 1 with tag 0 on 'world'" in report
    assert "rank 1: has issued no collective yet; waits for rank 0 in recv #0" in report
    assert "from rank 0 with tag 1 on 'world'" in report


def test_w10_a_deadlock_beside_a_heartbeat_is_reported_as_one(caplog: pytest.LogCaptureFixture) -> None:
    async def beat() -> None:
        while True:  # noqa: ASYNC110  - a heartbeat
            await asyncio.sleep(0.1)

    async def main(coll: Communicator) -> None:
        one, two = await coll.dup(), await coll.dup()
        first, second = (one, two) if coll.rank == 0 else (two, one)
        heart = asyncio.create_task(beat())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.5):
                await first.allreduce(torch.ones(3))
        await second.allreduce(torch.ones(3))
        heart.cancel()

    (report,) = _reports(main, caplog)
    *_, end, reason = report.splitlines()
    assert end == (
        "  rank 0 waits for rank 1, which waits for rank 0: a deadlock, unless a timer, a thread or a socket ends it"
    )
    assert reason.startswith("  (on rank 0, its loop has ")  # "set a timer", or "a callback to run"


def test_w10_ranks_that_one_outside_can_free_are_in_no_deadlock(caplog: pytest.LogCaptureFixture) -> None:
    async def main(coll: Communicator) -> None:
        if coll.rank == 2:
            await asyncio.sleep(2.5)
            await coll.send(torch.ones(1), 0)
        elif coll.rank == 0:
            await coll.recv(src=aiodist.ANY)
            await coll.send(torch.ones(1), 1)
        else:
            await coll.recv(src=0)
        await coll.barrier()

    (report,) = _reports(main, caplog, 3)
    assert "waits for rank 0 in recv #0" in report
    assert "a deadlock, unless" not in report


def test_w10_a_receive_beside_a_collective(caplog: pytest.LogCaptureFixture) -> None:
    async def main(coll: Communicator) -> None:
        handle = coll.recv(src=1) if coll.rank == 0 else coll.allreduce(1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.5):
                await handle
        if coll.rank == 0:
            assert handle.cancel()
            await coll.allreduce(1)
        else:
            assert await handle == 2

    (report,) = _reports(main, caplog)
    assert "rank 0 waits for rank 1 in recv #0" in report
    assert "from rank 1 with any tag" in report
    assert re.search(r"rank 1: after allreduce .*; waits for rank 0 in allreduce #0", report)


def test_w10_it_is_told_again_after_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    async def main(coll: Communicator) -> None:
        for _ in range(5 * (coll.rank == 1)):
            await asyncio.sleep(26)
        await coll.barrier()

    assert len(_reports(main, caplog)) in (2, 3)


def test_w10_none_is_never(caplog: pytest.LogCaptureFixture) -> None:
    async def main(coll: Communicator) -> None:
        await asyncio.sleep(100 * coll.rank)
        await coll.barrier()

    assert _reports(main, caplog, report_after=None) == []


def test_w10_short_pauses_are_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    async def main(coll: Communicator) -> None:
        for _ in range(20):
            await asyncio.sleep(0.9 * coll.rank)
            await coll.barrier()

    assert _reports(main, caplog) == []


def test_w10_what_nobody_waits_in_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    """A receive that was posted ahead, and one that a service keeps posted."""

    async def serve(coll: Communicator) -> None:
        await coll.recv_object(tag=2).detach()

    async def main(coll: Communicator) -> None:
        service = asyncio.create_task(serve(coll))
        ahead = coll.recv(src=1 - coll.rank, tag=1)
        await asyncio.sleep(2.5)
        await aiodist.gather(coll.send_object(1, 1 - coll.rank, tag=2), coll.send(torch.ones(1), 1 - coll.rank, tag=1))
        await aiodist.gather(ahead)
        await service

    assert _reports(main, caplog) == []


async def _until(seconds: float) -> None:
    """Sleep until that time of the rank's clock; step by step, as the fake one jumps over what only watches."""
    while asyncio.get_running_loop().time() < seconds:  # noqa: ASYNC110
        await asyncio.sleep(0.25)


async def _serve(coll: Communicator, tag: int) -> None:
    while True:
        await coll.recv_object(tag=tag)  # without detach()


def _give_up(coll: Communicator, *services: asyncio.Task[None]) -> None:
    for service in services:
        service.cancel()
    for handle in parts_of(coll).dispatcher.lifetime.pending():
        assert handle.cancel()


async def _stalls_beside_a_service(coll: Communicator, services: int, seconds: float) -> None:
    """Rank 0 serves from the start; from `seconds` on rank 1 is late for so long again, and for a minute and a half."""
    tasks = [asyncio.create_task(_serve(coll, tag)) for tag in range(2, 2 + services * (coll.rank == 0))]
    await _until(seconds)
    await coll.barrier()
    for until in (2 * seconds, 2 * seconds + 90):
        if coll.rank == 1:
            await _until(until)
        await (coll.barrier() if until == 2 * seconds else coll.sendrecv(torch.ones(1), 1 - coll.rank, 1 - coll.rank))
    _give_up(coll, *tasks)


@pytest.mark.thorough
@pytest.mark.parametrize("services", [1, 5])
def test_w10_a_long_wait_hides_no_later_one(caplog: pytest.LogCaptureFixture, services: int) -> None:
    """Each is reported by itself, and all of them again a minute later."""
    now: list[float] = []

    async def main(coll: Communicator) -> None:
        clock, loop = logging.Handler(), asyncio.get_running_loop()
        clock.emit = lambda record: now.append(loop.time())  # type: ignore[method-assign]
        if coll.rank == 0:
            logging.getLogger("aiodist").addHandler(clock)
        try:
            await _stalls_beside_a_service(coll, services, 20)
        finally:
            logging.getLogger("aiodist").removeHandler(clock)

    service, barrier, exchange, again = _reports(main, caplog, report_after=10.0)
    assert now == pytest.approx([11, 31, 51, 111], abs=1)
    assert "barrier" not in service.split("rank 1:")[0]
    for report, op in ((service, "recv_object #0"), (barrier, "barrier #1"), (exchange, "sendrecv #2")):
        assert report.startswith("an operation has waited for 11 s:")
        assert report.splitlines()[1].startswith(f"  rank 0 waits for rank 1 in {op} issued at {__file__}:")
        assert report.count("  rank 1: ") == 1
    assert "sendrecv #2" in again
    assert "recv_object #0" in again


def test_w10_who_comes_to_a_wait_that_was_told_does_not_tell_it_again(caplog: pytest.LogCaptureFixture) -> None:
    async def main(coll: Communicator) -> None:
        await _until((0, 4, 30)[coll.rank])
        await coll.barrier()

    (report,) = _reports(main, caplog, 3, report_after=10.0)
    assert "rank 0 waits for rank 2 in barrier #0" in report
    assert "rank 1 waits for rank 2 in barrier #0" in report


def test_w10_the_late_rank_is_in_a_report_of_many(caplog: pytest.LogCaptureFixture) -> None:
    async def main(coll: Communicator) -> None:
        await asyncio.sleep(2.5 * (coll.rank == 23))
        await coll.barrier()

    (report,) = _reports(main, caplog, 24)
    assert "rank 23: has issued nothing yet; its loop answers; it is at" in report
    assert "and 8 more lines" in report


@pytest.mark.drawn(1)
@pytest.mark.ranks(2, backend=("gloo", "mpi", "shm"))
async def test_w10_a_long_wait_hides_no_later_one_on_processes(
    coll: Communicator, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    await coll.barrier()
    if coll.rank == 0:
        monkeypatch.setattr(parts_of(coll).dispatcher.watch.report, "after", 0.8)
        with Looks(coll, tmp_path) as looks:
            service = asyncio.create_task(_serve(coll, 2))
            while not caplog.records:
                await looks.wait()
            barrier = coll.barrier()
            while len(caplog.records) == 1:
                await looks.wait()
        await coll.send_object("reported", 1)
        await barrier
        _give_up(coll, service)
        first, second = (record.getMessage() for record in caplog.records)
        assert "barrier #1" not in first
        assert "rank 0 waits for rank 1 in recv_object #1" in first
        assert "rank 0 waits for rank 1 in barrier #1" in second
        assert "rank 1: after barrier" in second
    else:
        await coll.recv_object(0)
        await coll.barrier()
        assert not caplog.records


async def _polls(handle: aiodist.Handle[Any]) -> None:
    while not handle.done():  # noqa: ASYNC110
        await asyncio.sleep(0.05)  # of a clock that jumps


@pytest.mark.parametrize("op", ["recv", "recv_object", "send"])
def test_w10_a_message_that_is_polled_is_waited_for(caplog: pytest.LogCaptureFixture, op: str) -> None:
    """Neither awaited, nor given a deadline: `done()` is asked now and again."""

    async def main(coll: Communicator) -> None:
        await coll.barrier()
        large = torch.ones(1 << 16)
        if coll.rank == 0:
            handle = coll.send(large, 1) if op == "send" else getattr(coll, op)(src=1)
            await _polls(handle)
            await handle
            return
        await asyncio.sleep(2.5)
        if op == "send":
            await coll.recv(src=0)
        else:
            await (coll.send(large, 0) if op == "recv" else coll.send_object(1, 0))

    def eager() -> bool:
        """Return True if a send of that size ends before its receive."""
        return op == "send" and not caplog.records

    reports = _reports(main, caplog)
    if not eager():
        (report,) = reports
        assert f"rank 0 waits for rank 1 in {op} #1 issued at {__file__}:" in report
        assert "rank 1: after barrier at" in report


@pytest.mark.drawn(1)
@pytest.mark.ranks(2, backend=("local", "gloo", "mpi", "shm"))
async def test_w10_a_message_that_is_polled_is_asked_about(
    coll: Communicator, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    await coll.barrier()
    if coll.rank == 0:
        monkeypatch.setattr(parts_of(coll).dispatcher.watch.report, "after", 1.0)
        handle = coll.recv(src=1, tag=5)
        held = coll.recv(src=1, tag=6)
        detached = coll.recv(src=1, tag=7).detach()
        with Looks(coll, tmp_path) as looks:
            while not caplog.records:
                assert not handle.done()
                await looks.wait()
        await coll.send_object("reported", 1)
        (report,) = (record.getMessage() for record in caplog.records)
        assert "rank 0 waits for rank 1 in recv #1" in report
        assert "from rank 1 with tag 5 on" in report
        assert "with tag 6" not in report
        assert "with tag 7" not in report
        await aiodist.gather(handle, held, detached)
    else:
        await coll.recv_object(0)
        for tag in (5, 6, 7):
            await coll.send(torch.ones(1), 0, tag=tag)


@pytest.mark.parametrize("detached", [False, True])
@pytest.mark.ranks(2)
async def test_w10_a_message_that_is_held_is_asked_about(coll: Communicator, detached: bool) -> None:
    """So who begins to wait for it learns at once what is known; not what was detached."""
    await coll.barrier()
    if coll.rank == 0:
        held = coll.recv(src=1)
        if detached:
            held.detach()
        await asyncio.sleep(5)
        late = internals.late_ranks(held)
        assert list(late) == ([] if detached else [1])
        assert detached or "it is at" in late[1]
        await aiodist.gather(held)
    else:
        await asyncio.sleep(6)
        await coll.send(torch.ones(1), 0)


def test_w10_a_receive_posted_ahead_counts_from_its_await(caplog: pytest.LogCaptureFixture) -> None:
    async def main(coll: Communicator) -> None:
        ahead = coll.recv(src=1 - coll.rank)
        await _until(20 + 5 * coll.rank)
        await coll.send(torch.ones(1), 1 - coll.rank)
        await ahead

    assert _reports(main, caplog, report_after=10.0) == []


def test_w10_what_servers_keep_posted_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    async def main(coll: Communicator) -> None:
        async with ParameterServer(coll, [torch.zeros(3)]):
            await _until(30)

    assert _reports(main, caplog, report_after=1.0) == []


@pytest.mark.parametrize("after", [0, -1.0, float("nan")])
async def test_w10_report_after_is_a_time(after: float) -> None:
    for wrong in (0, "soon", float("nan")):
        with pytest.raises(ValueError, match=f"report_after={wrong!r}: expected seconds, more than 0, or None"):
            check_period("report_after", wrong)
    with pytest.raises(ValueError, match="report_after="):
        async with aiodist.init(report_after=after):
            pass


def test_w10_a_message_that_nobody_received_is_told_at_close() -> None:
    async def main() -> None:
        async with aiodist.init() as coll:
            if coll.rank == 1:
                await coll.send(torch.ones(10), 0, tag=4)
                await coll.send_object("x", 0, tag=6)
                await coll.send(torch.ones(1), 0, tag=9)
            else:
                await coll.recv(tag=9)

    with heard("default") as caught, pytest.raises(aiodist.MismatchError, match="never received") as raised:
        run_ranks(2, main)
    assert "then by rank" in str(raised.value.__notes__)  # both exit codes say so
    first = inspect.getsourcelines(main)[1]
    texts = {warning.lineno - first: str(warning.message) for warning in caught}
    assert {warning.category for warning in caught} == {RuntimeWarning}
    assert sorted(texts) == [1, 3, 4]  # the block, and each send
    known = "communicator 'world' is closed, and rank 0 never received 2 messages: rank 1 sent tag 4 float32[10] by "
    assert texts[1].startswith(f"{known}send #0 issued at {__file__}:{first + 3} in ")
    sent = (
        "rank 0 never received a message on communicator 'world': rank 1 sent tag 4 float32[10] by send #0 issued at "
    )
    assert texts[3].startswith(f"{sent}{__file__}:{first + 3}")
    assert f"by send_object #0 issued at {__file__}:{first + 4}" in texts[4]


def test_w10_a_communicator_that_is_never_closed_is_told() -> None:
    """With the line that made it; not those that aiodist makes for itself."""

    async def main() -> None:
        async with aiodist.init() as coll:
            await coll.dup()
            for closed in (await coll.split(0), await coll.dup()):
                await closed.aclose()
            await aiodist.nn.DataParallel.create(torch.nn.Linear(1, 1), coll)

    with heard() as caught:
        run_ranks(2, main)
    first = inspect.getsourcelines(main)[1]
    assert [(w.category, w.lineno - first) for w in caught] == [(ResourceWarning, 2)] * 2
    assert "communicator 'world/dup1.0', made at " in str(caught[0].message)
    assert "was never closed" in str(caught[0].message)


@pytest.mark.drawn(1)
@pytest.mark.ranks(2, 3, backend=("gloo", "mpi", "shm"))
async def test_w10_a_message_that_nobody_received_is_told_on_every_backend(coll: Communicator) -> None:
    side = await coll.dup()
    if coll.rank == 0:
        await side.send(torch.ones(10), 1, tag=4)
    if coll.rank == 1:
        known = r"rank 1 never received 1 message: rank 0 sent tag 4 float32\[10\]"
        line = inspect.currentframe().f_lineno + 2  # type: ignore[union-attr]
        with pytest.warns(RuntimeWarning, match=known) as caught:
            await side.aclose()
        assert [(warning.filename, warning.lineno) for warning in caught] == [(__file__, line)]
    elif coll.rank == 0:
        with pytest.warns(RuntimeWarning, match=r"rank 1 never received a message .* by send #0 issued at .*silence"):
            await side.aclose()
    else:
        await side.aclose()
    assert await coll.allreduce(1) == coll.size
    parts_of(coll).registry.members.unreceived.clear()  # else the end of the world raises the reported error


def test_w10_a_message_on_its_way_is_no_deadlock(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report of a slow link has no edge from the receive to its sender, which has sent, and no cycle."""
    receive = LocalTransport.irecv
    in_flight = []

    def slow(self: LocalTransport, t: torch.Tensor, src: int, tag: int, done: Any) -> None:
        if t.nbytes < 1 << 20:
            receive(self, t, src, tag, done)
        else:
            in_flight.append(done)

    monkeypatch.setattr(LocalTransport, "irecv", slow)

    async def main(coll: Communicator) -> None:
        side, t = await coll.dup(), torch.ones(1 << 18)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(4):
                await (side.send(t, 1) if coll.rank == 0 else side.recv(t, src=0))
        side.abort("the link is slow")

    text, *_ = _reports(main, caplog)
    assert "a deadlock, unless" not in text
    assert "its message of 1048576 bytes is in flight" in text
