"""Hooks on parameters that have their gradients reduced, bucket by bucket, while backward goes on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress, count
from threading import get_ident
from types import CodeType
from typing import Any, ClassVar, Literal, Protocol, TypeVar

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from aiodist.communicator import Communicator, parts_of
from aiodist.errors import AiodistError, OperationTimeout
from aiodist.handles import Handle, Operation, Progress, Scheduler, internals
from aiodist.nn.blocks import block_numbers
from aiodist.nn.buckets import Allreduce, Bucket, CommHook, Slot, row_parameters
from aiodist.nn.deals import Deal, Dealer, MakeBucket, Newcomers, Sentries, Sizes
from aiodist.nn.devices import Devices
from aiodist.nn.pass_machine import Terms
from aiodist.nn.pass_status import LEFT_OVER, PassAccount, PassStatus, StatusKind
from aiodist.nn.per_rank import Shared
from aiodist.nn.reduction import WINDOW_BYTES, Reduction, ask
from aiodist.nn.steps import Steps

T = TypeVar("T")

_WINDOW_SECONDS = 25e-3  # how long what is in flight may take: later, more urgent buckets wait behind it
_PRIORITY = 10  # of reductions among what the loop has in flight


@dataclass(frozen=True)
class DataParallelStatistics:
    """What reducing gradients has cost so far, on this rank."""

    passes: int
    """How many backwards had their gradients reduced, and how often a `LocalSGD` had parameters averaged."""
    buckets: int
    """How many reductions of buckets these were."""
    nbytes: int
    """Bytes of the gradients, or parameters, that were reduced."""
    sent_nbytes: int
    """Bytes that this rank gave to collectives for them: the same, or fewer where they are compressed."""
    reduction_seconds: float
    """How long reductions were on their way; where several were, that time counts once."""
    exposed_seconds: float
    """How long they still were after backward had ended, or the wait for an average had begun.

    This is the part of `reduction_seconds` that training waited for.
    """

    @property
    def hidden(self) -> float:
        """The share of `reduction_seconds` in which backward went on, 0.0 to 1.0."""
        return 1 - self.exposed_seconds / self.reduction_seconds if self.reduction_seconds else 0.0


class Owner(Protocol):
    """An optimizer that gets gradients where the parameters do not, such as `ShardedOptimizer`."""

    def follow(self, reduction: Reduction) -> None:
        """Do what the other ranks do with a pass to which this one has brought nothing; on the compute thread."""

    async def flush(self) -> None:
        """Return when all updates are made."""


class Reducer:
    """Reduces the gradients of a module's parameters; one pass for each backward.

    `begin` and `end_backward` belong to the thread that runs backward, the rest to the loop. Hooks come in that thread
    for parameters on the CPU, and for those on a CUDA device in a thread that autograd has for it.
    A hook costs 2 us each time. So only the first pass watches every parameter, and sends everything at its end.
    From it rank 0 tells all in which order the gradients come, and the buckets are dealt anew in that order. From then
    on only the parameter of each bucket whose gradient came last has a hook, which looks whether all have come. Where
    that is not so the bucket goes later, at the latest when backward ends.
    """

    _taken: ClassVar[Any] = WeakIdKeyDictionary()
    """The parameters that are trained by one, with its id: only few have a hook."""

    def __init__(
        self,
        data: Communicator,
        status: Communicator,
        shared: Shared,
        *,
        op: Literal["mean", "sum"],
        sizes: Sizes,
        hook: CommHook,
    ) -> None:
        self.data, self.status = data, status
        """The communicators of the gradients, and of what ranks tell each other."""
        self.op = op
        """How gradients are reduced."""
        self.hook = hook
        self.statistics = DataParallelStatistics(0, 0, 0, 0, 0.0, 0.0)
        self.last: Reduction | None = None
        """The newest pass."""
        self.local = 0
        """How many `no_sync` blocks are open: hooks stand aside."""
        self.kept_by: object = None
        """The optimizer for which buckets are kept."""
        self.owner: Owner | None = None
        """What alone may have gradients reduced."""
        self.scaler: GradScaler | None = None
        """What has scaled the loss of the last step."""
        self.joining = 0
        """How many `join` blocks are open: gradients are not final before the pass status is known."""
        registry = parts_of(data).registry
        self.asks_stop: Callable[[], bool] = lambda: registry.resources.stop_requested
        """See `PassHost`; what drives the net says it, and finds the answer of all ranks in a pass's `status`."""
        self.averaging: Handle[PassStatus] | None = None
        """An average of parameters that is on its way."""
        self.averaged: PassStatus | None = None
        """What the ranks said before they averaged parameters, if that was behind the last pass."""
        self.stopped_before = False
        """Some rank asked to stop in the pass before the last."""
        self.parted = False
        """Ranks have made different numbers of steps, which was told, and make no more."""
        self.progress = Progress.current()
        self.waiting: list[asyncio.Future[None]] = []
        """Awaits of a step, to be told of reductions that are late."""
        module, named = shared.module, list(shared.named_parameters())
        self.steps = Steps(shared)
        self.devices = Devices(self.progress, module.parameters())
        self._lock = threading.Lock()
        """Held for what hooks note, and while nothing is waited for."""
        self.lane = Scheduler.current().lane(f"gradients of {data.name}", _PRIORITY)
        self.urgent, self.window = False, WINDOW_BYTES
        """See `PassHost`."""
        blocks, rows = block_numbers(module), row_parameters(module)
        self.slots = [Slot(i, name, p, blocks.get(p), by_rows=p in rows) for i, (name, p) in enumerate(named)]
        """All parameters that ranks have alike, frozen or not."""
        self._parameters = [parameter for _, parameter in named]
        self._dealer = Dealer(self.slots, self._trained(), sizes, data.arena_empty)
        self._current: Reduction | None = None
        self._fired: dict[int, int] = {}
        """By parameter, how often its hook fired in this pass; in the order of the first times."""
        self._due: list[int] = []
        """Buckets that were probably full, and were not."""
        self._summed = 0
        """Among how many ranks the gradients are shared, if they are a sum: what is added is added to this one's."""
        self._shared: set[int] = set()
        """The parameters whose gradient is this rank's share of that sum already."""
        self._sharers: dict[int, tuple[Node, RemovableHandle]] = {}
        """By parameter, in a `no_sync` block: what adds to its gradient, and the hook on that."""
        self.kept = False
        """Gradients were added up in a `no_sync` block, and not reduced since."""
        self._versions: list[int] = []
        """Version counters of the parameters that this pass trains, at the beginning of backward."""
        self._loop_thread = get_ident()
        self.newcomers = Newcomers(module, [*self._parameters, *shared.kept], self._taken)
        self._sentries = Sentries(self._gradient_came, module, self.slots, alone=data.size == 1)
        self._take(self._deal.trained, self._deal.trained)

    # --- parameters and buckets -------------------------------------------------------------------------------

    def _trained(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self._parameters]

    @classmethod
    def check_free(cls, named: Iterable[tuple[str, Tensor]]) -> None:
        """Raise unless there is something to train, and nothing that belongs to another one."""
        trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        if not trained:
            raise ValueError("the module has no parameter to train: expected one with requires_grad")
        for name, parameter in trained:
            if parameter in cls._taken:
                raise RuntimeError(f"parameter {name!r} belongs to a DataParallel already: aclose() that first")

    def release(self) -> None:
        """Take the hooks off for good: the parameters may belong to another one."""
        self._sentries.remove()
        self.steps.release()
        if self.last is not None:
            self.last.abort()
            self.last = None  # they know each other: a circle would keep the gradients until garbage is collected
        for slot in self.slots:
            if self._taken.get(slot.parameter) == id(self):
                del self._taken[slot.parameter]

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The buckets in the order in which they are sent."""
        return self._deal.buckets

    def _take(self, trained: Sequence[bool], members: Sequence[bool]) -> None:
        """From now on `trained` are, and `members` are reduced."""
        self._dealer.change(trained, members)
        for slot in self.slots:
            if members[slot.index]:
                self._taken.setdefault(slot.parameter, id(self))
        self._sentries.place(self._deal)

    @property
    def _deal(self) -> Deal:
        return self._dealer.deal

    def keep_buckets(self, groups: list[list[int]] | None = None, *, urgent: bool, by: object) -> list[list[Slot]]:
        """Deal no more, and return which parameters share a bucket: from now on only the order is learnt.

        It is for `by`, until that is let go.
        `groups` says it by their numbers. Else those that are frozen now have buckets of their own. With `urgent` what
        is left when backward ends goes in the order of the next forward. Raises `RuntimeError` where the gradients have
        an owner.
        """
        if self.owner is not None:
            raise RuntimeError(f"the net has {self.owner!r}: close() that first")
        self.urgent, self.kept_by = urgent, by
        kept = self._dealer.keep(groups)
        self._sentries.place(self._deal)
        return kept

    def release_buckets(self, keeper: object) -> None:
        """`keeper`, for which buckets are kept, is closed."""
        if self.kept_by is keeper:
            self.kept_by = None

    def hand_to(self, owner: Owner | None, hook: CommHook, make: MakeBucket | None) -> CommHook:
        """Return the hook so far: from now on `hook` reduces buckets that `make` makes, for `owner` alone.

        What was kept together stays so. Without an owner gradients are the parameters' again.
        """
        before, self.hook, self.owner = self.hook, hook, owner
        hook.nbytes = before.nbytes
        self._dealer.remake(make)
        self._sentries.place(self._deal)
        return before

    def issue(self, what: str, call: Callable[[], Handle[Any]], then: Callable[[], T]) -> Handle[T]:
        """Return the handle of `then`, called on the loop once what `call` issues there is done; from any thread."""
        told: Operation[T] = Operation(self.progress, what, polled=False)
        self.progress.post(partial(ask, self, call, self.late, lambda _: told.resolve(then()), told.reject))
        return told.handle

    def name_caller(self, caller: tuple[CodeType, int], call: str) -> None:
        """Reports of operations that the loop issues from now on name that line, and the user's `call` there."""
        for comm in (self.data, self.status, *self.hook.comms):
            parts_of(comm).dispatcher.oplog.name_caller(caller, call)

    # --- passes: on the thread that runs backward --------------------------------------------------------------

    def differs(self) -> bool:
        """Return whether this rank trains other parameters than in the last pass.

        Raises `RuntimeError` where one of them belongs to another net, or came to the module later.
        """
        self.newcomers.check()
        if self._trained() == self._deal.trained:
            return any(self.slots[index].parameter.grad is not None for index in self._deal.outside)
        for slot in self.slots:
            if slot.parameter.requires_grad and self._taken.get(slot.parameter, id(self)) != id(self):
                raise RuntimeError(
                    f"parameter {slot.name!r} is not frozen any more, and belongs to another DataParallel: "
                    "aclose() that first, or leave it frozen here"
                )
        return True

    @property
    def adds_to_sums(self) -> bool:
        """A pass in a `join` block adds to gradients that are a sum: who brings a share of it has to be known first."""
        return self.joining > 0 and self._summed > 0 and any(p.grad is not None for p in self._parameters)

    def packed_status(self, kind: StatusKind, *, opinion: bool, known: bool = False) -> Tensor:
        """Return what this rank asks, or tells those that do; without `opinion` it trains what they train.

        `known`: it trains what it trained before.
        """
        columns = [0.0] * len(self.slots)
        if opinion and known and len(self._deal.members) == sum(self._deal.trained):
            columns = self._deal.columns  # to look at 1,000 parameters takes 0.3 ms
        elif opinion:
            columns = [
                float(s.parameter.requires_grad) or LEFT_OVER * (s.parameter.grad is not None) for s in self.slots
            ]
        return PassStatus.pack(
            columns,
            self.data.size,
            self.data.rank,
            kind=kind,
            steps=self.steps.mark if opinion else None,
            stop=self.asks_stop(),
            settings=self.steps.settings_hash if kind is StatusKind.AVERAGE else 0,
        )

    def ask(self, status: Tensor) -> Handle[PassStatus]:
        """Return the handle of what the status of all ranks says; the last pass must be over."""
        unpack = partial(PassStatus.unpack, status, self.data.size)
        return self.issue("comparison of what is trained", partial(self.status.allreduce, status), unpack)

    def begin(
        self, verdict: PassStatus | None = None, *, active: bool = True, opinion: bool = True, whole: bool = False
    ) -> Reduction:
        """Return a new pass; the last one must be `over`, or `used` and the order learnt. What comes now is its.

        `verdict` is what the ranks said that were asked. Where they disagree the pass is `refused`. `whole`: nobody
        looks at a gradient before all are there.
        """
        refused = verdict is not None and not self._accept(verdict)
        self.stopped_before = self.stopped
        self.averaged = None
        if self._dealer.reorder():
            self._sentries.place(self._deal)
        if self.joining and verdict is not None and self._summed:
            self._summed = verdict.active or self._summed
        if verdict is None or verdict.active:
            self.share()
        self.hook.rescale(self.scaler)
        self._fired = {}
        self._due.clear()
        header = None
        if self.joining and verdict is None:
            header = self.packed_status(StatusKind.JOIN, opinion=opinion, known=True)
        single = whole and active and self._is_single and not self.joining and verdict is None
        if not single:
            self._sentries.tell()
            for bucket in self._deal.buckets:
                bucket.open()
        terms = Terms(
            members=self._deal.columns,
            active=active,
            prompt=not self.joining,
            header=header is not None,
            refused=verdict if refused else None,
        )
        behind = self.last if self.devices else None
        self.last = Reduction(self, self._deal.buckets, terms, header=header, behind=behind, single=single)
        self.steps.current = self.last
        self._current, self.steps.thread = None if single else self.last, get_ident()
        self._versions = [] if single else self._deal.versions()
        return self.last

    @property
    def _is_single(self) -> bool:
        """There is no other rank, and nothing to be done with a gradient; all works."""
        if self.data.size > 1 or not isinstance(self.hook, Allreduce):
            return False
        over = self.last is None or self.last.over.done()
        return self.works and over and all(type(bucket) is Bucket for bucket in self._deal.buckets)

    @property
    def works(self) -> bool:
        """Its communicators were not given up."""
        return all(parts_of(comm).dispatcher.lifetime.refusal is None for comm in (self.data, self.status))

    @property
    def stopped(self) -> bool:
        """Some rank asked to stop in the last pass or average, as far as is known."""
        status = self.averaged or (None if self.last is None else self.last.status)
        return status is not None and status.stops > 0

    def average(self, tensors: Sequence[Tensor]) -> Handle[PassStatus]:
        """Return the handle of what the ranks say; if all average, flat `tensors` are the means then, in place."""
        status = self.packed_status(StatusKind.AVERAGE, opinion=True)
        told: Operation[PassStatus] = Operation(self.progress, "average of the parameters", polled=False)
        told.mark_retrieved()  # it is not awaited if the net was aborted

        def voted(_: object) -> None:
            verdict = PassStatus.unpack(status, self.data.size)
            if not verdict.agreed(StatusKind.AVERAGE):
                told.resolve(verdict)
                return
            nbytes, known = sum(t.nbytes for t in tensors), self.statistics
            self.hook.nbytes += nbytes
            self.statistics = replace(
                known, passes=known.passes + 1, nbytes=known.nbytes + nbytes, sent_nbytes=self.hook.nbytes
            )
            means = partial(self.data.allreduce, list(tensors), "mean")
            ask(self, means, self.late, lambda _: told.resolve(verdict), told.reject)

        self.averaging = told.handle
        call = partial(self.status.allreduce, status)
        self.progress.post(partial(ask, self, call, self.late, voted, told.reject))
        return told.handle

    def _accept(self, verdict: PassStatus) -> bool:
        """Train what all ranks train, if they do the same, and all were asked."""
        asked = verdict.all_are(StatusKind.ASK) or verdict.all_are(StatusKind.JOIN)
        wanted = verdict.wanted() if asked else None
        if wanted is None:
            return False
        trained, members = wanted
        if verdict.active and (
            trained != self._deal.trained or not self._deal.members.issuperset(compress(count(), members))
        ):
            self._take(trained, members)
        return True

    def end_backward(self, reduction: Reduction, error: BaseException | None = None) -> None:
        """Backward is over, and raised `error` if that is given. Raises what only its end shows to be wrong."""
        self._current = self.steps.thread = None
        trouble = None
        if error is None and reduction.terms.active and not (reduction.terms.refused or reduction.single):
            trouble = self._surplus(reduction) or self._changed(reduction)
            if trouble is None:
                self._study(reduction)
        reduction.end_backward(error or trouble)
        if trouble is not None:
            raise trouble

    def refuse(self, error: BaseException) -> None:
        """Have all ranks know that this one cannot make another pass."""
        for comm in (self.data, self.status):
            self.progress.post(partial(comm.abort, f"rank {comm.rank} cannot reduce gradients any more: {error}"))

    def _surplus(self, reduction: Reduction) -> RuntimeError | None:
        """A gradient that came after its bucket had gone, since this backward visits the parameter once more."""
        for number, bucket in enumerate(self._deal.buckets):
            late = [slot for slot in bucket.slots if reduction.is_full(number) and slot.surplus()]
            if late:
                self._deal.learning = True
                self._sentries.place(self._deal)
                return RuntimeError(
                    f"parameter {late[0].name!r} got one more gradient in this backward than in earlier ones, after "
                    "its bucket had gone: the next step sends it at its end, and learns from that"
                )
        return None

    def _changed(self, reduction: Reduction) -> RuntimeError | None:
        """Return an error if backward changed a parameter whose gradient `net.backward_iter` had not yielded."""
        now = self._deal.versions()
        if now == self._versions:
            return None
        for slot, before, after in zip(self._deal.trained_slots, self._versions, now, strict=True):
            if before != after and reduction.withholds(id(slot.parameter)):
                return RuntimeError(
                    f"parameter {slot.name!r} was changed while backward ran (torch counts {after - before} changes), "
                    "before its gradient was reduced: ranks may differ now. Change parameters between two steps, or as "
                    "`net.backward_iter(loss)` yields them, and have all ranks load the same state, "
                    "`net.load_state_dict(...)`"
                )
        return None

    def _study(self, reduction: Reduction) -> None:
        deal = self._deal
        learning = deal.learning
        missed = any(not reduction.is_full(number) and bucket.came() for number, bucket in enumerate(deal.buckets))
        deal.study(self._fired, missed=missed)
        if learning or deal.learning:
            self._sentries.place(deal)

    # --- hooks ----------------------------------------------------------------------------------------------------

    @contextmanager
    def alone(self, *, part: bool) -> Iterator[None]:
        """A backward in this block is of this rank alone, with `part` one whose gradients are reduced with later ones.

        The order of gradients is noted if it is not known.
        """
        self._fired = {}
        self.steps.thread, self.steps.partial = get_ident(), part
        try:
            yield
        finally:
            self.steps.thread, self.steps.partial = None, False

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Backwards in this block add up gradients on this rank."""
        self.local += 1
        try:
            self._share_first()
            yield
        finally:
            self.local -= 1
            if not self.local:
                for _, hook in self._sharers.values():
                    hook.remove()
                self._sharers.clear()

    def _share_first(self) -> None:
        """Have what adds to gradients in a `no_sync` block make shares of sums before it does."""
        if self.op == "mean" or self.data.size == 1:
            return
        new = [slot for slot in self.slots if slot.parameter.requires_grad and slot.index not in self._sharers]
        # On what adds to `.grad`, which has to stay meanwhile: `torch.autograd.grad` adds nothing.
        with torch.inference_mode(False):
            for slot in new:
                adder = get_gradient_edge(slot.parameter).node
                self._sharers[slot.index] = adder, adder.register_prehook(partial(self._share, slot))

    def share(self) -> None:
        """Before gradients are added to a sum of all ranks: keep this rank's share of it."""
        if self._summed:
            self.devices.follow()
            for slot in self.slots:
                self._share(slot)
            self._summed = 0

    def _share(self, slot: Slot, _: object = None) -> None:
        """The same of one gradient; autograd calls it before it adds to that, in the thread that does."""
        if self._summed and slot.index not in self._shared:
            self._shared.add(slot.index)
            if slot.parameter.grad is not None:
                with torch.no_grad():  # behind a `join` block all ranks have the sum, also of those that went on alone
                    slot.parameter.grad.div_(self._summed if self.joining else self.data.size)

    def watch(self) -> None:
        """Have a backward outside be told, even if parameters were frozen or thawed since the last pass."""
        if self.steps.thread is None:
            self._sentries.keep()
        if self.local:
            self._share_first()

    def _gradient_came(self, index: int, told: bool, _: Tensor) -> None:
        """See `Sentries`. The loop's thread runs no pass; those that autograd has for CUDA devices do."""
        if self.steps.thread != get_ident():
            self._check_inside(index)
        if told and self.steps.thread is not None:
            self._came(index)

    def _check_inside(self, index: int) -> None:
        name, parameter = self.slots[index].name, self.slots[index].parameter
        if self._taken.get(parameter, id(self)) != id(self):  # frozen here, and trained by that net since
            return
        if self.steps.thread is None:
            if self.local:
                # Not what another net's backward leaves here (GANs): the next step may forget that.
                self.kept = self.kept or not self.steps.others_in_backward
            else:
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

    def _came(self, index: int) -> None:
        reduction = self._current
        if reduction is None:
            if self._deal.learning:
                with self._lock:
                    self._fired[index] = self._fired.get(index, 0) + 1
            return
        parameter = self.slots[index].parameter if self.devices else None
        if parameter is not None and parameter.is_cuda:
            self.devices.came(parameter.device)
        with self._lock:
            full = self._note(index, reduction, None if parameter is None else parameter.device)
        for number in full:
            reduction.full(number)

    def _note(self, index: int, reduction: Reduction, device: torch.device | None) -> Sequence[int]:
        """Return which buckets are full now: of `device` alone, those of others are filled in their own threads."""
        deal = self._deal
        self._fired[index] = self._fired.get(index, 0) + 1
        if deal.learning or reduction.terms.refused:
            return ()
        number = deal.sentinels.get(index)
        if number is not None and number not in self._due and not reduction.is_full(number):
            self._due.append(number)
        due = self._due if device is None else [n for n in self._due if deal.buckets[n].device == device]
        full = [number for number in due if deal.complete(deal.buckets[number], self._fired)]
        for number in full:
            self._due.remove(number)
        return full

    @property
    def learnt(self) -> bool:
        """The order of the gradients is known to all: buckets stay as they are."""
        return self._deal.learnt is not None

    def summed(self, reduction: Reduction) -> None:
        """The gradients are those that `reduction` has reduced from now on, if any rank has brought some."""
        if reduction.participants:
            self._summed = reduction.participants if self.op == "sum" and self.data.size > 1 else 0
            self._shared = set()

    # --- passes: on the loop ------------------------------------------------------------------------------------

    def late(self, error: OperationTimeout) -> None:
        for future in self.waiting:
            if not future.done():
                future.set_exception(error)

    def ended(self, reduction: Reduction, over: Callable[[], None]) -> None:
        status = reduction.status
        if reduction.terms.active and reduction.error is None:
            self.kept = False
        with self._lock:
            if not reduction.used:
                self.summed(reduction)
        known, spans = self.statistics, reduction.spans
        nbytes, seconds = sum(bucket.nbytes for bucket in reduction.buckets), spans.seconds
        self.statistics = DataParallelStatistics(
            passes=known.passes + 1,
            buckets=known.buckets + len(spans),
            nbytes=known.nbytes + nbytes,
            sent_nbytes=self.hook.nbytes,
            reduction_seconds=known.reduction_seconds + seconds,
            exposed_seconds=known.exposed_seconds + spans.exposed,
        )
        if seconds:
            self.window = max(WINDOW_BYTES, int(_WINDOW_SECONDS * nbytes / seconds))
        if status is not None and StatusKind.CLOSE in status.kinds and reduction.error is not None:
            self.parted = True
            self.refuse(reduction.error)
        if reduction.single or self._deal.learnt or status is None or not status.active or not status.sound:
            over()
        else:
            self._learn(self._deal, over)

    def account(self, failure: str | None, *, active: bool) -> PassAccount:
        frozen = tuple(slot.name for slot in self.slots if not slot.parameter.requires_grad)
        steps, settings = self.steps, self.steps.settings_lines() if active else None
        return PassAccount(failure, frozen if active else None, self.statistics.passes, str(steps), settings)

    def _learn(self, dealt: Deal, over: Callable[[], None]) -> None:
        """Have rank 0 tell in which order its gradients came; the same on all ranks, even where theirs differs."""
        try:
            told = self.status.broadcast_object(dealt.order)
        except AiodistError:  # the communicator was closed or given up, which the next call tells
            over()
        else:
            told.add_done_callback(partial(self._told, dealt, over))

    def _told(self, dealt: Deal, over: Callable[[], None], told: Handle[list[int]]) -> None:
        if internals.error_of(told) is None and told.result():
            came = [index for index in told.result() if index in dealt.members]
            known = set(came)
            # Those that had no gradient come last, in the order of backward.
            rest = [index for index in sorted(dealt.members, reverse=True) if index not in known]
            dealt.learnt = dealt.new_order = [*came, *rest]
        over()
