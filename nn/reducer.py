"""`Reducer`: the passes of a net, which reduce the gradients of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import compress, count
from typing import Literal, TypeVar

from torch import Tensor
from torch.amp import GradScaler

from aiodist.communicator import Communicator
from aiodist.errors import AiodistError
from aiodist.handles import Handle, Operation, Progress, Scheduler, internals, kernel
from aiodist.nn.blocks import block_numbers
from aiodist.nn.bucket_plan import BucketPlan, MakeBucket, Planner, Sizes
from aiodist.nn.buckets import Allreduce, Bucket, CommHook, Slot, row_parameters
from aiodist.nn.consensus import Consensus, Role
from aiodist.nn.devices import Devices
from aiodist.nn.gradient_hooks import GradientHooks
from aiodist.nn.kept_sums import KeptSums
from aiodist.nn.net_loop import NetLoop
from aiodist.nn.pass_machine import Terms
from aiodist.nn.pass_status import PassStatus, StatusKind
from aiodist.nn.passes import Pass
from aiodist.nn.per_rank import Shared
from aiodist.nn.steps import Steps

T = TypeVar("T")

_WINDOW_BYTES = 8 << 20
"""Least limit of the bytes in flight while the order of buckets may change."""
_WINDOW_SECONDS = 25e-3  # time that the bytes in flight may take: later, more urgent buckets wait for them
_PRIORITY = 10  # of reductions among the loop's transfers


@dataclass(frozen=True)
class DataParallelStatistics:
    """Cost of reducing gradients so far, on this rank."""

    passes: int
    """Number of backwards whose gradients were reduced, and of averages by a `LocalSGD`."""
    buckets: int
    """Number of reductions of buckets."""
    nbytes: int
    """Bytes of the gradients, or parameters, that were reduced."""
    sent_nbytes: int
    """Bytes that this rank gave to collectives for them: the same, or fewer with compression."""
    reduction_seconds: float
    """Seconds in which reductions were in flight; several at the same time count once."""
    exposed_seconds: float
    """Seconds of them after the end of backward, or after the wait for an average had begun.

    Training waited for this part of `reduction_seconds`.
    """

    @property
    def hidden(self) -> float:
        """Share of `reduction_seconds` during which backward ran, 0.0 to 1.0."""
        return 1 - self.exposed_seconds / self.reduction_seconds if self.reduction_seconds else 0.0


class Reducer:
    """Reduces the gradients of a module's parameters, in one pass for each backward.

    `begin` and `end_backward` belong to the thread of backward. Its parts are the plan of the buckets (`BucketPlan`),
    the hooks that autograd calls (`GradientHooks`), the sums that `no_sync` keeps (`KeptSums`), and the exchange of the
    ranks (`Consensus`).
    """

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
        """`data` and `status` are the communicators of the gradients and of the consensus."""
        module, named = shared.module, list(shared.named_parameters())
        blocks, rows = block_numbers(module), row_parameters(module)
        self.data = data
        self.hook = hook
        self.statistics = DataParallelStatistics(0, 0, 0, 0, 0.0, 0.0)
        self.last: Pass | None = None
        """Newest pass; None after its end, unless it failed or there are devices."""
        self.kept_by: object = None
        """Optimizer for which buckets are kept."""
        self.owner: object = None
        """Optimizer that alone may have gradients reduced."""
        self.scaler: GradScaler | None = None
        """Scaler of the newest step's loss."""
        self.averaging: Handle[PassStatus] | None = None
        """Average of parameters in flight."""
        self.urgent = False
        """True if buckets that are left at the end of backward are sent in the order of the next forward."""
        self.window = _WINDOW_BYTES
        """Limit of the bytes in flight in that case. Ranks may differ."""
        self.steps = Steps(shared)
        self.devices = Devices(Progress.current(), module.parameters())
        self.loop = NetLoop(self.devices, Scheduler.current().lane(f"gradients of {data.name}", _PRIORITY))
        self.slots = [Slot(i, name, p, blocks.get(p), by_rows=p in rows) for i, (name, p) in enumerate(named)]
        """All parameters that ranks have alike, frozen or not."""
        self.consensus = Consensus(data, status, op, self.slots, self.steps, self.loop)
        self.sums = KeptSums(self.slots, self.consensus, op)
        self.hooks = GradientHooks(
            module, self.slots, shared.kept, self.steps, self.devices, self.sums, alone=data.size == 1
        )
        trained = [slot.parameter.requires_grad for slot in self.slots]
        self._planner = Planner(self.slots, trained, sizes, data.arena_empty)
        self._versions: list[int] = []
        """Versions of the parameters that this pass trains, at the begin of backward."""
        self._take(trained, trained)

    # --- parameters and buckets --------------------------------------------------------------------------------------

    def release(self) -> None:
        """Remove the hooks for good: another net may own the parameters now."""
        self.hooks.remove()
        self.steps.release()
        last, self.last = self.last, None  # else the reference cycle keeps the gradients until garbage is collected
        if last is not None:
            last.abort()

    @property
    def buckets(self) -> Sequence[Bucket]:
        """Buckets, in the order in which they are sent."""
        return self._planner.plan.buckets

    @property
    def learnt(self) -> bool:
        """True if all ranks know the order of the gradients: buckets stay as they are."""
        return self._planner.plan.learnt is not None

    def _take(self, trained: Sequence[bool], members: Sequence[bool]) -> None:
        """Train the parameters `trained`, and reduce the `members`, from now on."""
        self._planner.change(trained, members)
        self.hooks.take(members)
        self.hooks.place(self._planner.plan)

    def keep_buckets(self, groups: list[list[int]] | None = None, *, urgent: bool, by: object) -> list[list[Slot]]:
        """Return the parameters that share a bucket; they stay together for `by`, and only their order is learnt.

        `groups` are the numbers of the parameters to keep together, by default those of the buckets now; frozen
        parameters then get buckets of their own. If `urgent`, buckets that are left at the end of backward are sent in
        the order of the next forward. Raises `RuntimeError` if the gradients have an owner.
        """
        if self.owner is not None:
            raise RuntimeError(f"the net has {self.owner!r}: close() that first")
        self.urgent, self.kept_by = self.urgent or urgent, by  # a pipelined optimizer may step again later
        kept = self._planner.keep(groups)
        self.hooks.place(self._planner.plan)
        return kept

    def release_buckets(self, keeper: object) -> None:
        """Note that `keeper`, for which buckets are kept, is closed."""
        if self.kept_by is keeper:
            self.kept_by = None

    def hand_to(self, owner: object, hook: CommHook, make: MakeBucket | None) -> CommHook:
        """Let `hook` reduce buckets that `make` makes, for `owner` alone. Return the hook so far.

        Parameters that were kept together stay together. Without an owner the parameters get their gradients again.
        """
        before, self.hook, self.owner = self.hook, hook, owner
        hook.nbytes = before.nbytes
        self._planner.remake(make)
        self.hooks.place(self._planner.plan)
        return before

    # --- passes: the thread of backward ------------------------------------------------------------------------------

    def differs(self) -> bool:
        """Return True if this rank trains other parameters than in the last pass.

        Raises `RuntimeError` if one of them belongs to another net, or came to the module later.
        """
        self.hooks.new_parameters.check()
        plan = self._planner.plan
        if [slot.parameter.requires_grad for slot in self.slots] == plan.trained:
            return any(self.slots[index].parameter.grad is not None for index in plan.outside)
        for slot in self.slots:
            if slot.parameter.requires_grad and not self.hooks.owns(slot):
                raise RuntimeError(
                    f"parameter {slot.name!r} is not frozen any more, and belongs to another DataParallel: "
                    "aclose() that first, or leave it frozen here"
                )
        return True

    def begin(self, role: Role = Role.TRAINS, answer: PassStatus | None = None, *, whole: bool = False) -> Pass:
        """Return a new pass, to which gradients belong from now on.

        The last pass must be `over`, or `used` after the order was learnt. `answer` is the ranks' answer if this rank
        has asked them before; if they disagree, the pass is `refused`. If `whole`, no code looks at a gradient before
        all are there: without other ranks, gradients then stay as they are, and the pass needs no loop.
        """
        consensus, last, refused = self.consensus, self.last, None
        if answer is not None and not self._accept(answer):
            refused = answer
        consensus.stopped_before, consensus.answer = consensus.stopped, refused
        plan = self._planner.plan
        if plan.new_order is not None:
            self._planner.reorder(plan.new_order)
            self.hooks.place(plan)
        if self.sums.divides:
            self.sums.divide(None if answer is None else answer.active)
        self.hook.rescale(self.scaler)
        alone = (
            whole
            and self.data.size == 1
            and not consensus.joining
            and isinstance(self.hook, Allreduce)
            and (last is None or last.over.done())
            and consensus.works
            and all(type(bucket) is Bucket for bucket in plan.buckets)
        )
        terms = Terms(plan.columns)
        if not alone:
            if not self.hooks.reports:
                self.hooks.report()
            terms = Terms(
                members=plan.columns,
                active=role is not Role.IDLE,
                prompt=not consensus.joining,
                header=consensus.header(plan, role) if consensus.joining and answer is None else None,
                refused=refused,
            )
            for bucket in plan.buckets:
                bucket.open()
            self._versions = plan.versions()
        window, before = self.window if self.urgent else None, last if self.devices else None
        this = Pass(
            plan.buckets, terms, self.hook, consensus, self._conclude, window=window, before=before, alone=alone
        )
        self.last = self.steps.current = this
        self.hooks.begin(None if alone else this)
        return this

    def _accept(self, answer: PassStatus) -> bool:
        """Train what all ranks train, if they train the same, and all have asked."""
        asked = answer.all_are(StatusKind.ASK) or answer.all_are(StatusKind.JOIN)
        wanted = answer.wanted() if asked else None
        if wanted is None:
            return False
        (trained, members), plan = wanted, self._planner.plan
        if answer.active and (trained != plan.trained or not plan.members.issuperset(compress(count(), members))):
            self._take(trained, members)
        return True

    def end_backward(self, this: Pass, error: BaseException | None = None) -> None:
        """Send what is left after backward, which raised `error` unless that is None.

        Raises RuntimeError if this backward has changed a parameter, or brought a gradient after its bucket was sent.
        """
        self.hooks.end()
        if this.alone and error is None:
            this.end_alone()
            self._count(this)
            Operation.of(this.over).resolve(None)
            self.steps.current = self.last = None  # `last` last: without it the next pass may begin
            return
        trouble = None
        if error is None and this.machine.terms.active and not (this.refused or this.alone):
            trouble = self._trouble(this)
            if trouble is None:  # learn from the order in which gradients came
                plan = self._planner.plan
                learning = plan.learning
                missed = any(number not in this.filled and bucket.came() for number, bucket in enumerate(plan.buckets))
                if learning or missed or plan.missed:
                    plan.study(self.hooks.counts, missed=missed)
                    if learning or plan.learning:
                        self.hooks.place(plan)
        this.end_backward(error or trouble)
        if trouble is not None:
            raise trouble

    def _trouble(self, this: Pass) -> RuntimeError | None:
        """Return an error if backward used a parameter once more after its bucket was sent, or changed a parameter.

        A parameter may change if `net.backward_iter` has yielded its gradient.
        """
        plan = self._planner.plan
        for number in this.filled:
            for slot in plan.buckets[number].slots:
                late = slot.parameter.grad
                if late is not None and late is not slot.result and not slot.given:
                    plan.learning = True
                    self.hooks.place(plan)
                    return RuntimeError(
                        f"parameter {slot.name!r} got one more gradient in this backward than in earlier ones, after "
                        "its bucket had gone: the next step sends it at its end, and learns from that"
                    )
        now = plan.versions()
        if now == self._versions:
            return None
        for slot, before, after in zip(plan.trained_slots, self._versions, now, strict=True):
            if before != after and this.withholds(id(slot.parameter)):
                return RuntimeError(
                    f"parameter {slot.name!r} was changed while backward ran (torch counts {after - before} changes), "
                    "before its gradient was reduced: ranks may differ now. Change parameters between two steps, or as "
                    "`net.backward_iter(loss)` yields them, and have all ranks load the same state, "
                    "`net.load_state_dict(...)`"
                )
        return None

    # --- passes: on the loop -----------------------------------------------------------------------------------------

    async def _conclude(self, this: Pass) -> None:
        """End a pass, whose collectives have ended; after the first, learn in which order rank 0's gradients came."""
        self._count(this)
        status, plan, error = this.machine.status, self._planner.plan, this.machine.error
        if status is not None and StatusKind.CLOSE in status.kinds and error is not None:
            self.consensus.parted = True
            self.consensus.refuse(error)
        if not plan.learnt and status is not None and status.active and status.sound:
            await self._learn(plan)
        if error is None and not self.devices:  # with devices, the next pass may have begun
            self.steps.current = self.last = None  # `last` last: without it the next pass may begin

    async def _learn(self, plan: BucketPlan) -> None:
        """Learn the order in which rank 0's gradients came."""
        try:
            told = self.consensus.comm.broadcast_object(plan.order)
        except AiodistError:  # the communicator was closed or aborted, which the next call reports
            return
        await kernel.transfer(self.loop.wait, told, self.loop.late)
        if internals.error_of(told) is None and told.result():
            plan.learn(told.result())

    def _count(self, this: Pass) -> None:
        """Update the statistics, and note that the gradients are those of `this` pass."""
        if this.machine.terms.active and this.machine.error is None:
            self.sums.kept = False
        if self.sums.divides:
            self.sums.note(this.over, this.participants)
        known, times = self.statistics, this.times
        nbytes, (seconds, exposed) = sum([bucket.nbytes for bucket in this.buckets]), times.seconds()
        self.statistics = DataParallelStatistics(
            passes=known.passes + 1,
            buckets=known.buckets + len(times.spans),
            nbytes=known.nbytes + nbytes,
            sent_nbytes=self.hook.nbytes,
            reduction_seconds=known.reduction_seconds + seconds,
            exposed_seconds=known.exposed_seconds + exposed,
        )
        self.consensus.passes = self.statistics.passes
        if seconds:
            self.window = max(_WINDOW_BYTES, int(_WINDOW_SECONDS * nbytes / seconds))

    # --- other operations of the net ---------------------------------------------------------------------------------

    def issue(self, what: str, call: Callable[[], Handle[T]]) -> Handle[T]:
        """Return the handle of the collective that `call` issues on the loop (any thread)."""
        return self.loop.run(what, self.consensus.issued, call)

    def average(self, tensors: Sequence[Tensor]) -> Handle[PassStatus]:
        """Return the handle of the ranks' status; if all average, flat `tensors` are the means then, in place."""
        status = self.consensus.question(StatusKind.AVERAGE, Role.TRAINS)
        self.averaging = self.loop.run("average of the parameters", self._average, tensors, status)
        Operation.of(self.averaging).mark_retrieved()  # no code awaits it if the net was aborted
        return self.averaging

    async def _average(self, tensors: Sequence[Tensor], status: Tensor) -> PassStatus:
        answer = await self.consensus.sum(status)
        if answer.agreed(StatusKind.AVERAGE):
            nbytes, known = sum(t.nbytes for t in tensors), self.statistics
            self.hook.nbytes += nbytes
            self.statistics = replace(
                known, passes=known.passes + 1, nbytes=known.nbytes + nbytes, sent_nbytes=self.hook.nbytes
            )
            self.consensus.passes = self.statistics.passes
            await self.consensus.issued(lambda: self.data.allreduce(list(tensors), "mean"))
        return answer
