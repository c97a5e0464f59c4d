# A program as others write it, without types.
# mypy: ignore-errors
"""Tensors that overlap in calls of `torch.distributed`: the results equal those of copies, or the call raises."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st

import aiodist.c10d  # noqa: F401  - registers the backend
from tests.support.calls import drawn
from tests.support.overlapping import Layout, drawn_layout, places_of

dist.init_process_group("aiodist")
rank, size = dist.get_rank(), dist.get_world_size()
store = dist.distributed_c10d._get_default_store()
root = rank == 0


def coalesced(ts):
    return dist.all_reduce_coalesced(ts, async_op=True)


def uneven(out, t):
    return dist.all_to_all_single(out, t, [out.numel() // size] * size, [t.numel() // size] * size, async_op=True)


EACH = ("each",)
# How many blocks each input and each output has ("p": one for each rank; EACH: one tensor per element), and the call.
CALLS = {
    "all_reduce_coalesced": ((1, 1), (), lambda i, o: coalesced(i)),
    "all_gather": ((1,), EACH, lambda i, o: dist.all_gather(o, i[0], async_op=True)),
    "all_gather_into_tensor": ((1,), ("p",), lambda i, o: dist.all_gather_into_tensor(o[0], i[0], async_op=True)),
    "reduce_scatter": (EACH, (1,), lambda i, o: dist.reduce_scatter(o[0], i, async_op=True)),
    "reduce_scatter_tensor": (("p",), (1,), lambda i, o: dist.reduce_scatter_tensor(o[0], i[0], async_op=True)),
    "all_to_all": (EACH, EACH, lambda i, o: dist.all_to_all(o, i, async_op=True)),
    "all_to_all_single": (("p",), ("p",), lambda i, o: dist.all_to_all_single(o[0], i[0], async_op=True)),
    "all_to_all_single uneven": (("p",), ("p",), lambda i, o: uneven(o[0], i[0])),
}
ROOTED = {
    "gather": ((1,), EACH, lambda i, o: dist.gather(i[0], o if root else None, async_op=True)),
    "scatter": (EACH, (1,), lambda i, o: dist.scatter(o[0], i if root else None, async_op=True)),
}
"""Calls that may refuse the tensors of rank 0 only, which then notifies the other ranks."""


def blocks(spec):
    return [1] * size if spec == EACH else [size if each == "p" else each for each in spec]


def issued(call, ins, outs, rooted, number):
    """Return the work; None if the call was refused, on all ranks or on rank 0."""
    if rooted and not root and store.get(f"taken {number}") == b"no":
        return None
    work = None
    try:
        work = call(ins, outs)
    except ValueError:
        assert not rooted or root
    finally:
        if rooted and root:
            store.set(f"taken {number}", "no" if work is None else "yes")
    return work


def tried(number, layout):
    """Return True if the call was taken."""
    rooted = layout.call in ROOTED
    ins, outs, call = (ROOTED if rooted else CALLS)[layout.call]
    count, lengths = len(blocks(ins)), blocks(ins) + blocks(outs)
    places = places_of(layout, lengths, rank, one_input=(count, len(lengths)) == (1, 2))
    base = torch.arange(max(map(sum, places)) + 3).remainder(97).float() * (rank + 1)
    views = [base[start : start + length] for start, length in places]
    copies = [view.clone() for view in views]
    before = base.clone()
    for each in (copies, views):
        work = issued(call, each[:count], each[count:], rooted, 2 * number + (each is views))
        if work is None:
            assert each is views
            assert torch.equal(base, before), layout
            return False
        work.wait()
    for got, expected in zip(views[count:] if outs else views, copies[count:] if outs else copies, strict=True):
        assert torch.equal(got, expected) or (layout.call == "gather" and not root), (layout, got, expected)
    return True


taken = {}
layouts = st.builds(Layout, *drawn_layout(CALLS | ROOTED))
for number, layout in enumerate(drawn(layouts, 250)):
    if tried(number, layout):
        taken[layout.call] = taken.get(layout.call, 0) + 1
assert len(taken) > 7, taken  # not all are refused

t, outs = torch.ones(8), torch.ones(4, 4)
with pytest.raises(ValueError, match="output 1 overlaps output 0: expected tensors with memory of their own"):
    dist.all_gather([t[:4], t[2:6]], torch.ones(4))
with pytest.raises(ValueError, match="output 0 overlaps input 1: expected tensors with memory of their own"):
    dist.group.WORLD.allgather_into_tensor_coalesced([t[:4], outs[0]], [outs[1][:2], t[:2]])
dist.barrier()
dist.destroy_process_group()
print("overlaps", taken)
