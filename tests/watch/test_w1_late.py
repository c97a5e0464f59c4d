"""W1: each way to end a wait names the ranks that are late, and where each of them is."""

from __future__ import annotations

import asyncio
import fcntl
import inspect
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch

import aiodist
from aiodist import Communicator, OperationTimeout
from aiodist.communicator import parts_of

processes = pytest.mark.ranks(2, backend=("gloo", "mpi", "shm"))


async def _argument(coll: Communicator) -> BaseException:
    with pytest.raises(OperationTimeout) as caught:
        await coll.allreduce(torch.ones(4), timeout=1.5)
    return caught.value


async def _short(coll: Communicator) -> BaseException:
    with pytest.raises(OperationTimeout) as caught:
        await coll.allreduce(torch.ones(4), timeout=0.4)
    return caught.value


async def _block(coll: Communicator) -> BaseException:
    with pytest.raises(OperationTimeout) as caught:
        async with aiodist.timeout(1.5):
            await coll.allreduce(torch.ones(4))
    return caught.value


async def _short_block(coll: Communicator) -> BaseException:
    with pytest.raises(OperationTimeout) as caught:
        async with aiodist.timeout(0.4):
            await coll.recv(torch.ones(4), 1, tag=3)
    return caught.value


async def _thread(coll: Communicator) -> BaseException:
    with pytest.raises(OperationTimeout) as caught:
        await asyncio.to_thread(coll.recv(src=1).wait, 1.5)
    return caught.value


async def _plain(coll: Communicator) -> BaseException:
    with pytest.raises(TimeoutError) as caught:
        async with asyncio.timeout(1.5):
            await coll.allreduce(torch.ones(4))
    cause: Any = caught.value.__cause__
    return TimeoutError(*cause.__notes__)


async def _wait_for(coll: Communicator) -> BaseException:
    with pytest.raises(TimeoutError) as caught:
        await asyncio.wait_for(coll.recv_object(1), 1.5)
    cause: Any = caught.value.__cause__
    return TimeoutError(*cause.__notes__)


@pytest.mark.drawn(2)
@processes
@pytest.mark.parametrize("wait", [_argument, _short, _block, _short_block, _thread, _plain, _wait_for])
async def test_w1_a_rank_whose_loop_stands_still(
    coll: Communicator, wait: Callable[[Communicator], Coroutine[Any, Any, BaseException]], tmp_path: Path
) -> None:
    side = await coll.dup()
    path = Path(await coll.broadcast_object(str(tmp_path))) / "lock"
    with path.open("w") as lock:
        if coll.rank == 0:
            fcntl.flock(lock, fcntl.LOCK_EX)
        await coll.barrier()
        line = inspect.currentframe().f_lineno + 2  # type: ignore[union-attr]
        if coll.rank == 1:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until rank 0 has found out
        else:
            error = await wait(coll)
    if coll.rank == 0:
        text = str(error)
        assert "rank 1 (after barrier" in text
        assert f"it is at {__file__}:{line} in test_w1_a_rank_whose_loop_stands_still" in text
        if wait in (_argument, _block):
            assert "its loop does not answer" in text
        if isinstance(error, OperationTimeout):
            assert list(error.late) == [1]
    # The waits for a message are withdrawn, and those for a collective end.
    if wait in (_short_block, _thread, _wait_for):
        for handle in parts_of(coll).dispatcher.lifetime.pending():
            assert handle.cancel()
    elif coll.rank == 1:
        await coll.allreduce(torch.ones(4))
    await side.barrier()


@pytest.mark.drawn(1)
@processes
async def test_w1_a_rank_that_is_stopped_does_not_answer(coll: Communicator) -> None:
    pids = await coll.allgather_object(os.getpid())
    if coll.rank == 0:
        os.kill(pids[1], signal.SIGSTOP)
        try:
            with pytest.raises(OperationTimeout, match=r"late: rank 1 \(does not answer\)"):
                await coll.barrier(timeout=1.5)
        finally:
            os.kill(pids[1], signal.SIGCONT)
        await coll.send_object(None, 1)
    else:
        await coll.recv_object(0)  # it is stopped before it comes
        await coll.barrier()
    await coll.barrier()


@pytest.mark.ranks(3)
async def test_w1_what_a_late_rank_waits_in(coll: Communicator) -> None:
    """Rank 0 waits for rank 1, which waits for rank 2 elsewhere."""
    side = await coll.dup()
    line = inspect.currentframe().f_lineno + 4  # type: ignore[union-attr]
    if coll.rank == 2:
        await asyncio.sleep(20)
    elif coll.rank == 1:
        await side.recv(src=2, tag=5)
    else:
        with pytest.raises(OperationTimeout, match=r"late: rank 1 \(.*\), rank 2 \(") as caught:
            await coll.allreduce(1, timeout=9)
        assert f"waits for rank 2 in recv #0 issued at {__file__}:{line}" in caught.value.late[1]
        assert "from rank 2 with tag 5 on 'world/dup1.0', for 8 s" in caught.value.late[1]
        assert "its loop answers" in caught.value.late[2]
        assert f"it is at {__file__}:{line - 2}" in caught.value.late[2]
    if coll.rank == 2:
        await side.send(torch.ones(1), 1, tag=5)
    if coll.rank:
        await coll.allreduce(1)
    await coll.barrier()


@pytest.mark.ranks(2)
async def test_w1_nothing_is_said_of_a_rank_that_came_meanwhile(coll: Communicator) -> None:
    """Rank 1 was late, and told so; then it came, and does the rest in time."""
    await coll.barrier()
    if coll.rank == 1:
        await asyncio.sleep(5)
    await coll.barrier()
    handle = coll.recv(src=1 - coll.rank, timeout=0.1)
    with pytest.raises(OperationTimeout) as caught:
        await handle
    assert "has issued nothing" not in str(caught.value)
    assert "ago" not in str(caught.value)
    assert handle.cancel()
    await coll.barrier()


@pytest.mark.ranks(2)
async def test_w1_has_issued_nothing_yet_is_true(coll: Communicator) -> None:
    if coll.rank == 1:
        await asyncio.sleep(2)
        await coll.send(torch.ones(1), 0, tag=1)
        await asyncio.sleep(20)
        await coll.barrier()
        return
    handle = coll.barrier()
    for seconds, known in ((1.5, "has issued nothing yet"), (5, "has issued no collective yet")):
        with pytest.raises(OperationTimeout, match=known):
            async with aiodist.timeout(seconds):
                await handle
    await coll.recv()
    await handle


@pytest.mark.ranks(2)
async def test_w1_a_late_message_names_source_tag_and_what_came_instead(coll: Communicator) -> None:
    if coll.rank == 1:
        await coll.send(torch.ones(10), 0, tag=4)
        await coll.send_object("other", 0, tag=3)
        await asyncio.sleep(10)
        await coll.send(torch.ones(2), 0, tag=3)
        return
    handle = coll.recv(src=1, tag=3, timeout=5)
    with pytest.raises(OperationTimeout) as caught:
        await handle
    assert "it waits for a message from rank 1 with tag 3" in str(caught.value)
    assert "arrived unmatched: rank 1 sent tag 4 float32[10], rank 1 sent tag 3 an object of" in str(caught.value)
    await aiodist.gather(handle, coll.recv(src=1, tag=4), coll.recv_object())


@pytest.mark.ranks(2)
async def test_w1_a_wait_that_is_cancelled_soon_tells_what_is_known(coll: Communicator) -> None:
    if coll.rank == 1:
        await asyncio.sleep(5)
    handle = coll.barrier()
    if coll.rank == 0:
        with pytest.raises(TimeoutError) as caught:
            async with asyncio.timeout(0.5):
                await handle
        cause: Any = caught.value.__cause__
        assert "late: rank 1 (has issued nothing yet)" in cause.__notes__[0]
    await handle


INTERRUPTED = """
import os, signal, threading
import aiodist

def interrupt(handle):
    while "does not answer" not in str(handle.late()):
        threading.Event().wait(0.01)
    os.kill(os.getpid(), signal.SIGINT)

async def main():
    async with aiodist.init() as coll:
        await coll.barrier()
        if coll.rank == 0:
            handle = coll.recv(src=1, tag=3)
            threading.Thread(target=interrupt, args=[handle]).start()
            await handle
        signal.pause()

aiodist.run(main)
"""


@pytest.mark.thorough
def test_w1_ctrl_c_carries_the_answer(tmp_path: Path) -> None:
    program = tmp_path / "interrupted.py"
    program.write_text(INTERRUPTED)
    command = [sys.executable, "-m", "aiodist.cli", "run", "-n", "2", "--mpi", "none", str(program)]
    environ = {**os.environ, "AIODIST_TRACEBACK": "full"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environ)
    assert ended.returncode == 130, ended
    (note,) = [line for line in ended.stderr.splitlines() if "[0] while awaiting recv" in line]
    assert "it waits for a message from rank 1 with tag 3; late: rank 1 (after barrier" in note
    assert "its loop does not answer" in note
    assert f"{program}:17 in main" in note
