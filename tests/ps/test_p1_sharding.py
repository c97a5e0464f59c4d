"""P1: where tensors lie. Every element on exactly one server, blocks of equal length but for one, leaders spread."""

from __future__ import annotations

from collections import Counter
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiodist.ps.sharding import Block, place

names = st.text(st.characters(), max_size=20)
"""Of any characters, surrogates too."""


@settings(deadline=None)
@given(names, st.integers(0, 10_000), st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 40), st.integers(1, 100_000))
def test_p1_every_element_lies_on_exactly_one_server(
    name: str, numel: int, itemsize: int, servers: int, split: int
) -> None:
    placement = place(name, numel, itemsize, servers, split)
    blocks = placement.blocks
    assert [block.start for block in blocks] == [0, *(block.stop for block in blocks[:-1])]
    assert blocks[-1].stop == numel
    assert all(0 <= block.server < servers for block in blocks)
    assert len({block.server for block in blocks}) == len(blocks)
    assert all(placement.on(block.server) == block for block in blocks)


@settings(deadline=None)
@given(names, st.integers(1, 10_000), st.sampled_from([1, 2, 4, 8]), st.integers(2, 40), st.integers(1, 100_000))
def test_p1_large_ones_are_cut_evenly_and_small_ones_are_whole(
    name: str, numel: int, itemsize: int, servers: int, split: int
) -> None:
    placement = place(name, numel, itemsize, servers, split)
    sizes = [block.numel for block in placement.blocks]
    if numel * itemsize < split:
        assert sizes == [numel]
        assert placement.whole
    else:
        assert len(sizes) == min(servers, numel)
        assert max(sizes) - min(sizes) <= 1
        assert sizes == sorted(sizes, reverse=True)  # the remainder is spread over the first
        assert min(sizes) >= 1


@settings(deadline=None)
@given(names, st.integers(0, 1000), st.integers(1, 40), st.integers(1, 1000))
def test_p1_the_leader_has_the_first_block_and_the_rest_follow_it(
    name: str, numel: int, servers: int, split: int
) -> None:
    placement = place(name, numel, 4, servers, split)
    assert placement.leader == crc32(name.encode("utf-8", "surrogatepass")) % servers
    assert [block.server for block in placement.blocks] == [
        (placement.leader + i) % servers for i in range(len(placement.blocks))
    ]


@pytest.mark.parametrize("servers", [1, 2, 3, 7])
def test_p1_an_empty_tensor_is_one_empty_block(servers: int) -> None:
    placement = place("nothing", 0, 4, servers, 1)
    assert placement.blocks == (Block(placement.leader, 0, 0),)


def test_p1_fewer_elements_than_servers() -> None:
    placement = place("few", 2, 4, servers=5, split_bytes=1)
    assert [block.numel for block in placement.blocks] == [1, 1]
    assert sum(placement.on(server) is None for server in range(5)) == 3


def test_p1_exactly_split_bytes_is_cut_and_one_byte_less_is_not() -> None:
    assert len(place("w", 256, 4, 2, split_bytes=1024).blocks) == 2
    assert place("w", 255, 4, 2, split_bytes=1024).whole
    assert place("w", 256, 4, 1, split_bytes=1024).whole


@pytest.mark.parametrize("servers", [2, 3, 5, 8, 16])
@pytest.mark.parametrize("pattern", ["{}", "layers.{}.weight", "key-{:06d}"])
def test_p1_leaders_of_many_names_are_balanced(servers: int, pattern: str) -> None:
    leaders = Counter(place(pattern.format(i), 1, 4, servers, 1 << 20).leader for i in range(10_000))
    assert sorted(leaders) == list(range(servers))
    assert max(leaders.values()) <= 1.2 * 10_000 / servers


@pytest.mark.parametrize(
    ("numel", "itemsize", "servers", "split", "said"),
    [
        (4, 4, 0, 1, "0 servers"),
        (4, 4, -1, 1, "-1 servers"),
        (-1, 4, 2, 1, "-1 elements"),
        (4, -4, 2, 1, "-4 bytes"),
        (4, 4, 2, 0, "split_bytes=0"),
    ],
)
def test_p1_sizes_that_make_no_sense(numel: int, itemsize: int, servers: int, split: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        place("w", numel, itemsize, servers, split)
