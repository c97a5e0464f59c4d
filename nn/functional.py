"""Collectives with gradients: the backward of each is its dual.

The objective is the sum of the losses of all ranks. So the gradient of a rank's input is the sum over the ranks that
used it:

| forward | backward |
|---|---|
| allreduce (sum, mean), broadcast | allreduce (sum, mean), which counts at the root |
| allgather | reduce_scatter (sum) |
| reduce_scatter (sum, mean) | allgather |
| alltoall | alltoall, in the other direction |

Each call returns a handle of the result, in new memory; the input stays as it is. A coroutine awaits the handle; a
module on the compute thread of a net calls `handle.wait()`. Backward issues its collectives and waits for them in its
own thread, so while gradients are on `coll` must be a `dup(thread=True)`, which no other code uses. The result then
requires a gradient on every rank, so that all ranks take part in backward, in the reverse order of the calls. The loss
of every rank has to depend on every result, and one thread of each rank makes all calls.

Backward raises `RuntimeError` on the loop's thread, which it would block, and the errors of its collectives. Backward
costs as much as its collective, and can be differentiated again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from types import CodeType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import Function

from aiodist.communicator import Communicator, parts_of
from aiodist.communicator.arguments import block_of, check_rank, check_sizes
from aiodist.handles import Handle
from aiodist.handles.origin import whence
from aiodist.streams import OnStream
from aiodist.types import SumOrMean, sum_or_mean

T = TypeVar("T")
Line = tuple[CodeType, int]
"""Code and instruction of a line of the program, the fields of an `Origin`."""


def allreduce(t: Tensor, coll: Communicator, op: SumOrMean = "sum") -> Handle[Tensor]:
    """Return a handle of the elementwise sum of `t` over all ranks, or of the mean.

    Args:
        t: A tensor of the same shape on all ranks; it stays as it is.
        coll: The ranks that take part; a `dup(thread=True)` while gradients are on.
        op: "sum" or "mean" (or "avg"), which have a gradient.

    Raises:
        ValueError: For another `op`.
        RuntimeError: If `coll` is an ordinary communicator while gradients are on.

    Example:
        ```python
        side = await coll.dup(thread=True)
        t = torch.ones(3, requires_grad=True)
        loss = (await nn.functional.allreduce(t, side)).square().sum()
        await asyncio.to_thread(loss.backward)
        ```

    """
    op = sum_or_mean(op)
    return _issue(
        t, coll, t.shape, lambda x, out: coll.allreduce(x, op, out=out), lambda grad: allreduce(grad, coll, op)
    )


def broadcast(t: Tensor, coll: Communicator, root: int = 0) -> Handle[Tensor]:
    """Return a handle of root's elements.

    Args:
        t: A tensor of the same shape on all ranks. On all ranks but `root` the gradient is zero.
        coll: The ranks that take part; a `dup(thread=True)` while gradients are on.
        root: The rank that gives the elements.

    Raises:
        ValueError: For a `root` outside of `coll`.
        RuntimeError: If `coll` is an ordinary communicator while gradients are on.

    Example:
        ```python
        side = await coll.dup(thread=True)
        weight = await nn.functional.broadcast(torch.ones(3, requires_grad=True), side)
        ```

    """
    mine = coll.rank == check_rank(root, coll.size)

    def call(given: Tensor, out: Tensor) -> Handle[Tensor]:
        if mine:
            out.detach().copy_(given)
        return coll.broadcast(out, root)

    counts = t if mine else t.masked_fill(torch.ones((), dtype=torch.bool, device=t.device), 0)
    return _issue(counts, coll, t.shape, call, lambda grad: allreduce(grad, coll))


def allgather(t: Tensor, coll: Communicator, rows: int | None = None) -> Handle[Tensor]:
    """Return a handle of the tensors of all ranks, in rank order, joined along dimension 0.

    Args:
        t: A tensor of one shape `(n, ...)` on all ranks; the result has `(size * n, ...)`.
        coll: The ranks that take part; a `dup(thread=True)` while gradients are on.
        rows: Length of the result. Each rank then gives the block that `reduce_scatter` would leave it: the first ranks
            have one row more.

    Raises:
        ValueError: If `t` is no such block; on await, if the shapes do not fit together.
        RuntimeError: If `coll` is an ordinary communicator while gradients are on.

    Example:
        ```python
        side = await coll.dup(thread=True)
        rows = await nn.functional.allgather(torch.ones(2, 3, requires_grad=True), side)
        assert rows.shape == (2 * coll.size, 3)
        ```

    """
    _check_rows(t)
    whole = torch.Size([len(t) * coll.size if rows is None else rows, *t.shape[1:]])
    if (block := block_of(whole, coll.rank, coll.size)) != t.shape:
        raise ValueError(
            f"t has shape {list(t.shape)}: expected {list(block)}, rank {coll.rank}'s block of {rows} rows"
        )
    return _issue(t, coll, whole, lambda x, out: coll.allgather(x, out=out), lambda grad: reduce_scatter(grad, coll))


def reduce_scatter(t: Tensor, coll: Communicator, op: SumOrMean = "sum") -> Handle[Tensor]:
    """Return a handle of this rank's block of the elementwise sum over all ranks, or of the mean.

    Args:
        t: A tensor of one shape `(rows, ...)` on all ranks. It is cut along dimension 0; the first ranks may get one
            row more.
        coll: The ranks that take part; a `dup(thread=True)` while gradients are on.
        op: "sum" or "mean" (or "avg"), which have a gradient.

    Raises:
        ValueError: For another `op`, or a `t` without dimensions.
        RuntimeError: If `coll` is an ordinary communicator while gradients are on.

    Example:
        ```python
        side = await coll.dup(thread=True)
        block = await nn.functional.reduce_scatter(torch.ones(4, 3, requires_grad=True), side)
        ```

    """
    op = sum_or_mean(op)
    _check_rows(t)
    block, rows, share = block_of(t.shape, coll.rank, coll.size), len(t), coll.size if op == "mean" else 1
    return _issue(
        t,
        coll,
        block,
        lambda x, out: coll.reduce_scatter(x, op, out=out),
        lambda grad: allgather(grad / share, coll, rows),
    )


def alltoall(
    t: Tensor, coll: Communicator, sizes: Sequence[int] | None = None, received: Sequence[int] | None = None
) -> Handle[Tensor]:
    """Return a handle of the rows that all ranks send to this one, in rank order along dimension 0.

    Args:
        t: A tensor `(rows, ...)`. Without lists it has the same shape on all ranks, which divide the rows evenly.
        coll: The ranks that take part; a `dup(thread=True)` while gradients are on.
        sizes: The number of rows of `t` for each rank.
        received: The number of rows that each rank sends. Ranks that do not know it exchange the numbers first.

    Raises:
        ValueError: If one list is given without the other; on await, if another number of rows arrives.
        RuntimeError: If `coll` is an ordinary communicator while gradients are on.

    Example:
        ```python
        side = await coll.dup(thread=True)
        rows = await nn.functional.alltoall(torch.ones(coll.size, 3, requires_grad=True), side)
        ```

    """
    if (sizes is None) != (received is None):
        raise ValueError(f"sizes={sizes} and received={received}: expected both lists, or none")
    rows = None if received is None else sum(check_sizes(received, sum(received), coll.size, "rows"))
    return _issue(
        t,
        coll,
        t.shape if rows is None else (rows, *t.shape[1:]),
        lambda x, out: coll.alltoall_single(x, out=out, sizes=sizes),
        lambda grad: alltoall(grad, coll, received, sizes),
    )


def line_for(coll: Communicator) -> Line:
    """Return the line of the program that issues on `coll` now, for reports of later operations in backward."""
    return parts_of(coll).dispatcher.oplog.caller or whence(1)


@contextmanager
def _reported_at(coll: Communicator, line: Line | None) -> Iterator[None]:
    """Let reports name `line` for operations that this thread issues in the block; None keeps the caller's line."""
    oplog = parts_of(coll).dispatcher.oplog
    before, oplog.caller = oplog.caller, line or oplog.caller
    try:
        yield
    finally:
        oplog.caller = before


def completed(coll: Communicator, call: Callable[[], Handle[T]], line: Line | None = None) -> T:
    """Block this thread until the operation of `call` is done, and return its result.

    Raises `RuntimeError` on the loop's thread, before the call. Backward gives the `line` of its forward, since
    autograd calls it in a thread that may have no line of the program.
    """
    progress = parts_of(coll).dispatcher.progress
    if progress.owns_thread():
        raise RuntimeError(
            f"a forward or backward that waits for other ranks of {coll.name!r} would block the event loop: run it on "
            "the compute thread of a net (net.step, net.submit, net.backward), or `await asyncio.to_thread(...)`"
        )
    with _reported_at(coll, line):
        handle = call()
    with progress.waiting():
        return handle.wait()


def check_threaded(coll: Communicator) -> None:
    """Raise `RuntimeError` unless several threads may issue on `coll`."""
    if parts_of(coll).dispatcher.lifetime.issuing is None:
        raise RuntimeError(
            f"forward and backward issue in their own threads, and {coll.name!r} belongs to the loop's thread: "
            "expected what `await coll.dup(thread=True)` returns"
        )


def _check_rows(t: Tensor) -> None:
    if not t.dim():
        raise ValueError("t is a number: expected at least one dimension")


class _Dual(Function):
    """Makes the result, without data, and its gradient function."""

    @staticmethod
    def forward(
        ctx: Any,
        every_rank: Tensor,
        t: Tensor,
        coll: Communicator,
        shape: Sequence[int],
        dual: Callable[[Tensor], Handle[Tensor]],
    ) -> Tensor:
        ctx.coll, ctx.dual, ctx.line = coll, dual, line_for(coll)
        return t.new_empty(shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None, None, None]:
        return None, completed(ctx.coll, lambda: ctx.dual(*grads), ctx.line), None, None, None


def _issue(
    t: Tensor,
    coll: Communicator,
    shape: Sequence[int],
    call: Callable[[Tensor, Tensor], Handle[Tensor]],
    dual: Callable[[Tensor], Handle[Tensor]],
) -> Handle[Tensor]:
    """Issue `call(t, out)`, which fills an `out` of `shape`; `dual` is its backward.

    The graph is made before the call, so the nodes of all collectives have the order of the calls. Autograd runs later
    nodes first, so backward issues in exactly the reverse order, on every rank.
    """
    every_rank = torch.empty(0, requires_grad=True, device="cpu")  # so that each rank takes part in backward
    out: Tensor = _Dual.apply(every_rank, t, coll, shape, dual)  # type: ignore[no-untyped-call]
    if out.requires_grad:
        check_threaded(coll)
    given = t.detach().contiguous().resolve_conj()
    progress = parts_of(coll).dispatcher.progress
    if not t.is_cuda or progress.owns_thread():
        with torch.no_grad():  # `out` has its graph
            return call(given, out)
    made: Future[Handle[Tensor]] = Future()  # only the loop issues work on devices
    stream, line = torch.cuda.current_stream(t.device), line_for(coll)

    def make() -> None:
        try:
            with OnStream(stream), _reported_at(coll, line), torch.no_grad():
                made.set_result(call(given, out))
        except BaseException as error:  # noqa: BLE001  - raised in the waiting thread
            made.set_exception(error)

    progress.post(make)
    return made.result()
