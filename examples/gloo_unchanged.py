"""A program of torch.distributed that knows nothing of aiodist: the launcher gives it aiodist in place of gloo.

aiodist run -n 2 --as gloo examples/gloo_unchanged.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = DistributedDataParallel(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1)))
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    torch.manual_seed(dist.get_rank())
    for step in range(101):
        x = torch.randn(32, 8)
        loss = (net(x)[:, 0] - x.sum(1)).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 25 == 0:
            losses: list[float] = [0.0] * dist.get_world_size()
            dist.all_gather_object(losses, loss.item())
            if dist.get_rank() == 0:
                print(f"step {step}: losses {', '.join(f'{one:.5f}' for one in losses)}")
    if dist.get_rank() == 0:
        print(f"over {dist.get_backend()}, a {type(dist.group.WORLD).__name__}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
