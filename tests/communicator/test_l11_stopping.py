"""`coll.stopping()`: what one rank was asked, all ranks know at the same place; over the ranks of one process."""

from __future__ import annotations

import threading

import pytest
import torch

import aiodist
from aiodist import Communicator, ConfigError


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.ranks(2, backend="gloo")
async def test_l11_one_rank_is_asked_and_all_stop_at_the_same_round(coll: Communicator) -> None:
    last, rounds = coll.size - 1, 0
    while not await coll.stopping():
        t = await coll.allreduce(torch.tensor([float(coll.rank)]))
        assert t.item() == sum(range(coll.size))
        rounds += 1
        if coll.rank == last and rounds == 3:
            coll.request_stop()
    assert rounds == 3
    assert await coll.stopping() is True  # there is no way back
    side = await coll.dup()
    assert await side.stopping() is True  # nor does it matter where one asks
    await side.aclose()


@pytest.mark.ranks(3)
async def test_l11_a_collective_that_only_some_ranks_look_for_is_a_mismatch(coll: Communicator) -> None:
    with pytest.raises(aiodist.MismatchError, match="stopping"):
        await (coll.stopping() if coll.rank else coll.allreduce(torch.ones(1)))
    assert await coll.stopping() is False


def test_l11_another_thread_hears_no_signals() -> None:
    seen: list[BaseException] = []

    async def main() -> None:
        async with aiodist.init(stop_on_signal=True):
            pass

    def run() -> None:
        try:
            aiodist.run(main)
        except ConfigError as error:
            seen.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert "another thread than the main one" in str(seen[0])
