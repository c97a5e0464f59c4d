"""G2: levels by string key, pure and as communicators."""

import random
from typing import Any

import pytest
import torch

import aiodist
from aiodist import Communicator
from aiodist.communicator import Hierarchy
from aiodist.communicator.levels import Levels


def thirds(n: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(range(k, n, 3)) for k in range(min(n, 3)))


# --- the groups alone ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", range(1, 38))
def test_g2_key_rank_modulo_three(n: int) -> None:
    for rank in range(n):
        levels = Levels(n, rank).below([str(r % 3) for r in range(n)])
        assert levels.groups(0) == (tuple(range(n)),)
        assert levels.groups(1) == thirds(n)
        assert levels.group(1) == thirds(n)[rank % 3]
        assert (levels.key(0), levels.key(1), levels.depth) == ("", str(rank % 3), 1)


@pytest.mark.parametrize("seed", range(20))
def test_g2_any_levels_split_the_groups_above(seed: int) -> None:
    rng = random.Random(seed)
    n, depth = rng.randint(1, 37), rng.randint(1, 4)
    keys = [[rng.choice(["", "1", "10", "9", "a", "ä", "a/b"]) for _ in range(n)] for _ in range(depth)]
    levels = Levels(n, rng.randrange(n))
    for level in keys:
        levels = levels.below(level)
    for number in range(depth + 1):
        paths = [tuple(level[rank] for level in keys[:number]) for rank in range(n)]
        groups = levels.groups(number)
        assert sorted(rank for group in groups for rank in group) == list(range(n))
        assert all(group == tuple(sorted(group)) for group in groups)
        assert [paths[group[0]] for group in groups] == sorted(set(paths))
        assert all(len({paths[rank] for rank in group}) == 1 for group in groups)
        assert levels.rank in levels.group(number)
    assert all(f": rank{'s' * (len(g) > 1)} {', '.join(map(str, g))}" in str(levels) for g in levels.groups(-1))


def test_g2_levels_of_some_ranks_are_the_groups_that_are_left() -> None:
    levels = Levels(6, rank=4).below(["b", "b", "a", "a", "b", "a"]).below(["x", "y", "x", "y", "x", "y"])
    some = levels.among([5, 4, 0])
    assert (some.size, some.rank) == (3, 1)
    assert some.groups(1) == ((0,), (1, 2))
    assert some.groups(2) == ((0,), (1, 2))


@pytest.mark.parametrize("level", [3, -4])
def test_g2_a_level_that_is_not_there(level: int) -> None:
    levels = Levels(2, 0).below(["a", "b"]).below(["a", "b"])
    with pytest.raises(ValueError, match=rf"level {level}: expected 0, all ranks, to 2"):
        levels.groups(level)
    with pytest.raises(TypeError, match="level is bool: expected an int"):
        levels.groups(True)
    with pytest.raises(ValueError, match="3 keys: expected 2"):
        levels.below(["a", "b", "c"])


def test_g2_readable_text_of_all_levels() -> None:
    levels = Levels(7, 0).below(["a"] * 4 + ["b"] * 3).below(["x", "x", "y", "y", "x", "x", ""])
    assert str(levels).splitlines() == [
        "7 ranks in 2 groups, tree",
        "  a: 4 ranks in 2 groups, cartesian",
        "    x: ranks 0, 1",
        "    y: ranks 2, 3",
        "  b: 3 ranks in 2 groups, tree",
        "    '': rank 6",
        "    x: ranks 4, 5",
    ]
    assert str(Levels(1, 0).below(["a"])).splitlines() == ["1 rank in 1 group", "  a: rank 0"]


# --- with communicators --------------------------------------------------------------------------------------------


@pytest.mark.drawn(3)
@pytest.mark.ranks(*range(1, 38))
async def test_g2_groups_of_a_level_communicate(coll: Communicator) -> None:
    n, rank = coll.size, coll.rank
    h = await coll.hierarchy(str(rank % 3))
    level = h[1]
    assert (h.comm, len(h), level.number, level.key) == (coll, 2, 1, str(rank % 3))
    assert level.groups == thirds(n)
    assert (level.intra.size, level.intra.rank) == (len(range(rank % 3, n, 3)), rank // 3)
    assert await level.intra.allreduce(rank) == sum(range(rank % 3, n, 3))


@pytest.mark.ranks(12)
async def test_g2_keys_sort_as_strings_and_ranks_by_rank(coll: Communicator) -> None:
    h = await coll.hierarchy(str(8 + coll.rank // 4))
    assert h[-1].groups == ((8, 9, 10, 11), (0, 1, 2, 3), (4, 5, 6, 7))  # "10" < "8" < "9"
    assert h[-1].inter.rank == (1, 2, 0)[coll.rank // 4]
    assert await h[-1].inter.allgather_object(coll.rank) == [8 + coll.rank % 4, coll.rank % 4, 4 + coll.rank % 4]


@pytest.mark.ranks(12)
async def test_g2_each_level_splits_the_groups_above(coll: Communicator) -> None:
    rank = coll.rank
    both = await coll.hierarchy(str(rank // 6), str(rank % 2))
    assert both[0].groups == (tuple(range(12)),)
    assert both[0].intra is coll
    assert await both[0].inter.allreduce(rank) == rank
    assert both[1].groups == (tuple(range(6)), tuple(range(6, 12)))
    assert both[2].groups == ((0, 2, 4), (1, 3, 5), (6, 8, 10), (7, 9, 11))
    assert await both[2].intra.allgather_object(rank) == [
        r for r in range(12) if r // 6 == rank // 6 and r % 2 == rank % 2
    ]
    assert await both[2].inter.allgather_object(rank) == [rank // 2 * 2, rank // 2 * 2 + 1]
    # One by one they are the same.
    first = await coll.hierarchy(str(rank // 6))
    again = await first.below(str(rank % 2))
    assert len(first) == 2
    assert list(again) == list(both)
    assert again.name != both.name


@pytest.mark.ranks(5)
@pytest.mark.usefixtures("two_hosts")
async def test_g2_without_keys_by_host(coll: Communicator) -> None:
    h = await coll.hierarchy()
    assert [level.key for level in h] == ["", f"host{coll.rank % 2}"]
    assert h[1].groups == ((0, 2, 4), (1, 3))
    assert h[1].intra.size == coll.local_size
    assert h.levels == coll.levels
    assert str(h) == "world: 5 ranks in 2 groups, tree\n  host0: ranks 0, 2, 4\n  host1: ranks 1, 3"
    half = await coll.group([1, 2, 4])
    if coll.rank in (1, 2, 4):
        assert half.levels.groups(1) == ((1, 2), (0,))
        assert (await half.hierarchy())[1].groups == ((1, 2), (0,))
    else:
        with pytest.raises(aiodist.CommunicatorError, match="outside"):
            _ = half.levels


@pytest.mark.ranks(4)
async def test_g2_made_once_until_closed(coll: Communicator) -> None:
    key = str(coll.rank % 2)
    first, again = await coll.hierarchy(key), await coll.hierarchy(key)
    assert list(first) == list(again)
    assert first[1].intra is (await coll.group([0, 2]), await coll.group([1, 3]))[coll.rank % 2]
    assert first[1].inter is await coll.split(coll.rank // 2)
    await first[1].intra.aclose()
    with pytest.raises(aiodist.CommunicatorClosed):
        again[1].intra.barrier()
    anew = await coll.hierarchy(key)
    assert anew[1].intra is not first[1].intra
    assert anew[1].inter is first[1].inter
    assert await anew[1].intra.allreduce(1) == 2


@pytest.mark.ranks(4)
async def test_g2_they_close_with_what_they_are_made_of(coll: Communicator) -> None:
    side = await coll.dup()
    h = await side.hierarchy(str(coll.rank % 2))
    span = await h.span()
    assert all(comm.name.startswith(f"{side.name}/") for comm in (h[1].intra, h[1].inter, span))
    await side.aclose()
    for call in (h[1].intra.barrier, h[1].inter.barrier, span.barrier, h.span):
        with pytest.raises(aiodist.CommunicatorClosed):
            call()
    with pytest.raises(aiodist.CommunicatorClosed):
        h.below("a")
    assert await coll.allreduce(1) == 4


@pytest.mark.ranks(3)
@pytest.mark.ranks(3)
async def test_g2_ordered_behind_all_in_flight(coll: Communicator) -> None:
    after, before = (coll.rank + 1) % 3, (coll.rank - 1) % 3
    receive = coll.recv(None, before)
    reduced = [coll.allreduce(torch.ones(50)) for _ in range(20)]
    made = coll.hierarchy(str(coll.rank))
    assert not made.done()
    sent = coll.send(torch.tensor(coll.rank), after)
    h = await made
    assert receive.done()
    assert all(handle.done() for handle in reduced)
    assert await h[1].inter.allreduce(1) == 3
    await aiodist.gather(receive, sent, *reduced)


@pytest.mark.ranks(2)
async def test_g2_every_communicating_method_returns_a_handle(coll: Communicator) -> None:
    h = await coll.hierarchy("a")
    calls: dict[str, Any] = {"below": lambda: h.below("b"), "span": lambda: h.span()}
    inherited = {"index", "count"}  # of any sequence
    names = {n for n in dir(Hierarchy) if not n.startswith("_") and not isinstance(getattr(Hierarchy, n), property)}
    assert names - inherited == set(calls)
    for name, call in calls.items():
        handle = call()
        assert isinstance(handle, aiodist.Handle)
        assert handle.op == name
        assert __file__ in str(handle)
        await handle


# --- mistakes ------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
async def test_g2_a_key_is_a_string(coll: Communicator) -> None:
    with pytest.raises(TypeError, match="key 1 is int: expected a str"):
        coll.hierarchy("a", 1)  # type: ignore[arg-type]
    h = await coll.hierarchy("a")
    with pytest.raises(TypeError, match="key is NoneType: expected a str"):
        h.below(None)  # type: ignore[arg-type]
    assert await coll.allreduce(1) == 2


@pytest.mark.ranks(3)
async def test_g2_ranks_disagree_on_the_number_of_levels(coll: Communicator) -> None:
    keys = ("a", "b") if coll.rank == 2 else ("a",)
    sides = r"ranks 0, 1: hierarchy with 1 level\(s\) by a; rank 2: hierarchy with 2 level\(s\) by a, b"
    with pytest.raises(aiodist.MismatchError, match=f"the levels of 'world': {sides}"):
        await coll.hierarchy(*keys)
    assert await coll.allreduce(1) == 3


@pytest.mark.ranks(2)
async def test_g2_ranks_extend_different_hierarchies(coll: Communicator) -> None:
    one, two = await coll.hierarchy("a"), await coll.hierarchy("b")
    mine = (one, two)[coll.rank]
    sides = r"rank 0: below of world/hierarchy1 .*; rank 1: below of world/hierarchy2"
    with pytest.raises(aiodist.MismatchError, match=sides):
        await mine.below("c")
    with pytest.raises(aiodist.MismatchError, match=r"rank 0: span\(0, 1\) of .*; rank 1: below of "):
        await (one.below("c") if coll.rank else one.span())
    assert (await one.below("c"))[2].groups == ((0, 1),)
