"""A4 between real hosts: hierarchical against flat, over a quick link and one of 1 Gb/s."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.hosts.conftest import TwoHosts

pytestmark = pytest.mark.thorough

RIGHT = """
import sys
import torch, aiodist

async def main():
    async with aiodist.init() as coll:
        everybody = torch.arange(1.0, coll.size + 1)
        for n in (1, 1001, 3_000_000):
            for impl in ("hierarchical", "leaders", sys.argv[1], "auto"):
                for t in (torch.empty(n), coll.arena_empty(n)):
                    t.fill_(coll.rank + 1.0)
                    await coll.allreduce(t, impl=impl)
                    assert t.eq(everybody.sum()).all(), (impl, n)
                    t.fill_(coll.rank + 1.0)
                    await coll.broadcast(t, root=3, impl=impl)
                    assert t.eq(4).all(), (impl, n)
                    t.fill_(coll.rank + 1.0)
                    await coll.reduce(t, "max", root=2, impl=impl)
                    assert t.eq(4 if coll.rank == 2 else coll.rank + 1).all(), (impl, n)
        mean = await coll.allreduce(torch.full((5,), coll.rank, dtype=torch.bfloat16), "mean", impl="hierarchical")
        assert mean.tolist() == [1.5] * 5
        print("right", coll.nodes)

aiodist.run(main)
"""

LISTS = """
import torch, aiodist

async def main():
    async with aiodist.init() as coll:
        total = sum(range(coll.size))
        for _ in range(20):
            ts = [torch.full((n,), float(coll.rank + n % 5)) for n in (7, 9_001, 3, 12_000, 200_003)]
            for t, of_all in zip(ts, await coll.allgather(ts, timeout=20), strict=True):
                assert [one.unique().tolist() for one in of_all] == [[r + t.numel() % 5] for r in range(coll.size)]
            for t, block in zip(ts, await coll.reduce_scatter(ts, timeout=20), strict=True):
                assert block.eq(total + coll.size * (t.numel() % 5)).all()
            for t in await coll.allreduce(ts, timeout=20):
                assert t.eq(total + coll.size * (t.numel() % 5)).all()
        print("right", coll.nodes)

aiodist.run(main)
"""


def test_a4_hosts_small_and_large_tensors_of_a_list_do_not_mix(any_hosts: TwoHosts) -> None:
    """Three ranks: those of two schedules do not take the same steps."""
    done = any_hosts.run(any_hosts.script(LISTS, "lists.py"), hosts="alpha:2,beta:1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("right 2") == 3


def test_a4_hosts_hierarchical_is_right(hosts: TwoHosts) -> None:
    done = hosts.run(hosts.script(RIGHT, "right.py"), "gloo" if hosts.mpi == "none" else "mpi")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("right 2") == 4


def test_a4_hosts_hierarchical_sends_less_between_hosts_than_flat(any_hosts: TwoHosts) -> None:
    """The hierarchical form sends half of the bytes of a flat ring; `aiodist bench` measures the time."""
    sent = {}
    for impl in ("hierarchical", "ring"):
        before = any_hosts.bytes_sent()
        any_hosts.bench("allreduce", (impl,), (), (16 << 20,))
        sent[impl] = any_hosts.bytes_sent() - before
    assert 0.5 * sent["ring"] < sent["hierarchical"] < 0.8 * sent["ring"], sent
