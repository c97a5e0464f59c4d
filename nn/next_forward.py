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
from aiodist.nn.buckets import Slot
from aiodist.nn.compute import Forward, called
from aiodist.nn.data_parallel import DataParallel
from aiodist.nn.net_driver import NetDriver
from aiodist.nn.passes import Pass


class Part(Protocol):
    """Parameters that are updated together."""

    @property
    def slots(self) -> Sequence[Slot]:
        """Slots of the parameters."""
        ...


P = TypeVar("P", bound=Part)
T = TypeVar("T")


class UpdatedAhead(NetDriver, Generic[P]):
    """An optimizer whose updates finish during the next forward: each module waits for its own parameters.

    The first forward waits for all, and learns which modules use which parts (`Guards`).
    """

    _create = "create(net, make_optimizer)"

    def __init__(self, net: DataParallel, make_optimizer: object) -> None:
        super().__init__(net)
        if isinstance(make_optimizer, Optimizer):
            raise TypeError("make_optimizer is an optimizer: expected a function that makes one of its argument")
        self._left: dict[P, Handle[None]] = {}
        """Handles of the reductions of parts with an update in flight, in the order of issue."""
        self._failed: BaseException | None = None
        """First error of an update that was not raised yet."""
        self._unasked: set[P] = set()
        """Parts with a pending update at the begin of this forward that no module has needed yet."""
        self._guards: Guards[P]

    def _guard(self, parts: Sequence[P]) -> None:
        """Let the modules wait for their parameters, which are in `parts`."""
        by_parameter = {slot.parameter: part for part in parts for slot in part.slots}
        self._guards = Guards(self._net.module, by_parameter, self._before)

    @property
    def pending(self) -> bool:
        """True while updates are pending: `await flush()` before you look at parameters or state."""
        return bool(self._left)

    @called("opt.flush")
    def make_updates(self) -> None:
        """Do the work of `flush`, on the compute thread; `aiodist.save` calls it."""
        self._finish()
        self._raise_failed()

    def _use(self, parts: Sequence[P]) -> None:
        """Return when `parts` may be used."""
        raise NotImplementedError

    def _finish(self) -> None:
        """Return when all parts may be used."""
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
                loss = forward.run()
        finally:  # a step that fails sends zeros from the memory of the last gradients
            self._finish()
        self._check_used(loss)
        return forward.rest(loss)

    def _reduce(self, prepare: Callable[[], Tensor]) -> Pass:
        """Return the pass of a backward from the result of `prepare`; the error of an earlier update comes first."""
        try:
            return self._compute.reduce(prepare)[1]
        except CommunicatorError:
            self._raise_failed()  # an earlier error says why
            raise

    def _raise_failed(self) -> None:
        """Raise the error of an update, once."""
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def _check_used(self, loss: Tensor) -> None:
        """Raise RuntimeError if forward used a parameter that no module had asked for while its update was pending."""
        slots = {slot.parameter: (slot.name, part) for part in self._unasked for slot in part.slots}
        if not slots or not isinstance(loss, Tensor):
            return
        wrong = [slots[parameter] for parameter in _leaves(loss) if parameter in slots]
        if wrong:
            self._guards.early += list(dict.fromkeys(part for _, part in wrong))
            raise RuntimeError(
                f"{', '.join(sorted(name for name, _ in wrong))}: used in this forward while the last update was in "
                "flight, by another module than in the first step; from now on forward waits for it before it begins"
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

    The first forward of a step shows which module uses a parameter: the innermost module that runs when a function of
    torch gets the parameter. That may be another module than the owner (`MultiheadAttention` reads its `out_proj`, and
    modules may share a weight). For compiled code, the module that calls the code counts. Parameters that are used
    outside of all modules, or were not seen, are `early`: forward begins after their updates. Learning costs a few
    microseconds for each operation, once.
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
        """Remove the hooks."""
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
    """Records which module runs when a function of torch gets one of the parameters."""

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
        """Record that `module` runs, or for compiled code its caller, since compiled code may lose its hooks."""
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
    """Yield the tensors that get a gradient in backward of `result`."""
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
    """Return True if compiled code has called the running function."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    frame = None if compiler is None else _getframe()
    while frame is not None and frame.f_globals is not vars(compiler):
        frame = frame.f_back
    return frame is not None


class _ForwardHook:
    """A hook around the forward of a module. In a copy or a pickle of the module it does nothing.

    Compiled code has no hooks: the module that calls the code needs its parameters.
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
