"""Means over an epoch and over all ranks, of losses and of what functions return; and how ranks exchange them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from aiodist.checkpoints.agreeing import exchange
from aiodist.communicator import Communicator
from aiodist.engine.state import State

T = TypeVar("T")

LOSS = "loss"
Metric = Callable[[Any, Any], "Tensor | float"]
"""Returns a number of one batch, of its output and target: the mean over its samples."""
Sums = tuple[float, dict[str, float]]
"""The weight of all batches, and by name the sum of their values, each times its weight."""


class Meter:
    """Measures one epoch on this rank; `add` belongs to the thread that computes."""

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self._metrics = metrics
        self._weight = 0.0
        self._sums: dict[str, Any] = {}
        """Of Python numbers; of tensors where the values are on a device, which is not waited for."""

    def add(self, state: State) -> None:
        """Take the batch of `state`."""
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
        """Return what was measured so far."""
        return self._weight, {name: float(total) for name, total in self._sums.items()}

    def means(self, by_rank: Sequence[Sums]) -> dict[str, float]:
        """Return each mean over all ranks that the sums are of."""
        weight = math.fsum(weight for weight, _ in by_rank)
        totals = {name: math.fsum(sums.get(name, 0.0) for _, sums in by_rank) for name in (LOSS, *self._metrics)}
        return {name: total / weight if weight else math.nan for name, total in totals.items()}


def checked_metrics(metrics: Mapping[str, Metric] | None) -> dict[str, Metric]:
    """Return `metrics` if that is what they are; raise TypeError or ValueError."""
    found = dict(metrics or {})
    for name, metric in found.items():
        if not isinstance(name, str) or name == LOSS:
            raise ValueError(f"metric {name!r}: expected a name other than {LOSS!r}, which is that of the mean loss")
        if not callable(metric) or hasattr(metric, "compute"):
            raise TypeError(
                f"metric {name!r} is {type(metric).__name__}: expected a function of output and target; what counts by "
                "itself, as torchmetrics' do, belongs in hooks"
            )
    return found


class Assembly:
    """The ranks of one engine; without a communicator there is no other one, and nothing is sent."""

    def __init__(self, base: Communicator | None) -> None:
        self._base = base
        self.comm: Communicator | None = None
        """The engine's own communicator, once it is open."""
        self.rank = 0 if base is None else base.rank
        self.size = 1 if base is None else base.size

    @property
    def stop_requested(self) -> bool:
        """Whether this rank was asked to stop, see `Communicator.stopping`."""
        return self._base is not None and self._base.parts.registry.stop_requested

    async def open(self) -> None:
        """Collective at the first call: all ranks get a duplicate of the communicator, which is the engine's own."""
        if self.comm is None and self._base is not None:
            self.comm = await self._base.dup()

    def abort(self, why: str) -> None:
        """Have all ranks hear that this one takes no part any more; the next training opens another communicator."""
        comm, self.comm = self.comm, None
        if comm is not None:
            comm.abort(f"rank {self.rank} {why}")

    async def exchange(self, said: T, failure: Exception | None = None) -> list[T]:
        """Return what all ranks say; raise `failure`, or RemoteError with that of another rank.

        Collective, one allgather of small objects.
        """
        return await exchange(self.comm, "this training", said, failure)
