"""Datatypes, operators, and buffers as tensors of the same memory."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from aiodist.compat.errors import CLASSES, MPIError
from aiodist.compat.missing import left_out
from aiodist.streams.writes import check_writable
from aiodist.types import ReduceOp

IN_PLACE = type("InPlace", (), {"__repr__": lambda self: "IN_PLACE"})()


@dataclass(frozen=True)
class Datatype:
    """A type of elements, such as INT, with numpy's `dtype`."""

    name: str
    dtype: np.dtype[Any]

    def Get_size(self) -> int:
        """Return the bytes of an element."""
        return self.dtype.itemsize

    size = property(Get_size)

    def __getattr__(self, name: str) -> NoReturn:
        left_out(f"Datatype.{name}")


class NullDatatype(Datatype):
    """`DATATYPE_NULL`, which is false. Each call that needs a datatype raises an `MPI.Exception` of ERR_TYPE."""

    def __init__(self) -> None:
        super().__init__("MPI_DATATYPE_NULL", np.dtype("V"))

    def __bool__(self) -> bool:
        return False

    def Get_size(self) -> int:
        """Raise `MPIError`, since there are no elements."""
        raise MPIError(CLASSES["ERR_TYPE"], "DATATYPE_NULL is no datatype of elements: expected one such as MPI.INT")

    size = property(Get_size)

    def __getattr__(self, name: str) -> NoReturn:
        if not name.startswith("_"):
            self.Get_size()
        raise AttributeError(name)


_CODES = {
    "?": "BOOL C_BOOL",
    "b": "CHAR SIGNED_CHAR",
    "B": "BYTE PACKED UNSIGNED_CHAR",
    "h": "SHORT",
    "H": "UNSIGNED_SHORT",
    "i": "INT",
    "I": "UNSIGNED UNSIGNED_INT",
    "l": "LONG",
    "L": "UNSIGNED_LONG",
    "q": "LONG_LONG",
    "Q": "UNSIGNED_LONG_LONG",
    "f": "FLOAT",
    "d": "DOUBLE",
    "g": "LONG_DOUBLE",
    "F": "COMPLEX C_FLOAT_COMPLEX",
    "D": "DOUBLE_COMPLEX C_DOUBLE_COMPLEX",
    "G": "C_LONG_DOUBLE_COMPLEX",
    **{f"i{bits // 8}": f"INT{bits}_T" for bits in (8, 16, 32, 64)},
    **{f"u{bits // 8}": f"UINT{bits}_T" for bits in (8, 16, 32, 64)},
}
"""Names of datatypes by numpy's code."""
DATATYPES = {name: Datatype(name, np.dtype(code)) for code, names in _CODES.items() for name in names.split()}


@dataclass(frozen=True)
class Op:
    """An operator of reductions."""

    name: str
    objects: Callable[[Any, Any], Any]
    """Function of two Python objects, the lower rank's first."""
    arrays: Callable[[Any, Any], Any]
    """Function of two numpy arrays."""
    native: ReduceOp | None = None
    """Operator of communicators, or None if they have none."""
    takes: str = "biufcmMSUV"
    """Kinds of numpy's dtypes that are allowed in buffers."""

    @classmethod
    def Create(cls, function: Callable[[Any, Any, Any], Any], commute: bool = False) -> Op:
        """Return the operator of `function(a, b, datatype)`, as in mpi4py. `datatype` is None.

        For buffers, `a` and `b` are writable bytes, and the function writes `a op b` to `b`. For objects, the function
        returns `a op b`. `commute` is ignored, since reductions combine in rank order.
        """

        def arrays(a: Any, b: Any) -> Any:
            result = b.copy()
            function(memoryview(a).cast("B"), memoryview(result).cast("B"), None)
            return result

        return cls("user", lambda a, b: function(a, b, None), arrays)

    def Free(self) -> None:
        """Do nothing. Raise `MPIError` of ERR_OP for an operator of MPI."""
        if self.name in OPS:
            raise MPIError(CLASSES["ERR_OP"], f"{self.name} is an operator of MPI: expected one of Op.Create")

    def __call__(self, a: Any, b: Any) -> Any:
        """Return `a op b` of two objects."""
        return self.objects(a, b)


class NullOp(Op):
    """`OP_NULL`, which is false. Each call with it raises an `MPI.Exception` of ERR_OP."""

    def __init__(self) -> None:
        super().__init__("MPI_OP_NULL", self._refuse, self._refuse)

    def __bool__(self) -> bool:
        return False

    def Free(self) -> None:
        """Raise `MPIError`."""
        self._refuse()

    @staticmethod
    def _refuse(*_: Any) -> NoReturn:
        raise MPIError(CLASSES["ERR_OP"], "OP_NULL is no operator: expected one such as MPI.SUM, or of Op.Create")


def check_op(op: Any, kind: str | None = None) -> None:
    """Raise TypeError unless `op` is an operator, and `MPIError` of ERR_OP unless it takes elements of `kind`.

    `kind` is that of numpy's dtype, for buffers.
    """
    if isinstance(op, NullOp):
        op.Free()
    if kind is None:
        if not callable(op):
            raise TypeError(f"op is {type(op).__name__}: expected an operator such as MPI.SUM, or a function of two")
        return
    if not isinstance(op, Op):
        raise TypeError(f"op is {type(op).__name__}: expected an operator such as MPI.SUM, or of Op.Create")
    if not op.takes:
        raise MPIError(CLASSES["ERR_OP"], f"{op.name} takes no buffers here: expected objects, allreduce() or reduce()")
    if kind not in op.takes:
        kinds = ", ".join(_KIND_NAMES[one] for one in op.takes)
        raise MPIError(CLASSES["ERR_OP"], f"{op.name} of {_KIND_NAMES.get(kind, kind)}: expected {kinds}")


_KIND_NAMES = {"b": "bool", "i": "integers", "u": "unsigned integers", "f": "floats", "c": "complex numbers"}


def _located(better: Callable[[Any, Any], bool]) -> Callable[[Any, Any], Any]:
    """Return a function that chooses one of two pairs (value, place): the better value, or the lower place."""

    def choose(a: Any, b: Any) -> Any:
        if a[0] == b[0]:
            return a if a[1] <= b[1] else b
        return a if better(a[0], b[0]) else b

    return choose


def _no_arrays(a: object, b: object) -> object:
    raise TypeError("expected Python objects")


OPS = {
    op.name: op
    for op in (
        Op("SUM", operator.add, np.add, ReduceOp.SUM, "iufc"),
        Op("PROD", operator.mul, np.multiply, ReduceOp.PROD, "iufc"),
        Op("MAX", max, np.maximum, ReduceOp.MAX, "biuf"),
        Op("MIN", min, np.minimum, ReduceOp.MIN, "biuf"),
        Op("BAND", operator.and_, np.bitwise_and, ReduceOp.BAND, "biu"),
        Op("BOR", operator.or_, np.bitwise_or, ReduceOp.BOR, "biu"),
        Op("BXOR", operator.xor, np.bitwise_xor, ReduceOp.BXOR, "biu"),
        Op("LAND", lambda a, b: bool(a) and bool(b), np.logical_and, None, "biu"),
        Op("LOR", lambda a, b: bool(a) or bool(b), np.logical_or, None, "biu"),
        Op("LXOR", lambda a, b: bool(a) != bool(b), np.logical_xor, None, "biu"),
        Op("MAXLOC", _located(operator.gt), _no_arrays, None, ""),
        Op("MINLOC", _located(operator.lt), _no_arrays, None, ""),
        Op("REPLACE", lambda a, b: b, _no_arrays, None, ""),
        Op("NO_OP", lambda a, b: a, _no_arrays, None, ""),
    )
}
DATATYPE_NULL, OP_NULL = NullDatatype(), NullOp()


# --- buffers ----------------------------------------------------------------------------------------------------------

_KINDS: dict[np.dtype[Any], torch.dtype] = {
    np.dtype(code): getattr(torch, np.dtype(code).name) for code in "?BbhilefdFD"
}


class Buffer(NamedTuple):
    """The elements that a call reads or writes."""

    octets: Tensor
    """Bytes of the elements in the caller's memory: uint8 of shape (nbytes,)."""
    dtype: np.dtype[Any]
    torch_kind: torch.dtype | None = None
    """Torch's dtype if numpy has no such type, otherwise None. Only the size of `dtype` then counts."""

    @property
    def kind(self) -> np.dtype[Any] | torch.dtype:
        """Type of the elements."""
        return self.torch_kind or self.dtype

    @property
    def number_kind(self) -> str:
        """Kind of the numbers as a letter of numpy's dtypes. Types that only torch has are floats."""
        return "f" if self.torch_kind is not None else self.dtype.kind

    def blocks(self, count: int) -> list[Tensor]:
        """Return the bytes in `count` equal blocks."""
        return list(self.octets.view(count, self.octets.numel() // count))

    def block(self, number: int, count: int) -> Buffer:
        """Return block `number` of `count` equal blocks."""
        return self._replace(octets=self.blocks(count)[number])

    def copied(self) -> Buffer:
        """Return a copy of the elements."""
        return self._replace(octets=self.octets.clone())

    @property
    def length(self) -> int:
        """Number of elements."""
        return self.octets.numel() // self.dtype.itemsize

    def part(self, start: int, nbytes: int) -> Buffer:
        """Return `nbytes` bytes from `start` on. Raise ValueError if there are fewer."""
        if start < 0 or nbytes < 0 or start + nbytes > self.octets.numel():
            size = self.dtype.itemsize
            raise ValueError(
                f"{nbytes // size} elements from {start // size} on of a buffer of {self.length}: expected a buffer "
                "that holds them"
            )
        return self._replace(octets=self.octets[start : start + nbytes])

    def numbers(self) -> Tensor | None:
        """Return the elements as a tensor of numbers, or None if torch has no arithmetic for them."""
        kind = self.torch_kind or _KINDS.get(self.dtype)
        return None if kind is None else self.octets.view(kind)

    def typed(self) -> Tensor | None:
        """Return the elements as a tensor of a dtype that communicators move, or None for other types."""
        kind = self.torch_kind or _KINDS.get(self.dtype)
        return self.octets.view(kind) if kind in _MOVED else None

    def sent(self) -> Tensor:
        """Return the elements for a message: unsigned integers as signed ones, types without tensors as bytes."""
        signed = np.dtype(f"i{self.dtype.itemsize}") if self.dtype.kind == "u" and self.dtype.isnative else self.dtype
        t = self._replace(dtype=signed).typed() if self.dtype.itemsize > 1 else self.typed()
        return self.octets if t is None else t

    def words(self) -> str:
        """Return the name of the datatype that ranks compare."""
        return str(self.torch_kind or (self.dtype.name if self.dtype.isnative else self.dtype.str))


_MOVED = {*_KINDS.values(), torch.bfloat16}


def buffer_of(spec: Any, blocks: int = 1, *, written: bool = False) -> Buffer:
    """Return the elements of `spec`: a buffer, or [buffer, count, datatype] with count and datatype optional.

    The count is that of each of the `blocks`. Without a count, the whole buffer is returned. Raises TypeError unless
    the buffer is contiguous, on the CPU and writable if `written`, and ValueError if the buffer is too short.
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
    return whole.part(start, nbytes)


def blocks_of(spec: Any, ranks: int, *, written: bool = False) -> list[Buffer]:
    """Return each rank's block of `spec`: [buffer, counts, displacements, datatype], the middle two in elements.

    One count is for all blocks, one displacement is the distance of blocks. By default, blocks are nearly equal and
    adjacent. Counts and displacements may be in a tuple. Raises as `buffer_of`.
    """
    (counts, places), whole = _parsed(spec, written)
    size, elements = whole.dtype.itemsize, whole.length
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
    return [whole.part(int(at) * size, int(n) * size) for n, at in zip(counts, places, strict=True)]


def _parsed(spec: Any, written: bool) -> tuple[tuple[Any, Any], Buffer]:
    """Return counts and displacements of `spec`, or None for each, and the whole buffer."""
    data, rest = (spec[0], list(spec[1:])) if isinstance(spec, (list, tuple)) else (spec, [])
    given = rest.pop() if rest and isinstance(rest[-1], (Datatype, str)) else None
    if len(rest) == 1 and isinstance(rest[0], tuple):
        rest = list(rest[0])
    if len(rest) > 2:
        raise ValueError(f"a buffer of {len(spec)} parts: expected [data, counts, displacements, datatype] at most")
    counts, places = (_plain(x) for x in [*rest, None, None][:2])
    whole = _memory(data, written)
    if given is not None:
        kind = DATATYPES.get(given, given) if isinstance(given, str) else given
        if isinstance(kind, Datatype):
            kind.Get_size()  # raises for DATATYPE_NULL
        whole = Buffer(whole.octets, kind.dtype if isinstance(kind, Datatype) else np.dtype(kind))
    return (counts, places), whole


def _plain(x: Any) -> int | Sequence[int] | None:
    return x if x is None else int(x) if isinstance(x, (int, np.integer)) else [int(one) for one in x]


def _memory(data: Any, written: bool) -> Buffer:
    if data is None:
        return Buffer(torch.empty(0, dtype=torch.uint8, device="cpu"), np.dtype("B"))
    if isinstance(data, Tensor):
        if written:
            check_writable(data, "a receive or collective", "its buffer")
        t = data.detach() if data.is_contiguous() else data.detach().permute(_in_memory(data.stride()))
        if not t.is_cpu or not t.is_contiguous():
            raise TypeError(f"a tensor on {data.device}, strides {data.stride()}: expected a contiguous one on the CPU")
        memory = t.reshape(-1).view(torch.uint8)
        try:
            return Buffer(memory, torch.empty(0, dtype=data.dtype, device="cpu").numpy().dtype)
        except TypeError:  # bfloat16 and others
            return Buffer(memory, np.dtype(f"V{data.itemsize}"), data.dtype)
    given = data if isinstance(data, np.ndarray) else _array(data)
    array = given if given.flags.c_contiguous else given.transpose(_in_memory(given.strides))
    if not array.flags.c_contiguous:
        raise TypeError(f"an array of shape {given.shape}, strides {given.strides}: expected a contiguous one")
    octets = array.reshape(-1).view(np.uint8)
    if not octets.flags.writeable:
        if written:
            raise TypeError(f"{type(data).__name__} is read-only: expected a buffer that can be written")
        octets = octets.copy()  # torch has no read-only tensors
    return Buffer(torch.from_numpy(octets), array.dtype)


def _in_memory(strides: Sequence[int]) -> list[int]:
    """Return the dimensions in the order of their strides. Elements travel in memory order, as with mpi4py."""
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])


def _array(data: Any) -> np.ndarray[Any, Any]:
    try:
        view = memoryview(data)
        if not view.c_contiguous:
            return np.asarray(view)
        return np.frombuffer(view, np.dtype(view.format or "B")) if view.nbytes else np.empty(0, view.format or "B")
    except (TypeError, BufferError, ValueError) as error:
        raise TypeError(f"{type(data).__name__} is no contiguous buffer: {error}") from None
