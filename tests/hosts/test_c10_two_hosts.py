"""C10 between real hosts: the first rank of each compares for its host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.hosts.conftest import TwoHosts

pytestmark = pytest.mark.thorough

DIFFER = """
import asyncio, torch, aiodist

def scattered(coll, dtype):
    # What is scattered only the root knows; of the others one says what it expects.
    given = [torch.ones(3)] * coll.size if coll.rank == 0 else None
    return coll.scatter(given, out=torch.empty(3, dtype=dtype) if coll.rank == 3 else None)

async def main():
    async with aiodist.init() as coll:
        assert parts_of(coll).dispatcher.gate.several
        for odd in range(coll.size):
            for n in (3, 100_000, 3_000_000):
                t = torch.full((n,), float(coll.rank))
                late = (odd + 2) % coll.size
                if coll.rank == late:  # its neighbour knows of the others before it has come
                    await aiodist.gather(*[coll.recv_object(other) for other in range(coll.size) if other != late])
                handle = coll.allreduce(t, "max" if coll.rank == odd else "sum")
                if coll.rank != late:
                    await coll.send_object(None, late)
                try:
                    await handle
                except aiodist.MismatchError as error:
                    assert "max" in str(error) and "sum" in str(error), error
                else:
                    raise AssertionError("no error")
                assert (await coll.allreduce(t.fill_(1))).eq(coll.size).all()
        try:
            await scattered(coll, torch.int32)
        except aiodist.MismatchError as error:
            assert "int32" in str(error) and "float32" in str(error), error
        else:
            raise AssertionError("no error")
        assert (await scattered(coll, torch.float32)).eq(1).all()
        assert await coll.allreduce(coll.rank) == 6
    print("told", coll.nodes)

aiodist.run(main)
"""


def test_c10_hosts_every_rank_is_told_and_all_goes_on(hosts: TwoHosts) -> None:
    done = hosts.run(hosts.script(DIFFER, "differ.py"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("told 2") == 4
