"""The programs of mpi4py's tutorial, with the module that the first argument names. Both have the same output."""

from __future__ import annotations

import importlib
import sys

import numpy as np


def main() -> None:
    MPI = importlib.import_module(sys.argv[1])

    comm = MPI.COMM_WORLD
    size, rank = comm.Get_size(), comm.Get_rank()
    said: list[str] = []

    def say(*what: object) -> None:
        said.append(" ".join(map(str, what)))

    # 1: objects, blocking
    if rank == 0:
        comm.send({"a": 7, "b": 3.14}, dest=1, tag=11)
    elif rank == 1:
        status = MPI.Status()
        say("object", comm.recv(source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG, status=status), status.Get_source(), status.tag)

    # 2: objects, with requests
    if rank == 0:
        comm.isend({"a": 7, "b": 3.14}, dest=1, tag=11).wait()
    elif rank == 1:
        say("request", comm.irecv(source=0, tag=11).wait())

    # 3: numpy's arrays, with a type and without
    if rank == 0:
        comm.Send([np.arange(1000, dtype="i"), MPI.INT], dest=1, tag=77)
        comm.Send(np.arange(100, dtype=np.float64), dest=1, tag=13)
    elif rank == 1:
        data = np.empty(1000, dtype="i")
        comm.Recv([data, MPI.INT], source=0, tag=77)
        more, status = np.empty(200, dtype=np.float64), MPI.Status()
        comm.Recv(more, source=0, tag=13, status=status)
        say("arrays", data.sum(), more[:100].sum(), status.Get_count(MPI.DOUBLE), status.Get_elements(MPI.DOUBLE))

    # 4: objects, collectively
    say("bcast", comm.bcast({"key1": [7, 2.72, 2 + 3j], "key2": ("abc", "xyz")} if rank == 0 else None, root=0))
    say("scatter", comm.scatter([(i + 1) ** 2 for i in range(size)] if rank == 0 else None, root=0))
    say("gather", comm.gather((rank + 1) ** 2, root=0))
    say("reduce", comm.reduce(rank + 1, op=MPI.PROD, root=size - 1), comm.allreduce((rank % 2, rank), op=MPI.MAXLOC))
    say("scan", comm.scan(rank + 1), comm.exscan(rank + 1))
    say("alltoall", comm.alltoall([10 * rank + to for to in range(size)]))

    # 5: arrays, collectively
    data = np.arange(100, dtype="i") if rank == 0 else np.empty(100, dtype="i")
    comm.Bcast(data, root=0)
    say("Bcast", data.sum())
    part = np.empty(100, dtype="i")
    comm.Scatter(np.arange(size * 100, dtype="i").reshape(size, 100) if rank == 0 else None, part, root=0)
    say("Scatter", part.sum())
    whole = np.empty([size, 100], dtype="i") if rank == 0 else None
    comm.Gather(part + rank, whole, root=0)
    say("Gather", None if whole is None else whole.sum(axis=1))

    # 6: a matrix times a vector, by rows
    rows = np.arange(6, dtype="d").reshape(2, 3) + rank
    x = np.ones(3)
    every = np.zeros(2 * size)
    comm.Allgather([rows @ x, MPI.DOUBLE], [every, MPI.DOUBLE])
    say("matvec", every)

    # 7: pi as an integral, with a part on each rank
    n, h = 1000, 1 / 1000
    mine = np.array(h * sum(4 / (1 + (h * (i + 0.5)) ** 2) for i in range(rank, n, size)))
    pi = np.array(0.0)
    comm.Reduce([mine, MPI.DOUBLE], [pi, MPI.DOUBLE], op=MPI.SUM, root=0)
    say("pi", f"{float(pi):.6f}" if rank == 0 else "elsewhere")

    # and blocks of different lengths, places in the buffer, in place, requests of collectives, groups
    counts = [i + 1 for i in range(size)]
    places = [2 * i * (i + 1) for i in range(size)]
    into = np.full(2 * size * (size + 1), -1, dtype="i")
    comm.Allgatherv(np.full(rank + 1, rank, dtype="i"), [into, counts, places, MPI.INT])
    say("Allgatherv", into)
    total = np.full(4, rank, dtype="f")
    comm.Allreduce(MPI.IN_PLACE, [total, MPI.FLOAT], op=MPI.MAX)
    request = comm.Iallreduce(np.full(3, rank, dtype="H"), least := np.empty(3, dtype="H"), op=MPI.MIN)
    logical = np.empty(2, dtype="i")
    comm.Allreduce(np.array([rank, 1], dtype="i"), logical, op=MPI.LAND)
    MPI.Request.Waitall([request])
    say("reductions", total, least, logical)
    half = comm.Split(rank % 2, -rank)
    say("Split", half.Get_size(), half.allgather(rank))
    half.Free()

    everything = comm.gather(said, root=0)
    for lines in everything or []:
        print("\n".join(lines))


if __name__ == "__main__":
    main()
