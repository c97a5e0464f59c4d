"""Gradients of embeddings that come as rows: they are gathered and summed as rows, and never made dense."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from aiodist.communicator import Communicator
from aiodist.handles import Handle
from aiodist.nn.buckets import Bucket, check_dtype


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
            check_dtype(slot, grad)
        if not given:
            self.blank()
            return
        self.unused = []
        with torch.no_grad():
            rows = (given[0] + given[1] if len(given) > 1 else given[0]).coalesce()
        slot.parameter.grad = None
        self._bring(rows.indices()[0].contiguous(), rows.values().contiguous())

    def blank(self) -> None:
        """Bring no rows."""
        self.unused = list(self.slots)
        parameter = self.slots[0].parameter
        self._bring(torch.empty(0, dtype=torch.int64), parameter.detach().new_empty(0, *parameter.shape[1:]))

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
                total = torch.sparse_coo_tensor(numbers[None], rows, shape, check_invariants=True).coalesce()
                total.values().mul_(self.factor * self._share)
            slot.result, self.factor = total, 1.0

    def place(self, used: Callable[[int], object]) -> None:
        """It may be used, if some rank `used` it: `finish` gives the parameter its gradient."""
        (slot,) = self.slots
        self._used = bool(used(slot.index))
        slot.earlier = None
        if not self._used:
            slot.result = self._gathered = None

    def finish(self) -> None:
        """Sum the rows on the thread that uses them, since that takes long, unless they are summed already."""
        self.scale()
        if self._used:
            self.slots[0].parameter.grad = self.slots[0].result
