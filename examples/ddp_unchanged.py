"""torch's DDP over aiodist: two lines differ from a program over gloo.

aiodist run -n 2 examples/ddp_unchanged.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import aiodist.c10d  # registers the backend


def main() -> None:
    dist.init_process_group("aiodist")
    torch.manual_seed(0)
    net = DistributedDataParallel(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1)))
    aiodist.c10d.ddp_hook(net)  # optional: reduces gradients in shared memory, without a copy
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    torch.manual_seed(dist.get_rank())
    for step in range(101):
        x = torch.randn(32, 8)
        loss = (net(x)[:, 0] - x.sum(1)).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 25 == 0:
            dist.all_reduce(total := loss.detach().clone())
            if dist.get_rank() == 0:
                print(f"step {step}: loss {total.item() / dist.get_world_size():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
