"""C10: ranks exchange facts, errors and values that must be equal; each difference is named on every rank."""

import asyncio
import math
from typing import Any

import pytest

import aiodist
from aiodist import Communicator, MismatchError, PeerLost, RemoteError
from aiodist.testing import kill_rank, run_ranks
from aiodist.world.agree import agree


@pytest.mark.ranks(1, 3)
async def test_c10_all_ranks_learn_the_facts_of_all(coll: Communicator) -> None:
    facts = await agree(coll, "a test", {"rank": coll.rank, "text": "x" * coll.rank}, same=[1, None])
    assert facts == [{"rank": rank, "text": "x" * rank} for rank in range(coll.size)]
    assert await agree(None, "a test", (1, math.inf)) == [[1, math.inf]]


@pytest.mark.ranks(3)
async def test_c10_an_error_of_one_rank_is_raised_on_all(coll: Communicator) -> None:
    """It precedes a difference of values, which a failed rank does not give."""
    mine = FileNotFoundError("no such folder") if coll.rank == 1 else None
    expected = FileNotFoundError if coll.rank == 1 else RemoteError
    with pytest.raises(expected, match="no such folder") as raised:
        await agree(coll, "a test", coll.rank, same=coll.rank, error=mine)
    if isinstance(raised.value, RemoteError):
        assert "rank 1 failed in a test: FileNotFoundError" in str(raised.value)
        assert raised.value.raised_by == 1
        assert raised.value.rank == coll.rank
    assert await agree(coll, "a test", coll.rank) == [0, 1, 2]


@pytest.mark.ranks(3)
async def test_c10_a_fact_that_is_no_json_fails_on_all(coll: Communicator) -> None:
    unsuitable: dict[str, Any] = {"same": {1}} if coll.rank == 2 else {}
    with pytest.raises(TypeError if coll.rank == 2 else RemoteError, match="not JSON serializable"):
        await agree(coll, "a test", **unsuitable)
    with pytest.raises(TypeError if coll.rank == 0 else RemoteError, match="not JSON serializable"):
        await agree(coll, "a test", object() if coll.rank == 0 else None)
    assert await coll.allreduce(1) == 3


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", ["fact", "same"])
async def test_c10_a_fact_that_is_nested_too_deeply_fails_on_all(coll: Communicator, way: str) -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    given: dict[str, Any] = {way: deep if coll.rank else []}
    with pytest.raises(RecursionError if coll.rank else RemoteError, match="recursion"):
        await agree(coll, "a test", **given)
    assert await coll.allreduce(1) == 2


async def test_c10_an_error_of_the_only_rank_is_raised() -> None:
    with pytest.raises(KeyError):
        await agree(None, "a test", error=KeyError("x"))


DIFFERENT: dict[str, tuple[Any, Any, str]] = {
    "value": ({"lr": [0.1, 0.2]}, {"lr": [0.1, 0.3]}, "lr/1 of a test: ranks 0, 2: 0.2; rank 1: 0.3"),
    "missing": ([{"a": 1}, "x"], [{"a": 1}], "1 of a test: ranks 0, 2: x; rank 1: \\(missing\\)"),
    "key": ({"a": {"b": 1}}, {"a": {"c": 1}}, "a/b of a test: ranks 0, 2: 1; rank 1: \\(missing\\)"),
    "text": ({"a": "missing"}, {}, "a of a test: ranks 0, 2: missing; rank 1: \\(missing\\)"),
    "kind": ({"a": 1}, {"a": 1.0}, "a of a test: ranks 0, 2: 1; rank 1: 1.0"),
    "long": (["x" * 500 + "a"], ["x" * 500 + "b"], "0 of a test: ranks 0, 2: …x{100}a; rank 1: …x{100}b"),
    "nesting": ({"nan": math.nan, "z": [1]}, {"nan": math.nan, "z": 1}, r"z of a test: ranks 0, 2: \[1\]; rank 1: 1"),
}


@pytest.mark.ranks(3)
@pytest.mark.parametrize("what", DIFFERENT)
async def test_c10_the_first_difference_is_named(coll: Communicator, what: str) -> None:
    first, other, text = DIFFERENT[what]
    with pytest.raises(MismatchError, match=f"ranks disagree on {text} ") as raised:
        await agree(coll, "a test", same=other if coll.rank == 1 else first)
    assert (raised.value.rank, raised.value.comm) == (coll.rank, coll.name)
    assert await coll.allreduce(1) == 3


@pytest.mark.ranks(2)
async def test_c10_equal_values_in_another_order_of_keys_agree(coll: Communicator) -> None:
    pairs = [("a", 1), ("nan", math.nan)]
    assert await agree(coll, "a test", same=dict(pairs if coll.rank else reversed(pairs))) == [None, None]


def test_w3_what_fails_here_because_a_rank_was_lost_is_its_loss() -> None:
    """A program that continues handles `PeerError`; its own error may follow from the loss."""

    async def main(number: int) -> None:
        async with aiodist.init(elastic=True) as coll:
            if number == 1:
                kill_rank()
                await asyncio.sleep(0)
            with pytest.raises(PeerLost):
                await coll.barrier()
            for mine in (FileNotFoundError("no such folder"), None):
                with pytest.raises(PeerLost, match="rank 1") as lost:
                    await agree(coll, "a checkpoint", error=mine)
                assert lost.value.__cause__ is mine

    run_ranks(2, main, elastic=(1, 2))
