# A program as others write it, without types.
# mypy: ignore-errors
"""A program that asks for the backend argv[1] in each way, and knows nothing of aiodist; prints what came of it."""

import json
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

ASKED = sys.argv[1]


def sums(group=None):
    """Return all ranks' random numbers, summed over the group in float32, and their sum in float64."""
    mine = [torch.randn(1237, generator=torch.Generator().manual_seed(rank)) for rank in range(dist.get_world_size())]
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    t = mine[dist.get_rank()].clone()
    dist.all_reduce(t, group=group)
    expected = torch.stack([mine[rank].double() for rank in ranks]).sum(0)
    assert torch.allclose(t.double(), expected, atol=1e-5), (t, expected)


def seen(group, backend):
    return [type(group).__name__, dist.get_backend(group), backend]


found = {}
for asked in (ASKED, None, f"cpu:{ASKED},cuda:nccl"):
    dist.init_process_group(asked)
    rank, size = dist.get_rank(), dist.get_world_size()
    found[f"init {asked}"] = seen(dist.group.WORLD, dist.get_backend_config())
    sums()
    pair = dist.new_group(sorted({0, size - 1}))  # the backend of the default group
    named = dist.new_group(list(range(size)), backend=ASKED)
    if rank in (0, size - 1):
        found[f"group {asked}"] = seen(pair, dist.get_backend_config(pair))
        sums(pair)
    found[f"named group {asked}"] = seen(named, dist.get_backend_config(named))
    sums(named)
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("one", "all"))
    found[f"mesh {asked}"] = seen(mesh.get_group("all"), "")
    sums(mesh.get_group("all"))
    dist.barrier()
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": other} for other in range(size)]
    dist.destroy_process_group()

dist.init_process_group("fake", rank=rank, world_size=size)  # another backend is torch's
found["fake"] = type(dist.group.WORLD).__name__
dist.destroy_process_group()
found["available"] = [dist.is_backend_available(ASKED), dist.get_default_backend_for_device("cpu")]
print(json.dumps(found))

dist.init_process_group(ASKED)
dist.all_reduce(torch.ones(2 + rank))  # no two ranks agree
