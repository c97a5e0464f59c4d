"""A5: the memory of one rank: tensors, views, holes, and the lack of memory."""

from __future__ import annotations

import gc
import os
import random
import threading
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from resource import RUSAGE_THREAD, getrusage

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from aiodist.backends.shm import memory
from aiodist.testing.seams.memory import Arena, Place, move
from tests.support.moving import needs_moving
from tests.support.transports import held

PAGE = os.sysconf("SC_PAGE_SIZE")
KINDS = (torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float32, torch.complex64, torch.complex128)


def resident(arena: Arena) -> int:
    """Return the bytes of pages that the kernel holds for it."""
    return sum(os.fstat(segment.fd).st_blocks * 512 for segment in arena.segments)


def place_of(arena: Arena, t: Tensor) -> Place:
    place = arena.locate(t.data_ptr(), t.nbytes)
    assert place is not None
    return place


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a5_tensors_are_plain_ones(kind: torch.dtype) -> None:
    arena = Arena()
    for shape in ((), (1,), (0,), (3, 0, 2), (5, 7), (2, 3, 4), (100_003,)):
        t = arena.empty(shape, kind)
        assert type(t) is Tensor
        assert (tuple(t.shape), t.dtype, t.is_contiguous()) == (shape, kind, True)
        assert (t.requires_grad, t.is_leaf, t.device.type) == (False, True, "cpu")
        t.copy_(torch.ones(shape))
        assert torch.equal(t, torch.ones(shape, dtype=kind))
        if t.numel():
            assert place_of(arena, t).offset % 64 == 0
            assert torch.equal(arena.memory(place_of(arena, t), t.nbytes).view(kind), t.view(-1))


def test_a5_sizes_below_zero_are_refused_as_torch_does() -> None:
    arena = Arena()
    for shape in ((-1,), (-1, 4), (3, -2), (-1, -1), (-2, -2)):
        with pytest.raises(RuntimeError, match=r"negative dimension|invalid shape|only one dimension"):
            arena.empty(shape, torch.float32)
    gc.collect()
    assert not held(arena)


def test_a5_views_count_and_private_memory_does_not() -> None:
    arena = Arena()
    t = arena.empty((100, 10), torch.float32)
    other = arena.empty((100, 10), torch.float32)
    base = place_of(arena, t)
    assert place_of(arena, t[3:7]) == Place(base.segment, base.offset + 3 * 40)
    assert place_of(arena, t.view(-1)[11:]) == Place(base.segment, base.offset + 44)
    assert place_of(arena, t.T) == base
    assert place_of(arena, other) != base
    for private in (torch.ones(10), t.clone(), t.T.contiguous()):
        assert arena.locate(private.data_ptr(), private.nbytes) is None
    segment = arena.segments[0]
    assert arena.locate(segment.address, segment.nbytes) == Place(0, 0)
    assert arena.locate(segment.address + 1, segment.nbytes) is None
    assert arena.locate(segment.address - 1, 1) is None


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["here", "thread", "cycle"])
def test_a5_memory_goes_back_with_the_last_view(way: str) -> None:
    arena = Arena()
    t = arena.empty((1 << 20,), torch.float32)
    assert resident(arena) == 4 << 20, "its pages were not reserved"
    views = [t[5:9], t.view(1024, 1024).T, t.detach(), t.view(torch.int8)]
    del t
    while len(views) > 1:
        views.pop()
        gc.collect()
        assert resident(arena) == 4 << 20
    if way == "here":
        views.pop()
    elif way == "thread":
        thread = threading.Thread(target=views.pop)
        thread.start()
        thread.join(10)
    else:
        ring: list[object] = [views.pop()]
        ring.append(ring)
        del ring
        assert resident(arena) == 4 << 20
        gc.collect()
    assert resident(arena) == held(arena) == 0
    assert arena.segments[0].holes == [(0, arena.segments[0].nbytes)]


def test_a5_a_collection_may_come_at_any_time() -> None:
    """The last reference of many tensors goes in the middle of making others, with the arena's lock held."""
    arena = Arena()
    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for i in range(300):
            ring: list[object] = [arena.empty((i * 100 + 1,), torch.float32)]
            ring.append(ring)
    finally:
        gc.set_threshold(*before)
    del ring
    gc.collect()
    assert resident(arena) == held(arena) == 0


def test_a5_reserved_room_keeps_its_pages_and_is_used_first() -> None:
    arena = Arena()
    outside = arena.empty((100,), torch.float32)
    arena.reserve(1_000_000)
    kept = resident(arena) - PAGE
    assert kept == -(-1_000_000 // PAGE) * PAGE
    inside = [arena.empty((60_000,), torch.float32) for _ in range(4)]
    assert {place_of(arena, t).segment for t in inside} == {1}
    assert resident(arena) == kept + PAGE, "new pages were taken"
    assert place_of(arena, arena.empty((60_000,), torch.float32)).segment == 0, "there was no room left"
    del inside
    assert resident(arena) == kept + PAGE, "its pages went"
    again = arena.empty((240_000,), torch.float32)
    assert place_of(arena, again).segment == 1
    arena.reserve(1)
    assert resident(arena) == kept + 2 * PAGE
    del outside, again


@given(st.lists(st.tuples(st.integers(0, 5 * PAGE), st.integers(0, 9)), max_size=40), st.booleans())
def test_a5_blocks_never_overlap_and_holes_are_joined(steps: list[tuple[int, int]], kept: bool) -> None:
    arena = Arena()
    if kept:
        arena.reserve(20 * PAGE)
    alive: list[tuple[Tensor, int]] = []
    for number, (nbytes, index) in enumerate(steps):
        if index < len(alive):
            alive.pop(index)
        t = arena.empty((nbytes,), torch.uint8).fill_(number)
        alive.append((t, number))
        assert all(bool((t == value).all()) for t, value in alive), "somebody else wrote to it"
        used = sum(-(-t.nbytes // PAGE) * PAGE for t, _ in alive)
        assert held(arena) == used
        for segment in arena.segments:
            ends = [end for hole in segment.holes for end in hole]
            assert ends == sorted(set(ends)), "holes overlap, or touch"
            assert all(end % PAGE == 0 for end in ends)
        if not kept:
            assert resident(arena) == used
    t = torch.empty(0)
    alive.clear()
    assert all(segment.holes == [(0, segment.nbytes)] for segment in arena.segments)


@pytest.mark.parametrize("shape", [(1 << 50,), (1 << 20, 1 << 44), (1 << 62, 8)])
def test_a5_more_than_there_can_be_is_a_memory_error_that_says_how_much(shape: tuple[int, ...]) -> None:
    arena = Arena()
    nbytes = 4
    for size in shape:
        nbytes *= size
    for _ in range(2):
        with pytest.raises(MemoryError, match=f"an arena block of {nbytes} bytes"):
            arena.empty(shape, torch.float32)
        with pytest.raises(MemoryError, match=f"an arena block of {nbytes} bytes"):
            arena.reserve(nbytes)
    assert not arena.segments, "addresses are taken for what failed"
    assert arena.empty((5,), torch.float32).fill_(1).sum() == 5


@pytest.mark.parametrize("first", [True, False])
def test_a5_lack_of_memory_while_pages_are_reserved(monkeypatch: pytest.MonkeyPatch, first: bool) -> None:
    arena = Arena()
    kept = None if first else arena.empty((10,), torch.float32)
    before = held(arena)
    allocate = os.posix_fallocate

    def lacking(fd: int, start: int, nbytes: int) -> None:
        if nbytes > PAGE:
            raise OSError(28, os.strerror(28))
        allocate(fd, start, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", lacking)
    for nbytes in (2 * PAGE, 8 << 20):
        with pytest.raises(MemoryError, match=f"an arena block of {nbytes} bytes: No space left"):
            arena.empty((nbytes,), torch.uint8)
        with pytest.raises(MemoryError, match=f"an arena block of {nbytes} bytes: No space left"):
            arena.reserve(nbytes)
    assert held(arena) - before == sum(s.nbytes for s in arena.segments if s.reserved), "failed blocks are held"
    small = arena.empty((10,), torch.float32)
    assert not arena.segments[place_of(arena, small).segment].reserved
    monkeypatch.undo()
    large = arena.empty((8 << 20,), torch.uint8).fill_(1)
    assert large.sum() == 8 << 20
    del kept, small


def test_a5_blocks_that_would_have_the_kernel_kill_somebody_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(nbytes: int) -> None:
        raise MemoryError(f"an arena block of {nbytes} bytes: 0 bytes of memory are available")

    arena = Arena()
    small = arena.empty((10,), torch.float32)
    monkeypatch.setattr(memory, "check_room", refused)
    with pytest.raises(MemoryError, match=f"{4 << 20} bytes: 0 bytes"):
        arena.empty((1 << 20,), torch.float32)
    with pytest.raises(MemoryError, match=f"{PAGE} bytes: 0 bytes"):
        arena.reserve(1)
    assert held(arena) == resident(arena) == PAGE
    assert arena.empty((10,), torch.float32).data_ptr() > small.data_ptr()


@pytest.mark.parametrize(
    ("limit", "used"),
    [("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")],
    ids=["2", "1"],
)
def test_a5_a_container_has_the_room_that_its_limit_leaves(tmp_path: Path, limit: str, used: str) -> None:
    (tmp_path / limit).parent.mkdir(exist_ok=True)
    (tmp_path / limit).write_text("1000\n")
    (tmp_path / used).write_text("400\n")
    memory.check_room(600, tmp_path)
    with pytest.raises(MemoryError, match="601 bytes: 600 bytes are available"):
        memory.check_room(601, tmp_path)


@pytest.mark.skipif(
    tuple(map(int, os.uname().release.split(".")[:2])) < (5, 14), reason="each page costs a fault there"
)
def test_a5_new_memory_costs_no_faults_of_pages() -> None:
    t = Arena().empty((4 << 20,), torch.uint8)
    before = getrusage(RUSAGE_THREAD).ru_minflt
    t.numpy()[:] = 1
    assert getrusage(RUSAGE_THREAD).ru_minflt - before < t.nbytes // PAGE // 2


def test_a5_what_dies_while_the_arena_is_busy_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena()
    ts = [arena.empty((1 << 20,), torch.float32)]

    def busy(nbytes: int) -> None:
        ts.clear()  # while an allocation has the lock

    monkeypatch.setattr(memory, "check_room", busy)
    t = arena.empty((1 << 30,), torch.uint8)
    assert not ts
    assert held(arena) == t.nbytes


def _in_child(act: Callable[[], None]) -> None:
    """Run `act` in a forked child, whose exit runs everything that exits run."""
    child = get_context("fork").Process(target=act)
    child.start()
    child.join(20)
    assert child.exitcode == 0


@pytest.mark.thorough
@needs_moving
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a5_a_forked_child_takes_nothing_from_its_parent() -> None:
    arena = Arena()
    kept = [arena.empty((300_000,), torch.float32).fill_(7)]
    others = [arena.empty((300_000,), torch.float32).fill_(8)]
    ring: list[object] = [others]
    ring.append(ring)
    before, holes = resident(arena), [*arena.segments[0].holes]

    def collected() -> None:
        ring.clear()
        kept.clear()
        others.clear()
        gc.collect()

    def refused() -> None:
        t = torch.ones(5)
        with pytest.raises(RuntimeError, match="this arena belongs to the parent of a forked child"):
            move(arena, {"t": t})
        assert t.sum() == 5

    for act in (lambda: None, collected, refused):
        _in_child(act)
        assert resident(arena) == before
        assert arena.segments[0].holes == holes
        assert set(kept[0].tolist()) == {7.0}
        assert set(others[0].tolist()) == {8.0}
    ring.clear()
    kept.clear()
    others.clear()
    assert resident(arena) == held(arena) == 0


@pytest.mark.thorough
def test_a5_threads_may_make_and_drop_tensors_at_once() -> None:
    arena = Arena()
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        draw = random.Random(seed)
        mine: list[tuple[Tensor, int]] = []
        try:
            for number in range(150):
                if len(mine) > 5:
                    t, value = mine.pop(draw.randrange(len(mine)))
                    assert bool((t == value).all()), "somebody else wrote to it"
                    assert arena.locate(t.data_ptr(), t.nbytes) is not None
                value = (seed * 31 + number) % 251
                mine.append((arena.empty((draw.randrange(1, 6 * PAGE),), torch.uint8).fill_(value), value))
        except BaseException as error:  # noqa: BLE001  - told to the test's thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert not failures, failures
    gc.collect()
    assert resident(arena) == held(arena) == 0
    assert arena.segments[0].holes == [(0, arena.segments[0].nbytes)]


def test_a5_tensors_outlive_their_arena() -> None:
    arena = Arena()
    t = arena.empty((10_000,), torch.float32).fill_(3)
    del arena
    gc.collect()
    assert set(t.tolist()) == {3.0}


def test_a5_modes_are_as_of_any_tensor() -> None:
    arena = Arena()
    with torch.inference_mode():
        first = arena.empty((3,), torch.float32)
    assert first.is_inference()
    t = arena.empty((3,), torch.float32).fill_(2).requires_grad_()
    (t * t).sum().backward()
    assert t.grad is not None
    assert t.grad.tolist() == [4.0, 4.0, 4.0]
    with torch.device("meta"):
        assert arena.empty((3,), torch.float32).device.type == "cpu"
