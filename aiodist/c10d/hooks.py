"""A hook that averages DDP's gradients in one pass."""

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from aiodist.c10d.calls import AiodistProcessGroup

_MEAN = dist.AllreduceOptions()
_MEAN.reduceOp = dist.ReduceOp.AVG


def ddp_hook(net: DistributedDataParallel) -> None:
    """Let `net` average its gradients in one pass over its buckets, in memory that the ranks of a host share.

    Call this function once, before the first backward pass. It divides the sums, while DDP divides the summands. So
    results may differ in the last bit, unless the number of ranks is a power of two. Raises TypeError if the process
    group of `net` is of another backend.
    """
    group = net.process_group
    if not isinstance(group, AiodistProcessGroup):
        raise TypeError(f"net reduces over {type(group).__name__}: expected a process group of the backend aiodist")
    net.register_comm_hook(group, _reduce)


# torch reads the annotations, which a __future__ import would make strings.
def _reduce(group: AiodistProcessGroup, bucket: dist.GradBucket) -> Future[Tensor]:
    buffer = bucket.buffer()
    group.adopt(buffer)
    return group.allreduce([buffer], _MEAN).get_future().then(lambda done: done.value()[0])
