"""P16: nothing is unpickled unless the user chose `Pickle`."""

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from aiodist import Communicator, ParameterServer
from aiodist.codecs import QSGD, Half, Json, Pickle, TopK
from aiodist.errors import MismatchError
from aiodist.ps import SGD, Quorum, Synchronous

SECONDS = 20.0
RULE = SGD(lr=0.1)  # torch itself imports much with its first optimizer


@pytest.fixture
def nothing_unpickled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Refuse to unpickle, and tell what tried."""
    tried: list[str] = []

    def refuse(*args: Any, **how: Any) -> Any:
        tried.append("unpickled")
        raise AssertionError("something was unpickled")

    class Refusing(pickle.Unpickler):
        load = refuse

    for name in ("load", "loads", "_load", "_loads"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(pickle, "Unpickler", Refusing)
    monkeypatch.setattr(torch, "load", refuse)
    yield tried
    assert not tried


@pytest.mark.ranks(3)
@pytest.mark.parametrize(("servers", "codecs"), [(None, (TopK(0.5), Half())), (1, (QSGD(), QSGD())), (1, (None, None))])
@pytest.mark.parametrize("consistency", [None, Synchronous("sum"), Quorum(1, "sum")], ids=str)
async def test_p16_a_whole_life_unpickles_nothing(
    coll: Communicator, nothing_unpickled: list[str], servers: Any, codecs: Any, consistency: Any
) -> None:
    codec, pull_codec = codecs
    tensors = {
        "float": torch.zeros(100),
        "half": torch.zeros(3, 5, dtype=torch.bfloat16),
        "large": torch.zeros(70_000),
        "int": torch.zeros(7, dtype=torch.int64),
        "bool": torch.zeros(7, dtype=torch.bool),
        "complex": torch.zeros(7, dtype=torch.complex128),
    }
    async with ParameterServer(
        coll, tensors, rule="copy", consistency=consistency, servers=servers, codec=codec, pull_codec=pull_codec,
        split_bytes=1000, rules={"sgd": RULE},
    ) as ps:  # fmt: skip
        if ps.is_worker:
            await ps.init("more", torch.zeros(5), rule="sgd")
            await ps.init("meta", {"a": [None, 1, "x"]}, codec=Json())
            await ps.configure("more", lr=0.5, timeout=SECONDS)
            await ps.push_pull(None, [torch.ones_like(t) for t in tensors.values()], timeout=SECONDS)
            await ps.push_pull("more", torch.ones(5), timeout=SECONDS)
            assert await ps.push_pull("meta", {"b": 40_000 * "x"}, timeout=SECONDS) == {"b": 40_000 * "x"}
            await ps.pull(reads="lock-free", timeout=SECONDS)
            await ps.prefetch("float", timeout=SECONDS)
            await ps.integrate(lambda mine, theirs: mine.copy_(theirs), "float", timeout=SECONDS)
            await ps.sync(timeout=SECONDS)
            await ps.barrier(timeout=SECONDS)
            await ps.free(["more", "float"], timeout=SECONDS)
    assert not nothing_unpickled


@pytest.mark.ranks(2)
async def test_p16_different_settings_are_an_error_without_unpickling(
    coll: Communicator, nothing_unpickled: list[str]
) -> None:
    with pytest.raises(MismatchError, match=r"disagree on split_bytes of .*: rank 0: 1000; rank 1: 1001"):
        async with ParameterServer(coll, split_bytes=1000 + coll.rank):
            raise AssertionError("it was opened")
    assert not nothing_unpickled


@pytest.fixture
def unpickled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return what was unpickled since."""
    loads, seen = pickle.loads, []

    def watched(*args: Any, **how: Any) -> Any:
        seen.append(loads(*args, **how))
        return seen[-1]

    monkeypatch.setattr(pickle, "loads", watched)
    return seen


@pytest.mark.ranks(2)
async def test_p16_objects_are_unpickled_where_the_user_chose_it(coll: Communicator, unpickled: list[Any]) -> None:
    async with ParameterServer(coll) as ps:
        await ps.init("pickle", {1, 2}, codec=Pickle())
        await ps.init("json", [1, 2], codec=Json())
        assert await ps.pull("json", timeout=SECONDS) == [1, 2]
        await ps.barrier()
        assert not unpickled
        await ps.barrier()
        assert await ps.pull("pickle", timeout=SECONDS) == {1, 2}
        await ps.barrier()
        assert unpickled == [{1, 2}, {1, 2}]
