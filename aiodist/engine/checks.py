"""Optional checks: values that are not finite, ranks that differ, changed graphs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from aiodist.control import disagreement
from aiodist.engine.state import State
from aiodist.errors import MismatchError
from aiodist.nn import DataParallel
from aiodist.nn.data_parallel import reducer_of
from aiodist.nn.per_rank import Shared


def _place(state: State) -> str:
    return f"rank {state.rank}, epoch {state.epoch}, step {state.step}"


# --- values that are not finite ---------------------------------------------------------------------------------------


def check_loss(state: State) -> None:
    """Raise FloatingPointError unless the loss is finite."""
    assert state.loss is not None
    if not torch.isfinite(state.loss.detach()).all():
        raise FloatingPointError(f"the loss is {state.loss.detach().tolist()}: {_place(state)}")


def check_parameters(module: nn.Module, state: State) -> None:
    """Raise FloatingPointError unless all parameters are finite."""
    for name, parameter in module.named_parameters():
        _check_finite(f"parameter {name!r} after the update", state, parameter)


@contextmanager
def checked_gradients(module: nn.Module, state: State) -> Iterator[None]:
    """Raise FloatingPointError in each backward in this block that makes a gradient that is not finite.

    These are the gradients of this rank, before their reduction. Parameters that are frozen now are not checked.
    """
    with ExitStack() as stack:
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                what = f"the gradient of {name!r}"
                stack.callback(parameter.register_hook(partial(_check_finite, what, state)).remove)
        yield


def _check_finite(what: str, state: State, t: Tensor) -> None:
    t = (t.coalesce().values() if t.is_sparse else t).detach()
    finite = torch.isfinite(t)
    if not finite.all():
        bad = t[~finite]
        raise FloatingPointError(
            f"{what} has {bad.numel()} of {t.numel()} elements that are not finite, the first is "
            f"{bad.flatten()[0].item()}: {_place(state)}"
        )


# --- ranks that differ ------------------------------------------------------------------------------------------------


def check_same_epoch(places: Sequence[tuple[int, int]]) -> None:
    """Raise MismatchError unless all ranks begin the same epoch of the same number of epochs, a pair in `places`."""
    if any(place != places[0] for place in places):
        text = disagreement("the next epoch", [f"epoch {done + 1} of {epochs}" for done, epochs in places])
        raise MismatchError(f"{text}; expected the same epochs= on all, and a state that all have loaded")


def fingerprints(module: nn.Module | Shared) -> list[int]:
    """Return a hash of all bits of each parameter."""
    on_host = (p.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data for p in module.parameters())
    return [int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") for data in on_host]


def check_alike(module: nn.Module | Shared, by_rank: Sequence[Sequence[int]], state: State) -> None:
    """Raise MismatchError with the first parameter that differs, unless all ranks have the same `fingerprints`."""
    names = [name for name, _ in module.named_parameters()]
    apart = [(name, hashes) for name, *hashes in zip(names, *by_rank, strict=False) if len(set(hashes)) > 1]
    if not apart:
        return
    name, hashes = apart[0]
    more = f" and on {len(apart) - 1} more parameters" if len(apart) > 1 else ""
    what = f"parameter {name!r}{more} after step {state.step} of epoch {state.epoch}"
    raise MismatchError(disagreement(what, [f"hash {value:016x}" for value in hashes]), rank=state.rank)


# --- a graph that changes ---------------------------------------------------------------------------------------------


def check_reduced(net: DataParallel) -> None:
    """Raise RuntimeError if the module has a new parameter, which the net does not reduce."""
    known = {id(slot.parameter) for slot in reducer_of(net).slots}
    new = [name for name, p in net.shared.named_parameters() if p.requires_grad and id(p) not in known]
    if new:
        raise RuntimeError(
            f"parameter {new[0]!r} is not the one that the net was created with, so its gradients would not be "
            "reduced: change it in place, or make a new net and optimizer"
        )


class GraphCheck:
    """Compares the graph of each step with that of the first one, on the compute thread."""

    def __init__(self, module: nn.Module) -> None:
        self._names = {id(p): name for name, p in module.named_parameters()}
        self._first: list[str] | None = None

    def __call__(self, state: State) -> None:
        """Raise RuntimeError if the graph of this loss differs. Costs about 1 us for each node."""
        assert state.loss is not None
        seen = list(_nodes(state.loss, self._names))
        if self._first is None:
            self._first = seen
        elif seen != self._first:
            raise RuntimeError(
                f"the graph of step {state.step} differs from that of the first step: {_difference(self._first, seen)} "
                f"({_place(state)}); expected the same in every step, since the engine has dynamic=False"
            )


def _difference(first: Sequence[str], seen: Sequence[str]) -> str:
    for what, these, those in (("does not use", first, seen), ("now uses", seen, first)):
        found = [name for name in these if name[0] == "'" and name not in those]
        if found:
            return f"it {what} parameter {found[0]}"
    for number, (before, now) in enumerate(zip(first, seen, strict=False)):
        if before != now:
            return f"node {number}, counted from the loss, is {now} instead of {before}"
    return f"it has {len(seen)} nodes instead of {len(first)}"


def _nodes(loss: Tensor, names: Mapping[int, str]) -> Iterator[str]:
    """Yield the kind of each node, and the name of each parameter in quotes, each once and in the same order."""
    seen: set[object] = set()
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        yield repr(names[id(leaf)]) if id(leaf) in names else node.name()
        waiting += [before for before, _ in node.next_functions]
