"""P8: EASGD with few exchanges, on the real server, with the traffic by its counters and on the wires."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch.nn.functional import cross_entropy

from aiodist import Communicator
from aiodist.ps import EASGD, ParameterServer, elastic_alpha
from benchmarks.ps_convergence import Task, one_thread

WORKERS, STEPS, SELDOM = 4, 384, 64


class Found(NamedTuple):
    loss: float
    """Loss of the centre, on samples that no worker has trained on."""
    before: float
    tensors: int
    """Bytes that all workers pushed and pulled."""
    sent: int
    """Bytes that left all ranks for it, with heads and answers."""


async def trained(coll: Communicator, task: Task, tau: int) -> Found:
    """Train four workers at their own speeds, with a dedicated server; return the same on all ranks."""
    net = task.model()
    async with ParameterServer(coll, net, servers=1) as ps:
        before, loss = ps.statistics(), task.test_loss(net)
        await coll.barrier()
        if ps.is_worker:
            opt = torch.optim.SGD(net.parameters(), lr=0.2)
            x, y = task.batches[coll.rank]
            async with EASGD(ps, net, opt, tau=tau, alpha=elastic_alpha(0.9, WORKERS)) as client:
                for step in range(STEPS):
                    opt.zero_grad()
                    cross_entropy(net(x[step]), y[step]).backward()
                    await client.step()
            await ps.sync()
            await ps.barrier()
            found = ps.statistics()
            tensors = found.push_bytes - before.push_bytes + found.pull_bytes - before.pull_bytes
            assert found.push_sent_bytes == found.push_bytes, (
                "all of it has left; what is read may lie in shared memory"
            )
        else:
            tensors = 0
        await coll.barrier()
        sent = ps.statistics().sent_bytes - before.sent_bytes
        if ps.is_worker:
            await ps.pull(net)
        totals = [int(await coll.allreduce(count)) for count in (tensors, sent)]
        return Found(float((await coll.allgather(torch.tensor(task.test_loss(net))))[0]), loss, *totals)


@pytest.mark.thorough
@pytest.mark.ranks(WORKERS + 1)
@pytest.mark.ranks(WORKERS + 1, backend="gloo")
async def test_p8_easgd_at_tau_64_costs_64_times_less_traffic_and_no_loss(coll: Communicator) -> None:
    task = Task(WORKERS, STEPS)
    with one_thread():
        often, seldom = await trained(coll, task, 1), await trained(coll, task, SELDOM)
    parameters = sum(p.nbytes for p in task.model().parameters())
    assert seldom.loss <= 1.05 * often.loss, (often, seldom)
    assert seldom.loss < 0.5 * seldom.before, "it has learnt something"
    once = WORKERS * parameters  # in addition to its exchanges each client reads the centre once
    assert often.tensors - once == WORKERS * STEPS * 2 * parameters
    assert often.tensors - once == SELDOM * (seldom.tensors - once)
    assert often.sent > 0.9 * SELDOM * (seldom.sent - once), "what is said besides is little"
