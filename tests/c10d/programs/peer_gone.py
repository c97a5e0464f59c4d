# A program as others write it, without types.
# mypy: ignore-errors
"""Three ranks, threads of one process: prints what the others are told of one that aborts, and of one that closes."""

import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _DistributedBackendOptions

import aiodist.c10d  # noqa: F401

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
pool = ThreadPoolExecutor(4)


def make(name, rank, size=3):
    options = _DistributedBackendOptions()
    client = dist.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
    options.store = dist.PrefixStore(name, client)
    options.group_rank, options.group_size, options.timeout = rank, size, timedelta(seconds=20)
    options.group_id, options.global_ranks_in_group = "", []
    return dist.Backend._plugins["AIODIST"].creator_fn(options, None)


groups = [future.result() for future in [pool.submit(make, "group", rank) for rank in range(3)]]
works = [group.allreduce([torch.ones(3)]) for group in groups[:2]]
leaving = pool.submit(getattr(groups[2], sys.argv[1]))
for work in works:
    try:
        work.wait()
    except dist.DistBackendError as error:
        print("told:", error, flush=True)
for group in groups[:2]:
    group.abort()
leaving.exception()
