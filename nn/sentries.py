"""Hooks on the parameters of a net: they tell when gradients come, and when some come that nobody would reduce."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from threading import get_ident
from typing import Protocol

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from aiodist.nn.buckets import Slot
from aiodist.nn.deals import Deal

_GUARDED = 4  # trained parameters of a module: weights and biases of the usual layers


class GradientWatcher(Protocol):
    """The object that sentries tell of gradients."""

    thread: int | None
    """The thread that runs the backward of a pass; None while none is under way."""

    def came(self, index: int) -> None:
        """The gradient of parameter `index` was accumulated, which is watched."""

    def check_inside(self, index: int) -> None:
        """It was accumulated by another thread than that of a pass: raise unless this is right."""


class Sentries:
    """A hook on each parameter that a deal watches, and more in each module, on those that it owns.

    A hook costs 1 to 2 us each time it fires, so that a module of many parameters has `_GUARDED` on trained ones: it
    is watched until all of these are frozen, and again when they are placed anew. All that are frozen have one, which
    does not fire before they are thawed. Any thread may place them.
    """

    def __init__(self, watcher: GradientWatcher, module: nn.Module, slots: Sequence[Slot]) -> None:
        self._watcher = watcher
        self._slots = slots
        index_of = {id(slot.parameter): slot.index for slot in slots}
        owned = (list(m.parameters(recurse=False)) for m in module.modules())
        self._owned = [[index_of[id(p)] for p in mine] for mine in owned if mine]
        self._deal: Deal | None = None
        self._trained: list[bool] = []
        """When they were placed."""
        self._hooks: dict[int, _Hook] = {}
        self._lock = threading.Lock()

    def place(self, deal: Deal) -> None:
        """Have the parameters that `deal` watches tell, and some of every module."""
        with self._lock:
            self._deal = deal
            self._place(deal)

    def keep(self) -> None:
        """Move those on parameters that were frozen in the meantime."""
        with self._lock:
            if self._deal is not None and self._trained != self._trained_now():
                self._place(self._deal)

    def remove(self) -> None:
        """Take them off; `.grad` stays as it is."""
        with self._lock:
            self._deal = None
            for hook in self._hooks.values():
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
        wanted.update(dict.fromkeys((index for index in deal.watched() if trained[index]), True))
        for index in [index for index, hook in self._hooks.items() if wanted.get(index) is not hook.tells]:
            self._hooks.pop(index).remove()
        for index, tells in wanted.items():
            if index not in self._hooks:
                self._hooks[index] = _Hook(self._watcher, index, self._slots[index].parameter, tells)


class _Hook:
    """What autograd calls when it has accumulated the gradient of one parameter.

    It tells of a backward outside of the net, and with `tells` of every gradient.
    """

    __slots__ = ("_handle", "_index", "_watcher", "tells")

    def __init__(self, watcher: GradientWatcher, index: int, parameter: Tensor, tells: bool) -> None:
        self.tells = tells
        self._watcher = watcher
        self._index = index
        # Not by its own method, which takes none for a parameter that is frozen.
        hooks = parameter._post_accumulate_grad_hooks
        if hooks is None:
            hooks = parameter._post_accumulate_grad_hooks = OrderedDict()
        self._handle = RemovableHandle(hooks)
        hooks[self._handle.id] = self

    def remove(self) -> None:
        self._handle.remove()

    def __call__(self, parameter: Tensor) -> None:
        if self._watcher.thread != get_ident():
            self._watcher.check_inside(self._index)
        if self.tells and self._watcher.thread is not None:
            self._watcher.came(self._index)
