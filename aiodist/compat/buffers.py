"""What mpi4py takes as a buffer, as tensors that share its memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from aiodist.compat.kinds import DATATYPES, Datatype

_KINDS: dict[np.dtype[Any], torch.dtype] = {
    np.dtype(kind): getattr(torch, kind)
    for kind in (
        *("bool", "uint8", "int8", "int16", "int32", "int64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
}
_WHOLE = (None, None)


class Buffer(NamedTuple):
    """The elements that a call reads or writes."""

    octets: Tensor
    """Their bytes, uint8 of shape (nbytes,), in the memory of the caller."""
    dtype: np.dtype[Any]
    torch_kind: torch.dtype | None = None
    """What they are, where numpy has no such type: `dtype` tells their size alone then."""

    @property
    def kind(self) -> np.dtype[Any] | torch.dtype:
        """What the elements are."""
        return self.torch_kind or self.dtype

    def block(self, number: int, of: int) -> Tensor:
        """Return the bytes of block `number` of so many equal ones."""
        length = self.octets.numel() // of
        return self.octets[number * length : (number + 1) * length]

    def numbers(self) -> Tensor | None:
        """Return the elements as a tensor of numbers; None where torch has no such arithmetic."""
        kind = self.torch_kind or _KINDS.get(self.dtype)
        return None if kind is None else self.octets.view(kind)


@dataclass(frozen=True)
class RankBlocks:
    """A buffer cut into a block for each rank."""

    buffer: Buffer
    slices: list[slice]
    """Of its bytes."""

    def __getitem__(self, rank: int) -> Tensor:
        return self.buffer.octets[self.slices[rank]]


def buffer_of(spec: Any, blocks: int = 1, *, written: bool = False) -> Buffer:  # noqa: ANN401
    """Return the elements that `spec` means: a buffer, or [buffer, count, datatype], each of these two optional.

    A count is that of each of the `blocks`; without one all of the buffer is meant. Raises TypeError for what is no
    contiguous buffer on the CPU, or cannot be `written`, and ValueError for one that is shorter than it says.
    """
    (count, displacement), whole = _parsed(spec, written)
    size = whole.dtype.itemsize
    start = (displacement or 0) * size
    if count is None:
        nbytes = whole.octets.numel() - start
        if nbytes % (size * blocks):
            raise ValueError(f"a buffer of {nbytes // size} elements: expected a multiple of the {blocks} ranks")
    else:
        nbytes = count * size * blocks
    _check(start, nbytes, whole)
    return Buffer(whole.octets[start : start + nbytes], whole.dtype, whole.torch_kind)


def blocks_of(spec: Any, ranks: int, *, written: bool = False) -> RankBlocks:  # noqa: ANN401
    """Return the blocks that `spec` means, [buffer, counts, displacements, datatype]: counts and places in elements.

    One count goes for all, one displacement is the distance of neighbours; without them blocks are as equal as can be,
    and one follows another. A tuple may hold both. Raises as `buffer_of`.
    """
    (counts, places), whole = _parsed(spec, written)
    size, elements = whole.dtype.itemsize, whole.octets.numel() // whole.dtype.itemsize
    if counts is None:
        counts = [elements // ranks + (rank < elements % ranks) for rank in range(ranks)]
    elif isinstance(counts, int):
        counts = [counts] * ranks
    if places is None:
        places = [0, *accumulate(counts)][:ranks]
    elif isinstance(places, int):
        places = [rank * places for rank in range(ranks)]
    if len(counts) != ranks or len(places) != ranks:
        raise ValueError(f"{len(counts)} counts and {len(places)} displacements: expected {ranks}, one for each rank")
    slices = [slice(int(at) * size, (int(at) + int(n)) * size) for n, at in zip(counts, places, strict=True)]
    for part in slices:
        _check(part.start, part.stop - part.start, whole)
    return RankBlocks(whole, slices)


def _check(start: int, nbytes: int, whole: Buffer) -> None:
    if start < 0 or nbytes < 0 or start + nbytes > whole.octets.numel():
        size = whole.dtype.itemsize
        raise ValueError(
            f"{nbytes // size} elements from {start // size} on of a buffer of {whole.octets.numel() // size}: "
            "expected a buffer that holds them"
        )


def _parsed(spec: Any, written: bool) -> tuple[tuple[Any, Any], Buffer]:  # noqa: ANN401
    """Return what is said of counts and displacements, and all of the buffer."""
    data, rest = (spec[0], list(spec[1:])) if isinstance(spec, (list, tuple)) else (spec, [])
    given = rest.pop() if rest and isinstance(rest[-1], (Datatype, str)) else None
    if len(rest) == 1 and isinstance(rest[0], tuple):
        rest = list(rest[0])
    if len(rest) > 2:
        raise ValueError(f"a buffer of {len(spec)} parts: expected [data, counts, displacements, datatype] at most")
    counts, places = (_plain(x) for x in (*rest, *_WHOLE[len(rest) :]))
    whole = _memory(data, written)
    if given is not None:
        whole = Buffer(whole.octets, given.dtype if isinstance(given, Datatype) else _named(given))
    return (counts, places), whole


def _plain(x: Any) -> int | Sequence[int] | None:  # noqa: ANN401
    return x if x is None else int(x) if isinstance(x, (int, np.integer)) else [int(one) for one in x]


def _named(code: str) -> np.dtype[Any]:
    return DATATYPES[code].dtype if code in DATATYPES else np.dtype(code)


def _memory(data: Any, written: bool) -> Buffer:  # noqa: ANN401
    if data is None:
        return Buffer(torch.empty(0, dtype=torch.uint8), np.dtype("B"))
    if isinstance(data, Tensor):
        if not data.is_cpu or not data.is_contiguous():
            raise TypeError(f"a tensor on {data.device}, strides {data.stride()}: expected a contiguous one on the CPU")
        memory = data.detach().reshape(-1).view(torch.uint8)
        try:
            return Buffer(memory, torch.empty(0, dtype=data.dtype).numpy().dtype)
        except TypeError:  # bfloat16 and others
            return Buffer(memory, np.dtype(f"V{data.itemsize}"), data.dtype)
    array = data if isinstance(data, np.ndarray) else _array(data)
    if not array.flags.c_contiguous:
        raise TypeError(f"an array of shape {array.shape}, strides {array.strides}: expected a contiguous one")
    octets = array.reshape(-1).view(np.uint8)
    if not octets.flags.writeable:
        if written:
            raise TypeError(f"{type(data).__name__} is read-only: expected a buffer that can be written")
        octets = octets.copy()  # torch knows no tensors that cannot be written
    return Buffer(torch.from_numpy(octets), array.dtype)


def _array(data: Any) -> np.ndarray[Any, Any]:  # noqa: ANN401
    try:
        view = memoryview(data)
        return np.frombuffer(view, np.dtype(view.format or "B")) if view.nbytes else np.empty(0, view.format or "B")
    except (TypeError, BufferError, ValueError) as error:
        raise TypeError(f"{type(data).__name__} is no contiguous buffer: {error}") from None
