"""H9: which bytes are in flight, against a table that is looked through from end to end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aiodist import _core

Range = tuple[int, int, bool]  # first byte, how many, whether they are written


def clash(a: Range, b: Range) -> bool:
    return (a[2] or b[2]) and a[0] < b[0] + b[1] and b[0] < a[0] + a[1]


ranges = st.tuples(st.integers(0, 400), st.integers(1, 40), st.booleans())


@given(st.lists(st.one_of(ranges, st.integers(0, 1000)), max_size=300))
def test_h9_claims_clash_where_they_overlap_and_one_is_written(steps: list[Range | int]) -> None:
    """A number gives one of those that are held back."""
    claims = _core.Claims()
    held: list[tuple[Range, object]] = []
    for step in steps:
        if isinstance(step, int):
            if held:
                (gone, _) = held.pop(step % len(held))
                claims.release(*gone)
                continue
        else:
            owner = object()
            holder = claims.claim(*step, owner)
            clashing = [other for other, _ in held if clash(step, other)]
            assert (holder is None) == (not clashing), (step, clashing)
            if holder is None:
                held.append((step, owner))
        assert len(claims) == len(held)


def test_h9_many_claims_in_any_order() -> None:
    """Claims that fill several chunks, added from the front, from the back, and from the middle."""
    for order in (range(2000), range(1999, -1, -1), [i * 7919 % 2000 for i in range(2000)]):
        claims = _core.Claims()
        owners = {i: f"owner {i}" for i in range(2000)}
        for i in order:
            assert claims.claim(16 * i, 10, True, owners[i]) is None
        assert [claims.claim(16 * i + 9, 7, True, "other") for i in range(2000)] == list(owners.values())
        assert all(claims.claim(16 * i + 10, 6, False, "between") is None for i in range(2000))
        for i in order:
            claims.release(16 * i, 10, True)
            claims.release(16 * i + 10, 6, False)
        assert len(claims) == 0
