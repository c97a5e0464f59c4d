# A program as others write it, without types.
# mypy: ignore-errors
"""Groups whose ranks are threads of one process."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import _DistributedBackendOptions

import aiodist.c10d  # noqa: F401

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
pool = ThreadPoolExecutor(8)


def make(name, rank, size):
    """Return the group of one rank; each rank makes it in a thread of its own."""
    options = _DistributedBackendOptions()
    client = dist.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
    options.store = dist.PrefixStore(name, client)
    options.group_rank, options.group_size, options.timeout = rank, size, timedelta(seconds=30)
    options.group_id, options.global_ranks_in_group = "", []
    return dist.Backend._plugins["AIODIST"].creator_fn(options, None)


def made(name, size=2):
    """Return the groups of all ranks."""
    return list(pool.map(make, [name] * size, range(size), [size] * size))


def threads():
    """Return the threads of aiodist, without the one that serves the whole process."""
    ours = [thread for thread in threading.enumerate() if thread.name.startswith("aiodist")]
    return [thread for thread in ours if thread.name != "aiodist-progress"]


def left(seconds=10):
    """Return the names of the threads that do not end in time."""
    while ending := threads():
        ending[0].join(seconds)
        if ending[0].is_alive():
            break
    return sorted(thread.name for thread in ending)
