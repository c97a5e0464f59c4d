"""C6: objects of more than 2 GiB, whose bytes no 32-bit count numbers. Both ranks together take up to 15 GiB."""

from __future__ import annotations

from hashlib import blake2b

import psutil
import pytest

from aiodist import Communicator

SIZE = (2 << 30) + 17
ENDS = 1 << 20

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(600),
    pytest.mark.skipif(psutil.virtual_memory().total < 20 << 30, reason="takes 15 GiB of memory"),
    pytest.mark.ranks(2, backend=("openmpi", "gloo", "shm")),
]


def _ends() -> tuple[bytes, bytes]:
    """Return how it begins and how it ends, in no period."""
    head = b"".join(blake2b(b"%d" % i).digest() for i in range(ENDS // 64))
    return head, head[::-1]


def _large() -> bytes:
    head, tail = _ends()
    return b"".join([head, bytes(SIZE - 2 * ENDS), tail])


def _check(seen: bytes) -> None:
    assert type(seen) is bytes
    assert len(seen) == SIZE
    assert (seen[:ENDS], seen[-ENDS:]) == _ends()
    assert not any(seen[at] for at in range(ENDS, SIZE - ENDS, 4093)), "the middle is not what was sent"


async def test_c6_broadcast_of_more_than_two_gibibytes(coll: Communicator) -> None:
    _check(await coll.broadcast_object(_large() if coll.rank == 1 else b"", root=1))
    assert await coll.allreduce(1) == 2


async def test_c6_allgather_of_more_than_two_gibibytes(coll: Communicator) -> None:
    seen = await coll.allgather_object(_large() if coll.rank == 1 else b"short")
    assert seen[0] == b"short"
    _check(seen[1])
    assert await coll.allreduce(1) == 2


async def test_c6_a_message_of_more_than_two_gibibytes(coll: Communicator) -> None:
    if coll.rank == 0:
        await coll.send_object(_large(), 1, tag=3)
    else:
        receive = coll.recv_object()
        _check(await receive)
        assert (receive.source, receive.tag) == (0, 3)
    assert await coll.allreduce(1) == 2
