"""Only the largest elements."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from aiodist.codecs.base import FLOATS, Head, Kind, check_input, create, parse, part, share_of, wide
from aiodist.codecs.gradients import GradientCodec


@dataclass(frozen=True)
class TopK(GradientCodec):
    """The elements of largest magnitude with their indices; the rest decodes to zero.

    `ratio`, in (0, 1], is the part that is kept: k = round(ratio * numel), at least one element. The code has
    16 + k * (4 + itemsize) bytes (8 for an index from 2**31 elements on), so it pays below a ratio of 1/2 for float32,
    of 1/3 for 16 bits. Use it with `ErrorFeedback` or `Outgoing`, which send what was left out later; alone it is
    biased. Takes float16, bfloat16, float32 and float64, any other dtype is a `TypeError`.

    What is sent is exact. The same tensor gives the same code: among equal magnitudes the lowest index is taken. NaN
    and infinities are larger than everything else, so they are sent first, as they are; a NaN is never hidden.

    `decode` raises `ValueError` for a code of other dtype, numel, ratio or length, and for indices that are out of
    range or not ascending. Cost: a selection in linear time and five passes to encode, one pass to decode.
    Source: Aji and Heafield 2017, doi:10.18653/v1/D17-1045; with error feedback Stich et al. 2018, arXiv:1809.07599.
    """

    ratio: float

    def __post_init__(self) -> None:
        share_of(self.ratio, 0)

    def encode(self, t: Tensor) -> Tensor:
        """Return the code of `t`, flat; raises `TypeError` unless it holds floats."""
        t = check_input(t, "TopK", FLOATS)
        kept = share_of(self.ratio, t.numel())
        index = _index_dtype(t.numel())
        code, payload = create(Head(Kind.TOP_K, t.dtype, t.numel()), kept * (index.itemsize + t.dtype.itemsize))
        largest = _largest(t, kept)
        payload[: kept * index.itemsize].copy_(largest.to(index).view(torch.uint8))
        payload[kept * index.itemsize :].copy_(t[largest].view(torch.uint8))
        return code

    def decode(self, code: Tensor, dtype: torch.dtype, numel: int) -> Tensor:
        """Return `numel` elements of `dtype`; raises `ValueError` for a code that does not fit."""
        indices, values = self._read(code, dtype, numel)
        decoded = torch.zeros(numel, dtype=dtype, device="cpu")
        decoded[indices] = values
        return decoded

    def add(self, code: Tensor, out: Tensor, alpha: float = 1.0) -> None:
        """See `GradientCodec`: in linear time of what is kept."""
        indices, values = self._read(code, out.dtype, out.numel())
        out.index_add_(0, indices, values, alpha=alpha)

    def _read(self, code: Tensor, dtype: torch.dtype, numel: int) -> tuple[Tensor, Tensor]:
        kept = share_of(self.ratio, numel)
        index = _index_dtype(numel)
        _, payload = parse(code, Kind.TOP_K, dtype, numel, kept * (index.itemsize + dtype.itemsize))
        indices = part(payload, 0, kept, index).long()
        _check_indices(indices, numel)
        return indices, part(payload, kept * index.itemsize, kept, dtype)


_STRIDE = 61  # of the sample: no power of two, as the lengths of rows are
_FEWEST = 64  # of the sample, that exceed the threshold
_PART = 1 << 18  # elements at a time, in the cache


def _index_dtype(numel: int) -> torch.dtype:
    return torch.int32 if numel < 1 << 31 else torch.int64


def _largest(t: Tensor, kept: int) -> Tensor:
    """Return the indices of the `kept` elements of largest magnitude, ascending."""
    if kept == t.numel():
        return torch.arange(kept, device="cpu")
    found = _candidates(t, kept)
    if found is not None:
        return found[_largest(t[found], kept)]
    size = t.abs().to(wide(t.dtype))
    size.nan_to_num_(torch.inf, torch.inf)
    # numpy's selection is several times as fast as torch's topk and kthvalue, and leaves the GIL alone too.
    threshold = float(np.partition(size.numpy(), size.numel() - kept)[size.numel() - kept])
    above = (size > threshold).nonzero().view(-1)
    equal = (size == threshold).nonzero().view(-1)
    return torch.cat([above, equal[: kept - above.numel()]]).sort().values


def _candidates(t: Tensor, kept: int) -> Tensor | None:
    """Return the indices of the `kept` largest and a few more, ascending; None where that would save nothing.

    A sample says which magnitude so many exceed; if it was wrong, all are looked at.
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


def _check_indices(indices: Tensor, numel: int) -> None:
    if not indices.numel():
        return
    first, last = int(indices[0]), int(indices[-1])
    if first < 0 or last >= numel or not bool((indices[1:] > indices[:-1]).all()):
        raise ValueError(f"a code by TopK whose indices go from {first} to {last}: expected ascending, below {numel}")
