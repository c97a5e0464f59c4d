"""N12 between real hosts: gradients are added up in full within a host, and codes travel between hosts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.hosts.conftest import TwoHosts

pytestmark = pytest.mark.thorough

TRAIN = """
import json, pathlib, torch, aiodist
from aiodist import codecs
from aiodist.nn import DataParallel, assert_synchronized

CODECS = {"plain": None, "powersgd": codecs.PowerSGD(4), "topk": codecs.TopK(0.01), "bf16": codecs.BFloat16()}
SENT = pathlib.Path("/sys/class/net/net0/statistics/tx_bytes")

async def main():
    torch.set_num_threads(1)
    found = {}
    async with aiodist.init() as coll:
        for name, codec in CODECS.items():
            torch.manual_seed(coll.rank)
            net = await DataParallel.create(torch.nn.Linear(1024, 1024), coll, compress=codec)
            opt = torch.optim.SGD(net.parameters(), lr=0.1)
            await coll.barrier()
            before = int(SENT.read_text())
            for _ in range(10):
                x = torch.randn(8, 1024)
                await net.step(lambda: net(x).square().mean(), opt)
            await coll.barrier()
            on_the_link = await coll.allgather(int(SENT.read_text()) - before)
            await assert_synchronized(net.module, coll, rtol=0)
            sent = await coll.allgather(net.statistics().sent_nbytes)
            found[name] = {"sent": sent, "on_the_link": on_the_link[0] + on_the_link[2]}  # one rank of each host
            await net.aclose()
        if coll.rank == 0:
            print("found", json.dumps(found))

aiodist.run(main)
"""


def test_n12_hosts_exchange_codes(any_hosts: TwoHosts) -> None:
    done = any_hosts.run(any_hosts.script(TRAIN, "compressed.py"))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.partition("found ")[2])
    sent = {name: one["sent"] for name, one in found.items()}
    on_the_link = {name: one["on_the_link"] for name, one in found.items()}
    gradients = 10 * 4 * (1024 * 1024 + 1024)
    assert sent["plain"] == [gradients] * 4
    # Ranks 0 and 2 are the first of their hosts.
    assert sent["powersgd"] == [10 * 4 * (2 * 4 * 1024 + 1024), 0] * 2
    assert sent["bf16"] == [gradients // 2, 0] * 2
    assert sent["topk"][0] < gradients / 40
    assert on_the_link["plain"] > 2 * gradients
    assert on_the_link["bf16"] < 0.6 * on_the_link["plain"]
    assert max(on_the_link["powersgd"], on_the_link["topk"]) < on_the_link["plain"] / 10
