"""One batch: loader, network, criterion, and the means of metrics."""

from __future__ import annotations

import math
from collections.abc import AsyncIterable, Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from aiodist.data import Prefetch, prefetch
from aiodist.engine.state import Hooks, State
from aiodist.handles import Progress
from aiodist.nn.compute import split_aux

LOSS = "loss"
Metric = Callable[[Any, Any], "Tensor | float"]
"""Returns a number of one batch, of its output and target: the mean over its samples."""
Sums = tuple[float, dict[str, float]]
"""The weight of all batches, and the weighted sum of each metric by name."""
Loader = Iterable[Any] | AsyncIterable[Any] | Prefetch[Any]
Criterion = Callable[[Any, Any], "Tensor | tuple[Tensor, Any]"]
"""Returns the loss of an output and its target, or `(loss, aux)`."""
Split = Callable[[Any], tuple[Any, Any]]
"""Returns input and target of a sample."""


class WithCriterion(nn.Module):
    """A module of a network and a criterion with parameters, so that one net trains both.

    ```python
    net = await DataParallel.create(WithCriterion(network, criterion), coll)
    engine = aiodist.Engine(net, torch.optim.SGD(net.parameters(), lr=0.1))
    ```
    `net(x)` returns the output of `network(x)`. Names of parameters begin with `network.` and `criterion.`.
    """

    def __init__(self, network: nn.Module, criterion: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.criterion = criterion

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the network."""
        return self.network(*args, **kwargs)


class Meter:
    """Measures one epoch on this rank; the compute thread calls `add`."""

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self._metrics = metrics
        self._weight = 0.0
        self._sums: dict[str, Any] = {}
        """Sums by name: Python numbers, or tensors for values on a device, so that the host does not wait."""

    def add(self, state: State) -> None:
        assert state.loss is not None
        weight = 1.0 if state.weight is None else state.weight
        with torch.no_grad():
            self._weight += weight
            self._add(LOSS, state.loss.detach(), weight)
            for name, metric in self._metrics.items():
                self._add(name, metric(state.output, state.target), weight)

    def _add(self, name: str, value: Tensor | float, weight: float) -> None:
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"metric {name!r} is a tensor of shape {list(value.shape)}: expected one number a batch")
        on_device = isinstance(value, Tensor) and value.is_cuda
        self._sums[name] = self._sums.get(name, 0.0) + (value.double() if on_device else float(value)) * weight  # type: ignore[union-attr]

    def sums(self) -> Sums:
        return self._weight, {name: float(total) for name, total in self._sums.items()}

    def means(self, by_rank: Sequence[Sums]) -> dict[str, float]:
        """Return the mean of each metric over all ranks."""
        weight = math.fsum(weight for weight, _ in by_rank)
        totals = {name: math.fsum(sums.get(name, 0.0) for _, sums in by_rank) for name in (LOSS, *self._metrics)}
        return {name: total / weight if weight else math.nan for name, total in totals.items()}


@dataclass(frozen=True)
class Model:
    """The checked arguments of an engine."""

    module: nn.Module
    """The module with all trained parameters."""
    network: Callable[..., Any]
    """Function that returns outputs."""
    criterion: Criterion | None
    split: Split
    metrics: Mapping[str, Metric]


@dataclass(frozen=True)
class Batch:
    """Computes the batch of `state`, on the compute thread."""

    model: Model
    state: State
    hooks: Hooks
    meter: Meter
    progress: Progress

    async def take(self, sample: Any) -> None:
        """Put the sample into the state, and call the hooks of "sample", on the loop."""
        state = self.state
        state.sample, state.weight, state.output, state.loss, state.aux = sample, None, None, None, None
        await self.hooks.call("sample", state)
        state.input, state.target = self.model.split(state.sample)
        if state.weight is None:
            state.weight = weight_of(state.sample)

    def __call__(self) -> Tensor:
        state, criterion = self.state, self.model.criterion
        state.output = _applied(self.model.network, state.input)
        self.hooks.call_on_thread("forward", state, self.progress)
        returned = state.output if criterion is None else criterion(state.output, state.target)
        state.loss, state.aux = split_aux(returned)
        self.hooks.call_on_thread("criterion", state, self.progress)
        if not isinstance(state.loss, Tensor) or state.loss.numel() != 1:
            what = f"tensor of shape {list(state.loss.shape)}" if isinstance(state.loss, Tensor) else type(state.loss)
            raise TypeError(f"the loss is a {what}: expected a tensor of one element, or (loss, aux)")
        self.meter.add(state)
        return state.loss


def checked_metrics(metrics: Mapping[str, Metric] | None) -> dict[str, Metric]:
    """Return `metrics` as a dict; raise TypeError or ValueError for a wrong name or function."""
    found = dict(metrics or {})
    for name, metric in found.items():
        if not isinstance(name, str) or name == LOSS:
            raise ValueError(f"metric {name!r}: expected a name other than {LOSS!r}, the name of the mean loss")
        if not callable(metric) or hasattr(metric, "compute"):
            raise TypeError(
                f"metric {name!r} is {type(metric).__name__}: expected a function of output and target; a metric with "
                "a state, as of torchmetrics, belongs in hooks"
            )
    return found


def model_of(
    net: Any,
    module: nn.Module,
    criterion: Criterion | None,
    metrics: dict[str, Metric],
    split: Split | None,
    per_rank: Iterable[Tensor] = (),
) -> Model:
    """Return the arguments of an engine, checked; `net` is called, and trains `module`.

    Each rank keeps the parameters `per_rank` for itself.
    """
    if isinstance(module, WithCriterion):
        if criterion is not None:
            raise ValueError("the net has a criterion, and another one is given: expected one of them")
        criterion = module.criterion
    if criterion is not None and not callable(criterion):
        raise TypeError(f"criterion is {type(criterion).__name__}: expected a function of output and target")
    if isinstance(criterion, nn.Module):
        known = {id(p) for p in (*module.parameters(), *per_rank)}
        own = [name for name, p in criterion.named_parameters() if p.requires_grad and id(p) not in known]
        if own:
            raise ValueError(
                f"the criterion has a parameter {own[0]!r} that the net does not train: expected a net of "
                "aiodist.engine.WithCriterion(network, criterion)"
            )
    if metrics and criterion is None and split is None:
        raise ValueError("metrics without a criterion: expected `split=`, which returns the target")
    return Model(
        module, net, criterion, split or (_pair if criterion is not None else lambda sample: (sample, None)), metrics
    )


def prefetched(loader: Loader) -> Prefetch[Any]:
    """Return `loader` as a `Prefetch`."""
    return loader if isinstance(loader, Prefetch) else prefetch(loader)


def length_of(loader: Loader) -> int | None:
    """Return the number of batches, or None if the loader does not know it."""
    try:
        return len(cast(Sized, loader))
    except TypeError:
        return None


def source_of(loader: Loader) -> Any:
    """Return the source of the loader's batches."""
    return loader.source if isinstance(loader, Prefetch) else loader


def set_epoch(loader: Loader, epoch: int) -> None:
    """Call `set_epoch` of the loader, its sampler and its dataset, if they have it, with the epoch from 0 on."""
    source = source_of(loader)
    owners: list[Any] = [source, *(getattr(source, name, None) for name in ("sampler", "batch_sampler", "dataset"))]
    owners.append(getattr(getattr(source, "batch_sampler", None), "sampler", None))
    for owner in {id(owner): owner for owner in owners if hasattr(owner, "set_epoch")}.values():
        owner.set_epoch(epoch)


def _pair(sample: Any) -> tuple[Any, Any]:
    """Return the sample, a pair of input and target; raise TypeError for another one."""
    if not isinstance(sample, (tuple, list)) or len(sample) != 2:
        what = f"{type(sample).__name__} of {len(sample)}" if hasattr(sample, "__len__") else type(sample).__name__
        raise TypeError(f"the sample is a {what}: expected a pair of input and target, or `split=` of the engine")
    return sample[0], sample[1]


def _applied(network: Callable[..., Any], given: Any) -> Any:
    if isinstance(given, (tuple, list)):
        return network(*given)
    return network(**given) if isinstance(given, Mapping) else network(given)


def weight_of(sample: Any) -> float:
    """Return the number of samples in a batch: the first dimension of its first tensor, or 1 without one.

    >>> weight_of({"x": [Tensor(3, 2)], "y": Tensor(5)})
    3.0
    """
    first = next(_tensors(sample), None)
    return float(first.shape[0]) if first is not None and first.ndim else 1.0


def _tensors(sample: Any) -> Iterator[Tensor]:
    if isinstance(sample, Tensor):
        yield sample
    elif isinstance(sample, (tuple, list, Mapping)):
        for value in sample.values() if isinstance(sample, Mapping) else sample:
            yield from _tensors(value)
