"""A few elements: the largest, or random ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from aiodist.codecs.base import Kind, parse, part, wide
from aiodist.codecs.gradients import DrawingCodec, Exchange, FloatCodec, Gradients, Sum

_DRAWS = 1 << 32
_STRIDE = 61  # stride of the sample: no power of two, since lengths of rows are
_FEWEST = 64  # least number of elements of the sample above the threshold
_PART = 1 << 18  # elements at a time, in the cache


@dataclass(frozen=True)
class TopK(FloatCodec):
    """The elements of largest magnitude with their indices; the rest decodes to zero.

    `ratio`, in (0, 1], is the part that is kept: k = round(ratio * numel), at least one element. The code has
    16 + k * (4 + itemsize) bytes (8 for an index from 2**31 elements on), so it pays below a ratio of 1/2 for float32,
    of 1/3 for 16 bits. Use it with `ErrorFeedback` or `Outgoing`, which send what was left out later; alone it
    is biased.

    What is sent is exact. The same tensor gives the same code: among equal magnitudes the lowest index is taken. NaN
    and infinities are larger than everything else, so they are sent first, as they are; a NaN is never hidden.
    `decode` raises `ValueError` also for indices that are out of range or not ascending. Cost: a selection in linear
    time and five passes to encode, one pass to decode.
    Source: Aji and Heafield 2017, doi:10.18653/v1/D17-1045; with error feedback Stich et al. 2018, arXiv:1809.07599.
    """

    kind: ClassVar[Kind] = Kind.TOP_K
    ratio: float

    def __post_init__(self) -> None:
        _share(self.ratio, 0)

    def nbytes(self, numel: int, dtype: torch.dtype) -> int:
        return _share(self.ratio, numel) * (_index_dtype(numel).itemsize + dtype.itemsize)

    def write(self, t: Tensor, payload: Tensor, number: int) -> int:
        indices = _largest(t, _share(self.ratio, t.numel()))
        index_bytes = indices.to(_index_dtype(t.numel())).view(torch.uint8)
        payload[: index_bytes.numel()].copy_(index_bytes)
        payload[index_bytes.numel() :].copy_(t[indices].view(torch.uint8))
        return 0

    def read(self, payload: Tensor, dtype: torch.dtype, numel: int, param: int) -> Tensor:
        decoded = torch.zeros(numel, dtype=dtype, device="cpu")
        indices, values = self._found(payload, dtype, numel)
        decoded[indices] = values
        return decoded

    def add(self, code: Tensor, out: Tensor, alpha: float = 1.0) -> None:
        """Add the kept elements, in linear time of their number."""
        _, payload = parse(code, self.kind, out.dtype, out.numel(), self.nbytes(out.numel(), out.dtype))
        out.index_add_(0, *self._found(payload, out.dtype, out.numel()), alpha=alpha)

    def _found(self, payload: Tensor, dtype: torch.dtype, numel: int) -> tuple[Tensor, Tensor]:
        kept, index = _share(self.ratio, numel), _index_dtype(numel)
        indices = part(payload, 0, kept, index).long()
        if kept:
            first, last = int(indices[0]), int(indices[-1])
            if first < 0 or last >= numel or not bool((indices[1:] > indices[:-1]).all()):
                seen = f"whose indices go from {first} to {last}"
                raise ValueError(f"a code by TopK {seen}: expected ascending, below {numel}")
        return indices, part(payload, kept * index.itemsize, kept, dtype)


@dataclass(frozen=True)
class RandomK(DrawingCodec):
    """One random element out of each of k stretches of equal length, drawn for each code; the rest decodes to zero.

    `ratio`, in (0, 1], is the kept part: k = round(ratio * numel), at least one element. `seed` and a number choose the
    elements (`DrawingCodec`), so no index is sent: the code has 16 + k * itemsize bytes, and codes of one number add
    up, so collectives reduce k elements and nothing else. Kept elements are exact. With `scaled` they are multiplied by
    the length of their stretch, which makes the code unbiased, and saturate at the largest number of the dtype. Use it
    without `scaled` if a residual is kept. If the tensor has NaN or an infinity, all kept elements are NaN, so that it
    is not hidden. Cost: one pass to encode, one to decode. Source: Stich, Cordonnier, Jaggi 2018, "Sparsified SGD with
    memory", arXiv:1809.07599.
    """

    kind: ClassVar[Kind] = Kind.RANDOM_K
    ratio: float
    scaled: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _share(self.ratio, 0)

    @property
    def unbiased(self) -> bool:  # type: ignore[override]
        return self.scaled

    def nbytes(self, numel: int, dtype: torch.dtype) -> int:
        return _share(self.ratio, numel) * dtype.itemsize

    def write(self, t: Tensor, payload: Tensor, number: int) -> int:
        number %= _DRAWS
        payload.copy_(_taken(t, self._draw(number, t.numel())[0]).view(torch.uint8))
        return number

    def read(self, payload: Tensor, dtype: torch.dtype, numel: int, param: int) -> Tensor:
        decoded = torch.zeros(numel, dtype=dtype, device="cpu")
        self._put(part(payload, 0, _share(self.ratio, numel), dtype), *self._draw(param, numel), decoded)
        return decoded

    def exchange(self, gradients: Gradients, kept: dict[str, Tensor]) -> Exchange:
        """Add up the elements that all ranks have at the same places."""
        total, out = gradients.total, gradients.out
        places, lengths = self._draw(gradients.number % _DRAWS, total.numel())
        values = _taken(total, places)
        if gradients.feedback:
            total.index_add_(0, places, values * lengths if self.scaled else values, alpha=-1)
        yield Sum(values)
        self._put(values.mul_(gradients.factor), places, lengths, out.zero_())

    def _put(self, values: Tensor, places: Tensor, lengths: Tensor, out: Tensor) -> None:
        if self.scaled:  # in float64: a stretch may be longer than 16 bits can say
            product, largest = values.double() * lengths, torch.finfo(out.dtype).max
            values = torch.where(values.isinf(), product, product.clamp(-largest, largest)).to(out.dtype)
        out[places] = values

    def _draw(self, number: int, numel: int) -> tuple[Tensor, Tensor]:
        """Return the indices of the kept elements, ascending, and the length of the stretch of each."""
        count = _share(self.ratio, numel)
        starts = np.arange(count + 1, dtype=np.int64) * numel // max(count, 1)
        random = np.random.default_rng((self.seed, number))
        lengths = np.diff(starts)
        return torch.from_numpy(starts[:-1] + random.integers(lengths)), torch.from_numpy(lengths)


def _share(ratio: float, numel: int) -> int:
    """Return the number of kept elements of `numel`; raise ValueError unless `ratio` is in (0, 1]."""
    if not 0.0 < ratio <= 1.0:
        raise ValueError(f"ratio={ratio}: expected more than 0 and at most 1")
    return min(numel, max(1, round(ratio * numel)))


def _index_dtype(numel: int) -> torch.dtype:
    return torch.int32 if numel < 1 << 31 else torch.int64


def _largest(t: Tensor, kept: int) -> Tensor:
    """Return the indices of the `kept` elements of largest magnitude, ascending."""
    if kept == t.numel():
        return torch.arange(kept, device="cpu")
    found = _candidates(t, kept)
    if found is not None:
        return found[_largest(t[found], kept)]
    size = t.abs().to(wide(t.dtype)).nan_to_num_(torch.inf, torch.inf)
    # numpy's selection is several times as fast as torch's topk and kthvalue, and leaves the GIL alone too.
    threshold = float(np.partition(size.numpy(), size.numel() - kept)[size.numel() - kept])
    above = (size > threshold).nonzero().view(-1)
    equal = (size == threshold).nonzero().view(-1)
    return torch.cat([above, equal[: kept - above.numel()]]).sort().values


def _candidates(t: Tensor, kept: int) -> Tensor | None:
    """Return the indices of the `kept` largest and a few more, ascending, or None if that would save nothing.

    A sample gives the magnitude that about `kept` elements exceed. If the sample was wrong, all elements are compared.
    """
    numel = t.numel()
    expected = kept / numel * (sampled := numel // _STRIDE)
    rank = int(expected + 4 * expected**0.5 + 4)
    if expected < _FEWEST or 4 * rank > sampled:
        return None
    sample = t[::_STRIDE].abs().to(wide(t.dtype)).nan_to_num_(torch.inf, torch.inf).numpy()
    threshold = float(np.partition(sample, sample.size - rank)[sample.size - rank])
    found = np.concatenate([_not_within(part, threshold) + i * _PART for i, part in enumerate(t.split(_PART))])
    return torch.from_numpy(found) if kept <= found.size < numel // 2 else None


def _not_within(t: Tensor, threshold: float) -> np.ndarray:
    """Return the indices of elements that are not between -threshold and threshold, of NaN too; ascending."""
    values = t.to(wide(t.dtype)).numpy()
    within = values < threshold
    within &= values > -threshold
    return np.flatnonzero(np.logical_not(within, out=within))


def _taken(t: Tensor, places: Tensor) -> Tensor:
    taken = t[places]
    return taken if bool(t.sum(dtype=wide(t.dtype)).isfinite()) or bool(t.isfinite().all()) else taken.fill_(torch.nan)
