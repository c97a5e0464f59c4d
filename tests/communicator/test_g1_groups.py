"""G1, G5: communicators made from others, and who shares a host."""

import asyncio
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import aiodist
from aiodist import Communicator
from aiodist.collectives.cuda import peers
from aiodist.topology import Device, Means, Topology
from tests.support.calls import CALLS
from tests.support.hearing import heard
from tests.support.simulated_cuda.simulation import simulated_cuda

pytestmark = pytest.mark.drawn(3)

some = pytest.mark.ranks(2, 4, 5)
processes = pytest.mark.ranks(2, backend=("mpi", "mpich", "gloo"))


@some
@processes
async def test_g1_split_by_color_and_key_as_in_mpi(coll: Communicator) -> None:
    n, rank = coll.size, coll.rank
    half = await coll.split(rank % 2, key=-rank)  # the ranks of one color, backwards
    mine = [r for r in range(n) if r % 2 == rank % 2][::-1]
    assert (half.size, half.rank) == (len(mine), mine.index(rank))
    assert [t.item() for t in await half.allgather(torch.tensor(rank))] == mine
    assert await half.allreduce(rank) == sum(mine)
    everybody = await coll.split()
    assert (everybody.size, everybody.rank) == (n, rank)


@some
@processes
async def test_g1_color_none_is_outside(coll: Communicator) -> None:
    part = await coll.split(None if coll.rank == 0 else 7)
    if coll.rank:
        assert part.size == coll.size - 1
        assert await part.allreduce(1) == coll.size - 1
        return
    assert part.rank == -1
    for call in (lambda: part.allreduce(1), lambda: part.barrier(), lambda: part.dup(), lambda: part.recv()):
        with pytest.raises(aiodist.CommunicatorError, match="outside"):
            call()
    with pytest.raises(aiodist.CommunicatorError, match="outside"):
        _ = part.topology


@pytest.mark.ranks(4)
@pytest.mark.ranks(4)
async def test_g1_a_group_of_some_ranks(coll: Communicator) -> None:
    group = await coll.group([1, 2])
    if coll.rank in (1, 2):
        assert (group.size, group.rank) == (2, coll.rank - 1)
        assert await group.allreduce(coll.rank) == 3
        assert await group.broadcast(coll.rank, root=1) == 2
    else:
        with pytest.raises(aiodist.CommunicatorError, match="outside"):
            group.barrier()
    backwards = await coll.group([2, 1])
    if coll.rank in (1, 2):
        assert backwards is not group
        assert backwards.rank == 2 - coll.rank


@some
async def test_g1_two_groups_in_turn_are_made_once_each(coll: Communicator) -> None:
    n = coll.size
    low, high = range(n // 2), range(n // 2, n)
    seen = []
    for _ in range(3):
        pair = [await coll.group(low), await coll.group(high)]
        mine = pair[0] if coll.rank in low else pair[1]
        assert await mine.allreduce(1) == mine.size
        seen.append(mine)
    assert seen[0] is seen[1] is seen[2]
    assert await coll.split(int(coll.rank in low)) is seen[0]


@some
@processes
async def test_g1_closed_ones_are_made_anew(coll: Communicator) -> None:
    first = await coll.group(range(coll.size))
    assert await first.allreduce(1) == coll.size
    await first.aclose()
    with pytest.raises(aiodist.CommunicatorClosed):
        first.allreduce(1)
    again = await coll.group(range(coll.size))
    assert again is not first
    assert await again.allreduce(1) == coll.size


@some
@processes
async def test_g1_traffic_of_a_duplicate_never_meets_the_parents(coll: Communicator) -> None:
    n, rank = coll.size, coll.rank
    other = await coll.dup()
    assert other is not coll
    assert await coll.dup() is not other
    after, before = (rank + 1) % n, (rank - 1) % n
    sends = [coll.send(torch.tensor(1), after), other.send(torch.tensor(2), after)]
    assert (await other.recv(None, before)).item() == 2
    assert (await coll.recv(None, before)).item() == 1
    await aiodist.gather(*sends)
    # Each rank begins them in another order: they are different communicators, so it is no bug.
    pair = [coll, other] if rank % 2 else [other, coll]
    handles = {comm: comm.allreduce(torch.tensor([10.0 if comm is coll else 20.0])) for comm in pair}
    assert (await handles[coll]).item() == 10.0 * n
    assert (await handles[other]).item() == 20.0 * n


@pytest.mark.drawn(4)
@some
@processes
async def test_g1_it_is_ordered_behind_a_hundred_in_flight(coll: Communicator) -> None:
    after, before = (coll.rank + 1) % coll.size, (coll.rank - 1) % coll.size
    ts = [torch.full((50,), float(i)) for i in range(100)]
    handles = [coll.allreduce(t) if i % 3 else coll.recv(t, before, i) for i, t in enumerate(ts)]
    made = coll.dup()
    assert not made.done()
    later = coll.allreduce(torch.ones(1))
    sends = [coll.send(torch.full((50,), float(i)), after, i) for i in range(0, 100, 3)]
    other = await made
    assert all(handle.done() for i, handle in enumerate(handles) if i % 3)
    await aiodist.gather(*handles, *sends)
    assert [t[0].item() for t in ts] == [i * (coll.size if i % 3 else 1) for i in range(100)]
    assert (await later).item() == coll.size
    assert await other.allreduce(1) == coll.size


@some
async def test_g1_children_have_names_and_go_with_their_parent(coll: Communicator) -> None:
    child = await coll.dup()
    grandchild = await child.group([0, 1])
    assert coll.name == "world"
    assert child.name.startswith("world/")
    if coll.rank < 2:
        assert grandchild.name.startswith(child.name + "/")
    await child.aclose()
    with pytest.raises(aiodist.CommunicatorError):
        grandchild.allreduce(1)
    assert await coll.allreduce(1) == coll.size


@pytest.mark.ranks(3)
async def test_g1_ranks_must_agree_on_the_group(coll: Communicator) -> None:
    with pytest.raises(aiodist.MismatchError, match=r"rank 0: group of \[0, 1\]; ranks 1, 2: group of \[0, 2\]"):
        await coll.group([0, 1] if coll.rank == 0 else [0, 2])
    assert await coll.allreduce(1) == 3


@pytest.mark.drawn(3)
@pytest.mark.ranks(2)
@processes
async def test_g1_groups_made_from_two_tasks_at_once(coll: Communicator) -> None:
    first, second = await coll.dup(), await coll.dup()

    async def work(comm: Communicator) -> None:
        for _ in range(3):
            other = await comm.dup()
            assert await other.allreduce(1) == 2
            await other.aclose()

    await asyncio.gather(work(first), work(second))


# --- H7 with a communicator ----------------------------------------------------------------------------------------


def _world(main: Any, n: int = 2) -> Any:
    """Run ranks and return the warnings of handles without an await, and the reports to their loop."""
    told = []

    async def rank() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context["message"]))
        async with aiodist.init() as coll:
            await main(coll)

    with heard() as caught:
        aiodist.testing.run_ranks(n, rank)
    return [str(w.message) for w in caught if w.category in (ResourceWarning, RuntimeWarning)], told


def _opened(main: Callable[[Communicator], Any]) -> Callable[[], Any]:
    async def rank() -> None:
        async with aiodist.init() as coll:
            await main(coll)

    return rank


@pytest.mark.ranks(2)
async def test_h7_what_is_detached_is_not_told(coll: Communicator) -> None:
    """Warnings are errors in this run, which the loop's handler hears of."""
    told: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))
    handle = coll.allreduce(torch.ones(2)).detach()
    assert (await handle).tolist() == [2.0, 2.0]
    del handle
    coll.allreduce(torch.ones(2)).detach()
    await coll.barrier()
    await asyncio.sleep(0.2)
    assert told == []


def test_h7_a_loop_that_forgets_is_shown_once_a_line() -> None:
    async def main(coll: Communicator) -> None:
        for _ in range(5):
            coll.allreduce(torch.ones(2))
            await coll.barrier()
        coll.allreduce(torch.ones(2))
        await coll.barrier()

    with heard("default") as caught:
        aiodist.testing.run_ranks(2, _opened(main))
    assert len({w.lineno for w in caught}) == 2
    assert len(caught) == 4  # two ranks


def test_h7_an_error_that_nobody_saw_is_reported_once() -> None:
    async def main(coll: Communicator) -> None:
        coll.send(torch.ones(4), 1 - coll.rank).detach()
        short = coll.recv(torch.ones(2), 1 - coll.rank)
        await coll.barrier()
        await asyncio.sleep(0.2)
        del short
        await asyncio.sleep(0)

    warned, told = _world(main)
    assert [text for text in told if "recv #0" in text] == told
    assert len(told) == 2
    assert warned == []


def test_h7_a_receive_that_somebody_awaited_and_nothing_matched_is_told_more_quietly() -> None:
    async def main(coll: Communicator) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(coll.recv(None, 1 - coll.rank, tag=4), 0.1)  # over, for all that
        tasks.append(asyncio.ensure_future(coll.recv(None, 1 - coll.rank, tag=5)))
        await asyncio.sleep(0.1)

    tasks: list[asyncio.Future[Any]] = []
    warned, _ = _world(main)
    assert len(warned) == 2
    assert all("never matched, and withdrawn" in w for w in warned)
    assert all(task.cancelled() for task in tasks)


def test_h7_a_receive_that_nothing_matched_is_withdrawn_and_reported_at_close() -> None:
    async def main(coll: Communicator) -> None:
        await coll.barrier()
        kept.append(coll.recv(None, 1 - coll.rank, tag=5))

    kept: list[aiodist.Handle[Any]] = []
    warned, _ = _world(main)
    assert len(warned) == 2
    assert all("recv #1" in w and "never matched" in w and "withdrawn" in w for w in warned)
    assert all(handle.cancelled() for handle in kept)


@pytest.mark.ranks(2)
async def test_h7_errors_say_where(coll: Communicator) -> None:
    receive = coll.recv(torch.ones(1), 1 - coll.rank)
    await coll.send(torch.ones(3), 1 - coll.rank)
    with pytest.raises(aiodist.BackendError) as caught:
        await receive
    error = caught.value
    assert (error.rank, error.comm) == (coll.rank, "world")
    assert "recv #0" in str(error.op)
    assert all(part in str(error) for part in ("recv #0", "communicator world", f"rank {coll.rank}", __file__))


# --- every call is a handle ----------------------------------------------------------------------------------------

_LOCAL = {"abort", "aclose", "arena", "arena_empty", "availability", "print", "statistics", "to_arena_"}
_LOCAL |= {"request_stop", "shrink", "grow"}  # these two are for elastic worlds alone
_LOCAL |= {"breakpoint"}  # opens pdb
_ITERATORS = {"messages"}


@pytest.mark.ranks(1, 3)
@pytest.mark.ranks(2, backend=("mpi", "gloo"))
async def test_h1_every_communicating_method_returns_a_handle(coll: Communicator) -> None:
    methods = {
        name for name in dir(coll) if not name.startswith("_") and not isinstance(getattr(type(coll), name), property)
    }
    assert methods - _LOCAL - _ITERATORS == set(CALLS)
    for name, call in CALLS.items():
        handle = call(coll)
        assert isinstance(handle, aiodist.Handle), name
        assert handle.op == name
        assert handle.nbytes >= 0
        assert f"{name} #" in str(handle)
        assert "calls.py" in str(handle)
        await handle
        assert handle.done()


@pytest.mark.drawn(1)
@pytest.mark.ranks(2, 3)
@pytest.mark.ranks(2, backend=("openmpi", "mpich", "gloo", "shm"))
async def test_g1_no_message_holds_up_a_new_communicator(coll: Communicator) -> None:
    """A receive in flight may get its message only after the new communicator was made, or never."""
    after, before = (coll.rank + 1) % coll.size, (coll.rank - 1) % coll.size
    service = coll.recv_object(tag=9)
    late = coll.recv(torch.ones(2), before, tag=3)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(late, 0.1)
    sent = coll.send(torch.full((1 << 20,), float(coll.rank)), after, tag=4)
    async with asyncio.timeout(20):
        made = await coll.dup()
        assert await made.allreduce(1) == coll.size
        half = await coll.split(0)
        assert (await coll.recv(torch.empty(1 << 20), before, tag=4)).eq(before).all()
        await sent
        await half.aclose()
        await made.aclose()
    assert service.cancel()
    assert late.cancel()


@pytest.mark.ranks(2)
async def test_g1_a_rank_that_does_not_come_to_make_one_is_named(coll: Communicator) -> None:
    if coll.rank == 1:
        await asyncio.sleep(3)
        await coll.dup()
        return
    with pytest.raises(aiodist.OperationTimeout, match="dup #0 issued at") as caught:
        async with aiodist.timeout(2):
            await coll.dup()
    assert list(caught.value.late) == [1]
    await asyncio.sleep(2)


@pytest.mark.ranks(3)
async def test_c11_statistics_count_what_is_pending(coll: Communicator) -> None:
    await coll.barrier()
    before = coll.statistics()
    receive = coll.recv(None, (coll.rank - 1) % 3)
    assert coll.statistics().pending == before.pending + 1
    await coll.send(torch.ones(2), (coll.rank + 1) % 3)
    await receive
    assert coll.statistics().pending == 0
    assert coll.statistics().collectives == coll.seq


# --- G5 ------------------------------------------------------------------------------------------------------------


@some
@processes
async def test_g5_all_ranks_share_this_host(coll: Communicator) -> None:
    assert (coll.local_rank, coll.local_size, coll.node, coll.nodes) == (coll.rank, coll.size, 0, 1)
    assert len(coll.hosts) == 1
    assert coll.topology.ranks_on(coll.hosts[0]) == tuple(range(coll.size))
    assert coll.device == torch.device("cpu")
    half = await coll.split(coll.rank % 2)
    assert half.topology.local_size == half.size


def test_g5_hosts_when_ranks_are_dealt_in_turn() -> None:
    dealt = [Topology(("b", "a", "b", "a", "c"), rank) for rank in range(5)]
    assert dealt[0].hosts == ("b", "a", "c")
    assert [t.node for t in dealt] == [0, 1, 0, 1, 2]
    assert [t.local_rank for t in dealt] == [0, 0, 1, 1, 0]
    assert [t.local_size for t in dealt] == [2, 2, 2, 2, 1]
    assert dealt[3].ranks_on("a") == (1, 3)
    part = dealt[3].among([3, 4])
    assert (part.hosts, part.rank, part.local_size) == (("a", "c"), 0, 1)


def test_g5_readable_text() -> None:
    text = str(Topology(("one", "two", "one"), 0))
    assert text.splitlines() == ["3 ranks on 2 hosts", "  one: ranks 0, 2", "  two: ranks 1"]


def device(index: int, *peers: int) -> Device:
    return Device(index, f"GPU-{index}", Means(), frozenset(f"GPU-{peer}" for peer in peers))


def test_g5_devices_that_reach_one_another() -> None:
    """Two pairs and a single one on one host, a rank that shares a device, and the same names on another host."""
    first = [device(0, 1), device(1, 0), device(2, 3), device(3), device(4), device(3)]
    dealt = Topology(("one",) * 6 + ("two",) * 2, 3, (*first, device(0, 1), device(1, 0)))
    assert dealt.peer_groups == ((0, 1), (2, 3, 5), (4,), (6, 7))
    assert dealt.peer_group == (2, 3, 5)
    assert str(dealt).splitlines()[1:] == [
        "  one: ranks 0 (cuda:0), 1 (cuda:1), 2 (cuda:2), 3 (cuda:3), 4 (cuda:4), 5 (cuda:3)",
        "    GPUs that reach one another: ranks 0, 1",
        "    GPUs that reach one another: ranks 2, 3, 5",
        "  two: ranks 6 (cuda:0), 7 (cuda:1)",
        "    GPUs that reach one another: ranks 6, 7",
    ]
    assert dealt.among([5, 3, 1]).peer_groups == ((0, 1), (2,))


def test_g5_a_device_joins_those_that_it_reaches_all_of() -> None:
    """In a chain the middle one reaches both others, which do not reach one another."""
    chain = Topology(("one",) * 3, 0, (device(0, 1), device(1, 0, 2), device(2, 1)))
    assert chain.peer_groups == ((0, 1), (2,))
    some = Topology(("one",) * 3, 1, (device(0), None, device(0)))
    assert some.peer_groups == ((0, 2), (1,))
    assert Topology(("one",) * 2, 0).peer_groups == ((0,), (1,))


@pytest.mark.ranks(4)
async def test_g5_levels_by_the_devices_that_reach_one_another(pairs_of_devices: None, coll: Communicator) -> None:
    assert coll.topology.peer_groups == ((0, 1), (2, 3))
    levels = await coll.hierarchy(coll.topology.hosts[coll.node], str(coll.topology.peer_group[0]))
    assert levels[2].groups == coll.topology.peer_groups
    assert (levels[2].intra.size, levels[2].form) == (2, "cartesian")
    t = torch.full((3,), coll.rank + 1.0).to(coll.device)
    assert (await levels[2].intra.allreduce(t)).tolist() == [3.0 if coll.rank < 2 else 7.0] * 3


@pytest.fixture
def pairs_of_devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Four devices; the first two reach one another, and so do the last two."""
    with simulated_cuda(devices=4):
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: one // 2 == other // 2)
        yield
        monkeypatch.undo()


def test_g5_the_driver_is_asked_where_torch_uses_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def get(handle: Any, number: int) -> int:
        handle._obj.value = 10 + number
        return 0

    def can_access(reaches: Any, one: Any, other: Any) -> int:
        asked.append(f"{one.value} {other.value}")
        reaches._obj.value = one.value + other.value == 21
        return 0 if one.value != 12 else 101

    driver = SimpleNamespace(cuDeviceGet=get, cuDeviceCanAccessPeer=can_access)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(peers, "driver", lambda: driver)
    assert peers.peers_here() == [[1], [0], []]
    assert len(asked) == 6
    monkeypatch.setattr(peers, "driver", lambda: None)
    assert peers.peers_here() == [[], [], []]


@pytest.mark.drawn(21)
@pytest.mark.parametrize("what", [name for name in CALLS if not name.startswith("recv")])
def test_h7_a_dropped_handle_is_told_once_it_is_over(what: str) -> None:
    """Within 0.2 s, which no barrier covers."""

    async def main(coll: Communicator) -> None:
        CALLS[what](coll)
        await coll.barrier()
        await asyncio.sleep(0.2)
        soon.append(len(told()))
        if what.startswith("send") and what != "sendrecv":
            await (coll.recv() if what == "send" else coll.recv_object())

    def told() -> list[warnings.WarningMessage]:
        return [w for w in caught if "was never awaited" in str(w.message)]

    soon: list[int] = []
    with heard() as caught:
        aiodist.testing.run_ranks(2, _opened(main))
    assert soon == [2, 2]
    assert [w.category for w in told()] == [RuntimeWarning] * 2
    assert all(f"{what} issued at {CALLS[what].__code__.co_filename}" in str(w.message) for w in told())
