"""Pushes that begin in the backward pass: each gradient as soon as autograd has it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Self

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from aiodist.handles import Handle, Progress, gather


class BackwardPushes:
    """Pushes the gradients of a block's backward passes; leaving it waits until they are where `push` says."""

    def __init__(self, tensors: Sequence[Tensor], push: Callable[[Tensor], Handle[None]], progress: Progress) -> None:
        self._tensors = tensors
        self._push = push
        self._progress = progress
        self._hooks: list[RemovableHandle] = []
        self._pushes: list[Handle[None]] = []
        self._errors: list[Exception] = []

    async def __aenter__(self) -> Self:
        on_loop = self._progress.on_loop  # backward may run in any thread
        self._hooks = [
            t.register_post_accumulate_grad_hook(lambda t: on_loop(partial(self._begin, t))) for t in self._tensors
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        begun = asyncio.get_running_loop().create_future()  # what other threads left to the loop
        self._progress.post(partial(begun.set_result, None))
        await begun
        failed = error is not None or bool(self._errors)
        await gather(*self._pushes, return_exceptions=failed)  # the gradients are its pushes' until then
        if self._errors and error is None:
            raise self._errors[0]

    def _begin(self, t: Tensor) -> None:
        try:
            self._pushes.append(self._push(t))
        except Exception as error:  # noqa: BLE001  - backward must not be told of it; leaving the block is
            self._errors.append(error)
