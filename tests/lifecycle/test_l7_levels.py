"""L7: `init(levels=fn)` builds the levels before the block is entered, and roots those by host under them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import aiodist
from aiodist.testing.seams.world import current_place

if TYPE_CHECKING:
    from aiodist import Communicator
    from tests.lifecycle.conftest import Run

pytestmark = pytest.mark.drawn(1)


@pytest.fixture
def two_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks live on two hosts in turn."""

    def name() -> str:
        place: Any = current_place.get()
        return f"host{place.started_as % 2}"

    def hosts(place: Any) -> tuple[int, ...]:
        return tuple(rank % 2 for rank in range(place.job.size))

    monkeypatch.setattr("socket.gethostname", name)
    monkeypatch.setattr("aiodist.testing.ranks.Seat.hosts", property(hosts))


async def halves(coll: Communicator) -> Any:
    return await coll.hierarchy("high" if coll.rank >= coll.size // 2 else "low")


def plain(coll: Communicator) -> Any:
    return coll.hierarchy("high" if coll.rank >= coll.size // 2 else "low")


def run(n: int, levels: Any) -> list[Any]:
    """Run ranks that say what groups they are in."""

    async def main() -> object:
        async with aiodist.init(levels=levels) as coll:
            assert await coll.allreduce(1) == n
            return coll.levels

    return aiodist.testing.run_ranks(n, main)


@pytest.mark.parametrize("levels", [halves, plain])
@pytest.mark.usefixtures("two_hosts")
def test_l7_hosts_are_rooted_under_the_last(levels: Any) -> None:
    async def main() -> None:
        for _ in range(2):
            async with aiodist.init(levels=levels) as coll:
                assert str(coll.levels).splitlines() == [
                    "8 ranks in 2 groups, cartesian",
                    "  high: 4 ranks in 2 groups, cartesian",
                    "    host0: ranks 4, 6",
                    "    host1: ranks 5, 7",
                    "  low: 4 ranks in 2 groups, cartesian",
                    "    host0: ranks 0, 2",
                    "    host1: ranks 1, 3",
                ]
                h = await coll.hierarchy()
                assert h.levels == coll.levels
                assert h[1].groups == ((4, 5, 6, 7), (0, 1, 2, 3))
                assert h[2].groups == ((4, 6), (5, 7), (0, 2), (1, 3))
                assert await h[2].intra.allreduce(1) == await h[2].inter.allreduce(1) == 2
                # Left alone, collectives span the hosts of one group.
                span = await h.span()
                assert await span.allgather_object(coll.rank) == list(h.levels.group(1))
                assert span.levels.groups(1) == ((0, 2), (1, 3))

    aiodist.testing.run_ranks(8, main)


@pytest.mark.usefixtures("two_hosts")
def test_l7_others_made_of_the_world_have_them_too() -> None:
    early = []

    async def levels(coll: Communicator) -> Any:
        h = await halves(coll)
        assert coll.levels.depth == 1  # by host, until they are there
        early.append(h[1].intra)
        return h

    async def main() -> None:
        async with aiodist.init(levels=levels) as coll:
            dup = await coll.dup()
            assert dup.levels == coll.levels
            h, own = await dup.hierarchy(), await coll.hierarchy()
            assert [level.groups for level in h] == [level.groups for level in own]
            assert h[1].intra is not own[1].intra
            assert await h[1].intra.allreduce(1) == 2
            some = await coll.split(coll.rank % 2)
            assert some.levels.groups(1) == ((1,), (0,))
            assert own[1].intra in early
            assert own[1].intra.levels.splits == coll.levels.among(own.levels.group(1)).splits
            assert (await coll.group([0, 1]), await coll.group([2, 3]))[coll.rank // 2] is own[1].intra

    aiodist.testing.run_ranks(4, main)


def test_l7_alone_and_with_several_levels() -> None:
    async def levels(coll: Communicator) -> Any:
        return await (await coll.hierarchy("a", "b")).below("c")

    (alone,) = run(1, levels)
    assert [alone.key(number) for number in range(4)] == ["", "a", "b", "c"]
    assert alone.depth == 4
    assert all(found.groups(4) == ((0, 1, 2),) for found in run(3, levels))


def test_l7_without_it_the_levels_are_the_hosts() -> None:
    assert [found.depth for found in run(2, None)] == [1, 1]


def test_l7_it_returns_a_hierarchy_of_the_world() -> None:
    async def of_another(coll: Communicator) -> Any:
        return await (await coll.dup()).hierarchy("a")

    with pytest.raises(TypeError, match=r"levels= returned str: expected the result of coll\.hierarchy"):
        run(2, lambda coll: "a")
    with pytest.raises(TypeError, match=r"levels= returned <Hierarchy 'world/dup1.*expected"):
        run(2, of_another)


def test_l7_an_error_in_it_ends_all_ranks() -> None:
    def levels(coll: Communicator) -> Any:
        if coll.rank == 1:
            raise LookupError("no such rack")
        return coll.hierarchy("a")

    with pytest.raises(LookupError, match="no such rack"):
        run(3, levels)


@pytest.mark.parametrize("more", [0, 1])
def test_l7_ranks_disagree_on_the_number_of_levels(more: int) -> None:
    async def levels(coll: Communicator) -> Any:
        h = await coll.hierarchy("a")
        return await h.below("b") if coll.rank == more else h

    wanted = ["init(levels=) of world/hierarchy1 with 1 level(s) by a"] * 2
    wanted[more] = "below of world/hierarchy1 with 2 level(s) by a, b"
    with pytest.raises(aiodist.MismatchError) as caught:
        run(2, levels)
    assert f"rank 0: {wanted[0]}; rank 1: {wanted[1]}" in str(caught.value)


@pytest.mark.thorough
@pytest.mark.parametrize("run", ["openmpi", "none"], indirect=True)
def test_l7_in_processes(run: Run) -> None:
    ended = run("levels.py", n=4)
    assert (ended.code, ended.codes()) == (0, [0] * 4), ended
    everybody = ((0, 1, 2, 3),)
    pairs = ((1, 2), (0, 3))
    backend = "shm" if run.backend == "none" else "mpi"
    for rank in range(4):
        pair = pairs[rank in (0, 3)]
        across = [[rank], *([[0]] if rank == 0 else []), [1, 0] if rank < 2 else [2, 3], [rank]]
        once = [
            f"groups: {everybody} {everybody} {pairs} {pairs}",
            "forms: cartesian tree cartesian cartesian",
            f"within: [0, 1, 2, 3] [0, 1, 2, 3] {list(pair)} {list(pair)}",
            "across: " + " ".join(map(str, across)),
            f"span: {backend} 6 {pairs}",
            "closed",
        ]
        assert ended.said(rank) == once * 2
