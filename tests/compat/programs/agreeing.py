"""Agreement of the ranks in calls of `aiodist.compat.mpi`, and null objects: one function each."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiodist.compat.mpi as MPI

KINDS = (("f", "i"), ("H", "h"), ("d", ">f8"), ("g", "F"), ("S4", "i"))


def refused(call: Callable[[], Any], *classes: int) -> None:
    with pytest.raises(MPI.Exception) as raised:
        call()
    assert raised.value.Get_error_class() in classes, raised.value


def buffers(comm: Any, kind: str, n: int) -> tuple[Callable[..., Any], Any]:
    """Return a maker of buffers of blocks of `n` elements, and on the root a buffer with a block for each rank."""

    def new(blocks: int = 1) -> Any:
        return np.zeros(n * blocks, kind)

    return new, new(comm.size) if comm.rank == 0 else None


def calls(comm: Any, kind: str, n: int) -> dict[str, Callable[[], Any]]:
    """Return the calls that move `n` elements to or from each rank, by name."""
    size, at_root = comm.size, comm.rank == 0
    new, whole = buffers(comm, kind, n)
    return {
        "Bcast": lambda: comm.Bcast(new()),
        "Gather": lambda: comm.Gather(new(), whole),
        "Scatter": lambda: comm.Scatter(whole, new()),
        "Allgather": lambda: comm.Allgather(new(), new(size)),
        "Alltoall": lambda: comm.Alltoall(new(size), new(size)),
        "Ibcast": lambda: comm.Ibcast(new()).Wait(),
        "Igather": lambda: comm.Igather(new(), whole).Wait(),
        "Iallgather": lambda: comm.Iallgather(new(), new(size)).Wait(),
        "Gather in place": lambda: comm.Gather(MPI.IN_PLACE if at_root else new(), whole),
        "Scatter in place": lambda: comm.Scatter(whole, MPI.IN_PLACE if at_root else new()),
        "Allgather in place": lambda: comm.Allgather(MPI.IN_PLACE, new(size)),
        "Alltoall in place": lambda: comm.Alltoall(MPI.IN_PLACE, new(size)),
    }


def vectors(comm: Any, kind: str, n: int) -> dict[str, Callable[[], Any]]:
    """Return the calls whose blocks may differ in length, with equal ones."""
    size = comm.size
    new, whole = buffers(comm, kind, n)
    return {
        "Gatherv": lambda: comm.Gatherv(new(), whole),
        "Scatterv": lambda: comm.Scatterv(whole, new()),
        "Allgatherv": lambda: comm.Allgatherv(new(), new(size)),
        "Alltoallv": lambda: comm.Alltoallv(new(size), new(size)),
    }


def reductions(comm: Any, kind: str, n: int, op: Any = MPI.SUM) -> dict[str, Callable[[], Any]]:
    size, (new, _) = comm.size, buffers(comm, kind, n)
    return {
        "Reduce": lambda: comm.Reduce(new(), new() if comm.rank == 0 else None, op),
        "Allreduce": lambda: comm.Allreduce(new(), new(), op),
        "Iallreduce": lambda: comm.Iallreduce(MPI.IN_PLACE, new(), op).Wait(),
        "Scan": lambda: comm.Scan(new(), new(), op),
        "Exscan": lambda: comm.Exscan(new(), new(), op),
        "Reduce_scatter_block": lambda: comm.Reduce_scatter_block(new(size), new(), op),
    }


def differ(make: Callable[..., dict[str, Callable[[], Any]]], name: str, ours: tuple[Any, ...], theirs: Any) -> None:
    """Make a call that the last rank makes otherwise, on a communicator of its own: an error of ERR_ARG on each."""
    comm = MPI.COMM_WORLD.Dup()
    call = make(comm, *(theirs if comm.rank == comm.size - 1 else ours))[name]
    with pytest.raises(MPI.Exception, match=r"ranks disagree") as raised:
        call()
    assert raised.value == MPI.ERR_ARG, (name, ours, theirs, raised.value)
    comm.Free()


def disagreements() -> None:
    """Ranks that bring other datatypes, counts or operators: an error on each, before anything moves."""
    comm = MPI.COMM_SELF
    every = [(make, name) for make in (calls, vectors, reductions) for name in make(comm, "f", 1)]
    for i, (make, name) in enumerate(every):
        others = [kinds for kinds in KINDS[1:] if make is not reductions or "S4" not in kinds]
        for kinds in (KINDS[0], others[i % len(others)]):
            differ(make, name, (kinds[0], 4), (kinds[1], 4))
        if make is not vectors:
            differ(make, name, ("f", 2), ("f", 1))
            differ(make, name, ("H", 2), ("H", 3 if i % 2 else 0))
        if make is reductions:
            differ(make, name, ("d", 2, MPI.MAX), ("d", 2, MPI.MIN))
            differ(make, name, ("i", 2, MPI.LAND), ("i", 2, MPI.LXOR))
    assert MPI.COMM_WORLD.allreduce(1) == MPI.COMM_WORLD.size


def lengths() -> None:
    """A rank whose two buffers do not go together: an error on each, before anything moves."""
    comm = MPI.COMM_WORLD
    three, room = np.zeros(3), np.zeros(2 * comm.size)
    short, long = np.zeros(1), np.zeros(3 * comm.size)
    refused(lambda: comm.Allgather(three, room), MPI.ERR_TRUNCATE)
    refused(lambda: comm.Allgather(short, room), MPI.ERR_COUNT)
    wrong: tuple[Callable[[], Any], ...] = (
        lambda: comm.Alltoall(long, room),
        lambda: comm.Alltoall(room, long),
        lambda: comm.Allreduce(three, np.zeros(4)),
        lambda: comm.Allreduce(three.astype("H"), np.zeros(2, "H")),
        lambda: comm.Scan(three, short),
        lambda: comm.Reduce_scatter(room, np.zeros(2), [1] * comm.size),
        lambda: comm.Reduce_scatter(room.astype("H"), np.zeros(1, "H"), [2] * comm.size),
    )
    for call in wrong:
        with pytest.raises(ValueError, match="expected"):
            call()
    refused(lambda: comm.Reduce_scatter(room, np.zeros(2), [-1] * comm.size), MPI.ERR_COUNT)
    for op, kind in ((MPI.BAND, "d"), (MPI.MAX, "F"), (MPI.LAND, "f"), (MPI.SUM, "?"), (MPI.MAXLOC, "d")):
        for call in reductions(comm, kind, 2, op).values():
            refused(call, MPI.ERR_OP)
    assert comm.allreduce(1) == comm.size


def messages() -> None:
    """A message of another datatype is an error of ERR_TYPE where it is received; a refused exchange takes none."""
    comm = MPI.COMM_WORLD
    to, by = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for sent, wanted in (("f", "i"), ("i", "f"), ("d", "q"), ("f", "B"), ("?", "b")):
        request = comm.Isend(np.ones(2, sent), to, 1)
        refused(partial(comm.Recv, np.zeros(2, wanted), by, 1), MPI.ERR_TYPE)
        request.Wait()
    for kind in "bhilqBHILQefdFD?gS":
        into = np.zeros(2, kind)
        comm.Sendrecv(np.ones(2, kind), to, 1, into, by, 1)
        assert into.tolist() == np.ones(2, kind).tolist(), kind
        both = np.ones(2, kind)
        comm.Sendrecv_replace(both, to, 1, by, 1)
        comm.Isendrecv_replace(both, to, 1, by, 1).Wait()
        assert both.tolist() == into.tolist(), kind
    into = np.zeros(2)
    for wrong in (np.ones((2, 2))[:, 1], 3):
        with pytest.raises(TypeError):
            comm.Sendrecv(wrong, to, 1, into, by, 1)
    refused(lambda: comm.Sendrecv(np.ones(2), 99, 1, into, by, 1), MPI.ERR_RANK)
    refused(lambda: comm.sendrecv(1, to, -3, None, by, 1), MPI.ERR_TAG)
    comm.Send(np.ones(2), to, 1)
    comm.Recv(into, by, 1)  # no receive of a refused call has taken it
    assert into.tolist() == [1, 1]


def orders() -> None:
    """Arrays and tensors in any order of dimensions that leaves no gap: elements travel in memory order."""
    import torch

    comm = MPI.COMM_WORLD
    ranks = sum(range(1, comm.size + 1))
    whole = np.arange(24.0).reshape(2, 3, 4)
    for dims in ((0, 1, 2), (2, 1, 0), (1, 0, 2), (2, 0, 1)):
        mine = np.ascontiguousarray(whole.transpose(dims)).transpose(np.argsort(dims)) * (comm.rank + 1)
        assert mine.shape == whole.shape
        into = np.empty_like(mine)
        comm.Allreduce(mine, into)
        assert np.array_equal(into, whole * ranks), dims
        comm.Bcast(mine, 0)
        assert np.array_equal(mine, whole), dims
        t = torch.arange(24.0).view(2, 3, 4).permute(dims).contiguous().permute(*np.argsort(dims).tolist())
        comm.Allreduce(MPI.IN_PLACE, t)
        assert np.array_equal(t.numpy(), whole * comm.size), dims
        gathered = np.empty((comm.size, 2, 3, 4))
        comm.Allgather(np.asfortranarray(whole), gathered)
        assert np.array_equal(gathered[0].ravel(), whole.ravel(order="F"))
    view: Any = memoryview(np.asfortranarray(whole))  # type: ignore[arg-type]
    total = np.empty_like(whole, order="F")
    comm.Allreduce(view, total)
    assert np.array_equal(total, whole * comm.size)
    for gaps in (whole[:, ::2], whole[..., 1], np.broadcast_to(whole[:1], whole.shape), whole[::-1]):
        with pytest.raises(TypeError, match="contiguous"):
            comm.Bcast(gaps)


def nulls() -> None:
    """Null objects are false, and equal to themselves; a call of one is an error of the class that mpi4py has."""
    comm, one = MPI.COMM_WORLD, np.ones(2)
    none = MPI.COMM_NULL
    assert comm.Split(MPI.UNDEFINED) == comm.Split_type(MPI.UNDEFINED) == none
    assert comm != none
    assert (none.name, none.Get_name(), bool(none), bool(comm)) == ("MPI_COMM_NULL", "MPI_COMM_NULL", False, True)
    for name in ("Get_rank", "Get_size", "Barrier", "Dup", "Clone", "Free", "barrier", "Ibarrier"):
        refused(getattr(none, name), MPI.ERR_COMM)
    for call in (
        *(lambda name=name: getattr(none, name) for name in ("rank", "size", "coll")),
        lambda: none.bcast(1),
        lambda: none.Split(0),
        lambda: none.send(1, 0),
        lambda: none.Isend(one, 0),
        lambda: none.Recv(one),
        lambda: none.Allreduce(one, one),
    ):
        refused(call, MPI.ERR_COMM)
    freed = comm.Dup()
    assert freed != none
    freed.Free()
    assert freed == none
    assert not freed
    refused(freed.Barrier, MPI.ERR_COMM)


def nulls_of_calls() -> None:
    """The same of operators, datatypes and requests."""
    comm, one = MPI.COMM_WORLD, np.ones(2)
    for op in (MPI.OP_NULL, MPI.MAXLOC):
        for call in reductions(comm, "d", 2, op).values():
            refused(call, MPI.ERR_OP)
    for call in (lambda: comm.allreduce(1, MPI.OP_NULL), lambda: comm.scan(1, MPI.OP_NULL), MPI.OP_NULL.Free):
        refused(call, MPI.ERR_OP)
    refused(lambda: MPI.OP_NULL(1, 2), MPI.ERR_OP)
    refused(MPI.SUM.Free, MPI.ERR_OP)
    assert not MPI.OP_NULL
    with pytest.raises(TypeError, match="op is NoneType"):
        comm.Allreduce(one, one + 1, None)

    kind = MPI.DATATYPE_NULL
    assert not kind
    for spec in ([one, kind], [one, 2, kind]):
        for call in (lambda: comm.Bcast(spec), lambda: comm.Isend(spec, 0), lambda: comm.Irecv(spec)):  # noqa: B023
            refused(call, MPI.ERR_TYPE)
    for call in (kind.Get_size, lambda: kind.size, lambda: kind.Commit(), lambda: kind.Create_contiguous(2)):
        refused(call, MPI.ERR_TYPE)

    request = MPI.REQUEST_NULL
    assert (request.Wait(), request.wait(), request.Test(), request.test()) == (True, None, True, (True, None))
    assert not request
    assert MPI.Request.Waitany([request]) == MPI.UNDEFINED
    for call in (request.Cancel, request.cancel, request.Free):
        refused(call, MPI.ERR_REQUEST)
    sent = comm.Isend(one, MPI.PROC_NULL)
    assert sent != request
    sent.Wait()
    assert sent == request
    for null, kind in (
        (MPI.GROUP_NULL, MPI.ERR_GROUP),
        (MPI.MESSAGE_NULL, MPI.ERR_REQUEST),
        (MPI.INFO_NULL, MPI.ERR_ARG),
    ):
        assert not null
        refused(partial(getattr, null, "Get_size"), kind)


def arguments() -> None:
    """Arguments that mpi4py refuses are refused, with its class."""
    comm = MPI.COMM_WORLD
    for color in (-10, -1):
        refused(partial(comm.Split, color), MPI.ERR_ARG)
    refused(lambda: comm.Split_type(99), MPI.ERR_ARG)
    assert comm.Split_type(MPI.COMM_TYPE_SHARED).size == comm.size
    refused(lambda: comm.bcast(1, -1), MPI.ERR_ROOT)
    refused(lambda: comm.Isend(np.ones(1), 99), MPI.ERR_RANK)
    assert MPI.Compute_dims(12, 2) == [4, 3]
    assert MPI.Compute_dims(12, [0, 2, 0]) == [3, 2, 2]
    assert MPI.Compute_dims(1, 0) == []
    for nodes, dims in ((7, [0, 2]), (0, 2), (4, [-1, 0]), (4, [2, 3])):
        refused(partial(MPI.Compute_dims, nodes, dims), MPI.ERR_DIMS)
    for name in ("pickle", "Pickle"):
        with pytest.raises(NotImplementedError, match="Python's pickle"):
            getattr(MPI, name)


def windows() -> None:
    """`Win.Allocate_shared` is one table for all ranks of the host."""
    comm = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    rank, size = comm.rank, comm.size
    win = MPI.Win.Allocate_shared(8 * (rank + 1), 8, comm=comm)
    mine = np.frombuffer(win.tomemory(), "d")
    assert mine.tolist() == [0] * (rank + 1)
    mine[:] = rank + 1
    win.Fence()
    for other in range(size):
        part, unit = win.Shared_query(other)
        assert unit == 8
        assert np.frombuffer(part, "d").tolist() == [other + 1] * (other + 1)
    whole, _ = win.Shared_query(MPI.PROC_NULL)
    assert np.frombuffer(whole, "d").tolist() == [1]
    win.Lock_all()
    win.Sync()
    win.Unlock_all()
    refused(lambda: win.Shared_query(size), MPI.ERR_RANK)
    win.Free()
    assert not win
    refused(win.Fence, MPI.ERR_WIN)
    refused(MPI.WIN_NULL.Fence, MPI.ERR_WIN)
    refused(lambda: MPI.Win.Allocate_shared(-1, comm=comm), MPI.ERR_ARG)
    alone = MPI.Win.Allocate_shared(8 if rank == 0 else 0, 8, MPI.INFO_NULL, comm)
    part, _ = alone.Shared_query(0)
    if rank == 0:
        np.frombuffer(part, "d")[:] = 7
    comm.Barrier()
    assert np.frombuffer(part, "d").tolist() == [7]
    alone.Free()
    del part, whole, mine
    freed = [MPI.Win.Allocate_shared(1 << 20, comm=comm) for _ in range(10)]
    assert any("aiodist-table" in opened for opened in open_files())
    for one in freed:
        one.Free()  # the memory goes, though the program keeps the window
    assert not any("aiodist-table" in opened for opened in open_files())
    assert "aiodist-table" not in Path("/proc/self/maps").read_text()
    for name in ("Create", "Allocate"):
        with pytest.raises(NotImplementedError, match="Allocate_shared"):
            getattr(MPI.Win, name)


def open_files() -> Iterator[str]:
    """Yield what the descriptors of this process are; other threads open and close some meanwhile."""
    for opened in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            yield os.readlink(opened)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    print(sys.argv[1])
