# A program as others write it, without types.
# mypy: ignore-errors
"""Groups whose ranks are threads of one process, aborted at a bad time: argv[1] says when. All ends within 10 s."""

import faulthandler
import gc
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _DistributedBackendOptions

import aiodist.c10d  # noqa: F401

faulthandler.dump_traceback_later(40, exit=True)
when = sys.argv[1]
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
pool = ThreadPoolExecutor(4)


def make(name, rank, size=2):
    options = _DistributedBackendOptions()
    client = dist.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
    options.store = dist.PrefixStore(name, client)
    options.group_rank, options.group_size, options.timeout = rank, size, timedelta(seconds=30)
    options.group_id, options.global_ranks_in_group = "", []
    return dist.Backend._plugins["AIODIST"].creator_fn(options, None)


def ends(call):
    """Return how `call` ended, as text."""
    try:
        return repr(call())
    except Exception as error:  # noqa: BLE001  - it is printed
        return f"{type(error).__name__}: {error}"


def later(call):
    """Return the future of `call` in a thread, which has begun."""
    future = pool.submit(ends, call)
    time.sleep(0.1)
    return future


def fall_into_a_cycle(groups):
    for group in groups:
        cycle = [group]
        cycle.append(cycle)
    groups.clear()


for turn in range(3):
    began = time.monotonic()
    groups = list(pool.map(lambda rank, turn=turn: make(f"{turn}", rank), range(2)))
    first, second = groups
    home = first.home
    waiting = []
    if when == "a group is being made":
        making = [pool.submit(ends, lambda home=home, k=k: home.group(f"part{k}", [0, 1])) for k in range(20)]
        first.abort()
        print(when, "->", {future.result(10)[:40] for future in making}, flush=True)
    elif when == "a collective is in flight":
        waiting = [later(lambda first=first: first.allreduce([torch.ones(3)]).wait())]
        first.abort()
    elif when == "from many threads":
        for future in [pool.submit(ends, first.abort) for _ in range(4)]:
            assert future.result(10) == "None", future.result()
    elif when == "on the loop's own thread":
        home.loop.call_soon_threadsafe(first.abort)
    elif when == "the group is being closed":
        waiting = [later(first.shutdown)]
        first.abort()
    elif when == "after it was closed":
        list(pool.map(lambda group: group.shutdown(), groups))
        first.abort()
    elif when == "as the collector finds it":  # on a loop's thread, in the second turn its own
        gc.disable()
        loops = [group.home.loop for group in groups]
        fall_into_a_cycle(groups)
        del first, second, home
        collected = threading.Event()
        if turn:
            loops[turn - 1].call_soon_threadsafe(lambda event=collected: (gc.collect(), event.set()))
        else:
            gc.collect()
            collected.set()
        assert collected.wait(10)
        gc.enable()
    for future in waiting:
        print(when, "->", future.result(10)[:150], flush=True)
        assert future.result() != "None"
    if groups and when != "after it was closed":
        for group in groups:
            group.abort()
    until = time.monotonic() + 10
    while left := [t.name for t in threading.enumerate() if t.name in {"aiodist-abort", "aiodist-loop"}]:
        assert time.monotonic() < until, left
        time.sleep(0.02)
    assert time.monotonic() - began < 10
print("all ended", flush=True)
