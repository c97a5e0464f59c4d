"""Buckets: gradients that are reduced together, and how parameters are dealt to them (N4)."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import torch
from torch import Tensor

from aiodist.nn.layout import flat_view, view_like

__all__ = ["Bucket", "Slot", "deal"]


def deal(
    nbytes: Sequence[int], kinds: Sequence[Hashable], order: Iterable[int], *, first: int, most: int
) -> list[list[int]]:
    """Return buckets of parameters, each of one kind, in the order in which they become full.

    `order` is how the gradients become ready. A bucket is closed when it has `most` bytes, the first of each kind
    when it has `first`, so that something is on its way early. A parameter is never cut.

    >>> deal([4, 4, 4, 40], ["f", "f", "f", "f"], [0, 1, 2, 3], first=4, most=8)
    [[0], [1, 2], [3]]
    """
    full: list[list[int]] = []
    open_ones: dict[Hashable, tuple[list[int], int]] = {}
    begun: set[Hashable] = set()
    for i in order:
        bucket, size = open_ones.pop(kinds[i], ([], 0))
        limit = most if kinds[i] in begun else first
        if bucket and size + nbytes[i] > limit:  # it is as large as may be: what follows goes on alone
            full.append(bucket)
            begun.add(kinds[i])
            bucket, size, limit = [], 0, most
        bucket.append(i)
        if size + nbytes[i] >= limit:
            full.append(bucket)
            begun.add(kinds[i])
        else:
            open_ones[kinds[i]] = bucket, size + nbytes[i]
    return full + [bucket for bucket, _ in open_ones.values()]


class Slot:
    """One parameter's place in a bucket."""

    __slots__ = ("index", "name", "parameter", "view")

    def __init__(self, index: int, name: str, parameter: Tensor) -> None:
        self.index = index
        self.name = name
        self.parameter = parameter
        self.view: Tensor | None = None
        """Where the gradient lies in the bucket, in the memory layout of the parameter."""


class Bucket:
    """The gradients of some parameters of one dtype and device, as one flat tensor.

    A gradient that autograd made anew is copied into its place once, and the place becomes `.grad`; one that is
    there already costs nothing. A parameter that has a bucket for itself is reduced where autograd left its
    gradient, with no copy at all.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = tuple(slots)
        self.left = 0
        """How many gradients are still to come in this pass."""
        self.unused: list[Slot] = []
        """Those that brought none."""
        self.data: Tensor
        """What is reduced in this pass."""
        parameters = [slot.parameter for slot in slots]
        self.numel = sum(p.numel() for p in parameters)
        self.nbytes = sum(p.nbytes for p in parameters)
        self._kind = (parameters[0].dtype, parameters[0].device)
        self._flat: Tensor | None = None

    def fill(self) -> None:
        """Gather the gradients of its parameters in `data`; those that have none count as zeros."""
        self.unused = [slot for slot in self.slots if slot.parameter.grad is None]
        if len(self.slots) == 1 and not self.unused:
            data = _in_place(self.slots[0].parameter)
            if data is not None:
                self.data = data
                return
        self.data = self._memory()
        came: list[Tensor] = []
        places: list[Tensor] = []
        for slot in self.slots:
            grad, view = slot.parameter.grad, slot.view
            assert view is not None
            if grad is None:
                view.zero_()
            elif grad is not view:
                came.append(grad)
                places.append(view)
                slot.parameter.grad = view
        if came:
            torch._foreach_copy_(places, came)

    def blank(self) -> None:
        """Have zeros reduced: this rank has nothing to bring."""
        self.unused = list(self.slots)
        self.data = self._memory().zero_()

    def adopt(self, slot: Slot) -> None:
        """Other ranks had a gradient for `slot`, this one had none: take the result."""
        assert slot.view is not None
        slot.parameter.grad = slot.view

    def gradients(self) -> list[Tensor]:
        """Return those that its parameters have."""
        return [slot.parameter.grad for slot in self.slots if slot.parameter.grad is not None]

    def _memory(self) -> Tensor:
        if self._flat is None:
            dtype, device = self._kind
            self._flat = torch.empty(self.numel, dtype=dtype, device=device)
            pieces = self._flat.split([slot.parameter.numel() for slot in self.slots])
            for slot, piece in zip(self.slots, pieces, strict=True):
                slot.view = view_like(piece, slot.parameter)
        return self._flat


def _in_place(parameter: Tensor) -> Tensor | None:
    """Return the gradient as flat memory in the order of the parameter's, the same on every rank; None if it is not."""
    grad = parameter.grad
    if grad is None or grad.stride() != parameter.stride() or grad.dtype is not parameter.dtype:
        return None
    return flat_view(grad)
