"""Kinds of parts, which `load` compares before it changes anything."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def name_of(number: int) -> str:
    """Return the name of a part in a checkpoint, with which the names of its tensors begin."""
    return "net" if number == 0 else f"part{number}"


def kind_of(part: object) -> str:
    """Return the kind of a part, or of an object of a rank's own: only a part of the same kind takes its state.

    An attribute `checkpoint_kind` of the part names it. Else a net and any `torch.nn.Module` are "module", since their
    names and shapes say more than their class; all else has the name of its class. A subclass is another kind: AdamW of
    torch is a subclass of Adam. A wrapper of an optimizer, or of several schedulers, names these too.
    """
    named = getattr(part, "checkpoint_kind", None)
    if isinstance(named, str):
        return named
    if isinstance(part, nn.Module):
        return "module"
    if isinstance(part, torch.Generator | random.Random):
        return f"{type(part).__module__}.{type(part).__name__}".removeprefix("torch._C.")
    if isinstance(part, np.random.Generator):
        return f"numpy.{type(part).__name__} of {type(part.bit_generator).__name__}"
    if isinstance(part, np.random.RandomState):
        return f"numpy.RandomState of {part.get_state(legacy=False)['bit_generator']}"
    name = type(part).__name__
    inner = getattr(part, "optimizer", None) if isinstance(part, Optimizer) else None
    wrapped = [inner] if isinstance(inner, Optimizer) else getattr(part, "_schedulers", ())
    return f"{name} of {', '.join(map(kind_of, wrapped))}" if isinstance(wrapped, list | tuple) and wrapped else name


def kinds_differ(saved: Sequence[str], parts: Sequence[str], *, own: bool = False) -> str | None:
    """Return in words how the kinds of a checkpoint differ from those to load, or None if they are equal."""
    if saved == parts:
        return None
    names = [f"per_rank[{i}]" if own else name_of(i) for i in range(max(len(saved), len(parts)))]
    which = "objects of `per_rank`" if own else "parts"
    order = f"expected the {which} in the order of the save, {_listed(names, saved)}"
    for name, was, now in zip(names, saved, parts, strict=False):
        if was != now:
            return f"{name} is {now}, and the checkpoint has {was} there: {order}"
    what = "objects of a rank's own" if own else "parts"
    return f"it has {len(saved)} {what}, and {len(parts)} are to be loaded: {order}"


def _listed(names: Sequence[str], kinds: Sequence[str]) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in zip(names, kinds, strict=False)) or "none"


def misfit(part: object, state: Any) -> str | None:  # noqa: ANN401
    """Return in words why `part` would not take `state`, of its kind; None if nothing speaks against it.

    A module and an optimizer of torch would have changed in part when they raise; one with hooks or loading of its own
    may take other names or groups.
    """
    if isinstance(part, Optimizer):
        return _groups_differ(part, state) if _plain_optimizer(part) else None
    module = part if isinstance(part, nn.Module) or kind_of(part) != "module" else getattr(part, "module", None)
    if not isinstance(module, nn.Module) or not all(map(_plain, module.modules())):
        return None
    mine: Mapping[str, Any] = module.state_dict()
    for text, names in (("lacks", mine.keys() - state.keys()), ("has", state.keys() - mine.keys())):
        if names:
            return f"the checkpoint {text} {_some(names)}: expected a module with the same names"
    for name, t in mine.items():
        if isinstance(t, Tensor) and state[name].shape != t.shape:
            return f"{name!r} has shape {list(state[name].shape)}: expected {list(t.shape)}"
    return None


def _groups_differ(opt: Optimizer, state: Any) -> str | None:  # noqa: ANN401
    seen, here = ([len(g["params"]) for g in groups] for groups in (state["param_groups"], opt.param_groups))
    return None if seen == here else f"the checkpoint has groups of {seen} parameters: expected {here}"


def _plain(module: nn.Module) -> bool:
    """Return True if a module gives and takes its state as torch does, by the names of its parameters and buffers."""
    methods = (type(module)._load_from_state_dict, type(module).load_state_dict, type(module).state_dict)
    loading = (module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks)
    hooks = (*loading, module._state_dict_hooks, module._state_dict_pre_hooks)
    return not any(hooks) and all(method.__module__.startswith("torch.") for method in methods)


def _plain_optimizer(opt: Optimizer) -> bool:
    """Return True if an optimizer takes its state as torch does."""
    return type(opt).load_state_dict is Optimizer.load_state_dict and not opt._optimizer_load_state_dict_pre_hooks


def _some(names: Iterable[str]) -> str:
    found = sorted(names)
    return ", ".join(map(repr, found[:4])) + f", … ({len(found)} names)" * (len(found) > 4)
