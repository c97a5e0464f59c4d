"""Buckets: gradients that are reduced together, how parameters are dealt to them, and how full ones are reduced."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch import _foreach_add_ as add_each
from torch import _foreach_copy_ as copy_each
from torch.amp import GradScaler

from aiodist.codecs.base import wide
from aiodist.communicator import Communicator
from aiodist.handles import Handle
from aiodist.nn.layout import flat_view, view_like
from aiodist.streams.memory import dtype_name, shares_memory


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


@dataclass(slots=True, eq=False)
class Slot:
    """One parameter's place in a bucket."""

    index: int
    name: str
    parameter: Tensor
    block: int | None = None
    """A number of the block that it belongs to, whose gradients travel together."""
    by_rows: bool = False
    """True if the gradient is sparse and has a bucket of its own."""
    dtype: torch.dtype = field(init=False)
    nbytes: int = field(init=False)
    earlier: Tensor | None = None
    """The gradient that was there when the pass began; this pass's adds to it."""
    view: Tensor | None = None
    """Place of the gradient in the bucket, in the memory layout of the parameter."""
    result: Tensor | None = None
    """The tensor that becomes `.grad` after the reduction."""
    given: bool = False
    """True if the user got the gradient before the end of the pass, and owns it since."""

    def __post_init__(self) -> None:
        self.dtype = self.parameter.dtype
        self.nbytes = self.parameter.nbytes


class Bucket:
    """The gradients of some parameters of one dtype and device, as one flat tensor.

    While a pass goes on `.grad` holds what it brings, and nothing else: so a gradient that has come can be told from
    one that has not. It is copied into its place in the bucket once, and the place becomes `.grad`. A parameter that
    has a bucket for itself is reduced where autograd left its gradient, with no copy at all, unless that is needed for
    something else too.
    """

    def __init__(self, slots: Sequence[Slot], allocate: Callable[[int, torch.dtype], Tensor]) -> None:
        """`allocate` returns a flat tensor of so many elements, in memory that suits reductions."""
        self.slots = tuple(slots)
        self._allocate = allocate
        self.unused: list[Slot] = []
        """Slots without a gradient in this pass."""
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
            slot.earlier, slot.result, slot.given = slot.parameter.grad, None, False
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
        self.data = self.memory() if self._flat is None else self._flat
        self.unused = []
        strided = torch.strided
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
                if grad.layout is not strided or grad.dtype is not slot.dtype:
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
        """Reduce the only gradient where it is, unless its memory is another's too, or not as the parameter's."""
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

    def keep(self) -> None:
        """Leave the gradients as they are: there is no other rank. Raises as `fill`."""
        strided = torch.strided
        for slot in self.slots:
            grad = slot.parameter.grad
            if grad is not None and grad.layout is not strided:
                _check_dense(slot, grad)

    def blank(self) -> None:
        """Reduce zeros, since this rank has no gradients."""
        self.unused = list(self.slots)
        if any(slot.earlier is not None for slot in self.slots):
            self._flat = None  # where they may lie, and stay if no rank brings anything
        self.data = self.memory().zero_()

    def scale(self) -> None:
        """Multiply it by its factor, once; from any thread."""
        with self.lock:
            factor, self.factor = self.factor, 1.0
        if factor != 1:
            with torch.no_grad():
                self.reduced.mul_(factor)

    @property
    def reduced(self) -> Tensor:
        """This rank's part of the reduced bucket."""
        return self.data

    def gradients(self) -> list[Tensor]:
        """Return what autograd has brought to this pass, and is not taken yet."""
        return [slot.parameter.grad for slot in self.slots if slot.parameter.grad is not None]

    def release(self) -> None:
        """Release the memory of a reduced bucket that is no result."""

    def place(self, used: Callable[[int], object], *, empty: bool = False) -> None:
        """It is reduced: give each parameter its gradient, one that this rank had not if other ranks `used` it.

        Of an `empty` pass, to which no rank has brought anything, the gradients are those of before.
        """
        for slot in self.unused:
            if used(slot.index):
                slot.result = slot.view
        for slot in self.slots:
            if empty:
                slot.parameter.grad = slot.earlier
            elif slot.result is not None and not slot.given:
                slot.parameter.grad = slot.result
            slot.earlier = None

    def memory(self) -> Tensor:
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
    _check_dtype(slot, grad)


def _check_dtype(slot: Slot, grad: Tensor) -> None:
    """Raise `TypeError` unless the gradient is of the dtype that the parameter had from the beginning."""
    if grad.dtype is not slot.dtype:
        seen, known = dtype_name(grad.dtype), dtype_name(slot.dtype)
        raise TypeError(
            f"parameter {slot.name!r} has a gradient of {seen}, and was {known} when DataParallel was made: "
            "make a new one"
        )


def _flat(grad: Tensor, slot: Slot) -> Tensor | None:
    """Return the gradient as flat memory in the order of the parameter's, the same on every rank; None if it is not.

    Nor if other tensors have that memory: it may be the gradient of something else too, from which backward goes on.
    """
    _check_dense(slot, grad)
    parameter = slot.parameter
    if grad.stride() != parameter.stride() or shares_memory(grad):
        return None
    return flat_view(grad)


# --- gradients of embeddings, which come as rows and are never made dense ---------------------------------------------


def row_parameters(module: nn.Module) -> set[Tensor]:
    """Return the parameters on the CPU that get sparse gradients: the weights of embeddings with `sparse=True`."""
    embeddings = (m for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag))
    return {m.weight for m in embeddings if m.sparse and m.weight.is_cpu}


def with_values(parameter: Tensor) -> Tensor:
    """Return `parameter`, or for a gradient of rows a tensor that has their values, in place, as its gradient.

    For functions of torch that take no sparse gradients and treat every element alike, as `clip_grad_norm_` does.
    """
    grad = parameter.grad
    if grad is None or grad.layout is not torch.sparse_coo:
        return parameter
    if not grad.is_coalesced():
        grad = parameter.grad = grad.coalesce()
    values = grad.values()
    stand_in = torch.empty_like(values)
    stand_in.grad = values
    return stand_in


class RowBucket(Bucket):
    """The gradient of one embedding: each rank brings the rows that it has, and gets those of all ranks, summed."""

    _gathered: Handle[list[list[Tensor]]] | None = None
    """The ranks' row numbers and rows; None once they are summed."""
    _share = 1.0
    """By which the sum is multiplied for the mean over all ranks."""
    _used = False
    """Some rank has used the parameter."""

    def fill(self) -> None:
        """Take the rows of the gradient. Raises `TypeError` for a dense one, or one of another dtype than before."""
        (slot,) = self.slots
        given = [grad for grad in (slot.earlier, slot.parameter.grad) if grad is not None]
        for grad in given:
            if grad.layout is not torch.sparse_coo:
                raise TypeError(
                    f"parameter {slot.name!r} has a dense gradient, and belongs to an embedding with sparse=True: "
                    "expected one of rows; use sparse=False where the weight is used elsewhere too"
                )
            _check_dtype(slot, grad)
        if not given:
            self.blank()
            return
        self.unused = []
        with torch.no_grad():
            rows = (given[0] + given[1] if len(given) > 1 else given[0]).coalesce()
        slot.parameter.grad = None
        self._bring(rows.indices()[0].contiguous(), rows.values().contiguous())

    def blank(self) -> None:
        self.unused = list(self.slots)
        parameter = self.slots[0].parameter
        self._bring(
            torch.empty(0, dtype=torch.int64, device="cpu"), parameter.detach().new_empty(0, *parameter.shape[1:])
        )

    def _bring(self, numbers: Tensor, rows: Tensor) -> None:
        self._brought = [numbers, rows]
        self.nbytes = numbers.nbytes + rows.nbytes

    def gather(self, coll: Communicator, op: str) -> Handle[list[list[Tensor]]]:
        """Return the handle of the row numbers and the rows of all ranks. Cost: an allgather of either."""
        self._share = 1 / coll.size if op == "mean" else 1.0
        self._gathered = coll.allgather(self._brought)
        return self._gathered

    def scale(self) -> None:
        """Sum the rows, and multiply them by the factor, once; from any thread."""
        with self.lock:
            gathered, self._gathered = self._gathered, None
            if gathered is None:
                return
            (slot,) = self.slots
            with torch.inference_mode(False), torch.no_grad():
                numbers, rows = (torch.cat(parts) for parts in gathered.result())
                shape = slot.parameter.shape
                total = torch.sparse_coo_tensor(
                    numbers[None], rows.to(wide(rows.dtype)), shape, check_invariants=True, device=rows.device
                ).coalesce()
                total.values().mul_(self.factor * self._share)
            slot.result, self.factor = total.to(rows.dtype), 1.0

    def place(self, used: Callable[[int], object], *, empty: bool = False) -> None:
        """It may be used, if some rank `used` it: `finish` gives the parameter its gradient. Otherwise as a bucket."""
        (slot,) = self.slots
        self._used = bool(used(slot.index))
        if empty:
            slot.parameter.grad = slot.earlier
        slot.earlier = None
        if not self._used:
            slot.result = self._gathered = None

    def finish(self) -> None:
        """Sum the rows on the thread that uses them, since that takes long, unless they are summed already."""
        self.scale()
        (slot,) = self.slots
        if self._used and not slot.given:
            slot.parameter.grad = slot.result


# --- what torch calls a communication hook ----------------------------------------------------------------------------


class CommHook:
    """Reduces the buckets of one net; on the loop, in an order that is the same on every rank."""

    nbytes = 0
    """Bytes that this rank has given to collectives so far."""
    comms: Sequence[Communicator] = ()
    """Communicators of its own on which it issues."""

    def reduce(self, bucket: Bucket) -> Handle[Any]:
        """Return the handle of the reduction of `bucket.data`, in place; raise what the communicator raises."""
        raise NotImplementedError

    def rescale(self, scaler: GradScaler | None) -> None:
        """Begin a pass of a loss that `scaler` has multiplied by its scale; no reduction is in flight."""

    def settle(self, bucket: Bucket) -> None:
        """Bucket is reduced on all ranks, and its gradients are given out; not called where a pass failed."""

    async def aclose(self) -> None:
        """Release all resources; no reduction is in flight."""

    def abort(self) -> None:
        """Release all resources immediately: the net was aborted."""


class Allreduce(CommHook):
    """The sum or mean of all ranks, as it is."""

    def __init__(self, data: Communicator, op: Literal["mean", "sum"]) -> None:
        self._data = data
        self._op = op

    def reduce(self, bucket: Bucket) -> Handle[Any]:
        self.nbytes += bucket.nbytes
        return self._data.allreduce(bucket.data, self._op)
