"""P8: the training clients on a real parameter server, with ranks that do not wait for one another."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aiodist import Communicator, ParameterServer
from aiodist.errors import CommunicatorClosed
from aiodist.ps import EAMSGD, EASGD, SGD, AsySGInCon, Bounded, Downpour

Make = Callable[..., Any]

TRUE = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)


def weights(coll: Communicator) -> nn.Parameter:
    return nn.Parameter(torch.arange(4, dtype=torch.float64) + 10.0 * coll.rank)


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("kind", [EASGD, EAMSGD])
async def test_p8_exchanges_of_real_ranks_in_turns_are_exact(coll: Communicator, kind: type[EASGD]) -> None:
    w = weights(coll)
    async with ParameterServer(coll, {"w": w}, split_bytes=8) as ps:
        with torch.no_grad():
            w.add_(coll.rank + 1.0)  # away from the centre
        client = kind(ps, [w], torch.optim.SGD([w], lr=0.0), tau=1, alpha=0.3)
        w.grad = torch.ones_like(w)
        for turn in range(coll.size):
            if turn == coll.rank:
                before, c = w.detach().clone(), await ps.pull("w", torch.empty_like(w))
                await client.step()
                await ps.sync()
                moved = 0.3 * (before - c)
                assert torch.equal(await ps.pull("w", torch.empty_like(w)), c + moved)
                await client.aclose()
                assert torch.equal(w.detach(), before - moved)
            await coll.barrier()


@pytest.mark.ranks(4)
async def test_p8_exchanges_at_the_same_time_lose_nothing(coll: Communicator) -> None:
    w = weights(coll)
    async with ParameterServer(coll, {"w": w}) as ps:
        with torch.no_grad():
            w.mul_(coll.rank + 1.0)
        [*before] = await coll.allgather(w.detach())
        total = sum(before, start=await ps.pull("w", torch.empty_like(w)))
        await coll.barrier()
        client = EASGD(ps, [w], torch.optim.SGD([w], lr=0.0), tau=2, alpha=0.2, prefetch=1)
        w.grad = torch.ones_like(w)
        for _ in range(20):
            await client.step()
        await client.aclose()
        await coll.barrier()
        [*after] = await coll.allgather(w.detach())
        centre = await ps.pull("w", torch.empty_like(w))
        torch.testing.assert_close(sum(after, start=centre), total)  # what the weights gave, the centre has
        await coll.barrier()


MAKERS: dict[str, tuple[Any, Make]] = {
    "easgd": ("add", lambda ps, w, o: EASGD(ps, [w], o, tau=3, alpha=0.2)),
    "prefetch": ("add", lambda ps, w, o: EASGD(ps, [w], o, tau=3, alpha=0.2, warmup=2, prefetch=2)),
    "eamsgd": ("add", lambda ps, w, o: EAMSGD(ps, [w], o, tau=3, alpha=0.2, momentum=0.5)),
    "downpour": ("add", lambda ps, w, o: Downpour(ps, [w], o, n_push=1, n_pull=2)),
    "asysg": (SGD(lr=0.05), lambda ps, w, o: AsySGInCon(ps, [w], n_pull=1)),
}


async def descend(coll: Communicator, case: str, **how: Any) -> None:
    """Train every worker on a noisy bowl, and look for its lowest point at the centre."""
    rule, make = MAKERS[case]
    w = weights(coll)
    draw = torch.Generator().manual_seed(coll.rank)
    async with ParameterServer(coll, {"w": w}, rule=rule, **how) as ps:
        if ps.is_worker:
            async with make(ps, w, torch.optim.SGD([w], lr=0.1)) as client:
                for _ in range(180):
                    w.grad = w.detach() - TRUE + 0.05 * torch.randn(4, generator=draw, dtype=torch.float64)
                    await client.step()
            await ps.barrier()
            centre: Tensor = await ps.pull("w", torch.empty_like(w))
            torch.testing.assert_close(centre, TRUE, rtol=0, atol=0.2)


@pytest.mark.drawn(3)
@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("case", MAKERS)
async def test_p8_clients_train_on_servers_that_work_too(coll: Communicator, case: str) -> None:
    await descend(coll, case)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("case", ["easgd", "downpour", "asysg"])
async def test_p8_clients_train_on_servers_of_their_own(coll: Communicator, case: str) -> None:
    await descend(coll, case, servers=1, split_bytes=8)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("case", ["downpour", "asysg"])
async def test_p8_clients_train_with_bounded_staleness(coll: Communicator, case: str) -> None:
    await descend(coll, case, consistency=Bounded(3))


@pytest.mark.ranks(2)
async def test_p8_a_step_raises_the_loss_of_a_server(coll: Communicator) -> None:
    w = weights(coll)
    async with ParameterServer(coll, {"w": w}) as ps:
        client = EASGD(ps, [w], torch.optim.SGD([w], lr=0.1), tau=1, alpha=0.2)
        w.grad = torch.ones_like(w)
        await client.step()
        await client.aclose()
    late = EASGD(ps, [w], torch.optim.SGD([w], lr=0.1), tau=1, alpha=0.2)
    before = w.detach().clone()
    with pytest.raises(CommunicatorClosed, match="closed"):
        await late.step()
    assert torch.equal(w.detach(), before)
