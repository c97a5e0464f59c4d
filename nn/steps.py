"""How many steps optimizers have made: the parameters of two ranks are alike only after as many."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import update_wrapper
from threading import get_ident
from typing import ClassVar, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

P = ParamSpec("P")
T = TypeVar("T")


class Steps:
    """Steps of one rank since the ranks were made alike, by any optimizer that has some of the `parameters`.

    An optimizer counts once between two backwards of the net, however often it steps there: one whose `step` calls that
    of its base class is seen once or twice, as it happens. What steps before the first backward has no gradients of
    the net. A hook of torch tells, one for all nets, while there are any; it costs a step of any optimizer 2 us.
    """

    _every: ClassVar[tuple[weakref.ref[Steps], ...]] = ()
    """Of the nets that are open; never changed but replaced, since the hook reads it in any thread."""
    _hook: ClassVar[RemovableHandle | None] = None
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.made = 0
        """Up to the last backward."""
        self.mishap: BaseException | None = None
        """What an optimizer raised last on this rank, as far as is known."""
        self._owned = frozenset(map(id, parameters))
        self._since: dict[int, object] | None = None
        """What has made a step since the last backward, by its id; None where there was none."""
        self._aside: int | None = None
        """The thread whose steps somebody else counts."""
        self._list(weakref.ref(self))

    # --- the hook -----------------------------------------------------------------------------------------------

    @classmethod
    def _list(cls, *new: weakref.ref[Steps], gone: Steps | None = None) -> None:
        with cls._lock:
            cls._every = (*(ref for ref in cls._every if ref() not in (None, gone)), *new)
            if cls._hook is None and cls._every:
                # Disabled: compiled code runs it as it is.
                cls._hook = register_optimizer_step_post_hook(torch.compiler.disable(cls._stepped))
            elif cls._hook is not None and not cls._every:
                cls._hook.remove()
                cls._hook = None

    @classmethod
    def _stepped(cls, opt: Optimizer, *_: object) -> None:
        for ref in cls._every:
            if (steps := ref()) is not None:
                steps._see(opt)

    def _see(self, opt: Optimizer) -> None:
        if self._since is None or self._aside == get_ident():
            return
        if any(not self._owned.isdisjoint(map(id, group["params"])) for group in opt.param_groups):
            self.note(opt)

    def release(self) -> None:
        """Count no more."""
        self._list(gone=self)

    # --- counting -----------------------------------------------------------------------------------------------

    def note(self, optimizer: object) -> None:
        """It has made a step, or all parts of one."""
        if self._since is not None:
            self._since[id(optimizer)] = optimizer

    def settle(self) -> None:
        """A backward begins: what was noted before it counts. The last one must be over."""
        noted, self._since = self._since, {}
        self.made += len(noted or ())

    @contextmanager
    def making(self) -> Iterator[None]:
        """An optimizer makes a step in this block; where it raises, this rank may be left behind."""
        try:
            yield
        except BaseException as error:
            self.mishap = error
            raise

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Steps that this thread makes in this block are parts of one that is noted when all are made."""
        self._aside = get_ident()
        try:
            yield
        finally:
            self._aside = None

    def blamed(self, fn: Callable[P, T]) -> Callable[P, T]:
        """Return `fn`, which may make a step."""

        def step(*args: P.args, **kwargs: P.kwargs) -> T:
            with self.making():
                return fn(*args, **kwargs)

        return update_wrapper(step, fn)

    @property
    def total(self) -> int:
        """Steps made, those since the last backward too."""
        return self.made + len(self._since or ())

    @property
    def whole(self) -> int | None:
        """The same; None where an optimizer has raised, and the parameters may be those of no step."""
        return self.total if self.mishap is None else None

    def alike(self, made: int = 0) -> None:
        """The ranks have the same parameters, those after so many steps."""
        self.made = made
        self.mishap = None
        self._since = None

    def __str__(self) -> str:
        why = "" if self.mishap is None else f", since its optimizer raised {self.mishap!r}"
        return f"{self.made} step{'s' * (self.made != 1)} made{why}"
