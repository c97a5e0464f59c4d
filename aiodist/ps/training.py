"""Training against a parameter server: clients that push and pull at chosen steps, for any of torch's optimizers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from aiodist.communicator import Communicator
from aiodist.ps.training_client import Centre, Parameters, Run, TrainingClient, copy_all, like
from aiodist.types import check_int

__all__ = ["EAMSGD", "EASGD", "AsySGInCon", "Downpour", "Schedule", "TrainingClient", "elastic_alpha"]


@dataclass(frozen=True)
class Schedule:
    """The steps at which a client pulls, and at which it integrates the values. Steps count from 1.

    The first `warmup` steps are local. After them every `tau`-th step integrates values that are pulled `prefetch`
    steps earlier, so they travel while the client computes. Raises ValueError unless `tau` is at least 1, `warmup` at
    least 0 and `prefetch` from 0 to below `tau`.

    Examples:
        >>> schedule = Schedule(tau=50, warmup=20, prefetch=25)
        >>> [step for step in range(1, 171) if schedule.integrates(step)]
        [70, 120, 170]
        >>> [step for step in range(1, 171) if schedule.pulls(step)]
        [45, 95, 145]
    """

    tau: int
    warmup: int = 0
    prefetch: int = 0

    def __post_init__(self) -> None:
        check_int("tau", self.tau)
        check_int("warmup", self.warmup, 0)
        check_int("prefetch", self.prefetch, 0)
        if self.prefetch >= self.tau:  # a pull must come after the integration before
            raise ValueError(f"prefetch={self.prefetch} with tau={self.tau}: expected less than tau")

    def integrates(self, step: int) -> bool:
        """Return True if `step` integrates the centre."""
        past = step - self.warmup
        return past > 0 and past % self.tau == 0

    def pulls(self, step: int) -> bool:
        """Return True if `step` pulls the centre. With `prefetch` 0 the same step integrates the centre."""
        return self.integrates(step + self.prefetch)


def elastic_alpha(beta: float, groups: int) -> float:
    """Return the `alpha` of each of `groups` clients that together pull at the centre with `beta`.

    A data-parallel group of any size is one client. Zhang, Choromanska and LeCun (2015) use beta 0.9:
    `elastic_alpha(0.9, 8)` for 8 workers. Raises ValueError if the result is no `alpha` for `EASGD`.

    >>> elastic_alpha(0.9, 3)
    0.3
    """
    check_int("groups", groups)
    if not 0 < beta <= groups:
        raise ValueError(f"beta={beta} with groups={groups}: expected more than 0 and at most {groups}")
    return beta / groups


class Downpour(TrainingClient):
    """Local steps; every `n_push`-th step pushes the change of the weights, every `n_pull`-th integrates the centre.

    ```python
    async with Downpour(ps, net, optimizer, n_push=4, n_pull=4) as client:
        for x, y in batches:
            optimizer.zero_grad()
            loss_fn(net(x), y).backward()
            await client.step()
    ```
    A push sends the change of the weights since the last one, which the server adds. A pull takes the centre and keeps
    the change that was not pushed yet: weights = centre + change. A step that does both pushes first, and the weights
    become the centre's. A step waits for a push only at the next push or pull.

    The change of all workers is added, so with long intervals the centre overshoots: `EASGD` does not. `params`,
    `optimizer`, `group` and `run` are those of EASGD. Cost: the parameters' bytes up in a push, down in a pull; three
    buffers of their size. Dean et al. (2012), "Large Scale Distributed Deep Networks".
    """

    def __init__(
        self,
        ps: Centre,
        params: Parameters,
        optimizer: Optimizer,
        *,
        n_push: int,
        n_pull: int,
        group: Communicator | None = None,
        run: Run | None = None,
    ) -> None:
        super().__init__(ps, params, optimizer, group, run)
        self._push_every = check_int("n_push", n_push)
        self._pull_every = check_int("n_pull", n_pull)
        self._sent = like(self._params)
        self._base = like(self._params)
        """Weights without the change that was not pushed."""
        self._rebase()

    async def _step(self, step: int) -> None:
        self._steps = step
        await self._compute(self._local_step)
        if step % self._push_every == 0:
            await self._settle()
            await self._compute(self._measure)
            self._push(self._keys, self._sent, "add")
            await self._compute(self._rebase)  # without a suspension after the push, which now has the change
        if step % self._pull_every == 0:
            await self._receive()
            await self._compute(self._integrate)

    def _measure(self) -> None:
        with torch.no_grad():
            for sent, p, base in zip(self._sent, self._params, self._base, strict=True):
                torch.sub(p, base, out=sent)

    def _rebase(self) -> None:
        copy_all(self._base, self._params)

    def _integrate(self) -> None:
        with torch.no_grad():
            for p, base, c in zip(self._params, self._base, self._fetched, strict=True):
                p.sub_(base).add_(c)
        self._base, self._fetched = self._fetched, self._base

    def _begin(self) -> None:
        super()._begin()
        self._rebase()


class AsySGInCon(TrainingClient):
    """Asynchronous stochastic gradient with inconsistent reads: the server's optimizer moves the weights, no one waits.

    ```python
    async with aiodist.ParameterServer(coll, net, rule=SGD(lr=0.1)) as ps, AsySGInCon(ps, net) as client:
        for x, y in batches:
            net.zero_grad()
            loss_fn(net(x), y).backward()
            await client.step()
    ```
    A step sends the gradients, by the rule of each tensor on the server, and does not wait for them. A parameter
    without a gradient is skipped. Every `n_pull`-th step fetches the weights lock-free: they may mix versions.
    `params`, `group` and `run` are those of EASGD. Cost: the gradients' bytes up, the parameters' down in a pull, two
    buffers of their size. Lian, Huang, Li and Liu (2015), https://arxiv.org/abs/1506.08272.
    """

    def __init__(
        self,
        ps: Centre,
        params: Parameters,
        *,
        n_pull: int = 1,
        group: Communicator | None = None,
        run: Run | None = None,
    ) -> None:
        super().__init__(ps, params, None, group, run)
        self._pull_every = check_int("n_pull", n_pull)
        self._gradients = like(self._params)
        """Copies, since the next backward may write gradients while these are in flight."""
        self._has: list[bool] = []

    async def _step(self, step: int) -> None:
        await self._settle()
        await self._compute(self._take)
        found = [i for i, has in enumerate(self._has) if has]
        self._push([self._keys[i] for i in found], [self._gradients[i] for i in found])
        self._steps = step
        if step % self._pull_every == 0:
            await self._receive("lock-free", settle=False)
            await self._compute(self._begin)

    def _take(self) -> None:
        self._has = [p.grad is not None for p in self._params]
        with torch.no_grad():
            for p, kept in zip(self._params, self._gradients, strict=True):
                if p.grad is not None:
                    kept.zero_().add_(p.grad)  # sparse ones too


class EASGD(TrainingClient):
    """Elastic averaging: every `tau` steps weights w and centre c move towards each other by `alpha` (w - c).

    ```python
    async with EASGD(ps, net, optimizer, tau=64, alpha=elastic_alpha(0.9, workers)) as client:
        for x, y in batches:
            optimizer.zero_grad()
            loss_fn(net(x), y).backward()
            await client.step()
    ```
    An exchange takes the weights of the current gradients, before the optimizer steps: `w` loses `alpha (w - c)`, and
    the same is added to the centre (rule "add"); `c` is the pulled centre. The pull begins `prefetch` steps
    earlier, and the first `warmup` steps are local (see `Schedule`). A step waits for a push only at the next
    exchange. The result of the training is the centre.

    `params` are a module or parameters registered with `ps`, or a dict of parameters by the server's names. `optimizer`
    is any of torch's without a closure. `group` is the communicator of a data-parallel group with equal weights: only
    its rank 0 calls the server, and broadcasts; `alpha` counts groups (`elastic_alpha`). `run` runs the computation,
    such as the `run` of a DataParallel; by default the loop's thread computes.

    On f = x^2/2 with learning rate eta, one client at a time, it is stable for `alpha` up to (4-2 eta)/(4-eta). Raises
    ValueError for `alpha` outside (0, 1], for an optimizer of other parameters, and as `Schedule`. Cost of an
    exchange: the parameters' bytes down and up, two buffers of their size. Zhang, Choromanska and LeCun (2015),
    https://arxiv.org/abs/1412.6651; warm-up and prefetch as in TorchMPI.
    """

    def __init__(  # noqa: PLR0913 - each is a choice of the user
        self,
        ps: Centre,
        params: Parameters,
        optimizer: Optimizer,
        *,
        tau: int,
        alpha: float,
        warmup: int = 0,
        prefetch: int = 0,
        group: Communicator | None = None,
        run: Run | None = None,
    ) -> None:
        if not 0 < alpha <= 1:
            raise ValueError(f"alpha={alpha}: expected more than 0 and at most 1")
        self.schedule = Schedule(tau, warmup, prefetch)
        super().__init__(ps, params, optimizer, group, run)
        self._alpha = alpha
        self._own = self._params
        """The weights that take part in an exchange."""
        self._moved = like(self._params)

    async def _step(self, step: int) -> None:
        if self.schedule.pulls(step):
            self._pull()
        exchanges = self.schedule.integrates(step)
        if exchanges:
            await self._receive()
            await self._compute(self._measure)
            self._push(self._keys, self._moved, "add")
        self._steps = step
        await self._compute(self._exchange_and_step if exchanges else self._local_step)

    def _measure(self) -> None:
        with torch.no_grad():
            for moved, w, c in zip(self._moved, self._own, self._fetched, strict=True):
                torch.sub(w, c, out=moved).mul_(self._alpha)

    def _exchange_and_step(self) -> None:
        self._move(self._own)
        self._local_step()

    def _move(self, weights: Sequence[Tensor]) -> None:
        """Move `weights` by as much as the centre, in the opposite direction."""
        with torch.no_grad():
            for w, moved in zip(weights, self._moved, strict=True):
                w.sub_(moved)


class EAMSGD(EASGD):
    """EASGD with Nesterov's momentum on the local step of any optimizer.

    The method (algorithm 2 of the paper) has weights x and a velocity v; it takes the gradient at x + delta v, where
    delta is `momentum`:

        v' = delta v + u(x + delta v),  x' = x + v'

    with u(y) the move of the optimizer at y (for SGD: -eta times the gradient there). Your loop computes gradients at
    the parameters, so the parameters hold the point ahead, y = x + delta v. The optimizer then moves them to
    y + u = x + delta v + u = x + v' = x', and v' is the distance from x. So only x is kept in addition to the
    parameters, and a step is: optimizer, v' = y - x, x = y, y += delta v'. An exchange moves x and y alike, by
    `alpha` (x - c), and does not change v. With `momentum` 0 it is EASGD.

    Between steps the parameters hold the point ahead: `with client.weights():` makes them hold x, as does closing the
    client. Use an optimizer without momentum. The other arguments are those of EASGD.
    """

    def __init__(
        self,
        ps: Centre,
        params: Parameters,
        optimizer: Optimizer,
        *,
        momentum: float = 0.9,
        **settings: Any,  # noqa: ANN401
    ) -> None:
        """Raise ValueError unless 0 <= `momentum` < 1, and as EASGD."""
        super().__init__(ps, params, optimizer, **settings)
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum={momentum}: expected at least 0 and less than 1")
        self._momentum = momentum
        self._own = like(self._params)
        copy_all(self._own, self._params)

    @contextmanager
    def weights(self) -> Iterator[None]:
        """Let the parameters hold this client's weights x in the block. Outside they hold x + delta v."""
        ahead = [p.detach().clone() for p in self._params]
        copy_all(self._params, self._own)
        try:
            yield
        finally:
            copy_all(self._params, self._own if self._closed else ahead)

    def _begin(self) -> None:
        super()._begin()
        copy_all(self._own, self._fetched)

    def _end(self) -> None:
        copy_all(self._params, self._own)

    def _exchange_and_step(self) -> None:
        self._move(self._params)
        super()._exchange_and_step()

    def _local_step(self) -> None:
        super()._local_step()
        with torch.no_grad():
            for p, x in zip(self._params, self._own, strict=True):
                velocity = p - x
                x.copy_(p)
                p.add_(velocity, alpha=self._momentum)
