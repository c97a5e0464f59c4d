"""Hooks on parameters that have their gradients reduced, bucket by bucket, while backward goes on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from aiodist.communicator import Communicator
from aiodist.errors import AiodistError, OperationTimeout
from aiodist.handles import Handle, Progress, Scheduler
from aiodist.nn.buckets import Bucket, Slot, deal
from aiodist.nn.devices import Devices
from aiodist.nn.paths import WINDOW_BYTES, Paths
from aiodist.nn.reduction import Reduction

__all__ = ["Reducer", "Sizes", "Statistics"]

_WINDOW_SECONDS = 25e-3  # how long what is in flight may take: later, more urgent buckets wait behind it
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

    `begin` and `close` belong to the thread that runs backward, the rest to the loop; hooks come in that thread for
    parameters on the CPU, and for those on a CUDA device in a thread that autograd has for it.
    A hook costs 2 us each time. So only the first pass watches every parameter, and sends everything at its end.
    From it rank 0 tells all in which order the gradients come, and the buckets are dealt anew in that order. From then
    on only the parameter of each bucket whose gradient came last has a hook, which looks whether all have come. Where
    that is not so the bucket goes later, at the latest when backward ends.
    """

    _taken: ClassVar[Any] = WeakIdKeyDictionary()
    """The parameters that belong to one, of which only few have a hook."""

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
        named = list(named)
        self.devices = Devices(self.progress, [parameter for _, parameter in named if parameter.requires_grad])
        self._lock = threading.Lock()
        """Held for what hooks note, and while nothing is waited for."""
        self._paths = Paths(
            data=data,
            marks=marks,
            progress=self.progress,
            lane=Scheduler.current().lane(f"gradients of {data.name}", _PRIORITY),
            devices=self.devices,
            op=op,
            parameters=0,
            urgent=False,
        )
        self._sizes = sizes
        self._slots: list[Slot] = []
        self._frozen: list[tuple[str, Tensor]] = []
        self._hooks: list[Any] = []
        self._current: Reduction | None = None
        self._learning = True
        """This pass watches every parameter, and sends everything at its end."""
        self.order: list[int] = []
        """In which gradients came on this rank, when every parameter was watched last."""
        self._often: dict[int, int] = {}
        """The parameters that get several gradients in one backward, with how many."""
        self._sentinels: dict[int, int] = {}
        """By the parameter whose hook tells: the number of the bucket that is probably full then."""
        self._fired: dict[int, int] = {}
        """By parameter, how often its hook fired in this pass; in the order of the first times."""
        self._due: list[int] = []
        """Buckets that were probably full, and were not."""
        self._missed = 0
        self._patience = 1
        self._learnt: list[int] | None = None
        """The order in which rank 0's gradients came, told to all."""
        self._new_order: list[int] | None = None
        self._summed = False
        """The gradients hold the ranks' sum: what is added to them must be added to this rank's share of it."""
        self._attach(named)
        self._set_buckets(self._deal(range(len(self._slots) - 1, -1, -1)))

    # --- parameters and buckets -------------------------------------------------------------------------------

    def _attach(self, named: Iterable[tuple[str, Tensor]]) -> None:
        for name, parameter in named:
            if not parameter.requires_grad:
                self._frozen.append((name, parameter))
                continue
            slot = Slot(len(self._slots), name, parameter)
            self._slots.append(slot)
            self._taken[parameter] = None
        self._learn_hooks()
        self._paths = replace(self._paths, parameters=len(self._slots))

    @classmethod
    def check_free(cls, named: Iterable[tuple[str, Tensor]]) -> None:
        """Raise unless there is something to train, and nothing that belongs to another one."""
        trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        if not trained:
            raise ValueError("the module has no parameter to train: expected one with requires_grad")
        for name, parameter in trained:
            if parameter in cls._taken:
                raise RuntimeError(f"parameter {name!r} belongs to a DataParallel already: aclose() that first")

    def detach(self) -> None:
        """Take the hooks off; `.grad` stays as it is."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def release(self) -> None:
        """Take the hooks off for good: the parameters may belong to another one."""
        self.detach()
        if self.last is not None:
            self.last.give_up()
            self.last = None  # they know each other: a circle would keep the gradients until garbage is collected
        for slot in self._slots:
            self._taken.pop(slot.parameter, None)

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
        return [Bucket([self._slots[i] for i in bucket], self._paths.data.empty) for bucket in dealt]

    def _set_buckets(self, buckets: list[Bucket]) -> None:
        self._buckets = buckets
        self._set_sentinels()

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
        """Return a new pass; the last one must be `over`, or `used` and the order learnt. What comes now is its."""
        if self._new_order is not None:
            self._reorder(self._new_order)
            self._new_order = None
        self.share()
        self._fired = {}
        self._due.clear()
        for bucket in self._buckets:
            bucket.open()
        self.last = self._current = Reduction(
            self._paths, self._buckets, self, active=active, behind=self.last if self.devices else None
        )
        self.last.prompt = not self.joining
        return self.last

    def close(self, reduction: Reduction, error: BaseException | None = None) -> None:
        """Backward is over, and raised `error` if that is given. Raises what only its end shows to be wrong."""
        self._current = None
        trouble = None
        if error is None and reduction.active:
            trouble = self._unfrozen() or self._surplus(reduction)
            self._study(reduction)
        reduction.close(error or trouble)
        if trouble is not None:
            raise trouble

    def refuse(self, error: Exception) -> None:
        """Have all ranks know that this one cannot make another pass."""
        for comm in (self._paths.data, self._paths.marks):
            self.progress.post(partial(comm.abort, f"rank {comm.rank} cannot reduce gradients any more: {error}"))

    def _unfrozen(self) -> RuntimeError | None:
        name = next((name for name, parameter in self._frozen if parameter.requires_grad), None)
        if name is None:
            return None
        return RuntimeError(f"parameter {name!r} was frozen when DataParallel was made and is not now: make a new one")

    def _surplus(self, reduction: Reduction) -> RuntimeError | None:
        """A gradient that came after its bucket had gone, since this backward visits the parameter once more."""
        for number, bucket in enumerate(self._buckets):
            late = [slot for slot in bucket.slots if reduction.is_full(number) and slot.surplus()]
            if late:
                self._learn_hooks()
                return RuntimeError(
                    f"parameter {late[0].name!r} got one more gradient in this backward than in earlier ones, after "
                    "its bucket had gone: the next step sends it at its end, and learns from that"
                )
        return None

    # --- hooks ----------------------------------------------------------------------------------------------------

    def _learn_hooks(self) -> None:
        """Watch every parameter in the next pass."""
        self._learning = True
        self._hook(range(len(self._slots)))

    def _study(self, reduction: Reduction) -> None:
        """Learn from a pass that watched every parameter; else see whether the few hooks still do."""
        if self._learning:
            self.order = list(self._fired)
            self._often = {index: times for index, times in self._fired.items() if times > 1}
            self._learning = not self.order
            self._set_sentinels()
            return
        missed = any(not reduction.is_full(number) and bucket.came() for number, bucket in enumerate(self._buckets))
        self._missed = self._missed + 1 if missed else 0
        if self._missed > self._patience:
            self._missed = 0
            self._patience *= 2
            self._learn_hooks()

    def _set_sentinels(self) -> None:
        """Watch, of each bucket, the parameter whose gradient came last; and those that get several."""
        if self._learning:
            return
        when = {index: place for place, index in enumerate(self.order)}
        self._sentinels = {}
        for number, bucket in enumerate(self._buckets):
            last = max(bucket.slots, key=lambda slot: when.get(slot.index, -1))
            self._sentinels[last.index] = number
        self._hook({*self._sentinels, *self._often})

    def _hook(self, wanted: Iterable[int]) -> None:
        self.detach()
        for index in wanted:
            hook = _Hook(self, index)
            self._hooks.append(self._slots[index].parameter.register_post_accumulate_grad_hook(hook))

    def share(self) -> None:
        """Before gradients are added to a sum of all ranks: keep this rank's share of it."""
        if self._summed:
            self.devices.follow()
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
        parameter = self._slots[index].parameter if self.devices else None
        if parameter is not None and parameter.is_cuda:
            self.devices.came(parameter.device)
        with self._lock:
            full = self._note(index, reduction, None if parameter is None else parameter.device)
        for number in full:
            reduction.full(number)

    def _note(self, index: int, reduction: Reduction, device: torch.device | None) -> Sequence[int]:
        """Return which buckets are full now: of `device` alone, those of others are filled in their own threads."""
        self._fired[index] = self._fired.get(index, 0) + 1
        if self._learning:
            return ()
        number = self._sentinels.get(index)
        if number is not None and number not in self._due and not reduction.is_full(number):
            self._due.append(number)
        due = self._due if device is None else [n for n in self._due if self._buckets[n].device == device]
        full = [number for number in due if self._complete(self._buckets[number])]
        for number in full:
            self._due.remove(number)
        return full

    def _complete(self, bucket: Bucket) -> bool:
        if not bucket.came():
            return False
        if not self._often:
            return True
        return all(self._fired.get(slot.index, 0) >= self._often.get(slot.index, 0) for slot in bucket.slots)

    @property
    def learnt(self) -> bool:
        """The order of the gradients is known to all: buckets stay as they are."""
        return self._learnt is not None

    def summed(self) -> None:
        """The gradients are the reduced ones from now on."""
        self._summed = self._paths.op == "sum" and self._paths.data.size > 1

    # --- passes: on the loop ------------------------------------------------------------------------------------

    def late(self, error: OperationTimeout) -> None:
        """See `Observer`."""
        for future in self.waiting:
            if not future.done():
                future.set_exception(error)

    def ended(self, reduction: Reduction, over: Callable[[], None]) -> None:
        """See `Observer`."""
        with self._lock:
            if not reduction.used:
                self.summed()
        known = self.statistics
        known.passes += 1
        known.buckets += len(reduction.spans)
        known.nbytes += sum(bucket.nbytes for bucket in reduction.buckets)
        known.seconds += (seconds := _union(reduction.spans))
        if seconds:
            window = max(WINDOW_BYTES, int(_WINDOW_SECONDS * sum(b.nbytes for b in self._buckets) / seconds))
            self._paths = replace(self._paths, window=window)
        if reduction.closed is not None:
            known.exposed += _union([(max(a, reduction.closed), b) for a, b in reduction.spans if b > reduction.closed])
        if self._learnt or not reduction.participants or reduction.failures:
            over()
        else:
            self._learn(over)

    def _learn(self, over: Callable[[], None]) -> None:
        """Have rank 0 tell in which order its gradients came; the same on all ranks, whatever the order there."""
        try:
            told = self._paths.marks.broadcast_object(self.order)
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


def _union(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of what intervals cover together.

    >>> _union([(0, 2), (1, 3), (5, 6)])
    4.0
    """
    total, end = 0.0, float("-inf")
    for a, b in sorted(spans):
        if b > end:
            total += b - max(a, end)
            end = b
    return total
