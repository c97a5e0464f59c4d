"""C9: a mistake is an error at the call with the value seen and the values allowed; the communicator continues."""

import asyncio
import math
import threading
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

import aiodist
from aiodist import Communicator, RemoteError
from aiodist.schedules import SCHEDULES

FLOATS = torch.arange(6.0)
COMPLEX = torch.complex(FLOATS, FLOATS + 1)
TWO = [FLOATS[:3], FLOATS[3:]]
NINE = torch.arange(9.0)


def emptied(numel: int, nbytes: int = 0) -> torch.Tensor:
    """Return a tensor whose memory was taken away, but for some bytes, as FSDP does."""
    t = torch.ones(numel)
    t.untyped_storage().resize_(nbytes)
    return t


def bad(expected: type[Exception], match: str, call: Callable[[Any], Any]) -> Any:
    return pytest.param(expected, match, call, id=match)


def wrapper() -> torch.Tensor:
    """Return a tensor that is made of two others."""
    return TwoTensor(torch.ones(3), torch.ones(3))


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(3)


def jagged() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


NO_MEMORY = "without memory of its own: expected plain memory, as .to_local"

MISTAKES = [
    # roots and ranks
    bad(ValueError, r"root=2: expected a rank from 0 to 1", lambda c: c.broadcast(torch.ones(2), root=2)),
    bad(ValueError, r"root=-1: expected a rank from 0 to 1", lambda c: c.reduce(torch.ones(2), root=-1)),
    bad(TypeError, r"root is str: expected a rank", lambda c: c.gather(torch.ones(2), root="0")),
    bad(TypeError, r"root is bool: expected a rank", lambda c: c.scatter(None, root=True)),
    bad(ValueError, r"root=5: expected", lambda c: c.scatter(None, root=5)),
    bad(ValueError, r"root=5", lambda c: c.broadcast_object(1, root=5)),
    bad(ValueError, r"dst=2: expected", lambda c: c.send(torch.ones(2), 2)),
    bad(ValueError, r"dst=-1: expected", lambda c: c.send(torch.ones(2), aiodist.ANY)),
    bad(ValueError, r"src=9: expected", lambda c: c.recv(src=9)),
    bad(ValueError, r"src=-1: expected", lambda c: c.sendrecv(torch.ones(2), 0, aiodist.ANY)),
    bad(ValueError, r"tag=-2: expected", lambda c: c.send(torch.ones(2), 0, tag=-2)),
    bad(ValueError, r"tag=-1: expected", lambda c: c.send(torch.ones(2), 0, tag=aiodist.ANY)),
    bad(TypeError, r"tag is float: expected an int", lambda c: c.recv(tag=1.0)),
    # what is no tensor, or no such tensor
    bad(TypeError, r"t is str: expected a tensor or a list of tensors", lambda c: c.allreduce("abc")),
    bad(TypeError, r"t is NoneType: expected a tensor or a list", lambda c: c.gather(None)),
    bad(TypeError, r"t\[1\] is int: expected a torch\.Tensor", lambda c: c.allreduce([torch.ones(1), 3])),
    bad(TypeError, r"ts is Tensor: expected a list of tensors", lambda c: c.scatter(torch.ones(2), c.rank)),
    bad(TypeError, r"ts is Tensor: expected a list of tensors", lambda c: c.alltoall(torch.ones(2, 3))),
    bad(TypeError, r"ts is dict: expected a list of tensors", lambda c: c.alltoall({0: torch.ones(2)})),
    bad(TypeError, r"uint16: expected one of", lambda c: c.allreduce(torch.ones(2).to(torch.uint16))),
    bad(TypeError, r"uint32: expected one of", lambda c: c.allgather(torch.ones(2).to(torch.uint32))),
    bad(TypeError, r"uint64: expected one of", lambda c: c.send(torch.ones(2).to(torch.uint64), 0)),
    bad(ValueError, r"strides \(1, 3\): expected contiguous", lambda c: c.allreduce(torch.ones(2, 3).t())),
    bad(ValueError, r"strides .*expected contiguous", lambda c: c.broadcast(torch.ones(6)[::2])),
    bad(ValueError, r"t is a view that torch conjugates", lambda c: c.allreduce(COMPLEX.conj())),
    bad(ValueError, r"t is a view that torch conjugates", lambda c: c.gather(COMPLEX.conj())),
    bad(ValueError, r"t is a view that torch negates", lambda c: c.allreduce(COMPLEX.conj()[:1].imag)),
    bad(ValueError, r"out is a view that torch conjugates", lambda c: c.allreduce(COMPLEX, out=COMPLEX.conj())),
    bad(ValueError, r"layout torch\.sparse_coo: expected a dense", lambda c: c.allreduce(torch.ones(2).to_sparse())),
    bad(ValueError, r"layout torch\.jagged: expected a dense", lambda c: c.allreduce(jagged())),
    bad(ValueError, r"layout torch\.jagged: expected a dense", lambda c: c.broadcast(jagged())),
    bad(ValueError, r"is on meta: expected a device", lambda c: c.allreduce(torch.ones(2, device="meta"))),
    # operators
    bad(ValueError, r"op='average': expected one of sum, mean", lambda c: c.allreduce(torch.ones(2), "average")),
    bad(TypeError, r"mean of int64", lambda c: c.allreduce(torch.arange(3), "mean")),
    bad(TypeError, r"mean of bool", lambda c: c.scan(torch.ones(3).bool(), "mean")),
    bad(TypeError, r"sum of bool: sum takes", lambda c: c.reduce(torch.ones(3).bool(), "sum")),
    bad(TypeError, r"min of complex64", lambda c: c.allreduce(torch.ones(3, dtype=torch.complex64), "min")),
    bad(TypeError, r"max of complex128", lambda c: c.reduce_scatter(torch.ones(4, dtype=torch.complex128), "max")),
    bad(TypeError, r"band of float32", lambda c: c.allreduce(torch.ones(2), "band")),
    bad(ValueError, r"op=\[1\]: expected one of sum, mean", lambda c: c.allreduce(torch.ones(2), [1])),
    bad(ValueError, r"op=\[1\]: expected one of sum, mean", lambda c: c.scan(torch.ones(2), [1])),
    bad(ValueError, r"op=\{\}: expected one of sum, mean", lambda c: c.reduce_scatter(FLOATS, {})),
    bad(ValueError, r"op=None: expected one of sum, mean", lambda c: c.allreduce(torch.ones(2), None)),
    bad(ImportError, r"impl=\[\]: this communicator has auto", lambda c: c.allreduce(torch.ones(2), impl=[])),
    bad(ImportError, r"impl=\[\]: this communicator has auto", lambda c: c.broadcast(torch.ones(2), impl=[])),
    # memory that was taken away
    bad(ValueError, r"t of shape \[3\] has 0 bytes of memory: expected 12", lambda c: c.allreduce(emptied(3))),
    bad(ValueError, r"t of shape \[3\] has 0 bytes of memory", lambda c: c.broadcast(emptied(3))),
    bad(ValueError, r"t of shape \[3\] has 0 bytes of memory", lambda c: c.scan(emptied(3))),
    bad(ValueError, r"t of shape \[3\] has 0 bytes of memory", lambda c: c.send(emptied(3), 0)),
    bad(ValueError, r"out of shape \[6\] has 0 bytes of memory", lambda c: c.allreduce(FLOATS, out=emptied(6))),
    bad(ValueError, r"t of shape \[99\] has 8 bytes of memory: expected 396", lambda c: c.gather(emptied(99, 8))),
    *(
        bad(TypeError, f"t is a {kind} {NO_MEMORY}", call)
        for kind, make in (("TwoTensor", wrapper), ("FakeTensor", fake))
        for call in (
            lambda c, make=make: c.allreduce(make()),
            lambda c, make=make: c.allgather(make()),
            lambda c, make=make: c.broadcast(make()),
            lambda c, make=make: c.scan(make()),
            lambda c, make=make: c.alltoall_single(make(), sizes=[1, 2]),
            lambda c, make=make: c.send(make(), 0),
            lambda c, make=make: c.recv(make()),
        )
    ),
    bad(TypeError, rf"t\[1\] is a TwoTensor {NO_MEMORY}", lambda c: c.allreduce([torch.ones(3), wrapper()])),
    bad(TypeError, rf"ts\[1\] is a FakeTensor {NO_MEMORY}", lambda c: c.alltoall([torch.ones(3), fake()])),
    bad(TypeError, f"out is a TwoTensor {NO_MEMORY}", lambda c: c.allreduce(torch.ones(3), out=wrapper())),
    bad(TypeError, f"out is a FakeTensor {NO_MEMORY}", lambda c: c.reduce_scatter(torch.ones(6), out=fake())),
    bad(TypeError, rf"out\[0\] is a TwoTensor {NO_MEMORY}", lambda c: c.alltoall(TWO, out=[wrapper(), wrapper()])),
    bad(TypeError, f"t is a Tensor {NO_MEMORY}", lambda c: torch.func.functionalize(c.allreduce)(torch.ones(3))),
    # out
    bad(TypeError, r"out is list: expected a torch\.Tensor", lambda c: c.allreduce(torch.ones(2), out=[])),
    bad(TypeError, r"out holds int64, the input float32", lambda c: c.scan(FLOATS, out=torch.arange(6))),
    bad(ValueError, r"out has room for 3 elements: expected 6", lambda c: c.allreduce(FLOATS, out=torch.ones(9)[:3])),
    bad(ValueError, r"out has strides|out of shape", lambda c: c.allreduce(FLOATS, out=torch.ones(6, 2)[:, 0])),
    bad(ValueError, r"out overlaps the input", lambda c: c.allreduce(FLOATS[:4], out=FLOATS[1:5])),
    bad(ValueError, r"out overlaps the input", lambda c: c.allreduce(FLOATS[:4], out=FLOATS)),
    bad(ValueError, r"out overlaps the input", lambda c: c.reduce_scatter(NINE[:6], out=NINE[5:8])),
    bad(ValueError, r"out overlaps the input", lambda c: c.sendrecv(FLOATS, 0, 0, FLOATS)),
    bad(ValueError, r"out overlaps the input", lambda c: c.allgather(FLOATS[3:], out=FLOATS[:5])),
    bad(ValueError, r"out overlaps the input ts\[0\]", lambda c: c.alltoall(TWO, out=[torch.ones(3), TWO[0]])),
    bad(ValueError, r"out= requires one tensor as t", lambda c: c.allreduce([FLOATS], out=torch.ones(6))),
    bad(ValueError, r"out has 1 tensors: expected 2", lambda c: c.alltoall([FLOATS] * 2, out=[torch.ones(6)])),
    # counts and lists
    bad(ValueError, r"ts has 3 tensors: expected 2, one for each rank", lambda c: c.alltoall([FLOATS] * 3)),
    bad(ValueError, r"sizes add up to 5: expected the 6", lambda c: c.reduce_scatter(FLOATS, sizes=[2, 3])),
    bad(ValueError, r"sizes=\[6\]: expected 2 counts", lambda c: c.reduce_scatter(FLOATS, sizes=[6])),
    bad(ValueError, r"sizes=\[8, -2\]", lambda c: c.reduce_scatter(FLOATS, sizes=[8, -2])),
    bad(
        TypeError,
        r"sizes=\[3\.5, 2\.5\]: expected 2",
        lambda c: c.reduce_scatter(FLOATS, sizes=[3.5, 2.5]),
    ),
    bad(TypeError, r"sizes=\[3, 3\.9\]: expected 2 counts, ints", lambda c: c.alltoall_single(FLOATS, sizes=[3, 3.9])),
    bad(ValueError, r"no dimension to cut", lambda c: c.reduce_scatter(torch.tensor(1.0))),
    bad(ValueError, r"no dimension to cut", lambda c: c.alltoall_single(torch.tensor(1.0))),
    bad(ValueError, r"t has 5 rows: expected a multiple of the 2 ranks", lambda c: c.alltoall_single(FLOATS[:5])),
    bad(ValueError, r"sizes add up to 5: expected the 6 rows", lambda c: c.alltoall_single(FLOATS, sizes=[2, 3])),
    bad(ValueError, r"takes no sizes", lambda c: c.alltoall_single(FLOATS, sizes=[3, 3], impl="bruck")),
    bad(ValueError, r"out overlaps the input", lambda c: c.alltoall_single(FLOATS[:4], out=FLOATS[1:5])),
    bad(ValueError, r"across=True over .*expected the same", lambda c: c.allreduce([FLOATS, FLOATS[:2]], across=True)),
    bad(ValueError, r"objs is 1 objects: expected 2", lambda c: c.alltoall_object([1])),
    bad(ValueError, r"timeout=-1.*expected seconds", lambda c: c.allreduce(torch.ones(1), timeout=-1)),
    bad(ValueError, r"timeout=nan.*expected seconds", lambda c: c.allreduce(torch.ones(1), timeout=math.nan)),
    bad(ValueError, r"timeout=nan", lambda c: c.broadcast(torch.ones(1), timeout=math.nan)),
    bad(ValueError, r"timeout=nan", lambda c: c.barrier(timeout=math.nan)),
    bad(ValueError, r"timeout=nan", lambda c: c.recv(timeout=math.nan)),
    bad(TypeError, r"timeout is str: expected seconds, or None", lambda c: c.allreduce(torch.ones(1), timeout="3")),
    bad(TypeError, r"timeout is str", lambda c: c.scan(torch.ones(1), timeout="3")),
    bad(TypeError, r"timeout is str", lambda c: c.barrier(timeout="3")),
    bad(TypeError, r"timeout is str", lambda c: c.stopping(timeout="3")),
    bad(ImportError, r"impl='nccl': this communicator has auto", lambda c: c.allreduce(torch.ones(1), impl="nccl")),
    # communicators
    bad(ValueError, r"ranks=\[0, 0\]: expected at least one rank, each once", lambda c: c.group([0, 0])),
    bad(ValueError, r"ranks=\[\]", lambda c: c.group([])),
    bad(ValueError, r"ranks=7", lambda c: c.group([7])),
    bad(TypeError, r"color is str: expected an int or None", lambda c: c.split("red")),
    bad(TypeError, r"key is float", lambda c: c.split(0, 1.5)),
    bad(ValueError, r"color=9223372036854775808: expected -2\^63 to 2\^63 - 1", lambda c: c.split(1 << 63)),
    bad(ValueError, r"key=-9223372036854775809: expected -2\^63", lambda c: c.split(0, -(1 << 63) - 1)),
]


@pytest.mark.drawn(63)
@pytest.mark.ranks(2)
@pytest.mark.parametrize(("expected", "match", "call"), MISTAKES)
async def test_c9_a_mistake_is_an_error_at_the_call(
    coll: Communicator, expected: type[Exception], match: str, call: Callable[[Any], Any]
) -> None:
    before = coll.seq, coll.statistics()
    with pytest.raises(expected, match=match):
        call(coll)
    assert (coll.seq, coll.statistics()) == before
    assert (await coll.allreduce(FLOATS.clone())).tolist() == (2 * FLOATS).tolist()


@pytest.mark.ranks(2, backend=("local", "shm", "gloo", "mpi"))
async def test_c9_later_calls_of_a_signature_are_checked_as_the_first(coll: Communicator) -> None:
    def calls(t: torch.Tensor) -> list[Callable[[], Any]]:
        reductions: list[Any] = [
            coll.allreduce,
            coll.scan,
            coll.reduce,
            partial(coll.reduce, root=1),
            coll.reduce_scatter,
        ]
        return [partial(call, t) for call in (*reductions, coll.broadcast, coll.allgather, coll.alltoall_single)]

    for numel in (6, 30_000):
        for call in calls(torch.ones(numel)):
            await call()
        later, strided = torch.ones(2 * numel)[numel:], torch.ones(2 * numel)[::2]
        later.untyped_storage().resize_(6 * numel)
        # The shortest path does not look at the memory of a short tensor, as torch does not.
        shrunk = [] if numel == 6 else [later, emptied(numel, 16)]
        for t in (emptied(numel), strided, *shrunk):
            for call in calls(t):
                with pytest.raises(ValueError, match=r"bytes of memory|contiguous memory"):
                    call()
    t = torch.arange(6.0) + coll.rank
    assert (await coll.allreduce(t)) is t
    assert t.tolist() == [1 + 2 * i for i in range(6)]
    t = torch.arange(6.0) + coll.rank
    assert (await coll.broadcast(t, 1)) is t
    assert t.tolist() == [1 + i for i in range(6)]
    t = torch.arange(6.0) + coll.rank
    result = await coll.reduce(t, root=1)
    assert (result is t) is bool(coll.rank)
    assert t.tolist() == ([1 + 2 * i for i in range(6)] if coll.rank else [*range(6)])
    kept, other = torch.arange(6.0) + coll.rank, torch.zeros(6)
    handle = coll.allreduce(kept)
    first = kept.detach()
    kept.data = other  # the operation uses the memory that it was given
    await handle
    assert not other.any()
    assert first.tolist() == [1 + 2 * i for i in range(6)]


@pytest.mark.ranks(2, backend=("local", "shm", "gloo", "mpi"))
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=len)
async def test_c9_a_negated_number_is_refused_after_plain_ones(coll: Communicator, shape: tuple[int, ...]) -> None:
    def imaginary() -> torch.Tensor:
        return torch.tensor([complex(0, coll.rank + 2)])

    assert imaginary().conj()[0].imag.is_neg()
    calls: list[Any] = [
        partial(coll.allreduce, op="max"),
        partial(coll.allreduce, op="prod"),
        coll.reduce,
        coll.scan,
        coll.broadcast,
        coll.allgather,
    ]
    for call in calls:
        for _ in range(3):
            await call(torch.ones(shape))
        with pytest.raises(ValueError, match="a view that torch negates"):
            call(imaginary().conj()[0].imag.view(shape))
        await call(imaginary()[0].imag.view(shape))
    assert (await coll.allreduce(imaginary()[0].imag.view(shape), "max")).item() == 3


@pytest.mark.ranks(2)
async def test_c1_alltoall_single_in_place_by_bruck_and_where_ranks_differ(coll: Communicator) -> None:
    t = torch.arange(6.0) + 10 * coll.rank
    expected = torch.cat([torch.arange(3.0) + 3 * coll.rank + 10 * source for source in range(2)])
    assert torch.equal(await coll.alltoall_single(t.clone(), impl="bruck"), expected)
    assert torch.equal(await coll.alltoall_single(t, out=t), expected)
    for differing in (t[: 4 + 2 * coll.rank], t.double() if coll.rank else t):
        with pytest.raises(aiodist.MismatchError, match=r"alltoall_single float32\[") as told:
            await coll.alltoall_single(differing)
        assert "test_c9_arguments.py" in str(told.value)
    with pytest.raises(aiodist.MismatchError, match="rows by sizes"):
        await coll.alltoall_single(t, sizes=[3, 3] if coll.rank else None)


@pytest.mark.ranks(2)
async def test_c1_what_comes_to_an_input_that_grows(coll: Communicator) -> None:
    for rows in (1, 1000):
        t = torch.arange(2.0 * rows) + 10 * coll.rank
        sizes = [0, 2 * rows]
        expected = await coll.alltoall_single(t.clone(), sizes=sizes)
        assert torch.equal(await coll.alltoall_single(t, out=t, sizes=sizes), expected)
    t = torch.empty(0) if coll.rank else torch.arange(3.0)
    await coll.alltoall_single(t, out=t, sizes=[0, 0] if coll.rank else [1, 2])
    assert t.tolist() == ([1.0, 2.0] if coll.rank else [0.0, 1.0, 2.0])  # what is longer keeps its end
    ts = [torch.empty(0), torch.empty(0)] if coll.rank else [torch.ones(2), torch.ones(4)]
    assert [t.numel() for t in await coll.alltoall(ts, out=ts)] == ([4, 0] if coll.rank else [2, 0])


@pytest.mark.thorough
@pytest.mark.drawn(6)
@pytest.mark.ranks(1, 2, 3, 5)
@pytest.mark.ranks(2, 3, backend=("shm", "gloo", "mpi"))
@pytest.mark.parametrize("numel", [15, 60_000])
async def test_c1_reduce_scatter_into_its_input(coll: Communicator, numel: int) -> None:
    ranks, rank = coll.size, coll.rank
    ways: list[Any] = ["auto", *SCHEDULES["reduce_scatter"], *(["shm"] if coll.backend == "shm" else [])]
    total = torch.arange(numel) % 8 * ranks + sum(range(ranks))
    for sizes in (None, [3] * (ranks - 1) + [numel - 3 * (ranks - 1)], [numel] + [0] * (ranks - 1)):
        cut = sizes or [numel // ranks + (r < numel % ranks) for r in range(ranks)]
        for impl, kind in product(ways, (torch.int64, torch.bfloat16)):
            expected = total.split(cut)[rank].to(kind)
            for own in (False, True):
                t = (torch.arange(numel) % 8 + rank).to(kind)
                out = t.split(cut)[rank] if own else t
                found = await coll.reduce_scatter(t, sizes=sizes, out=out, impl=impl)
                assert found.equal(expected), (impl, kind, sizes, own)
                assert not found.numel() or found.data_ptr() == out.data_ptr()


@pytest.mark.thorough
@pytest.mark.ranks(2, backend=("mpi", "mpich", "gloo"))
async def test_c9_mistakes_over_a_library(coll: Communicator) -> None:
    for parameters in MISTAKES:
        expected, match, call = parameters.values
        with pytest.raises(expected, match=match):
            call(coll)
    assert (await coll.allreduce(FLOATS.clone())).tolist() == (2 * FLOATS).tolist()


@pytest.mark.ranks(2)
async def test_c9_roots_lists_are_checked_on_the_root_alone(coll: Communicator) -> None:
    if coll.rank == 0:
        for ts, expected, match in (
            (None, TypeError, "ts is None"),
            ([FLOATS], ValueError, "ts has 1 tensors: expected 2"),
            ([FLOATS, 3], TypeError, r"ts\[1\] is int"),
        ):
            with pytest.raises(expected, match=match):
                coll.scatter(ts)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="objs is None: expected 2"):
            coll.scatter_object(None)
    await coll.barrier()
    given: Any = [torch.tensor(4), torch.tensor(5)] if coll.rank == 0 else "ignored"
    assert (await coll.scatter(given)).item() == 4 + coll.rank


@pytest.mark.ranks(2)
async def test_c9_a_call_after_close(coll: Communicator) -> None:
    other = await coll.dup()
    await other.aclose()
    for call in (
        lambda: other.allreduce(torch.ones(2)),
        lambda: other.barrier(),
        lambda: other.send(torch.ones(1), 0),
        lambda: other.recv(),
        lambda: other.dup(),
        lambda: other.broadcast_object(1),
    ):
        with pytest.raises(aiodist.CommunicatorClosed, match=r"world/dup1.*is closed"):
            call()
    await other.aclose()  # again does nothing
    assert await coll.allreduce(1) == 2


async def test_c9_the_world_after_its_block() -> None:
    async with aiodist.init() as coll:
        await coll.barrier()
    with pytest.raises(aiodist.CommunicatorClosed, match="closed"):
        coll.allreduce(torch.ones(2))


async def test_c9_another_thread_or_loop() -> None:
    async with aiodist.init() as coll:
        seen = []

        def call() -> None:
            try:
                coll.allreduce(torch.ones(2))
            except RuntimeError as error:
                seen.append(str(error))

        async def elsewhere() -> None:
            call()

        await asyncio.to_thread(call)
        thread = threading.Thread(target=lambda: asyncio.run(elsewhere()))
        thread.start()
        await asyncio.to_thread(thread.join)
        assert len(seen) == 2
        assert all("another thread or event loop" in text and "dup(thread=True)" in text for text in seen)
        assert await coll.allreduce(3) == 3


async def test_c9_a_call_from_a_loop_callback_is_allowed() -> None:
    async with aiodist.init() as coll:
        handles = []
        asyncio.get_running_loop().call_soon(lambda: handles.append(coll.allreduce(torch.ones(2))))
        await asyncio.sleep(0)
        assert (await handles[0]).tolist() == [1.0, 1.0]


@pytest.mark.ranks(3)
async def test_h9_a_tensor_in_flight_is_not_written(coll: Communicator) -> None:
    t = torch.ones(6)
    first = coll.allreduce(t)
    line = str(first)
    for call in (
        lambda: coll.allreduce(t),
        lambda: coll.broadcast(t[2:4]),
        lambda: coll.send(t, 0),
        lambda: coll.allgather(t[:1]),
        lambda: coll.recv(t[5:], 0),
        lambda: coll.allreduce(torch.zeros(6), out=t),
    ):
        with pytest.raises(aiodist.BufferInFlight) as caught:
            call()
        assert line in str(caught.value)  # the earlier one, with the line that issued it
    await first
    assert (await coll.allreduce(t)).tolist() == [9.0] * 6


@pytest.mark.ranks(1, 2, backend=("local", "openmpi", "gloo", "shm"))
async def test_h9_a_list_of_receives_is_refused_whole(coll: Communicator) -> None:
    dst, src = (coll.rank + 1) % coll.size, (coll.rank - 1) % coll.size
    a, b, owned = torch.zeros(3), torch.zeros(3), torch.zeros(3)
    first = coll.recv(owned, src, tag=5)
    for several in ([a, a], [a, owned], [a, b[:2], b]):
        with pytest.raises(
            aiodist.BufferInFlight, match=r"recv of a list would (write memory|have the same memory twice)"
        ):
            coll.recv(several, src)
    with pytest.raises(ValueError, match="timeout=-1"):
        coll.recv([a, b], src, timeout=-1)
    assert coll.statistics().pending == 1
    await coll.barrier()
    sends = [coll.send([torch.ones(3), torch.full((3,), 2.0)], dst), coll.send(torch.ones(3), dst, tag=5)]
    assert [t.tolist() for t in await coll.recv([b, a], src, timeout=20)] == [[1.0] * 3, [2.0] * 3]
    assert (await first).tolist() == [1.0] * 3
    for send in sends:
        await send


@pytest.mark.ranks(1, 2, backend=("local", "openmpi", "gloo", "shm"))
async def test_h6_a_list_of_receives_is_withdrawn_whole_or_goes_on(coll: Communicator) -> None:
    dst, src = (coll.rank + 1) % coll.size, (coll.rank - 1) % coll.size
    ts = [torch.zeros(2) for _ in range(3)]
    withdrawn = coll.recv(ts, src)
    assert withdrawn.cancel()
    assert withdrawn.cancelled()
    assert not withdrawn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await withdrawn
    assert coll.statistics().pending == 0
    await coll.barrier()
    matched = coll.recv(ts, src)  # their memory is free again
    await coll.send(torch.ones(2), dst)
    while ts[0][1] == 0:  # noqa: ASYNC110  - an await of the handle would wait for all three
        await asyncio.sleep(0.001)
    assert not matched.cancel()
    await coll.send([torch.full((2,), 2.0), torch.full((2,), 3.0)], dst)
    assert [t.tolist() for t in await matched] == [[1.0] * 2, [2.0] * 2, [3.0] * 2]


@pytest.mark.ranks(2)
async def test_h9_reads_may_overlap_reads(coll: Communicator) -> None:
    t = torch.arange(4.0)
    both = [coll.allgather(t), coll.allgather(t[1:3]), coll.send(t, 1 - coll.rank)]
    with pytest.raises(aiodist.BufferInFlight, match=r"would write memory that allgather #0"):
        coll.allreduce(t)
    assert [x.tolist() for x in (await coll.recv(None, 1 - coll.rank),)] == [[0.0, 1.0, 2.0, 3.0]]
    await aiodist.gather(*both)
    await coll.allreduce(t)


@pytest.mark.ranks(2)
async def test_h9_it_holds_across_communicators_and_after_errors(coll: Communicator) -> None:
    other = await coll.dup()
    t = torch.ones(4)
    first = coll.allreduce(t)
    with pytest.raises(aiodist.BufferInFlight, match="allreduce"):
        other.allreduce(t)
    await first
    await other.allreduce(t)
    busy, out = torch.ones(4), torch.ones(4)
    second = other.allreduce(busy)
    if coll.rank == 0:  # on one rank alone, and only one of the claims clashes: all is as if nothing had been called
        for _ in range(3):
            with pytest.raises(aiodist.BufferInFlight):
                coll.alltoall([t, t], out=[out, busy])
    await coll.alltoall([t, t], out=[out, torch.ones(4)])
    assert out.tolist() == [4.0] * 4
    await second


@pytest.mark.ranks(1, 2)
async def test_c3_out_may_be_the_input_or_ones_own_block(coll: Communicator) -> None:
    t = torch.full((2,), float(coll.rank))
    assert (await coll.allreduce(t, out=t)) is t
    everything = torch.zeros(2 * coll.size)
    mine = everything[2 * coll.rank : 2 * coll.rank + 2]
    mine.fill_(coll.rank + 1)
    await coll.allgather(mine, out=everything)
    assert everything.tolist() == [r + 1.0 for r in range(coll.size) for _ in range(2)]


@pytest.mark.ranks(3)
async def test_c3_alltoall_in_place_and_allgather_from_elsewhere_in_out(coll: Communicator) -> None:
    ts = [torch.full((4,), 10.0 * coll.rank + r) for r in range(3)]
    assert all(a is b for a, b in zip(await coll.alltoall(ts, out=ts), ts, strict=True))
    assert [t.tolist() for t in ts] == [[10.0 * r + coll.rank] * 4 for r in range(3)]
    everything = torch.zeros(6)
    part = everything[1:3]  # the block of no rank
    part.fill_(coll.rank)
    await coll.allgather(part, out=everything)
    assert everything.tolist() == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]


@pytest.mark.ranks(2)
async def test_c3_out_grows_only_when_it_owns_its_memory(coll: Communicator) -> None:
    out = torch.empty(1, dtype=torch.int64)
    assert (await coll.allgather(torch.arange(3), out=out)) is out
    assert out.tolist() == [0, 1, 2, 0, 1, 2]
    view = torch.zeros(9, dtype=torch.int64)[:2]
    with pytest.raises(ValueError, match=r"room for 2 elements of 6 and cannot grow"):
        await coll.allgather(torch.arange(3), out=view)
    larger = torch.full((8,), -1)
    result = await coll.allgather(torch.arange(3), out=larger)
    assert result.tolist() == [0, 1, 2, 0, 1, 2]
    assert larger.tolist() == [0, 1, 2, 0, 1, 2, -1, -1]
    assert result.data_ptr() == larger.data_ptr()


@pytest.mark.ranks(2)
async def test_c3_growing_out_does_not_lend_its_old_memory_to_others(coll: Communicator) -> None:
    for _ in range(50):
        outs = [torch.empty(8) for _ in range(4)]
        handles = [coll.allgather(torch.ones(64), out=out) for out in outs]
        fresh = [torch.empty(8) for _ in range(8)]  # would get memory that an out has released
        handles += [coll.allreduce(t) for t in fresh]
        await aiodist.gather(*handles)


@pytest.mark.ranks(2)
async def test_c9_an_out_that_is_too_small_names_the_rank_that_sent_most(coll: Communicator) -> None:
    room, mine = torch.empty(20)[:12], torch.ones(4 + 5 * coll.rank)
    with pytest.raises(ValueError, match=r"room for 12 elements of 13 .*; rank 1 sent the most, 9"):
        await coll.allgather(mine, out=room)
    with pytest.raises(ValueError, match=r"room for 12 elements of 13 .*; rank 1 sent the most, 9"):
        await coll.alltoall_single(torch.ones(8 + 10 * coll.rank), sizes=[4 + 5 * coll.rank] * 2, out=room)


@pytest.mark.ranks(2)
async def test_c9_an_out_that_is_too_small_names_the_rank_that_sent_it(coll: Communicator) -> None:
    rows = [torch.ones(2), torch.ones(9)] if coll.rank == 0 else None
    with pytest.raises((ValueError, RemoteError), match=r"room for 3 elements of 9 .*; rank 0 sent 9"):
        await coll.scatter(rows, root=0, out=torch.empty(20)[:3])
    mine = [torch.ones(2), torch.ones(9 if coll.rank == 0 else 2)]
    outs = [torch.empty(20)[:3], torch.empty(20)[:3]]
    with pytest.raises((ValueError, RemoteError), match=r"room for 3 elements of 9 .*; rank 0 sent 9"):
        await coll.alltoall(mine, out=outs)
