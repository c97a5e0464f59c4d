"""Pushes in backward passes: `BackwardPushes`, and `Embedding`, a layer whose rows are on the servers."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._C import _current_graph_task_id
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from aiodist.handles import Handle, Progress, gather, internals
from aiodist.ps.rows import GroupedIds
from aiodist.ps.table import Table


class BackwardPushes:
    """Pushes the gradients of the backward passes in a block. The end of the block waits for the pushes."""

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
        begun = asyncio.get_running_loop().create_future()  # done after earlier calls of other threads
        self._progress.post(partial(begun.set_result, None))
        await begun
        failed = error is not None or bool(self._errors)
        await gather(*self._pushes, return_exceptions=failed)
        if self._errors and error is None:
            raise self._errors[0]

    def _begin(self, t: Tensor) -> None:
        try:
            self._pushes.append(self._push(t))
        except Exception as error:  # noqa: BLE001  - raised at the end of the block, not in backward
            self._errors.append(error)


_LOOK_SECONDS = 1.0


@dataclass(eq=False, slots=True, weakref_slot=True)
class _Batch:
    """A prefetched batch."""

    steps: int
    """Number of steps that its rows must include."""


@dataclass(eq=False, slots=True)
class _Fetch:
    """A pull of the rows of one tensor of ids. `batch` is None if no push follows."""

    chosen: GroupedIds
    batch: _Batch | None
    issued: Future[Handle[Tensor]] = field(default_factory=Future)

    @property
    def came(self) -> bool:
        if not self.issued.done() or self.issued.exception() is not None:
            return False
        handle = self.issued.result()
        return handle.done() and internals.error_of(handle) is None


class Embedding(nn.Module):
    """A layer as `nn.Embedding`, whose rows are on the servers: ids of any shape give `(*ids.shape, dim)`.

    ```python
    words = Embedding(await ps.embedding("words", 64, optimizer=Adagrad(lr=0.1)))
    model = torch.nn.Sequential(words, torch.nn.Flatten(), torch.nn.Linear(8 * 64, 2))
    net = await DataParallel.create(model, coll)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)  # the dense layers' optimizer
    ahead = lambda batch: (words.prefetch(batch[0]), batch[1])  # asks for the rows of a batch while others train
    async with aiodist.data.prefetch(loader, transform=ahead) as batches:
        async for ids, y in batches:  # (n, 8), (n,)
            loss = await net.step(lambda: loss_fn(net(ids), y), opt)
    ```
    `forward` takes the rows that `prefetch` has requested for the same tensor of ids, or pulls them and waits. After
    each backward pass the gradient of the rows is pushed: one push, even if the pass used the layer several times (see
    `accumulating` too), and none in `eval` mode or without a graph. A loop need not wait for pushes, since a later
    forward or `ps.sync()` raises the error of a push.

    Under `Synchronous` the rows of a step have the pushes of all workers' earlier steps, so training is that of one
    process on the joined batch. Early requests for rows are answered after the last of these steps. Under other
    consistencies the present rows are sent. All workers must make equally many backward passes that use the layer.

    The servers have the rows, which are no parameters of the layer, and not in its `state_dict`. A scaled loss scales
    the pushed gradient. `forward` and backward run on a compute thread, as in `net.step` and `net.submit`, or on any
    thread except the loop's.

    Raises TypeError unless `table` is a `Table`. `forward` raises as `Table.pull`, and RuntimeError on the loop's
    thread, which it would block.
    """

    def __init__(self, table: Table) -> None:
        super().__init__()
        if not isinstance(table, Table):
            raise TypeError(f"table is {type(table).__name__}: expected what `await ps.embedding(...)` returns")
        self.table = table
        self._lock = threading.Lock()
        self._fetches = WeakTensorKeyDictionary()
        self._batches: weakref.WeakSet[_Batch] = weakref.WeakSet()
        """Prefetched batches that were not pushed yet."""
        self._steps = 0
        """Number of pushes that backward passes have begun."""
        self._first_version = 0
        """Version of the table before the first of these pushes, as far as known."""
        self._backward = -1
        """Autograd's number of the backward pass of the gradients."""
        self._gradients: list[tuple[_Fetch, Tensor]] = []
        self._held: list[tuple[_Fetch, Tensor]] = []
        """Gradients of finished passes."""
        self._accumulates = False
        self._pushes: deque[Handle[None]] = deque()
        self._error: Exception | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Embedding:
        """Return another layer of the same table: a copy of a model, as for an average of its weights, shares it."""
        return type(self)(self.table).train(self.training)

    def extra_repr(self) -> str:
        return repr(self.table)

    def prefetch(self, *ids: Tensor) -> Any:  # noqa: ANN401
        """Ask for the rows of the next batch, and return its ids: the tensor, or a tuple of those that were given.

        From any thread, as in a `transform` of `aiodist.data.prefetch` with one worker. Several tensors of ids are of
        one batch, and its backward pushes once. Raises as `Table.pull`. Cost: that of a pull.
        """
        groups = [self.table.group(one) for one in ids]
        with self._lock:
            batch = None
            if self.training and torch.is_grad_enabled():
                batch = _Batch(self._steps + len(self._batches))
                self._batches.add(batch)
            fetches = [_Fetch(group, batch) for group in groups]
            self._fetches.update(zip(ids, fetches, strict=True))
        at_least = self._first_version + batch.steps if batch is not None and self.table.in_step else 0
        for fetch in fetches:
            self._issue(fetch, at_least)
        return ids[0] if len(ids) == 1 else ids

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows of `ids`, `(*ids.shape, dim)`."""
        self._check()
        fetch, rows = self._rows(ids)
        places = fetch.chosen.places.view(ids.shape)
        if self.training and torch.is_grad_enabled():
            rows = rows.detach().requires_grad_()
            rows.register_post_accumulate_grad_hook(partial(self._ready, fetch))
        return F.embedding(places, rows)

    def _rows(self, ids: Tensor) -> tuple[_Fetch, Tensor]:
        """Return the prefetched rows, or pull if there are none, or if they are too old."""
        with self._lock:
            fetch = self._fetches.pop(ids, None)
        # Else they wait for steps which this rank has not made: earlier batches had no backward.
        if fetch is not None and (fetch.batch is None or fetch.came or fetch.batch.steps <= self._steps):
            rows, version = self._wait(fetch)
            if not self._is_too_old(version):
                return fetch, rows
        fetch = _Fetch(self.table.group(ids), None) if fetch is None else _Fetch(fetch.chosen, fetch.batch)
        self._issue(fetch, 0)
        rows, version = self._wait(fetch)
        self._is_too_old(version)  # updates the first version
        return fetch, rows

    def _is_too_old(self, version: int | None) -> bool:
        """Return True if rows of this version lack pushes of this rank."""
        if version is None or not self.table.in_step:
            return False
        with self._lock:  # no read sees more steps than this rank has begun
            self._first_version = max(self._first_version, version - self._steps)
            return version < self._first_version + self._steps

    def _issue(self, fetch: _Fetch, at_least: int) -> None:
        """Pull on the loop's thread."""

        def pull() -> None:
            try:
                fetch.issued.set_result(self.table.pull_grouped(fetch.chosen, at_least=at_least).detach())
            except Exception as error:  # noqa: BLE001  - raised where the rows are taken
                fetch.issued.set_exception(error)

        self.table.progress.on_loop(pull)

    def _wait(self, fetch: _Fetch) -> tuple[Tensor, int | None]:
        progress = self.table.progress
        if progress.owns_thread() and not (fetch.issued.done() and fetch.issued.result().done()):
            raise RuntimeError(
                f"the rows of {self.table.name!r} are not there, and to wait for them would block the event loop: "
                "call the model on a compute thread, as net.step and net.submit do"
            )
        while True:
            try:
                handle = fetch.issued.result(_LOOK_SECONDS)
                break
            except TimeoutError:
                if fetch.issued.done() or progress.loop.is_closed():
                    raise
        with progress.waiting():
            if not internals.block_unless(handle, partial(_is_pointless, handle, progress.loop)):
                if progress.loop.is_closed():
                    raise RuntimeError(f"the event loop was closed while {handle} was in flight")
                handle.wait()  # tells who is late
        return handle.result(), handle.version

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Return a block whose backward passes are one push, of the sum of their gradients, at its end.

        ```python
        with words.accumulating():
            await net.step([first, second], opt)
        ```
        Raises RuntimeError for a block in another. When the block raises, nothing is pushed.
        """
        if self._accumulates:
            raise RuntimeError("accumulating() in another such block: expected one")
        self._accumulates = True
        try:
            yield
            if self._held:
                self._push_held()
        finally:
            self._accumulates, self._held = False, []

    def _ready(self, fetch: _Fetch, rows: Tensor) -> None:
        """Take the gradient of these rows in a backward pass."""
        gradient, rows.grad = rows.grad, None
        assert gradient is not None
        backward = _current_graph_task_id()
        if backward != self._backward:  # what another has left, it left when it raised
            self._backward, self._gradients = backward, []
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_over)
        self._gradients.append((fetch, gradient))

    def _backward_over(self) -> None:
        """Push the gradients of one backward pass, unless a block accumulates them."""
        self._held += self._gradients
        self._gradients = []
        if not self._accumulates:
            self._push_held()

    def _push_held(self) -> None:
        gradients, self._held = self._held, []
        (fetch, values), *others = gradients
        chosen = fetch.chosen
        if others:
            with torch.no_grad():
                chosen = self.table.group(torch.cat([fetch.chosen.ids for fetch, _ in gradients]))
                values = chosen.summed(torch.cat([each for _, each in gradients]))
        with self._lock:
            self._steps += 1
            for fetch, _ in gradients:
                if fetch.batch is not None:
                    self._batches.discard(fetch.batch)
        self.table.progress.on_loop(partial(self._push, chosen, values))

    def _push(self, chosen: GroupedIds, values: Tensor) -> None:
        try:
            self._pushes.append(self.table.push_grouped(chosen, values).detach())
        except Exception as error:  # noqa: BLE001  - raised by the next forward
            self._error = self._error or error

    def _check(self) -> None:
        """Raise the error of a failed push, and forget successful pushes."""
        while self._pushes and self._pushes[0].done():
            self._pushes.popleft().result()
        if self._error is not None:
            error, self._error = self._error, None
            raise error


def _is_pointless(handle: Handle[Any], loop: asyncio.AbstractEventLoop) -> bool:
    """Return True if a thread must stop its wait for `handle`: the loop is closed, or the deadline has passed."""
    left = internals.seconds_left(handle)
    return loop.is_closed() or (left is not None and left <= 0)
