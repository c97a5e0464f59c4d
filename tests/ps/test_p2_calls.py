"""P2: every call and its handle: what it takes and returns, what it owns, what it raises and when."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aiodist
from aiodist import BufferInFlight, Communicator, CommunicatorClosed, Handle, MismatchError, OperationTimeout
from aiodist.ps import SGD, ParameterServer, Synchronous
from aiodist.testing import run_ranks


def full(value: float, n: int = 5) -> Tensor:
    return torch.full((n,), float(value))


def no_change(mine: Tensor, theirs: Tensor) -> None:
    mine.copy_(theirs)


CALLS: dict[str, Callable[[ParameterServer], Any]] = {
    "init": lambda ps: ps.init("new", full(0)),
    "embedding": lambda ps: ps.embedding("rows", 3),
    "push": lambda ps: ps.push("w", full(1)),
    "pull": lambda ps: ps.pull("w"),
    "push_pull": lambda ps: ps.push_pull("w", full(1)),
    "prefetch": lambda ps: ps.prefetch("w"),
    "integrate": lambda ps: ps.integrate(no_change, "w"),
    "configure": lambda ps: ps.configure("w", lr=0.1),
    "sync": lambda ps: ps.sync(),
    "barrier": lambda ps: ps.barrier(),
    "save": lambda ps: ps.save(FOLDERS[ps.rank]),
    "load": lambda ps: ps.load(FOLDERS[ps.rank]),
    "free": lambda ps: ps.free("w"),
}

FOLDERS: dict[int, Path] = {}
LOCAL = {"statistics", "pushing", "rebind"}
"""`pushing` is a block, `rebind` is awaited as one is entered; the rest say nothing to other ranks."""


@pytest.mark.drawn(2)
@pytest.mark.ranks(1, 3)
@pytest.mark.ranks(2, backend=("mpi", "gloo", "shm"))
async def test_h1_every_communicating_method_of_a_parameter_server_returns_a_handle(
    coll: Communicator, tmp_path: Path
) -> None:
    FOLDERS[coll.rank] = tmp_path / str(coll.rank)
    methods = {
        name
        for name in dir(ParameterServer)
        if not name.startswith("_") and not isinstance(getattr(ParameterServer, name), property)
    }
    assert methods - LOCAL == set(CALLS)
    async with ParameterServer(coll, {"w": full(0)}, rule=SGD(lr=1.0)) as ps:
        for name, call in CALLS.items():
            handle = call(ps)
            assert isinstance(handle, Handle), name
            assert handle.op == name
            assert handle.nbytes >= 0
            assert __file__ in str(handle), name
            await handle
            assert handle.done()


@pytest.mark.ranks(2)
async def test_p2_what_a_push_sends_by_default(coll: Communicator) -> None:
    net = nn.Linear(2, 1)
    with torch.no_grad():
        for p in net.parameters():
            p.fill_(4.0)
    async with ParameterServer(coll, net, rules={"sgd": SGD(lr=0.5)}) as ps:
        await coll.barrier()
        with pytest.raises(ValueError, match=r"no \.grad"):
            ps.push(rule="sgd")
        await ps.push(net)  # add: the values of the tensors
        await ps.barrier()
        await ps.pull()
        assert net.weight.tolist() == [[12.0, 12.0]]
        await ps.barrier()
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        await ps.push(net, rule="sgd")
        await ps.barrier()
        await ps.pull(net)
        assert net.bias.tolist() == [11.0]


KINDS = (torch.float32, torch.float64, torch.bfloat16, torch.bool, torch.uint8, torch.int64, torch.complex64)


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (7,), (2, 3, 5), (1, 1, 1, 1, 1, 1, 2), (1021,)])
async def test_p2_small_tensors_of_any_form_arrive(coll: Communicator, shape: tuple[int, ...]) -> None:
    zeros = {str(kind): torch.zeros(shape, dtype=kind) for kind in KINDS}
    async with ParameterServer(coll, zeros, rule="copy", servers=[coll.size - 1], workers=[*range(coll.size)]) as ps:
        if coll.rank == 0:
            made = torch.Generator().manual_seed(len(shape))
            for kind in KINDS:
                values = torch.randint(0, 100, shape, generator=made).to(kind)
                parameter = nn.Parameter(values, requires_grad=False)
                for given in (values, parameter, torch.stack([values, values.logical_not().to(kind)])[1]):
                    await ps.push(str(kind), given)
                    pulled = await ps.pull(str(kind), torch.zeros(shape, dtype=kind))
                    assert torch.equal(pulled, given)


@pytest.mark.ranks(2)
async def test_p2_views_that_are_no_memory_of_their_values_are_refused(coll: Communicator) -> None:
    given = {"vector": torch.zeros(4), "scalar": torch.zeros(()), "complex": torch.zeros(4, dtype=torch.complex64)}
    async with ParameterServer(coll, given, rule="copy", servers=1, workers=[0, 1]) as ps:
        lazy = torch.full((4,), 1 + 2j, dtype=torch.complex64).conj()
        shrunk = torch.ones(4)
        shrunk.untyped_storage().resize_(8)
        calls: list[tuple[type[Exception], str, object]] = [
            (ValueError, "complex", lazy),
            (ValueError, "scalar", lazy[0].imag),
            (ValueError, "vector", lazy.imag),
            (ValueError, "vector", torch.ones(8)[::2]),
            (ValueError, "vector", torch.ones(1).expand(4)),
            (ValueError, "vector", torch.ones(2, 2)),
            (ValueError, "vector", shrunk),
            (TypeError, "vector", torch.ones(4, dtype=torch.int32)),
            (TypeError, "vector", [1.0] * 4),
        ]
        for error, name, value in calls:
            with pytest.raises(error):
                ps.push(name, value)
        await ps.push("vector", torch.ones(4))
        assert (await ps.pull("vector", torch.zeros(4))).tolist() == [1.0] * 4


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("split", [1, 1 << 20])
async def test_p2_prefetch_and_integrate(coll: Communicator, split: int) -> None:
    w, v = full(1), full(1)
    seen: list[tuple[float, float]] = []

    def elastic(mine: Tensor, theirs: Tensor) -> None:
        seen.append((float(mine[0]), float(theirs[0])))
        mine.sub_(mine - theirs, alpha=0.5)

    async with ParameterServer(coll, {"w": w, "v": v}, split_bytes=split) as ps:
        await coll.barrier()
        theirs = await ps.prefetch("w")
        assert theirs is not w
        await coll.barrier()
        await ps.push(["w", "v"], [full(2), full(2)])
        await ps.barrier()
        assert await ps.integrate(elastic, "w") is w  # with the prefetched values
        after = 1.0 + 2 * coll.size
        handle = ps.integrate(elastic, ["w", "v"])  # with pulled values
        assert await handle == [w, v]
        assert handle.version == coll.size
        assert seen == [(1, 1), (1, after), (1, after)]
        assert w.tolist() == [(1 + after) / 2] * 5

        def fails(mine: Tensor, theirs: Tensor) -> None:
            raise ZeroDivisionError("mine")

        with pytest.raises(ZeroDivisionError, match="mine"):
            await ps.integrate(fails)
        with pytest.raises((KeyError, ValueError), match="'w'"):
            ps.integrate(elastic, ["w", "w"])
        await ps.integrate(elastic)


@pytest.mark.ranks(2)
async def test_p2_statistics_are_a_copy_and_handles_have_versions(coll: Communicator) -> None:
    async with ParameterServer(coll, {"w": full(0)}, split_bytes=1) as ps:
        before = ps.statistics()
        await ps.push("w", full(1))
        assert (before.pushes, ps.statistics().pushes) == (0, 1)
        ps.statistics().staleness[99] += 1
        assert 99 not in ps.statistics().staleness
        await ps.barrier()
        pulled = ps.pull("w")
        assert pulled.version is None
        await pulled
        assert pulled.version == 2
    assert ps.statistics().pushes == 1


@pytest.mark.ranks(2)
async def test_p2_a_push_from_a_backward_hook(coll: Communicator) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    handles: list[Handle[None]] = []
    async with ParameterServer(coll, net, rule=SGD(lr=1.0)) as ps:
        await coll.barrier()
        old = [p.detach().clone() for p in net.parameters()]
        for p in net.parameters():
            p.register_post_accumulate_grad_hook(lambda p: handles.append(ps.push(p)))
        net(torch.ones(3, 2)).sum().backward()
        assert len(handles) == 4
        await aiodist.gather(*handles)
        await ps.barrier()
        await ps.pull(net)
        for p, before in zip(net.parameters(), old, strict=True):
            assert p.grad is not None
            torch.testing.assert_close(p.detach(), before - 2 * p.grad)


# --- nothing lost, nothing doubled -------------------------------------------------------------------------------


@pytest.mark.drawn(1)
@pytest.mark.ranks(3)
@pytest.mark.parametrize("split", [1, 1 << 20])
async def test_p2_after_a_push_and_a_barrier_every_pull_sees_it(coll: Communicator, split: int) -> None:
    async with ParameterServer(coll, {"w": full(0)}, split_bytes=split) as ps:
        for i in range(1, 101):
            await ps.push("w", full(1))
            await ps.barrier()
            assert (await ps.pull("w")).tolist() == [3.0 * i] * 5
            await ps.barrier()


@pytest.mark.drawn(1)
@pytest.mark.parametrize("seed", range(6))
def test_p2_no_push_is_lost_or_doubled(seed: int) -> None:
    """Sizes for entries, messages and the arena, in an order that a seed draws; some awaited, some not."""
    sizes = [1, 40, 9000, 70_000]

    async def main(rank: int) -> None:
        dice = random.Random(1000 * seed + rank)
        async with aiodist.init() as coll:
            tensors = [torch.zeros(n, dtype=torch.int64) for n in sizes]
            async with ParameterServer(coll, tensors, split_bytes=1 << 10) as ps:
                mine = torch.zeros(len(sizes), dtype=torch.int64)
                for _ in range(40):
                    i, amount = dice.randrange(len(sizes)), dice.randrange(1, 9)
                    arena = dice.random() < 0.5
                    value = (coll.arena_empty if arena else torch.empty)(sizes[i], dtype=torch.int64)
                    handle = ps.push(str(i), value.fill_(amount))
                    if value.nbytes < 1000:
                        value.fill_(-(10**9))  # small ones are the caller's at once
                    mine[i] += amount
                    if dice.random() < 0.3:
                        await handle
                    if dice.random() < 0.2:
                        await ps.pull(str(i), torch.empty_like(tensors[i]))
                await ps.sync()
                await coll.allreduce(mine)
                for i, t in enumerate(await ps.pull()):
                    assert torch.equal(t, torch.full_like(t, int(mine[i])))

    run_ranks(3, main, seed)


# --- who owns the memory -----------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
async def test_p2_the_buffer_of_a_pending_push_is_its_own(coll: Communicator) -> None:
    big = torch.ones(100_000)
    w = torch.zeros(100_000)
    async with ParameterServer(coll, {"w": w}, consistency=Synchronous("sum")) as ps:
        await coll.barrier()
        pulled = None
        if coll.rank == 0:
            await ps.push("w", torch.ones(100_000))
            pulled = ps.pull("w", big)  # waits for the other
            for call in (
                lambda: ps.pull("w", big),
                lambda: ps.push("w", big),
                lambda: ps.push_pull("w", big, torch.empty(100_000)),
                lambda: ps.push_pull("w", torch.ones(100_000), big),
            ):
                with pytest.raises(BufferInFlight, match="pull"):
                    call()
        await coll.barrier()
        if pulled is None:
            await ps.push("w", big)
        else:
            await pulled
        await ps.sync()
        assert torch.equal(await ps.pull("w", big), torch.ones(100_000) * 2)


# --- handles -----------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
async def test_p2_cancelling_and_deadlines_end_the_wait_alone(coll: Communicator) -> None:
    async with ParameterServer(coll, {"w": full(0)}, consistency=Synchronous("sum"), servers=[1], workers=[0, 1]) as ps:
        if coll.rank == 0:
            await ps.push("w", full(1))
            pulled = ps.pull("w", full(0), timeout=5.0)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1.0):
                    await pulled
            with pytest.raises(OperationTimeout) as caught:
                await pulled
            assert set(caught.value.late) == {1}
            assert "'w'" in caught.value.late[1]
            await coll.barrier()
            assert (await pulled).tolist() == [3.0] * 5
        else:
            await coll.barrier()
            await ps.push("w", full(2))


@pytest.mark.ranks(2)
async def test_p2_a_sync_covers_a_dropped_push_and_raises_a_failed_one(coll: Communicator) -> None:
    told: list[str] = []
    if coll.rank == 0:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context["message"]))

    def fails(shard: Tensor, value: Tensor) -> None:
        raise ZeroDivisionError("on purpose")

    async with ParameterServer(coll, {"w": full(0)}, rules={"fails": fails}) as ps:
        for _ in range(5):
            ps.push("w", full(1))
        await ps.sync()
        if coll.rank == 0:
            with pytest.raises(aiodist.RemoteError, match="on purpose"):
                await ps.push("w", full(1), rule="fails")
            ps.push("w", full(1), rule="fails")
            await ps.sync()
        await ps.barrier()
        assert (await ps.pull("w")).tolist() == [10.0] * 5
    if coll.rank == 0:
        assert len(told) == 1
        assert "push" in told[0]


# --- mistakes ----------------------------------------------------------------------------------------------------

MISTAKES: list[tuple[type[Exception], str, Callable[[ParameterServer], Any]]] = [
    (KeyError, "unknown name 'x'", lambda ps: ps.push("x", full(1))),
    (KeyError, "unknown name 'x'", lambda ps: ps.pull("x")),
    (ValueError, r"shape \[6\].*\[5\]", lambda ps: ps.push("w", full(1, 6))),
    (TypeError, "float64.*float32", lambda ps: ps.push("w", full(1).double())),
    (ValueError, r"shape \[6\].*\[5\]", lambda ps: ps.pull("w", full(1, 6))),
    (TypeError, "float64.*float32", lambda ps: ps.push_pull("w", full(1), full(1).double())),
    (ValueError, "contiguous", lambda ps: ps.push("w", full(1, 10)[::2])),
    (ValueError, "contiguous", lambda ps: ps.pull("w", full(1, 10)[::2])),
    (ValueError, "2 values for 1", lambda ps: ps.push(["w"], [full(1)] * 2)),
    (ValueError, "0 out tensors for 1", lambda ps: ps.pull(["w"], [])),
    (TypeError, "values is int", lambda ps: ps.push(["w"], 3)),
    (TypeError, "list", lambda ps: ps.push("w", [full(1)])),
    (ValueError, "unknown rule 'x'", lambda ps: ps.push("w", full(1), rule="x")),
    (TypeError, "alpha", lambda ps: ps.push("w", full(1), alpha="x")),  # type: ignore[arg-type]
    (ValueError, "alpha", lambda ps: ps.push("w", full(1), alpha=float("nan"))),
    (TypeError, "alpha", lambda ps: ps.push("w", full(1), alpha=1 + 0j)),  # type: ignore[arg-type]
    (TypeError, "bytes", lambda ps: ps.save(b"folder")),  # type: ignore[arg-type]
    (TypeError, "bytes", lambda ps: ps.load(b"folder")),  # type: ignore[arg-type]
    (ValueError, "at_least", lambda ps: ps.pull("w", at_least=-1)),
    (ValueError, "at_least", lambda ps: ps.pull("w", at_least=1 << 70)),
    (TypeError, "at_least", lambda ps: ps.pull("w", at_least=0.5)),  # type: ignore[arg-type]
    (ValueError, "reads='x'", lambda ps: ps.pull("w", reads="x")),  # type: ignore[arg-type]
    (ValueError, "timeout=-1", lambda ps: ps.push("w", full(1), timeout=-1)),
    (ValueError, "timeout=-1", lambda ps: ps.init("y", full(1), timeout=-1)),
    (ValueError, "without settings", lambda ps: ps.configure()),
    (ValueError, "no settings", lambda ps: ps.configure("w", lr=1.0)),
]


@pytest.mark.ranks(2)
async def test_p2_a_mistake_is_an_error_at_the_call_and_changes_nothing(coll: Communicator) -> None:
    async with ParameterServer(coll, {"w": full(0)}) as ps:
        for expected, said, call in MISTAKES:
            with pytest.raises(expected, match=said):
                call(ps)
        await ps.push("w", full(1))
        await ps.barrier()
        await ps.init("y", full(1))
        assert (await ps.pull("w")).tolist() == [2.0] * 5


@pytest.mark.ranks(2)
async def test_p2_before_after_twice_and_elsewhere(coll: Communicator) -> None:
    ps = ParameterServer(coll, {"w": full(0)})
    for call in (lambda: ps.push("w"), ps.sync, ps.barrier, ps.statistics):
        with pytest.raises(RuntimeError, match="not open"):
            call()
    async with ps:
        raised: list[BaseException] = []

        def elsewhere() -> None:
            try:
                ps.push("w", full(1))
            except RuntimeError as error:
                raised.append(error)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert "thread" in str(raised[0])
    for call in (lambda: ps.push("w"), ps.sync, ps.barrier):
        with pytest.raises(CommunicatorClosed):
            call()
    with pytest.raises(RuntimeError, match="twice"):
        await ps.__aenter__()


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    "settings",
    [{"servers": wrong} for wrong in (0, 3, [], [0, 0], [3], True, 1.5)]
    + [{"workers": wrong} for wrong in ([], [1, 1], [-1], 2)]
    + [{name: "x"} for name in ("start", "reads", "rule", "consistency", "codec", "timeout")]
    + [{"split_bytes": 0}, {"tensors": 3}, {"tensors": full(1)}, {"consistency": Synchronous}, {"timeout": -1.0}],
    ids=str,
)
async def test_p2_senseless_settings(coll: Communicator, settings: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        ParameterServer(coll, **settings)
    assert "expected" in str(caught.value)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("settings", [{"rule": "mul"}, {"servers": 1}, {"start": "own"}, {"split_bytes": 7}], ids=str)
async def test_p2_different_settings_are_an_error_everywhere(coll: Communicator, settings: dict[str, Any]) -> None:
    with pytest.raises(MismatchError, match=next(iter(settings))):
        async with ParameterServer(coll, {"w": full(0)}, **(settings if coll.rank == 1 else {})):
            pass
    async with ParameterServer(coll, {"w": full(0)}) as ps:  # the next one is none the worse
        await ps.push("w", full(1))


@pytest.mark.ranks(1, 2)
async def test_p2_leaving_ends_reads_of_versions_that_never_come(coll: Communicator) -> None:
    async with ParameterServer(coll, {"w": full(3)}) as ps:
        with pytest.raises(OperationTimeout, match="pull of float32"):
            await ps.pull("w", at_least=99, timeout=0.05)
        late = ps.pull("w", full(0), at_least=99)
    assert torch.equal(await late, full(3))
    assert late.version == 0


@pytest.mark.ranks(3)
async def test_p2_a_barrier_waits_for_workers_that_are_there(coll: Communicator) -> None:
    async with ParameterServer(coll, {"w": full(0)}, servers=1) as ps:
        if ps.is_server:
            with pytest.raises(ValueError, match=r"expected a worker, one of \[0, 1\]"):
                ps.barrier()
        elif coll.rank == 0:
            await ps.barrier()
        else:
            await ps.barrier()
            await ps.barrier()  # rank 0 has left, or is about to


@pytest.mark.ranks(1)  # warnings are the process's
async def test_h7_pushes_without_a_sync_are_warned_of_at_the_end(coll: Communicator) -> None:
    ps = ParameterServer(coll, {"w": full(0)})
    await ps.__aenter__()
    ps.push("w", full(1))
    await ps.sync()
    ps.push("w", full(1))
    with pytest.warns(RuntimeWarning, match=r"push issued at .* was never awaited") as warned:
        await ps.__aexit__(None, None, None)
    assert len(warned) == 1


@pytest.mark.ranks(2)
async def test_p2_gradients_are_pushed_during_backward(coll: Communicator) -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    net[0].bias.requires_grad_(False)
    async with ParameterServer(coll, net, rule=SGD(lr=1.0), consistency=Synchronous("sum")) as ps:
        before = [p.detach().clone() for p in net.parameters()]
        loss = (net(torch.ones(1, 3)) * (coll.rank + 1)).sum()
        async with ps.pushing(net):
            loss.backward()
        await ps.sync()
        await ps.pull(net)
        for p, was in zip(net.parameters(), before, strict=True):
            expected = was if p.grad is None else was - 3 * p.grad / (coll.rank + 1)
            torch.testing.assert_close(p.detach(), expected)
        net.zero_grad()
        net(torch.ones(1, 3)).sum().backward()
        await ps.push_pull(net)  # the frozen one is pulled, and not pushed


@pytest.mark.ranks(2)
async def test_p2_leaving_a_block_of_pushes_raises_what_a_push_raises(coll: Communicator) -> None:
    w = nn.Parameter(full(1))
    async with ParameterServer(coll, {"w": w}, rule=SGD(lr=1.0)) as ps:
        blocked = ps.pushing("w", alpha=float("nan"))
        with pytest.raises(ValueError, match="alpha"):
            async with blocked:
                w.sum().backward()


@pytest.mark.ranks(2)
async def test_p4_settings_that_a_rule_refuses_are_refused_at_the_call(coll: Communicator) -> None:
    async with ParameterServer(coll, {"w": full(1)}, rule=SGD(lr=1.0)) as ps:
        for settings in ({"lr": -1.0}, {"lr": "a"}, {"speed": 1.0}):
            with pytest.raises((ValueError, TypeError), match=r"lr|speed|learning rate"):
                ps.configure("w", **settings)
        await ps.configure(lr=0.5)


@pytest.mark.ranks(3)
async def test_p2_names_are_in_the_order_of_init(coll: Communicator) -> None:
    names = [f"n{i}" for i in range(20)]
    async with ParameterServer(coll, {name: full(i) for i, name in enumerate(names)}, split_bytes=8) as ps:
        assert list(ps.names) == names


def test_p2_the_default_deadline_is_that_of_the_communicator() -> None:
    async def main() -> None:
        async with aiodist.init(timeout=7) as coll:
            async with ParameterServer(coll, {"w": full(1)}) as ps:
                assert ps.timeout == 7
                with pytest.raises(OperationTimeout, match="pull"):
                    await ps.pull("w", at_least=1)
                await ps.push("w", full(1))
            async with ParameterServer(coll, timeout=3) as ps:
                assert ps.timeout == 3

    run_ranks(1, main)
