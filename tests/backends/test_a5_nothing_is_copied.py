"""A5: between processes, collectives in shared memory copy no tensor of the arena, of any other what others need."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aiodist import Communicator, Handle
from aiodist.communicator import parts_of
from tests.support.transports import held

NUMEL = 8 << 20
MIB = 1 << 20
Make = Callable[[int], Tensor]
Call = Callable[[Communicator, Make], tuple[Callable[[], Handle[Any]], Tensor, Tensor]]


def _allreduce(coll: Communicator, make: Make) -> Any:
    t = make(NUMEL).fill_(1.0 + coll.rank)
    return lambda: coll.allreduce(t, "max", impl="shm"), t, torch.tensor(2.0)


def _reduce(coll: Communicator, make: Make) -> Any:
    t = make(NUMEL).fill_(1.0 + coll.rank)
    return lambda: coll.reduce(t, "max", root=1, impl="shm"), t, torch.tensor(1.0 + coll.rank)


def _scan(coll: Communicator, make: Make) -> Any:
    t = make(NUMEL).fill_(1.0 + coll.rank)
    return lambda: coll.scan(t, "max", impl="shm"), t, torch.tensor(1.0 + coll.rank)


def _broadcast(coll: Communicator, make: Make) -> Any:
    t = make(NUMEL).fill_(1.0 + coll.rank)
    return lambda: coll.broadcast(t, 1, impl="shm"), t, torch.tensor(2.0)


def _allgather(coll: Communicator, make: Make) -> Any:
    t, out = make(NUMEL // 2).fill_(1.0 + coll.rank), make(NUMEL).fill_(0.0)
    return lambda: coll.allgather(t, out=out, impl="shm"), out, torch.arange(1.0, 3.0).repeat_interleave(NUMEL // 2)


def _reduce_scatter(coll: Communicator, make: Make) -> Any:
    t, out = make(NUMEL).fill_(1.0 + coll.rank), make(NUMEL // 2).fill_(0.0)
    return lambda: coll.reduce_scatter(t, out=out, impl="shm"), out, torch.tensor(3.0)


CALLS = [_allreduce, _reduce, _scan, _broadcast, _allgather, _reduce_scatter]


class Probe:
    """Counts what a rank copies for the others to read, and finds out what memory an operation takes."""

    def __init__(self, coll: Communicator) -> None:
        self._arena = parts_of(coll).registry.resources.near.arena
        self._within: Any = parts_of(coll).repertoire.within

    def lent(self) -> int:
        """Return the bytes that this rank has copied so far, in all lanes."""
        lent: int = self._within.lent_bytes
        return lent

    def arena_bytes(self) -> int:
        """Return the bytes of the arena that are in use."""
        return held(self._arena)

    async def growth(self, call: Callable[[], Handle[Any]]) -> int:
        """Return by how many bytes the process was larger at most than before."""
        before = _status("VmRSS")
        _forget_peak()
        await call()
        return _status("VmHWM") - before


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _status(name: str) -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024


@pytest.mark.thorough
@pytest.mark.drawn(2)
@pytest.mark.ranks(2, backend=("openmpi", "shm"))
@pytest.mark.parametrize("call", CALLS)
async def test_a5_collectives_on_arena_tensors_copy_nothing(coll: Communicator, call: Call) -> None:
    own = await coll.dup()
    probe = Probe(own)
    run, result, expected = call(own, own.arena_empty)
    await run()  # has all pages of all ranks in this one's page table
    assert torch.equal(result, expected.expand_as(result))
    taken, lent = probe.arena_bytes(), probe.lent()
    grown = await probe.growth(run)
    assert grown < 4 * MIB, f"{grown} bytes more, of tensors of {NUMEL * 4}"
    assert probe.arena_bytes() == taken
    assert probe.lent() == lent
    await own.aclose()


LENT: dict[Call, tuple[int, int]] = {  # by ranks 0 and 1, in elements
    _allreduce: (NUMEL, NUMEL),
    _reduce: (NUMEL, 0),
    _scan: (NUMEL, 0),
    _broadcast: (0, NUMEL),
    _allgather: (NUMEL // 2, NUMEL // 2),
    _reduce_scatter: (NUMEL // 2, NUMEL // 2),
}


@pytest.mark.drawn(4)
@pytest.mark.ranks(2, backend=("openmpi", "shm"))
@pytest.mark.parametrize("call", CALLS)
async def test_a5_the_same_of_private_tensors_is_seen_to_be_copied(coll: Communicator, call: Call) -> None:
    """The bytes that other ranks take of a rank's tensor are copied, and no more."""
    own = await coll.dup()
    probe = Probe(own)
    run, result, expected = call(own, lambda numel: torch.empty(numel))
    await own.barrier()  # until the lanes of all ranks have met, the first of them go in steps
    await run()
    assert torch.equal(result, expected.expand_as(result))
    assert probe.lent() == 4 * LENT[call][own.rank]
    await own.aclose()


@pytest.mark.ranks(2, backend="shm")
async def test_a5_a_copy_of_a_tensor_is_seen_to_take_memory(coll: Communicator) -> None:
    """The probe for memory would see it."""
    probe = Probe(coll)
    t = coll.arena_empty((NUMEL,)).fill_(1.0)
    await coll.allreduce(t, impl="shm")
    assert await probe.growth(lambda: coll.allreduce(t.clone(), impl="shm")) > NUMEL * 4 - MIB
