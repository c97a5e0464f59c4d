"""One rank whose future's callback still runs when its program ends; argv[1] is "destroy" or "leave"."""

import atexit
import sys
import threading
import time

import torch
import torch.distributed as dist

import aiodist.c10d  # noqa: F401

exiting = threading.Event()
atexit.register(exiting.set)


def callback(_: object) -> None:
    exiting.wait(20)
    time.sleep(0.3)  # the interpreter is finalized meanwhile


dist.init_process_group("aiodist")
if dist.get_rank() == 1:
    time.sleep(0.2)  # the future of rank 0 is not finished when its callback is added
work = dist.all_reduce(torch.ones(4), async_op=True)
chained = work.get_future().then(callback)
work.wait()
if sys.argv[1] == "destroy":
    dist.destroy_process_group()
