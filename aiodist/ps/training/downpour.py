"""Clients whose updates the server adds up or applies, without waiting for one another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aiodist.communicator import Communicator
from aiodist.ps.training.base import Optimizer, Parameters, Run, TrainingClient, copy_all, like
from aiodist.ps.training.link import Centre, Key
from aiodist.ps.training.schedule import check_count


class Downpour(TrainingClient):
    """Local steps; every `n_push`-th step what they brought goes to the server, every `n_pull`-th takes the centre in.

    ```python
    async with Downpour(ps, net, optimizer, n_push=4, n_pull=4) as client:
        for x, y in batches:
            optimizer.zero_grad()
            loss_fn(net(x), y).backward()
            await client.step()
    ```
    A push sends the change of the weights since the last one, which the server adds. With `gradients=True` it sends the
    sum of the gradients instead, for the server's own rule, such as Adagrad there; a parameter that had no gradient
    since the last push is left out. A pull takes the centre and keeps what was not pushed yet: weights = centre + that.
    Where a step does both, it pushes first, and the weights are the centre's. A push is not waited for until the next
    push or pull, and one is in flight at most.

    The change of all workers is added, so with long intervals the centre overshoots: `EASGD` does not. `params`,
    `optimizer`, `group` and `run` are those of EASGD. Cost: the parameters' bytes up in a push, down in a pull; four
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
        gradients: bool = False,
        group: Communicator | None = None,
        run: Run | None = None,
    ) -> None:
        super().__init__(ps, params, group, run)
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer is {type(optimizer).__name__}: expected one of torch.optim")
        self._push_every = check_count("n_push", n_push)
        self._pull_every = check_count("n_pull", n_pull)
        self._optimizer = optimizer
        self._sums = _Sums(self._params) if gradients else None
        self._sent = like(self._params)
        self._base = like(self._params)
        """The weights, less the change that was not pushed."""
        copy_all(self._base, self._params)

    async def _step(self, step: int) -> None:
        self._steps = step
        await self._compute(self._local_step)
        if step % self._push_every == 0:
            await self._push()
        if step % self._pull_every == 0:
            await self._link.receive(self._keys, self._fetched)
            await self._compute(self._integrate)

    def _local_step(self) -> None:
        if self._sums is not None:
            self._sums.add()
        self._optimizer.step()

    async def _push(self) -> None:
        await self._link.settle()
        if self._sums is not None:
            self._link.push(*self._sums.taken(self._keys))
        elif self._link.talks:
            await self._compute(self._measure)
            self._link.push(self._keys, self._sent, "add")
        await self._compute(self._rebase)

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
    A step sends the gradients, by the rule that each tensor has on the server, and does not wait for them; one push is
    in flight at most. A parameter without a gradient is left out. Every `n_pull`-th step fetches the weights lock-free:
    they may mix versions. `params`, `group` and `run` are those of EASGD. Cost: the gradients' bytes up, the
    parameters' down in a pull, two buffers of their size. Lian, Huang, Li and Liu (2015),
    https://arxiv.org/abs/1506.08272.
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
        super().__init__(ps, params, group, run)
        self._pull_every = check_count("n_pull", n_pull)
        self._gradients = _Sums(self._params)

    async def _step(self, step: int) -> None:
        await self._link.settle()
        await self._compute(self._gradients.add)
        self._link.push(*self._gradients.taken(self._keys))
        self._steps = step
        if step % self._pull_every == 0:
            await self._link.receive(self._keys, self._fetched, "lock-free", settle=False)
            await self._compute(self._begin)


class _Sums:
    """Gradients added up, in buffers of their own: the next backward may write while these are on their way."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = params
        self._sums, self._spare = like(params), like(params)
        self._has = [False] * len(params)

    def add(self) -> None:
        """Add the gradients that are there."""
        with torch.no_grad():
            for i, (p, total) in enumerate(zip(self._params, self._sums, strict=True)):
                if p.grad is not None:
                    if not self._has[i]:
                        total.zero_()
                    total.add_(p.grad)  # sparse ones too
                    self._has[i] = True

    def taken(self, keys: Sequence[Key]) -> tuple[list[Key], list[Tensor]]:
        """Return what there is, with its keys, and begin anew; it stays untouched until after the next call."""
        found = [(key, total) for key, total, has in zip(keys, self._sums, self._has, strict=True) if has]
        self._sums, self._spare = self._spare, self._sums
        self._has = [False] * len(self._has)
        return [key for key, _ in found], [total for _, total in found]
