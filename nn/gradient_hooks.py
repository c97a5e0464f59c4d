"""The hooks that autograd calls when a gradient of a parameter has come."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from aiodist.nn.bucket_plan import BucketPlan
from aiodist.nn.buckets import Slot
from aiodist.nn.devices import Devices
from aiodist.nn.kept_sums import KeptSums
from aiodist.nn.passes import Pass
from aiodist.nn.steps import Steps

_GUARDED = 4  # trained parameters of a module: weights and biases of the usual layers


class GradientHooks:
    """Reports full buckets to the pass, and refuses gradients of a backward outside of the net.

    A hook costs 1 to 2 us each time. A parameter has one if its gradient completes a bucket (see `BucketPlan`), and so
    have the first `_GUARDED` trained parameters of each module, which report a backward outside; a module is guarded
    until all of these are frozen, and again when hooks are placed anew. Frozen parameters have one that is not called
    before they are trained. A rank without others guards the whole module with `_GUARDED` hooks, and reports no bucket
    until `report`.

    Autograd calls the hooks in the thread of backward for parameters on the CPU, and for those on a CUDA device in its
    own thread for that device. Any thread may place hooks.
    """

    _taken: ClassVar[Any] = WeakIdKeyDictionary()
    """Owner of each parameter that a net trains: the id of its hooks."""

    def __init__(
        self,
        module: nn.Module,
        slots: Sequence[Slot],
        kept: Iterable[Tensor],
        steps: Steps,
        devices: Devices,
        sums: KeptSums,
        *,
        alone: bool,
    ) -> None:
        """`slots` are of the parameters that ranks have alike, and each rank keeps the parameters `kept` for itself.

        `alone` is True if there is no other rank.
        """
        self._slots = slots
        self._steps = steps
        self._devices = devices
        self._sums = sums
        known = [*(slot.parameter for slot in slots), *kept]
        self.new_parameters = NewParameterCheck(module, known, taken=self._taken)
        self.reports = not alone
        """True if hooks report full buckets."""
        index_of = {id(slot.parameter): slot.index for slot in slots}
        owned = (list(m.parameters(recurse=alone)) for m in ([module] if alone else module.modules()))
        self._owned = [[index_of[id(p)] for p in mine if id(p) in index_of] for mine in owned if mine]
        self._plan: BucketPlan | None = None
        """Plan of the hooks in place, or None after `remove`."""
        self._trained: list[bool] = []
        """True for each parameter that was trained when the hooks were placed."""
        self._hooks: dict[int, tuple[bool, RemovableHandle]] = {}
        """True if the hook reports gradients, and the hook, by parameter."""
        self._placing = threading.Lock()
        self._pass: Pass | None = None
        """Pass of the backward that runs, or None."""
        self.counts: dict[int, int] = {}
        """Number of gradients in this backward, by parameter, in the order of the first ones."""
        self._due: list[int] = []
        """Buckets whose sentinel has come, and that lack gradients."""
        self._counting = threading.Lock()
        self._loop_thread = get_ident()

    # --- which parameters a net owns ---------------------------------------------------------------------------------

    @classmethod
    def check_free(cls, named: Iterable[tuple[str, Tensor]]) -> None:
        """Raise unless there is a parameter to train, and no net trains one of them."""
        trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        if not trained:
            raise ValueError("the module has no parameter to train: expected one with requires_grad")
        for name, parameter in trained:
            if parameter in cls._taken:
                raise RuntimeError(f"parameter {name!r} belongs to a DataParallel already: aclose() that first")

    def take(self, members: Sequence[bool]) -> None:
        """Own the parameters for which `members` is True, unless another net does."""
        for slot in self._slots:
            if members[slot.index]:
                self._taken.setdefault(slot.parameter, id(self))

    def owns(self, slot: Slot) -> bool:
        """Return False if another net trains the parameter."""
        return bool(self._taken.get(slot.parameter, id(self)) == id(self))

    # --- placing -----------------------------------------------------------------------------------------------------

    def place(self, plan: BucketPlan) -> None:
        """Hook the parameters of `plan`, and some of every module."""
        with self._placing:
            self._plan = plan
            self._place(plan)

    def report(self) -> None:
        """Report full buckets from now on."""
        self.reports = True
        if self._plan is not None:
            self.place(self._plan)

    def watch(self) -> None:
        """Refuse a backward outside, even if parameters were frozen or unfrozen since the last pass."""
        with self._placing:
            trained = [slot.parameter.requires_grad for slot in self._slots]
            if self._steps.thread is None and self._plan is not None and self._trained != trained:
                self._place(self._plan)
        self._sums.hook_adders()

    def remove(self) -> None:
        """Remove all hooks, and own no parameter; each `.grad` stays as it is."""
        with self._placing:
            self._plan = None
            for _, hook in self._hooks.values():
                hook.remove()
            self._hooks.clear()
        for slot in self._slots:
            if self._taken.get(slot.parameter) == id(self):
                del self._taken[slot.parameter]

    def _place(self, plan: BucketPlan) -> None:
        trained = self._trained = [slot.parameter.requires_grad for slot in self._slots]
        wanted = {index: False for index, able in enumerate(trained) if not able}
        """True if a hook is to report gradients, by the parameters that are to have one."""
        for mine in self._owned:
            wanted.update(dict.fromkeys([index for index in mine if trained[index]][:_GUARDED], False))
        if self.reports:
            wanted.update(dict.fromkeys((index for index in plan.hooked() if trained[index]), True))
        for index in [index for index, (reports, _) in self._hooks.items() if wanted.get(index) is not reports]:
            self._hooks.pop(index)[1].remove()
        for index, reports in wanted.items():
            if index not in self._hooks:
                self._hooks[index] = reports, self._hook(index, reports)

    def _hook(self, index: int, reports: bool) -> RemovableHandle:
        # Not by the parameter's own method, which takes no hook for a frozen parameter.
        parameter = self._slots[index].parameter
        hooks = parameter._post_accumulate_grad_hooks
        if hooks is None:
            hooks = parameter._post_accumulate_grad_hooks = OrderedDict()
        handle = RemovableHandle(hooks)
        hooks[handle.id] = partial(self._gradient_came, index, reports)
        return handle

    # --- one backward ------------------------------------------------------------------------------------------------

    def begin(self, reducing: Pass | None) -> None:
        """Let gradients from now on belong to the pass `reducing`, or to this rank alone (thread of backward)."""
        self.counts, self._due = {}, []
        self._pass, self._steps.thread = reducing, get_ident()

    def end(self) -> None:
        """End the backward."""
        self._pass = self._steps.thread = None

    @contextmanager
    def backward_alone(self, *, part: bool) -> Iterator[None]:
        """Return the block of a backward of this rank alone; if `part`, a later one reduces its gradients too."""
        self.begin(None)
        self._steps.partial = part
        try:
            yield
        finally:
            self.end()
            self._steps.partial = False

    # --- called by autograd ------------------------------------------------------------------------------------------

    def _gradient_came(self, index: int, reports: bool, _: Tensor) -> None:
        """Count a gradient, and reduce the buckets that are full now."""
        steps, reducing, plan = self._steps, self._pass, self._plan
        if steps.thread != get_ident():  # the loop's thread runs no pass, and autograd's threads for devices do
            self._check_inside(self._slots[index])
        if not reports or steps.thread is None:
            return
        device = None
        if reducing is not None and self._devices:
            device = self._slots[index].parameter.device
            if device.type == "cuda":
                self._devices.came(device)
        full: list[int] = []
        with self._counting:
            counts, due = self.counts, self._due
            counts[index] = counts.get(index, 0) + 1
            if reducing is None or plan is None or plan.learning or reducing.refused:
                return
            number = plan.sentinels.get(index)
            if number is not None and number not in due and number not in reducing.filled:
                due.append(number)
            for number in list(due):
                bucket = plan.buckets[number]
                # Each device has a thread of its own, which fills its buckets.
                if (device is None or bucket.device == device) and plan.complete(bucket, counts):
                    due.remove(number)
                    full.append(number)
        for number in full:
            reducing.full(number)

    def _check_inside(self, slot: Slot) -> None:
        """Raise RuntimeError for a gradient of a backward that reduces nothing."""
        if not self.owns(slot):  # frozen here, and trained by another net since
            return
        name, thread = slot.name, self._steps.thread
        if thread is None and self._sums.blocks:
            # Another net's backward leaves gradients here too (GANs), which the next step may drop.
            self._sums.kept = self._sums.kept or not self._steps.others_in_backward
        elif thread is None:
            raise RuntimeError(
                f"parameter {name!r} got a gradient outside of net.step and net.backward, which reduce it: call "
                "`await net.backward(loss)`, or add it up on this rank, `with net.no_sync():`. Where it is another "
                "net's backward that runs through this one (GANs), freeze this one meanwhile, "
                "`net.module.requires_grad_(False)`, or let that run under `with net.no_sync():` of this one. The "
                "closure of an optimizer such as LBFGS has the loop await net.backward, as in examples/lbfgs.py"
            )
        elif get_ident() == self._loop_thread:
            raise RuntimeError(
                f"parameter {name!r} got a gradient from a backward on the event loop's thread, while a step of this "
                "net is under way, whose gradients it spoils: call `await net.backward(loss)`"
            )


class NewParameterCheck:
    """Refuses trained parameters that came to a module after its net was made: no net reduces their gradients.

    A hook of torch reports each parameter and module that is registered anywhere, so a module is searched only after
    one: 1 ms for 1,000 parameters. One hook serves all nets and stays, since another thread may run through the hooks
    at any time. The module must not be changed while a step is in flight.
    """

    _newest: ClassVar[object] = object()
    """Marker, replaced at each registration."""
    _hooks: ClassVar[tuple[RemovableHandle, ...]] = ()
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, module: nn.Module, known: Iterable[Tensor], *, taken: Container[Tensor]) -> None:
        """`known` are the parameters of the net, and `taken` those that any net trains."""
        self._module = module
        self._taken = taken
        self._known = frozenset(map(id, known))
        self._seen: object = None
        with self._lock:
            if not self._hooks:
                register = register_module_parameter_registration_hook, register_module_module_registration_hook
                type(self)._hooks = tuple(each(self._registered) for each in register)

    @classmethod
    def _registered(cls, *_: object) -> None:
        cls._newest = object()

    def check(self) -> None:
        """Raise RuntimeError for a trained parameter that came to the module later, and that no net trains."""
        newest = self._newest
        if newest is self._seen:
            return
        new = [(name, p) for name, p in self._module.named_parameters() if id(p) not in self._known]
        if trained := [name for name, p in new if p.requires_grad and p not in self._taken]:
            raise RuntimeError(
                f"{', '.join(trained[:3])}{' …' * (len(trained) > 3)}: {len(trained)} parameters to train were put "
                "into the module after its DataParallel was made (a new layer, load_state_dict(assign=True), "
                "weight_norm), which reduces no gradients of them: change the module first. Now `await net.aclose()`, "
                "then make net and optimizer anew"
            )
        if not new:  # else a frozen one may be trained later
            self._seen = newest
