# A program as others write it, without types.
# mypy: ignore-errors
"""Trains a net under DDP over gloo and writes its losses and weights to argv[1]; its children find aiodist too."""

import multiprocessing
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def child(queue):
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1)
    queue.put(type(dist.group.WORLD).__name__)
    dist.destroy_process_group()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(7, 33), torch.nn.Tanh(), torch.nn.Linear(33, 3)))
    opt = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    torch.manual_seed(rank + 1)
    losses = []
    for _ in range(9):
        loss = net(torch.randn(5, 7)).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    torch.save([losses, [p.detach() for p in net.parameters()]], f"{sys.argv[1]}/{rank}.pt")
    name = type(dist.group.WORLD).__name__
    if rank == 0:
        context = multiprocessing.get_context("spawn")
        queue = context.SimpleQueue()
        process = context.Process(target=child, args=(queue,))
        process.start()
        process.join()
        name += f", and in a child {queue.get()}"
    Path(sys.argv[1], f"{rank}.txt").write_text(name)
    dist.destroy_process_group()
