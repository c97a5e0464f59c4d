"""S2: the pool of pinned memory is bounded, never lends anything twice, and does without where pinning fails."""

from __future__ import annotations

import random
import threading

import pytest
import torch
from torch import Tensor

from aiodist.streams import PinnedPool

KIB = 1 << 10


class Memory:
    """Pins by making ordinary tensors, and knows those it made."""

    def __init__(self, room: int = 1 << 40) -> None:
        self.room = room
        self.made: dict[int, int] = {}

    def __call__(self, nbytes: int) -> Tensor:
        if sum(self.made.values()) + nbytes > self.room:
            raise RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA")
        t = torch.empty(nbytes, dtype=torch.uint8)
        self.made[t.data_ptr()] = nbytes
        return t

    def has(self, t: Tensor) -> bool:
        return t.data_ptr() in self.made


def ignore(_: Tensor) -> None:
    raise AssertionError("there was a piece")


def test_s2_nothing_is_pinned_before_it_is_needed_and_buffers_are_reused() -> None:
    memory = Memory()
    pool = PinnedPool(1024 * KIB, 64 * KIB, allocate=memory)
    assert pool.pinned_bytes == 0
    t = pool.take(5000)
    assert t.shape == (5000,)
    assert t.dtype is torch.uint8
    assert pool.pinned_bytes == 8192
    pool.release(t[:17].view(torch.int8))  # any part of it
    assert pool.lent == 0
    for _ in range(3):
        again = pool.take(8192)
        assert again.data_ptr() == t.data_ptr()
        pool.release(again)
    assert pool.take(4097).data_ptr() == t.data_ptr()
    other = pool.take(4097)
    assert other.data_ptr() != t.data_ptr()
    assert len(memory.made) == 2


def test_s2_a_pool_takes_sizes_as_they_come() -> None:
    memory = Memory()
    pool = PinnedPool(1024 * KIB, 64 * KIB, allocate=memory)
    assert pool.take(0).shape == (0,)
    assert pool.pinned_bytes == 0
    for nbytes in (1, 4096, 4097, 65536, 65537):
        assert pool.take(nbytes).nbytes == nbytes
    assert sorted(memory.made.values()) == [4096, 4096, 8192, 65536, 131072]
    with pytest.raises(ValueError, match="pieces of 100 bytes in a pool of 99"):
        PinnedPool(99, 100)


def test_s2_beyond_the_bound_there_is_pageable_memory_that_is_not_kept() -> None:
    memory = Memory()
    pool = PinnedPool(256 * KIB, 64 * KIB, allocate=memory)  # one piece and 192 KiB of buffers
    taken = [pool.take(64 * KIB) for _ in range(5)]
    assert [memory.has(t) for t in taken] == [True, True, True, False, False]
    assert pool.pinned_bytes == 192 * KIB
    assert pool.lent == 3
    for t in taken:
        pool.release(t)
    assert pool.lent == 0
    assert [memory.has(pool.take(64 * KIB)) for _ in range(4)] == [True, True, True, False]
    assert not memory.has(pool.take(1 << 20)), "longer than the pool"


def test_s2_free_buffers_of_other_sizes_make_room() -> None:
    memory = Memory()
    pool = PinnedPool(256 * KIB, 64 * KIB, allocate=memory)
    small = [pool.take(4 * KIB) for _ in range(48)]
    assert pool.pinned_bytes == 192 * KIB
    for t in small[:20]:
        pool.release(t)
    assert memory.has(pool.take(64 * KIB))
    assert pool.pinned_bytes <= 192 * KIB
    assert not memory.has(pool.take(64 * KIB)), "those that are lent stay"


def test_s2_pieces_are_waited_for_in_order_and_buffers_leave_them_alone() -> None:
    memory = Memory()
    pool = PinnedPool(512 * KIB, 64 * KIB, allocate=memory)
    while memory.has(pool.take(64 * KIB)):
        pass
    assert pool.has_pieces()
    first, second = pool.piece(ignore), pool.piece(ignore)
    assert first is not None
    assert second is not None
    assert first.nbytes == second.nbytes == 64 * KIB
    assert pool.pinned_bytes == 512 * KIB
    given: list[tuple[str, Tensor]] = []
    for name in ("a", "b"):
        assert pool.piece(lambda piece, name=name: given.append((name, piece))) is None  # type: ignore[misc]
    pool.release_piece(second)
    pool.release_piece(first)
    assert [(name, piece.data_ptr()) for name, piece in given] == [("a", second.data_ptr()), ("b", first.data_ptr())]
    lent = pool.lent
    for _, piece in given:
        pool.release_piece(piece)
    assert pool.lent == lent - 2
    assert pool.piece(ignore) is not None


def test_s2_where_pinning_fails_there_is_one_warning_and_pageable_memory_for_good() -> None:
    memory = Memory(room=64 * KIB)
    pool = PinnedPool(1024 * KIB, 64 * KIB, allocate=memory)
    kept = pool.take(64 * KIB)
    with pytest.warns(RuntimeWarning, match=r"cannot be pinned, so copies .*slower: CUDA error: out of memory$"):
        other = pool.take(4 * KIB)
    assert not pool.has_pieces()  # where another warning would be an error
    assert not memory.has(other)
    assert pool.pinned_bytes == 64 * KIB
    memory.room = 1 << 40
    assert not memory.has(pool.take(4 * KIB)), "it is not tried again"
    pool.release(kept)
    assert pool.take(64 * KIB).data_ptr() == kept.data_ptr(), "what was pinned stays so"


def test_s2_pieces_that_were_pinned_before_it_failed_go_round() -> None:
    pool = PinnedPool(1024 * KIB, 64 * KIB, allocate=Memory(room=64 * KIB), warn=lambda _: None)
    assert pool.has_pieces()
    piece = pool.piece(ignore)
    assert piece is not None
    given: list[Tensor] = []
    assert pool.piece(given.append) is None
    pool.release_piece(piece)
    assert given[0].data_ptr() == piece.data_ptr()


def test_s2_real_pinning_fails_here_without_a_device() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    pool = PinnedPool()
    with pytest.warns(RuntimeWarning, match="cannot be pinned"):
        t = pool.take(100)
    t.fill_(7)
    assert not t.is_pinned()
    assert not t.is_inference()


@pytest.mark.usefixtures("simulated_cuda")
def test_s2_buffers_are_plain_host_tensors_in_any_mode() -> None:
    pool = PinnedPool()
    with torch.inference_mode(), torch.device("cuda"):
        buffer, pageable = pool.take(100), pool.take(1 << 30)
        assert pool.has_pieces()
        piece = pool.piece(ignore)
    assert piece is not None
    for t in (buffer, pageable[:10], piece):
        assert t.is_cpu
        assert not t.is_inference()
        t[0] = 1  # which an inference tensor refuses out here
    assert buffer.is_pinned()
    assert piece.is_pinned()
    assert not pageable.is_pinned()


def test_s2_threads_share_a_pool() -> None:
    memory = Memory()
    pool = PinnedPool(256 * KIB, 16 * KIB, allocate=memory)
    wrong: list[str] = []

    def work(me: int) -> None:
        draw = random.Random(me)
        mine: list[Tensor] = []
        for _ in range(300):
            if mine and draw.random() < 0.5:
                t = mine.pop(draw.randrange(len(mine)))
                if not bool((t == me).all()):
                    wrong.append(f"{t.numel()} bytes of {me} were lent twice")
                pool.release(t)
            else:
                mine.append(pool.take(draw.choice((1, 5000, 16384))).fill_(me))
            if pool.pinned_bytes > 256 * KIB:
                wrong.append(f"{pool.pinned_bytes} bytes are pinned")
        for t in mine:
            pool.release(t)

    threads = [threading.Thread(target=work, args=(me,)) for me in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not wrong
    assert pool.lent == 0
