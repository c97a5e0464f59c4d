"""`aiodist.compat.mpi`, one function each."""

from __future__ import annotations

import pickle
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
    """Torch's types that numpy lacks have torch's sums, and other bytes are refused."""
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
    with torch.no_grad():
        comm.Bcast(net.weight, 0)
    assert comm.allreduce(net.weight.sum().item(), MPI.MAX) == net.weight.sum().item()
    assert comm.allreduce([comm.rank], MPI.Op.Create(lambda a, b, datatype: a + b)) == list(range(comm.size))


def versions() -> None:
    """A call raises the version of a tensor that it writes, and refuses a tensor that autograd records."""

    def multiply(a: memoryview, b: memoryview, datatype: object) -> None:
        np.frombuffer(b, "f")[:] *= np.frombuffer(a, "f")

    product = MPI.Op.Create(multiply)
    comm, n = MPI.COMM_WORLD, 4
    other = 1 - comm.rank
    last = comm.rank == comm.size - 1
    counts = [n] * comm.size
    calls: dict[str, tuple[int, int, Callable[[Any, Any], object]]] = {  # what is read and written, in blocks of n
        "Allreduce": (1, 1, comm.Allreduce),
        "Allreduce of a function": (1, 1, lambda a, b: comm.Allreduce(a, b, product)),
        "Scan": (1, 1, comm.Scan),
        "Exscan": (1, 1, comm.Exscan),
        "Reduce": (1, last, lambda a, b: comm.Reduce(a, b if last else None, root=comm.size - 1)),
        "Reduce_scatter_block": (comm.size, 1, comm.Reduce_scatter_block),
        "Allgather": (1, comm.size, comm.Allgather),
        "Allgatherv": (1, comm.size, lambda a, b: comm.Allgatherv(a, [b, counts])),
        "Gather": (1, comm.size * last, lambda a, b: comm.Gather(a, b if last else None, root=comm.size - 1)),
        "Scatter": (comm.size * last, 1, lambda a, b: comm.Scatter(a if last else None, b, root=comm.size - 1)),
        "Alltoall": (comm.size, comm.size, comm.Alltoall),
        "Alltoallv": (comm.size, comm.size, lambda a, b: comm.Alltoallv([a, counts], [b, counts])),
        "Sendrecv": (1, 1, lambda a, b: comm.Sendrecv(a, other, recvbuf=b)),
        "Bcast": (0, 1, lambda _, b: comm.Bcast(b, root=0)),
    }
    for name, (reads, writes, call) in calls.items():
        sent, into = torch.ones(reads * n), torch.ones(writes * n)
        versions = sent._version, into._version
        call(sent, into)
        wrote = writes and not (name == "Bcast" and comm.rank == 0) and not (name == "Exscan" and comm.rank == 0)
        assert sent._version == versions[0], name
        assert into._version > versions[1] or not wrote, name
        if not writes:
            call(sent.requires_grad_(), into)
            continue
        with pytest.raises(RuntimeError, match="autograd does not record"):
            call(sent, into.detach().requires_grad_())
        call(sent.requires_grad_(), into)


def awaited() -> None:
    """In an asyncio program requests are awaited, and blocking calls raise."""

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
            other, open_one = MPI.Comm(await coll.dup()), comm.Irecv(np.ones(1), tag=9)
            expect(other.Free, RuntimeError, "would block the event loop")
            expect(lambda: MPI.Request.Waitany([open_one]), RuntimeError, "would block the event loop")
            open_one.Cancel()
            await other.coll.aclose()
            await comm.Isend(np.ones(8), (coll.rank + 1) % coll.size)
            with pytest.raises(MPI.Exception) as raised:
                await comm.Irecv(np.ones(2))
            assert raised.value == MPI.ERR_TRUNCATE

    aiodist.run(main)


def mistakes() -> None:
    """Invalid arguments raise at the call."""
    comm = MPI.COMM_WORLD
    for call, kind, text in (
        (lambda: comm.Probe(), NotImplementedError, "recv"),
        (lambda: comm.Create_cart([2]), NotImplementedError, "Split"),
        (lambda: MPI.WIN_NULL.Put, NotImplementedError, "ParameterServer"),
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
        (lambda: comm.bcast(1, root=99), MPI.Exception, "root=99"),
        (lambda: MPI.ERR_FILE, NotImplementedError, "other classes"),
        (lambda: MPI.ERR_NO_SUCH_FILE, NotImplementedError, "other classes"),
        (lambda: MPI.DOUBLE.Create_vector(2, 1, 4), NotImplementedError, "a contiguous copy"),
        (lambda: MPI.INT.Commit(), NotImplementedError, "a contiguous copy"),
        (lambda: MPI.INT.no_such_thing, AttributeError, "no_such_thing"),
        (lambda: comm.Allreduce_init(1, 2), NotImplementedError, "each time"),
        (lambda: MPI.MODE_CREATE, NotImplementedError, "aiodist.save"),
    ):
        expect(call, kind, text)
    assert not hasattr(comm, "Probe")
    none = comm.Split(MPI.UNDEFINED)
    assert none is MPI.COMM_NULL
    assert MPI.COMM_SELF.allreduce(1) == 1
    MPI.Finalize()
    assert MPI.Is_finalized()
    expect(lambda: MPI.COMM_WORLD, MPI.Exception, "Finalize")


def errors() -> None:
    """Each is an MPI.Exception with the class that a program for mpi4py compares with."""
    comm = MPI.COMM_WORLD
    other, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    closed = comm.Dup()
    closed.Free()
    taken = np.empty(4)
    waiting = comm.Irecv(taken, before, 9)
    going = comm.Isend(np.arange(8.0), other)
    wrong: tuple[tuple[Callable[[], Any], int, type[Exception]], ...] = (
        (lambda: comm.bcast(1, root=99), MPI.ERR_ROOT, ValueError),
        (lambda: comm.Reduce(np.ones(1), np.ones(1), root=-1), MPI.ERR_ROOT, ValueError),
        (lambda: comm.send(1, dest=comm.size), MPI.ERR_RANK, ValueError),
        (lambda: comm.recv(source=-7), MPI.ERR_RANK, ValueError),
        (lambda: comm.Isend(np.ones(1), other, tag=-5), MPI.ERR_TAG, ValueError),
        (lambda: comm.Irecv(taken, before, 10), MPI.ERR_BUFFER, aiodist.BufferInFlight),
        (lambda: comm.Recv(np.empty(2), before), MPI.ERR_TRUNCATE, aiodist.BackendError),
        (lambda: closed.barrier(), MPI.ERR_COMM, aiodist.CommunicatorClosed),
    )
    for call, code, cause in wrong:
        with pytest.raises(MPI.Exception) as raised:
            call()
        error = raised.value
        assert (error.Get_error_class(), error.Get_error_code(), int(error)) == (code,) * 3, (code, error)
        assert isinstance(error.__cause__, cause)
        assert error.Get_error_string() == str(error.__cause__)
        assert error == code
        assert error
        assert pickle.loads(pickle.dumps(error)).Get_error_class() == code
    going.Wait()
    comm.Isend(np.full(4, comm.rank + 1.0), other, 9).Wait()
    waiting.Wait()  # what could not be has hurt nothing else
    assert taken.tolist() == [before + 1.0] * 4
    if comm.size > 1:
        with pytest.raises(MPI.Exception) as raised:
            comm.Bcast(np.ones(2 + comm.rank))
        assert raised.value.Get_error_class() == MPI.ERR_ARG
        into, counts = np.empty(comm.size), [1] * comm.size
        with pytest.raises(MPI.Exception) as raised:
            comm.Allgatherv(np.ones(1 + comm.size), [into, counts])
        assert raised.value.Get_error_class() == MPI.ERR_TRUNCATE
    assert MPI.Get_error_class(MPI.ERR_TAG) == MPI.ERR_TAG
    assert str(MPI.Exception(MPI.ERR_TAG)) == MPI.Get_error_string(MPI.ERR_TAG) == "MPI_ERR_TAG"
    assert not MPI.Exception(MPI.SUCCESS)
    expect(lambda: MPI.Get_error_string(-3), MPI.Exception, "error code -3")


def expect(call: Callable[[], Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        call()


def overlaps() -> None:
    """Buffers of one call that overlap: refused before anything is issued, or as on copies."""
    comm = MPI.COMM_WORLD
    other = (comm.rank + 1) % comm.size
    whole = np.arange(8.0) + comm.rank
    for _ in range(2):
        expect(lambda: comm.Sendrecv(whole[:5], other, recvbuf=whole[3:]), ValueError, "sendbuf overlaps recvbuf")
        expect(lambda: comm.Isendrecv(whole[:5], other, recvbuf=whole[3:]), ValueError, "sendbuf overlaps recvbuf")
        expect(lambda: comm.Allreduce(whole[:5], whole[3:]), ValueError, "out overlaps the input")
    into = np.empty(5)
    comm.Sendrecv(whole[:5], other, recvbuf=into)  # no receive of the calls before takes it
    assert into.tolist() == (np.arange(5.0) + (comm.rank - 1) % comm.size).tolist()
    comm.Sendrecv_replace(whole, other)
    assert whole[0] == (comm.rank - 1) % comm.size


def synchronous() -> None:
    """A synchronous send ends only when a receive has matched."""
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
    """The other ranks get the error that ends one rank, without a close of the world."""
    comm = MPI.COMM_WORLD
    comm.barrier()
    if comm.rank == 1:
        raise ValueError("rank 1 has had enough")
    try:
        comm.recv(source=1)
    except MPI.Exception as error:
        if error.Get_error_class() == MPI.ERR_PROC_FAILED:
            print("told")
        raise


def mismatched() -> None:
    """One rank calls another collective, and no rank catches the error."""
    comm = MPI.COMM_WORLD
    if comm.rank == 1:
        comm.Barrier()
    else:
        comm.Bcast(np.zeros(4))


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    print(sys.argv[1])
