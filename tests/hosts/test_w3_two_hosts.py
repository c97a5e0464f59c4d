"""Recovery over two hosts, without MPI: ranks of either die, and others come in their place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.hosts.test_l5_two_hosts import by_rank

if TYPE_CHECKING:
    from tests.hosts.conftest import TwoHosts

pytestmark = [pytest.mark.drawn(1), pytest.mark.timeout(90)]

TRAIN = """
    import json, os, signal, socket
    import torch
    import aiodist
    from aiodist.nn import DataParallel

    STEPS, SAMPLES = 60, 12
    DIES = {{10: {first}, 20: {second}}}  # by step: which rank of the world then

    async def main():
        torch.manual_seed(0)
        module = torch.nn.Linear(4, 2).double()
        opt = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
        x = torch.arange(4.0 * SAMPLES, dtype=torch.float64).view(SAMPLES, 4).sin()
        net = None
        async with aiodist.init(elastic=True, timeout=30) as coll:
            while True:
                try:
                    net = net or await DataParallel.create(module, coll, opt, op="sum")
                    await net.rebind(coll, opt)
                    if net.steps_done == 40 and coll.size == 2:
                        coll = await coll.grow(2)
                        continue
                    if net.steps_done == STEPS:
                        await coll.barrier()
                        break
                    if net.steps_done in DIES and coll.size == 4 - list(DIES).index(net.steps_done):
                        if coll.rank == DIES[net.steps_done]:
                            os.kill(os.getpid(), signal.SIGKILL)
                    part = x[coll.rank :: coll.size]
                    await net.step(lambda part: (net(part) - part[:, :2].cos()).square().sum() / SAMPLES, opt, part)
                except aiodist.PeerError:
                    coll = await coll.shrink()
            torch.manual_seed(0)
            one = torch.nn.Linear(4, 2).double()
            opt = torch.optim.SGD(one.parameters(), lr=0.05, momentum=0.9)
            for _ in range(STEPS):
                opt.zero_grad()
                ((one(x) - x[:, :2].cos()).square().sum() / SAMPLES).backward()
                opt.step()
            off = max(float((a - b).abs().max()) for a, b in zip(one.parameters(), module.parameters()))
            print(json.dumps({{"rank": coll.rank, "hosts": list(coll.topology.hosts), "host": socket.gethostname(),
                              "node": coll.node, "generation": coll.generation, "off": off}}), flush=True)

    aiodist.run(main())
"""


@pytest.mark.parametrize("hosts", ["none"], indirect=True)
@pytest.mark.parametrize(("first", "second"), [(3, 0), (1, 0)], ids=["one of each", "all of the first"])
def test_w3_hosts_lose_ranks_and_get_others(hosts: TwoHosts, first: int, second: int) -> None:
    done = hosts.run("--elastic", "1:4", hosts.script(TRAIN.format(first=first, second=second)))
    assert done.returncode == 0, done.stdout + done.stderr
    said = by_rank(done.stdout)
    assert sorted(said) == [0, 1, 2, 3], done.stdout + done.stderr
    assert sorted(place["host"] for place in said.values()) == ["alpha", "alpha", "beta", "beta"]
    assert {tuple(place["hosts"]) for place in said.values()} in ({("alpha", "beta")}, {("beta", "alpha")})
    assert all(place["generation"] == 3 and place["off"] < 1e-12 for place in said.values())
