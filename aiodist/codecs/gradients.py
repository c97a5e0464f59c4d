"""Codecs in collectives: what the ranks exchange so that each has the sum of all their gradients.

An exchange is a generator that does no I/O: it yields what is to be added up or gathered, and is sent the answer. All
ranks yield the same, in the same order. `nn/compression` drives it.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from aiodist.codecs.base import HEAD, Codec, Kind, check_input, parse, write_head


class Sum(NamedTuple):
    """Add up `tensor` over all ranks, in place; the answer is not looked at."""

    tensor: Tensor
    op: Literal["sum", "max"] = "sum"


class NarrowSum(NamedTuple):
    """Add up 16-bit floats of all ranks in float32; `factor` times it goes to `out`; answered by a `RoundingLoss`."""

    tensor: Tensor
    out: Tensor
    """Flat, of a dtype in which sums of `tensor` fit."""
    factor: float = 1.0


class RoundingLoss(NamedTuple):
    """What sums lost where they were rounded once more on their way: each element of it is told to one rank alone."""

    start: int
    """Where in the sum `rest` lies."""
    rest: Tensor
    """The sum less what it was rounded to."""


class Gather(NamedTuple):
    """Give all ranks the codes of all; the answer is their list, by rank."""

    code: Tensor


Exchange = Generator[Sum | NarrowSum | Gather, Any, None]


@dataclass
class Gradients:
    """What is reduced together, on one rank; everything is flat, contiguous and on the CPU."""

    total: Tensor
    """What this rank brings, its residual too. With `feedback` the codec takes off what its code says of it."""
    out: Tensor
    """Where `factor` times the sum of all ranks goes; of the dtype of `total`, maybe `total` without `feedback`."""
    shapes: Sequence[tuple[int, ...]]
    """Of the parameters, one behind the other, each as it lies in memory."""
    names: Sequence[str]
    """Theirs."""
    size: int
    """How many ranks exchange."""
    factor: float = 1.0
    """By which the sum is multiplied: 1 over the number of ranks, for a mean."""
    number: int = 0
    """How many exchanges went before; the same on all ranks."""
    feedback: bool = True
    """What `total` holds in the end is kept for the next time."""

    def pieces(self, of: Tensor) -> list[Tensor]:
        """Return the parts of `total` or `out` that belong to the parameters, flat."""
        return list(of.split([torch.Size(shape).numel() for shape in self.shapes]))


class GradientCodec:
    """A codec that says how its codes are put together; by default each rank gathers those of all, and adds up.

    Derive from it, beside `encode` and `decode`, where there is a better way. Any other `Codec` is wrapped in one.
    """

    unbiased: ClassVar[bool] = False
    """The mean of many codes is what was encoded, so that no residual is needed."""
    elementwise: ClassVar[bool] = False
    """An element's code depends on no other element, so parts of a large bucket may be exchanged apart."""
    sums: bool = True
    """`combine` adds up; else all ranks keep equal parts of what it leaves out of the sum of the codes."""

    def encode(self, t: Tensor) -> Tensor:
        """See `Codec`."""
        raise NotImplementedError

    def decode(self, code: Tensor, dtype: torch.dtype, numel: int) -> Tensor:
        """See `Codec`."""
        raise NotImplementedError

    def encode_next(self, t: Tensor, number: int) -> Tensor:
        """Return the code of `t` in the exchange of this `number`, by which a codec draws that draws at random."""
        return self.encode(t)

    def add(self, code: Tensor, out: Tensor, alpha: float = 1.0) -> None:
        """Add `alpha` times what `code` says to `out`, flat; raises as `decode`."""
        out.add_(self.decode(code, out.dtype, out.numel()), alpha=alpha)

    def combine(self, codes: Sequence[Tensor], out: Tensor, factor: float = 1.0) -> None:
        """Write to `out`, flat, `factor` times what the codes of all ranks come to: their sum, by default."""
        out.zero_()
        for code in codes:
            self.add(code, out, factor)

    def exchange(self, gradients: Gradients, kept: dict[str, Tensor]) -> Exchange:
        """Bring the sum of all ranks to `gradients.out`; `kept` is what this codec remembers, by parameter."""
        code = self.encode_next(gradients.total, gradients.number)
        if gradients.feedback:
            self.add(code, gradients.total, -1.0)
        codes = yield Gather(code)
        self.combine(codes, gradients.out, gradients.factor)
        if gradients.feedback and not self.sums:
            for each in codes:
                self.add(each, gradients.total, 1 / gradients.size)
            gradients.total.sub_(gradients.out, alpha=1 / (gradients.size * gradients.factor))


class Gathered(GradientCodec):
    """Any codec as a `GradientCodec`."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.encode = codec.encode  # type: ignore[method-assign]
        self.decode = codec.decode  # type: ignore[method-assign]

    def __repr__(self) -> str:
        return repr(self.codec)


class FloatCodec(GradientCodec):
    """The base of all that are here: a code is a head, and as many bytes as numel and dtype say.

    Takes float16, bfloat16, float32 and float64; any other dtype is a `TypeError`. `decode` raises `ValueError` for a
    code of another codec, dtype, numel or length.
    """

    kind: ClassVar[Kind]

    def encode(self, t: Tensor) -> Tensor:
        return self.encode_next(t, 0)

    def encode_next(self, t: Tensor, number: int) -> Tensor:
        t = check_input(t, type(self).__name__)
        code = torch.empty(HEAD + self.nbytes(t.numel(), t.dtype), dtype=torch.uint8, device="cpu")
        write_head(code, self.kind, t.dtype, t.numel(), self.write(t, code[HEAD:], number))
        return code

    def decode(self, code: Tensor, dtype: torch.dtype, numel: int) -> Tensor:
        param, payload = parse(code, self.kind, dtype, numel, self.nbytes(numel, dtype))
        return self.read(payload, dtype, numel, param)

    def nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """Return how many bytes stand behind the head."""
        raise NotImplementedError

    def write(self, t: Tensor, payload: Tensor, number: int) -> int:
        """Fill `payload`; return the number that the head has for `read`."""
        raise NotImplementedError

    def read(self, payload: Tensor, dtype: torch.dtype, numel: int, param: int) -> Tensor:
        """Return what `write` was given; `payload` has the right length, and nothing else of it was checked."""
        raise NotImplementedError


@dataclass(frozen=True)
class DrawingCodec(FloatCodec):
    """One that draws at random: each call anew, the same for the same `seed` and calls.

    A copy begins at the first call. Exchanges of gradients draw by their number, so training that goes on from a
    checkpoint draws what it would have drawn.
    """

    seed: int = field(default=0, kw_only=True)
    _calls: Iterator[int] = field(default_factory=itertools.count, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_seed(self.seed)

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return partial(type(self), **{each.name: getattr(self, each.name) for each in fields(self) if each.init}), ()

    def encode(self, t: Tensor) -> Tensor:
        return self.encode_next(t, next(self._calls))  # atomic: `itertools.count` is C


def check_seed(seed: int) -> None:
    """Raise ValueError unless it has 63 bits."""
    if not 0 <= seed < 1 << 63:
        raise ValueError(f"seed={seed}: expected at least 0 and less than 2**63")
