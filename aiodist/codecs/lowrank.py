"""Gradients of matrices as products of two thin ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from aiodist.codecs.base import CHUNK, FLOATS, Head, Kind, check_input, create, parse, part, wide
from aiodist.codecs.gradients import Exchange, Gather, GradientCodec, Gradients, Sum


@dataclass(frozen=True)
class _LowRank(GradientCodec):
    """What both have in common: the code is the two factors of a matrix M ≈ A Bᵀ, of `rank` columns each.

    A flat tensor counts as the matrix nearest to a square that has room for it.
    """

    rank: int = 4
    seed: int = 0
    _rounds: ClassVar[int]
    """How often the basis is multiplied with M Mᵀ before it is used."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank={self.rank}: expected at least 1")
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"seed={self.seed}: expected at least 0 and less than 2**63")

    def encode(self, t: Tensor) -> Tensor:
        """Return the code of `t`, flat or a matrix; raises `TypeError` unless it holds floats."""
        flat = check_input(t.reshape(-1) if t.dim() == 2 else t, type(self).__name__, FLOATS)
        dtype, numel = wide(t.dtype), t.numel()
        columns = t.shape[1] if t.dim() == 2 else math.isqrt(max(numel - 1, 0)) + 1
        rows = -(-numel // max(columns, 1))
        matrix = torch.zeros(rows * columns, dtype=dtype, device="cpu")
        matrix[:numel].copy_(flat)
        a, b = self._factors(matrix.view(rows, columns))
        code, payload = create(Head(Kind.LOW_RANK, t.dtype, numel, a.shape[1], columns), a.nbytes + b.nbytes)
        payload[: a.nbytes].view(dtype).copy_(a.reshape(-1))
        payload[a.nbytes :].view(dtype).copy_(b.reshape(-1))
        return code

    def decode(self, code: Tensor, dtype: torch.dtype, numel: int) -> Tensor:
        """Return `numel` elements of `dtype`, flat; raises `ValueError` for a code that does not fit."""
        head, _ = parse(code, Kind.LOW_RANK, dtype, numel)
        rows, rank = -(-numel // max(head.param, 1)), head.extra
        if rank != min(self.rank, rows, head.param) or not 0 < head.param <= max(numel, 1):
            raise ValueError(f"a code of {rank} columns of {head.param}: expected {self}")
        middle, end = (count * rank * wide(dtype).itemsize for count in (rows, rows + head.param))
        _, payload = parse(code, Kind.LOW_RANK, dtype, numel, end)
        a = part(payload[:middle], 0, rows * rank, wide(dtype)).view(rows, rank)
        b = part(payload[middle:], 0, head.param * rank, wide(dtype)).view(head.param, rank)
        return (a @ b.T).view(-1)[:numel].to(dtype, copy=True)

    def _factors(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        return _iterated(matrix, self.rank, self.seed, self._rounds)


@dataclass(frozen=True)
class PowerSGD(_LowRank):
    """One step of power iteration a time towards the best product of two matrices with `rank` columns.

    In collectives the ranks add up M Q and, once that is orthogonalised, Mᵀ P; Q is where the next step begins (warm
    start). So what travels are two sums of rank * (rows + columns) elements in all, however many ranks there are.
    Tensors of one dimension, and matrices that would shrink to no less than half, travel as they are, beside the first.
    By itself (`encode`, as a parameter server uses it) it begins from `seed` and makes two steps.

    The residual of all ranks together is what the product left out; so use it with one. Takes float16, bfloat16,
    float32 and float64, any other dtype is a `TypeError`. A NaN anywhere in a matrix comes out as NaN.
    Cost: three multiplications of the matrix with `rank` columns, and one more with a residual.
    Source: Vogels, Karimireddy, Jaggi 2019, "PowerSGD", arXiv:1905.13727, algorithm 1 and 2.
    """

    _rounds: ClassVar[int] = 1

    def exchange(self, gradients: Gradients, kept: dict[str, Tensor]) -> Exchange:
        """See `GradientCodec`."""
        totals, outs = gradients.pieces(gradients.total), gradients.pieces(gradients.out)
        chosen = [i for i, shape in enumerate(gradients.shapes) if self._pays(shape)]
        rest = [i for i in range(len(totals)) if i not in chosen]
        matrices = [totals[i].view(gradients.shapes[i][0], -1) for i in chosen]
        names = [gradients.names[i] for i in chosen]
        starts = [self._basis(m, kept.get(name)) for m, name in zip(matrices, names, strict=True)]
        first = _Joined([*(_times(m, q) for m, q in zip(matrices, starts, strict=True)), *(totals[i] for i in rest)])
        yield Sum(first.flat)
        lefts = [_orthogonal(p) for p in first.parts[: len(chosen)]]
        for i, summed in zip(rest, first.parts[len(chosen) :], strict=True):
            torch.mul(summed, gradients.factor, out=outs[i])
            if gradients.feedback:
                totals[i].zero_()
        if not chosen:
            return
        second = _Joined([_transposed(m, p) for m, p in zip(matrices, lefts, strict=True)])
        yield Sum(second.flat)
        for i, name, p, q, m in zip(chosen, names, lefts, second.parts, matrices, strict=True):
            kept[name] = q.clone()
            self._write(m, outs[i].view(m.shape), p, q.T.mul(gradients.factor), gradients)

    @staticmethod
    def _write(matrix: Tensor, out: Tensor, p: Tensor, q: Tensor, gradients: Gradients) -> None:
        """Write the product to `out` and take this rank's share of it off `matrix`: as many rows as the cache holds."""
        rows = max(1, CHUNK // q.shape[1])
        for to, left, values in zip(out.split(rows), p.split(rows), matrix.split(rows), strict=True):
            torch.mm(left, q, out=to)
            if gradients.feedback:
                values.sub_(to, alpha=1 / (gradients.size * gradients.factor))

    def _pays(self, shape: Sequence[int]) -> bool:
        rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (0, 0)
        return 2 * min(self.rank, rows, columns) * (rows + columns) < rows * columns

    def _basis(self, matrix: Tensor, kept: Tensor | None) -> Tensor:
        """Return where the iteration begins: what it ended with, unless that says nothing."""
        shape = (matrix.shape[1], min(self.rank, *matrix.shape))
        if kept is not None and kept.shape == shape and bool(kept.isfinite().all()) and bool(kept.any()):
            return kept.to(matrix.dtype)
        return _start(*shape, matrix.dtype, self.seed)


@dataclass(frozen=True)
class SVD(_LowRank):
    """The largest `rank` singular values with their vectors, found to a fraction of a percent by three iterations.

    In collectives each rank gathers the factors of all, one code a parameter. Alone it is biased: use it with a
    residual. Takes float16, bfloat16, float32 and float64, any other dtype is a `TypeError`. A tensor of one dimension
    counts as the matrix nearest to a square. The code has 16 + rank * (rows + columns) * itemsize bytes (4 for 16-bit
    floats). A matrix with NaN or infinities has no decomposition, and decodes to NaN throughout.
    Source: Halko, Martinsson, Tropp 2011, doi:10.1137/090771806; for gradients Wang et al. 2018, "ATOMO",
    arXiv:1806.04090.
    """

    _rounds: ClassVar[int] = 3

    def exchange(self, gradients: Gradients, kept: dict[str, Tensor]) -> Exchange:
        """See `GradientCodec`."""
        totals, codes = gradients.pieces(gradients.total), []
        for shape, total in zip(gradients.shapes, totals, strict=True):
            codes.append(self.encode(total.view(shape[0], -1) if len(shape) > 1 and total.numel() else total))
            if gradients.feedback:
                self.add(codes[-1], total, -1.0)
        by_rank = yield Gather(torch.cat(codes))
        sizes = [code.numel() for code in codes]
        for out, *same in zip(gradients.pieces(gradients.out), *(c.split(sizes) for c in by_rank), strict=True):
            self.combine(same, out, gradients.factor)

    def _factors(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        if not bool(matrix.isfinite().all()):
            rank = min(self.rank, *matrix.shape)
            return matrix.new_full((len(matrix), rank), torch.nan), matrix.new_zeros(matrix.shape[1], rank)
        a, b = _iterated(matrix, 2 * self.rank + 4, self.seed, self._rounds)
        u, s, v = torch.linalg.svd(b.T, full_matrices=False)
        rank = min(self.rank, *matrix.shape)
        return a @ u[:, :rank] * s[:rank], v[:rank].T


class _Joined:
    """Tensors side by side in one flat one, and the parts of it that have their shapes."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.flat = torch.cat([t.reshape(-1) for t in tensors])
        pieces = self.flat.split([t.numel() for t in tensors])
        self.parts = [piece.view(t.shape) for piece, t in zip(pieces, tensors, strict=True)]


def _iterated(matrix: Tensor, rank: int, seed: int, rounds: int) -> tuple[Tensor, Tensor]:
    """Return an orthogonal A of `rank` columns, or as many as there are, that spans most of `matrix`, and matrixᵀ A."""
    a = _times(matrix, _start(matrix.shape[1], min(rank, *matrix.shape), matrix.dtype, seed))
    for _ in range(rounds):
        a = _times(matrix, _transposed(matrix, _orthogonal(a)))
    a = _orthogonal(a)
    return a, _transposed(matrix, a)


def _start(rows: int, rank: int, dtype: torch.dtype, seed: int) -> Tensor:
    random = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randn(rows, rank, dtype=dtype, device="cpu", generator=random)


def _orthogonal(t: Tensor) -> Tensor:
    basis: Tensor = torch.linalg.qr(t).Q
    return basis


def _times(matrix: Tensor, q: Tensor) -> Tensor:
    """Return matrix q; several times as fast where the columns of a thin q lie in one piece each."""
    return matrix @ q.T.contiguous().T


def _transposed(matrix: Tensor, p: Tensor) -> Tensor:
    """Return matrixᵀ p, in the order that is fast where p is thin."""
    return (p.T.contiguous() @ matrix).T
