"""What an engine was made for, and the forward pass of one batch."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Iterable, Mapping, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from aiodist.checkpoints.pieces import Redivided
from aiodist.data import Prefetch, prefetch
from aiodist.engine.hooks import Hooks
from aiodist.engine.meters import Meter, Metric
from aiodist.engine.samples import Split, applied, weight_of
from aiodist.engine.saving import Saving
from aiodist.engine.state import State
from aiodist.handles import Progress

Loader = Iterable[Any] | AsyncIterable[Any] | Prefetch[Any]


@dataclass(frozen=True)
class LoopPlan:
    """The arguments of an engine, checked."""

    module: nn.Module
    """All that is trained."""
    network: Callable[..., Any]
    """Returns outputs."""
    criterion: Callable[[Any, Any], Tensor] | None
    split: Split
    metrics: Mapping[str, Metric]
    uneven: bool | None = None
    progress: bool = True
    debug: bool = False
    dynamic: bool = True
    profile: tuple[int, int] | None = None
    traces: Path = Path("traces")
    saving: Saving | None = None


@dataclass(frozen=True)
class Batch:
    """Computes the batch that `state` has, on the thread that computes."""

    plan: LoopPlan
    state: State
    hooks: Hooks
    meter: Meter
    progress: Progress

    def __call__(self) -> Tensor:
        """Return its loss."""
        state = self.state
        state.output = applied(self.plan.network, state.input)
        self.hooks.call_on_thread("forward", state, self.progress)
        criterion = self.plan.criterion
        state.loss = state.output if criterion is None else criterion(state.output, state.target)
        self.hooks.call_on_thread("criterion", state, self.progress)
        if not isinstance(state.loss, Tensor) or state.loss.numel() != 1:
            what = f"tensor of shape {list(state.loss.shape)}" if isinstance(state.loss, Tensor) else type(state.loss)
            raise TypeError(f"the loss is a {what}: expected a tensor of one element")
        self.meter.add(state)
        return state.loss


async def take(sample: Any, plan: LoopPlan, state: State, hooks: Hooks) -> None:  # noqa: ANN401
    """Have `state` hold the sample, as the hooks of "sample" leave it."""
    state.sample, state.weight, state.output, state.loss = sample, None, None, None
    await hooks.call("sample", state)
    state.input, state.target = plan.split(state.sample)
    if state.weight is None:
        state.weight = weight_of(state.sample)


def prefetched(loader: Loader) -> Prefetch[Any]:
    """Return what makes passes over `loader`."""
    return loader if isinstance(loader, Prefetch) else prefetch(loader)


def queue_of(loader: Loader) -> Redivided | None:
    """Return the loader if it knows its place by itself, and those of other ranks, such as a `data.ShardQueue`."""
    source = loader.source if isinstance(loader, Prefetch) else loader
    return source if isinstance(source, Redivided) else None


def length_of(loader: Loader) -> int | None:
    """Return how many batches it has; None where it does not know."""
    try:
        return len(cast(Sized, loader))
    except TypeError:
        return None


def set_epoch(loader: Loader, epoch: int) -> None:
    """Tell the loader, or its sampler or dataset, which epoch begins, from 0 on, where they have `set_epoch`."""
    source = loader.source if isinstance(loader, Prefetch) else loader
    owners: list[Any] = [source, *(getattr(source, name, None) for name in ("sampler", "batch_sampler", "dataset"))]
    owners.append(getattr(getattr(source, "batch_sampler", None), "sampler", None))
    told: list[object] = []
    for owner in owners:
        if hasattr(owner, "set_epoch") and not any(owner is other for other in told):
            told.append(owner)
            owner.set_epoch(epoch)
