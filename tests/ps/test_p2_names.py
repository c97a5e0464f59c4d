"""P2: names: their fillers, ranks that disagree or never come, freeing, and invalid names."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aiodist
from aiodist import Communicator, MismatchError
from aiodist.codecs import Half
from aiodist.ps import Asynchronous, ParameterServer, Policy, Synchronous


def full(value: float, *shape: int) -> Tensor:
    return torch.full(shape or (5,), float(value))


LAYOUTS: dict[str, dict[str, Any]] = {"shared": {}, "cut": {"split_bytes": 1}, "apart": {"servers": 1}}


# --- who disagrees -----------------------------------------------------------------------------------------------


@pytest.mark.ranks(4)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("odd", "said"),
    [
        ({"values": full(1, 6)}, r"shape \[5\].*shape \[6\]|shape \[6\].*shape \[5\]"),
        ({"values": full(1).double()}, "dtype"),
        ({"rule": "mul"}, "rule"),
        ({"start": "first"}, "start"),
    ],
    ids=["shape", "dtype", "rule", "start"],
)
@pytest.mark.parametrize("who", [1, 2])
async def test_p2_those_who_agree_on_a_name_use_it(
    coll: Communicator, layout: str, odd: dict[str, Any], said: str, who: int
) -> None:
    """Rank `who` comes last, and its error has both sides."""
    async with ParameterServer(coll, **LAYOUTS[layout]) as ps:
        if not ps.is_worker:
            return
        mine: dict[str, Any] = {"values": full(coll.rank + 1)}
        if coll.rank == who:
            await asyncio.sleep(5.0)
            with pytest.raises(MismatchError, match=said) as caught:
                await ps.init("w", **(mine | odd))
            assert f"rank {who}" in str(caught.value)
            with pytest.raises(KeyError, match="unknown name 'w'"):
                ps.push("w", full(1))
        else:
            async with asyncio.timeout(60):
                await ps.init("w", **mine)
            await ps.pull("w")
            assert torch.equal(mine["values"], full(1)), "the first worker's"
        await ps.barrier()
        if coll.rank != who:
            await ps.push("w", full(1))
            await ps.free("w")
        await ps.barrier()
        async with asyncio.timeout(60):
            await ps.init("w", torch.arange(3))  # removed, since no other rank had it
        await ps.barrier()


@pytest.mark.ranks(3)
async def test_p2_one_bad_name_of_a_list_leaves_the_others(coll: Communicator) -> None:
    async with ParameterServer(coll) as ps:
        values = [full(1), full(2, 4 + (coll.rank == 2)), full(3)]
        if coll.rank == 2:
            await asyncio.sleep(1.0)
            with pytest.raises(MismatchError, match="'b'"):
                await ps.init(["a", "b", "c"], values)
        else:
            await ps.init(["a", "b", "c"], values)
        assert set(ps.names) == (set("ac") if coll.rank == 2 else set("abc"))
        await ps.push(["a", "c"], [full(1), full(1)])
        await ps.barrier()
        assert [float(t[0]) for t in await ps.pull(["a", "c"])] == [1 + 3, 3 + 3]


# --- who never comes ---------------------------------------------------------------------------------------------


@pytest.mark.ranks(3)
@pytest.mark.parametrize("start", ["root", "first"])
async def test_p2_a_name_that_no_worker_ever_fills_is_an_error_for_a_reader(coll: Communicator, start: Any) -> None:
    async with ParameterServer(coll, servers=1, workers=[0]) as ps:
        if coll.rank == 1:
            async with asyncio.timeout(60):
                with pytest.raises(MismatchError, match=r"'w'.*no rank will"):
                    await ps.init("w", full(1), start=start)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("when", ["before", "after"])
async def test_p2_a_server_that_never_gives_its_own_block_is_an_error(coll: Communicator, when: str) -> None:
    async with ParameterServer(coll, servers=1) as ps:
        if ps.is_worker:
            await asyncio.sleep(5.0 if when == "after" else 0.0)
            async with asyncio.timeout(60):
                with pytest.raises(MismatchError, match=r"'w'.*no rank will"):
                    await ps.init("w", full(1), start="own")
            await ps.init("v", full(1))
            await ps.push("v", full(1))
        elif when == "before":
            await asyncio.sleep(5.0)


@pytest.mark.drawn(1)
@pytest.mark.ranks(3)
@pytest.mark.ranks(3, backend="gloo")
@pytest.mark.parametrize("late", [0, 2])
async def test_p2_a_late_init_after_a_mismatch_gets_its_error(coll: Communicator, late: int) -> None:
    """Rank 0, the only server, gives another shape; the last rank gets the error of the others."""
    async with ParameterServer(coll, servers=[0], workers=[0, 1, 2], start="own", timeout=20.0) as ps:
        for rank in (*(rank for rank in (1, 0, 2) if rank != late), late):
            if rank == coll.rank:
                handle = ps.init("w", full(1, 4 if rank == 0 else 3))
            await coll.barrier()
            await ps.barrier()
        with pytest.raises(MismatchError, match=r"shape \[3\].*shape \[4\]|shape \[4\].*shape \[3\]") as told:
            await handle
        assert "'w'" in str(told.value)
        with pytest.raises(MismatchError, match=r"shape \[3\].*shape \[4\]|shape \[4\].*shape \[3\]"):
            await ps.init("w", full(1, 3))  # the name stays of no use
        w = full(1, 3)
        await ps.init("v", w)
        await ps.push("v", full(1, 3))
        await ps.barrier()
        assert torch.equal(await ps.pull("v"), full(4, 3))


@pytest.mark.ranks(3)
async def test_p2_a_late_reader_after_a_mismatch_gets_its_error(coll: Communicator) -> None:
    """The only worker was refused, so no rank gives first values; the second reader comes long after that."""
    async with ParameterServer(coll, servers=[2], workers=[0]) as ps:
        await asyncio.sleep([5.0, 0.0, 10.0][coll.rank])
        async with asyncio.timeout(60):
            with pytest.raises(MismatchError, match=r"rank 0: shape \[4\]; rank 1: shape \[5\]"):
                await ps.init("w", full(1, 4 if coll.rank == 0 else 5))
        await coll.barrier()


@pytest.mark.ranks(2)
async def test_p2_calls_after_a_push_in_its_encoder_end_with_the_server(coll: Communicator) -> None:
    """They have not begun when the parameter server is aborted."""
    handles: list[Any] = []
    with pytest.raises((RuntimeError, aiodist.CommunicatorAborted)):  # noqa: PT012
        async with ParameterServer(coll, {"w": full(0, 1 << 20)}, servers=[1], workers=[0, 1], codec=Half()) as ps:
            if coll.rank == 0:
                handles += [ps.push("w", full(1, 1 << 20)), ps.sync(), ps.barrier(), ps.init("v", full(1))]
                raise RuntimeError("given up")
            await ps.barrier()
    for handle in handles:
        async with asyncio.timeout(50):
            with pytest.raises(aiodist.CommunicatorAborted):
                await handle


# --- freeing -----------------------------------------------------------------------------------------------------


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("layout", ["shared", "cut"])
async def test_p2_a_freed_name_can_be_used_again_with_another_shape(coll: Communicator, layout: str) -> None:
    async with ParameterServer(coll, {"w": full(0)}, **LAYOUTS[layout]) as ps:
        for round_ in range(1, 5):
            await ps.push("w", torch.ones_like(await ps.pull("w")))
            await ps.free("w")
            with pytest.raises(KeyError, match="unknown name 'w'"):
                ps.push("w", full(1))
            with pytest.raises(KeyError, match="unknown name 'w'"):
                ps.free("w")
            fresh = torch.zeros(round_, 2, dtype=torch.float64)
            await ps.init("w", fresh)
            assert torch.equal(await ps.pull("w"), fresh)
            await ps.barrier()
            await ps.push("w", torch.ones_like(fresh))
            await ps.barrier()
            assert torch.equal(await ps.pull("w"), torch.full_like(fresh, coll.size))
            await ps.barrier()
        assert ps.names == ("w",)


@pytest.mark.ranks(3)
async def test_p2_what_only_some_have_freed_the_others_still_use(coll: Communicator) -> None:
    async with ParameterServer(coll, {"w": full(0)}, split_bytes=1) as ps:
        if coll.rank == 0:
            await ps.push("w", full(1))
            await ps.free("w")
            again = ps.init("w", full(0, 2))
        await ps.barrier()
        if coll.rank != 0:
            await ps.push("w", full(1))
            await ps.barrier()
            assert torch.equal(await ps.pull("w"), full(3))
            await ps.barrier()
            await ps.free("w")
        else:
            assert not again.done(), "the others have not freed it"
            await ps.barrier()
            await ps.barrier()
            await again
            assert torch.equal(await ps.pull("w"), full(0, 2))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("layout", ["shared", "cut"])
@pytest.mark.parametrize("policy", [Synchronous("sum"), Asynchronous()], ids=repr)
async def test_p2_who_has_freed_a_name_holds_up_nobody_who_pushes(
    coll: Communicator, layout: str, policy: Policy
) -> None:
    async with ParameterServer(coll, {"w": full(0)}, consistency=policy, **LAYOUTS[layout]) as ps:
        async with asyncio.timeout(60):
            if coll.rank == 0:
                await ps.push("w", full(1))
                assert torch.equal(await ps.pull("w"), full(1))
            await ps.free("w")
            await ps.init("w", full(2))
        assert torch.equal(await ps.pull("w"), full(2))


@pytest.mark.ranks(3)
async def test_p2_a_reader_that_frees_late_frees_nothing_newer(coll: Communicator) -> None:
    async with ParameterServer(coll, {"w": full(0)}, servers=1, workers=[0]) as ps:
        if coll.rank == 0:
            await ps.free("w")
            await ps.init("w", full(1))
        await coll.barrier()
        if coll.rank == 1:
            async with asyncio.timeout(60):
                with pytest.raises(KeyError, match="freed"):
                    await ps.pull("w", full(0))
                await ps.free("w")
                await ps.init("w", full(0))
            assert torch.equal(await ps.pull("w"), full(1))
        await coll.barrier()


@pytest.mark.ranks(2)
async def test_p2_free_waits_for_what_is_in_flight(coll: Communicator) -> None:
    w = torch.zeros(50_000)
    async with ParameterServer(coll, {"w": w}, split_bytes=1) as ps:
        pushed = ps.push("w", torch.ones(50_000))
        pulled = ps.pull("w")
        freed = ps.free("w")
        await freed
        assert pushed.done()
        assert pulled.done()
        await aiodist.gather(pushed, pulled)
    assert float(w[0]) in (1, 2)


# --- what is no name, or no new one --------------------------------------------------------------------------------


@pytest.mark.ranks(2)
async def test_p2_a_name_is_there_once(coll: Communicator) -> None:
    async with ParameterServer(coll, {"w": full(0)}) as ps:
        with pytest.raises(KeyError, match="'w' is a name already"):
            ps.init("w", full(0))
        with pytest.raises((KeyError, ValueError), match="'a'"):
            ps.init(["a", "a"], [full(0), full(1)])
        pending = ps.init("b", full(0))
        with pytest.raises(KeyError, match="'b'"):
            ps.init("b", full(1))
        await pending
        await ps.init("a", full(0))
        freed = ps.free("a")
        if not freed.done():  # as it is on the rank that leads it
            with pytest.raises(KeyError, match="free of 'a' is in flight"):
                ps.init("a", full(0))
        await freed
        await ps.init("a", full(0))
        assert set(ps.names) == {"w", "b", "a"}


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("expected", "said", "arguments"),
    [
        (TypeError, "name ''", ("", torch.ones(1))),
        (TypeError, "names", (3, torch.ones(1))),
        (TypeError, "expected a value", ("x",)),
        (TypeError, "values is object", (["x"],)),
        (TypeError, "values", (["x"], 3)),
        (ValueError, "1 values for 2 names", (["x", "y"], [torch.ones(1)])),
        (TypeError, "torch.Tensor", ("x", [1.0])),
        (ValueError, "contiguous", ("x", torch.ones(4)[::2])),
        (ValueError, "conj", ("x", torch.ones(4, dtype=torch.complex64).conj())),
        (TypeError, "uint16", ("x", torch.ones(4).to(torch.uint16))),
        (ValueError, "sparse", ("x", torch.ones(4).to_sparse())),
        (ValueError, "meta", ("x", torch.ones(4, device="meta"))),
    ],
    ids=str,
)
async def test_p2_bad_names_and_values(
    coll: Communicator, expected: type[Exception], said: str, arguments: tuple[Any, ...]
) -> None:
    async with ParameterServer(coll) as ps:
        with pytest.raises(expected, match=said):
            ps.init(*arguments)
        assert ps.names == ()
        await ps.init("x", torch.ones(2))


@pytest.mark.ranks(2)
async def test_p2_what_a_call_may_mean(coll: Communicator) -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    other = full(0)
    async with ParameterServer(coll, net) as ps:
        assert set(ps.names) == {name for name, _ in net.named_parameters()}
        await ps.init("other", other)
        weight = net[0].weight
        assert len(await ps.pull()) == 4
        assert await ps.pull("0.weight") is weight
        assert await ps.pull(weight) is weight
        assert await ps.pull([weight, "other"]) == [weight, other]
        assert await ps.pull(net[1]) == [net[1].weight, net[1].bias]
        assert await ps.pull(p for p in net.parameters()) == list(net.parameters())
        assert await ps.pull([]) == []
        await ps.push([])
        for what, expected in [
            ("nobody", KeyError),
            (full(0), ValueError),
            (nn.Linear(2, 2), ValueError),
            (3, TypeError),
            ([net], TypeError),
            ([None], TypeError),
            ([["other"]], TypeError),
            ([[]], TypeError),
            (["other", 3], TypeError),
        ]:
            for call in (ps.push, ps.pull, ps.push_pull, ps.prefetch, ps.free):
                with pytest.raises(expected):
                    call(what)
        assert len(ps.names) == 5


@pytest.mark.ranks(2)
async def test_p2_one_tensor_under_two_names(coll: Communicator) -> None:
    w = full(coll.rank)
    async with ParameterServer(coll) as ps:
        await ps.init("a", w)
        await ps.init("b", w)
        await ps.free("b")
        await ps.push("a", full(1))
        assert await ps.pull("a") is w
        assert await ps.pull(w) is w, "it has a name yet"
