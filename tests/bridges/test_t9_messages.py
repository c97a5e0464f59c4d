"""T9: messages between the ranks of two jobs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import aiodist
from tests.bridges.conftest import Meet

SIZES = [(1, 1), (2, 3), (3, 1), (1, 2), (3, 3)]


def noise(*key: int, count: int) -> torch.Tensor:
    """Return numbers of one rank for another, in float64."""
    return torch.randn(count, generator=torch.Generator().manual_seed(hash(key)), dtype=torch.float64)


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("p", "q"), SIZES)
async def test_t9_every_rank_of_one_job_exchanges_tensors_and_objects_with_every_rank_of_the_other(
    meet: Meet, wire: str, p: int, q: int
) -> None:
    async def talk(coll: aiodist.Communicator, bridge: Any, side: int) -> None:
        assert bridge.size == (p, q)[1 - side]
        sends = []
        for to in range(bridge.size):
            sends += [bridge.send(noise(side, coll.rank, to, n, count=n), to) for n in (1, 1001, 300_007)]
            sends.append(bridge.send_object({"from": coll.rank, "to": to, "side": side}, to))
            sends.append(bridge.send([torch.tensor(coll.rank), torch.tensor([to, side])], to))
        for src in range(bridge.size):
            for n in (1, 1001, 300_007):
                into = torch.empty(n, dtype=torch.float64) if n == 1001 else None
                got = await bridge.recv(into, src)
                assert into is None or got is into
                assert torch.equal(got, noise(1 - side, src, coll.rank, n, count=n))
            assert await bridge.recv_object(src, timeout=30) == {"from": src, "to": coll.rank, "side": 1 - side}
            a, b = await bridge.recv([torch.empty((), dtype=torch.int64), torch.empty(2, dtype=torch.int64)], src)
            assert (a.item(), b.tolist()) == (src, [coll.rank, 1 - side])
        await aiodist.gather(*sends)
        assert await coll.allreduce(1) == coll.size

    async def listener(coll: aiodist.Communicator, door: Any) -> None:
        await talk(coll, await door.accept(), 0)

    async def caller(coll: aiodist.Communicator, bridge: Any) -> None:
        await talk(coll, bridge, 1)

    await meet(p, q, listener, caller)
