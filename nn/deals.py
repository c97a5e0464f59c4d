"""Deals: which parameters are trained, in which buckets these travel, and which have a hook that tells of gradients."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.hooks import RemovableHandle

from aiodist.nn.buckets import Bucket, RowBucket, Slot, deal

_KEPT = 2
_GUARDED = 4  # trained parameters of a module: weights and biases of the usual layers
MakeBucket = Callable[[Sequence[Slot]], Bucket]


@dataclass(frozen=True)
class Sizes:
    """How large buckets are, in bytes."""

    bucket: int
    first: int

    def __post_init__(self) -> None:
        for name in ("bucket", "first"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} bucket: {getattr(self, name)} bytes: expected at least 1")


class Deal:
    """Buckets of the parameters that are trained, the same on every rank, and what is known of when they fill.

    Its first pass watches every parameter, and sends everything at its end. From that it is known in which order
    gradients come; from then on only the parameter of each bucket whose gradient came last is watched, and those that
    get several in one backward.
    """

    def __init__(self, trained: Sequence[bool], buckets: Sequence[Bucket]) -> None:
        self.trained = list(trained)
        """By parameter. One that is not may be in a bucket all the same, with a gradient of before."""
        self.buckets = list(buckets)
        self.members = frozenset(slot.index for bucket in buckets for slot in bucket.slots)
        self.columns = [float(index in self.members) for index in range(len(trained))]
        """The same as numbers, one for each parameter."""
        self.outside = [index for index in range(len(trained)) if index not in self.members]
        self.learning = True
        """This pass watches every parameter, and sends everything at its end."""
        self.order: list[int] = []
        """In which gradients came on this rank, when every parameter was watched last."""
        self.often: dict[int, int] = {}
        """The parameters that get several gradients in one backward, with how many."""
        self.sentinels: dict[int, int] = {}
        """By the parameter whose hook tells: the number of the bucket that is probably full then."""
        self.learnt: list[int] | None = None
        """The order in which rank 0's gradients came, told to all."""
        self.new_order: list[int] | None = None
        """The same until the buckets are dealt in it."""
        self._missed = 0
        self._patience = 1

    def set_buckets(self, buckets: Sequence[Bucket]) -> None:
        """Deal the same parameters anew."""
        self.buckets = list(buckets)
        self._set_sentinels()

    @cached_property
    def trained_slots(self) -> Sequence[Slot]:
        """The parameters that are trained, bucket after bucket."""
        return [slot for bucket in self.buckets for slot in bucket.slots if self.trained[slot.index]]

    def versions(self) -> list[int]:
        """Return how often each trained parameter was changed, as torch counts; 0.1 us for each."""
        return [slot.parameter._version for slot in self.trained_slots]

    def watched(self) -> set[int]:
        """Return the parameters whose gradients are to be told."""
        if self.learning:
            return {index for index in self.members if self.trained[index]}
        return {*self.sentinels, *self.often}

    def study(self, fired: dict[int, int], *, missed: bool) -> None:
        """Learn from a pass that watched every parameter; else see whether the few that are watched still do.

        `fired` says by parameter how often its gradient came, in the order of the first times.
        """
        if self.learning:
            self.order = list(fired)
            self.often = {index: times for index, times in fired.items() if times > 1}
            self.learning = not self.order
            self._set_sentinels()
            return
        self._missed = self._missed + 1 if missed else 0
        if self._missed > self._patience:
            self._missed = 0
            self._patience *= 2
            self.learning = True

    def _set_sentinels(self) -> None:
        if self.learning:
            return
        when = {index: place for place, index in enumerate(self.order)}
        self.sentinels = {}
        for number, bucket in enumerate(self.buckets):
            last = max(bucket.slots, key=lambda slot: when.get(slot.index, -1))
            self.sentinels[last.index] = number

    def complete(self, bucket: Bucket, fired: dict[int, int]) -> bool:
        """Return whether every gradient of `bucket` has come, as often as it does."""
        if not bucket.came():
            return False
        if not self.often:
            return True
        return all(fired.get(slot.index, 0) >= self.often.get(slot.index, 0) for slot in bucket.slots)


class Dealer:
    """Deals the parameters of a module to buckets, as all ranks do."""

    def __init__(
        self,
        slots: Sequence[Slot],
        trained: Sequence[bool],
        sizes: Sizes,
        allocate: Callable[[int, torch.dtype], Tensor],
    ) -> None:
        """`slots` are of all parameters; `allocate` returns memory for a bucket."""
        self._slots = slots
        self._sizes = sizes
        self._allocate = allocate
        self._make: MakeBucket | None = None
        self._groups: list[list[int]] | None = None
        """What `keep` keeps together; frozen parameters are left out."""
        self._kept: dict[tuple[bool, ...], Deal] = {}
        """The newest deals, by their members: where two take turns (GANs) nothing is learnt anew."""
        self.change(trained, trained)

    def change(self, trained: Sequence[bool], members: Sequence[bool]) -> None:
        """Have `deal` be of `members`; a deal of them that is still kept comes back with what it has learnt."""
        deal = self._kept.pop(tuple(members), None)
        if deal is None or deal.trained != trained:
            order = [index for index in range(len(members) - 1, -1, -1) if members[index]]
            deal = Deal(trained, self._buckets(order))
        self.deal = self._kept[tuple(members)] = deal
        for old in list(self._kept)[:-_KEPT]:
            del self._kept[old]

    def reorder(self) -> bool:
        """Deal anew in the order that was learnt; return whether there is one that is new."""
        order, self.deal.new_order = self.deal.new_order, None
        if order is not None:
            self.deal.set_buckets(self._buckets(order))
        return order is not None

    def keep(self, groups: list[list[int]] | None) -> list[list[Slot]]:
        """Deal from now on as now, or in these groups, and return which parameters share a bucket.

        Those outside get buckets too.
        """
        if groups is not None:
            self._groups = groups
            self.remake(self._make)
        elif self._groups is None:
            self._groups = [[slot.index for slot in bucket.slots] for bucket in self.deal.buckets]
            self._groups += self._dealt(reversed(self.deal.outside))
            self._kept = {key: made for key, made in self._kept.items() if made is self.deal}
        return [[self._slots[index] for index in group] for group in self._groups]

    def remake(self, make: MakeBucket | None) -> None:
        """From now on `make` makes the buckets of what is kept together; with None they are the usual ones."""
        self._make = make
        order = [slot.index for bucket in self.deal.buckets for slot in bucket.slots]
        self._kept = {key: made for key, made in self._kept.items() if made is self.deal}
        self.deal.set_buckets(self._buckets(order))

    def _buckets(self, order: Sequence[int]) -> list[Bucket]:
        """Return buckets of the parameters in `order`, those first that are full first."""
        if self._groups is None:
            dealt = self._dealt(order)
        else:
            when = {index: place for place, index in enumerate(order)}
            kept = [[index for index in group if index in when] for group in self._groups]
            dealt = sorted(filter(None, kept), key=lambda group: max(when[index] for index in group))
        return [self._bucket([self._slots[index] for index in group]) for group in dealt]

    def _bucket(self, slots: Sequence[Slot]) -> Bucket:
        if self._make is not None:
            return self._make(slots)
        return (RowBucket if slots[0].by_rows else Bucket)(slots, self._allocate)

    def _dealt(self, order: Iterable[int]) -> list[list[int]]:
        nbytes = [slot.nbytes for slot in self._slots]
        kinds = [(slot.dtype, slot.parameter.device, (slot.index + 1) * slot.by_rows) for slot in self._slots]
        when = {index: place for place, index in enumerate(order)}
        blocks: dict[Hashable, list[int]] = {}
        for index in when:
            if self._slots[index].block is not None:
                blocks.setdefault((self._slots[index].block, kinds[index]), []).append(index)
        loose = [index for index in when if self._slots[index].block is None]
        dealt = deal(nbytes, kinds, loose, first=self._sizes.first, most=self._sizes.bucket)
        return dealt if not blocks else sorted([*dealt, *blocks.values()], key=lambda group: when[group[-1]])


class Sentries:
    """A hook on each parameter that a deal watches, and more in each module, on those that it owns.

    A hook costs 1 to 2 us each time it fires, so that a module of many parameters has `_GUARDED` on trained ones: it
    is watched until all of these are frozen, and again when they are placed anew. All that are frozen have one, which
    does not fire before they are thawed. Any thread may place them. A rank that is alone has those `_GUARDED` on the
    whole module, and none that tells before `tell`.
    """

    def __init__(
        self, came: Callable[[int, bool, Tensor], None], module: nn.Module, slots: Sequence[Slot], *, alone: bool
    ) -> None:
        """`came(index, told, parameter)`: a gradient was accumulated in this thread; `told` where the deal watches."""
        self._came = came
        self._slots = slots
        self._tells = not alone
        index_of = {id(slot.parameter): slot.index for slot in slots}
        owned = (list(m.parameters(recurse=alone)) for m in ([module] if alone else module.modules()))
        self._owned = [[index_of[id(p)] for p in mine if id(p) in index_of] for mine in owned if mine]
        self._deal: Deal | None = None
        self._trained: list[bool] = []
        """When they were placed."""
        self._hooks: dict[int, tuple[bool, RemovableHandle]] = {}
        """By parameter: whether it tells of every gradient, and the hook."""
        self._lock = threading.Lock()

    def place(self, deal: Deal) -> None:
        """Have the parameters that `deal` watches tell, and some of every module."""
        with self._lock:
            self._deal = deal
            self._place(deal)

    def tell(self) -> None:
        """From now on those that a deal watches tell."""
        if not self._tells and self._deal is not None:
            self._tells = True
            self.place(self._deal)

    def keep(self) -> None:
        """Move those on parameters that were frozen in the meantime."""
        with self._lock:
            if self._deal is not None and self._trained != self._trained_now():
                self._place(self._deal)

    def remove(self) -> None:
        """Take them off; `.grad` stays as it is."""
        with self._lock:
            self._deal = None
            for _, hook in self._hooks.values():
                hook.remove()
            self._hooks.clear()

    def _trained_now(self) -> list[bool]:
        return [slot.parameter.requires_grad for slot in self._slots]

    def _place(self, deal: Deal) -> None:
        trained = self._trained = self._trained_now()
        wanted = {index: False for index, able in enumerate(trained) if not able}
        """Those that have a hook, and whether it tells of every gradient."""
        for mine in self._owned:
            wanted.update(dict.fromkeys([index for index in mine if trained[index]][:_GUARDED], False))
        if self._tells:
            wanted.update(dict.fromkeys((index for index in deal.watched() if trained[index]), True))
        for index in [index for index, (tells, _) in self._hooks.items() if wanted.get(index) is not tells]:
            self._hooks.pop(index)[1].remove()
        for index, tells in wanted.items():
            if index not in self._hooks:
                self._hooks[index] = tells, self._hook(index, tells)

    def _hook(self, index: int, tells: bool) -> RemovableHandle:
        # Not by the parameter's own method, which takes none for one that is frozen.
        parameter = self._slots[index].parameter
        hooks = parameter._post_accumulate_grad_hooks
        if hooks is None:
            hooks = parameter._post_accumulate_grad_hooks = OrderedDict()
        handle = RemovableHandle(hooks)
        hooks[handle.id] = partial(self._came, index, tells)
        return handle


class Newcomers:
    """The parameters that came to a module after its net was made, of which nobody reduces the gradients.

    Torch tells of each parameter and module that is registered anywhere, from the first net on, so that a module is
    looked through only behind one: 1 ms for 1,000 parameters. One hook serves all nets and stays, since another thread
    may run through the hooks just then. The module must not be changed while a step is under way.
    """

    _newest: ClassVar[object] = object()
    """Another one with each registration."""
    _hooks: ClassVar[tuple[RemovableHandle, ...]] = ()
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, module: nn.Module, known: Iterable[Tensor], taken: Container[Tensor]) -> None:
        """`known` are the net's own, and those in `taken` some net's."""
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
        """Raise RuntimeError where some are trained."""
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
        if not new:  # else they may be thawed
            self._seen = newest
