"""What runs on the compute thread of a net: forward, backward, the waiting for reductions, and the plain step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, update_wrapper
from typing import Any, Final, ParamSpec, TypeVar

from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from aiodist.errors import AiodistError, MismatchError, RemoteError
from aiodist.handles import Handle, internals
from aiodist.handles.tracing import span
from aiodist.nn.buckets import Bucket
from aiodist.nn.pass_status import PassStatus, StatusKind
from aiodist.nn.reducer import Reducer
from aiodist.nn.reduction import Reduction
from aiodist.nn.steps import StepSettings
from aiodist.streams import HostStream

P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


_CALLS: Final = set[str]()
"""The names that `called` was given."""


def called(name: str) -> Callable[[F], F]:
    """Decorate what runs on the thread: errors and reports tell of it by `name`, the user's call."""

    def named(fn: F) -> F:
        _CALLS.add(name)
        fn.__qualname__ = name
        return fn

    return named


class Compute:
    """One thread, always the same, and the reducer of what it computes.

    `submit` belongs to the loop, everything else to the thread itself.
    """

    def __init__(self, stream: HostStream, reducer: Reducer) -> None:
        self.stream = stream
        self.reducer = reducer
        self._trusted: Reduction | None = None
        """The pass whose gradients were used while their devices still reduced them."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Handle[T]:
        """Return a handle of `fn(*args, **kwargs)`, which runs behind what was asked earlier, on CUDA devices too."""
        if not self.reducer.devices:
            return self.stream.submit(fn, *args, **kwargs)
        behind: Callable[P, T] = update_wrapper(partial(self._behind, fn), fn)
        return self.stream.submit(behind, *args, **kwargs)

    def _behind(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        try:
            self.reducer.devices.follow()
        except RuntimeError as error:
            self.reducer.refuse(error)
            raise
        return fn(*args, **kwargs)

    def is_current(self) -> bool:
        return self.stream.is_current()

    # --- waiting ------------------------------------------------------------------------------------------------

    def wait(self, handle: Handle[T]) -> T:
        self.block(handle)
        return handle.wait()

    def block(self, handle: Handle[Any]) -> None:
        """Block the thread until `handle` is over, however it ends; give up when the loop is gone."""
        if handle.done():
            return
        progress = self.reducer.progress
        with span("wait", what=internals.name_of(handle)), progress.waiting():
            if not internals.block_unless(handle, progress.loop.is_closed):
                raise RuntimeError(f"the event loop was closed while {handle} was under way")

    def drain(self) -> None:
        """Let the last pass come to its end: a step that left it early has no gradients of it yet.

        Where all of its gradients are on CUDA devices and were used, the devices wait for them, and the host does not.
        """
        last = self.reducer.last
        if last is not None and not (self.reducer.devices and last.used and self.reducer.learnt):
            self._finish(last)

    @called("the end of the last step")
    def finish(self) -> None:
        """As `drain`, but the host waits in any case; raise what a pass failed with after its gradients were used."""
        if self.reducer.last is not None:
            self._finish(self.reducer.last)
        self._check_trusted()

    def _finish(self, last: Reduction) -> None:
        self.block(last.over)
        if self.reducer.devices and last.error is None:
            self._order(last, range(len(last.buckets)))

    # --- gradients on devices -----------------------------------------------------------------------------------

    def use(self, reduction: Reduction) -> None:
        """Return when what runs here from now on may use the gradients of `reduction`: CUDA devices wait, not the host.

        Raises what it failed with, as far as that is known; what comes later is raised by the next step.
        """
        if reduction.single:
            return
        self.wait(reduction.usable)
        if self.reducer.devices:
            self._check_trusted()
        self.order(reduction, range(len(reduction.buckets)))

    def order(self, reduction: Reduction, indices: Sequence[int]) -> None:
        """As `use`, of some of the buckets, which are settled."""
        for index in indices:
            reduction.buckets[index].finish()
        if not self.reducer.devices:
            return
        self._order(reduction, indices)
        if reduction.finished.done() or reduction.broken:
            self.wait(reduction.finished)
        if reduction.used:
            self._trusted = reduction
            self.reducer.summed(reduction)

    def _order(self, reduction: Reduction, indices: Iterable[int]) -> None:
        with self.reducer.progress.waiting():
            for index in indices:
                reduction.order(index)

    def _check_trusted(self) -> None:
        """Raise what the last pass failed with after its gradients were used, once."""
        trusted = self._trusted
        if trusted is not None and trusted.error is not None:
            self._trusted = None
            trusted.finished.wait()

    # --- passes -------------------------------------------------------------------------------------------------

    @called("net.backward_iter")
    def reduce(
        self,
        forward: Callable[[], Tensor],
        *,
        on_arrival: Callable[[Bucket], None] | None = None,
        whole: bool = False,
        **how: Any,
    ) -> tuple[Tensor, Reduction]:
        """Run forward and backward; return the loss, and the pass, whose reductions go on.

        If anything goes wrong, this rank still sends what the others wait for. See `Reducer.begin` for `whole`.
        """
        losses: list[Tensor] = []

        def prepare() -> None:
            losses.append(forward())
            check_loss(losses[0], how)

        def backward(reduction: Reduction) -> None:
            reduction.on_arrival = on_arrival
            with span("backward"):
                losses[0].backward(**how)

        reduction = self._make_pass(prepare, backward, whole=whole)
        return losses[0].detach(), reduction

    def average(self, tensors: Sequence[Tensor]) -> Handle[PassStatus]:
        """Have flat `tensors` become their means over all ranks; they are that once `averaged` has taken the handle."""
        if self.reducer.last is not None:
            self._finish(self.reducer.last)
        self._name_caller()
        for stream in self.reducer.devices.currents():
            stream.synchronize()
        self.reducer.steps.settle()
        return self.reducer.average(tensors)

    def averaged(self, handle: Handle[PassStatus]) -> int:
        """Wait for an average; return of how many ranks. Raises `MismatchError` on all where one does not average."""
        verdict = self.wait(handle)
        self.reducer.averaging, self.reducer.averaged = None, verdict
        self._check_same(verdict, StatusKind.AVERAGE, opinion=True)
        return self.reducer.data.size

    def _make_pass(
        self, prepare: Callable[[], None], backward: Callable[[Reduction], None], *, whole: bool
    ) -> Reduction:
        """Return a pass that begins behind `prepare` and has what `backward` brings, unless the ranks disagree."""
        reduction: Reduction | None = None
        try:
            self._check_trusted()
            prepare()
            reduction = self._begin(differs=self.reducer.differs(), whole=whole)
            if reduction.terms.refused is None:
                backward(reduction)
        except BaseException as error:
            self.reducer.end_backward(reduction or self._begin(opinion=False), error)
            raise
        self.reducer.end_backward(reduction)
        if reduction.terms.refused is not None:
            self.wait(reduction.finished)
        return reduction

    def _begin(
        self, *, active: bool = True, opinion: bool = True, differs: bool = False, whole: bool = False
    ) -> Reduction:
        """Return a new pass; ask the others first what they train, and who has data, where this rank cannot know.

        It `differs` where it trains others than before; without an `opinion` it has failed, or has no data left.
        """
        joining = self.reducer.joining > 0
        try:
            if self.reducer.averaging is not None:  # on all ranks what comes now is issued behind it
                self.block(self.reducer.averaging)
            self.drain()
            self._name_caller()
            self.reducer.steps.settle()
            verdict = None
            if differs or (joining and not opinion) or self.reducer.adds_to_sums:
                verdict = self._ask(StatusKind.JOIN if joining else StatusKind.ASK, opinion=opinion)
            return self.reducer.begin(verdict, active=active, opinion=opinion, whole=whole)
        except Exception as error:  # a device is lost: what the others wait for will not come
            self.reducer.refuse(error)
            raise

    def _name_caller(self) -> None:
        if (running := self.stream.running) is not None:
            self.reducer.name_caller(internals.issued_at(running), running.op if running.op in _CALLS else "")

    def _ask(self, kind: StatusKind, *, opinion: bool) -> PassStatus:
        if self.reducer.last is not None:
            self._finish(self.reducer.last)
        self._name_caller()
        return self.wait(self.reducer.ask(self.reducer.packed_status(kind, opinion=opinion)))

    @called("net.aclose")
    def end(self) -> None:
        """Raise `MismatchError` where other ranks, which do not close the net now, wait for this one in a step."""
        self._check_same(self._ask(StatusKind.CLOSE, opinion=False), StatusKind.CLOSE, opinion=False)

    def _check_same(self, verdict: PassStatus, kind: StatusKind, *, opinion: bool) -> None:
        """Raise what explains it where ranks are not about to do the same."""
        if not verdict.agreed(kind):
            reduction = self.reducer.begin(verdict, active=opinion)
            self.reducer.end_backward(reduction)
            self.wait(reduction.finished)

    @called("net.backward")
    def reduce_all(self, forward: Callable[[], Tensor], **how: Any) -> None:
        """As `reduce`, to the end."""
        _, reduction = self.reduce(forward, whole=True, **how)
        self.use(reduction)

    @called("net.backward")
    def accumulate(self, loss: Tensor, how: dict[str, Any], *, part: bool = False) -> None:
        """Run backward and leave its gradients on this rank; with `part` later ones of the same step reduce them."""
        self.drain()
        self.reducer.newcomers.check()
        self.reducer.share()
        self._check_trusted()
        with self.reducer.alone(part=part), span("backward"):
            loss.backward(**how)

    @called("net.backward")
    def keep(self, loss: Tensor, how: dict[str, Any]) -> None:
        """As `accumulate`, for a later pass, which a step must not begin before."""
        self.accumulate(loss, how)
        self.reducer.kept = True

    @called("net.join")
    def bring_nothing(self) -> Reduction:
        """Make a pass for the others' sake, with nothing to bring."""
        reduction = self._begin(active=False, opinion=False)
        self.reducer.end_backward(reduction)
        return reduction

    @called("net.join")
    def follow(self, reduction: Reduction) -> None:
        """Do what the others do with a pass of `bring_nothing` that is finished."""
        if self.reducer.owner is not None and reduction.participants:
            self.reducer.owner.follow(reduction)

    @called("net.join")
    def see_out(self, error: BaseException) -> None:
        """This rank has left a `join` block with `error`: tell the others, and keep up until they have left too."""
        try:
            last = self.reducer.last
            if not isinstance(error, RemoteError) and (last is None or last.error is not error):
                self.reducer.end_backward(self._begin(active=False, opinion=False), error)
            while self._keep_up():
                pass
        finally:
            self.reducer.joining -= 1

    def _keep_up(self) -> bool:
        """Make a pass for the others' sake; return whether they may make another."""
        try:
            reduction = self.bring_nothing()
            self.wait(reduction.finished)
            self.follow(reduction)
        except (RemoteError, MismatchError):
            return self.reducer.works
        except (AiodistError, RuntimeError):  # the communicator is gone, or the loop
            return False
        return reduction.participants > 0


def split_aux(returned: Any) -> tuple[Any, Any]:
    """Return the loss and aux of what forward returned: aux is detached, and None unless it was a pair."""
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
        """What each closure returned beside its loss, or None."""
        self._paired = False
        """A closure returned `(loss, aux)`."""

    def __call__(self) -> Tensor:
        """Return the loss of the last closure, once the others have had their backward."""
        return self.rest(self.first())

    def first(self) -> Tensor:
        """Return the loss of the first closure; `rest` takes it."""
        return self._run(self._closures[0])

    def rest(self, loss: Tensor) -> Tensor:
        """Run backward of `loss`, and do the same with the other closures; return the loss of the last."""
        for closure in self._closures[1:]:
            self._compute.accumulate(loss, {}, part=self.reduces)
            loss = self._run(closure)
        return loss

    def _run(self, closure: Callable[[], Any]) -> Tensor:
        with span("forward"), self.settings.casting():
            returned = closure()
        loss, aux = split_aux(returned)
        check_loss(loss, {})
        self._losses.append(loss.detach())
        self._aux.append(aux)
        self._paired = self._paired or returned is not loss
        self._compute.reducer.scaler = self.settings.scaler
        self._compute.reducer.steps.declare(self._driver, self.settings)
        found: Tensor = loss if self.settings.scaler is None else self.settings.scaler.scale(loss)
        return found

    @property
    def result(self) -> Any:
        """What the step returns once forward has run: the sum of the losses, or `(loss, aux)`."""
        first, *others = self._losses
        loss = sum(others, first)
        if not self._paired:
            return loss
        return loss, (self._aux if self._several else self._aux[0])


@called("net.step")
def plain_step(forward: Forward, opt: Optimizer, compute: Compute) -> Any:
    """Have `opt` step with the reduced gradients of `forward`, and return its result; on the compute thread."""
    steps = compute.reducer.steps

    def prepare() -> Tensor:
        compute.drain()
        opt.zero_grad()
        return forward()

    _, reduction = compute.reduce(prepare, whole=True)
    compute.use(reduction)
    with steps.making(), span("optimizer"):
        made = forward.settings.update(opt.param_groups, opt.step)
    if made:
        steps.note(opt)  # one that has copies of the parameters too
        forward.settings.advance()
    return forward.result
