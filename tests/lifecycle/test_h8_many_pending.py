"""Messages that list what is pending stay short: operations are counted by kind, and three of each are named."""

from __future__ import annotations

import asyncio
import re

import pytest
import torch

import aiodist
from aiodist.testing import run_ranks
from aiodist.testing.seams.world import Limits, opened

MANY = r"200 allreduce operations, the first of them (allreduce #\d+ issued at \S+:\d+ in \S+(, |;|$)){3}"


def issue(coll: aiodist.Communicator) -> list[aiodist.Handle[torch.Tensor]]:
    return [coll.allreduce(torch.ones(3)) for _ in range(200)]


@pytest.mark.drawn(1)
@pytest.mark.ranks(2, backend=("local", "gloo", "shm"))
async def test_h8_a_timeout_counts_what_was_pending_by_kind(coll: aiodist.Communicator) -> None:
    if coll.rank == 0:
        handles = [*issue(coll), coll.recv(torch.zeros(1), src=1)]
        with pytest.raises(aiodist.OperationTimeout) as caught:
            async with aiodist.timeout(0.5):
                await aiodist.gather(*handles)
        text = str(caught.value)
        assert re.search(MANY, text), text
        assert re.search(r"; recv #\d+ issued at", text), text
        assert len(text) < 1500
        await coll.send(torch.ones(1), 1)
        await aiodist.gather(*handles)
    else:
        await coll.recv(torch.zeros(1), src=0)
        await coll.send(torch.ones(1), 0)
        await aiodist.gather(*issue(coll))


def test_l2_what_is_not_drained_is_counted_by_kind() -> None:
    async def main(rank: int) -> None:
        async with opened(Limits(drain=0.5)) as coll:
            if rank == 1:
                await asyncio.sleep(3)
            for handle in issue(coll):
                handle.add_done_callback(lambda _: None)  # each outcome is retrieved

    with pytest.raises(aiodist.OperationTimeout) as caught:
        run_ranks(2, main)
    assert re.search("still pending after 0.5 s: " + MANY, caught.value.args[0]), caught.value


def test_w4_a_deadlock_counts_what_was_pending() -> None:
    async def main(rank: int) -> None:
        async with aiodist.init() as coll:
            if rank == 0:
                await aiodist.gather(*issue(coll))
            await coll.recv(torch.zeros(1), src=0)

    with pytest.raises(aiodist.DeadlockError, match="rank 0 waits in 200 operations, the first of them:\n") as caught:
        run_ranks(2, main)
    assert len(re.findall(r"in allreduce #\d+ issued at", caught.value.args[0])) == 3
