"""`PipelinedOptimizer`: the next forward begins while the last gradients are in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from aiodist.checkpoints.saving import load_exactly
from aiodist.communicator import parts_of
from aiodist.errors import AiodistError
from aiodist.handles import Handle, internals
from aiodist.handles.calls import located
from aiodist.handles.tracing import span
from aiodist.nn.buckets import Slot
from aiodist.nn.compute import Forward, called
from aiodist.nn.data_parallel import DataParallel, expected_state, reducer_of
from aiodist.nn.drivers import check_one_pass
from aiodist.nn.next_forward import UpdatedAhead
from aiodist.nn.passes import Pass
from aiodist.nn.steps import StepSettings, check_only, count_as_stepped
from aiodist.types import Stateful, check_trains


class PipelinedOptimizer(UpdatedAhead["_BucketOptimizer"]):
    """An optimizer for each bucket of gradients, which steps as soon as that bucket is reduced.

    ```python
    opt = await nn.PipelinedOptimizer.create(net, lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))
    for x, y in batches:
        loss = await net.step(lambda: loss_fn(net(x), y), opt)
    await opt.flush()
    ```
    `net.step` returns after backward. In the next forward each layer waits only for its own parameters; gradients that
    are not sent when backward ends are sent in the order in which forward needs their parameters. Results equal those
    of a plain loop; those of the last step once `flush` has returned.

    The settings of `net.configure` apply. With clip_norm or a scaler an update needs all gradients, so the next forward
    waits for all of them. Learning rates are set in `param_groups`. A scheduler of torch takes one of `optimizers`, and
    as a setting it steps after all updates of a step. An error of an update is raised by the next step or `flush`.

    The first step waits for everything and learns where each parameter is used. If a parameter is used elsewhere later
    while its update is in flight, that step raises `RuntimeError`. A use without a gradient, such as `weight.detach()`
    in a loss, is not detected and reads the current values.
    """

    pass_lag = 1

    @classmethod
    @located
    async def create(cls, net: DataParallel, make_optimizer: Callable[[list[nn.Parameter]], Optimizer]) -> Self:
        """Return an optimizer of `net` whose updates overlap the next forward.

        All ranks call it with the same arguments, between two steps; it sends nothing. It keeps the net's current
        buckets.

        Args:
            net: The net to train.
            make_optimizer: A function that takes a list of parameters and returns an optimizer of torch. It is called
                once for each bucket, and may sort the parameters into groups.

        Raises:
            TypeError: If an argument has the wrong type, or the optimizer needs a closure, as LBFGS does.
            ValueError: If the optimizer has other parameters than it was given.
            RuntimeError: If another optimizer, such as a `ShardedOptimizer`, keeps the buckets of the net.

        Example:
            ```python
            opt = await nn.PipelinedOptimizer.create(net, torch.optim.Adam)
            ```

        """
        return cls._made(net, make_optimizer)

    def __init__(self, net: DataParallel, make_optimizer: Callable[[list[nn.Parameter]], Optimizer]) -> None:
        super().__init__(net, make_optimizer)
        come = expected_state(net, self, self.load_state_dict)
        groups = None if come is None else [part["parameters"] for part in come]
        self._settings = StepSettings()
        """Settings of the newest step."""
        self._parts = [
            _BucketOptimizer(slots, make_optimizer)
            for slots in reducer_of(net).keep_buckets(groups, urgent=True, by=self)
        ]
        self._part_of = {slot.index: part for part in self._parts for slot in part.slots}
        self._places: dict[_BucketOptimizer, int] = {}
        """Bucket number of each optimizer that had a gradient in the last step."""
        self._newest: Pass | None = None
        """The reductions of the last step."""
        self._complete = True
        """True if no update of the last step has failed."""
        self._undo: dict[_BucketOptimizer, _Undo] | None = None if parts_of(net.coll).registry.elastic is None else {}
        """In an elastic world, the copies that undo the updates of incomplete steps."""
        self._mishap: Exception | None = None
        """Error that was raised during the last update."""
        self._guard(self._parts)
        if come is not None:
            self.load_state_dict(come)

    # --- for the user -------------------------------------------------------------------------------------------

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers, one for each bucket."""
        return [part.optimizer for part in self._parts]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of all optimizers."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def checkpoint_kind(self) -> str:
        """Kind of its state in a checkpoint: the class, and those of its optimizers."""
        kinds = dict.fromkeys(type(each).__name__ for each in self.optimizers)
        return f"{type(self).__name__} of {', '.join(sorted(kinds))}"

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the states of the optimizers, with the numbers of their parameters in the module's order.

        Raises:
            RuntimeError: While updates are pending: `await flush()` first.

        """
        self._check_made()
        return [part.state_dict() for part in self._parts]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]], /) -> None:
        """Load what `state_dict` returned, also of other buckets.

        Raises:
            ValueError: For a state of other parameters, or with different settings for the parameters of one group
                here. Nothing has changed then.
            RuntimeError: While updates are pending: `await flush()` first.

        """
        self._check_made()
        if not all("parameters" in one for one in state):
            raise ValueError("a state without the numbers of its parameters: expected what `state_dict` gives")
        settings = {n: group for one in state for group in one["param_groups"] for n in group["params"]}
        mine = {n for part in self._parts for n in part.packed()}
        if settings.keys() != mine:
            raise ValueError(f"state of {len(settings)} parameters: expected the {len(mine)} that are updated here")
        values = {n: value for one in state for n, value in one["state"].items()}
        for load in [part.loader(values, settings) for part in self._parts]:
            load()

    def _check_made(self) -> None:
        if self._left:
            raise RuntimeError("updates are pending: `await opt.flush()` first")

    def close(self) -> None:
        """Remove the hooks from the modules; the parameters keep their values. `flush` first."""
        self._guards.remove()
        self._reducer.release_buckets(self)

    # --- on another communicator: see `net.rebind` --------------------------------------------------------------

    def retreat(self) -> Stateful:
        """Undo the updates of an incomplete step, and drop the others."""
        steps = self._reducer.steps
        if self._undo and all(undo.holds() for undo in self._undo.values()):  # no parameters were loaded since then
            for undo in self._undo.values():
                undo.make()
            steps.mishap = None if steps.mishap is self._mishap else steps.mishap
        if self._undo is not None:
            self._undo.clear()
        self._left.clear()
        self._unasked.clear()
        self._newest = self._failed = None
        return self

    def resume(self) -> None:
        """Continue with the net's new buckets, of the same parameters as before."""
        kept = self._reducer.keep_buckets([part.numbers for part in self._parts], urgent=True, by=self)
        for part, slots in zip(self._parts, kept, strict=True):
            part.slots = slots

    # --- on the compute thread ----------------------------------------------------------------------------------

    @called("net.step")
    def train(self, forward: Forward) -> None:
        """Do one step, and leave its reductions in flight; `net.step` calls it."""
        for part in self._parts:
            part.check()

        def prepare() -> Tensor:
            for part in self._parts:
                if part not in self._left:
                    part.zero_grad()
            return self._run(forward, whole=self._settings.whole)

        reduction = self._reduce(prepare)
        if self._undo and not all(undo.holds() for undo in self._undo.values()):
            self._undo.clear()  # the step begins with parameters that were loaded after a failed step
        self._places = {self._part_of[bucket.slots[0].index]: i for i, bucket in enumerate(reduction.buckets)}
        self._left = {part: reduction.settled[self._places[part]] for part in self._parts if part in self._places}
        self._complete = True
        self._settings = forward.settings
        for part in self._left:
            part.keep_settings()
        self._reducer.loop.progress.post(partial(reduction.finished.add_done_callback, self._catch_up))
        self._newest = reduction
        self._raise_failed()

    def _use(self, parts: Sequence[_BucketOptimizer]) -> None:
        """Make the updates of `parts`; while their reductions are in flight, make other updates that are ready."""
        for part in parts:
            while (handle := self._left.get(part)) is not None:
                come = (other for other, reduced in self._left.items() if reduced.done())
                ready = part if handle.done() else next(come, None)
                if ready is None:
                    self._compute.block(handle)
                else:
                    self._step(ready)

    def _step(self, part: _BucketOptimizer) -> None:
        error = internals.error_of(self._left[part])
        try:
            if error is None:
                self._order(part)
                with span("optimizer"), self._reducer.steps.aside(), self._undoable(part):
                    part.step()
        except Exception as raised:  # noqa: BLE001  - raised by the next step or flush
            error = self._mishap = self._reducer.steps.mishap = raised
        finally:
            part.zero_grad()
            del self._left[part]  # last, since the loop may load a state when nothing is pending
        self._complete = self._complete and error is None
        if self._complete and not self._left:
            self._reducer.steps.note(self)
            if self._undo:
                self._undo.clear()
            try:
                self._settings.advance()
            except Exception as raised:  # noqa: BLE001  - raised like an error of the optimizer
                error = raised
        if self._failed is None:
            self._failed = error

    @contextmanager
    def _undoable(self, part: _BucketOptimizer) -> Iterator[None]:
        """Update `part` in this block; in an elastic world keep its state after the last whole step."""
        if self._undo is None:
            yield
            return
        if part not in self._undo:
            self._undo[part] = _Undo(part)
        try:
            yield
        finally:
            self._undo[part].seal()

    def _order(self, part: _BucketOptimizer) -> None:
        """Let the device wait for the gradients of `part`."""
        assert self._newest is not None
        self._compute.order(self._newest, [self._places[part]])

    def _order_all(self) -> bool:
        """Return True if the device waits for all gradients; after a failure each pending update raises it."""
        try:
            for part in self._left:
                self._order(part)
        except AiodistError:
            return False
        return True

    def _finish(self) -> None:
        make = partial(self._use, list(self._left))
        if not (self._left and self._settings.whole):
            make()
            return
        for handle in self._left.values():
            self._compute.block(handle)
        errors = [error for handle in self._left.values() if (error := internals.error_of(handle)) is not None]
        if errors:  # the other gradients can be neither clipped nor unscaled
            self._failed = self._failed or errors[0]
            self._complete = False
            self._drop_updates()
        elif not self._order_all():
            make()
        else:
            self._update_together(make)

    def _update_together(self, make: Callable[[], None]) -> None:
        """Unscale and clip the gradients, then call `make`, which makes the pending updates."""
        scaler, made = self._settings.scaler, False
        before = None if self._undo is None or scaler is None else deepcopy(scaler.state_dict())
        try:
            made = self._settings.update([group for part in self._left for group in part.optimizer.param_groups], make)
        except Exception as raised:  # noqa: BLE001  - raised by the next step or flush
            self._mishap = self._reducer.steps.mishap = raised
            self._failed = self._failed or raised
        if not made:
            self._drop_updates()
        elif before is not None and scaler is not None and self._undo:
            first = next(iter(self._undo.values()))
            first.also = first.also or partial(scaler.load_state_dict, before)

    def _drop_updates(self) -> None:
        """Drop the pending updates."""
        for part in self._left:
            part.zero_grad()
        self._left.clear()

    def _catch_up(self, finished: Handle[None]) -> None:
        """Make the pending updates when all gradients are reduced and the compute thread is free (loop)."""
        if internals.error_of(finished) is None and not self._net.closed:
            work = self._net.submit(self._finish_newest, finished)
            work.add_done_callback(lambda _: None)  # the next wait reports errors

    @called("net.step")
    def _finish_newest(self, finished: Handle[None]) -> None:
        # Otherwise a step has run since then, and this must not wait for its reductions.
        if self._newest is not None and finished is self._newest.finished:
            self._finish()


class _BucketOptimizer:
    """The parameters that share a bucket, and their optimizer.

    A twin of the optimizer makes the updates, with the same state and its own groups, since the user may change
    learning rates on another thread meanwhile.
    """

    def __init__(self, slots: Sequence[Slot], make_optimizer: Callable[[list[nn.Parameter]], Optimizer]) -> None:
        self.slots = slots
        self.optimizer = make_optimizer([cast(nn.Parameter, slot.parameter) for slot in slots])
        if not isinstance(self.optimizer, Optimizer):
            raise TypeError(f"make_optimizer returned {type(self.optimizer).__name__}: expected an optimizer")
        check_one_pass(self.optimizer)
        check_trains(self.optimizer, [slot.parameter for slot in slots], "what make_optimizer was given")
        self.check()
        self._twin: Optimizer = object.__new__(type(self.optimizer))
        self._twin.__dict__.update(self.optimizer.__dict__)
        self._twin.__dict__.pop("step", None)  # a scheduler's wrapper, which steps the other optimizer
        self._settings: list[dict[str, Any]] = []
        self.numbers = [slot.index for slot in slots]
        """Numbers of the parameters, in the module's order."""

    def check(self) -> None:
        """Raise ValueError if the optimizer has parameters of other buckets, or of no net."""
        given = {id(slot.parameter) for slot in self.slots}
        check_only(self.optimizer, given, "what make_optimizer was given")

    def packed(self) -> list[int]:
        """Return the numbers of the parameters as torch's states count them: group after group."""
        number = {slot.parameter: slot.index for slot in self.slots}
        return [number[p] for group in self.optimizer.param_groups for p in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer, with the numbers of the module's parameters in place of torch's."""
        state, packed = self.optimizer.state_dict(), self.packed()
        groups = [{**group, "params": [packed[i] for i in group["params"]]} for group in state["param_groups"]]
        values = {packed[i]: value for i, value in state["state"].items()}
        return {"parameters": self.numbers, "state": values, "param_groups": groups}

    def loader(self, values: Mapping[int, Any], settings: Mapping[int, Mapping[str, Any]]) -> Callable[[], None]:
        """Return a function that loads the state of each parameter and the settings of its group, by number."""
        packed, groups = self.packed(), []
        for group in self.optimizer.state_dict()["param_groups"]:
            found = [{**settings[packed[i]], "params": group["params"]} for i in group["params"]]
            names = {name for each in found for name in each if not _equal(each[name], found[0].get(name))}
            if names:
                raise ValueError(
                    f"the state has parameters with different {', '.join(sorted(names))} in one group here: expected "
                    "that make_optimizer sorts them into groups as it did for the state"
                )
            groups.append({**group, **(found[0] if found else {})})
        kept = {i: values[number] for i, number in enumerate(packed) if number in values}
        return partial(load_exactly, self.optimizer, {"state": kept, "param_groups": groups})

    def keep_settings(self) -> None:
        """Keep the hyperparameters of this step for its update."""
        self._settings = [
            {name: value.clone() if isinstance(value, Tensor) else value for name, value in group.items()}
            for group in self.optimizer.param_groups
        ]
        count_as_stepped(self.optimizer)

    def step(self) -> None:
        """Make the update with the kept settings, and store the changes that the optimizer itself makes to them."""
        self._twin.state = self.optimizer.state
        self._twin.param_groups = [dict(kept) for kept in self._settings]
        self._twin.step()
        for group, kept, now in zip(self.optimizer.param_groups, self._settings, self._twin.param_groups, strict=True):
            group.update({name: value for name, value in now.items() if value is not kept.get(name)})

    def zero_grad(self) -> None:
        for slot in self.slots:
            slot.parameter.grad = None


def _equal(a: object, b: object) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a == b)


class _Undo:
    """A copy of the parameters and of the state and settings of their optimizer, to undo an update."""

    def __init__(self, part: _BucketOptimizer) -> None:
        self._optimizer = part.optimizer
        self._values = [(slot.parameter, slot.parameter.detach().clone()) for slot in part.slots]
        self._state = {p: deepcopy(part.optimizer.state[p]) for p, _ in self._values if p in part.optimizer.state}
        self._groups = [
            {name: deepcopy(value) for name, value in group.items() if name != "params"}
            for group in part.optimizer.param_groups
        ]
        self._versions: list[int] = []
        self.also: Callable[[], object] | None = None
        """Function that undoes other changes of the step, or None."""

    def seal(self) -> None:
        """Note that an update was made."""
        self._versions = [p._version for p, _ in self._values]

    def holds(self) -> bool:
        """Return True if the parameters have not changed since the update."""
        return self._versions == [p._version for p, _ in self._values]

    def make(self) -> None:
        for parameter, value in self._values:
            with torch.no_grad():
                parameter.copy_(value)
            self._optimizer.state.pop(parameter, None)
            if parameter in self._state:
                self._optimizer.state[parameter] = self._state[parameter]
        for group, kept in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.update(kept)
        if self.also is not None:
            self.also()
