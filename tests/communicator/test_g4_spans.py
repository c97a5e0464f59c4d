"""G4: between which two levels collectives run."""

import pytest
import torch

import aiodist
from aiodist import Communicator
from aiodist.communicator.levels import Levels

# --- the groups alone ----------------------------------------------------------------------------------------------


def test_g4_the_two_levels_of_a_span() -> None:
    def levels(rank: int) -> Levels:
        return (
            Levels(12, rank)
            .below([str(r // 6) for r in range(12)])
            .below([str(r // 2 % 3) for r in range(12)])
            .below([str(r % 2) for r in range(12)])
        )

    inner = levels(7).span(1, 2)  # this rank is rank 1 of a group of 6
    assert (inner.size, inner.rank, inner.depth) == (6, 1, 1)
    assert inner.groups(1) == ((0, 1), (2, 3), (4, 5))
    assert inner.links(1) == ((0, 2, 4), (1, 3, 5))
    outer = levels(7).span(0, 2)  # all ranks in groups of 2: what lies between does not matter
    assert (outer.size, outer.rank) == (12, 7)
    assert outer.groups(1) == tuple((r, r + 1) for r in range(0, 12, 2))
    assert outer.links(1) == (tuple(range(0, 12, 2)), tuple(range(1, 12, 2)))
    assert outer.key(1) == "1/0"
    assert levels(7).span(-2, -1) == levels(7).span(2, 3)
    one = Levels(4, 2).below(["a", "b", "b", "a"])
    assert one.span(0, -1) == one
    assert levels(7).span(0, 3).groups(1) == tuple((r,) for r in range(12))


def test_g4_a_span_never_mixes_keys_up() -> None:
    levels = Levels(4, 0).below(["a/b", "a", "a/b", "a"]).below(["c", "b/c", "c", "b/c"]).span(0, 2)
    assert levels.groups(1) == ((1, 3), (0, 2))


def test_g4_a_span_keeps_the_form_of_its_inner_level() -> None:
    assert Levels(2, 0).below(["a", "b"]).below(["c", "c"], "tree").span(0, 2).form(1) == "tree"
    assert Levels(2, 0).below(["a", "b"], "tree").below(["c", "c"]).span(0, 2).form(1) == "cartesian"


# --- with communicators --------------------------------------------------------------------------------------------


@pytest.mark.ranks(12)
@pytest.mark.ranks(12)
async def test_g4_collectives_run_between_two_levels(coll: Communicator) -> None:
    rank = coll.rank
    h = await coll.hierarchy(str(rank // 6), str(rank // 2), str(rank % 2))
    span = await h.span(1, 2)
    assert (span.size, span.rank) == (6, rank % 6)
    assert await span.allreduce(rank) == sum(range(rank // 6 * 6, rank // 6 * 6 + 6))
    assert span is not h[1].intra
    assert span is await h.span(1, 2)
    # Its two levels are exactly the levels of the span.
    two = await span.hierarchy()
    assert [level.groups for level in two] == [((0, 1, 2, 3, 4, 5),), ((0, 1), (2, 3), (4, 5))]
    assert await two[1].intra.allgather_object(rank) == await h[2].intra.allgather_object(rank)
    assert await two[1].inter.allgather_object(rank) == await h[2].inter.allgather_object(rank)
    # From the top, across a level that lies between.
    wide = await (await h.span(0, 2)).hierarchy()
    assert wide.comm.size == 12
    assert await wide[1].inter.allgather_object(rank) == list(range(rank % 2, 12, 2))
    assert (await h.span()).size == 2
    again = await wide.comm.dup()
    assert again.levels == wide.comm.levels == h.levels.span(0, 2)


@pytest.mark.ranks(7)
async def test_g4_data_parallel_groups_inside_a_parameter_server(coll: Communicator) -> None:
    """Two groups of 4 and 3 average their gradients; only their first ranks meet the server's value."""
    h = await coll.hierarchy(str(coll.rank // 4), str(coll.rank % 2))
    group, servers = await h.span(1, 2), h[1].inter
    weights, speed = torch.zeros(3), 0.5
    for _ in range(3):
        gradient = torch.full((3,), float(coll.rank))
        await group.allreduce(gradient, op="mean")
        weights -= speed * gradient
    mean = 1.5 if coll.rank < 4 else 5.0
    assert weights.tolist() == [-3 * speed * mean] * 3
    if group.rank == 0:
        centre = await servers.allreduce(weights.clone(), op="mean")
        weights += 0.5 * (centre - weights)
    await group.broadcast(weights)
    centre_is = -3 * speed * (1.5 + 5.0) / 2
    assert weights.tolist() == [(-3 * speed * mean + centre_is) / 2] * 3


@pytest.mark.ranks(3)
async def test_g4_wrong_spans(coll: Communicator) -> None:
    h = await coll.hierarchy("a", "b")
    for outer, inner in ((1, 1), (2, 1), (-1, 0)):
        with pytest.raises(ValueError, match="expected the second to be below the first"):
            h.span(outer, inner)
    with pytest.raises(ValueError, match="level 3: expected 0, all ranks, to 2"):
        h.span(0, 3)
    with pytest.raises(aiodist.MismatchError, match=r"rank 0: span\(0, 1\) of .*; ranks 1, 2: span\(0, 2\) of "):
        await h.span(0, 2 if coll.rank else 1)
    assert await (await h.span(0, 1)).allreduce(1) == 3
