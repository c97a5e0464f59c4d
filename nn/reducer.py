"""Hooks on parameters that have their gradients reduced, bucket by bucket, while backward goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from aiodist.communicator import Communicator
from aiodist.errors import AiodistError, OperationTimeout
from aiodist.handles import Handle, Progress, Scheduler
from aiodist.nn.buckets import Bucket, Slot, deal
from aiodist.nn.reduction import Paths, Reduction

__all__ = ["Reducer", "Sizes", "Statistics"]

_PRIORITY = 10  # of reductions among what the loop has in flight


@dataclass(frozen=True)
class Sizes:
    """How large buckets are, in bytes."""

    bucket: int
    first: int

    def __post_init__(self) -> None:
        for name in ("bucket", "first"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} bucket: {getattr(self, name)} bytes: expected at least 1")


@dataclass
class Statistics:
    """What reducing gradients has cost so far, on this rank."""

    passes: int = 0
    buckets: int = 0
    """Reductions of buckets."""
    nbytes: int = 0
    """Bytes of gradients that were reduced."""
    seconds: float = 0.0
    """In which reductions were on their way."""
    exposed: float = 0.0
    """Those of them after backward had ended."""

    @property
    def hidden(self) -> float:
        """The share of the communication behind which backward went on, from 0 to 1."""
        return 1 - self.exposed / self.seconds if self.seconds else 0.0


class Reducer:
    """Reduces the gradients of some parameters; one pass for each backward.

    `begin`, `Reduction.full` and `Reduction.close` belong to the thread that runs backward, the rest to the loop.
    The first pass sends everything at its end. From it each rank learns how often a hook fires in one backward
    (reentrant checkpointing: more than once), and rank 0 tells in which order the gradients come; the buckets are
    dealt anew in that order.
    """

    def __init__(
        self,
        data: Communicator,
        marks: Communicator,
        named: Iterable[tuple[str, Tensor]],
        *,
        op: str,
        sizes: Sizes,
    ) -> None:
        self.statistics = Statistics()
        self.last: Reduction | None = None
        """The newest pass."""
        self.local = 0
        """How many `no_sync` blocks are open: hooks stand aside."""
        self.joining = 0
        """How many `join` blocks are open: gradients are not final before the marks are known."""
        self.progress = Progress.current()
        self.waiting: list[asyncio.Future[None]] = []
        """Awaits of a step, to be told of reductions that are late."""
        self.fired: list[int] = []
        """By parameter: how often its hook fired in this pass."""
        self._paths = Paths(
            data=data,
            marks=marks,
            progress=self.progress,
            lane=Scheduler.current().lane(f"gradients of {data.name}", _PRIORITY),
            op=op,
            parameters=0,
            urgent=False,
        )
        self._sizes = sizes
        self._slots: list[Slot] = []
        self._frozen: list[tuple[str, Tensor]] = []
        self._hooks: list[Any] = []
        self._current: Reduction | None = None
        self._order: list[int] = []
        self._expected: list[int] | None = None
        self._learnt: list[int] | None = None
        """The order in which rank 0's gradients came, told to all."""
        self._new_order: list[int] | None = None
        self._summed = False
        """The gradients hold the ranks' sum: what is added to them must be added to this rank's share of it."""
        self._attach(named)
        self._place: list[int] = []
        self._set_buckets(self._deal(range(len(self._slots) - 1, -1, -1)))

    # --- parameters and buckets -------------------------------------------------------------------------------

    def _attach(self, named: Iterable[tuple[str, Tensor]]) -> None:
        for name, parameter in named:
            if not parameter.requires_grad:
                self._frozen.append((name, parameter))
                continue
            if _hooked(parameter):
                raise RuntimeError(f"parameter {name!r} belongs to a DataParallel already: aclose() that first")
            slot = Slot(len(self._slots), name, parameter)
            self._slots.append(slot)
        for slot in self._slots:
            self._hooks.append(slot.parameter.register_post_accumulate_grad_hook(_Hook(self, slot.index)))
        self._paths = replace(self._paths, parameters=len(self._slots))

    def detach(self) -> None:
        """Take the hooks off; `.grad` stays as it is."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @property
    def slots(self) -> Sequence[Slot]:
        """Those parameters that are trained."""
        return self._slots

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The buckets in the order in which they are sent."""
        return self._buckets

    def _deal(self, order: Iterable[int]) -> list[Bucket]:
        parameters = [slot.parameter for slot in self._slots]
        nbytes = [p.nbytes for p in parameters]
        kinds = [(p.dtype, p.device) for p in parameters]
        dealt = deal(nbytes, kinds, order, first=self._sizes.first, most=self._sizes.bucket)
        return [Bucket([self._slots[i] for i in bucket]) for bucket in dealt]

    def _set_buckets(self, buckets: list[Bucket]) -> None:
        self._buckets = buckets
        self._place = [0] * len(self._slots)
        for number, bucket in enumerate(buckets):
            for slot in bucket.slots:
                self._place[slot.index] = number

    def keep_buckets(self) -> None:
        """Deal no more: from now on only the order of the buckets is learnt (N7: each has an optimizer)."""
        self._paths = replace(self._paths, urgent=True)

    def _reorder(self, order: list[int]) -> None:
        if self._paths.urgent:
            when = {index: place for place, index in enumerate(order)}
            self._set_buckets(sorted(self._buckets, key=lambda bucket: max(when[slot.index] for slot in bucket.slots)))
        else:
            self._set_buckets(self._deal(order))

    # --- passes: on the thread that runs backward --------------------------------------------------------------

    def begin(self, *, active: bool = True) -> Reduction:
        """Return a new pass, once nothing of the last one is in flight; the gradients that come now are its."""
        if self.last is not None:
            self.last.over.block()
        if self._new_order is not None:
            self._reorder(self._new_order)
            self._new_order = None
        self.share()
        self.fired = [0] * len(self._slots)
        self._order = []
        for bucket in self._buckets:
            bucket.left = len(bucket.slots)
        self.last = self._current = Reduction(self._paths, self._buckets, self, active=active)
        self.last.prompt = not self.joining
        return self.last

    def close(self, reduction: Reduction, error: BaseException | None = None) -> None:
        """Backward is over, and raised `error` if that is given. Raises what only its end shows to be wrong."""
        self._current = None
        trouble = self._trouble() if error is None and reduction.active else None
        reduction.close(error or trouble)
        if trouble is not None:
            raise trouble
        if error is None and reduction.active:
            self._expected = [max(pair) for pair in zip(self.fired, self._expected or self.fired, strict=True)]

    def _trouble(self) -> BaseException | None:
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                return RuntimeError(
                    f"parameter {name!r} was frozen when DataParallel was made and is not now: make a new one"
                )
        return None

    def share(self) -> None:
        """Before gradients are added to a sum of all ranks: keep this rank's share of it."""
        if self._summed:
            self._summed = False
            with torch.no_grad():
                for slot in self._slots:
                    if slot.parameter.grad is not None:
                        slot.parameter.grad.div_(self._paths.data.size)

    def came(self, index: int) -> None:
        """The gradient of a parameter was accumulated; called by its hook."""
        reduction = self._current
        if reduction is None:
            if self.local:
                return
            raise RuntimeError(
                f"parameter {self._slots[index].name!r} got a gradient outside of net.step and net.backward, which "
                "reduce it: call `await net.backward(loss)`, or use `with net.no_sync():`"
            )
        fired = self.fired
        fired[index] = times = fired[index] + 1
        if self._expected is None:
            self._first(index)
        elif times == max(1, self._expected[index]):
            number = self._place[index]
            bucket = self._buckets[number]
            bucket.left -= 1
            if not bucket.left:
                reduction.full(number)
        elif times > self._expected[index]:
            self._expected[index] = times
            raise RuntimeError(
                f"parameter {self._slots[index].name!r} got {times} gradients in one backward, and its bucket went "
                f"after {times - 1}, as many as there were so far: the next step waits for all of them"
            )

    def _first(self, index: int) -> None:
        grad = self._slots[index].parameter.grad
        if grad is not None and grad.layout is not torch.strided:
            name = self._slots[index].name
            raise TypeError(f"parameter {name!r} has a gradient of layout {grad.layout}: expected a dense one")
        if self.fired[index] == 1:
            self._order.append(index)

    # --- passes: on the loop ------------------------------------------------------------------------------------

    def late(self, error: OperationTimeout) -> None:
        """See `Observer`."""
        for future in self.waiting:
            if not future.done():
                future.set_exception(error)

    def ended(self, reduction: Reduction, over: Callable[[], None]) -> None:
        """See `Observer`."""
        self._summed = self._paths.op == "sum" and self._paths.data.size > 1
        known = self.statistics
        known.passes += 1
        known.buckets += len(reduction.spans)
        known.nbytes += sum(bucket.nbytes for bucket in reduction.buckets)
        known.seconds += _union(reduction.spans)
        if reduction.closed is not None:
            known.exposed += _union([(max(a, reduction.closed), b) for a, b in reduction.spans if b > reduction.closed])
        if self._learnt or not reduction.participants or reduction.failures:
            over()
        else:
            self._learn(over)

    def _learn(self, over: Callable[[], None]) -> None:
        """Have rank 0 tell in which order its gradients came; the same on all ranks, whatever the order there."""
        try:
            told = self._paths.marks.broadcast_object(self._order)
        except AiodistError:  # the communicator was closed or given up, which the next call tells
            over()
        else:
            told.add_done_callback(partial(self._told, over))

    def _told(self, over: Callable[[], None], told: Handle[list[int]]) -> None:
        if told.outcome_error() is None and told.result():
            came = told.result()
            known = set(came)
            # Those that had no gradient come last, in the order of backward.
            rest = [i for i in range(len(self._slots) - 1, -1, -1) if i not in known]
            self._learnt = self._new_order = [*came, *rest]
        over()


class _Hook:
    """What autograd calls when it has accumulated the gradient of one parameter."""

    __slots__ = ("index", "reducer")

    def __init__(self, reducer: Reducer, index: int) -> None:
        self.reducer = reducer
        self.index = index

    def __call__(self, parameter: Tensor) -> None:
        self.reducer.came(self.index)


def _hooked(parameter: Tensor) -> bool:
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    return any(isinstance(hook, _Hook) for hook in hooks.values())


def _union(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of what intervals cover together.

    >>> _union([(0, 2), (1, 3), (5, 6)])
    4
    """
    total, end = 0.0, float("-inf")
    for a, b in sorted(spans):
        if b > end:
            total += b - max(a, end)
            end = b
    return total
