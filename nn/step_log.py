"""Reports steps to a callback, such as a line for TensorBoard or Weights & Biases."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from torch import Tensor

from aiodist.types import check_int

Log = Callable[[int, dict[str, float]], object]
"""Callback with the number of a step, and values by name."""


class StepLog:
    """Calls a callback after every n-th step, with the loss and means since the last call."""

    def __init__(self, log: Log, every: int, waited: Callable[[], float]) -> None:
        """`waited` returns the seconds that all steps so far have waited. Raises TypeError or ValueError."""
        if not callable(log):
            raise TypeError(f"log is {type(log).__name__}: expected a function of a step and a dict of values")
        self._log = log
        self._every = check_int("log_every", every)
        self._waited = waited
        self._steps = 0
        self._since: tuple[float, float] | None = None

    def begin(self, *_: object) -> None:
        """Begin a step."""
        if self._since is None:
            self._since = perf_counter(), self._waited()

    def end(self, step: int, loss: Tensor) -> None:
        """End a step, and call the callback if it is due. Reading the loss of a CUDA device waits for the device."""
        self._steps += 1
        if step % self._every == 0 and self._since is not None:
            began, waited = self._since
            steps, self._steps, self._since = self._steps, 0, (perf_counter(), self._waited())
            seconds, waited = (self._since[0] - began) / steps, (self._since[1] - waited) / steps
            self._log(step, {"loss": float(loss), "seconds": seconds, "waited_seconds": waited})
