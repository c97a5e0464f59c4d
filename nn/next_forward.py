"""The next forward: each layer waits for its own parameters, whose last update may still be in flight."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from sys import _getframe
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from aiodist.errors import CommunicatorError
from aiodist.handles import Handle
from aiodist.handles.calls import located
from aiodist.nn.buckets import Slot
from aiodist.nn.compute import Compute, Forward, called
from aiodist.nn.data_parallel import DataParallel, compute_of, reducer_of
from aiodist.nn.made import MadeTogether
from aiodist.nn.passes import Pass
from aiodist.nn.reducer import Reducer


class Part(Protocol):
    """Parameters that are updated together."""

    @property
    def slots(self) -> Sequence[Slot]:
        """Theirs."""
        ...


P = TypeVar("P", bound=Part)
T = TypeVar("T")


class UpdatedAhead(MadeTogether, Generic[P]):
    """An optimizer whose updates finish during the next forward: each module waits for its own parameters.

    The first forward waits for all, and learns which modules use which parts (`Guards`).
    """

    _create = "create(net, make_optimizer)"

    def _begin(self, net: DataParallel, make_optimizer: object) -> None:
        if not isinstance(net, DataParallel):
            raise TypeError(f"net is a {type(net).__name__}: expected what `await DataParallel.create(…)` returned")
        if isinstance(make_optimizer, Optimizer):
            raise TypeError("make_optimizer is an optimizer: expected a function that makes one of what it is given")
        self._net = net
        self._left: dict[P, Handle[None]] = {}
        """The parts with an update in flight, each with the handle of its reduction, in the order of issue."""
        self._failed: BaseException | None = None
        """First error of an update that was not raised yet."""
        self._unasked: set[P] = set()
        """Parts with an update due at the begin of this forward whose parameters no module has needed yet."""
        self._guards: Guards[P]

    def _guard(self, parts: Sequence[P]) -> None:
        """Let the modules wait for their parameters, which are in `parts`."""
        by_parameter = {slot.parameter: part for part in parts for slot in part.slots}
        self._guards = Guards(self._net.module, by_parameter, self._before)

    @property
    def net(self) -> DataParallel:
        """The net that it steps."""
        return self._net

    @property
    def _reducer(self) -> Reducer:
        return reducer_of(self._net)

    @property
    def _compute(self) -> Compute:
        return compute_of(self._net)

    @property
    def pending(self) -> bool:
        """True while updates are still to be made: `await flush()` before you look at parameters or state."""
        return bool(self._left)

    @located
    async def flush(self) -> None:
        """Return when every update is made, so this rank has the same parameters as all others.

        Raises:
            RuntimeError: If the net is closed. The error of the last reduction, update or gathering is raised too.

        """
        await self._net.submit(self.make_updates)

    @called("opt.flush")
    def make_updates(self) -> None:
        """Do the work of `flush`, on the compute thread; `aiodist.save` calls it."""
        self._finish()
        self._tell()

    def _use(self, parts: Sequence[P]) -> None:
        """Return when `parts` may be used."""
        raise NotImplementedError

    def _finish(self) -> None:
        """Return when all may."""
        self._use(list(self._left))

    # --- steps, on the compute thread ---------------------------------------------------------------------------

    def _run(self, forward: Forward, *, whole: bool = False) -> Tensor:
        """Return the loss whose backward is to be reduced; with `whole` forward begins after all updates."""
        if whole or not self._guards.learnt:
            self._finish()
        self._use(self._guards.early)
        self._unasked = set(self._left)
        try:
            with self._guards.forward():
                loss = forward.first()
        finally:  # a step that fails sends zeros from where the gradients of the last one lie
            self._finish()
        self._check_used(loss)
        return forward.rest(loss)

    def _reduce(self, prepare: Callable[[], Tensor]) -> Pass:
        """Return the pass of a backward from the result of `prepare`; the error of an earlier update comes first."""
        try:
            return self._compute.reduce(prepare)[1]
        except CommunicatorError:
            self._tell()  # what came before says why
            raise

    def _tell(self) -> None:
        """Raise what an update failed with, once."""
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def _check_used(self, loss: Tensor) -> None:
        """After forward: what no module asked for, and was updated in the meantime, must not have been used."""
        slots = {slot.parameter: (slot.name, part) for part in self._unasked for slot in part.slots}
        if not slots or not isinstance(loss, Tensor):
            return
        wrong = [slots[parameter] for parameter in _leaves(loss) if parameter in slots]
        if wrong:
            self._guards.early += list(dict.fromkeys(part for _, part in wrong))
            raise RuntimeError(
                f"{', '.join(sorted(name for name, _ in wrong))}: used in this forward while the last update was on "
                "its way, by another module than in the first step; from now on forward waits for it before it begins"
            )

    def _before(self, parts: Sequence[P], training: bool) -> None:
        """A module that needs `parts` is about to run."""
        current = self._compute.is_current()
        if training and current:
            self._unasked.difference_update(parts)
        if not self._left or not (current or self.pending):
            return
        if not current:
            raise RuntimeError(
                "updates of this module are still in flight: call it on the compute thread, "
                "`await net.submit(net, x)`, or `await opt.flush()` first"
            )
        if training:
            self._use(parts)
        else:
            self._finish()


# --- where parameters are used ----------------------------------------------------------------------------------------


class Guards(Generic[T]):
    """Calls `before(parts, training)` before each module runs, with the parts of the parameters that it uses.

    Where a parameter is used is learnt from the first forward of a step, by looking at the arguments of every function
    of torch: in the innermost module that runs just then, be it the owner or not (`MultiheadAttention` reads its
    `out_proj`, a tied weight serves in two places), of compiled code in the module that calls it. What is used outside
    of all modules, or was not seen at all, is `early`: needed before forward begins. Learning costs a few microseconds
    an operation, once.
    """

    def __init__(
        self, module: nn.Module, parts: Mapping[Tensor, T], before: Callable[[Sequence[T], bool], None]
    ) -> None:
        self.learnt = False
        self.early: list[T] = []
        self._parts = parts
        self._before = before
        self._training = False
        self._needs: dict[nn.Module, list[T]] = {}
        self._uses = _Uses(parts)
        modules = list(module.modules())
        self._hooks = [m.register_forward_pre_hook(_ForwardHook(self._enter), prepend=True) for m in modules]
        self._leaving = [m.register_forward_hook(_ForwardHook(self._leave), always_call=True) for m in modules]

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Run the block as the forward of a step."""
        self._training = True
        try:
            if self.learnt:
                yield
            else:
                with self._uses:
                    yield
                self._learn()
        finally:
            self._training = False

    def remove(self) -> None:
        """Take the hooks off."""
        for hook in (*self._hooks, *self._leaving):
            hook.remove()

    def _enter(self, module: nn.Module, *args: object) -> None:
        if not self.learnt:
            self._uses.enter(module)
        self._before(self._needs.get(module, ()), self._training)

    def _leave(self, module: nn.Module, *args: object) -> None:
        if self._uses.running:
            self._uses.running.pop()

    def _learn(self) -> None:
        for parameter, part in self._parts.items():
            users = self._uses.users.get(parameter) or {None}
            for user in users:
                needing = self.early if user is None else self._needs.setdefault(user, [])
                if part not in needing:
                    needing.append(part)
        for hook in self._leaving:
            hook.remove()
        self._leaving.clear()
        self._uses = _Uses({})
        self.learnt = True


class _Uses(TorchFunctionMode):
    """Notes which module runs when a function of torch is given one of the parameters."""

    def __init__(self, parameters: Mapping[Tensor, object]) -> None:
        super().__init__()
        self.running: list[nn.Module | None] = []
        self.users: dict[Tensor, set[nn.Module | None]] = {}
        self._parameters = parameters

    def __enter__(self) -> _Uses:
        self.running.clear()
        self.users.clear()
        return super().__enter__()  # type: ignore[no-any-return,no-untyped-call]

    def enter(self, module: nn.Module) -> None:
        """`module` runs now. In compiled code, whose hooks may be gone the next time, its caller stands for it."""
        caller = self.running[-1] if self.running else None
        self.running.append(caller if _in_compiled_code() else module)

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling():
            return func(*args, **kwargs)
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor) and tensor in self._parameters:
                self.users.setdefault(tensor, set()).add(self.running[-1] if self.running else None)
        return func(*args, **kwargs)


def _leaves(result: Tensor) -> Iterator[Tensor]:
    """Yield those that backward of `result` gives a gradient."""
    seen: set[object] = set()
    waiting: list[Any] = [result.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(leaf := getattr(node, "variable", None), Tensor):
            yield leaf
        waiting += [before for before, _ in node.next_functions]
        waiting += [y.grad_fn for y in getattr(node, "block_outputs", ()) if isinstance(y, Tensor)]


def _in_compiled_code() -> bool:
    """Whether something that was compiled has called what runs here, uncompiled in part or not."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    frame = None if compiler is None else _getframe()
    while frame is not None and frame.f_globals is not vars(compiler):
        frame = frame.f_back
    return frame is not None


class _ForwardHook:
    """Called by a module around its forward; a copy of the module, or a pickle, has one that does nothing.

    Compiled code has none at all: what it uses is needed by the module that calls it.
    """

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, module: nn.Module, *args: object) -> None:
        if not torch.compiler.is_dynamo_compiling():
            self._call(module, *args)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Callable[..., None]]]:
        return _ForwardHook, (_pass,)


def _pass(module: nn.Module, *args: object) -> None:
    pass
