"""Gradients of matrices as products of two thin ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from aiodist.codecs.base import CHUNK, Kind, exponent_of, part, times_power, wide
from aiodist.codecs.gradients import Exchange, FloatCodec, Gather, Gradients, Sum, check_seed


@dataclass(frozen=True)
class _LowRank(FloatCodec):
    """Base of both codecs: the code is the two factors of a matrix M ≈ A Bᵀ, of `rank` columns each.

    A flat tensor counts as the matrix nearest to a square that has room for it.
    """

    kind: ClassVar[Kind] = Kind.LOW_RANK
    rank: int = 4
    seed: int = 0
    _rounds: ClassVar[int]
    """Number of multiplications of the basis with M Mᵀ before its use."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank={self.rank}: expected at least 1")
        check_seed(self.seed)

    def nbytes(self, numel: int, dtype: torch.dtype) -> int:
        return sum(self._shape(numel)) * self._columns(numel) * wide(dtype).itemsize

    def write(self, t: Tensor, payload: Tensor, number: int) -> int:
        dtype, (rows, columns) = wide(t.dtype), self._shape(t.numel())
        matrix = torch.zeros(rows * columns, dtype=dtype, device="cpu")
        matrix[: t.numel()].copy_(t)
        a, b = self.factors(matrix.view(rows, columns))
        payload.view(dtype).copy_(torch.cat([a.reshape(-1), b.reshape(-1)]))
        return 0

    def read(self, payload: Tensor, dtype: torch.dtype, numel: int, param: int) -> Tensor:
        (rows, columns), rank = self._shape(numel), self._columns(numel)
        a, b = part(payload, 0, (rows + columns) * rank, wide(dtype)).split([rows * rank, columns * rank])
        whole: Tensor = a.view(rows, rank) @ b.view(columns, rank).T
        return whole.view(-1)[:numel].to(dtype, copy=True)

    def factors(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Return A and B, which share the magnitude of the matrix, so that neither overflows."""
        exponent = exponent_of(matrix, 0)
        a, b = self._factored(times_power(matrix, exponent))
        return times_power(a, -(exponent // 2)), times_power(b, exponent // 2 - exponent)

    def _factored(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Return the factors of a matrix whose largest magnitude is near 1."""
        return _iterated(matrix, self.rank, self.seed, self._rounds)

    @staticmethod
    def _shape(numel: int) -> tuple[int, int]:
        columns = math.isqrt(max(numel - 1, 0)) + 1
        return -(-numel // columns), columns

    def _columns(self, numel: int) -> int:
        return min(self.rank, *self._shape(numel))


@dataclass(frozen=True)
class PowerSGD(_LowRank):
    """The best product of two matrices with `rank` columns, by one step of power iteration for each exchange.

    In collectives the ranks add up M Q, orthogonalise the sum to P, and add up Mᵀ P. The next step begins with Q (warm
    start). So the ranks send two sums of rank * (rows + columns) elements in all, for any number of ranks. Tensors of
    one dimension, and matrices that would not shrink to half, are sent uncompressed, with the first sum. Without
    collectives (`encode`, as a parameter server uses it) it begins from `seed` and makes two steps.

    The residuals of all ranks together are the error of the product, so use it with residuals. A NaN anywhere in a
    matrix comes out as NaN, and so may, in collectives, a matrix whose norm is near the end of its dtype. Cost: three
    multiplications of the matrix with `rank` columns, and one more with a residual. Source: Vogels, Karimireddy, Jaggi
    2019, "PowerSGD", arXiv:1905.13727, algorithm 1 and 2.
    """

    _rounds: ClassVar[int] = 1

    def exchange(self, gradients: Gradients, kept: dict[str, Tensor]) -> Exchange:
        totals, outs = gradients.pieces(gradients.total), gradients.pieces(gradients.out)
        chosen = [i for i, shape in enumerate(gradients.shapes) if self._pays(shape)]
        rest = [i for i in range(len(totals)) if i not in chosen]
        matrices = [totals[i].view(gradients.shapes[i][0], -1) for i in chosen]
        names = [gradients.names[i] for i in chosen]
        starts = [self._basis(m, kept.get(name)) for m, name in zip(matrices, names, strict=True)]
        thin = [_times(m, q) for m, q in zip(matrices, starts, strict=True)]
        flat, parts = _joined([*thin, *(totals[i] for i in rest)])
        yield Sum(flat)
        lefts = [_orthogonal(p) for p in parts[: len(chosen)]]
        for i, summed in zip(rest, parts[len(chosen) :], strict=True):
            torch.mul(summed, gradients.factor, out=outs[i])
            if gradients.feedback:
                totals[i].zero_()
        if not chosen:
            return
        flat, parts = _joined([_transposed(m, p) for m, p in zip(matrices, lefts, strict=True)])
        yield Sum(flat)
        for i, name, p, q, m in zip(chosen, names, lefts, parts, matrices, strict=True):
            kept[name] = q.clone()
            self._put(m, outs[i].view(m.shape), p, q.T.mul(gradients.factor), gradients)

    @staticmethod
    def _put(matrix: Tensor, out: Tensor, p: Tensor, q: Tensor, gradients: Gradients) -> None:
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
        """Return the start of the iteration: the end of the last one, unless that is useless."""
        shape = (matrix.shape[1], min(self.rank, *matrix.shape))
        if kept is not None and kept.shape == shape and bool(kept.isfinite().all()) and bool(kept.any()):
            return _near_one(kept.to(matrix.dtype))
        return _start(*shape, matrix.dtype, self.seed)


@dataclass(frozen=True)
class SVD(_LowRank):
    """The largest `rank` singular values with their vectors, found to a fraction of a percent by three iterations.

    In collectives each rank gathers the factors of all, of each parameter's matrix; a tensor of one dimension travels
    whole, as a matrix of one column. Alone it is biased: use it with a residual. A matrix with NaN or infinities has no
    decomposition, and decodes to NaN throughout; elements near the end of the dtype may decode to infinities. Source:
    Halko, Martinsson, Tropp 2011, doi:10.1137/090771806; for gradients Wang et al. 2018, "ATOMO", arXiv:1806.04090.
    """

    _rounds: ClassVar[int] = 3

    def exchange(self, gradients: Gradients, kept: dict[str, Tensor]) -> Exchange:
        shapes = [(shape[0] if shape else 1, math.prod(shape[1:])) for shape in gradients.shapes]
        matrices = [t.view(shape) for t, shape in zip(gradients.pieces(gradients.total), shapes, strict=True)]
        outs = [t.view(shape) for t, shape in zip(gradients.pieces(gradients.out), shapes, strict=True)]
        mine = [each for m in matrices for each in self.factors(m.to(wide(m.dtype)))]
        if gradients.feedback:
            for m, a, b in zip(matrices, mine[::2], mine[1::2], strict=True):
                m.sub_(a @ b.T)
        flat, _ = _joined(mine)
        gradients.out.zero_()
        for code in (yield Gather(flat.view(torch.uint8))):
            if code.numel() != flat.nbytes:
                raise ValueError(f"factors in {code.numel()} bytes: expected {flat.nbytes}")
            theirs = _cut(part(code, 0, flat.numel(), flat.dtype), mine)
            for out, a, b in zip(outs, theirs[::2], theirs[1::2], strict=True):
                out.add_(a @ b.T, alpha=gradients.factor)

    def factors(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        if not bool(matrix.isfinite().all()):
            rank = min(self.rank, *matrix.shape)
            return matrix.new_full((len(matrix), rank), torch.nan), matrix.new_zeros(matrix.shape[1], rank)
        return super().factors(matrix)

    def _factored(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        a, b = _iterated(matrix, 2 * self.rank + 4, self.seed, self._rounds)
        u, s, v = torch.linalg.svd(b.T, full_matrices=False)
        rank = min(self.rank, *matrix.shape)
        return a @ u[:, :rank] * s[:rank], v[:rank].T


def _joined(tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return a flat tensor of all elements, and its parts in the shapes of the tensors."""
    flat = torch.cat([t.reshape(-1) for t in tensors])
    return flat, _cut(flat, tensors)


def _cut(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    return [piece.view(t.shape) for piece, t in zip(flat.split([t.numel() for t in like]), like, strict=True)]


def _iterated(matrix: Tensor, rank: int, seed: int, rounds: int) -> tuple[Tensor, Tensor]:
    """Return an orthogonal A of `rank` columns, or as many as there are, that spans most of `matrix`, and matrixᵀ A."""
    a = _times(matrix, _start(matrix.shape[1], min(rank, *matrix.shape), matrix.dtype, seed))
    for _ in range(rounds):
        a = _times(matrix, _transposed(matrix, _orthogonal(a)))
    a = _orthogonal(a)
    return a, _transposed(matrix, a)


def _near_one(t: Tensor) -> Tensor:
    """Return `t` times the power of two that brings its largest magnitude near 1: products then stay in the dtype."""
    return times_power(t, exponent_of(t, 0))


def _start(rows: int, rank: int, dtype: torch.dtype, seed: int) -> Tensor:
    random = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randn(rows, rank, dtype=dtype, device="cpu", generator=random)


def _orthogonal(t: Tensor) -> Tensor:
    basis: Tensor = torch.linalg.qr(_near_one(t)).Q
    return basis


def _times(matrix: Tensor, q: Tensor) -> Tensor:
    """Return matrix q; several times as fast if the columns of a thin q are contiguous."""
    return matrix @ q.T.contiguous().T


def _transposed(matrix: Tensor, p: Tensor) -> Tensor:
    """Return matrixᵀ p, in the order that is fast for a thin p."""
    return (p.T.contiguous() @ matrix).T
