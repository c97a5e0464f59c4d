"""W3: objects of a program that continue in the next generation have one interface, which mypy compares."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from aiodist.data import ShardQueue
from aiodist.elastic.rebinding import Rebindable
from aiodist.engine import Engine
from aiodist.nn import DataParallel
from aiodist.ps import ParameterServer


def rebindables(net: DataParallel, queue: ShardQueue[Any], engine: Engine, ps: ParameterServer) -> list[Rebindable]:
    return [net, queue, engine, ps]


@pytest.mark.parametrize("kind", [DataParallel, ShardQueue, Engine, ParameterServer])
def test_w3_rebind_needs_the_communicator_only(kind: type) -> None:
    method = inspect.unwrap(kind.rebind)  # type: ignore[attr-defined]
    assert inspect.iscoroutinefunction(method)
    _, coll, *others = inspect.signature(method).parameters.values()
    assert coll.name == "coll"
    assert all(other.kind is other.VAR_POSITIONAL or other.default is not other.empty for other in others)
