"""Checks and conversions of a call's arguments. Errors name the given and the expected value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from aiodist.backends.arithmetic import SUPPORTED
from aiodist.backends.base import dtype_name
from aiodist.collectives.metadata import overlaps, owns_memory
from aiodist.types import ANY

_INT64 = range(-(1 << 63), 1 << 63)


class CallTerms(NamedTuple):
    """Arguments that all collectives have."""

    timeout: float | None = None
    impl: str = "auto"
    name: str | None = None
    """Name for the match with the other ranks. None matches by order."""


def check_tensor(t: object, name: str = "t") -> Tensor:
    """Return `t`, or raise TypeError or ValueError for any but a dense, contiguous tensor of known dtype and device.

    A wrapper of other tensors, such as a DTensor, has no own memory, so the call raises.
    """
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} is {type(t).__name__}: expected a torch.Tensor")
    if t.dtype not in SUPPORTED:
        supported = ", ".join(sorted(map(dtype_name, SUPPORTED)))
        raise TypeError(f"{name} holds {dtype_name(t.dtype)}: expected one of {supported}")
    if t.layout is not torch.strided:
        raise ValueError(f"{name} has layout {t.layout}: expected a dense tensor (torch.strided)")
    if not t.is_cpu and not t.is_cuda:
        raise ValueError(f"{name} is on {t.device}: expected a device of this communicator (cpu or cuda)")
    if not t.is_contiguous():
        raise ValueError(
            f"{name} of shape {list(t.shape)} has strides {t.stride()}: expected contiguous memory, see .contiguous()"
        )
    if t.is_neg() or (t.dtype.is_complex and t.is_conj()):
        raise ValueError(
            f"{name} is a view that torch {'negates' if t.is_neg() else 'conjugates'} as it reads its memory: expected "
            "plain memory, see .resolve_conj() and .resolve_neg()"
        )
    if not t.numel():
        return t
    storage, needed = t.untyped_storage(), (t.storage_offset() + t.numel()) * t.itemsize
    if (present := storage.nbytes()) < needed:
        raise ValueError(f"{name} of shape {list(t.shape)} has {present} bytes of memory: expected {needed}")
    # A fake tensor's storage is on "meta". The device comes first, since `data_ptr` of a fake tensor warns.
    if storage.device.type == "meta" or not t.data_ptr():
        raise TypeError(
            f"{name} is a {type(t).__name__} without memory of its own: expected plain memory, as .to_local() of a "
            "DTensor is"
        )
    return t


def check_list(ts: object, count: int | None, name: str = "ts") -> list[Tensor]:
    """Return `ts` as a list of `count` tensors, each checked."""
    if not isinstance(ts, Sequence):
        raise TypeError(f"{name} is {type(ts).__name__}: expected a list of tensors")
    if count is not None and len(ts) != count:
        raise ValueError(f"{name} has {len(ts)} tensors: expected {count}, one for each rank")
    return [check_tensor(t, f"{name}[{i}]") for i, t in enumerate(ts)]


def check_across(ts: Sequence[Tensor], *, parts: bool = False) -> None:
    """Raise ValueError unless `ts` have one dtype and size, all on the CPU or each on a CUDA device of its own.

    True for `parts` allows all on one CUDA device.
    """
    if any(t.dtype is not ts[0].dtype or t.numel() != ts[0].numel() for t in ts):
        seen = ", ".join(f"{dtype_name(t.dtype)}[{t.numel()}]" for t in ts)
        raise ValueError(f"across=True over {seen}: expected the same dtype and number of elements")
    devices = [t.device for t in ts]
    if all(device.type == "cpu" for device in devices) or (parts and len(set(devices)) == 1):
        return
    listed = ", ".join(map(str, devices))
    if any(device.type == "cpu" for device in devices):
        raise ValueError(f"across=True over tensors on {listed}: expected all on the CPU, or all on CUDA devices")
    if len(devices) > (most := torch.cuda.device_count()):
        raise ValueError(
            f"across=True over {len(devices)} tensors on {listed}: expected {most} at most, one per device"
        )
    if len(set(devices)) < len(devices):
        raise ValueError(f"across=True over tensors on {listed}: expected each on a CUDA device of its own")


def check_one_place(ts: Sequence[Tensor]) -> None:
    """Raise ValueError unless `ts` are all on the CPU, or all on CUDA devices."""
    if len({t.is_cpu for t in ts}) > 1:
        listed = ", ".join(dict.fromkeys(str(t.device) for t in ts))
        raise ValueError(f"ts are on {listed}: expected all on the CPU, or all on CUDA devices")


def check_rank(rank: object, size: int, name: str = "root", *, any_rank: bool = False) -> int:
    """Return `rank` for a rank of the communicator (or ANY, if `any_rank`)."""
    if isinstance(rank, bool) or not isinstance(rank, int):
        raise TypeError(f"{name} is {type(rank).__name__}: expected a rank, an int")
    if any_rank and rank == ANY:
        return rank
    if not 0 <= rank < size:
        raise ValueError(f"{name}={rank}: expected a rank from 0 to {size - 1}")
    return rank


def check_tag(tag: object, *, any_tag: bool = False) -> int:
    """Return `tag` for a number from 0 to 2^62 - 1 (or ANY, if `any_tag`)."""
    if isinstance(tag, bool) or not isinstance(tag, int):
        raise TypeError(f"tag is {type(tag).__name__}: expected an int")
    if any_tag and tag == ANY:
        return tag
    if not 0 <= tag < 1 << 62:
        raise ValueError(f"tag={tag}: expected 0 to 2^62 - 1")
    return tag


def check_name(name: object) -> str:
    """Return `name` for a valid name of an operation."""
    if not isinstance(name, str):
        raise TypeError(f"name is {type(name).__name__}: expected a str")
    if not name:
        raise ValueError("name='': expected at least one character")
    return name


def check_out(out: object, t: Tensor, *, numel: int | None, own_block: bool = False, part: bool = False) -> Tensor:
    """Return `out`, or raise if the dtype or the size does not fit or the memory overlaps the input's.

    `out` needs room for `numel` elements, if given, unless `out` owns its memory and can grow. `out` may be exactly
    `t`. With `part`, `out` may be a part of `t`. With `own_block`, `t` may be a part of `out`.
    """
    checked = check_tensor(out, "out")
    if checked.dtype is not t.dtype:
        raise TypeError(f"out holds {dtype_name(checked.dtype)}, the input {dtype_name(t.dtype)}: expected the same")
    if numel is not None and checked.numel() < numel and not owns_memory(checked):
        raise ValueError(f"out has room for {checked.numel()} elements: expected {numel}, and it cannot grow")
    within = (own_block and _inside(t, checked)) or (part and _inside(checked, t))
    same = checked.data_ptr() == t.data_ptr() and checked.numel() == t.numel()
    if overlaps(checked, t) and not same and not within:
        raise ValueError("out overlaps the input without being it: expected the input itself or other memory")
    return checked


def check_apart(out: Tensor, ts: Sequence[Tensor], own: Tensor) -> None:
    """Raise ValueError if `out` overlaps any of `ts` except `own`."""
    for i, t in enumerate(ts):
        if t is not own and overlaps(out, t):
            raise ValueError(f"out overlaps the input ts[{i}], which belongs to another rank: expected other memory")


def check_sizes(sizes: Sequence[int], total: int, ranks: int, what: str = "elements") -> list[int]:
    """Return `sizes` with a count for each rank and the sum `total`."""
    try:
        checked = [index(size) for size in sizes]
    except TypeError:
        raise TypeError(f"sizes={sizes}: expected {ranks} counts, ints") from None
    if len(checked) != ranks or min(checked, default=0) < 0:
        raise ValueError(f"sizes={checked}: expected {ranks} counts, one for each rank")
    if sum(checked) != total:
        raise ValueError(f"sizes add up to {sum(checked)}: expected the {total} {what} of t")
    return checked


def blocks_of(t: Tensor, sizes: Sequence[int] | None, ranks: int) -> list[torch.Size]:
    """Return the shapes of the blocks that reduce_scatter cuts `t` into."""
    if sizes is not None:
        return [torch.Size([size]) for size in check_sizes(sizes, t.numel(), ranks)]
    if t.dim() == 0:
        raise ValueError("t has no dimension to cut: expected at least one, or sizes=")
    return [block_of(t.shape, rank, ranks) for rank in range(ranks)]


def block_of(shape: torch.Size, rank: int, ranks: int) -> torch.Size:
    """Return the shape of a rank's block of `shape`, cut along dim 0: the first ranks get one row of the remainder."""
    rows, more = divmod(shape[0], ranks)
    return torch.Size([rows + (rank < more), *shape[1:]])


def check_int64(value: object, name: str) -> int | None:
    """Return `value` for None or an int of 64 bits."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise TypeError(f"{name} is {type(value).__name__}: expected an int or None")
    if value is not None and value not in _INT64:
        raise ValueError(f"{name}={value}: expected -2^63 to 2^63 - 1")
    return value


def is_number(x: object) -> bool:
    """Return True for a number that a collective accepts: an int or a float of Python or numpy, not bool."""
    if isinstance(x, bool | np.bool_):
        raise TypeError("a bool is no number here: expected an int, a float or a tensor")
    if isinstance(x, (int, np.integer)) and int(x) not in _INT64:
        raise OverflowError(f"{x} does not fit into 64 bits")
    return isinstance(x, (int, float, np.integer, np.floating))


def _inside(part: Tensor, whole: Tensor) -> bool:
    first = whole.data_ptr()
    return first <= part.data_ptr() and part.data_ptr() + part.nbytes <= first + whole.nbytes


def tensors_of(t: object) -> list[Tensor]:
    """Return one tensor or a list of tensors as a list, each checked."""
    if isinstance(t, Tensor):
        return [check_tensor(t)]
    if not isinstance(t, (list, tuple)):
        raise TypeError(
            f"t is {type(t).__name__}: expected a tensor or a list of tensors; torch.from_numpy converts an array, "
            "and calls such as allgather_object take any object"
        )
    return check_list(t, None, "t")


def lift(t: Any, op: str | None) -> tuple[Any, Callable[[Any], Any]]:  # noqa: ANN401
    """Return a number as a tensor and the inverse conversion. Return other values without change."""
    if not is_number(t):
        return t, lambda result: result
    t = float(t) if isinstance(t, (float, np.floating)) else int(t)
    if isinstance(t, float) or op in ("mean", "avg"):
        return torch.tensor([t], dtype=torch.float64, device="cpu"), _number
    if op == "sum":  # two halves in 64 bits each, with room for the carry of all ranks
        return torch.tensor([t >> 32, t & 0xFFFFFFFF], device="cpu"), _joined
    whole = torch.tensor([t], device="cpu")
    return ([whole, whole.double()], product) if op in ("prod", "product") else (whole, _number)


def _number(result: Any) -> Any:  # noqa: ANN401
    """Return the numbers of tensors of one element, a list for a list."""
    if isinstance(result, list):
        return [each.item() for each in result]
    return None if result is None else result.item()


def _joined(halves: Tensor | None) -> int | None:
    """Return the sum of ints from the sums of the halves."""
    if halves is None:
        return None
    high, low = halves.tolist()
    return int((high << 32) + low)


def product(results: list[Tensor | None]) -> int | None:
    """Return the product of ints, or raise OverflowError if far from the product in floating point."""
    whole, near = results
    if whole is None or near is None:
        return None
    if abs(whole.item() - near.item()) >= 1 << 62:  # an overflow differs by 2^64, rounding by some 2^11
        raise OverflowError(f"the product, some {near.item():.3g}, does not fit into 64 bits")
    return int(whole.item())


def check_single(t: object, name: str) -> None:
    """Raise ValueError unless `t` is one tensor, as `out=` requires."""
    if not isinstance(t, Tensor):
        raise ValueError(f"{name}= requires one tensor as t: expected no {type(t).__name__}")


def check_alike(ts: list[Tensor]) -> list[Tensor]:
    """Return `ts`, or raise ValueError for different dtypes or numbers of elements."""
    if any(t.dtype is not ts[0].dtype or t.numel() != ts[0].numel() for t in ts):
        seen = ", ".join(f"{dtype_name(t.dtype)}[{t.numel()}]" for t in ts)
        raise ValueError(f"ts are {seen}: expected the same dtype and number of elements")
    return ts
