# A program as others write it, without types.
# mypy: ignore-errors
"""Groups of two ranks, threads of one process, made and aborted argv[2] times in the manner argv[1]."""

import atexit
import gc
import os
import sys

import torch
from in_threads import left, made, pool

way, times = sys.argv[1], int(sys.argv[2])
atexit.register(lambda: print("at-exit ran", flush=True))


def groups(name):
    both = made(name)
    works = [group.allreduce([torch.ones(3)]) for group in both]
    for work in works:
        work.get_future()
        work.wait()
    return both


def give_up(both):
    if way == "aborted":
        for group in both:
            group.abort()
    elif way == "shut down":
        list(pool.map(lambda group: group.shutdown(), both))
    both.clear()  # "dropped": that is all
    gc.collect()


def after_a_round(name):
    """Make and abort argv[2] groups. Return the numbers of open descriptors and of shared maps."""
    for k in range(times):
        give_up(groups(f"{name}/{k}"))
    assert not left(20)
    with open("/proc/self/maps", encoding="utf-8") as maps:
        shared = sum("aiodist" in line or "memfd" in line or "/dev/shm" in line for line in maps)
    return len(os.listdir("/proc/self/fd")), shared


gc.collect()
gc.freeze()  # what torch has made: each collection would look through it
before = after_a_round("first")  # with caches for the next group
after = after_a_round("second")
print(f"before {before} after {after}", flush=True)
if all(now - then < times / 2 for now, then in zip(after, before, strict=True)):
    print("all flat", flush=True)
last = groups("last")  # neither aborted nor shut down when the program ends
sys.exit(0)
