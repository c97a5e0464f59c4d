"""P2: values and outputs that overlap: servers and outputs have what copies give, or the call raises."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from aiodist import Communicator
from aiodist.ps import Asynchronous, Bounded, ParameterServer, Synchronous
from tests.support.calls import drawn

LARGE = 100_000
"""Number of elements that are not copied at the call."""


class Example(NamedTuple):
    """A call, with the places of values and outputs in one buffer, in quarters of a tensor."""

    call: str
    numel: int
    halves: tuple[int, int, int, int]
    same: bool
    """Each output is the value of the same name."""
    arena: bool


EXAMPLES = st.builds(
    Example,
    st.sampled_from(["one", "list", "pull", "push"]),
    st.sampled_from([8, LARGE]),
    st.tuples(*[st.integers(0, 16)] * 4),
    st.booleans(),
    st.booleans(),
)


async def _tried(
    ps: ParameterServer, coll: Communicator, there: dict[str, Tensor], example: Example, *, early: bool
) -> bool:
    """Return whether the call was accepted; `there` are the servers' values, which a read may see `early`."""
    numel = example.numel
    names = [f"{kind}{numel}" for kind in "ab"]
    base = coll.arena_empty(6 * numel) if example.arena else torch.empty(6 * numel)
    base.copy_(torch.arange(6 * numel).remainder(13) + 1)
    places = [quarter * numel // 4 for quarter in example.halves]
    values = [base[place : place + numel] for place in places[:2]]
    outs = values if example.same else [base[place : place + numel] for place in places[2:]]
    before, pushed = base.clone(), [value.clone() for value in values]
    calls: dict[str, Any] = {
        "one": lambda: ps.push_pull(names[0], values[0], outs[0], timeout=60),
        "list": lambda: ps.push_pull(names, values, outs, timeout=60),
        "pull": lambda: ps.pull(names, outs, timeout=60),
        "push": lambda: ps.push(names, values, timeout=60),
    }
    try:
        handle = calls[example.call]()
    except ValueError:
        assert torch.equal(base, before), example
        return False
    await handle
    count = 1 if example.call == "one" else 2
    old = {name: there[name].clone() for name in names}
    for name, value in zip(names[:count], pushed, strict=False):
        if example.call != "pull":
            there[name] += value
    for name, out in zip(names[:count], outs, strict=False):
        if example.call != "push":
            assert bool(((out == there[name]) | (out == old[name] if early else out == there[name])).all()), example
    return True


@pytest.mark.thorough
@pytest.mark.drawn(4)
@pytest.mark.parametrize("policy", [Asynchronous(), Bounded(1), Synchronous("sum")], ids=repr)
@pytest.mark.parametrize("reads", ["snapshot", "lock-free"])
@pytest.mark.ranks(3)
@pytest.mark.ranks(2, 3, backend=("openmpi", "shm", "gloo"))
async def test_p2_what_is_pushed_and_pulled_may_overlap_or_is_refused(
    coll: Communicator, policy: Any, reads: Any
) -> None:
    servers = list(range(coll.size - 1))
    there = {f"{kind}{numel}": torch.zeros(numel) for kind in "ab" for numel in (8, LARGE)}
    tensors = {name: t.clone() for name, t in there.items()}
    async with ParameterServer(
        coll, tensors, servers=servers, workers=[coll.size - 1], reads=reads, consistency=policy, split_bytes=1024
    ) as ps:
        if coll.rank == coll.size - 1:
            early = reads == "lock-free" and policy.accepts  # a push is done before it is applied
            taken = [await _tried(ps, coll, there, example, early=early) for example in drawn(EXAMPLES, 70)]
            assert 10 < sum(taken) < len(taken)
            for name, t in there.items():
                assert torch.equal(await ps.pull(name, torch.empty_like(t), reads="snapshot"), t), name


@pytest.mark.ranks(2)
async def test_p2_an_output_that_overlaps_another_value_is_named(coll: Communicator) -> None:
    async with ParameterServer(coll, {"a": torch.zeros(4), "b": torch.zeros(4)}, workers=[0, 1]) as ps:
        t = torch.ones(8)
        with pytest.raises(ValueError, match="out for 'a' overlaps the values for 'b', but is not the same"):
            ps.push_pull(["a", "b"], [t[:4], t[4:]], [t[4:], t[:4]])
        with pytest.raises(ValueError, match="out for 'a' overlaps the values for 'a', but is not the same"):
            ps.push_pull("a", t[:4], t[1:5])
        await ps.push_pull("a", t[:4], t[:4])
