# A program as others write it, without types.
# mypy: ignore-errors
"""Three ranks, threads of one process: print the other ranks' errors after an abort and after a close."""

import sys

import torch
import torch.distributed as dist
from in_threads import made, pool

groups = made("group", 3)
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
