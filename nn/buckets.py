"""Buckets: gradients that are reduced together, and how parameters are dealt to them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Sequence

import torch
from torch import Tensor
from torch import _foreach_add_ as add_each
from torch import _foreach_copy_ as copy_each

from aiodist.nn.layout import flat_view, view_like
from aiodist.streams.memory import dtype_name


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

    __slots__ = ("block", "by_rows", "dtype", "earlier", "index", "name", "nbytes", "parameter", "result", "view")

    def __init__(
        self, index: int, name: str, parameter: Tensor, block: int | None = None, *, by_rows: bool = False
    ) -> None:
        """`block` is a number of the block that it belongs to, whose gradients travel together.

        `by_rows`: its gradient is sparse, and has a bucket of its own.
        """
        self.index = index
        self.block = block
        self.by_rows = by_rows
        self.name = name
        self.parameter = parameter
        self.dtype = parameter.dtype
        self.nbytes = parameter.nbytes
        self.earlier: Tensor | None = None
        """The gradient that was there when the pass began; this pass's adds to it."""
        self.view: Tensor | None = None
        """Where the gradient lies in the bucket, in the memory layout of the parameter."""
        self.result: Tensor | None = None
        """What becomes `.grad` when it is reduced."""

    def surplus(self) -> bool:
        """A gradient has come after its bucket was filled."""
        return self.parameter.grad is not None and self.parameter.grad is not self.result

    def used(self) -> bool:
        """It has brought something to this pass."""
        return self.result is not None or self.parameter.grad is not None


class Bucket:
    """The gradients of some parameters of one dtype and device, as one flat tensor.

    While a pass goes on `.grad` holds what it brings, and nothing else: so a gradient that has come can be told from
    one that has not. It is copied into its place in the bucket once, and the place becomes `.grad`. A parameter that
    has a bucket for itself is reduced where autograd left its gradient, with no copy at all.
    """

    def __init__(self, slots: Sequence[Slot], allocate: Callable[[int, torch.dtype], Tensor]) -> None:
        """`allocate` returns a flat tensor of so many elements, in memory that suits reductions."""
        self.slots = tuple(slots)
        self._allocate = allocate
        self.unused: list[Slot] = []
        """Those that brought nothing."""
        self.data: Tensor
        """What is reduced in this pass."""
        parameters = [slot.parameter for slot in slots]
        self.numel = sum(p.numel() for p in parameters)
        self.nbytes = sum(slot.nbytes for slot in slots)
        self.dtype = slots[0].dtype
        self.device = parameters[0].device
        self.on_device = parameters[0].is_cuda
        self.lock = threading.Lock()
        """Held while it is filled: a thread of autograd may still be at it when another finds that backward failed."""
        self.factor = 1.0
        """By which it is still to be multiplied, once it is reduced."""
        self._flat: Tensor | None = None
        self._views: Sequence[Tensor | None] = [None] * len(slots)

    def open(self) -> None:
        """Begin a pass: set aside the gradients that are there."""
        for slot, view in zip(self.slots, self._views, strict=True):
            slot.view = view  # in the last pass it may have been in another bucket
            slot.earlier, slot.result = slot.parameter.grad, None
            if slot.earlier is not None:
                slot.parameter.grad = None

    def came(self) -> bool:
        """Every parameter has got a gradient in this pass."""
        return all(slot.parameter.grad is not None for slot in self.slots)

    def fill(self) -> None:
        """Take the gradients of its parameters into `data`; those that have none count as zeros.

        Raises `TypeError` for a sparse gradient, or one of another dtype than before.
        """
        if len(self.slots) == 1 and self._take_whole(self.slots[0]):
            return
        self.data = self._memory()
        self.unused = []
        copied: tuple[list[Tensor], list[Tensor]] = ([], [])
        added: tuple[list[Tensor], list[Tensor]] = ([], [])
        for slot in self.slots:
            grad, earlier = slot.parameter.grad, slot.earlier
            slot.result = view = slot.view
            assert view is not None
            if grad is None and earlier is None:
                self.unused.append(slot)
                slot.result = None
                view.zero_()
                continue
            if earlier is not None and earlier is not view:
                copied[0].append(view)
                copied[1].append(earlier)
            if grad is not None:
                _check_dense(slot, grad)
                to = copied if earlier is None else added
                to[0].append(view)
                to[1].append(grad)
                slot.parameter.grad = None
        with torch.no_grad():
            if copied[0]:
                copy_each(*copied)
            if added[0]:
                add_each(*added)

    def _take_whole(self, slot: Slot) -> bool:
        """Reduce the only gradient where it is, unless its memory is in another order than the parameter's."""
        grad, earlier = slot.parameter.grad, slot.earlier
        result = grad if earlier is None else earlier
        data = None if result is None else _flat(result, slot)
        if data is None:
            return False
        if earlier is not None and grad is not None:
            _check_dense(slot, grad)
            with torch.no_grad():
                earlier.add_(grad)
        self.unused = []
        self.data = data
        self._views = [None]
        self._flat = slot.view = None  # of a pass with nothing to bring
        slot.result = result
        slot.parameter.grad = None
        return True

    def blank(self) -> None:
        """Have zeros reduced: this rank has nothing to bring."""
        self.unused = list(self.slots)
        self.data = self._memory().zero_()

    def scale(self) -> None:
        """Multiply it by its factor, once; from any thread."""
        with self.lock:
            factor, self.factor = self.factor, 1.0
        if factor != 1:
            with torch.no_grad():
                self.reduced.mul_(factor)

    @property
    def reduced(self) -> Tensor:
        """What this rank has of it once it is reduced."""
        return self.data

    def gradients(self) -> list[Tensor]:
        """Return what autograd has brought to this pass, and is not taken yet."""
        return [slot.parameter.grad for slot in self.slots if slot.parameter.grad is not None]

    def release(self) -> None:
        """It is reduced: give back the memory of what is no result."""

    def place(self, used: Callable[[int], object]) -> None:
        """It is reduced: give each parameter its gradient, one that this rank had not if other ranks `used` it."""
        for slot in self.unused:
            if used(slot.index):
                slot.result = slot.view
        for slot in self.slots:
            if slot.result is not None:
                slot.parameter.grad = slot.result
            slot.earlier = None

    def finish(self) -> None:
        """Do what is left to do, on the thread that uses the gradients."""

    def _memory(self) -> Tensor:
        if self._flat is None:
            with torch.inference_mode(False), torch.no_grad():  # the first step to need it may be in other modes
                if self.device.type == "cpu":
                    self._flat = self._allocate(self.numel, self.dtype)
                else:
                    self._flat = torch.empty(self.numel, dtype=self.dtype, device=self.device)
                pieces = self._flat.split([slot.parameter.numel() for slot in self.slots])
                self._views = [view_like(p, slot.parameter) for slot, p in zip(self.slots, pieces, strict=True)]
                for slot, view in zip(self.slots, self._views, strict=True):
                    slot.view = view
        return self._flat


def _check_dense(slot: Slot, grad: Tensor) -> None:
    if grad.layout is not torch.strided:
        raise TypeError(
            f"parameter {slot.name!r} has a gradient of layout {grad.layout}: expected a dense one, or on the CPU that "
            "of an nn.Embedding or nn.EmbeddingBag with sparse=True"
        )
    check_dtype(slot, grad)


def check_dtype(slot: Slot, grad: Tensor) -> None:
    """Raise `TypeError` unless the gradient is of the dtype that the parameter had from the beginning."""
    if grad.dtype is not slot.dtype:
        seen, known = dtype_name(grad.dtype), dtype_name(slot.dtype)
        raise TypeError(
            f"parameter {slot.name!r} has a gradient of {seen}, and was {known} when DataParallel was made: "
            "make a new one"
        )


def _flat(grad: Tensor, slot: Slot) -> Tensor | None:
    """Return the gradient as flat memory in the order of the parameter's, the same on every rank; None if it is not."""
    _check_dense(slot, grad)
    parameter = slot.parameter
    if grad.stride() != parameter.stride():
        return None
    return flat_view(grad)
