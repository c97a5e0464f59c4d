"""P8: EASGD with one client at a time on f = x^2/2 is stable up to alpha = (4-2 eta)/(4-eta), as in the paper."""

from collections.abc import Generator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aiodist.ps import EASGD


class Over:
    def done(self) -> bool:
        return True

    def __await__(self) -> Generator[Any, None, None]:
        return
        yield


class Centre:
    """One tensor, to which pushes are added."""

    def __init__(self, c: Tensor) -> None:
        self.c = c

    def push(self, what: Sequence[str], values: Sequence[Tensor], *, rule: str | None = None) -> Over:
        assert rule == "add"
        self.c += values[0]
        return Over()

    def pull(self, what: Sequence[str], out: Sequence[Tensor], *, reads: str | None = None) -> Over:
        out[0].copy_(self.c)
        return Over()


async def round_of(clients: int, eta: float, alpha: float) -> Tensor:
    """Return the matrix by which a step of each client maps the state (x of each client, centre).

    The step is linear and treats elements alone, so element j of every tensor begins at the j-th unit state.
    """
    units = torch.eye(clients + 1, dtype=torch.float64)
    centre = Centre(units[clients].clone())
    weights = [nn.Parameter(units[i].clone()) for i in range(clients)]
    for w in weights:
        client = EASGD(centre, {"x": w}, torch.optim.SGD([w], lr=eta), tau=1, alpha=alpha)
        w.square().sum().div(2).backward()
        await client.step()
        await client.aclose()
    return torch.stack([*(w.detach() for w in weights), centre.c])


async def growth(clients: int, eta: float, alpha: float) -> float:
    """Return the factor by which the state grows in a round, in the end."""
    matrix = await round_of(clients, eta, alpha)
    return float(torch.linalg.eigvals(matrix).abs().max())


@pytest.mark.parametrize("clients", [1, 3])
@pytest.mark.parametrize("eta", [0.1, 0.5, 1.0, 1.5])
async def test_p8_easgd_is_stable_up_to_the_bound_and_diverges_above(clients: int, eta: float) -> None:
    stable, unstable = 0.01, 1.0
    assert await growth(clients, eta, stable) < 1 < await growth(clients, eta, unstable)
    while unstable - stable > 1e-4:
        middle = (stable + unstable) / 2
        if await growth(clients, eta, middle) <= 1:
            stable = middle
        else:
            unstable = middle
    bound = (4 - 2 * eta) / (4 - eta)
    assert stable == pytest.approx(bound, rel=0.01)
    for share in (0.2, 0.5, 0.9, 0.99):  # below it holds everywhere, not only where bisection looked
        assert await growth(clients, eta, share * bound) < 1
