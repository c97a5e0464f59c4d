"""Two ranks. The callback of rank 0's future still runs when the program ends. argv[1] is "destroy", "leave" or "drop".

With "drop" a worker thread holds the last reference to the work, and deletes the objects of that work at the exit.
"""

import atexit
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch.futures import Future

import aiodist.c10d  # noqa: F401

exiting = threading.Event()
atexit.register(exiting.set)


class Slow:
    """Object whose deletion asks for the GIL many times, also while the interpreter is finalized."""

    def __del__(self) -> None:
        for _ in range(300):
            time.sleep(1e-3)


def callback(_: object) -> None:
    assert threading.current_thread() is not threading.main_thread()
    exiting.wait(20)
    if sys.argv[1] != "drop":
        time.sleep(0.3)  # the interpreter is finalized meanwhile


dist.init_process_group("aiodist")
store = dist.distributed_c10d._get_default_store()
if dist.get_rank() == 1:
    store.wait(["added"])  # the future of rank 0 is not finished when its callback is added
work = dist.all_reduce(torch.ones(4), async_op=True)
if dist.get_rank() == 0:
    future = work.get_future()
    future.then(callback)
    store.set("added", "")
work.wait()
if sys.argv[1] == "drop" and dist.get_rank() == 0:
    work.kept = Future()
    work.kept.set_result(Slow())
    del work, future
if sys.argv[1] != "leave":
    dist.destroy_process_group()
