"""Version counters of the tensors that aiodist writes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C import _increment_version as increment_version  # takes a third of the public function's time

__all__ = ["check_writable", "check_written", "increment_version"]


def check_writable(t: Tensor, call: object, name: str = "") -> None:
    """Raise RuntimeError if `call` would write into `t`, called `name`, while autograd records operations on it.

    Torch too refuses to write into a leaf that requires grad, and into a view of a leaf that was made under `no_grad`.
    Autograd records torch's operations on a tensor with a history, but no communication. So `t` would have a wrong
    gradient.
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
    """Apply `check_writable` to a tensor, or to each one of a list, that `call` writes on some ranks.

    Ranks that only read the tensor refuse it too. So the call, the same line on all ranks, raises on all or on none.
    """
    for i, t in enumerate(ts if isinstance(ts, (list, tuple)) else (ts,)):
        if isinstance(t, Tensor) and t.requires_grad:
            check_writable(t, call, name if t is ts else f"{name}[{i}]")
