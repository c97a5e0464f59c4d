"""`LocalSGD`: ranks train by themselves, and average their parameters now and then."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch import _foreach_add_ as add_each
from torch import _foreach_copy_ as copy_each
from torch import _foreach_sub as difference
from torch import _foreach_sub_ as subtract_each
from torch.optim import Optimizer

from aiodist.nn.buckets import Slot, same_kind
from aiodist.nn.compute import called
from aiodist.nn.data_parallel import DataParallel, check_one_pass
from aiodist.nn.forward import Forward, local_step, plain_step
from aiodist.nn.outer import Elastic, MakeOuter, SlowMo, SlowMomentum, checked_state, made_outer, rates_of
from aiodist.nn.reduction import Reduction
from aiodist.nn.settings import count_as_stepped

_STATE = ("steps", "since", "alike", "rates", "centre", "sent", "optimizer", "outer")


class LocalSGD:
    """An optimizer whose steps are of one rank alone; after every `every` of them all ranks average their parameters.

    ```python
    local = nn.LocalSGD(net, torch.optim.SGD(net.parameters(), lr=0.1), every=8)
    for x, y in batches:
        loss = await net.step(lambda: loss_fn(net(x), y), local)
    await local.flush()
    ```
    Every rank gives the same arguments and makes as many steps. `optimizer` is any of torch's. A *period* is `every`
    steps; at its end each rank sends by how much its parameters differ from the *centre*, the values that all ranks
    hold, and the average of that moves the centre. Stich, "Local SGD converges fast and communicates little", ICLR
    2019, doi:10.48550/arXiv.1805.09767. With every=1 and nothing else gradients are reduced instead, so that all is as
    with `optimizer` alone, whichever it is.

    - `start`: so many steps at the beginning are ordinary ones, with reduced gradients (post-local SGD: Lin, Stich,
      Patel and Jaggi, ICLR 2020, doi:10.48550/arXiv.1808.07217).
    - `outer`: how the centre moves. None: to the average. `SlowMo(momentum)`: with slow momentum. `Elastic(alpha)`:
      ranks and centre move towards each other (EASGD). A function that makes an optimizer of a list of parameters:
      centre minus average is their gradient (DiLoCo: Douillard et al. 2023, doi:10.48550/arXiv.2311.08105, with
      `lambda params: SGD(params, lr=0.7, momentum=0.9, nesterov=True)` around AdamW).
    - `overlap`: an average travels while the next period computes, and is applied at the end of that. What a rank has
      done since it was sent is kept: it goes on from the new centre plus its own progress. Shen et al., "Faster
      distributed deep net training: computation and communication decoupled SGD", IJCAI 2019,
      doi:10.48550/arXiv.1906.12043. By default a step that ends a period waits for the average.
    - The state of `optimizer`, such as momentum, stays each rank's own. `average_state` names tensors of it that are
      averaged too, by one more pass each, as "momentum_buffer" of SGD or "exp_avg" and "exp_avg_sq" of Adam; on a rank
      that has none yet they count as zeros. `reset_state` forgets all of it at the end of each period. (The paper of
      SlowMo compares these three.)

    What `net` has for gradients serves averages too: buckets, `compress`, `join`, deadlines, statistics. In a local
    step `net.settings` look at this rank's gradients: clip_norm clips their norm, and a scaler leaves out a step of
    this rank alone. A scheduler steps in each local step, so that ranks keep the same rates. What forward raises is
    its rank's own affair, and what the optimizer raises too: the other ranks do not hear of it, the step counts as one
    of the period, and an average that is due is made. Buffers stay each rank's own: `net.synchronize_buffers`.

    Raises ValueError for arguments out of range or that exclude one another, TypeError for what is no such net,
    optimizer or outer, and for a net with sparse gradients. Cost: memory for one copy of the trained parameters,
    while an average is on its way for two, with `overlap` or `Elastic` for three; one allreduce of them in each period.
    """

    def __init__(
        self,
        net: DataParallel,
        optimizer: Optimizer,
        *,
        every: int,
        start: int = 0,
        outer: SlowMo | Elastic | MakeOuter | None = None,
        overlap: bool = False,
        average_state: Sequence[str] = (),
        reset_state: bool = False,
    ) -> None:
        _check_arguments(net, optimizer, every, start)
        if isinstance(average_state, str):
            raise TypeError(f"average_state={average_state!r}: expected a sequence of names")
        if average_state and (overlap or reset_state):
            other = "overlap" if overlap else "reset_state"
            raise ValueError(f"average_state and {other}: expected one of them")
        if reset_state and isinstance(optimizer, torch.optim.Adagrad):
            raise TypeError("reset_state with Adagrad, which makes its state once: expected one that makes it anew")
        self.optimizer = optimizer
        self.outer: Optimizer | None = None
        """The optimizer of the centre, if there is one; its learning rates may be changed between two steps."""
        self._net = net
        self._compute = net.compute
        self._every = every
        self._start = start
        self._elastic = outer if isinstance(outer, Elastic) else None
        self._overlap = overlap
        self._average_state = tuple(average_state)
        self._reset_state = reset_state
        self._plain = every == 1 and outer is None and not (overlap or reset_state)
        """Averages would come to the same as reduced gradients, if only for plain SGD: so these are reduced."""
        self._steps = 0
        self._since = 0
        """Local steps since an average was sent."""
        self._alike = True
        """All ranks have the same parameters."""
        self._rates: list[float] = []
        """The learning rates with which the period began, where slow momentum needs them."""
        self._centre: dict[int, nn.Parameter] = {}
        """By the index of their slot."""
        self._sent: dict[int, Tensor] | None = None
        """Centre minus parameters of this rank, whose average is not applied yet."""
        self._under_way: Reduction | None = None
        """That average; None where it was sent by another run, before a checkpoint."""
        self._extend([slot for slot in net.reducer.slots if slot.parameter.requires_grad])
        if outer is not None and not isinstance(outer, Elastic):
            self.outer = made_outer(outer, list(self._centre.values()))

    # --- for the user -------------------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the optimizer of the local steps."""
        return self.optimizer.param_groups

    @property
    def centre(self) -> dict[str, Tensor]:
        """What all ranks hold alike, by the names of the parameters; the step that ends a period writes to it."""
        return {self._slot(index).name: value.detach() for index, value in self._centre.items()}

    @property
    def pending(self) -> bool:
        """The ranks' parameters may differ: `await flush()` before you take those of one rank."""
        return not self._alike

    async def flush(self) -> None:
        """Return when all ranks have the same parameters, by an average of what they have; with `Elastic` the centre.

        Collective; nothing is sent where they have the same already. The next step begins a new period. Raises what the
        communicator or the outer optimizer raises, RuntimeError once the net is closed.
        """
        await self._net.run(self.make_updates)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, with that of both optimizers.

        In the middle of a period, or with an average on its way, it is of use only with this rank's parameters,
        `net.module.state_dict()`: each rank saves its own, and training goes on from them exactly. The average is
        sent once more then. After `flush` the parameters of one rank do for all.
        """
        return {
            "steps": self._steps,
            "since": self._since,
            "alike": self._alike,
            "rates": list(self._rates),
            "centre": self.centre,
            "sent": self._sent and {self._slot(index).name: t for index, t in self._sent.items()},
            "optimizer": self.optimizer.state_dict(),
            "outer": None if self.outer is None else self.outer.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Take what `state_dict` gave, on every rank; parameters are loaded apart, into `net.module`.

        Raises ValueError for a state of other parameters, or with another kind of `outer`, RuntimeError while an
        average is on its way: `await flush()` first.
        """
        if self._under_way is not None:
            raise RuntimeError("an average is on its way: `await local.flush()` first")
        given = checked_state(state, _STATE)
        if (self.outer is None) is not (given["outer"] is None):
            raise ValueError(f"state with outer={given['outer'] is not None}: expected it as this one was made")
        centre, sent = self._indexed(given["centre"]), self._indexed(given["sent"] or {})
        if self.outer is not None and centre.keys() != self._centre.keys():
            raise ValueError(f"state of {sorted(given['centre'])}: expected {sorted(self.centre)}")
        self._extend([self._slot(index) for index in centre if index not in self._centre])
        with torch.inference_mode(False), torch.no_grad():
            for index, t in centre.items():
                self._centre[index].copy_(t)
            likes = {index: torch.empty_like(self._centre[index]) for index in sent}
            self._sent = {index: likes[index].copy_(t) for index, t in sent.items()} or None
        self._centre = {index: p for index, p in self._centre.items() if index in centre}
        self._steps, self._since, self._alike = given["steps"], given["since"], given["alike"]
        self._rates = list(given["rates"])
        self.optimizer.load_state_dict(given["optimizer"])
        if self.outer is not None:
            self.outer.load_state_dict(given["outer"])
        self._net.reducer.steps.alike()

    def states(self) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Return what all ranks have alike between two periods, and what this rank has of its own.

        For `aiodist.save`, on the compute thread, with the parameters of one rank. Before the first local step all is
        alike; else the state of `optimizer` is the rank's own, but for its rates.
        """
        state = self.optimizer.state_dict()
        own = None if self._plain or self._steps <= self._start else {"state": state["state"]}
        alike = {
            "steps": self._steps,
            "optimizer": state if own is None else {**state, "state": {}},
            "outer": None if self.outer is None else self.outer.state_dict(),
        }
        return alike, own

    def load_states(self, alike: Mapping[str, Any], own: Mapping[str, Any] | None, /) -> None:
        """Take what `states` gave, with parameters that were loaded before; without `own` the optimizer begins anew.

        Raises as `load_state_dict`.
        """
        optimizer = alike["optimizer"] if own is None else {**alike["optimizer"], **own}
        centre = {self._slot(index).name: self._slot(index).parameter.detach() for index in self._centre}
        between = {"since": 0, "alike": True, "rates": [], "centre": centre, "sent": None}
        self.load_state_dict({**alike, **between, "optimizer": optimizer})

    def _indexed(self, values: Mapping[str, Tensor]) -> dict[int, Tensor]:
        slots = {slot.name: slot for slot in self._net.reducer.slots}
        for name, t in values.items():
            if name not in slots or slots[name].parameter.shape != t.shape:
                raise ValueError(f"state of {name!r} {list(t.shape)}: expected parameters of this net, and their shape")
        return {slots[name].index: t for name, t in values.items()}

    def __repr__(self) -> str:
        return f"<LocalSGD of {type(self.optimizer).__name__}, every {self._every} steps, on {self._net!r}>"

    # --- on the compute thread ----------------------------------------------------------------------------------

    @called("net.step")
    def train(self, forward: Forward) -> None:
        """Do one step, and what is due behind it; `net.step` calls it."""
        if self._steps < self._start or self._plain:
            self._steps += 1
            plain_step(forward, self.optimizer, self._compute)
            return
        self._begin()
        self._steps += 1
        self._since += 1
        self._alike = False
        with ExitStack() as afterwards:  # also when forward raises: the other ranks do not hear of it
            afterwards.callback(self._exchange_if_due)
            afterwards.callback(self._advance, forward)
            local_step(forward, self.optimizer, self._compute)

    def _begin(self) -> None:
        """A local step is about to be made."""
        slots = self._net.reducer.slots
        new = [slot for slot in slots if slot.parameter.requires_grad and slot.index not in self._centre]
        if new and self.outer is not None:
            names = ", ".join(repr(slot.name) for slot in new)
            raise RuntimeError(
                f"{names}: frozen when this LocalSGD was made, and it has an outer optimizer: make another one"
            )
        if self._since == 0 and isinstance(self.outer, SlowMomentum):
            self._rates = rates_of(self.optimizer, self._parameters(self._centre))
        if self._alike and self.outer is None:  # what is frozen now does not move any more
            self._centre = {index: p for index, p in self._centre.items() if self._slot(index).parameter.requires_grad}
        self._extend(new)
        if self._alike:
            with torch.inference_mode(False), torch.no_grad():  # they may have been loaded since
                copy_each(self._centres(self._centre), self._parameters(self._centre))

    def _advance(self, forward: Forward) -> None:
        count_as_stepped(self.optimizer)  # a scaler may have left out the first step
        forward.settings.advance()

    def _exchange_if_due(self) -> None:
        if self._since >= self._every:
            self._exchange(wait=not self._overlap)

    @called("local.flush")
    def make_updates(self) -> None:
        """Do what `flush` does, on the compute thread, as `aiodist.save` does."""
        if self._alike:
            return
        self._exchange(wait=True)
        with torch.inference_mode(False), torch.no_grad():
            copy_each(self._parameters(self._centre), self._centres(self._centre))
        self._alike = True

    def _exchange(self, *, wait: bool) -> None:
        """End a period: apply the average that is on its way, and send the next; with `wait` apply that too.

        Where this fails the next step tries again, with what this rank has done until then.
        """
        since = self._since
        try:
            self._settle(still=not since)
            if since:
                self._send()
            if since and wait:
                self._settle(still=True)
        except BaseException:
            self._since = max(since, 1)
            raise
        for name in self._average_state if since else ():
            self._average(name)
        if since and self._reset_state:
            self.optimizer.state.clear()

    def _send(self) -> None:
        """Have the average of centre minus parameters on its way."""
        with torch.inference_mode(False), torch.no_grad():
            moved = difference(self._centres(self._centre), self._parameters(self._centre))
            sent = dict(zip(self._centre, moved, strict=True))
            self._under_way = self._issue(sent)
        self._sent, self._since = sent, 0
        if isinstance(self.outer, SlowMomentum):
            self.outer.param_groups[0]["rates"] = list(self._rates)

    def _issue(self, sent: Mapping[int, Tensor]) -> Reduction:
        kept = self._overlap or self._elastic is not None
        return self._compute.exchange({index: t.clone() if kept else t for index, t in sent.items()})

    def _settle(self, *, still: bool) -> None:
        """Apply the average that was sent, if one was; `still` says that parameters have not moved since."""
        sent, under_way = self._sent, self._under_way
        self._sent = self._under_way = None
        if sent is None:
            return
        with torch.inference_mode(False), torch.no_grad():
            reduction = under_way or self._issue(sent)
            found = self._compute.averages(reduction)
            means = [found[index] for index in sent]
            params, centre, own = self._parameters(sent), self._centres(sent), list(sent.values())
            if self._elastic is not None:
                self._move(centre, means, self._elastic.alpha * reduction.participants)
                add_each(params, own, alpha=self._elastic.alpha)
            elif still:
                self._move(centre, means)
                copy_each(params, centre)
                self._alike = True
            else:
                add_each(own, params)
                subtract_each(own, centre)  # what this rank has done since it was sent
                self._move(centre, means)
                copy_each(params, centre)
                add_each(params, own)
        self._net.reducer.steps.note(self)

    def _move(self, centre: list[Tensor], means: list[Tensor], rate: float = 1.0) -> None:
        """Move the centre, which is `means` away from the ranks' average."""
        if self.outer is None:
            subtract_each(centre, means, alpha=rate)
            return
        try:
            for p, mean in zip(centre, means, strict=True):
                p.grad = mean
            with self._net.reducer.steps.making():
                self.outer.step()
        finally:
            self.outer.zero_grad()

    def _average(self, name: str) -> None:
        """Average this tensor of the optimizer's state, where it has one."""
        states = {index: self.optimizer.state.get(self._slot(index).parameter, {}).get(name) for index in self._centre}
        own = {index: t for index, t in states.items() if isinstance(t, Tensor)}
        odd = [index for index, t in own.items() if not same_kind(t, self._centre[index])]
        with torch.inference_mode(False), torch.no_grad():
            values = {index: t.clone() for index, t in own.items() if index not in odd}
            means = self._compute.averages(self._compute.exchange(values))
            for index in values:
                own[index].copy_(means[index])
        if odd or (self.optimizer.state and not own):
            why = "is not of its parameter's shape and dtype" if odd else "is not there"
            raise ValueError(
                f"average_state={name!r}: {why} in the state of {type(self.optimizer).__name__}, which has "
                f"{sorted({key for state in self.optimizer.state.values() for key in state})}"
            )

    # --- parameters -----------------------------------------------------------------------------------------------

    def _slot(self, index: int) -> Slot:
        return self._net.reducer.slots[index]

    def _parameters(self, indices: Iterable[int]) -> list[Tensor]:
        return [self._slot(index).parameter for index in indices]

    def _centres(self, indices: Iterable[int]) -> list[Tensor]:
        return [self._centre[index] for index in indices]

    def _extend(self, slots: Iterable[Slot]) -> None:
        """Have a centre of these parameters, which all ranks have alike."""
        with torch.inference_mode(False):
            for slot in slots:
                self._centre[slot.index] = nn.Parameter(slot.parameter.detach().clone())


def _check_arguments(net: object, optimizer: object, every: object, start: object) -> None:
    if not isinstance(net, DataParallel):
        raise TypeError(f"net is a {type(net).__name__}: expected what `await DataParallel.create(…)` returned")
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}: expected an optimizer of torch")
    check_one_pass(optimizer)
    for name, steps, least in (("every", every, 1), ("start", start, 0)):
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < least:
            raise ValueError(f"{name}={steps!r}: expected a whole number of steps, at least {least}")
    rows = ", ".join(repr(slot.name) for slot in net.reducer.slots if slot.by_rows)
    if rows:
        raise TypeError(f"sparse gradients of {rows}: expected an embedding with sparse=False, which can be averaged")
