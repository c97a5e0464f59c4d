"""C2 to C7, C11, C13: what the rows of tests/CONTRACT.md say, on the values that they name."""

import math
from itertools import chain
from pickle import PicklingError
from typing import Any

import numpy as np
import pytest
import torch

import aiodist
from aiodist import ANY, Communicator
from aiodist.types import Op

every = pytest.mark.ranks(1, 2, 3, 5, backend="local")
processes = pytest.mark.ranks(2, backend=("mpi", "mpich", "gloo"))


# --- C2: operators -------------------------------------------------------------------------------------------------


@every
@processes
@pytest.mark.parametrize("kind", [torch.int32, torch.int64, torch.float32, torch.float64])
async def test_c2_the_values_that_others_test_with(coll: Communicator, kind: torch.dtype) -> None:
    n, rank = coll.size, coll.rank
    op: Op
    for op, first, others, expected in (
        ("sum", 2, 10, 2 + 10 * (n - 1)),
        ("prod", 2, 10, 2 * 10 ** (n - 1)),
        ("min", 1010, 1, 1 if n > 1 else 1010),
        ("max", -1, 10, 10 if n > 1 else -1),
    ):
        t = torch.full((3, 2), first if rank == 0 else others, dtype=kind)
        await coll.allreduce(t, op)
        assert t.tolist() == [[expected] * 2] * 3


@every
async def test_c2_an_op_is_an_enum_or_its_name(coll: Communicator) -> None:
    assert await coll.allreduce(coll.rank, aiodist.ReduceOp.MAX) == coll.size - 1
    assert await coll.allreduce(coll.rank, "max") == coll.size - 1


@every
@processes
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
async def test_c2_halves_are_summed_in_float32_and_rounded_once(coll: Communicator, kind: torch.dtype) -> None:
    # One by one in 16 bits, none of these small ones would be seen.
    small = torch.finfo(kind).eps / 2
    t = torch.tensor([1.0 if coll.rank == 0 else small]).to(kind)
    await coll.allreduce(t)
    exact = 1.0 + (coll.size - 1) * small
    assert t.item() == torch.tensor(exact, dtype=torch.float32).to(kind).item()


@every
@processes
async def test_c2_integers_wrap(coll: Communicator) -> None:
    for kind in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        top = torch.iinfo(kind).max
        t = torch.full((70,), top, dtype=kind)
        await coll.allreduce(t)
        assert t.tolist() == [torch.full((coll.size,), top, dtype=kind).sum(dtype=kind).item()] * 70


# --- C3: in place and out ------------------------------------------------------------------------------------------


@every
@processes
async def test_c3_out_of_place_leaves_the_input_untouched(coll: Communicator) -> None:
    total = float(sum(range(coll.size)))
    t = torch.full((4,), float(coll.rank))
    out = torch.empty(4)
    assert (await coll.allreduce(t, out=out)) is out
    assert out.tolist() == [total] * 4
    await coll.scan(t, out=out)
    assert out.tolist() == [float(sum(range(coll.rank + 1)))] * 4
    result = await coll.reduce(t, root=coll.size - 1, out=out if coll.rank == coll.size - 1 else None)
    assert (result is not None) == (coll.rank == coll.size - 1)
    assert t.tolist() == [float(coll.rank)] * 4


@every
@processes
async def test_c3_in_place_returns_the_same_object(coll: Communicator) -> None:
    t = torch.full((4,), float(coll.rank))
    assert (await coll.allreduce(t)) is t
    assert (await coll.broadcast(t)) is t
    assert (await coll.scan(t)) is t
    parameter = torch.nn.Parameter(torch.ones(3))
    with torch.no_grad():
        assert (await coll.allreduce(parameter)) is parameter
    assert parameter.tolist() == [coll.size] * 3
    assert parameter.requires_grad
    assert parameter.grad_fn is None


# --- C4: numbers ---------------------------------------------------------------------------------------------------


@every
@processes
async def test_c4_a_number_in_a_number_out(coll: Communicator) -> None:
    n, rank = coll.size, coll.rank
    op: Op
    for given, op, expected in (
        (rank + 1, "sum", n * (n + 1) // 2),
        (rank + 1, "prod", math.factorial(n)),
        (rank + 0.5, "sum", sum(r + 0.5 for r in range(n))),
        (rank, "mean", (n - 1) / 2),
        ((1 << 62) + rank, "max", (1 << 62) + n - 1),
        (-(1 << 63), "min", -(1 << 63)),
        ((1 << 63) - 1 - rank, "sum", n * ((1 << 63) - 1) - n * (n - 1) // 2),  # beyond 64 bits
        (-(1 << 63) + rank, "sum", -n * (1 << 63) + n * (n - 1) // 2),
        (-(1 << 32) if rank else 1 << 30, "prod", (1 << 30) * (-(1 << 32)) ** (n - 1) if n < 3 else None),
        ((1 << 62) * (rank > 0), "prod", 0),
    ):
        if expected is None:
            continue
        seen = await coll.allreduce(given, op)
        assert seen == expected
        assert type(seen) is type(expected)
    assert await coll.scan(rank + 1) == (rank + 1) * (rank + 2) // 2
    assert await coll.broadcast(rank + 7.5, root=n - 1) == n + 6.5
    assert await coll.reduce(rank, root=n - 1) == (sum(range(n)) if rank == n - 1 else None)
    for kind, add in ((int, 1), (float, 0.5)):
        gathered = [r + add for r in range(n)]
        for seen in (await coll.allgather(rank + add), await coll.gather(rank + add, root=n - 1)):
            assert seen == gathered or (seen is None and rank != n - 1)
            assert all(type(number) is kind for number in seen or ())
    large = (1 << 63) - 1 - rank
    assert await coll.scan(large) == sum((1 << 63) - 1 - r for r in range(rank + 1))
    total = n * ((1 << 63) - 1) - n * (n - 1) // 2
    assert await coll.reduce(large, root=n - 1) == (total if rank == n - 1 else None)
    assert await coll.exscan(large) == (sum((1 << 63) - 1 - r for r in range(rank)) if rank else large)
    for call in (coll.allgather, coll.allreduce, coll.scan):
        with pytest.raises(ValueError, match="out= requires one tensor as t"):
            call(1.0, out=torch.empty(n))


@every
@processes
@pytest.mark.parametrize(
    "kind", [getattr(np, name) for name in ("float16", "float32", "float64", "longdouble", "int8", "int64", "uint64")]
)
async def test_c4_a_number_of_numpy_is_one_of_python(coll: Communicator, kind: Any) -> None:
    n, given = coll.size, kind(coll.rank + 1)
    to = int if issubclass(kind, np.integer) else float
    total = n * (n + 1) // 2
    for seen, expected in (
        (await coll.allreduce(given), total),
        (await coll.allreduce(given, "max"), n),
        (await coll.allreduce(given, "prod"), math.factorial(n)),
        (await coll.broadcast(given, root=n - 1), n),
        (await coll.scan(given), (coll.rank + 1) * (coll.rank + 2) // 2),
        (await coll.reduce(given, root=0), None if coll.rank else total),
    ):
        assert seen == expected
        assert seen is None or type(seen) is to
    assert type(await coll.allreduce(given, "mean")) is float
    if coll.rank:
        assert type(await coll.exscan(given)) is to
    else:
        await coll.exscan(given)
    for gathered in (await coll.allgather(given), await coll.gather(given)):
        assert gathered is None or [type(each) for each in gathered] == [to] * n
    assert await coll.allreduce(given if coll.rank else to(1)) == total  # meets a number of Python
    with pytest.raises(TypeError, match="bool"):
        coll.allreduce(np.True_)  # type: ignore[type-var]
    with pytest.raises(OverflowError, match="64 bits"):
        coll.allreduce(np.uint64(1 << 63))  # type: ignore[type-var]


@every
@processes
async def test_c4_a_product_that_does_not_fit_is_an_error_of_all_ranks(coll: Communicator) -> None:
    fits = coll.size == 1
    for call in (coll.allreduce, coll.scan, coll.reduce):
        given = (1 << 40) if coll.rank == 0 else -(1 << 40)
        told = call == coll.allreduce or (coll.rank == 0 if call == coll.reduce else coll.rank > 0)
        if fits or not told:
            assert await call(given, "prod") in (given, None)
        else:
            with pytest.raises(OverflowError, match=r"product, some .*e\+.*, does not fit into 64 bits"):
                await call(given, "prod")
    assert await coll.allreduce(2, "prod") == 1 << coll.size


@every
async def test_c4_what_is_no_number(coll: Communicator) -> None:
    with pytest.raises(TypeError, match="bool"):
        coll.allreduce(True)
    with pytest.raises(OverflowError, match="64 bits"):
        coll.allreduce(1 << 63)
    with pytest.raises(TypeError, match=r"str.*expected"):
        coll.allreduce("7")  # type: ignore[type-var]
    assert await coll.allreduce(1) == coll.size


# --- C5: different sizes -------------------------------------------------------------------------------------------


def ramp(rank: int, numel: int) -> Any:
    return torch.arange(numel) + 1000 * rank


@every
@processes
async def test_c5_sizes_differ_and_rank_order_is_kept(coll: Communicator) -> None:
    n, rank = coll.size, coll.rank
    sizes = [(3 * r + 2) % 5 for r in range(n)]  # none among them, not sorted
    t = ramp(rank, sizes[rank])
    expected = [ramp(r, sizes[r]).tolist() for r in range(n)]
    assert [x.tolist() for x in await coll.allgather(t)] == expected
    out = torch.empty(0, dtype=torch.int64)
    assert (await coll.allgather(t, out=out)) is out
    assert out.tolist() == list(chain(*expected))
    for root in range(n):
        parts = await coll.gather(t, root)
        assert (parts is None) if rank != root else ([x.tolist() for x in parts] == expected)
    received = await coll.alltoall([ramp(10 * rank + r, (rank + 2 * r) % 4) for r in range(n)])
    assert [x.tolist() for x in received] == [ramp(10 * r + rank, (r + 2 * rank) % 4).tolist() for r in range(n)]
    mine = await coll.scatter([ramp(r, r) for r in range(n)] if rank == n - 1 else None, root=n - 1)
    assert mine.tolist() == ramp(rank, rank).tolist()


# --- C6: objects ---------------------------------------------------------------------------------------------------


def payload(rank: int) -> Any:
    return {"str": f"rank {rank}", "rank": rank, "list": [rank] * (rank + 1)}


@every
@processes
async def test_c6_objects_by_every_road(coll: Communicator) -> None:
    n, rank = coll.size, coll.rank
    everybody = [payload(r) for r in range(n)]
    assert await coll.allgather_object(payload(rank)) == everybody
    for root in range(n):
        assert await coll.gather_object(payload(rank), root) == (everybody if rank == root else None)
        assert await coll.broadcast_object(payload(rank) if rank == root else None, root) == payload(root)
        assert await coll.scatter_object(everybody if rank == root else None, root) == payload(rank)
    assert await coll.alltoall_object([(rank, r) for r in range(n)]) == [(r, rank) for r in range(n)]
    sent = coll.send_object(payload(rank), (rank + 1) % n, tag=4)
    receive = coll.recv_object()
    assert await receive == payload((rank - 1) % n)
    assert (receive.source, receive.tag) == ((rank - 1) % n, 4)
    await sent


@pytest.mark.drawn(5)
@every
@processes
async def test_c6_sizes_jump_between_calls_and_ranks(coll: Communicator) -> None:
    n, rank = coll.size, coll.rank
    last = n - 1
    for size in (15, 40_000, 15, 0, 5_000_000, 1):
        for larger in (0, last):
            data = bytes(range(256)) * (size // 256 + 1)
            mine = data[:size] if rank == larger else b"\0x"
            assert await coll.broadcast_object(mine, larger) == data[:size]
            lengths = [len(x) for x in await coll.allgather_object(mine)]
            assert lengths == [size if r == larger else 2 for r in range(n)]
            gathered = await coll.gather_object(mine, last)
            assert gathered is None or [len(x) for x in gathered] == lengths


@every
@processes
async def test_c6_kinds_survive(coll: Communicator) -> None:
    given: Any = (
        (1, 2.5, 3 + 4j, None, True),
        {1, 2},
        frozenset("ab"),
        torch.arange(5, dtype=torch.int16),
        torch.ones(2, 3, dtype=torch.bfloat16),
        {"nested": [{"deep": (b"\x00\xff" * 300,)}]},
        "",
        b"",
        [],
    )
    for seen in await coll.allgather_object(given):
        assert seen[:3] == given[:3]
        assert torch.equal(seen[3], given[3])
        assert seen[3].dtype is torch.int16
        assert torch.equal(seen[4], given[4])
        assert seen[4].dtype is torch.bfloat16
        assert seen[5:] == given[5:]


@every
async def test_c6_an_object_is_pickled_at_the_call(coll: Communicator) -> None:
    mine: list[object] = [coll.rank]
    handle = coll.allgather_object(mine)
    mine.append("later")
    assert await handle == [[r] for r in range(coll.size)]
    with pytest.raises((AttributeError, TypeError, PicklingError), match=r"local object|pickle"):
        coll.allgather_object(lambda: None)
    assert await coll.allreduce(1) == coll.size


@every
async def test_c6_what_was_received_is_ones_own(coll: Communicator) -> None:
    array = torch.arange(4)
    first = await coll.broadcast_object(array)
    first += 1
    if coll.rank:
        assert array.tolist() == [0, 1, 2, 3]


# --- C7: coalesced -------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
@processes
async def test_c7_a_list_of_tensors_is_one_operation(coll: Communicator) -> None:
    first, second = ([1, 2], [3, 4]) if coll.rank == 0 else ([4, 3], [2, 1])
    ts = [torch.tensor(first), torch.tensor(second)]
    before = coll.seq
    assert (await coll.allreduce(ts)) is ts
    assert [t.tolist() for t in ts] == [[5, 5], [5, 5]]
    assert coll.seq == before + 1


@pytest.mark.ranks(2)
@processes
async def test_c7_each_stays_apart_or_across_combines_all(coll: Communicator) -> None:
    def given() -> Any:
        return [torch.tensor([3, 1 + coll.rank]), torch.tensor([1 - coll.rank, 3])]

    apart = await coll.allreduce(given())
    assert [t.tolist() for t in apart] == [[6, 3], [1, 6]]
    across = await coll.allreduce(given(), across=True)
    assert [t.tolist() for t in across] == [[7, 9]] * 2


@every
@processes
async def test_c7_lists_of_different_dtypes_and_sizes(coll: Communicator) -> None:
    n, rank = coll.size, coll.rank
    ts = [torch.full((3,), rank), torch.full((0,), 1.0), torch.full((2, 2), rank + 0.5)]
    await coll.allreduce(ts)
    assert [t.tolist() for t in ts] == [[sum(range(n))] * 3, [], [[sum(r + 0.5 for r in range(n))] * 2] * 2]
    ts = [torch.full((2,), rank), torch.full((1,), 10.0 * rank)]
    await coll.broadcast(ts, root=n - 1)
    assert [t.tolist() for t in ts] == [[n - 1] * 2, [10.0 * (n - 1)]]
    gathered = await coll.allgather([torch.tensor([rank]), torch.tensor([rank + 0.5])])
    assert [[t.item() for t in by_rank] for by_rank in gathered] == [list(range(n)), [r + 0.5 for r in range(n)]]
    parts = await coll.reduce_scatter([torch.ones(n, 2), torch.ones(2 * n)])
    assert [t.tolist() for t in parts] == [[[n, n]], [n, n]]
    reduced = await coll.reduce([torch.ones(2), torch.ones(3)], root=n - 1)
    assert (reduced is None) if rank != n - 1 else ([t.tolist() for t in reduced] == [[n] * 2, [n] * 3])
    both = await coll.scatter([[torch.tensor(r) for r in range(n)], [torch.tensor(-r) for r in range(n)]])
    assert [t.item() for t in both] == [rank, -rank]
    moved = await coll.alltoall([[torch.tensor(rank)] * n, [torch.tensor(-rank)] * n])
    assert [[t.item() for t in one] for one in moved] == [list(range(n)), [-r for r in range(n)]]
    assert await coll.allreduce([]) == []


@every
@processes
async def test_c7_allgather_across_is_one_flat_list(coll: Communicator) -> None:
    flat = await coll.allgather([torch.tensor([coll.rank, i]) for i in range(3)], across=True)
    assert [t.tolist() for t in flat] == [[rank, i] for rank in range(coll.size) for i in range(3)]


# --- C11: many in flight -------------------------------------------------------------------------------------------


@pytest.mark.drawn(1)
@every
@processes
async def test_c11_a_thousand_handles_on_several_communicators(coll: Communicator) -> None:
    n, rank = coll.size, coll.rank
    comms = [coll, await coll.dup(), await coll.dup()]
    handles: list[aiodist.Handle[Any]] = []
    expected: list[Any] = []
    for i in range(334):
        for k, comm in enumerate(comms):
            kind = (i + k) % 4
            if kind == 0:
                handles.append(comm.allreduce(torch.full((i % 7 + 1,), i + rank)))
                expected.append([n * i + sum(range(n))] * (i % 7 + 1))
            elif kind == 1:
                handles.append(comm.broadcast(torch.tensor([i * (rank + 1), k]), root=i % n))
                expected.append([i * (i % n + 1), k])
            elif kind == 2:
                handles.append(comm.allgather(torch.tensor([rank * 1000 + i])))
                expected.append([[r * 1000 + i] for r in range(n)])
            else:
                handles.append(comm.recv(None, (rank - 1) % n, i))
                expected.append([rank - 1 if rank else n - 1, i, k])
                handles.append(comm.send(torch.tensor([rank, i, k]), (rank + 1) % n, i))
                expected.append(None)
    assert len(handles) > 1000
    for seen, wanted in zip(await aiodist.gather(*handles), expected, strict=True):
        if isinstance(seen, list):
            seen = [t.tolist() for t in seen]
        assert (seen.tolist() if isinstance(seen, torch.Tensor) else seen) == wanted


@every
@processes
async def test_c11_ten_tensors_all_in_flight(coll: Communicator) -> None:
    ts = [torch.ones(1000, 16 * (i + 1)) for i in range(10)]
    await aiodist.gather(*[coll.allreduce(t) for t in ts])
    assert all(bool((t == coll.size).all()) for t in ts)


# --- C13 -----------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
@processes
async def test_c13_two_ranks(coll: Communicator) -> None:
    op: Op
    for op, expected in (("sum", [3.0, 5.0, 7.0]), ("mean", [1.5, 2.5, 3.5])):
        t = torch.tensor([1.0, 2.0, 3.0]) + coll.rank
        assert (await coll.allreduce(t, op)).tolist() == expected


@pytest.mark.ranks(2, backend=("local", "mpi", "mpich", "gloo"))
async def test_c13_gathered_and_broadcast(coll: Communicator) -> None:
    t = torch.tensor([99.0 if coll.rank == 0 else 0.0])
    assert (await coll.broadcast(t)).tolist() == [99.0]
    gathered = await coll.allgather(torch.ones(3) * coll.rank, out=torch.empty(0))
    assert gathered.tolist() == [0.0] * 3 + [1.0] * 3


# --- the fine print of messages ------------------------------------------------------------------------------------


@every
@processes
async def test_c1_a_shorter_message_fills_the_front(coll: Communicator) -> None:
    n, rank = coll.size, coll.rank
    for numel in (3, 5000):
        into = torch.full((numel + 4,), -1.0)
        receive = coll.recv(into, (rank - 1) % n)
        await coll.send(torch.full((numel,), float(rank)), (rank + 1) % n)
        assert (await receive) is into
        assert receive.nbytes == 4 * numel
        assert into.tolist() == [float((rank - 1) % n)] * numel + [-1.0] * 4


@every
@processes
async def test_c1_a_longer_message_is_an_error_and_is_consumed(coll: Communicator) -> None:
    n, rank = coll.size, coll.rank
    for numel in (4, 5000):
        receive = coll.recv(torch.empty(2), (rank - 1) % n)
        sends = [coll.send(torch.ones(numel), (rank + 1) % n), coll.send(torch.full((2,), 7.0), (rank + 1) % n)]
        with pytest.raises(aiodist.BackendError, match=rf"float32\[{numel}\].*longer"):
            await receive
        assert (await coll.recv(torch.empty(2), (rank - 1) % n)).tolist() == [7.0, 7.0]
        await aiodist.gather(*sends)


@every
@processes
async def test_c1_dtypes_of_a_message_must_agree(coll: Communicator) -> None:
    n, rank = coll.size, coll.rank
    receive = coll.recv(torch.empty(2), (rank - 1) % n)
    sent = coll.send(torch.ones(2, dtype=torch.int32), (rank + 1) % n)
    with pytest.raises(TypeError, match=r"int32.*float32"):
        await receive
    await sent
    assert await coll.allreduce(1) == n


@every
@processes
async def test_c1_a_receive_without_a_tensor_makes_one(coll: Communicator) -> None:
    n, rank = coll.size, coll.rank
    for t in (torch.ones(2, 3, dtype=torch.bfloat16), torch.tensor(5), torch.empty(0, 4), torch.ones(70, 70)):
        sent = coll.send(t, (rank + 1) % n, tag=9)
        receive = coll.recv()
        seen = await receive
        assert (seen.dtype, seen.shape, receive.source, receive.tag) == (t.dtype, t.shape, (rank - 1) % n, 9)
        assert torch.equal(seen, t)
        await sent
        await coll.barrier()


@every
@processes
async def test_c1_messages_match_by_source_and_tag_in_issue_order(coll: Communicator) -> None:
    n, rank = coll.size, coll.rank
    after, before = (rank + 1) % n, (rank - 1) % n
    sends = [coll.send(torch.tensor([i]), after, tag=i % 2) for i in range(6)]
    odd = [await coll.recv(None, before, 1) for _ in range(3)]
    even = [coll.recv(None, before, 0) for _ in range(2)]
    rest = coll.recv(None, before, ANY)
    assert [t.item() for t in odd] == [1, 3, 5]
    assert [(await h).item() for h in even] == [0, 2]
    assert (await rest).item() == 4
    await aiodist.gather(*sends)


@every
@processes
async def test_c1_tensors_and_objects_never_match(coll: Communicator) -> None:
    n, rank = coll.size, coll.rank
    after, before = (rank + 1) % n, (rank - 1) % n
    sends = [coll.send_object("object", after), coll.send(torch.tensor(3), after)]
    assert (await coll.recv(None, before)).item() == 3
    assert await coll.recv_object(before) == "object"
    await aiodist.gather(*sends)


@every
@processes
async def test_c1_a_send_to_oneself_returns_at_once(coll: Communicator) -> None:
    big = torch.arange(300_000)
    sent = coll.send(big, coll.rank)
    await sent
    big.zero_()
    assert torch.equal(await coll.recv(None, coll.rank), torch.arange(300_000))
    t = torch.tensor([coll.rank])
    assert (await coll.sendrecv(t, coll.rank, coll.rank)).item() == coll.rank


@every
@processes
async def test_c1_lists_of_messages(coll: Communicator) -> None:
    n, rank = coll.size, coll.rank
    into = [torch.empty(2), torch.empty(3)]
    receive = coll.recv(into, (rank - 1) % n)
    await coll.send([torch.full((2,), 1.0), torch.full((3,), 2.0)], (rank + 1) % n)
    assert [t.tolist() for t in await receive] == [[1.0] * 2, [2.0] * 3]


@every
@processes
async def test_c1_a_receive_that_nothing_matched_can_be_withdrawn(coll: Communicator) -> None:
    n, rank = coll.size, coll.rank
    into = torch.full((2,), -1.0)
    receive = coll.recv(into, (rank - 1) % n, tag=1)
    assert receive.cancel()
    assert receive.cancelled()
    await coll.barrier()
    sent = coll.send(torch.ones(2), (rank + 1) % n, tag=1)
    assert (await coll.recv(None, (rank - 1) % n, tag=1)).tolist() == [1.0, 1.0]  # no message was lost
    assert into.tolist() == [-1.0, -1.0]
    await sent


@pytest.mark.ranks(1, 2, 3, backend="local")
@processes
async def test_c1_broadcast_counts_elements_only(coll: Communicator) -> None:
    t = torch.arange(6.0).view(2, 3) if coll.rank == 0 else torch.zeros(3, 2)
    await coll.broadcast(t)
    assert t.shape == ((2, 3) if coll.rank == 0 else (3, 2))
    assert t.view(-1).tolist() == [0, 1, 2, 3, 4, 5]


@every
async def test_c1_slices_of_one_tensor_are_in_flight_together(coll: Communicator) -> None:
    t = torch.full((5, 4), float(coll.rank))
    await aiodist.gather(*[coll.allreduce(row) for row in t])
    assert t.tolist() == [[sum(range(coll.size))] * 4] * 5


@every
async def test_c1_several_root_broadcasts_and_barriers(coll: Communicator) -> None:
    for root in range(coll.size):
        assert await coll.broadcast(torch.tensor([coll.rank]), root) == root
        await coll.barrier()


@pytest.mark.ranks(1, 2, 3, backend="local")
@processes
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
async def test_c1_tensors_of_inference_mode(coll: Communicator, kind: torch.dtype) -> None:
    """An evaluation runs in inference mode, and the thread that resumes its operations does not."""
    size = coll.size
    with torch.inference_mode():
        t, out = torch.full((3,), coll.rank + 1.0, dtype=kind), torch.zeros(3, dtype=kind)
        assert await coll.allreduce(coll.rank + 1.0, "mean") == (size + 1) / 2
        assert (await coll.allreduce(t, out=out)).tolist() == [size * (size + 1) / 2] * 3
        assert (await coll.allreduce(t.clone(), "max")).tolist() == [size] * 3
        assert (await coll.scan(t.clone())).tolist() == [(coll.rank + 1) * (coll.rank + 2) / 2] * 3
        assert (await coll.broadcast(t.clone(), root=size - 1)).tolist() == [size] * 3
        assert torch.cat(await coll.allgather(t)).tolist() == [float(r + 1) for r in range(size) for _ in range(3)]
        sent = coll.send(t, (coll.rank + 1) % size)
        assert (await coll.recv(out, (coll.rank - 1) % size)).tolist() == [(coll.rank - 1) % size + 1] * 3
        await sent
        assert (await coll.reduce_scatter(torch.ones(size, dtype=kind))).tolist() == [size]
    assert not out.requires_grad
