# A program as others write it, without types.
# mypy: ignore-errors
"""Buffers that overlap, and MPI.IN_PLACE: a call has the results of copies, or raises and changes nothing."""

from itertools import cycle

import numpy as np
from hypothesis import strategies as st

from aiodist.compat import mpi as MPI
from tests.support.calls import drawn

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
root = rank == 0


def blocks(buffer):
    return [buffer, [buffer.size // size] * size]


# How many blocks are sent and received (0: one for each rank), and the call; of ROOTED those of the root.
CALLS = {
    "Allreduce": (1, 1, lambda t, out: comm.Iallreduce(t, out)),
    "Scan": (1, 1, lambda t, out: comm.Iscan(t, out)),
    "Allgather": (1, 0, lambda t, out: comm.Iallgather(t, out)),
    "Allgatherv": (1, 0, lambda t, out: comm.Iallgatherv(t, blocks(out))),
    "Alltoall": (0, 0, lambda t, out: comm.Ialltoall(t, out)),
    "Alltoallv": (0, 0, lambda t, out: comm.Ialltoallv(blocks(t), blocks(out))),
    "Reduce_scatter_block": (0, 1, lambda t, out: comm.Ireduce_scatter_block(t, out)),
    "Sendrecv": (1, 1, lambda t, out: comm.Isendrecv(t, (rank + 1) % size, 0, out, (rank - 1) % size, 0)),
}
ROOTED = {
    "Reduce": (1, 1, lambda t, out: comm.Ireduce(t, out if root else None)),
    "Gather": (1, 0, lambda t, out: comm.Igather(t, out if root else None)),
    "Gatherv": (1, 0, lambda t, out: comm.Igatherv(t, blocks(out) if root else None)),
    "Scatter": (0, 1, lambda t, out: comm.Iscatter(t if root else None, out)),
    "Scatterv": (0, 1, lambda t, out: comm.Iscatterv(blocks(t) if root else None, out)),
}
IN_PLACE = {
    "Allreduce": lambda t, out: comm.Allreduce(t, out),
    "Scan": lambda t, out: comm.Scan(t, out),
    "Allgather": lambda t, out: comm.Allgather(t if t is MPI.IN_PLACE else np.split(t, size)[rank], out),
    "Alltoall": lambda t, out: comm.Alltoall(t, out),
}

examples = st.tuples(
    st.sampled_from([2, 6, 1000, 20_000]),
    st.tuples(st.integers(0, 8), st.integers(0, 8)),
    st.booleans(),
    st.sampled_from([np.float32, np.uint32]),
)


def begun(name, t, out, number):
    """Return the request; None if the call was refused, on all ranks or on rank 0, which notifies the others."""
    _, _, call = (CALLS | ROOTED)[name]
    if name in ROOTED and not root and not comm.recv(source=0, tag=number):
        return None
    request = None
    try:
        request = call(t, out)
    except (MPI.Exception, ValueError):
        assert root or name in CALLS
    if name in ROOTED and root:
        for other in range(1, size):
            comm.send(request is not None, other, tag=number)
    return request


def tried(number, name, numel, halves, own, dtype):
    """Return True if the call was taken."""
    sent, came = ((count or size) * numel for count in (CALLS | ROOTED)[name][:2])
    t_at, out_at = (half * numel // 2 for half in halves)
    if own and sent > came:
        out_at = t_at + rank * numel
    elif own:
        t_at = out_at + (rank * numel if came > sent else 0)
    base = (np.arange(max(t_at + sent, out_at + came) + 3) % 97).astype(dtype) * dtype(rank + 1)
    t, out = base[t_at : t_at + sent], base[out_at : out_at + came]
    expected, before = out.copy(), base.copy()
    begun(name, t.copy(), expected, 2 * number).Wait()
    request = begun(name, t, out, 2 * number + 1)
    if request is None:
        assert np.array_equal(base, before), (name, "changed")
        return False
    request.Wait()
    if root or name not in ("Reduce", "Gather", "Gatherv"):
        assert np.array_equal(out, expected), (name, numel, halves, own, dtype)
    return True


dealt = enumerate(zip(cycle(CALLS | ROOTED), drawn(examples, 208), strict=False))
taken = {name for number, (name, example) in dealt if tried(number, name, *example)}
assert taken == {*CALLS, *ROOTED}, taken
for name, call in IN_PLACE.items():
    t, out = np.arange(6.0 * size) * (rank + 1), np.zeros(6 * size)
    call(t, out)
    call(MPI.IN_PLACE, t)
    assert np.array_equal(t, out), name
print("overlaps")
