"""P10: Python objects on a parameter server, of any size, by a codec that the user chose."""

import asyncio
from pickle import PicklingError
from typing import Any

import pytest
import torch

from aiodist import Communicator, ParameterServer
from aiodist.codecs import Json, ObjectCodec, Pickle
from aiodist.ps import Bounded, Policy, Synchronous

SECONDS = 20.0
CODECS: list[ObjectCodec] = [Json(), Pickle()]
SIZES = (15, 40_000, 15, 1_000_000, 0, 3_000)


@pytest.fixture(params=CODECS, ids=lambda codec: type(codec).__name__)
def codec(request: pytest.FixtureRequest) -> ObjectCodec:
    chosen: ObjectCodec = request.param
    return chosen


def thing(rank: int, size: int) -> dict[str, Any]:
    return {"str": "x" * size, "rank": rank, "list": [rank] * (rank + 1)}


@pytest.mark.ranks(1, 3)
async def test_p10_objects_of_jumping_sizes_pass(coll: Communicator, codec: ObjectCodec) -> None:
    async with ParameterServer(coll) as ps:
        names = [f"meta{i}" for i in range(3)]
        for name in names:
            await ps.init(name, thing(99, 7), codec=codec)
            assert await ps.pull(name) == thing(99, 7)
        await ps.barrier()
        for size in SIZES:
            for rank in range(coll.size):
                if rank == coll.rank:
                    await ps.push(names, [thing(rank, size + i) for i in range(3)], timeout=SECONDS)
                await ps.barrier()
                for i, name in enumerate(names):
                    assert await ps.pull(name, timeout=SECONDS) == thing(rank, size + i)
                assert await ps.pull(names[0], reads="lock-free", timeout=SECONDS) == thing(rank, size)
                await ps.barrier()


@pytest.mark.drawn(1)
@pytest.mark.ranks(2, backend=("mpi", "gloo"))
async def test_p10_objects_pass_between_processes(coll: Communicator, codec: ObjectCodec) -> None:
    async with ParameterServer(coll) as ps:
        for i, size in enumerate(SIZES):
            for rank in range(coll.size):
                name = f"{i} {rank}"
                await ps.init(name, thing(rank, size), codec=codec)
                assert await ps.pull(name, timeout=SECONDS) == thing(rank, size)
                await ps.barrier()
                if rank == coll.rank:
                    assert await ps.push_pull(name, thing(7, 40_001), timeout=SECONDS) == thing(7, 40_001)
                    await ps.push(name, thing(rank, 500_000), timeout=SECONDS)
                await ps.barrier()
                assert await ps.pull(name, timeout=SECONDS) == thing(rank, 500_000)
                await ps.barrier()


@pytest.mark.ranks(3)
async def test_p10_objects_may_be_read_while_they_are_pushed(coll: Communicator, codec: ObjectCodec) -> None:
    async with ParameterServer(coll, servers=1) as ps:
        if ps.is_worker:
            await ps.init("meta", thing(0, 0), codec=codec)
            pushes = []
            for i in range(8):
                pushes.append(ps.push("meta", thing(coll.rank, SIZES[i % len(SIZES)])))
                found = await ps.pull("meta", timeout=SECONDS)
                assert found == thing(found["rank"], len(found["str"]))
            await asyncio.wait_for(asyncio.gather(*pushes), SECONDS)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("obj", [None, False, 0, "", [], {}, 0.0])
async def test_p10_objects_that_are_false_are_objects(coll: Communicator, codec: ObjectCodec, obj: Any) -> None:
    async with ParameterServer(coll) as ps:
        await ps.init("meta", obj, codec=codec)
        first = await ps.pull("meta", timeout=SECONDS)
        assert (type(first), first) == (type(obj), obj)
        await ps.barrier()
        await ps.push("meta", "something", timeout=SECONDS)
        await ps.push("meta", obj, timeout=SECONDS)
        await ps.barrier()
        found = await ps.pull(["meta"], timeout=SECONDS)
        assert (type(found[0]), found) == (type(obj), [obj])
        await ps.barrier()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("policy", [Synchronous("sum"), Bounded(1)], ids=repr)
async def test_p10_objects_follow_the_consistency(coll: Communicator, codec: ObjectCodec, policy: Policy) -> None:
    steps = isinstance(policy, Synchronous)  # else the other one may be ahead by one
    async with ParameterServer(coll, consistency=policy) as ps:
        await ps.init("meta", 0, codec=codec)
        for step in range(1, 4):
            assert await ps.push_pull("meta", step, timeout=SECONDS) in ([step] if steps else [step, step + 1])
        await ps.barrier()


@pytest.mark.ranks(2)
async def test_p10_an_object_that_cannot_be_encoded_is_an_error_at_the_call(coll: Communicator) -> None:
    async with ParameterServer(coll) as ps:
        await ps.init("json", 1, codec=Json())
        await ps.init("pickle", 1, codec=Pickle())
        with pytest.raises(TypeError, match="JSON serializable"):
            ps.push("json", {1, 2})
        with pytest.raises((AttributeError, TypeError, PicklingError), match=r"pickle|local"):
            ps.push(["json", "pickle"], [2, lambda: None])
        await ps.sync(timeout=SECONDS)
        await ps.barrier()
        assert await ps.pull(["json", "pickle"], timeout=SECONDS) == [1, 1]
        await ps.barrier()


class Stubborn:
    """An object that can be pickled but not unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return int, ("no number",)


@pytest.mark.ranks(2)
async def test_p10_an_object_that_cannot_be_decoded_is_an_error_on_await(coll: Communicator) -> None:
    async with ParameterServer(coll) as ps:
        for name in ("a", "b", "c", "d"):  # on both ranks
            await ps.init(name, 1, codec=Pickle())
            await ps.barrier()
            if coll.rank == 0:
                await ps.push(name, Stubborn(), timeout=SECONDS)
            await ps.barrier()
            read = ps.pull(name)
            with pytest.raises(ValueError, match="no number"):
                await asyncio.wait_for(read, SECONDS)
            await ps.barrier()
            await ps.push(name, 2, timeout=SECONDS)
            assert await ps.pull(name, timeout=SECONDS) == 2


@pytest.mark.ranks(2)
async def test_p10_tensor_codecs_leave_objects_alone(coll: Communicator, codec: ObjectCodec) -> None:
    from aiodist.codecs import TopK

    async with ParameterServer(coll, codec=TopK(0.01), pull_codec=TopK(0.01), consistency=Bounded(2)) as ps:
        await ps.init("meta", thing(0, 40_000), codec=codec)
        assert await ps.push_pull("meta", thing(1, 50_000), timeout=SECONDS) == thing(1, 50_000)
        await ps.barrier()


@pytest.mark.ranks(2)
async def test_p10_objects_take_no_rule_but_copy_and_no_integration(coll: Communicator) -> None:
    async with ParameterServer(coll, {"w": torch.zeros(3)}) as ps:
        with pytest.raises(ValueError, match="rule add for the object 'meta': expected copy"):
            ps.init("meta", 1, codec=Json(), rule="add")
        await ps.init("meta", 1, codec=Json())
        with pytest.raises(ValueError, match=r"rule max, alpha=1\.0 for the object 'meta': expected copy"):
            ps.push("meta", 1, rule="max")
        for alpha in (2.0, float("nan"), "x"):  # the block did not end once such a push had begun
            with pytest.raises(ValueError, match=r"alpha=.* for the object 'meta': expected copy and 1"):
                ps.push("meta", 1, alpha=alpha)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="integrate of 'meta': expected a tensor"):
            ps.integrate(lambda mine, theirs: None, "meta")
        await ps.barrier()
