"""The work of the compute thread of a net: forward, backward, waits for reductions, and the plain step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from functools import partial, update_wrapper
from typing import Any, Final, ParamSpec, TypeVar

from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from aiodist.communicator import parts_of
from aiodist.handles import Handle, internals
from aiodist.handles.tracing import span
from aiodist.nn.buckets import Bucket, RowBucket
from aiodist.nn.consensus import Role
from aiodist.nn.pass_status import PassStatus, StatusKind
from aiodist.nn.passes import Pass
from aiodist.nn.reducer import Reducer
from aiodist.nn.steps import StepSettings
from aiodist.streams import HostStream

P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


_CALLS: Final = set[str]()
"""The names that `called` was given."""


def called(name: str) -> Callable[[F], F]:
    """Decorate a function of the thread: errors and reports have `name`, the user's call."""

    def named(fn: F) -> F:
        _CALLS.add(name)
        fn.__qualname__ = name
        return fn

    return named


class Compute:
    """The compute thread of a net, with the reducer of what it computes.

    `submit` belongs to the loop, everything else to the thread itself.
    """

    def __init__(self, stream: HostStream, reducer: Reducer) -> None:
        self.stream = stream
        self.reducer = reducer
        self.is_current = stream.is_current
        """Function that returns True on the compute thread."""
        self._trusted: Handle[None] | None = None
        """End of the pass whose gradients were used while devices were still reducing them."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Handle[T]:
        """Return a handle of `fn(*args, **kwargs)`, which runs after all earlier work, on CUDA devices too."""
        if not self.reducer.devices:
            return self.stream.submit(fn, *args, **kwargs)
        after: Callable[P, T] = update_wrapper(partial(self._after_devices, fn), fn)
        return self.stream.submit(after, *args, **kwargs)

    def _after_devices(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        try:
            self.reducer.devices.follow()
        except RuntimeError as error:
            self.reducer.consensus.refuse(error)
            raise
        return fn(*args, **kwargs)

    # --- waiting -----------------------------------------------------------------------------------------------------

    def wait(self, handle: Handle[T]) -> T:
        """Return the result of `handle`, or raise its error."""
        self.block(handle)
        return handle.result()

    def block(self, handle: Handle[Any]) -> None:
        """Block the thread until `handle` is done, however it ends. Raise RuntimeError when the loop is closed."""
        if handle.done():
            return
        progress = self.reducer.loop.progress
        with span("wait", what=internals.name_of(handle)), progress.waiting():
            if not internals.block_unless(handle, progress.loop.is_closed):
                raise RuntimeError(f"the event loop was closed while {handle} was in flight")

    def drain(self, *, wholly: bool = False) -> None:
        """Wait for the end of the last pass, since a step that ended early has no gradients of it yet.

        If all of its gradients are on CUDA devices and were used, the devices wait for them, and unless `wholly` the
        host does not.
        """
        last = self.reducer.last
        if last is not None and (wholly or not (self.reducer.devices and last.used and self.reducer.learnt)):
            self.block(last.over)
            if self.reducer.devices and last.error is None:
                self._order(last, range(len(last.buckets)))

    @called("the end of the last step")
    def finish(self) -> None:
        """Wait as `drain`, always on the host; raise the error of a pass that failed after its gradients were used."""
        self.drain(wholly=True)
        self._check_trusted()

    # --- gradients on devices ----------------------------------------------------------------------------------------

    def use(self, this: Pass) -> None:
        """Return when work that is queued from now on may use the gradients of `this` pass: CUDA devices wait.

        Raises the error of the pass, if it is known; the next step raises a later one.
        """
        if this.alone:
            return
        self.wait(this.usable)
        if self.reducer.devices:
            self._check_trusted()
        self.order(this, range(len(this.buckets)))

    def order(self, this: Pass, indices: Sequence[int]) -> None:
        """Do the same as `use` for some of the buckets, which are settled."""
        for index in indices:
            if isinstance(bucket := this.buckets[index], RowBucket):
                bucket.finish()
        if not self.reducer.devices:
            return
        self._order(this, indices)
        if this.finished.done() or (this.queues is not None and this.queues.broken):
            self.wait(this.finished)
        if this.used:
            self._trusted = this.finished
            self.reducer.sums.note(this.over, this.participants)

    def _order(self, this: Pass, indices: Iterable[int]) -> None:
        with self.reducer.loop.progress.waiting():
            for index in indices:
                this.order(index)

    def _check_trusted(self) -> None:
        """Raise the error of the last pass if it failed after its gradients were used, once."""
        trusted = self._trusted
        if trusted is not None and trusted.done():
            self._trusted = None
            trusted.result()

    # --- passes ------------------------------------------------------------------------------------------------------

    @called("net.backward_iter")
    def reduce(
        self,
        forward: Callable[[], Tensor],
        *,
        zeroes: Optimizer | None = None,
        on_arrival: Callable[[Bucket], None] | None = None,
        whole: bool = False,
        **how: Any,
    ) -> tuple[Tensor, Pass]:
        """Run forward and backward; return the loss, and the pass, whose reductions continue.

        Forward begins after the last pass, and with the gradients of `zeroes` at zero, if that is given. After an error
        this rank still sends what the others wait for. If `whole`, no code looks at a gradient before all are there.
        """
        this: Pass | None = None
        try:
            if self._trusted is not None:
                self._check_trusted()
            if zeroes is not None:
                self.drain()
                zeroes.zero_grad()
            loss = forward()
            check_loss(loss, how)
            differs = self.reducer.differs()
            this = self._begin(Role.TRAINS, differs=differs, whole=whole)
            this.on_arrival = on_arrival
            if not this.refused:
                with span("backward"):
                    loss.backward(**how)
        except BaseException as error:
            self.reducer.end_backward(this or self._begin(Role.FAILED), error)
            raise
        self.reducer.end_backward(this)
        if this.refused:
            self.wait(this.finished)
        return loss.detach(), this

    def average(self, tensors: Sequence[Tensor]) -> Handle[PassStatus]:
        """Return the handle of an average of flat `tensors` over all ranks, which is there after `averaged`."""
        self.drain(wholly=True)
        self._name_caller()
        for stream in self.reducer.devices.currents():
            stream.synchronize()
        self.reducer.steps.settle()
        return self.reducer.average(tensors)

    def averaged(self, handle: Handle[PassStatus]) -> int:
        """Wait for an average; return the number of ranks. Raise `MismatchError` on all if one does not average."""
        answer = self.wait(handle)
        self.reducer.averaging, self.reducer.consensus.answer = None, answer
        self._check_same(answer, StatusKind.AVERAGE, Role.TRAINS)
        return self.reducer.data.size

    def _begin(self, role: Role, *, differs: bool = False, whole: bool = False) -> Pass:
        """Return a new pass, after the last one has ended and the ranks were asked, if need be.

        This rank asks the others if what it trains `differs` from the last pass, and in a `join` block also if it does
        not train now, or adds to a sum.
        """
        reducer = self.reducer
        joining = reducer.consensus.joining > 0
        try:
            if reducer.averaging is not None:  # all ranks issue it before the pass
                self.block(reducer.averaging)
            self.drain()
            self._name_caller()
            reducer.steps.settle()
            if differs or (joining and (role is not Role.TRAINS or reducer.sums.adds_to_sums)):
                return reducer.begin(role, self._ask(StatusKind.JOIN if joining else StatusKind.ASK, role))
            return reducer.begin(role, whole=whole)
        except Exception as error:  # a device is lost: what the others wait for will not come
            reducer.consensus.refuse(error)
            raise

    def _name_caller(self) -> None:
        """Let reports of operations from now on name the line of the running call, and the user's call there."""
        reducer, running = self.reducer, self.stream.running
        if running is not None:
            caller, call = internals.issued_at(running), running.op if running.op in _CALLS else ""
            for comm in (reducer.data, reducer.consensus.comm, *reducer.hook.comms):
                parts_of(comm).dispatcher.oplog.name_caller(caller, call)

    def _ask(self, kind: StatusKind, role: Role) -> PassStatus:
        """Return the ranks' answer to a question before a pass."""
        self.drain(wholly=True)
        self._name_caller()
        consensus = self.reducer.consensus
        return self.wait(consensus.loop.run("comparison of the ranks", consensus.sum, consensus.question(kind, role)))

    @called("net.aclose")
    def end(self) -> None:
        """Raise `MismatchError` if other ranks, which do not close the net now, wait for this one in a step."""
        self._check_same(self._ask(StatusKind.CLOSE, Role.IDLE), StatusKind.CLOSE, Role.IDLE)

    def _check_same(self, answer: PassStatus, kind: StatusKind, role: Role) -> None:
        """Raise an explanation if ranks are not about to do the same."""
        if not answer.agreed(kind):
            this = self.reducer.begin(role, answer)
            self.reducer.end_backward(this)
            self.wait(this.finished)

    @called("net.backward")
    def reduce_all(self, forward: Callable[[], Tensor], **how: Any) -> None:
        """Do the same as `reduce`, and wait for the gradients."""
        _, this = self.reduce(forward, whole=True, **how)
        self.use(this)

    @called("net.backward")
    def accumulate(self, loss: Tensor, how: dict[str, Any], *, part: bool = False) -> None:
        """Run backward and leave its gradients on this rank; if `part`, a later one of the step reduces them too."""
        self.drain()
        self.reducer.hooks.new_parameters.check()
        self.reducer.sums.divide()
        self._check_trusted()
        with self.reducer.hooks.backward_alone(part=part), span("backward"):
            loss.backward(**how)

    @called("net.backward")
    def keep(self, loss: Tensor, how: dict[str, Any]) -> None:
        """Do the same as `accumulate` for a later pass, before which no step may begin."""
        self.accumulate(loss, how)
        self.reducer.sums.kept = True

    # --- passes without data, in `net.join` --------------------------------------------------------------------------

    @called("net.join")
    def bring_nothing(self, error: BaseException | None = None) -> Pass:
        """Take part in a pass of the others with zero gradients, and report `error` to them unless that is None."""
        this = self._begin(Role.IDLE)
        self.reducer.end_backward(this, error)
        return this


def split_aux(returned: Any) -> tuple[Any, Any]:
    """Return the loss and aux of forward's result; aux is detached, or None unless the result is a pair."""
    if isinstance(returned, tuple) and len(returned) == 2:
        loss, aux = returned
        return loss, detached(aux)
    return returned, None


def detached(aux: Any) -> Any:
    """Return `aux` with its tensors detached, also those in its tuples, lists and dicts: the graph may go."""
    if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(aux)):
        return tree_map_only(Tensor, Tensor.detach, aux)
    return aux


def check_loss(loss: object, how: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError unless backward may begin at `loss`, which forward returned."""
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"forward returned {type(loss).__name__}: expected the loss, a tensor of one element, or (loss, aux)"
        )
    if loss.numel() != 1 and how.get("gradient") is None:
        raise ValueError(f"forward returned a tensor of shape {list(loss.shape)}: expected the loss, one element")
    if not loss.requires_grad:
        raise ValueError("forward returned a loss that depends on no parameter: it was detached, or made under no_grad")


class Forward:
    """The forward passes of one step, and every backward but the last; called on the compute thread.

    A call returns the loss whose backward is to be reduced. `result` is then what the step returns: the sum of the
    losses of the closures, detached and not scaled, with what they returned as aux. The gradients of the backwards add
    up on this rank.
    """

    reduces = True
    """False if the step uses the gradients of this rank alone."""

    def __init__(
        self,
        closures: Sequence[Callable[[], Any]],
        settings: StepSettings,
        compute: Compute,
        driver: object = None,
        *,
        several: bool = False,
    ) -> None:
        """`driver` is the optimizer or driver that makes the step; with `several` its result has a list of aux."""
        self.settings = settings
        self._driver = driver
        self._closures = closures
        self._compute = compute
        self._several = several
        self._losses: list[Tensor] = []
        self._aux: list[Any] = []
        """Value that each closure returned in addition to its loss, or None."""
        self._paired = False
        """A closure returned `(loss, aux)`."""

    def __call__(self) -> Tensor:
        """Return the loss of the last closure, once the others have had their backward."""
        loss = self.run()
        return loss if len(self._closures) == 1 else self.rest(loss)

    def rest(self, loss: Tensor) -> Tensor:
        """Run backward of `loss`, that of closure 0, and do the same with the other closures; return the last loss."""
        for number in range(1, len(self._closures)):
            self._compute.accumulate(loss, {}, part=self.reduces)
            loss = self.run(number)
        return loss

    def run(self, number: int = 0) -> Tensor:
        """Return the loss of closure `number`, scaled."""
        settings, reducer = self.settings, self._compute.reducer
        # A copy, since the block remembers the modes of the thread.
        with span("forward"), nullcontext() if settings.autocast is None else copy(settings.autocast):
            returned = self._closures[number]()
        loss, aux = split_aux(returned)
        check_loss(loss, {})
        self._losses.append(loss.detach())
        self._aux.append(aux)
        self._paired = self._paired or returned is not loss
        reducer.scaler, reducer.steps.declared = settings.scaler, (self._driver, settings)
        found: Tensor = loss if settings.scaler is None else settings.scaler.scale(loss)
        return found

    @property
    def result(self) -> Any:
        """The result of the step after forward: the sum of the losses, or `(loss, aux)`."""
        first, *others = self._losses
        loss = sum(others, first)
        if not self._paired:
            return loss
        return loss, (self._aux if self._several else self._aux[0])


@called("net.step")
def plain_step(forward: Forward, opt: Optimizer, compute: Compute) -> Any:
    """Step `opt` with the reduced gradients of `forward`, and return its result; on the compute thread."""
    steps = compute.reducer.steps
    _, this = compute.reduce(forward, zeroes=opt, whole=True)
    compute.use(this)
    with span("optimizer"):
        try:
            made = forward.settings.update(opt.param_groups, opt.step)
        except BaseException as error:
            steps.mishap = error  # this rank may be left behind
            raise
    if made:
        steps.note(opt)  # one that has copies of the parameters too
        forward.settings.advance()
    return forward.result
