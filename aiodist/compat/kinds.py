"""What mpi4py has objects for: datatypes, operators and the status of a message."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from aiodist.types import ANY, ReduceOp

ANY_SOURCE = ANY_TAG = ANY
PROC_NULL, UNDEFINED = -2, -32766
IN_PLACE = type("InPlace", (), {"__repr__": lambda self: "IN_PLACE"})()


@dataclass(frozen=True)
class Datatype:
    """A type of elements, such as INT; `dtype` is numpy's."""

    name: str
    dtype: np.dtype[Any]

    def Get_size(self) -> int:
        """Return the bytes of an element."""
        return self.dtype.itemsize

    size = property(Get_size)


_DTYPES = {
    "BYTE": "B",
    "PACKED": "B",
    "CHAR": "b",
    "SIGNED_CHAR": "b",
    "UNSIGNED_CHAR": "B",
    "SHORT": "h",
    "UNSIGNED_SHORT": "H",
    "INT": "i",
    "UNSIGNED": "I",
    "UNSIGNED_INT": "I",
    "LONG": "l",
    "UNSIGNED_LONG": "L",
    "LONG_LONG": "q",
    "UNSIGNED_LONG_LONG": "Q",
    "FLOAT": "f",
    "DOUBLE": "d",
    "LONG_DOUBLE": "g",
    "BOOL": "?",
    "C_BOOL": "?",
    "COMPLEX": "F",
    "DOUBLE_COMPLEX": "D",
    "C_FLOAT_COMPLEX": "F",
    "C_DOUBLE_COMPLEX": "D",
    "C_LONG_DOUBLE_COMPLEX": "G",
    **{f"INT{bits}_T": f"i{bits // 8}" for bits in (8, 16, 32, 64)},
    **{f"UINT{bits}_T": f"u{bits // 8}" for bits in (8, 16, 32, 64)},
}
DATATYPES = {name: Datatype(name, np.dtype(code)) for name, code in _DTYPES.items()}


@dataclass(frozen=True)
class Op:
    """An operator of reductions."""

    name: str
    objects: Callable[[Any, Any], Any]
    """Of two Python objects, the one of the lower rank first."""
    arrays: Callable[[Any, Any], Any]
    """Of two numpy arrays."""
    native: ReduceOp | None = None
    """What a communicator calls it, None where it has none."""

    @classmethod
    def Create(cls, function: Callable[[Any, Any, Any], Any], commute: bool = False) -> Op:
        """Return the operator of `function(a, b, datatype)`, as mpi4py calls it; `datatype` is None.

        Of buffers, `a` and `b` are writable bytes, and it leaves `a op b` in `b`; of objects it returns `a op b`.
        `commute` makes no difference: ranks are taken in their order.
        """

        def arrays(a: Any, b: Any) -> Any:  # noqa: ANN401
            result = b.copy()
            function(memoryview(a).cast("B"), memoryview(result).cast("B"), None)
            return result

        return cls("user", lambda a, b: function(a, b, None), arrays)

    def Free(self) -> None:
        """Do nothing, as there is nothing to free."""

    def __call__(self, a: Any, b: Any) -> Any:  # noqa: ANN401
        """Return `a op b` of two objects."""
        return self.objects(a, b)


def _located(better: Callable[[Any, Any], bool]) -> Callable[[Any, Any], Any]:
    """Return what chooses between two pairs (value, place): the better value, the lower place of equal ones."""

    def choose(a: Any, b: Any) -> Any:  # noqa: ANN401
        if a[0] == b[0]:
            return a if a[1] <= b[1] else b
        return a if better(a[0], b[0]) else b

    return choose


def _no_arrays(a: object, b: object) -> object:
    raise TypeError("MAXLOC and MINLOC take Python objects, pairs (value, place): use allreduce() or reduce()")


OPS = {
    op.name: op
    for op in (
        Op("SUM", operator.add, np.add, ReduceOp.SUM),
        Op("PROD", operator.mul, np.multiply, ReduceOp.PROD),
        Op("MAX", max, np.maximum, ReduceOp.MAX),
        Op("MIN", min, np.minimum, ReduceOp.MIN),
        Op("BAND", operator.and_, np.bitwise_and, ReduceOp.BAND),
        Op("BOR", operator.or_, np.bitwise_or, ReduceOp.BOR),
        Op("BXOR", operator.xor, np.bitwise_xor, ReduceOp.BXOR),
        Op("LAND", lambda a, b: bool(a) and bool(b), np.logical_and),
        Op("LOR", lambda a, b: bool(a) or bool(b), np.logical_or),
        Op("LXOR", lambda a, b: bool(a) != bool(b), np.logical_xor),
        Op("MAXLOC", _located(operator.gt), _no_arrays),
        Op("MINLOC", _located(operator.lt), _no_arrays),
        Op("REPLACE", lambda a, b: b, lambda a, b: b),
        Op("NO_OP", lambda a, b: a, lambda a, b: a),
    )
}


@dataclass
class Status:
    """Where a message came from, and how long it was."""

    source: int = field(default=ANY_SOURCE)
    tag: int = field(default=ANY_TAG)
    count: int = 0
    """Bytes."""
    error: int = 0

    def Get_source(self) -> int:
        """Return the rank that sent it."""
        return self.source

    def Get_tag(self) -> int:
        """Return its tag."""
        return self.tag

    def Get_count(self, datatype: Datatype = DATATYPES["BYTE"]) -> int:
        """Return how many elements of `datatype` it had, UNDEFINED where it is not a whole number of them."""
        whole, rest = divmod(self.count, datatype.size)
        return UNDEFINED if rest else whole

    Get_elements = Get_count
