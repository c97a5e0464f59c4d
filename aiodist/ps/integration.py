"""What `integrate` waits for: reads that are on their way, then the user's function for each tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from aiodist.errors import OperationTimeout
from aiodist.handles import Handle

__all__ = ["Integration"]


class Integration:
    """Settles its handle on the loop, when everything is there and the function was called."""

    def __init__(
        self,
        handle: Handle[Any],
        fn: Callable[[Tensor, Tensor], object],
        tensors: Sequence[Tensor],
        fetched: Sequence[tuple[Handle[Any], int | None]],
        *,
        single: bool,
    ) -> None:
        """`fetched` has for each tensor the handle of a pull, and which of its results, None for the only one."""
        self._handle = handle
        self._fn = fn
        self._tensors = tensors
        self._fetched = fetched
        self._single = single
        self._missing = {id(pull): pull for pull, _ in fetched}

    def begin(self) -> None:
        """Wait for what is missing."""
        pulls = list(self._missing.values())
        for pull in pulls:
            if pull.done():
                self._missing.pop(id(pull))
            else:
                pull.add_waiter(self)
        if not self._missing:
            self._finish()

    def wake(self, handle: Handle[Any], late: OperationTimeout | None, /) -> None:
        """One of the reads is over; or late, and goes on."""
        if late is not None and not handle.done():
            handle.add_waiter(self)
            return
        self._missing.pop(id(handle), None)
        if not self._missing:
            self._finish()

    def _finish(self) -> None:
        handle = self._handle
        try:
            with torch.no_grad():
                for mine, (pull, i) in zip(self._tensors, self._fetched, strict=True):
                    result = pull.result()
                    self._fn(mine, result if i is None else result[i])
        except Exception as error:  # noqa: BLE001  - it belongs to the task that awaits the handle
            handle.reject(error)
            return
        versions = [pull.version for pull, _ in self._fetched if pull.version is not None]
        handle.version = min(versions, default=None)
        handle.resolve(self._tensors[0] if self._single else list(self._tensors))
