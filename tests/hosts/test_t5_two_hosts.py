"""`torch.distributed` over two hosts: DDP and FSDP2 come to the losses of gloo."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch

from tests.hosts.conftest import ROOT

if TYPE_CHECKING:
    from tests.hosts.conftest import TwoHosts

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(240)]

TRAIN = """
import json, sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
import aiodist.c10d

dist.init_process_group(sys.argv[1])
losses = []
for wrap in (DistributedDataParallel, fully_shard):
    torch.manual_seed(0)
    net = wrap(nn.Sequential(nn.Linear(16, 300), nn.ReLU(), nn.Linear(300, 4)))
    opt = torch.optim.Adam(net.parameters(), 0.01)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(4):
        opt.zero_grad()
        loss = nn.functional.mse_loss(net(torch.randn(8, 16)), torch.randn(8, 4))
        loss.backward()
        opt.step()
        losses.append(loss.item())
every = [None] * dist.get_world_size()
dist.all_gather_object(every, losses)
dist.barrier()
if dist.get_rank() == 0:
    print("LOSSES", json.dumps(every))
dist.destroy_process_group()
"""


def losses(output: str) -> torch.Tensor:
    [line] = [line for line in output.splitlines() if "LOSSES" in line]
    return torch.tensor(json.loads(line.partition("LOSSES ")[2]), dtype=torch.float64)


@pytest.mark.parametrize("ranks", [1, 2])
def test_t5_hosts_train_as_over_gloo(hosts: TwoHosts, ranks: int) -> None:
    program = hosts.script(TRAIN, "train.py")
    found = {}
    for backend in ("gloo", "aiodist"):
        done = hosts.run(program, backend, hosts=f"alpha:{ranks},beta:{ranks}")
        assert done.returncode == 0, done.stdout + done.stderr
        found[backend] = losses(done.stdout)
    assert found["gloo"].shape == (2 * ranks, 8)
    if ranks == 1:  # two ranks: there is one order only to add them up in
        assert found["aiodist"].equal(found["gloo"])
    else:
        torch.testing.assert_close(found["aiodist"], found["gloo"], rtol=1e-5, atol=1e-6)


def test_t5_hosts_started_by_torchrun(any_hosts: TwoHosts) -> None:
    program = any_hosts.script(TRAIN, "train.py")
    found = {}
    for port, backend in ((29511, "gloo"), (29512, "aiodist")):
        meeting = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{any_hosts.alpha.address}:{port}"]
        torchrun = [sys.executable, "-m", "torch.distributed.run", *meeting, "--nproc-per-node", "1"]
        variables = ["env", f"PYTHONPATH={ROOT}", "OMP_NUM_THREADS=1"]
        nodes = [
            subprocess.Popen(
                [*host.entering, *variables, *torchrun, str(any_hosts.folder / program), backend],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for host in (any_hosts.alpha, any_hosts.beta)
        ]
        try:
            outputs = [node.communicate(timeout=90)[0] for node in nodes]
        finally:
            for node in nodes:
                node.kill()
        assert [node.returncode for node in nodes] == [0, 0], outputs
        found[backend] = losses("\n".join(outputs))
    assert found["aiodist"].equal(found["gloo"])
    assert any_hosts.left_after(5) == []
