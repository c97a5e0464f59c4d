"""`LocalSGD`: ranks train by themselves, and average their parameters now and then."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch import _foreach_add_ as add_each
from torch import _foreach_copy_ as copy_each
from torch import _foreach_sub as difference
from torch.optim import Optimizer

from aiodist.checkpoints.saving import load_exactly
from aiodist.communicator import parts_of
from aiodist.handles import Handle
from aiodist.handles.calls import located
from aiodist.handles.tracing import span
from aiodist.nn.compute import Forward, called, plain_step
from aiodist.nn.data_parallel import DataParallel, check_optimizer, expected_state
from aiodist.nn.drivers import check_one_pass
from aiodist.nn.layout import Parcel
from aiodist.nn.net_driver import NetDriver
from aiodist.nn.pass_status import PassStatus
from aiodist.nn.steps import count_as_stepped
from aiodist.types import Stateful

MakeOuter = Callable[[list[nn.Parameter]], Optimizer]


@dataclass(frozen=True)
class SlowMo:
    """Slow momentum over the averages of a `LocalSGD`, which takes it as `outer`.

    With x the values at the beginning of a period, y the average at its end and r the learning rate of the local steps:
    u becomes momentum u + (x - y) / r, and x becomes x - lr r u. So momentum=0 with lr=1 is plain averaging. r is the
    rate in the first step of the period, for each parameter its own.

    Raises:
        ValueError: Unless 0 <= momentum < 1 and lr > 0.

    Source: Wang, Tantia, Ballas and Rabbat, "SlowMo: Improving communication-efficient distributed SGD with slow
    momentum", ICLR 2020, doi:10.48550/arXiv.1910.00643. The paper's beta, 0.4 to 0.8, is `momentum`; its alpha, mostly
    1, is `lr`.

    """

    momentum: float
    lr: float = 1.0

    def __post_init__(self) -> None:
        if not (0 <= self.momentum < 1 and self.lr > 0):
            raise ValueError(f"{self}: expected a momentum of at least 0, and less than 1, and lr more than 0")


@dataclass(frozen=True)
class Elastic:
    """Elastic averaging among the ranks of a `LocalSGD`, which takes it as `outer`.

    At the end of a period a rank continues from x - alpha (x - centre), with x its parameters, and the centre moves by
    alpha times the sum of x - centre over all ranks. The centre is the result of training.

    Raises:
        ValueError: Unless 0 < alpha <= 1.

    Source: Zhang, Choromanska and LeCun, "Deep learning with elastic averaging SGD", NIPS 2015,
    doi:10.48550/arXiv.1412.6651, where alpha is 0.9 / ranks.

    """

    alpha: float

    def __post_init__(self) -> None:
        if not 0 < self.alpha <= 1:
            raise ValueError(f"alpha={self.alpha}: expected more than 0, at most 1; the paper's is 0.9 / ranks")


class LocalSGD(NetDriver):
    """An optimizer with steps of one rank alone; all ranks average their parameters every few steps.

    ```python
    local = await nn.LocalSGD.create(net, torch.optim.SGD(net.parameters(), lr=0.1), every=8)
    for x, y in batches:
        loss = await net.step(lambda: loss_fn(net(x), y), local)
    await local.flush()
    ```
    A *period* is `every` steps. At its end each rank sends the difference between its parameters and the *centre*, the
    values that all ranks have in common, and the average difference moves the centre. Every rank makes the same number
    of steps. A step inside `net.join` raises `RuntimeError`.

    The settings of `net.configure` apply to this rank's gradients: clip_norm clips their norm, and a scaler skips a
    step of this rank alone. A scheduler steps in each step, so that ranks keep the same rates. If forward or the
    optimizer raises, only this rank gets the error: the step counts, and the average that is due is made. Buffers and
    the state of `optimizer` stay each rank's own. Averages are sent uncompressed, also if the net compresses gradients,
    and include frozen parameters.

    Cost: memory for one copy of the parameters, two while an average is in flight, three with `overlap` or `Elastic`.
    In each period one allreduce of the parameters and a small one before it. In an elastic world also a copy of the
    optimizer's state in each period, to which `net.rebind` may return.

    Source: Stich, "Local SGD converges fast and communicates little", ICLR 2019, doi:10.48550/arXiv.1805.09767.
    """

    _create = "create(net, optimizer, every=...)"

    @classmethod
    @located
    async def create(
        cls,
        net: DataParallel,
        optimizer: Optimizer,
        *,
        every: int,
        start: int = 0,
        overlap: bool = False,
        outer: SlowMo | Elastic | MakeOuter | None = None,
    ) -> Self:
        """Return an optimizer of `net` that averages parameters in place of gradients.

        All ranks call it with the same arguments, between two steps; it sends nothing.

        Args:
            net: The net to train.
            optimizer: Any optimizer of torch with parameters of the net.
            every: Number of steps between two averages. 1, without `overlap` and `outer`, is ordinary training.
            start: Number of ordinary steps at the beginning, with reduced gradients (post-local SGD).
            overlap: Send an average while the next period computes, and apply it at the end of that period; the rank
                keeps its own progress since. Without it the last step of a period waits for the average.
            outer: How the centre moves. None: to the average. `SlowMo(momentum)`: with slow momentum. `Elastic(alpha)`:
                ranks and centre move towards each other (EASGD). A function that takes a list of parameters and returns
                an optimizer: centre minus average is their gradient (DiLoCo).

        Raises:
            TypeError: If an argument has the wrong type, or an optimizer needs a closure.
            ValueError: If `every` is below 1 or `start` below 0, or if `optimizer` has no parameter of the net.

        Example:
            ```python
            def outer(params):
                return torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)

            inner = torch.optim.AdamW(net.parameters(), lr=1e-3)
            diloco = await nn.LocalSGD.create(net, inner, every=50, outer=outer)
            ```

        Sources: for `start` Lin, Stich, Patel and Jaggi, ICLR 2020, doi:10.48550/arXiv.1808.07217; for `overlap` Shen
        et al., "Faster distributed deep net training: computation and communication decoupled SGD", IJCAI 2019,
        doi:10.48550/arXiv.1906.12043; for DiLoCo Douillard et al. 2023, doi:10.48550/arXiv.2311.08105.

        """
        return cls._made(net, optimizer, every, start, overlap=overlap, outer=outer)

    def __init__(
        self, net: DataParallel, optimizer: Optimizer, every: int, start: int, *, overlap: bool, outer: object
    ) -> None:
        super().__init__(net)
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer is a {type(optimizer).__name__}: expected an optimizer of torch")
        check_optimizer(net, optimizer)
        for name, steps, least in (("every", every, 1), ("start", start, 0)):
            if not isinstance(steps, int) or isinstance(steps, bool) or steps < least:
                raise ValueError(f"{name}={steps!r}: expected a whole number of steps, at least {least}")
        self.optimizer = optimizer
        self.outer: Optimizer | None = None
        """Optimizer of the centre, or None; the user may change its learning rates between two steps."""
        self._every, self._start, self._overlap = every, start, overlap
        self._plain = every == 1 and outer is None and not overlap
        """True if all steps are ordinary ones: for plain SGD, averages would equal reduced gradients."""
        self._steps = 0
        self._common = 0
        """Number of steps of the centre, or of the parameters if all steps are ordinary ones."""
        elastic = parts_of(net.coll).registry.elastic is not None
        self._kept: dict[int, list[tuple[Stateful, Any]]] | None = {} if elastic else None
        """In an elastic world, this rank's own states with their owners, by number of steps."""
        self._elastic = outer if isinstance(outer, Elastic) else None
        self._since = 0
        """Local steps since an average was sent."""
        self._alike = True
        """True if all ranks have the same parameters."""
        parameters = [slot.parameter for slot in self._reducer.slots]
        with torch.inference_mode(False):
            averaged = [p for p in parameters if p.is_floating_point() or p.is_complex()]
            copies = [(p, nn.Parameter(p.detach().clone())) for p in averaged]
        self._centre: dict[Tensor, Tensor] = dict(copies)
        """The centre, by parameter; also of frozen parameters, which may be trained later."""
        self._rates: list[float] = []
        """Learning rates at the begin of the period, for slow momentum."""
        self._sent: tuple[list[Tensor], list[Tensor], Parcel, Handle[PassStatus], int] | None = None
        """Average in flight: this rank's differences to the centre, their means, the means as a parcel, and its handle.

        The last entry is the number of steps when the average was sent.
        """
        if outer is not None and self._elastic is None:
            self.outer = _made_outer(outer, cast(list[nn.Parameter], list(self._centre.values())))
        others = _Common(self, intact=False)
        come = expected_state(net, self, others.load_state_dict)
        if come is not None:
            others.load_state_dict(come)

    # --- for the user -------------------------------------------------------------------------------------------

    @property
    def optimizers(self) -> list[Optimizer]:
        """The local optimizer, and `outer` if there is one."""
        return [each for each in (self.optimizer, self.outer) if each is not None]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of the local optimizer."""
        return self.optimizer.param_groups

    @property
    def steps(self) -> int:
        """Number of steps made, including failed ones; after `net.rebind` the steps of the last average."""
        return self._steps

    @property
    def pending(self) -> bool:
        """True while the parameters of the ranks may differ: `await flush()` before you use those of one rank."""
        return not self._alike

    @property
    def checkpoint_kind(self) -> str:
        """Kind of its state in a checkpoint: the class, both optimizers, and `Elastic`."""
        kinds = [type(each).__name__ for each in (self.optimizer, self.outer, self._elastic) if each is not None]
        return f"{type(self).__name__} of {', '.join(kinds)}"

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps and the state of both optimizers; that of `optimizer` is this rank's.

        Raises:
            RuntimeError: Within a period: `await flush()` first.

        """
        if self.pending:
            raise RuntimeError("ranks' parameters differ: `await local.flush()` first")
        outer = None if self.outer is None else self.outer.state_dict()
        return {"steps": self._steps, "optimizer": self.optimizer.state_dict(), "outer": outer}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Load a state of `state_dict`, on every rank; load the parameters separately, into `net.module`.

        Raises:
            ValueError: For another kind of state, or a state with another kind of `outer`.
            RuntimeError: While an average is in flight: `await flush()` first.

        """
        if sorted(state) != ["optimizer", "outer", "steps"] or (self.outer is None) is not (state["outer"] is None):
            raise ValueError(f"state with {sorted(state)}: expected optimizer, outer and steps, as this one was made")
        if self._sent is not None:
            raise RuntimeError("an average is in flight: `await local.flush()` first")
        load_exactly(self.optimizer, state["optimizer"])
        if self.outer is not None:
            load_exactly(self.outer, state["outer"])
        if self._kept is not None:
            self._kept = {}
        self._begin_again(state["steps"])
        self._reducer.steps.alike()

    def states(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the state that all ranks have in common between two periods, and this rank's own, for `aiodist.save`.

        This rank's own is the state of `optimizer` without its rates.
        """
        state = self.state_dict()
        own = {"state": state["optimizer"]["state"]}
        return {**state, "optimizer": {**state["optimizer"], "state": {}}}, own

    def load_states(self, alike: Mapping[str, Any], own: Mapping[str, Any] | None, /) -> None:
        """Load states of `states`, after the parameters; without `own` the optimizer starts with a new state."""
        self.load_state_dict({**alike, "optimizer": {**alike["optimizer"], **(own or {})}})

    # --- on another communicator: see `net.rebind` --------------------------------------------------------------

    def retreat(self) -> Stateful:
        """Return to the last average, and to this rank's state at that time; return the state for other ranks."""
        intact = self._reducer.steps.mishap is None
        self._sent = None
        if not self._alike:
            self._use_centre()
            self._restore(self._common)
        self._begin_again(self._common)
        return _Common(self, intact=intact)

    def _restore(self, steps: int) -> bool:
        """Restore this rank's own state after `steps` steps; return whether that state is known."""
        kept = (self._kept or {}).get(steps, [])
        for owner, state in kept:
            load_exactly(owner, state)
        return bool(kept)

    def _begin_again(self, steps: int) -> None:
        """Begin with parameters that are the same on all ranks, after `steps` steps."""
        self._steps = self._common = steps
        self._since, self._alike = 0, True

    def _keep(self, steps: int) -> None:
        """Keep this rank's own state after `steps` steps."""
        if self._kept is not None:
            owners: list[Stateful] = [self.optimizer, *self._net.configure().stateful]
            self._kept = {made: kept for made, kept in self._kept.items() if made >= self._common}
            self._kept[steps] = [(owner, deepcopy(owner.state_dict())) for owner in owners]

    def __repr__(self) -> str:
        return f"<LocalSGD of {type(self.optimizer).__name__}, every {self._every} steps, on {self._net!r}>"

    # --- on the compute thread ----------------------------------------------------------------------------------

    @called("net.step")
    def train(self, forward: Forward) -> None:
        """Do one step, and the average that is due after it; `net.step` calls it."""
        self._reducer.steps.check_known(self.optimizer)
        self._steps += 1
        if self._plain or self._steps <= self._start:
            plain_step(forward, self.optimizer, self._compute)
            self._common = self._steps
            return
        if self._reducer.consensus.joining:
            raise RuntimeError("LocalSGD inside net.join(), where averages cannot be made: expected as many steps")
        self._since += 1
        try:
            self._begin()
            self.optimizer.zero_grad()
            forward.reduces = False
            self._compute.accumulate(forward(), {})
            with span("optimizer"), self._reducer.steps.aside():
                forward.settings.update(self.optimizer.param_groups, self.optimizer.step)
        finally:  # also when forward raises: the other ranks do not hear of it
            count_as_stepped(self.optimizer)  # a scaler may have left out the first step
            forward.settings.advance()
            if self._since >= self._every:
                self._exchange(wait=not self._overlap)

    def _begin(self) -> None:
        """Begin a step."""
        if self._alike:
            with torch.inference_mode(False), torch.no_grad():  # they may have been loaded since
                copy_each(list(self._centre.values()), list(self._centre))
            self._common = self._steps - 1
            self._keep(self._common)
        if self._since == 1 and isinstance(self.outer, _SlowMomentum):
            self._rates = _rates_of(self.optimizer, list(self._centre))
        self._alike = False

    @called("local.flush")
    def make_updates(self) -> None:
        """Do the work of `flush`, on the compute thread; `aiodist.save` calls it."""
        if self._alike:
            return
        self._exchange(wait=True)
        self._use_centre()
        self._alike = True

    def _use_centre(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            copy_each(list(self._centre), list(self._centre.values()))

    def _exchange(self, *, wait: bool) -> None:
        """End a period: apply the average in flight, and send the next; if `wait`, apply that too.

        If this fails, the next step tries again with the progress of this rank.
        """
        since = self._since
        try:
            with torch.inference_mode(False), torch.no_grad():
                self._settle(still=not since)
                if since:
                    self._send()
                if since and wait:
                    self._settle(still=True)
        except BaseException:
            self._since = max(since, 1)
            raise

    def _send(self) -> None:
        params = list(self._centre)
        own = list(difference(list(self._centre.values()), params))
        means = [t.clone() for t in own] if self._overlap or self._elastic else own
        parcel = Parcel.of(means, params)
        self._keep(self._steps)
        self._sent, self._since = (own, means, parcel, self._compute.average(parcel.flat), self._steps), 0
        if isinstance(self.outer, _SlowMomentum):
            self.outer.param_groups[0]["rates"] = list(self._rates)

    def _settle(self, *, still: bool) -> None:
        """Apply the average in flight, if any; `still` is True if the parameters have not moved since it was sent."""
        sent, self._sent = self._sent, None
        if sent is None:
            return
        own, means, parcel, handle, steps = sent
        params, centre = list(self._centre), list(self._centre.values())
        ranks = self._compute.averaged(handle)
        parcel.unpack()
        if self._elastic is not None:
            add_each(centre, means, alpha=-self._elastic.alpha * ranks)
            add_each(params, own, alpha=self._elastic.alpha)
        elif still:
            self._move(centre, means)
            copy_each(params, centre)
            self._alike = True
        else:
            add_each(own, params)
            add_each(own, centre, alpha=-1)  # progress of this rank since it was sent
            self._move(centre, means)
            copy_each(params, centre)
            add_each(params, own)
        self._common = steps
        self._reducer.steps.note(self)

    def _move(self, centre: list[Tensor], means: list[Tensor]) -> None:
        """Move the centre, whose difference to the ranks' average is `means`."""
        if self.outer is None:
            add_each(centre, means, alpha=-1)
            return
        for p, mean in zip(centre, means, strict=True):
            p.grad = mean
        for parameter, p in self._centre.items():
            if not parameter.requires_grad:
                p.grad = None
        try:
            with self._reducer.steps.making():
                self.outer.step()
        finally:
            self.outer.zero_grad()


class _Common:
    """The state of a `LocalSGD` that ranks compare to continue on another communicator after the same average."""

    def __init__(self, local: LocalSGD, *, intact: bool) -> None:
        self._local = local
        self._intact = intact
        """True if this rank's state of the optimizer belongs to its number of steps."""

    def state_dict(self) -> dict[str, Any]:
        return self._local.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the number of steps and the outer state; load the optimizer's state if this rank has none for them."""
        local, steps = self._local, state["steps"]
        if not (self._intact and steps == local.steps) and not local._restore(steps):
            load_exactly(local.optimizer, state["optimizer"])
        if local.outer is not None:
            load_exactly(local.outer, state["outer"])
        local._begin_again(steps)


class _SlowMomentum(Optimizer):
    """The update of `SlowMo` as an optimizer; a gradient is x - y, and the setting `rates` has r for each parameter."""

    def __init__(self, params: Sequence[nn.Parameter], how: SlowMo) -> None:
        super().__init__(params, {"momentum": how.momentum, "lr": how.lr, "rates": [1.0] * len(params)})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Continue from the average."""
        (group,) = self.param_groups
        for p, rate in zip(group["params"], group["rates"], strict=True):
            if p.grad is not None:
                state = self.state[p]
                if not state:
                    state["slow_momentum"] = torch.zeros_like(p)
                u: Tensor = state["slow_momentum"]
                u.mul_(group["momentum"]).add_(p.grad, alpha=1 / rate)
                p.add_(u, alpha=-group["lr"] * rate)


def _made_outer(outer: object, params: list[nn.Parameter]) -> Optimizer:
    """Return the optimizer of `params`; raise TypeError unless `outer` is a `SlowMo`, or a function that makes one."""
    made = outer
    if isinstance(outer, SlowMo):
        made = _SlowMomentum(params, outer)
    elif callable(outer) and not isinstance(outer, Optimizer):
        made = outer(params)
    if made is outer or not isinstance(made, Optimizer):
        raise TypeError(
            f"outer is {type(outer).__name__}, which gives {type(made).__name__}: expected a SlowMo, an Elastic, or a "
            "function that makes an optimizer of a list of parameters"
        )
    check_one_pass(made)
    return made


def _rates_of(optimizer: Optimizer, params: Sequence[Tensor]) -> list[float]:
    """Return the learning rate of each of `params` in `optimizer`, 1.0 for parameters that it does not have.

    Raises ValueError for a rate that is not above 0, since slow momentum divides by it.
    """
    known = {id(p): float(group["lr"]) for group in optimizer.param_groups for p in group["params"]}
    rates = [known.get(id(p), 1.0) for p in params]
    if not all(rate > 0 for rate in rates):
        raise ValueError(
            f"learning rates {sorted(set(rates))[:5]} where a period begins: SlowMo divides by them, expected above 0"
        )
    return rates
