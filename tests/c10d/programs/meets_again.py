# A program as others write it, without types.
# mypy: ignore-errors
"""Makes and destroys the default group three times over one store, which keeps the keys of the earlier groups."""

import os

import torch
import torch.distributed as dist

import aiodist.c10d  # noqa: F401

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, rank == 0)
for turn in range(3):
    dist.init_process_group("aiodist", store=store, rank=rank, world_size=size)
    dist.all_reduce(t := torch.full((turn + 1,), rank + 1.0))
    assert t.tolist() == [size * (size + 1) / 2] * (turn + 1)
    dist.destroy_process_group()
store.add("done", 1)
while rank == 0 and int(store.add("done", 0)) < size:  # it has the store
    pass
print("met three times")
