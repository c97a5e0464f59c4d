"""Give all ranks the same parameters, gradients and states, and check that values are the same."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Number
from typing import Any, cast
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from aiodist.checkpoints.saving import load_exactly
from aiodist.communicator import Communicator, parts_of
from aiodist.communicator.arguments import check_rank
from aiodist.control import disagreement
from aiodist.errors import MismatchError
from aiodist.handles import Handle
from aiodist.handles.calls import located
from aiodist.nn.devices import cuda_devices
from aiodist.nn.layout import (
    HasState,
    Named,
    Parcel,
    check_memory,
    describe,
    describe_order,
    flat_view,
    named_state,
    structure,
    write_each,
)
from aiodist.nn.module_like import ModuleLike
from aiodist.streams import Modes
from aiodist.types import Stateful, SumOrMean, sum_or_mean
from aiodist.world.agree import agree

_CHUNK = 1 << 20  # elements in float64 at a time


# --- parameters and buffers ------------------------------------------------------------------------------------------


@located
async def synchronize_parameters(
    module: HasState, coll: Communicator, *, how: str = "root", root: int = 0, buffers: bool = True
) -> None:
    """Give every rank the parameters and buffers of `root`, or the mean over all ranks.

    All ranks call it, with modules of the same names, shapes and dtypes; memory layouts may differ. Tensors are written
    in place.

    Args:
        module: A module of torch, or a net.
        coll: The ranks that take part.
        how: "root" or "mean". Integers and bools, such as BatchNorm's count of batches, come from `root` also in a
            mean.
        root: The rank whose values count.
        buffers: False leaves buffers as they are.

    Raises:
        ValueError: On await, before anything is sent, for another `how` or `root`, or a tensor without memory (lazy or
            meta).
        TypeError: On await, for a sparse tensor.
        MismatchError: On all ranks, if the modules differ; the message names the first difference. Nothing has changed
            then.

    Example:
        ```python
        module = torch.nn.Linear(8, 1)
        await aiodist.nn.synchronize_parameters(module, coll)
        ```

    Cancelling the await does not stop a transfer; before the transfer has begun it aborts `coll`, because the other
    ranks would wait.

    Cost: an allgather of 80 bytes, then one broadcast of all tensors, or an allreduce for a mean. Contiguous tensors of
    64 KiB and more are not copied.

    """
    _check_how(how, root, coll)
    named = named_state(module, buffers=buffers)
    check_dense("tensor", named)
    with _heard(coll, "synchronize_parameters"):
        same = {"how": how, "root": root, **structure(named, any_order=True)}
        await agree(coll, "synchronize_parameters", same=same)
        shared = share([t for _, t in named], coll, how, root)
    await shared


def synchronize_buffers(module: HasState, coll: Communicator, *, how: str = "root", root: int = 0) -> Awaitable[None]:
    """Return an awaitable, after which all ranks have the buffers of `root`, or their mean.

    All ranks call it with modules of the same structure, which is not compared here. It is issued, and raises,
    at the call. Arguments are those of `synchronize_parameters`.
    """
    _check_how(how, root, coll)
    named = named_state(module, parameters=False)
    check_dense("buffer", named)
    check_memory(named)
    return share([t for _, t in named], coll, how, root)


def _check_how(how: str, root: int, coll: Communicator) -> None:
    if how not in ("root", "mean"):
        raise ValueError(f"how={how!r}: expected 'root' or 'mean'")
    check_rank(root, coll.size)


def share(tensors: Sequence[Tensor], coll: Communicator, how: str, root: int) -> Awaitable[None]:
    """Give every rank the same `tensors`, and return an awaitable; they are sent in the order of their dimensions."""
    kept = [distinct(t.detach()) for t in tensors]
    averaged = [t for t in kept if how == "mean" and (t.is_floating_point() or t.is_complex())]
    copied = [t for t in kept if how != "mean" or not (t.is_floating_point() or t.is_complex())]
    calls: list[Callable[[], Handle[Any]]] = []
    parcels: list[Parcel] = []
    if averaged:
        means = Parcel.of(averaged, None)
        parcels.append(means)
        calls.append(lambda: coll.allreduce(means.flat, "mean"))
    if copied or not averaged:
        mine = coll.rank == root
        copies = Parcel.of(copied, None, fill=mine)
        copies.written = not mine
        parcels.append(copies)
        # As bytes, since a broadcast needs no dtype.
        calls.append(lambda: coll.broadcast([t.view(torch.uint8) for t in copies.flat], root))

    def finish() -> None:
        for parcel in parcels:
            parcel.unpack()

    return _issue(calls, parcels, finish)


def distinct(t: Tensor) -> Tensor:
    """Return `t` without repeated elements, if it is expanded."""
    if t.layout is torch.strided and not t.is_contiguous():
        for d, stride in enumerate(t.stride()):
            if stride == 0 and t.shape[d] > 1:
                t = t.narrow(d, 0, 1)
    return t


# --- gradients -------------------------------------------------------------------------------------------------------


def synchronize_gradients(
    module: nn.Module, coll: Communicator, *, op: SumOrMean, timeout: float | None = None
) -> Awaitable[None]:
    """Return an awaitable, after which every gradient is the sum or mean of those of all ranks.

    All ranks call it, with modules that have the same trainable parameters. It is one operation, issued at the call,
    and works in place. Frozen parameters are skipped, and shared ones count once. A missing gradient counts as zeros,
    and is made if another rank has one; if no rank has it, it stays None. A mean divides by the number of all ranks.

    Args:
        module: A module after backward.
        coll: The ranks that take part.
        op: "sum" or "mean" (or "avg").
        timeout: Seconds from the call; None is no timeout.

    Raises:
        TypeError: At the call, for a sparse gradient.
        ValueError: At the call, for another `op`, or a parameter without memory.
        MismatchError: On await, on all ranks, if parameters differ in size or dtype; also in name, shape or memory
            layout, after the gradients were mixed up.

    Example:
        ```python
        module = torch.nn.Linear(8, 1)
        module(torch.ones(4, 8)).sum().backward()
        await aiodist.nn.synchronize_gradients(module, coll, op="mean")
        ```

    Cancelling the await does not stop the operation.

    Cost: one allreduce of all gradients and 16 bytes for each. Dense gradients of 64 KiB and more are not copied.

    """
    op = sum_or_mean(op)
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    check_memory(named)
    check_dense("the gradient of", [(name, p.grad) for name, p in named if p.grad is not None])
    with torch.no_grad(), torch.inference_mode(False):  # new tensors become gradients
        fresh: dict[Tensor, Tensor] = {}  # for a missing or expanded gradient
        for _, p in named:
            if p.grad is None:
                fresh[p] = torch.zeros_like(p)
            elif distinct(p.grad) is not p.grad:
                fresh[p] = torch.empty_like(p).copy_(p.grad.detach())
        census = _census(named, coll)
        parcel = Parcel.of(
            [fresh[p] if p in fresh else cast(Tensor, p.grad).detach() for _, p in named], [p for _, p in named]
        )

        def finish() -> None:
            used, balance = census.tolist()
            _check_balance(balance, named, coll)
            parcel.unpack()
            for (_, p), some in zip(named, used, strict=True):
                if some and p in fresh:
                    p.grad = fresh[p]

        wire = [census.view(-1), *parcel.flat]
        return _issue([lambda: coll.allreduce(wire, op, timeout=timeout)], [parcel], finish)


def check_dense(kind: str, named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise TypeError for a sparse tensor."""
    for name, t in named:
        if t.layout is not torch.strided:
            raise TypeError(f"{kind} {name!r} has layout {t.layout}: expected a dense tensor (torch.strided)")


def _census(named: Sequence[tuple[str, Tensor]], coll: Communicator) -> Tensor:
    """Return two rows with a column for each parameter: 1 if it has a gradient, and its term of the balance.

    [Note: balance] Rank 0 adds (size-1) times a hash of the parameter, and the others subtract the hash. All numbers
    are whole and below 2^53, so the total is exact in float64: 0 if all ranks have the same parameter. Each hash
    includes the earlier ones, so a later difference cannot cancel an earlier one.
    """
    weight = coll.size - 1 if coll.rank == 0 else -1
    used, balance, mark = [], [], 0
    for name, p in named:
        order = "" if p.is_contiguous() else describe_order(name, p)
        mark = crc32(f"{describe(name, p)}{order}".encode(), mark)
        used.append(float(p.grad is not None))
        balance.append(float(weight * mark))
    return torch.tensor([used, balance], dtype=torch.float64, device="cpu")


def _check_balance(balance: Sequence[float], named: Sequence[tuple[str, Tensor]], coll: Communicator) -> None:
    for i, total in enumerate(balance):
        if total:
            name, p = named[i]
            mine = f"{describe(name, p)}, {describe_order('', p).strip()}"
            text = disagreement(f"trainable parameter {i} (counted from 0)", {coll.rank: mine})
            raise MismatchError(text, rank=coll.rank, comm=coll.name)


@contextmanager
def _heard(coll: Communicator, what: str) -> Iterator[None]:
    """Abort `coll` if this block of `what` is cancelled, since the other ranks wait for its operations."""
    try:
        yield
    except asyncio.CancelledError as error:
        coll.abort(f"rank {coll.rank} left {what}: {error!r}")
        raise


# --- issuing ----------------------------------------------------------------------------------------------------------


def _issue(
    calls: Sequence[Callable[[], Handle[Any]]], parcels: Sequence[Parcel], finish: Callable[[], None]
) -> Awaitable[None]:
    """Issue `calls`; return an awaitable of their end and of `finish`, which runs even if the await is cancelled."""
    handles = [call() for call in calls]

    async def end() -> None:
        for handle in handles:
            await handle
        finish()
        for device in cuda_devices(t for parcel in parcels for t in parcel.flat):
            torch.cuda.current_stream(device).synchronize()  # then any stream may read

    return asyncio.shield(asyncio.ensure_future(end()))


# --- checks -----------------------------------------------------------------------------------------------------


@located
async def assert_synchronized(x: object, coll: Communicator, *, rtol: float = 1e-7) -> None:
    """Check that mean and variance of the magnitudes in `x` agree on all ranks; it does not compare each value.

    All ranks call it. For each entry, mean and variance of the absolute values, computed in float64, must agree on all
    ranks; NaN agrees with NaN. A difference of signs or of places is not detected, nor a variance that differs while
    values deviate from their mean by less than `rtol` of it.

    Args:
        x: A tensor, a module (parameters and buffers), a net (without `per_rank`), a Python number, None, or a list,
            tuple or dict of them.
        coll: The ranks that take part.
        rtol: Tolerance, relative to the larger figure.

    Raises:
        TypeError: On await, before anything is sent, for an `x` of another type.
        ValueError: On await, for a tensor without memory, or `rtol` outside 0 to 1.
        MismatchError: On all ranks, if figures, entries, shapes or dtypes differ. The message names the first entry and
            the figures of each rank.

    Example:
        ```python
        module = torch.nn.Linear(8, 1)
        await aiodist.nn.synchronize_parameters(module, coll)
        await aiodist.nn.assert_synchronized(module, coll)
        ```

    Cancelling the await before the figures are sent aborts `coll`.

    Cost: an allgather of 80 bytes, one of 16 bytes for each entry, and two passes over the data, in a thread.

    """
    if not 0 <= rtol < 1:
        raise ValueError(f"rtol={rtol}: expected at least 0 and less than 1")
    entries = list(_entries("", x))
    check_memory([(name, t) for name, t in entries if isinstance(t, Tensor)])
    kinds = [
        describe(name, x) if isinstance(x, Tensor) else f"{name} {'None' if x is None else 'number'}"
        for name, x in entries
    ]
    with _heard(coll, "assert_synchronized"):
        await agree(coll, "assert_synchronized", same={"entries": kinds, "rtol": rtol})
        mine = await asyncio.to_thread(_figures, Modes.capture(), entries)
        figures_of_all = coll.allgather(mine)
    table = torch.stack(await figures_of_all)  # (size, entries, 2)
    apart = (~_agreeing(table, rtol)).nonzero().flatten().tolist()
    if apart:
        name, _ = entries[apart[0]]
        more = f" and {len(apart) - 1} more entries" if len(apart) > 1 else ""
        figures = [f"abs-mean {m!r}, abs-variance {v!r}" for m, v in table[:, apart[0]].tolist()]
        raise MismatchError(disagreement(f"{name}{more}", figures), rank=coll.rank, comm=coll.name)


def _entries(path: str, x: object) -> Iterator[tuple[str, Tensor | Number | None]]:
    """Yield every tensor, number and None in `x` with its name."""
    if isinstance(x, Tensor | Number | None):
        yield path or "x", x
    elif isinstance(x, nn.Module | ModuleLike):
        found = named_state(x if isinstance(x, nn.Module) else x.shared)
        yield from ((f"{path}.{name}" if path else name, t) for name, t in found)
    elif isinstance(x, Mapping):
        for key in sorted(x, key=repr):  # the order of insertion may differ
            yield from _entries(f"{path or 'x'}[{key!r}]", x[key])
    elif isinstance(x, list | tuple):
        for i, member in enumerate(x):
            yield from _entries(f"{path or 'x'}[{i}]", member)
    else:
        kinds = "a tensor, a module, a number, None, or a list or dict of them"
        raise TypeError(f"{path or 'x'} is {type(x).__name__}: expected {kinds}")


def _figures(modes: Modes, entries: Sequence[tuple[str, Tensor | Number | None]]) -> Tensor:
    """Return mean and variance of the magnitudes of each entry, after all queued work of the streams of `modes`."""
    with modes.applied():
        rows = [
            _mean_and_variance(x) if isinstance(x, Tensor) else (float(abs(x or 0)), 0.0)  # type: ignore[arg-type]
            for _, x in entries
        ]
    return torch.tensor(rows, dtype=torch.float64, device="cpu").view(len(rows), 2)


def _mean_and_variance(t: Tensor) -> tuple[float, float]:
    """Return mean and variance of the absolute values, in float64, a chunk at a time."""
    t = t.detach() if t.layout is torch.strided else t.detach().to_dense()
    flat = flat_view(t)
    flat = t.reshape(-1) if flat is None else flat
    if not flat.numel():
        return 0.0, 0.0
    wide = torch.complex128 if t.is_complex() else torch.float64
    chunks = flat.split(_CHUNK)
    mean = torch.stack([part.to(wide).abs().sum() for part in chunks]).sum() / flat.numel()
    squares = torch.stack([(part.to(wide).abs() - mean).square().sum() for part in chunks]).sum()
    return float(mean), float(squares / flat.numel())


def _agreeing(table: Tensor, rtol: float) -> Tensor:
    """Return a flag for each entry of the table (size, entries, 2): True if all ranks have the same figures."""
    mean, variance = table.unbind(-1)
    flat = variance.amax(0).sqrt() <= rtol * mean.amax(0)  # constant, apart from rounding
    return _close(mean, rtol) & (_close(variance, rtol) | flat)


def _close(figures: Tensor, rtol: float) -> Tensor:
    """Return a flag for each column: True if its figures, all above 0, are within `rtol`, or equal, or all NaN."""
    low, high = figures.amin(0), figures.amax(0)
    return (high == low) | (high.isfinite() & (high - low <= rtol * high)) | figures.isnan().all(0)


# --- the state of one rank -------------------------------------------------------------------------------------------


async def share_state(coll: Communicator, root: int, named: Named, owners: Sequence[Stateful]) -> None:
    """Give all ranks the values of the `named` tensors and the states of `owners` of `root`.

    All ranks call it, with tensors of the same structure and as many owners. In an elastic world the values are written
    only after all have arrived, since `root` may be lost; then nothing suspends.
    """
    check_dense("tensor", named)
    mine = [distinct(t.detach()) for _, t in named]
    elastic = parts_of(coll).registry.elastic is not None and coll.rank != root
    received = [torch.empty_like(t) for t in mine] if elastic else mine
    await share(received, coll, "root", root)
    states: list[Any] = []
    if owners:
        own = [each.state_dict() for each in owners if coll.rank == root]
        on_host = tree_map_only(Tensor, Tensor.cpu, own)  # loading moves them to the devices of each rank
        states = await coll.broadcast_object(on_host, root=root)
    parts_of(coll).dispatcher.check_usable()  # an aborted communicator writes nothing
    if coll.rank != root:
        if elastic:
            write_each(mine, received)
        for each, state in zip(owners, states, strict=True):
            if state is not None:  # `root` has made no such optimizer yet
                load_exactly(each, state)
