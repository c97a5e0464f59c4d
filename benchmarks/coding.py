"""Codecs on one core: 64 MiB encoded and decoded, and the arithmetic of torch's DDP comm hook."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.ao.quantization import MinMaxObserver

from aiodist import codecs
from benchmarks.training import torch_threads

if TYPE_CHECKING:
    from aiodist.bench.records import Record
    from aiodist.bench.session import Session

__all__ = ["measure"]

NUMEL = 16 << 20
_ROUNDS = 9


def _codec(codec: codecs.GradientCodec) -> Callable[[Tensor, Tensor], None]:
    def both(t: Tensor, out: Tensor) -> None:
        codec.combine([codec.encode(t)], out)

    return both


def _int8_hook(t: Tensor, out: Tensor) -> None:
    """Compute the same as `quantization_pertensor_hook` on one rank."""
    observer = MinMaxObserver()
    observer(t)
    scale, zero = observer.calculate_qparams()
    code = torch.clamp(torch.round(t / scale) + zero, 0, 255).to(torch.uint8)
    out.zero_().add_(scale * (code.to(torch.float32) - zero))


_WAYS = {
    "int8": _codec(codecs.Int8()),
    "sign": _codec(codecs.Sign()),
    "topk": _codec(codecs.TopK(0.01)),
    "int8-hook": _int8_hook,
}


async def measure(session: Session) -> list[Record]:
    """Measure all codecs in turns, on one core."""
    names = [*session.impls, *session.plan.peers]
    t = torch.randn(NUMEL, generator=torch.Generator().manual_seed(session.coll.rank))
    out = torch.empty_like(t)
    times: dict[str, list[float]] = {name: [] for name in names}
    with torch_threads(session.coll):
        torch.set_num_threads(1)
        for turn in range(1 + (session.plan.repeat or _ROUNDS)):
            for name in names:
                await session.fence()
                began = perf_counter()
                _WAYS[name](t, out)
                if turn:  # memory is touched for the first time
                    times[name].append(perf_counter() - began)
    prefixed = {name if name.endswith("hook") else f"aiodist:{name}": found for name, found in times.items()}
    return await session.timed("codecs", t.nbytes, prefixed)
