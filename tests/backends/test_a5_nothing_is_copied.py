"""A5: between processes, collectives in shared memory copy nothing of a tensor in the arena, and stage any other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aiodist import Communicator, Handle
from aiodist.backends.shm.group import Group
from aiodist.backends.shm.rounds import Rounds
from aiodist.backends.shm.works import Task

NUMEL = 8 << 20
MIB = 1 << 20
RECORDS = 1024
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
    """Counts what a rank copies to or from a stage, and finds out what memory an operation takes."""

    def __init__(self, coll: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
        assert coll._registry.near is not None
        assert coll._repertoire.within is not None
        self._arena = coll._registry.near.arena
        self._group = coll._repertoire.within.group
        self.reached: list[bool] = []
        """Of each long tensor that was worked on in shared memory: it lies where the others reach it."""
        self.copied = 0
        """Bytes that this rank copied to its stage and from it."""
        submit, pieces = Group.submit, Rounds._pieces

        def noting(group: Group, task: Task) -> None:
            if task.nbytes > RECORDS:
                self.reached.append(group._near.locate(task.tensor) is not None)
            submit(group, task)

        def counting(rounds: Rounds, j: int, stage: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
            for mine, staged in pieces(rounds, j, stage):
                self.copied += mine.nbytes
                yield mine, staged

        monkeypatch.setattr(Group, "submit", noting)
        monkeypatch.setattr(Rounds, "_pieces", counting)

    @property
    def staged(self) -> bool:
        """The group has memory for a stage."""
        return self._group._stage is not None

    def arena_bytes(self) -> int:
        """Return the bytes of the arena that are in use."""
        return sum(s.nbytes - sum(stop - start for start, stop in s.holes) for s in self._arena.segments)

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


@pytest.mark.drawn(2)
@pytest.mark.ranks(2, backend=("openmpi", "shm"))
@pytest.mark.parametrize("call", CALLS)
async def test_a5_collectives_on_arena_tensors_copy_nothing(
    coll: Communicator, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = await coll.dup()
    probe = Probe(own, monkeypatch)
    run, result, expected = call(own, own.empty)
    await run()  # has all pages of all ranks in this one's page table
    assert torch.equal(result, expected.expand_as(result))
    taken = probe.arena_bytes()
    grown = await probe.growth(run)
    assert grown < 4 * MIB, f"{grown} bytes more, of tensors of {NUMEL * 4}"
    assert probe.arena_bytes() == taken
    assert probe.reached == [True, True]
    if call is _allgather:  # the records that say how long each tensor is are private, and staged
        assert probe.copied <= RECORDS
    else:
        assert (probe.copied, probe.staged) == (0, False)
    await own.aclose()


@pytest.mark.ranks(2, backend=("openmpi", "shm"))
@pytest.mark.parametrize("call", CALLS)
async def test_a5_the_same_of_private_tensors_is_seen_to_be_staged(
    coll: Communicator, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = await coll.dup()
    probe = Probe(own, monkeypatch)
    run, result, expected = call(own, lambda numel: torch.empty(numel))
    before = probe.arena_bytes()
    await run()
    assert torch.equal(result, expected.expand_as(result))
    assert probe.reached == [False]
    if call is _broadcast and own.rank == 0:  # it only looks at the root's stage
        assert (probe.copied, probe.staged) == (0, False)
    else:
        assert probe.staged
        assert probe.copied >= NUMEL * 2
        assert probe.arena_bytes() >= before + 2 * MIB
    await own.aclose()


@pytest.mark.ranks(2, backend="shm")
async def test_a5_a_copy_of_a_tensor_is_seen_to_take_memory(
    coll: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe for memory would see it."""
    probe = Probe(coll, monkeypatch)
    t = coll.empty((NUMEL,)).fill_(1.0)
    await coll.allreduce(t, impl="shm")
    assert await probe.growth(lambda: coll.allreduce(t.clone(), impl="shm")) > NUMEL * 4 - MIB
