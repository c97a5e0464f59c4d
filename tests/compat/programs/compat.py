"""`aiodist.compat.mpi`, one function each."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import aiodist
import aiodist.compat.mpi as MPI


def reductions() -> None:
    """Each operator and type against numpy, in this order of ranks."""
    comm = MPI.COMM_WORLD
    for code in "?bBhHiIlLqQfdFD":
        for name in ("SUM", "PROD", "MAX", "MIN", "BAND", "BOR", "BXOR", "LAND", "LOR", "LXOR"):
            if (code in "fdFD" and name[0] in "BL") or (code in "FD" and name in ("MAX", "MIN")):
                continue
            op = getattr(MPI, name)
            each = [np.random.default_rng(rank).integers(0, 2 if code == "?" else 100, 5) for rank in range(comm.size)]
            arrays = [one.astype(code) for one in each]
            if code == "?" and name in ("SUM", "PROD"):
                continue
            expected = arrays[0]
            for array in arrays[1:]:
                expected = op.arrays(expected, array).astype(code)
            got, at_root = np.empty(5, code), np.zeros(5, code)
            comm.Allreduce(arrays[comm.rank], got, op)
            assert np.allclose(got, expected), (code, name, got, expected)
            comm.Reduce(arrays[comm.rank], at_root, op, root=comm.size - 1)
            assert np.allclose(at_root, expected if comm.rank == comm.size - 1 else 0), (code, name)

    def function(a: memoryview, b: memoryview, datatype: object) -> None:
        x, y = np.frombuffer(a, "d"), np.frombuffer(b, "d")
        y[:] = 2 * x + y  # it does not commute

    got = np.empty(1)
    comm.Allreduce(np.array([comm.rank + 1.0]), got, MPI.Op.Create(function))
    expected_number = 1.0
    for rank in range(1, comm.size):
        expected_number = 2 * expected_number + rank + 1
    assert got[0] == expected_number


def tensors() -> None:
    """Of torch's types that numpy lacks too: as many elements, and torch's sums; bytes that are none are refused."""
    comm = MPI.COMM_WORLD
    ranks = sum(range(1, comm.size + 1))
    for kind in (torch.bfloat16, torch.float16, torch.float32, torch.int16, torch.uint16, torch.uint32):
        t = torch.full((2 * comm.size,), comm.rank + 1).to(kind)
        out, part = torch.empty_like(t), torch.empty(2, dtype=kind)
        comm.Allreduce(t, out)
        assert out.tolist() == [ranks] * len(t), (kind, out)
        comm.Reduce_scatter_block(t, part)
        assert part.tolist() == [ranks] * 2, (kind, part)
        comm.Allgather(t[:2].clone(), out)
        assert out.tolist() == [float(rank + 1) for rank in range(comm.size) for _ in range(2)], (kind, out)
        comm.Allreduce(MPI.IN_PLACE, t, MPI.MAX)
        assert t.tolist() == [comm.size] * len(t), (kind, t)
    net = torch.nn.Linear(3, 2)
    comm.Bcast(net.weight, 0)
    assert comm.allreduce(net.weight.sum().item(), MPI.MAX) == net.weight.sum().item()
    assert comm.allreduce([comm.rank], MPI.Op.Create(lambda a, b, datatype: a + b)) == list(range(comm.size))


def awaited() -> None:
    """Over a communicator of an asyncio program requests are awaited, and what blocks is told."""

    async def main() -> None:
        async with aiodist.init() as coll:
            comm = MPI.Comm(coll)
            into = np.empty(3)
            await comm.Iallreduce(np.full(3, coll.rank + 1.0), into)
            assert into[0] == sum(range(1, coll.size + 1))
            coming = comm.irecv(source=(coll.rank - 1) % coll.size)
            await comm.isend({"from": coll.rank}, (coll.rank + 1) % coll.size)
            assert await coming == {"from": (coll.rank - 1) % coll.size}
            t = torch.arange(4.0)
            await comm.Ibcast(t, 0)
            expect(lambda: comm.Allreduce(np.ones(1), np.ones(1)), RuntimeError, "would block the event loop")

    aiodist.run(main)


def mistakes() -> None:
    """What cannot be is told at the call."""
    comm = MPI.COMM_WORLD
    for call, kind, text in (
        (lambda: comm.Probe(), NotImplementedError, "recv"),
        (lambda: comm.Create_cart([2]), NotImplementedError, "Split"),
        (lambda: MPI.Win, NotImplementedError, "ParameterServer"),
        (lambda: MPI.NoSuchThing, AttributeError, "NoSuchThing"),
        (lambda: comm.Recv(b"abc", 0), TypeError, "read-only"),
        (lambda: comm.Send(np.ones((4, 4))[:, 1], 0), TypeError, "contiguous"),
        (lambda: comm.Send([np.ones(3), 4, MPI.DOUBLE], 0), ValueError, "4 elements"),
        (lambda: comm.Send(object(), 0), TypeError, "buffer"),
        (lambda: comm.Allreduce(np.ones(4), np.ones(8, "f")), TypeError, "float64, recvbuf of float32"),
        (lambda: comm.Allreduce(torch.ones(2), torch.ones(4).bfloat16()), TypeError, "recvbuf of torch.bfloat16"),
        (lambda: comm.Allreduce(MPI.IN_PLACE, torch.ones(4).to(torch.float8_e4m3fn)), TypeError, "float8"),
        (lambda: comm.group, NotImplementedError, "Split"),
        (lambda: comm.Set_errhandler(1), NotImplementedError, "except"),
        (lambda: comm.bcast(1, root=99), ValueError, "root=99"),
    ):
        expect(call, kind, text)
    assert not hasattr(comm, "Probe")
    none = comm.Split(MPI.UNDEFINED)
    assert none is MPI.COMM_NULL
    assert MPI.COMM_SELF.allreduce(1) == 1
    MPI.Finalize()
    assert MPI.Is_finalized()
    expect(lambda: MPI.COMM_WORLD, aiodist.CommunicatorClosed, "Finalize")


def expect(call: Callable[[], Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        call()


def synchronous() -> None:
    """A synchronous send is over only when a receive has matched it."""
    comm = MPI.COMM_WORLD
    other = (comm.rank + 1) % comm.size
    for words in ("short", "long" * 1000):
        request = comm.issend(words, other, tag=3)
        assert not request.Test()
        comm.Barrier()
        assert not request.Test()
        comm.Barrier()  # the other receives no sooner
        assert comm.recv(tag=3) == words
        assert request.wait() is None
    request = comm.Issend(np.arange(3.0), other)
    comm.Barrier()
    assert not request.Test()
    comm.Barrier()
    into = np.empty(3)
    comm.Recv(into, (comm.rank - 1) % comm.size)
    assert request.Wait()
    assert into.tolist() == [0, 1, 2]


def raised() -> None:
    """The others hear of what ends one rank, though nobody closes the world."""
    comm = MPI.COMM_WORLD
    comm.barrier()
    if comm.rank == 1:
        raise ValueError("rank 1 has had enough")
    comm.recv(source=1)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    print(sys.argv[1])
