# A program as others write it, without types.
# mypy: ignore-errors
"""Every call of `torch.distributed` raises the versions of the tensors that it writes, and of no others."""

import pytest
import torch
import torch.distributed as dist

import aiodist.c10d  # noqa: F401  - registers the backend

dist.init_process_group("aiodist")
rank, size = dist.get_rank(), dist.get_world_size()
ones = torch.ones
blocks = [ones(3), ones(3)]
apart = [torch.ones(3, 2).t(), ones(2, 3)]
joined = list(ones(2, 3).unbind())
tied = [part.detach() for part in ones(2, 3).unbind()]
own = [torch.empty(0).set_(whole.untyped_storage(), 3 * i, (3,)) for whole in [ones(6)] for i in range(2)]
root = rank == 0
calls = {  # what is written, what is read, and the call
    "all_reduce": ([ones(3)], [], lambda w, r: dist.all_reduce(w[0])),
    "all_reduce of a large one": ([ones(100_000)], [], lambda w, r: dist.all_reduce(w[0])),
    "all_reduce transposed": ([ones(3, 2).t()], [], lambda w, r: dist.all_reduce(w[0])),
    "all_reduce of ints, mean": ([ones(3).long()], [], lambda w, r: dist.all_reduce(w[0], dist.ReduceOp.AVG)),
    "all_reduce in the background": ([ones(3)], [], lambda w, r: dist.all_reduce(w[0], async_op=True).wait()),
    "all_reduce coalesced": ([ones(3), ones(4)], [], lambda w, r: dist.all_reduce_coalesced(w)),
    "reduce": ([ones(3)] * root, [ones(3)] * (not root), lambda w, r: dist.reduce((w + r)[0], 0)),
    "broadcast": ([ones(3)] * (not root), [ones(3)] * root, lambda w, r: dist.broadcast((w + r)[0], 0)),
    "all_gather": (blocks, [ones(3)], lambda w, r: dist.all_gather(w, r[0])),
    "all_gather apart": (apart, [ones(2, 3)], lambda w, r: dist.all_gather(w, r[0])),
    "all_gather joined": (joined, [ones(3)], lambda w, r: dist.all_gather(w, r[0])),
    "all_gather tied": (tied, [ones(3)], lambda w, r: dist.all_gather(w, r[0])),
    "all_gather of one memory": (own, [ones(3)], lambda w, r: dist.all_gather(w, r[0])),
    "all_gather_into_tensor": ([ones(6)], [ones(3)], lambda w, r: dist.all_gather_into_tensor(w[0], r[0])),
    "gather": ([ones(3), ones(3)] * root, [ones(3)], lambda w, r: dist.gather(r[0], w or None)),
    "scatter": ([ones(3)], [ones(3), ones(3)] * root, lambda w, r: dist.scatter(w[0], r or None)),
    "reduce_scatter": ([ones(3)], [ones(3), ones(3)], lambda w, r: dist.reduce_scatter(w[0], r)),
    "reduce_scatter_tensor": ([ones(3)], [ones(6)], lambda w, r: dist.reduce_scatter_tensor(w[0], r[0])),
    "all_to_all": ([ones(3), ones(3)], [ones(3), ones(3)], lambda w, r: dist.all_to_all(w, r)),
    "all_to_all_single": ([ones(6)], [ones(6)], lambda w, r: dist.all_to_all_single(w[0], r[0])),
    "uneven": ([ones(6)], [ones(6)], lambda w, r: dist.all_to_all_single(w[0], r[0], [3, 3], [3, 3])),
    "recv": ([ones(3)], [ones(3)], lambda w, r: both(w[0], r[0])),
}


def both(into, sent):
    works = [dist.isend(sent, 1 - rank), dist.irecv(into, 1 - rank)]
    for work in works:
        work.wait()


for name, (written, read, call) in calls.items():
    before = [t._version for t in written], [t._version for t in read]
    call(written, read)
    for old, t in zip(before[0], written, strict=True):
        assert t._version > old, name
    assert [t._version for t in read] == before[1], name

x = torch.ones(3, requires_grad=True)
y = x.exp()
dist.all_reduce(y.detach())
with pytest.raises(RuntimeError, match="modified by an inplace operation"):
    y.sum().backward()
dist.broadcast(x, 0)  # as over gloo, a leaf may be written: programs that broadcast parameters run unchanged
assert x._version > 0 or root
dist.destroy_process_group()
print("versions")
