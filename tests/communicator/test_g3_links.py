"""G3: the communicator within a group, and the one across groups: cartesian or tree."""

import random
from collections.abc import Callable

import pytest

import aiodist
from aiodist import Communicator
from aiodist.communicator.levels import Form, Levels
from tests.support.hearing import heard


def by_key(keys: str, *forms: Form | None) -> Levels:
    """Return levels of one rank per letter; rank 0 looks."""
    return Levels(len(keys), 0).below(list(keys), *forms)


# --- who is linked -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", range(1, 38))
def test_g3_cartesian_when_groups_are_equal_else_tree(n: int) -> None:
    keys = [str(r % 3) for r in range(n)]
    groups = [range(k, n, 3) for k in range(min(n, 3))]
    form = "cartesian" if n < 3 or n % 3 == 0 else "tree"
    size = len(groups[-1]) if form == "cartesian" else 1
    levels = Levels(n, 0).below(keys)
    assert levels.form(1) == form
    assert levels.links(1) == tuple(tuple(group[k] for group in groups) for k in range(size))
    assert levels.links(0) == tuple((rank,) for rank in range(n))
    for rank in range(n):
        mine = [linked for linked in levels.links(1) if rank in linked]
        assert Levels(n, rank).below(keys).link(1) == (mine[0] if mine else ())


@pytest.mark.parametrize("seed", range(20))
def test_g3_links_cross_the_groups_of_one_above(seed: int) -> None:
    rng = random.Random(seed)
    n = rng.randint(1, 37)
    levels = Levels(n, rng.randrange(n)).below([str(rng.randrange(3)) for _ in range(n)])
    levels = levels.below([str(rng.randrange(3)) for _ in range(n)], rng.choice(["tree", "cartesian", None]))
    links = levels.links(2)
    seen = [rank for linked in links for rank in linked]
    assert len(seen) == len(set(seen))
    for part in levels.parts(2):
        inside = [linked for linked in links if set(linked) & {rank for group in part for rank in group}]
        even = len({len(group) for group in part}) == 1 and levels.splits[1].asked != "tree"
        assert len(inside) == (len(part[0]) if even else 1)
        for k, linked in enumerate(inside):
            assert linked == tuple(group[k] for group in part)
        if levels.rank in {rank for group in part for rank in group}:
            assert levels.form(2) == ("cartesian" if even else "tree")


def test_g3_asked_forms() -> None:
    assert by_key("abab").form(1) == by_key("abab", "cartesian").form(1) == "cartesian"
    assert by_key("abab", "tree").links(1) == ((0, 1),)
    fallen = by_key("ababa", "cartesian")
    assert (fallen.form(1), fallen.fallen()) == ("tree", ["level 1: groups of 3, 2 ranks"])
    assert by_key("ababa").fallen() == by_key("abab", "cartesian").fallen() == by_key("aba", "tree").fallen() == []


def test_g3_a_tree_here_is_no_tree_there() -> None:
    keys = ["x", "y", "x", "y", "x", "y", "y"]
    forms = [Levels(7, rank).below(["a"] * 4 + ["b"] * 3).below(keys, "cartesian") for rank in range(7)]
    assert [levels.form(2) for levels in forms] == ["cartesian"] * 4 + ["tree"] * 3
    assert forms[0].links(2) == ((0, 1), (2, 3), (4, 5))
    assert forms[6].link(2) == ()
    assert forms[0].fallen() == ["level 2: groups of 1, 2 ranks"]


# --- with communicators --------------------------------------------------------------------------------------------


@pytest.mark.ranks(6, 9)
@pytest.mark.ranks(6)
async def test_g3_cartesian_links_the_kth_with_the_kth(coll: Communicator) -> None:
    rank = coll.rank
    level = (await coll.hierarchy(str(rank % 3)))[1]
    assert level.form == "cartesian"
    assert (level.inter.size, level.inter.rank) == (3, rank % 3)
    assert await level.inter.allgather_object(rank) == [rank // 3 * 3 + k for k in range(3)]
    # In two steps, within and across, everybody has the sum of all.
    total = await level.intra.allreduce(rank)
    assert await level.inter.allreduce(total) == sum(range(coll.size))


@pytest.mark.ranks(7)
@pytest.mark.ranks(7)
async def test_g3_tree_links_the_first_ranks(coll: Communicator) -> None:
    rank = coll.rank
    level = (await coll.hierarchy(str(rank % 3)))[1]
    assert level.form == "tree"
    total = await level.intra.reduce(rank)
    if level.intra.rank == 0:
        assert rank < 3
        assert await level.inter.allgather_object(rank) == [0, 1, 2]
        total = await level.inter.allreduce(total)
    else:
        assert level.inter.rank == -1
        with pytest.raises(aiodist.CommunicatorError, match="outside"):
            level.inter.barrier()
    assert await level.intra.broadcast(total or 0) == sum(range(7))


@pytest.mark.ranks(4)
async def test_g3_tree_may_be_asked_for(coll: Communicator) -> None:
    h = await coll.hierarchy(str(coll.rank % 2), form="tree")
    assert h[1].form == "tree"
    assert h[1].inter.rank == (coll.rank if coll.rank < 2 else -1)
    below = await h.below(str(coll.rank))
    assert [level.form for level in below] == ["cartesian", "tree", "cartesian"]
    assert below[2].inter.size == 2
    assert [level.form for level in await coll.hierarchy(form="tree")] == ["cartesian", "tree"]  # by host


@pytest.mark.ranks(2)
async def test_g3_forms_are_checked(coll: Communicator) -> None:
    with pytest.raises(ValueError, match="form='ring': expected 'cartesian', 'tree' or None"):
        coll.hierarchy("a", form="ring")  # type: ignore[arg-type]
    forms: tuple[Form, Form] = ("tree", "cartesian")
    sides = r"rank 0: hierarchy with 1 level\(s\) by a, form tree; rank 1: .* by a, form cartesian"
    with pytest.raises(aiodist.MismatchError, match=sides):
        await coll.hierarchy("a", form=forms[coll.rank])


@pytest.mark.parametrize("make", [lambda c, key: c.hierarchy(key, form="cartesian"), lambda c, key: c.hierarchy(key)])
def test_g3_cartesian_of_unequal_groups_falls_to_tree_and_says_so_once(
    make: Callable[[Communicator, str], aiodist.Handle[aiodist.communicator.Hierarchy]],
) -> None:
    async def main() -> str:
        async with aiodist.init() as coll:
            h = await (await make(coll, str(coll.rank % 2))).below("a")
            return h[1].form

    with heard() as caught:
        assert aiodist.testing.run_ranks(3, main) == ["tree"] * 3
    asked = make.__code__.co_consts != (None,)
    told = [(w.category, str(w.message), w.filename) for w in caught]
    text = "world/hierarchy1 is linked as a tree, not cartesian as requested: level 1: groups of 2, 1 ranks"
    assert told == [(RuntimeWarning, text, __file__)] * asked
