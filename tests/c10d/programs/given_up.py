# A program as others write it, without types.
# mypy: ignore-errors
"""Groups whose two ranks are threads of one process, made and given up argv[2] times, in way argv[1]."""

import atexit
import gc
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _DistributedBackendOptions

import aiodist.c10d  # noqa: F401

way, times = sys.argv[1], int(sys.argv[2])
atexit.register(lambda: print("at-exit ran", flush=True))
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
pool = ThreadPoolExecutor(3)


def make(name, rank, size=2):
    options = _DistributedBackendOptions()
    client = dist.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
    options.store = dist.PrefixStore(name, client)
    options.group_rank, options.group_size, options.timeout = rank, size, timedelta(seconds=20)
    options.group_id, options.global_ranks_in_group = "", []
    return dist.Backend._plugins["AIODIST"].creator_fn(options, None)


def groups(name, size=2):
    made = list(pool.map(lambda rank: make(name, rank, size), range(size)))
    works = [group.allreduce([torch.ones(3)]) for group in made]
    for work in works:
        work.get_future()
        work.wait()
    return made


def give_up(made):
    if way == "aborted":
        for group in made:
            group.abort()
    elif way == "shut down":
        list(pool.map(lambda group: group.shutdown(), made))
    made.clear()  # "dropped": that is all
    gc.collect()


def held():
    """Return the numbers of our threads, of descriptors and of shared maps."""
    ours = [thread for thread in threading.enumerate() if thread.name.startswith("aiodist")]
    with open("/proc/self/maps", encoding="utf-8") as maps:
        shared = sum("aiodist" in line or "memfd" in line or "/dev/shm" in line for line in maps)
    return len(ours), len(os.listdir("/proc/self/fd")), shared


def settled():
    """Return what is held, once the loops of all groups have ended or 20 s have passed."""
    until = time.monotonic() + 20
    while held()[0] > 1 and time.monotonic() < until:
        time.sleep(0.05)
    return held()


def after_a_round(name):
    """Make and give up argv[2] groups; return what is held then."""
    for k in range(times):
        give_up(groups(f"{name}/{k}"))
    return settled()


before = after_a_round("first")  # with what is kept for the next group, such as caches
after = after_a_round("second")
left = sorted({thread.name for thread in threading.enumerate() if thread.name.startswith("aiodist")})
print(f"before {before} after {after} threads {left}", flush=True)
if after[0] <= 1 and all(now - then < times / 2 for now, then in zip(after, before, strict=True)):
    print("all flat", flush=True)
last = groups("last")  # neither aborted nor shut down when the program ends
sys.exit(0)
