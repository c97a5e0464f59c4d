"""P1: where tensors lie. Every element on exactly one server, blocks of equal length but for one, leaders spread."""

from __future__ import annotations

from collections import Counter
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodist.ps.settings import Span, place

names = st.text(st.characters(), max_size=20)
"""Names of any characters, surrogates too."""


@given(names, st.integers(0, 10_000), st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 40), st.integers(1, 100_000))
def test_p1_every_element_lies_on_exactly_one_server(
    name: str, numel: int, itemsize: int, servers: int, split: int
) -> None:
    spans = place(name, numel, itemsize, range(servers), split)
    assert [span.start for span in spans] == [0, *(span.stop for span in spans[:-1])]
    assert spans[-1].stop == numel
    assert all(0 <= span.rank < servers for span in spans)
    assert len({span.rank for span in spans}) == len(spans)


@given(names, st.integers(1, 10_000), st.sampled_from([1, 2, 4, 8]), st.integers(2, 40), st.integers(1, 100_000))
def test_p1_large_ones_are_cut_evenly_and_small_ones_are_whole(
    name: str, numel: int, itemsize: int, servers: int, split: int
) -> None:
    sizes = [span.stop - span.start for span in place(name, numel, itemsize, range(servers), split)]
    if numel * itemsize < split:
        assert sizes == [numel]
    else:
        assert len(sizes) == min(servers, numel)
        assert max(sizes) - min(sizes) <= 1
        assert sizes == sorted(sizes, reverse=True)  # the remainder is spread over the first
        assert min(sizes) >= 1


@given(names, st.integers(0, 1000), st.integers(1, 40), st.integers(1, 1000))
def test_p1_the_leader_has_the_first_block_and_the_rest_follow_it(
    name: str, numel: int, servers: int, split: int
) -> None:
    spans = place(name, numel, 4, range(100, 100 + servers), split)
    leader = crc32(name.encode("utf-8", "surrogatepass")) % servers
    assert [span.rank for span in spans] == [100 + (leader + i) % servers for i in range(len(spans))]


@pytest.mark.parametrize("servers", [1, 2, 3, 7])
def test_p1_an_empty_tensor_is_one_empty_block(servers: int) -> None:
    assert place("nothing", 0, 4, range(servers), 1) == (Span(crc32(b"nothing") % servers, 0, 0),)


def test_p1_exactly_split_bytes_is_cut_and_one_byte_less_is_not() -> None:
    assert len(place("w", 256, 4, (0, 1), split_bytes=1024)) == 2
    assert len(place("w", 255, 4, (0, 1), split_bytes=1024)) == 1
    assert len(place("w", 256, 4, (0,), split_bytes=1024)) == 1


@pytest.mark.parametrize("servers", [2, 3, 5, 8, 16])
@pytest.mark.parametrize("pattern", ["{}", "layers.{}.weight", "key-{:06d}"])
def test_p1_leaders_of_many_names_are_balanced(servers: int, pattern: str) -> None:
    leaders = Counter(place(pattern.format(i), 1, 4, range(servers), 1 << 20)[0].rank for i in range(10_000))
    assert sorted(leaders) == list(range(servers))
    assert max(leaders.values()) <= 1.2 * 10_000 / servers
