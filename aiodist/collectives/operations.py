"""Collectives on the user's tensors, which exchange sizes and build results.

Every function is a program on a list of tensors or on one tensor. The caller has checked that tensors are dense and
contiguous, and roots valid. `out` is the output of the only tensor, or None.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from aiodist.backends.arithmetic import combine, copy, from_wire, to_wire, wire_op
from aiodist.backends.base import Exchange, Primitive, dtype_name
from aiodist.collectives.endpoint import Endpoint
from aiodist.collectives.implementations import Primitives
from aiodist.collectives.metadata import (
    META_BYTES,
    Meta,
    as_bytes,
    as_tensor,
    overlaps,
    owns_memory,
    pack_meta,
    unpack_meta,
)
from aiodist.control import disagreement
from aiodist.errors import MismatchError
from aiodist.handles.kernel import Program, Transfer, transfers
from aiodist.streams.memory import flat, numbers_of
from aiodist.types import ReduceOp

_COUNT = struct.Struct("<q")
_FRAME_BYTES = 512
_CPU = torch.device("cpu")

T = TypeVar("T")


async def elementwise(
    p: Primitives,
    ts: Sequence[Tensor],
    out: Tensor | None,
    op: ReduceOp,
    kind: str = "allreduce",
    root: int | None = None,
) -> Sequence[Any]:
    """Reduce each of `ts` in place, or the only tensor into `out`. Return the outputs.

    `kind` is allreduce, reduce or scan. A reduce returns None except on `root`, and only reads the tensors of other
    ranks. A scan reduces over ranks 0 to this one, and its mean is the mean of these ranks.
    """
    mine = root in (None, p.ep.rank)
    targets = [into(ts[0], out)] if mine and out is not None else ts
    if p.ep.size > 1 or p.impl != "auto":
        await p.run([Primitive(kind, flat(target), op=op, root=root or 0) for target in targets])
    return targets if mine else [None] * len(ts)


async def exscan(p: Primitives, ts: Sequence[Tensor], out: Tensor | None, op: ReduceOp) -> Sequence[Tensor]:
    """Reduce each of `ts` over the ranks before this one. The tensors of rank 0 do not change, as in MPI."""
    ep = p.ep
    targets = ts if out is None else [into(ts[0], out)]
    if p.ep.size == 1 and p.impl == "auto":
        return targets
    for on_cpu in (True, False):
        chosen = [target for target in targets if target.is_cpu is on_cpu]
        sums = wires = [to_wire(target) for target in chosen]
        if ep.rank and chosen:
            before = [torch.empty_like(wire) for wire in wires]
            await transfers([ep.recv(t, ep.rank - 1) for t in before])
            sums = [t.clone() for t in before]
            for t, wire, target, total in zip(before, wires, chosen, sums, strict=True):
                combine(total, wire, wire_op(op))
                from_wire(t, target, op, ep.rank)
        if ep.rank + 1 < ep.size and chosen:
            await transfers([ep.send(total, ep.rank + 1) for total in sums])
    return targets


async def broadcast(p: Primitives, ts: Sequence[Tensor], out: None = None, *, root: int) -> Sequence[Tensor]:
    """Overwrite `ts`, of any shapes, with root's elements."""
    await p.run([Primitive("broadcast", numbers_of(t), root=root) for t in ts if t.numel()])
    return ts


async def allgather(p: Primitives, ts: Sequence[Tensor], out: Tensor | None = None) -> list[list[Tensor] | Tensor]:
    """Return, for each of `ts`, the list of all ranks' tensors, or with `out` their concatenation along dim 0.

    Sizes may differ.
    """
    records = as_bytes(await p.exchange_facts(as_tensor(b"".join(map(pack_meta, ts)))))
    metas = [unpack_meta(records, META_BYTES * i) for i in range(len(ts) * p.ep.size)]
    data: list[Primitive] = []
    results: list[list[Tensor] | Tensor] = []
    for i, t in enumerate(ts):
        of_all = metas[i :: len(ts)]
        _agree_on_dtype(of_all)
        counts = [meta.numel for meta in of_all]
        if out is None:
            whole = torch.empty(sum(counts), dtype=t.dtype, device=t.device)
            results.append([block.view(meta.shape) for block, meta in zip(whole.split(counts), of_all, strict=True)])
        else:
            out = fit(out, _joined_shape(of_all), t.dtype, enumerate(counts))
            whole = numbers_of(out)
            results.append(out)
        if whole.numel():
            own = whole.split(counts)[p.ep.rank]
            if out is not None and overlaps(whole, t) and own.data_ptr() != t.data_ptr():
                t = t.clone()
            data.append(Primitive("allgather", numbers_of(t), whole, counts=counts))
    await p.afterwards().run(data)
    return results


async def _introduced(ep: Endpoint, to: Mapping[int, Sequence[Tensor]], by: Mapping[int, int]) -> dict[int, list[Meta]]:
    """Send metadata of the tensors in `to`, by rank.

    Return the metadata from the ranks in `by`, which has their counts.
    """
    records = {rank: torch.empty(count * META_BYTES, dtype=torch.uint8, device="cpu") for rank, count in by.items()}
    receives = [ep.recv(record, rank) for rank, record in records.items()]
    sends = [ep.send(as_tensor(b"".join(map(pack_meta, ts))), rank) for rank, ts in to.items()]
    await transfers(receives + sends)
    if by:
        await ep.known()
    read = {rank: as_bytes(record) for rank, record in records.items()}
    return {rank: [unpack_meta(data, i * META_BYTES) for i in range(by[rank])] for rank, data in read.items()}


async def gather(
    p: Primitives, ts: Sequence[Tensor], out: Tensor | None = None, *, root: int
) -> Sequence[list[Tensor] | Tensor | None]:
    """Return for each of `ts` the tensors of all ranks on root, None elsewhere. Sizes may differ."""
    ep = p.ep
    if ep.rank != root:
        await _introduced(ep, {root: ts}, {})
        await p.exchange([Exchange(t, [(root, t)], []) for t in ts])
        return [None] * len(ts)
    others = [rank for rank in range(ep.size) if rank != root]
    received = await _introduced(ep, {}, dict.fromkeys(others, len(ts)))
    received[root] = [unpack_meta(pack_meta(t)) for t in ts]
    exchanges: list[Exchange] = []
    parts_of: list[list[Tensor]] = []
    for i, t in enumerate(ts):
        metas = [received[rank][i] for rank in range(ep.size)]
        _agree_on_dtype(metas)
        if out is None:
            parts = [torch.empty(meta.shape, dtype=meta.dtype, device=t.device) for meta in metas]
        else:
            out = fit(out, _joined_shape(metas), t.dtype, enumerate(meta.numel for meta in metas))
            parts = list(numbers_of(out).split([meta.numel for meta in metas]))
        parts_of.append(parts)
        exchanges.append(Exchange(t, [], [(rank, parts[rank]) for rank in others]))
    await p.exchange(exchanges)
    for t, parts in zip(ts, parts_of, strict=True):
        copy(numbers_of(parts[root]), numbers_of(t))
    return parts_of if out is None else [out]


async def scatter(
    p: Primitives, lists: Sequence[Sequence[Tensor]] | None, nested: bool, out: Tensor | None, root: int
) -> Tensor | list[Tensor]:
    """Return this rank's tensor of root's list, in `out` or new memory, or a list of tensors for a list of lists.

    Root sends the number of lists (-1: one, not nested) with the first tensor's dtype and shape, so that a scatter of
    one list takes two messages per rank.
    """
    ep = p.ep
    if ep.rank == root and lists is not None:
        count = len(lists) if nested else -1
        others = [rank for rank in range(ep.size) if rank != root]
        heads = [call for rank in others for call in _scatter_heads(p, [one[rank] for one in lists], count, rank)]
        if lists:
            sends = [(rank, one[rank]) for rank in others for one in lists]
            await p.exchange([Exchange(lists[0][root], sends, [])], heads)
        else:
            await transfers(heads)
        kept = [into(one[root], out) for one in lists]
        return kept if nested else kept[0]
    record = torch.empty(_COUNT.size + META_BYTES, dtype=torch.uint8, device="cpu")
    await transfers([ep.recv(record, root)])
    await ep.known()
    head = as_bytes(record)
    (count,) = _COUNT.unpack_from(head)
    metas = [unpack_meta(head, _COUNT.size)] if count else []
    if count > 1:
        rest = torch.empty((count - 1) * META_BYTES, dtype=torch.uint8, device="cpu")
        await transfers([ep.recv(rest, root)])
        packed = as_bytes(rest)
        metas += [unpack_meta(packed, i * META_BYTES) for i in range(count - 1)]
    if out is not None and metas:
        _agree_on_place({ep.rank: not out.is_cpu, root: metas[0].on_device})
    targets = [_room(meta, out, p.device if meta.on_device else _CPU, root) for meta in metas]
    if not any(meta.on_device for meta in metas):
        p.release()
    if targets:
        await p.exchange([Exchange(targets[0], [], [(root, target) for target in targets])])
    return targets[0] if count == -1 else targets


def _scatter_heads(p: Primitives, ts: Sequence[Tensor], count: int, rank: int) -> list[Transfer]:
    head = _COUNT.pack(count) + (pack_meta(ts[0]) if ts else bytes(META_BYTES))
    calls = [p.ep.send(as_tensor(head), rank)]
    if count > 1:
        calls.append(p.ep.send(as_tensor(b"".join(pack_meta(t) for t in ts[1:])), rank))
    return calls


async def alltoall(
    p: Primitives, lists: Sequence[Sequence[Tensor]], out: Sequence[Tensor] | None = None
) -> list[list[Tensor]]:
    """Return for each of `lists` the tensors from all ranks for this one, by rank. `out` requires a single list."""
    ep = p.ep
    if p.impl == "bruck":
        return await _equal_alltoall(p, lists, out)
    others = [rank for rank in range(ep.size) if rank != ep.rank]
    if out is not None:  # in place, the tensor from a rank must not overwrite the tensor to that rank
        lists = [
            [t.clone() if rank in others and overlaps(t, out[rank]) else t for rank, t in enumerate(ts)] for ts in lists
        ]
    to = {rank: [ts[rank] for ts in lists] for rank in others}
    metas = await _introduced(ep, to, dict.fromkeys(others, len(lists)))
    results = [[torch.empty(0, device="cpu")] * ep.size for _ in lists]
    exchanges: list[Exchange] = []
    for i, (ts, result) in enumerate(zip(lists, results, strict=True)):
        for rank in others:
            meta = metas[rank][i]
            _agree_on_place({ep.rank: not ts[ep.rank].is_cpu, rank: meta.on_device})
            result[rank] = _room(meta, None if out is None else out[rank], ts[ep.rank].device, rank)
        sends, receives = ([(rank, each[rank]) for rank in others] for each in (ts, result))
        exchanges.append(Exchange(ts[ep.rank], sends, receives))
    await p.exchange(exchanges)
    for ts, result in zip(lists, results, strict=True):
        result[ep.rank] = into(ts[ep.rank], None if out is None else out[ep.rank])
    return results


async def _equal_alltoall(
    p: Primitives, lists: Sequence[Sequence[Tensor]], out: Sequence[Tensor] | None
) -> list[list[Tensor]]:
    """Run `alltoall` by a schedule, for tensors of equal shape and dtype on all ranks."""
    primitives: list[Primitive] = []
    for ts in lists:
        sent = torch.stack([numbers_of(t) for t in ts]).view(-1)
        counts = [ts[0].numel()] * p.ep.size
        primitives.append(Primitive("alltoall", sent, torch.empty_like(sent), counts=counts, received=counts))
    await p.run(primitives)
    results: list[list[Tensor]] = []
    for ts, o in zip(lists, primitives, strict=True):
        blocks = [block.view(ts[0].dtype).view(ts[0].shape) for block in o.out.chunk(p.ep.size)]
        results.append([into(block, None if out is None else out[rank]) for rank, block in enumerate(blocks)])
    return results


async def alltoall_single(
    p: Primitives, ts: Sequence[Tensor], out: Tensor | None, sizes: Sequence[int] | None = None
) -> list[Tensor]:
    """Send `sizes[r]` rows of the only tensor to rank r (equal sizes if None). Return the rows from all ranks.

    The rows are in the order of the ranks, as one tensor in a list.
    """
    (t,) = ts
    ranks, row, data = p.ep.size, t.shape[1:].numel(), p
    if sizes is None:
        sizes = coming = [t.shape[0] // ranks] * ranks
    else:
        received_sizes = torch.empty(ranks, dtype=torch.int64, device="cpu")
        one = [1] * ranks
        own = torch.tensor(sizes, device="cpu")
        await p.run([Primitive("alltoall", own, received_sizes, counts=one, received=one)])
        await p.ep.known()
        coming, data = received_sizes.tolist(), p.afterwards()
    shape = (sum(coming), *t.shape[1:])
    arriving = ((rank, size * row) for rank, size in enumerate(coming))
    result = t.new_empty(shape) if out is None else fit(out, shape, t.dtype, arriving)
    if out is not None and overlaps(result, t):
        t = t.clone()
    sent, received = [size * row for size in sizes], [size * row for size in coming]
    await data.run([Primitive("alltoall", numbers_of(t), numbers_of(result), counts=sent, received=received)])
    return [result]


async def reduce_scatter(
    p: Primitives, ts: Sequence[Tensor], out: Tensor | None, op: ReduceOp, blocks: Sequence[Sequence[torch.Size]]
) -> list[Tensor]:
    """Return this rank's block of each of `ts`, reduced.

    `blocks` are the shapes of all ranks' blocks, for each of `ts`.
    """
    targets: list[Tensor] = []
    primitives: list[Primitive] = []
    for t, shapes in zip(ts, blocks, strict=True):
        mine = shapes[p.ep.rank]
        target = fit(out, tuple(mine), t.dtype) if out is not None else t.new_empty(mine)
        targets.append(target)
        # `t` is read until the end, so the result must not overwrite `t`.
        result = torch.empty_like(target) if overlaps(target, t) else target
        counts = [shape.numel() for shape in shapes]
        primitives.append(Primitive("reduce_scatter", flat(t), flat(result), op=op, counts=counts))
    if p.ep.size == 1 and p.impl == "auto":
        for t, target in zip(ts, targets, strict=True):
            copy(flat(target), flat(t))
        return targets
    await p.run(primitives)
    return [into(o.out.view(target.shape), target) for o, target in zip(primitives, targets, strict=True)]


async def broadcast_bytes(p: Primitives, packed: Tensor | None, root: int) -> Tensor:
    """Return root's bytes on all ranks. One frame is broadcast, and longer data by a second broadcast."""
    frame = torch.zeros(_FRAME_BYTES, dtype=torch.uint8, device="cpu")
    room = _FRAME_BYTES - _COUNT.size
    if packed is not None:
        frame[: _COUNT.size] = as_tensor(_COUNT.pack(packed.numel()))
        frame[_COUNT.size : _COUNT.size + packed.numel()] = packed[:room]
    await p.run([Primitive("broadcast", frame, root=root)])
    await p.ep.known()
    (length,) = _COUNT.unpack(as_bytes(frame[: _COUNT.size]))
    if length > room:
        packed = torch.empty(length, dtype=torch.uint8, device="cpu") if packed is None else packed
        await p.afterwards().run([Primitive("broadcast", packed, root=root)])
    return frame[_COUNT.size :][:length] if packed is None else packed


def fit(out: Tensor, shape: tuple[int, ...], kind: torch.dtype, sent: Iterable[tuple[int, int]] = ()) -> Tensor:
    """Return `out` as `shape`: narrowed if `out` is larger, grown if `out` is too small and owns its memory.

    `sent` has the numbers of elements by sending rank, for the text of the error.

    Raises ValueError if `out` cannot grow (a view, or borrowed memory) or is a node of autograd, TypeError for another
    dtype.
    """
    if out.dtype is not kind:
        raise TypeError(f"out= holds {dtype_name(out.dtype)}, the result {kind}")
    numel = torch.Size(shape).numel()
    if out.shape == shape:
        return out
    if out.grad_fn is not None:
        raise ValueError(f"out= is a node of autograd of shape {list(out.shape)}: expected {list(shape)}, the result's")
    if out.numel() < numel:
        if not owns_memory(out):
            room = f"out= has room for {out.numel()} elements of {numel} and cannot grow: it owns no memory"
            raise ValueError(f"{room}{_sender_text(dict(sent))}")
        # New memory, not resize_: the claimed memory stays with the handle until the end.
        return out.set_(torch.empty(shape, dtype=kind, device=out.device))  # type: ignore[no-any-return, call-overload]
    return out.view(-1)[:numel].view(shape)


def _sender_text(sent: Mapping[int, int]) -> str:
    """Return the rank that sent the most, as the end of a sentence, or "" if all sent the same number."""
    if len(sent) == 1:
        ((rank, numel),) = sent.items()
        return f"; rank {rank} sent {numel}"
    if len(set(sent.values())) < 2:
        return ""
    most = max(sent, key=sent.__getitem__)
    return f"; rank {most} sent the most, {sent[most]}"


def _room(meta: Meta, out: Tensor | None, device: torch.device, src: int | None = None) -> Tensor:
    """Return memory for a tensor of `meta`, in `out` or new. `src` is the sender, None for this rank."""
    if out is not None:
        return fit(out, meta.shape, meta.dtype, () if src is None else [(src, meta.numel)])
    return torch.empty(meta.shape, dtype=meta.dtype, device=device)


def into(t: Tensor, out: Tensor | None) -> Tensor:
    """Return `t`'s elements in `out`, which may be `t` or its memory, or in new memory if `out` is None."""
    if out is t:
        return t
    target = _room(Meta(t.dtype, tuple(t.shape)), out, t.device)
    if target.data_ptr() != t.data_ptr():
        copy(target, t)
    return target


def _agree_on_dtype(metas: Sequence[Meta]) -> None:
    if len({meta.dtype for meta in metas}) > 1:
        raise MismatchError(disagreement("the dtype", list(map(str, metas))))
    _agree_on_place({rank: meta.on_device for rank, meta in enumerate(metas)})


def _agree_on_place(on_device: Mapping[int, bool]) -> None:
    """Raise MismatchError unless the tensors of these ranks are all on the CPU, or all on CUDA devices."""
    if len(set(on_device.values())) > 1:
        devices = {rank: "cuda" if there else "cpu" for rank, there in on_device.items()}
        raise MismatchError(disagreement("the device of the tensors", devices))


def _joined_shape(metas: Sequence[Meta]) -> tuple[int, ...]:
    """Return the shape of all tensors concatenated along dim 0. Numbers count as tensors of one element."""
    rows = [meta.shape or (1,) for meta in metas]
    tails = {row[1:] for row in rows if row[0]} or {rows[0][1:]}
    if len(tails) > 1:
        raise MismatchError(disagreement("dims of the tensors other than dim 0", list(map(str, metas))))
    tail = tails.pop()
    return (sum(row[0] for row in rows if row[1:] == tail), *tail)


# --- programs around these ---

Work = Callable[[Primitives, Sequence[Any], Any], Program[Sequence[Any]]]
"""A collective of this module with all arguments except primitives, tensors and `out`."""


def work_of(
    kind: str,
    op: ReduceOp | None = None,
    root: int | None = None,
    *,
    blocks: Sequence[Sequence[torch.Size]] = (),
    sizes: Sequence[int] | None = None,
) -> Work:
    """Return the work of a collective, by name. `blocks` is for reduce_scatter, `sizes` for alltoall_single."""
    match kind:
        case "broadcast":
            return partial(broadcast, root=root or 0)
        case "allgather":
            return allgather
        case "gather":
            return partial(gather, root=root or 0)
        case "alltoall_single":
            return partial(alltoall_single, sizes=sizes)
    assert op is not None
    match kind:
        case "exscan":
            return partial(exscan, op=op)
        case "reduce_scatter":
            return partial(reduce_scatter, op=op, blocks=blocks)
    return partial(elementwise, op=op, kind=kind, root=root)


async def nothing(_: object, result: T | None = None) -> T | None:
    """Return `result`."""
    return result


async def each(
    p: Primitives,
    work: Work,
    ts: Sequence[Any],
    out: object = None,
    convert: Callable[[Any], Any] | None = None,
    *,
    listed: bool = False,
) -> Any:  # noqa: ANN401
    """Run `work` on `ts`. Return the converted results, or the result of the only tensor unless `listed`."""
    results = await work(p, ts, out)
    result = results if listed else results[0]
    return result if convert is None else convert(result)


def copy_to_all(ts: Sequence[Tensor]) -> None:
    """Copy the first tensor into the others."""
    for t in ts[1:]:
        copy(flat(t), flat(ts[0]))


async def alike_lists(p: Primitives, ts: Sequence[Tensor], then: Callable[[Primitives], Program[T]]) -> T:
    """Run the program of `then` if all ranks give lists of one length on one device type, else raise MismatchError."""
    if p.ep.size == 1:
        return await then(p)
    facts = await p.exchange_facts(torch.tensor([len(ts), not ts[0].is_cpu], device="cpu"))
    lists = [f"{count} on {'cuda' if on_cuda else 'cpu'}" for count, on_cuda in facts.tolist()]
    if len(set(lists)) > 1:
        raise MismatchError(disagreement("the number of tensors", lists))
    return await then(p.afterwards())
