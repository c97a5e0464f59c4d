"""H7: a communicator is given up by each rank that learns of a failure, wherever that is."""

from __future__ import annotations

import asyncio
import gc

import pytest
import torch

import aiodist
from aiodist import Communicator, CommunicatorAborted, Handle, init
from aiodist.handles import from_source


class Ready:
    """Is over at the second look."""

    looks = 0

    def poll(self) -> bool:
        self.looks += 1
        return self.looks > 1

    def result(self) -> int:
        return self.looks


class Quitter:
    """Gives up as soon as it is told."""

    def __init__(self, coll: Communicator) -> None:
        self._coll = coll

    def wake(self, handle: Handle[int], late: Exception | None, /) -> None:
        self._coll.abort("it is told")


async def given_up() -> None:
    async with init() as coll:
        ready = from_source(Ready(), "ready")
        ready.add_waiter(Quitter(coll))
        assert await asyncio.wait_for(ready, 10) >= 2
        await coll.allreduce(1)


@pytest.mark.timeout(30)
async def test_h7_giving_up_while_the_loop_polls() -> None:
    """Who waits for a handle on the loop is told with the transport lock held: giving up must not wait for it."""
    with pytest.raises(CommunicatorAborted, match="it is told"):
        await given_up()


@pytest.mark.parametrize("src", [0, aiodist.ANY])
def test_h3_memory_of_a_receive_that_nothing_matched_is_free_after_a_failure(
    src: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """What nothing writes any more is the program's again: in a notebook the next attempt uses the same tensors."""
    t = torch.ones(4)

    async def attempt(*, fail: bool) -> None:
        async with init() as coll:
            if fail:
                handle = coll.recv(t, src)
                raise ValueError(f"while {handle.op} waits")
            await coll.allreduce(t)

    with pytest.raises(ValueError, match="while recv waits"):
        aiodist.run(attempt(fail=True))
    gc.collect()
    aiodist.run(attempt(fail=False))
    assert "nobody awaited" not in capfd.readouterr().err  # the failure itself has been told
