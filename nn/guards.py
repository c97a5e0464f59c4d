"""Hooks before the forward of modules, which say whose parameters are needed now."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from sys import _getframe
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

T = TypeVar("T")


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
        """What runs in this block is the forward of a step."""
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


def leaves(result: Tensor) -> Iterator[Tensor]:
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
    """What a module calls around its forward; a copy of the module, or a pickle, has one that does nothing.

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
