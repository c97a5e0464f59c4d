"""The work of the fake's collectives and messages after all their ranks have arrived."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy
import torch
from torch import Tensor

from tests.support.simulated_cuda.copies import launch
from tests.support.simulated_cuda.device import active

__all__ = [
    "Part",
    "RedOp",
    "Work",
    "allgather",
    "allreduce",
    "broadcast",
    "launch_kernel",
    "message",
    "reduce",
    "reduce_scatter",
]


class RedOp(IntEnum):
    """As `nccl.core.NcclRedOp`."""

    SUM = 0
    PROD = 1
    MAX = 2
    MIN = 3
    AVG = 4


@dataclass(frozen=True)
class Part:
    """One rank's input and output, as plain tensors on the host."""

    send: Tensor | None
    recv: Tensor | None


class Work:
    """One collective or message, done by whichever rank comes last."""

    def __init__(self, signature: tuple[object, ...], move: Callable[[Mapping[int, Part]], None], ranks: int) -> None:
        self.signature = signature
        self.over = threading.Event()
        self._move = move
        self._ranks = ranks
        self._parts: dict[int, Part] = {}
        self._came = 0
        self._lock = threading.Lock()

    def arrive(self, rank: int, part: Part) -> None:
        """Say that `rank` is at it."""
        with self._lock:
            other = self._parts.get(rank)
            if other is not None:  # it sends to itself
                part = Part(*(b if a is None else a for a, b in ((part.send, other.send), (part.recv, other.recv))))
            self._parts[rank] = part
            self._came += 1
            if self._came == self._ranks:
                self._move(self._parts)
                self.over.set()


def launch_kernel(
    rank: int, works: Sequence[tuple[Work, Tensor | None, Tensor | None]], stream: int, gone: threading.Event
) -> None:
    """Queue on `stream`, a handle, a job that finishes with the last of `works`, or when `gone` is set.

    A work is a collective or message with the input and output of `rank`: tensors of one simulated device.
    """
    world = active()
    tensors = [t for _, *pair in works for t in pair if t is not None]
    blocks = [block for t in tensors if (block := world.memory.alias(t)[1]) is not None]

    def plain(t: Tensor | None) -> Tensor | None:
        return None if t is None else world.memory.alias(t)[0]

    parts = [(work, Part(plain(send), plain(recv))) for work, send, recv in works]

    def run() -> None:
        for work, part in parts:
            work.arrive(rank, part)
        for work, _ in parts:
            while not (work.over.wait(0.002) or gone.is_set() or world.closed):
                pass

    launch(world, world.lanes(tensors[0].device.index)[stream], "nccl", run, blocks)


# --- what moves ------------------------------------------------------------------------------------------


def allreduce(op: RedOp) -> Callable[[Mapping[int, Part]], None]:
    """Give everybody everything, reduced."""

    def move(parts: Mapping[int, Part]) -> None:
        total = _total(parts, op)
        for part in parts.values():
            _into(part)[: total.numel()].copy_(total)

    return move


def reduce(op: RedOp, root: int) -> Callable[[Mapping[int, Part]], None]:
    """Give root everything, reduced."""

    def move(parts: Mapping[int, Part]) -> None:
        total = _total(parts, op)
        _into(parts[root])[: total.numel()].copy_(total)

    return move


def broadcast(root: int) -> Callable[[Mapping[int, Part]], None]:
    """Give everybody root's."""

    def move(parts: Mapping[int, Part]) -> None:
        data = _from(parts[root]).clone()
        for part in parts.values():
            _into(part).copy_(data)

    return move


def allgather(parts: Mapping[int, Part]) -> None:
    """Give everybody everything, in rank order."""
    data = torch.cat([_from(parts[rank]) for rank in sorted(parts)])
    for part in parts.values():
        _into(part)[: data.numel()].copy_(data)


def reduce_scatter(op: RedOp) -> Callable[[Mapping[int, Part]], None]:
    """Give everybody its block, reduced."""

    def move(parts: Mapping[int, Part]) -> None:
        for rank, block in enumerate(_total(parts, op).chunk(len(parts))):
            _into(parts[rank])[: block.numel()].copy_(block)

    return move


def message(src: int, dst: int) -> Callable[[Mapping[int, Part]], None]:
    """Give `dst` what `src` has."""

    def move(parts: Mapping[int, Part]) -> None:
        data = _from(parts[src])
        _into(parts[dst]).copy_(data)

    return move


def _total(parts: Mapping[int, Part], op: RedOp) -> Tensor:
    """Combine in rank order and in the dtype given, as NCCL does; its average divides each summand."""
    given = [_from(parts[rank]).clone() for rank in sorted(parts)]
    kind = given[0].dtype
    if kind in (torch.uint32, torch.uint64):  # torch computes little with these
        return torch.from_numpy(_NUMPY[op].reduce([t.numpy() for t in given]))
    total = given[0]
    if op is RedOp.AVG:
        total /= len(given)
        given[1:] = [t / len(given) for t in given[1:]]
    for t in given[1:]:
        total = _COMBINE[op](total, t)
    return total


_NUMPY = {RedOp.SUM: numpy.add, RedOp.PROD: numpy.multiply, RedOp.MAX: numpy.maximum, RedOp.MIN: numpy.minimum}
_COMBINE: dict[RedOp, Callable[[Tensor, Tensor], Tensor]] = {
    RedOp.SUM: torch.add,
    RedOp.AVG: torch.add,
    RedOp.PROD: torch.mul,
    RedOp.MAX: torch.fmax,  # NCCL's drop a NaN where the other is a number
    RedOp.MIN: torch.fmin,
}


def _from(part: Part) -> Tensor:
    assert part.send is not None
    return part.send


def _into(part: Part) -> Tensor:
    assert part.recv is not None
    return part.recv
