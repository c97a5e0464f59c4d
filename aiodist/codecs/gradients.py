"""The exchange that sums the gradients of all ranks as codes.

An exchange is a generator that does no I/O: it yields tensors to add up or to gather, and is sent the answers. All
ranks yield the same requests, in the same order. `nn/compression` drives it.
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
    """Add up `tensor` over all ranks, in place; the answer is ignored."""

    tensor: Tensor
    op: Literal["sum", "max"] = "sum"


class NarrowSum(NamedTuple):
    """Add up 16-bit floats of all ranks in float32, and write `factor` times the sum to `out`.

    The answer is a `RoundingLoss`.
    """

    tensor: Tensor
    out: Tensor
    """A flat tensor of a dtype that holds sums of `tensor`."""
    factor: float = 1.0


class RoundingLoss(NamedTuple):
    """The loss of sums that were rounded before they were sent. Each element of it goes to one rank."""

    start: int
    """Index of `rest` in the sum."""
    rest: Tensor
    """The sum minus the rounded sum."""


class Gather(NamedTuple):
    """Give all ranks the codes of all; the answer is their list, by rank."""

    code: Tensor


Exchange = Generator[Sum | NarrowSum | Gather, Any, None]


@dataclass
class Gradients:
    """Gradients that are reduced together, on one rank: flat, contiguous and on the CPU."""

    total: Tensor
    """The gradients of this rank plus its residual. With `feedback` the codec subtracts the decoded code."""
    out: Tensor
    """Output, `factor` times the sum of all ranks, in the dtype of `total`; without `feedback` maybe `total` itself."""
    shapes: Sequence[tuple[int, ...]]
    """Shapes of the parameters in memory, in the order of the flat tensor."""
    names: Sequence[str]
    """Names of the parameters."""
    size: int
    """Number of ranks."""
    factor: float = 1.0
    """Factor of the sum: 1 over the number of ranks for a mean."""
    number: int = 0
    """Number of earlier exchanges, the same on all ranks."""
    feedback: bool = True
    """True keeps the rest of `total` for the next exchange."""

    def pieces(self, of: Tensor) -> list[Tensor]:
        """Return the parts of `total` or `out` that belong to the parameters, flat."""
        return list(of.split([torch.Size(shape).numel() for shape in self.shapes]))


class GradientCodec:
    """A codec that defines how ranks combine its codes; by default each rank gathers all codes, and adds them up.

    Derive from it for a better exchange than that. Any other `Codec` is wrapped in one.
    """

    unbiased: ClassVar[bool] = False
    """True if the mean of many codes equals the encoded tensor, so that no residual is needed."""
    elementwise: ClassVar[bool] = False
    """True if an element's code depends on no other element, so parts of a large bucket may be exchanged apart."""
    sums: bool = True
    """True if `combine` adds up; else all ranks keep equal parts of its difference to the sum of the codes."""

    def encode(self, t: Tensor) -> Tensor:
        """Return the code of `t`, as `Codec.encode`."""
        raise NotImplementedError

    def decode(self, code: Tensor, dtype: torch.dtype, numel: int) -> Tensor:
        """Return the tensor, as `Codec.decode`."""
        raise NotImplementedError

    def encode_next(self, t: Tensor, number: int) -> Tensor:
        """Return the code of `t` in the exchange of this `number`, which seeds the draws of a random codec."""
        return self.encode(t)

    def add(self, code: Tensor, out: Tensor, alpha: float = 1.0) -> None:
        """Add `alpha` times the decoded `code` to `out`, flat; raises as `decode`."""
        out.add_(self.decode(code, out.dtype, out.numel()), alpha=alpha)

    def combine(self, codes: Sequence[Tensor], out: Tensor, factor: float = 1.0) -> None:
        """Write to `out`, flat, `factor` times the combined codes of all ranks: their sum, by default."""
        out.zero_()
        for code in codes:
            self.add(code, out, factor)

    def exchange(self, gradients: Gradients, kept: dict[str, Tensor]) -> Exchange:
        """Write the sum of all ranks to `gradients.out`; `kept` is the codec's own state, by parameter."""
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
    """Base of the codecs of this package: the length of a code depends only on numel and dtype.

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
        """Return the number of bytes after the head."""
        raise NotImplementedError

    def write(self, t: Tensor, payload: Tensor, number: int) -> int:
        """Fill `payload`; return the number in the head for `read`."""
        raise NotImplementedError

    def read(self, payload: Tensor, dtype: torch.dtype, numel: int, param: int) -> Tensor:
        """Return the tensor of `write`; the length of `payload` is right, and nothing else in it was checked."""
        raise NotImplementedError


@dataclass(frozen=True)
class DrawingCodec(FloatCodec):
    """A codec with random draws, which are the same for the same `seed` and number of the call.

    A copy begins at the first call. Exchanges of gradients draw by their number, so training that continues from a
    checkpoint draws the same values as without the interruption.
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
