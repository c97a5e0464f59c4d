"""Means over an epoch and over all ranks: of losses, of what functions return, and torchmetrics' metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from aiodist.engine.state import State

LOSS = "loss"

MetricFunction = Callable[[Any, Any], "Tensor | float"]
"""Returns a number of one batch, of its output and target: the mean over its samples."""


@runtime_checkable
class MetricObject(Protocol):
    """One of torchmetrics' metrics, or what has the same: `_reductions` says how each state is reduced over ranks."""

    _reductions: Mapping[str, Callable[[Any], Any] | None]

    def update(self, *args: Any) -> None:  # noqa: ANN401
        """Take output and target of one batch."""

    def compute(self) -> Any:  # noqa: ANN401
        """Return the figure."""

    def reset(self) -> None:
        """Begin anew."""


Metric = MetricFunction | MetricObject


@dataclass(frozen=True)
class EpochFigures:
    """What one rank has measured so far; it is small, and travels between ranks as an object."""

    weight: float = 0.0
    """Of all batches."""
    sums: Mapping[str, float] = field(default_factory=dict)
    """By name, of the values of the batches, each times its weight."""
    states: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Of metrics that are objects, by name."""


class Meter:
    """Measures one epoch on this rank; `add` belongs to the thread that computes."""

    def __init__(self, metrics: Mapping[str, Metric], before: EpochFigures | None = None) -> None:
        """`before` is what was measured of this epoch before training was interrupted."""
        before = before or EpochFigures()
        self._functions = {name: m for name, m in metrics.items() if not isinstance(m, MetricObject)}
        self._objects = {name: deepcopy(m) for name, m in metrics.items() if isinstance(m, MetricObject)}
        for name, metric in self._objects.items():
            metric.reset()
            _set_states(metric, before.states.get(name, {}))
        self._weight = before.weight
        self._sums: dict[str, Any] = dict(before.sums)
        """Of Python numbers; of tensors where the values are on a device, which is not waited for."""

    def add(self, state: State) -> None:
        """Take the batch of `state`."""
        weight = 1.0 if state.weight is None else state.weight
        assert state.loss is not None
        with torch.no_grad():
            self._weight += weight
            self._add(LOSS, state.loss.detach(), weight)
            for name, function in self._functions.items():
                self._add(name, function(state.output, state.target), weight)
            for metric in self._objects.values():
                metric.update(_detached(state.output), state.target)

    def _add(self, name: str, value: Tensor | float, weight: float) -> None:
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"metric {name!r} is a tensor of shape {list(value.shape)}: expected one number a batch")
        if isinstance(value, Tensor) and value.is_cuda:
            self._sums[name] = self._sums.get(name, 0.0) + value.detach().double() * weight
        else:
            self._sums[name] = self._sums.get(name, 0.0) + float(value) * weight

    def figures(self) -> EpochFigures:
        """Return what was measured so far."""
        sums = {name: float(total) for name, total in self._sums.items()}
        states = {name: {key: getattr(m, key) for key in _reductions(m)} for name, m in self._objects.items()}
        return EpochFigures(self._weight, sums, cast("Mapping[str, Mapping[str, Any]]", _on_host(states)))

    def merged(self, figures: Sequence[EpochFigures]) -> dict[str, float]:
        """Return each mean, and the figure of each metric, over all ranks that `figures` are of."""
        weight = math.fsum(one.weight for one in figures)
        names = [LOSS, *self._functions]
        totals = {name: math.fsum(one.sums.get(name, 0.0) for one in figures) for name in names}
        means = {name: total / weight if weight else math.nan for name, total in totals.items()}
        for name, metric in self._objects.items():
            means[name] = _over_ranks(metric, [one.states[name] for one in figures])
        return means


def checked_metrics(metrics: Mapping[str, Metric] | None) -> dict[str, Metric]:
    """Return `metrics` if that is what they are; raise TypeError or ValueError."""
    found = dict(metrics or {})
    for name, metric in found.items():
        if not isinstance(name, str) or name == LOSS:
            raise ValueError(f"metric {name!r}: expected a name other than {LOSS!r}, which is that of the mean loss")
        if not callable(metric) or (hasattr(metric, "compute") and not isinstance(metric, MetricObject)):
            raise TypeError(
                f"metric {name!r} is {type(metric).__name__}: expected a function of output and target, or one of "
                "torchmetrics' metrics; give those of a MetricCollection by name, dict(collection.items())"
            )
    return found


def _reductions(metric: MetricObject) -> Mapping[str, Any]:
    """Return how each state of a torchmetrics metric is reduced over ranks."""
    return metric._reductions


def _over_ranks(metric: MetricObject, states: Sequence[Mapping[str, Any]]) -> float:
    """Return the figure of `metric` whose states are reduced over ranks, as torchmetrics reduces them."""
    whole = deepcopy(metric)
    whole.reset()
    reduced = {}
    for key, reduction in _reductions(metric).items():
        values = [state[key] for state in states]
        if isinstance(values[0], Tensor):
            together: Any = torch.stack(values)
        else:
            together = [item for value in values for item in value]
        reduced[key] = reduction(together) if reduction is not None and len(together) else together
    _set_states(whole, reduced)
    result = whole.compute()
    return float(result) if isinstance(result, Tensor) and result.numel() == 1 else result


def _set_states(metric: Any, states: Mapping[str, Any]) -> None:  # noqa: ANN401
    """Give `metric` these states, as if by an update; it is not to gather any by torch.distributed."""
    device = getattr(metric, "device", None)
    for key, value in states.items():
        setattr(metric, key, value.to(device) if isinstance(value, Tensor) else value)
    metric.sync_on_compute = False
    metric._update_count = max(1, getattr(metric, "_update_count", 0))


def _detached(output: Any) -> Any:  # noqa: ANN401
    return output.detach() if isinstance(output, Tensor) else output


def _on_host(state: Any) -> Any:  # noqa: ANN401
    if isinstance(state, Tensor):
        return state.detach().cpu()
    if isinstance(state, Mapping):
        return {key: _on_host(value) for key, value in state.items()}
    return [_on_host(value) for value in state] if isinstance(state, list) else state
