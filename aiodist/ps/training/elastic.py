"""Clients on an elastic band: each explores on its own, pulled to a centre that they pull along."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from aiodist.communicator import Communicator
from aiodist.ps.training.base import Optimizer, Parameters, Run, TrainingClient, copy_all, like
from aiodist.ps.training.link import Centre
from aiodist.ps.training.schedule import Schedule


class EASGD(TrainingClient):
    """Elastic averaging: every `tau` steps weights w and centre c move towards each other by `alpha` (w - c).

    ```python
    async with EASGD(ps, net, optimizer, tau=64, alpha=elastic_alpha(0.9, workers)) as client:
        for x, y in batches:
            optimizer.zero_grad()
            loss_fn(net(x), y).backward()
            await client.step()
    ```
    An exchange takes the weights for which the gradients were computed, before the optimizer steps: `w` loses
    `alpha (w - c)` and exactly that is added to the centre (rule "add"), `c` being the centre as pulled. With
    `prefetch` that was asked for so many steps earlier; the first `warmup` steps are the client's own (see `Schedule`).
    A push is not waited for until the next exchange. What training found is the centre.

    `params` are a module or parameters registered with `ps`, or a dict of parameters by the server's names. `optimizer`
    is any of torch's without a closure. `group` is the communicator of a data-parallel group with equal weights: its
    rank 0 talks to the server, once for all, and broadcasts; `alpha` counts groups (`elastic_alpha`). `run` says where
    to compute, such as the `run` of a DataParallel; else it is done at once, in the loop's thread.

    On f = x^2/2 with learning rate eta, one client at a time, it is stable for `alpha` up to (4-2 eta)/(4-eta).
    Raises ValueError for `alpha` outside (0, 1] and what `Schedule` raises. Cost of an exchange: the parameters' bytes
    down and up, two buffers of their size. Zhang, Choromanska and LeCun (2015), https://arxiv.org/abs/1412.6651;
    warm-up and prefetch as in TorchMPI.
    """

    def __init__(  # noqa: PLR0913 - one for each knob
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
        super().__init__(ps, params, group, run)
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer is {type(optimizer).__name__}: expected one of torch.optim")
        if not 0 < alpha <= 1:
            raise ValueError(f"alpha={alpha}: expected more than 0 and at most 1")
        self.schedule = Schedule(tau, warmup, prefetch)
        self._optimizer = optimizer
        self._alpha = alpha
        self._own = self._params
        """The weights that take part in an exchange."""
        self._moved = like(self._params)

    async def _step(self, step: int) -> None:
        link = self._link
        if self.schedule.pulls(step):
            link.ask(self._keys, self._fetched)
        exchanges = self.schedule.integrates(step)
        if exchanges:
            await link.receive(self._keys, self._fetched)
            await self._compute(self._measure)
            link.push(self._keys, self._moved, "add")
        self._steps = step
        await self._compute(self._exchange_and_step if exchanges else self._local_step)

    def _measure(self) -> None:
        with torch.no_grad():
            for moved, w, c in zip(self._moved, self._own, self._fetched, strict=True):
                torch.sub(w, c, out=moved).mul_(self._alpha)

    def _exchange_and_step(self) -> None:
        self._give_way()
        self._local_step()

    def _give_way(self) -> None:
        """Move the parameters by what the centre moves, the other way."""
        with torch.no_grad():
            for p, moved in zip(self._params, self._moved, strict=True):
                p.sub_(moved)

    def _local_step(self) -> None:
        self._optimizer.step()


class EAMSGD(EASGD):
    """EASGD with Nesterov's momentum on the local step, which any optimizer may make.

    The method (algorithm 2 of the paper) has weights x and a velocity v; it takes the gradient at x + delta v, where
    delta is `momentum`:

        v' = delta v + u(x + delta v),  x' = x + v'

    with u(y) the move that the optimizer makes at y (for SGD: -eta times the gradient there). Your loop computes
    gradients at what the parameters hold, so they hold the point ahead, y = x + delta v. The optimizer then moves them
    to y + u = x + delta v + u = x + v', which is x'; how far that lies from x is v'. So x alone is kept beside the
    parameters, and a step is: optimizer, v' = y - x, x = y, y += delta v'. An exchange moves x and y alike, by
    `alpha` (x - c), and leaves v alone. With `momentum` 0 it is EASGD.

    Between steps the parameters hold the point ahead: `with client.weights():` has them hold x, as they do after the
    client was closed. Give the optimizer itself no momentum. Arguments as those of EASGD; `momentum` lies in [0, 1).
    """

    def __init__(  # noqa: PLR0913 - one for each knob
        self,
        ps: Centre,
        params: Parameters,
        optimizer: Optimizer,
        *,
        tau: int,
        alpha: float,
        momentum: float = 0.9,
        warmup: int = 0,
        prefetch: int = 0,
        group: Communicator | None = None,
        run: Run | None = None,
    ) -> None:
        super().__init__(
            ps, params, optimizer, tau=tau, alpha=alpha, warmup=warmup, prefetch=prefetch, group=group, run=run
        )
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum={momentum}: expected at least 0 and less than 1")
        self._momentum = momentum
        self._own = like(self._params)
        copy_all(self._own, self._params)

    @contextmanager
    def weights(self) -> Iterator[None]:
        """Have the parameters hold this client's weights x; outside they hold the point ahead, x + delta v."""
        with super().weights():
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

    def _give_way(self) -> None:
        super()._give_way()
        with torch.no_grad():
            for x, moved in zip(self._own, self._moved, strict=True):
                x.sub_(moved)

    def _local_step(self) -> None:
        super()._local_step()
        with torch.no_grad():
            for p, x in zip(self._params, self._own, strict=True):
                velocity = p - x
                x.copy_(p)
                p.add_(velocity, alpha=self._momentum)
