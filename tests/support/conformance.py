"""Cases of each operation, which every backend must pass alike, with a check of each against NumPy.

A case is an operation on tensors of one dtype and size, with an operator, a root and a place for the result. Every
rank knows every rank's input, since it is drawn from the case's seed, so each checks its own result, exactly:

    for case in cases("allreduce", coll.size, limit=200, seed=7):
        await check(coll, case)

Inputs are chosen so that exact is well defined: integers wrap, floats hold small whole numbers, whose sums and
products are exact in any order, and means are rounded once.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce as fold
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from aiodist.types import ANY, Op

if TYPE_CHECKING:
    from aiodist import Communicator

__all__ = ["DTYPES", "MOVES", "REDUCTIONS", "Case", "cases", "check", "operators"]

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_COMPLEX = (torch.complex64, torch.complex128)
DTYPES = (torch.bool, *_INTEGERS, *_FLOATS, *_COMPLEX)

REDUCTIONS = ("allreduce", "reduce", "scan", "exscan", "reduce_scatter")
MOVES = ("broadcast", "gather", "allgather", "scatter", "alltoall", "alltoall_single", "send_recv", "sendrecv")

_ROOTED = frozenset({"reduce", "broadcast", "gather", "scatter"})
_OUTS = {
    "allreduce": ("", "exact", "larger", "smaller", "input"),
    "scan": ("", "exact", "larger", "smaller", "input"),
    "exscan": ("",),
    "reduce": ("", "exact", "larger", "smaller", "input"),
    "reduce_scatter": ("", "exact", "larger", "smaller", "input", "block"),
    "broadcast": ("",),
    "gather": ("", "exact", "larger", "smaller"),
    "allgather": ("", "exact", "larger", "smaller", "block"),
    "scatter": ("", "exact", "larger", "smaller"),
    "alltoall": ("", "exact", "larger", "smaller"),
    "alltoall_single": ("", "exact", "larger", "smaller", "input"),
    "send_recv": ("", "exact", "larger", "any"),
    "sendrecv": ("", "exact", "larger", "smaller"),
}
_UNEVEN = frozenset({*MOVES, "reduce_scatter"} - {"broadcast"})

_UFUNCS: dict[str, Callable[[Any, Any], Any]] = {
    "sum": np.add,
    "mean": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}


def operators(kind: torch.dtype) -> tuple[str, ...]:
    """Return the operators that reduce tensors of `kind`."""
    if kind is torch.bool:
        return ("min", "max", "band", "bor", "bxor")
    if kind in _INTEGERS:
        return ("sum", "prod", "min", "max", "band", "bor", "bxor")
    return ("sum", "mean", "prod") if kind in _COMPLEX else ("sum", "mean", "prod", "min", "max")


@dataclass(frozen=True)
class Case:
    """One operation; `out` says where the result goes, `uneven` that sizes differ between ranks."""

    operation: str
    dtype: torch.dtype
    op: Op
    numel: int
    root: int
    out: str
    uneven: bool
    seed: int

    def shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of a rank's input: of two dimensions where the size allows it."""
        numel = self.numel + (3 * rank if self.uneven else 0)
        return (numel // 3, 3) if numel % 3 == 0 else (numel,)

    def given(self, rank: int, to: int = 0) -> Tensor:
        """Return the input of `rank` (for rank `to`), the same wherever it is asked for."""
        generator = torch.Generator().manual_seed(hash((self.seed, rank, to)) & 0x7FFF_FFFF)
        return _random(self.shape(to if self.operation == "scatter" else rank), self.dtype, self.op, generator)


def cases(operation: str, size: int, *, limit: int, seed: int, large: int = 70_001) -> Iterator[Case]:
    """Yield cases of `operation` for `size` ranks: all of them, or about `limit` drawn with `seed`.

    What is drawn has each dtype with each of its operators, each size, root and place for the result.
    """
    draw = random.Random(f"{operation} {size} {seed}")
    kinds = [(kind, op) for kind in DTYPES for op in (operators(kind) if operation in REDUCTIONS else ("",))]
    # None, one, fewer than ranks, even, odd, large
    large //= size if operation in ("scatter", "alltoall", "alltoall_single") else 1
    numels = tuple(dict.fromkeys((0, 1, max(1, size - 1), 4 * size, 6 * size + 3, large)))
    roots = tuple(range(size)) if operation in _ROOTED else (0,)
    uneven = (False, True) if operation in _UNEVEN else (False,)
    outs = _OUTS[operation]
    count = len(kinds) * len(numels) * len(roots) * len(uneven) * len(outs)
    chosen: Iterator[tuple[Any, ...]]
    if count <= limit:
        chosen = iter(product(kinds, numels, roots, outs, uneven))
    else:
        columns = [_dealt(draw, values, max(limit, len(kinds))) for values in (kinds, numels, roots, outs, uneven)]
        chosen = zip(*columns, strict=True)
    for (kind, op), numel, root, out, differ in chosen:
        yield Case(operation, kind, op, numel, root, out, differ, draw.randrange(1 << 30))


def _dealt(draw: random.Random, values: Any, count: int) -> list[Any]:
    """Return `count` of `values` in random order, each about as often as the others."""
    deck = list(values) * (count // len(values) + 1)
    deck = deck[:count]
    draw.shuffle(deck)
    return deck


async def check(coll: Communicator, case: Case) -> None:
    """Run `case`, which all ranks must do, and raise AssertionError where the result is wrong."""
    __tracebackhide__ = True
    try:
        await _CHECKS[case.operation](coll, case)
    except Exception as error:
        error.add_note(f"rank {coll.rank} of {coll.size}: {case}")
        raise


# --- inputs and expectations ----------------------------------------------------------------------------------------


def _random(shape: tuple[int, ...], kind: torch.dtype, op: str, generator: torch.Generator) -> Tensor:
    if kind is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if kind in _INTEGERS:
        info = torch.iinfo(kind)
        low, high = max(info.min, -(1 << 62)), min(info.max, 1 << 62)
        return torch.randint(low, high, shape, generator=generator).to(kind)
    if kind in _COMPLEX:
        if op == "prod":
            turns = torch.randint(0, 4, shape, generator=generator)
            return torch.tensor([1, 1j, -1, -1j], dtype=kind)[turns]
        parts = torch.randint(-6, 7, (*shape, 2), generator=generator)
        return torch.view_as_complex(parts.to(torch.float64)).to(kind)
    if op == "prod":
        return torch.randint(0, 2, shape, generator=generator).mul(2).sub(1).to(kind)
    return torch.randint(-6, 7, shape, generator=generator).to(kind)


def _reduced(parts: list[Tensor], kind: torch.dtype, op: str) -> Tensor:
    wide = torch.float64 if kind in _FLOATS else torch.complex128 if kind in _COMPLEX else kind
    total = fold(_UFUNCS[op], (part.to(wide).numpy() for part in parts))
    if op == "mean":  # complex division of NumPy's rounds twice
        total = (total.view(np.float64) / len(parts)).view(total.dtype)
    return torch.from_numpy(np.asarray(total)).to(kind).view(parts[0].shape)


def _out(case: Case, like: Tensor) -> Tensor | None:
    """Return where the result, which is `like` that, is to go."""
    if case.out in ("", "input", "block"):
        return None
    numel = {"exact": like.numel(), "larger": like.numel() + 5, "smaller": like.numel() // 2, "any": 0}[case.out]
    if case.out == "exact":
        return torch.zeros_like(like)
    return torch.zeros(numel, dtype=like.dtype)


def _same(seen: object, expected: Tensor, what: str = "result") -> None:
    assert isinstance(seen, Tensor), f"{what} is {type(seen).__name__}"
    assert seen.dtype is expected.dtype, f"{what} holds {seen.dtype}: expected {expected.dtype}"
    assert seen.shape == expected.shape, f"{what} has shape {list(seen.shape)}: expected {list(expected.shape)}"
    if not torch.equal(seen, expected):
        wrong = int((seen != expected).view(-1).nonzero()[0, 0])
        raise AssertionError(
            f"{what} differs from element {wrong} on: {seen.view(-1)[wrong]}, expected {expected.view(-1)[wrong]}"
        )


def _in_out(out: Tensor | None, seen: Tensor) -> None:
    assert out is None or seen.numel() == 0 or seen.data_ptr() == out.data_ptr(), "the result is not in out"


# --- reductions -------------------------------------------------------------------------------------------------------


async def _allreduce(coll: Communicator, case: Case) -> None:
    inputs = [case.given(rank) for rank in range(coll.size)]
    await _in_place_or_out(coll.allreduce, case, inputs[coll.rank], _reduced(inputs, case.dtype, case.op))


async def _scan(coll: Communicator, case: Case) -> None:
    inputs = [case.given(rank) for rank in range(coll.rank + 1)]
    await _in_place_or_out(coll.scan, case, inputs[coll.rank], _reduced(inputs, case.dtype, case.op))


async def _exscan(coll: Communicator, case: Case) -> None:
    inputs = [case.given(rank) for rank in range(coll.rank)]
    t = case.given(coll.rank)
    expected = _reduced(inputs, case.dtype, case.op) if inputs else t.clone()
    await _in_place_or_out(coll.exscan, case, t, expected)


async def _in_place_or_out(call: Callable[..., Any], case: Case, t: Tensor, expected: Tensor) -> None:
    before = t.clone()
    out = t if case.out == "input" else _out(case, expected)
    result = await (call(t, case.op) if out is None else call(t, case.op, out=out))
    _same(result, expected)
    if out is None:
        assert result is t, "in place returns the same object"
    elif out is not t:
        _in_out(out, result)
        _same(t, before, "the input")


async def _reduce(coll: Communicator, case: Case) -> None:
    inputs = [case.given(rank) for rank in range(coll.size)]
    t = inputs[coll.rank]
    if coll.rank == case.root:
        expected = _reduced(inputs, case.dtype, case.op)

        def call(t: Tensor, op: Op, **options: Any) -> Any:
            return coll.reduce(t, op, case.root, **options)

        await _in_place_or_out(call, case, t, expected)
        return
    before = t.clone()
    assert await coll.reduce(t, case.op, case.root) is None
    _same(t, before, "the input")


async def _reduce_scatter(coll: Communicator, case: Case) -> None:
    even = Case(**{**case.__dict__, "uneven": False})
    inputs = [even.given(rank) for rank in range(coll.size)]
    t = inputs[coll.rank]
    total = _reduced(inputs, case.dtype, case.op)
    sizes = None
    if case.uneven:
        draw = random.Random(case.seed)
        cuts = sorted(draw.randint(0, t.numel()) for _ in range(coll.size - 1))
        sizes = [b - a for a, b in zip([0, *cuts], [*cuts, t.numel()], strict=True)]
        expected, block = (torch.split(x.view(-1), sizes)[coll.rank] for x in (total, t))
    else:
        rows, more = divmod(t.shape[0], coll.size)
        cut = [rows + (rank < more) for rank in range(coll.size)]
        expected, block = (torch.split(x, cut)[coll.rank] for x in (total, t))
    before = t.clone()
    out = {"input": t, "block": block}.get(case.out, _out(case, expected))
    result = await coll.reduce_scatter(t, case.op, sizes, out=out)
    _same(result, expected)
    _in_out(out, result)
    if case.out not in ("input", "block"):
        _same(t, before, "the input")


# --- moving ----------------------------------------------------------------------------------------------------------


async def _broadcast(coll: Communicator, case: Case) -> None:
    t = case.given(coll.rank)
    assert await coll.broadcast(t, case.root) is t
    _same(t, case.given(case.root))


async def _gather(coll: Communicator, case: Case) -> None:
    await _gathered(coll, case, coll.gather, case.root)


async def _allgather(coll: Communicator, case: Case) -> None:
    await _gathered(coll, case, coll.allgather, None)


async def _gathered(coll: Communicator, case: Case, call: Callable[..., Any], root: int | None) -> None:
    flat = case.out not in ("", "block") or case.uneven
    inputs = [case.given(rank).view(-1) if flat else case.given(rank) for rank in range(coll.size)]
    t = inputs[coll.rank]
    before = t.clone()
    arguments = () if root is None else (root,)
    joined = torch.cat(inputs)
    out = torch.zeros_like(joined) if case.out == "block" else _out(case, joined)
    if case.out == "block" and out is not None:
        block = torch.split(out, [x.shape[0] for x in inputs])[coll.rank]
        block.copy_(t)
        t = block
    result = await (call(t, *arguments) if out is None else call(t, *arguments, out=out))
    if root not in (None, coll.rank):
        assert result is None
    elif out is None:
        assert isinstance(result, list)
        assert len(result) == coll.size
        for rank, (seen, expected) in enumerate(zip(result, inputs, strict=True)):
            _same(seen, expected, f"result[{rank}]")
    else:
        _same(result, joined)
        _in_out(out, result)
    _same(t, before, "the input")


async def _scatter(coll: Communicator, case: Case) -> None:
    ts = [case.given(case.root, rank) for rank in range(coll.size)] if coll.rank == case.root else None
    expected = case.given(case.root, coll.rank)
    out = _out(case, expected)
    result = await coll.scatter(ts, case.root, out=out)
    _same(result, expected)
    _in_out(out, result)
    assert ts is None or all(torch.equal(t, case.given(case.root, rank)) for rank, t in enumerate(ts))


async def _alltoall(coll: Communicator, case: Case) -> None:
    ts = [case.given(coll.rank, rank) for rank in range(coll.size)]
    expected = [case.given(rank, coll.rank) for rank in range(coll.size)]
    outs = None if case.out == "" else [out for x in expected if (out := _out(case, x)) is not None]
    result = await coll.alltoall(ts, out=outs)
    assert len(result) == coll.size
    for rank, (seen, wanted) in enumerate(zip(result, expected, strict=True)):
        _same(seen, wanted, f"result[{rank}]")
        _in_out(None if outs is None else outs[rank], seen)
        _same(ts[rank], case.given(coll.rank, rank), f"ts[{rank}]")


async def _alltoall_single(coll: Communicator, case: Case) -> None:
    def block(source: int, to: int) -> Tensor:
        given = case.given(source, to)
        if not case.uneven:
            return given
        return given.view(-1)[: (source + 2 * to + case.seed) % (given.numel() + 1)]

    blocks = [block(coll.rank, to) for to in range(coll.size)]
    t, expected = torch.cat(blocks), torch.cat([block(source, coll.rank) for source in range(coll.size)])
    before, out = t.clone(), t if case.out == "input" else _out(case, expected)
    sizes = [len(block) for block in blocks] if case.uneven else None
    result = await coll.alltoall_single(t, out=out, sizes=sizes)
    _same(result, expected)
    _in_out(out, result)
    if out is not t:
        _same(t, before, "the input")


async def _send_recv(coll: Communicator, case: Case) -> None:
    after, before = (coll.rank + 1) % coll.size, (coll.rank - 1) % coll.size
    tag = case.seed % 1000
    t, expected = case.given(coll.rank), case.given(before)
    into = None if case.out == "" else _out(case, expected)
    if case.out == "any":
        into = torch.zeros_like(expected)
        receive = coll.recv(into, ANY, ANY)
    else:
        receive = coll.recv(into, before, tag)
    sent = coll.send(t, after, tag)
    result = await receive
    await sent
    assert (receive.source, receive.tag, receive.nbytes) == (before, tag, expected.nbytes)
    assert into is None or result is into
    if case.out == "larger":
        _same(result[: expected.numel()], expected.view(-1))
        assert not result[expected.numel() :].any()
    else:
        _same(result, expected)
    if case.out == "any":
        await coll.barrier()  # else the next case's message might be the one that is taken


async def _sendrecv(coll: Communicator, case: Case) -> None:
    after, before = (coll.rank + 1) % coll.size, (coll.rank - 1) % coll.size
    t, expected = case.given(coll.rank), case.given(before)
    out = _out(case, expected) if case.out != "smaller" else None
    result = await coll.sendrecv(t, after, before, out, tag=3)
    if out is not None and case.out == "larger":
        result = result.view(-1)[: expected.numel()].view(expected.shape)
    _same(result, expected)
    _same(t, case.given(coll.rank), "the input")


_CHECKS: dict[str, Callable[[Communicator, Case], Any]] = {
    "allreduce": _allreduce,
    "reduce": _reduce,
    "scan": _scan,
    "exscan": _exscan,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "gather": _gather,
    "allgather": _allgather,
    "scatter": _scatter,
    "alltoall": _alltoall,
    "alltoall_single": _alltoall_single,
    "send_recv": _send_recv,
    "sendrecv": _sendrecv,
}
