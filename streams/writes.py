"""Version counters and checks for the tensors that aiodist writes under autograd."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C import _increment_version as increment_version  # takes a third of the public function's time

__all__ = ["check_writable", "check_written", "increment_version"]


def check_writable(t: Tensor, call: object, name: str = "") -> None:
    """Raise RuntimeError if `call` would write into `t`, called `name`, while autograd records operations on it.

    torch refuses the same for a leaf that requires grad, and for a view of it that was made under `no_grad`. It records
    its own operations on a tensor with a history; communication is not recorded, so `t` would have a wrong gradient.
    """
    if not (t.requires_grad and torch.is_grad_enabled()):
        return
    seen = "a leaf that requires grad" if t.grad_fn is None else f"a result of {t.grad_fn.name()}"
    raise RuntimeError(
        f"{call} would write into {name or 'a tensor'}, {seen}, which autograd does not record: give it t.detach() or "
        "an out= that requires no grad, or call it under torch.no_grad(); aiodist.nn.functional has collectives that "
        "autograd records"
    )


def check_written(ts: object, call: str, name: str = "t") -> None:
    """Raise what `check_writable` raises for a tensor, or one of a list, that `call` writes on some ranks.

    Ranks that only read it refuse it too: the call is the same line on all of them, and refuses it on all or on none.
    """
    for i, t in enumerate(ts if isinstance(ts, (list, tuple)) else (ts,)):
        if isinstance(t, Tensor) and t.requires_grad:
            check_writable(t, call, name if t is ts else f"{name}[{i}]")
