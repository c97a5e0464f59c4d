"""DDP's buckets in the arena: the last factor between DDP over aiodist and shared memory."""

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from aiodist.c10d.calls import AiodistProcessGroup


def ddp_hook(net: DistributedDataParallel) -> None:
    """Have `net` reduce its gradients in memory that the ranks of a host share: no copy, the mean in one pass.

    To be called once, before the first backward pass. The sums are divided after they were added up, where DDP's own
    way divides first: results may differ in the last bit unless the number of ranks is a power of two. Raises
    TypeError where the process group of `net` is of another backend.
    """
    group = net.process_group
    if not isinstance(group, AiodistProcessGroup):
        raise TypeError(f"net reduces over {type(group).__name__}: expected a process group of the backend aiodist")
    net.register_comm_hook(_Arena(group), _reduce)


class _Arena:
    """Which buckets lie in the arena: DDP makes them anew after the first step."""

    def __init__(self, group: AiodistProcessGroup) -> None:
        self.group = group
        self.mean = dist.AllreduceOptions()
        self.mean.reduceOp = dist.ReduceOp.AVG
        self._moved: set[int] = set()

    def take(self, buffer: Tensor) -> None:
        """Have `buffer` lie there."""
        if buffer.data_ptr() not in self._moved:
            self._moved.add(self.group.coll.share_(buffer).data_ptr())


# torch looks at the annotations themselves, which a __future__ import would make strings.
def _reduce(arena: _Arena, bucket: dist.GradBucket) -> Future[Tensor]:
    buffer = bucket.buffer()
    arena.take(buffer)
    return arena.group.allreduce([buffer], arena.mean).get_future().then(lambda over: over.value()[0])
