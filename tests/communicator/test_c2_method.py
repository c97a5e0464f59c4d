"""C2: `allreduce`, whose plain calls the compiled core issues, is a method like those of Python."""

from __future__ import annotations

import inspect
import pydoc
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any, cast

import pytest
import torch

import aiodist
from aiodist import Communicator
from aiodist.communicator import parts_of

TWO = pytest.mark.ranks(2, backend=("local", "shm"))

Calls = list[Callable[[Communicator, torch.Tensor], Any]]
SUMS: Calls = [
    lambda coll, t: coll.allreduce(t),
    lambda coll, t: coll.allreduce(t, "sum"),
    lambda coll, t: coll.allreduce(t, op="sum"),
    lambda coll, t: coll.allreduce(t=t, op="sum"),
    lambda coll, t: coll.allreduce(t, impl="auto"),
    lambda coll, t: coll.allreduce(t, timeout=60, name=None),
    lambda coll, t: cast("Any", coll.allreduce)(*(t, "sum"), **{"".join(("im", "pl")): "auto"}),
    lambda coll, t: Communicator.allreduce(coll, t),
    lambda coll, t: partial(coll.allreduce, impl="auto")(t),
    lambda coll, t: getattr(coll, "allreduce")(t),  # noqa: B009  - reads the bound method first
]


@TWO
async def test_c2_each_way_to_pass_the_arguments_gives_the_sum(coll: Communicator) -> None:
    for i, call in enumerate(SUMS * 2):  # the core has a plan from the second call on
        t = torch.full((3,), coll.rank + i + 0.5)
        assert await call(coll, t) is t
        assert t.tolist() == [2 * i + 2.0] * 3
    bound: list[Any] = [coll.allreduce, partial(Communicator.allreduce, coll)]
    for way in bound:
        t = torch.full((3,), float(coll.rank))
        assert (await way(t, "max")).tolist() == [1.0] * 3
        assert (await way(t, op="mean")).tolist() == [1.0] * 3


@TWO
async def test_c2_wrong_arguments_are_those_of_a_function(coll: Communicator) -> None:
    t, call = torch.ones(2), cast("Any", coll.allreduce)
    for wrong, match in [
        (partial(call), "missing 1 required positional argument: 't'"),
        (partial(call, t, "sum", "auto"), "takes from 2 to 3 positional arguments but 4 were given"),
        (partial(call, t, "sum", op="sum"), "multiple values for argument 'op'"),
        (partial(call, t, ops="sum"), "unexpected keyword argument 'ops'"),
    ]:
        with pytest.raises(TypeError, match=match):
            wrong()
    assert (await coll.allreduce(t)).tolist() == [2.0] * 2


@TWO
async def test_c2_a_subclass_and_a_patch_replace_it(coll: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    class Doubled(Communicator):
        def allreduce(self, t: Any, *args: Any, **more: Any) -> Any:
            return super().allreduce(t.mul_(2), *args, **more)

    for other in (object.__new__(Doubled), object.__new__(Communicator)):
        vars(other).update(vars(coll))
        expected = 4.0 if isinstance(other, Doubled) else 2.0
        assert [(await other.allreduce(torch.ones(1))).item() for _ in range(2)] == [expected] * 2
    monkeypatch.setattr(Doubled, "allreduce", lambda self, t: (self, t))
    doubled: Any = object.__new__(Doubled)
    assert doubled.allreduce(1) == (doubled, 1)
    monkeypatch.setattr(doubled, "allreduce", lambda t: -t)
    assert doubled.allreduce(1) == -1


def test_c2_it_is_described_as_a_function() -> None:
    call = Communicator.allreduce
    assert inspect.isfunction(call)
    assert inspect.isroutine(call)
    assert list(inspect.signature(call).parameters)[:3] == ["self", "t", "op"]
    assert inspect.signature(call).parameters["impl"].default == "auto"
    assert call.__qualname__ == "Reductions.allreduce"
    assert call.__module__ == "aiodist.communicator.reductions"
    assert (call.__doc__ or "").startswith("Reduce `t` elementwise")
    assert "def allreduce(" in inspect.getsource(call)
    assert "elementwise over all ranks" in pydoc.render_doc(Communicator)
    assert repr(call).startswith("<function Reductions.allreduce at ")


@TWO
async def test_c2_a_bound_one_is_a_method(coll: Communicator) -> None:
    call = coll.allreduce
    assert isinstance(call, MethodType)
    assert call.__self__ is coll
    assert list(inspect.signature(call).parameters)[:2] == ["t", "op"]
    assert call == coll.allreduce


@pytest.mark.ranks(2, backend="shm")
async def test_c2_the_default_timeout_holds_where_the_core_issues(coll: Communicator) -> None:
    t = torch.ones(1)
    for _ in range(2):
        await coll.allreduce(t)
    parts_of(coll).registry.timeout = 1.0
    late = await coll.dup()
    for _ in range(2):
        await late.allreduce(t)
    if late.rank == 0:
        handle = late.allreduce(t)
        with pytest.raises(aiodist.OperationTimeout, match=r"allreduce #2"):
            await handle
        await coll.send_object(None, 1)
    else:
        await coll.recv_object(0)
        handle = late.allreduce(t)
    assert (await handle) is t
    await late.aclose()
