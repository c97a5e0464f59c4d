"""A user awaits, asks and cancels; only the producer's side ends an operation."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from aiodist import Handle
from aiodist.handles import Operation, Posted, Progress, gather

METHODS = {
    *("done", "result", "exception", "cancelled", "cancel", "detach"),
    *("wait", "wait_stream", "add_done_callback", "remove_done_callback"),
}
ATTRIBUTES = {"op", "seq", "nbytes", "origin", "source", "tag", "version"}


@pytest.mark.parametrize("kind", [Handle, Posted])
def test_h3_the_user_has_these_names_and_no_other(kind: type[Handle[Any]]) -> None:
    assert {name for name in dir(kind) if not name.startswith("_")} == METHODS | ATTRIBUTES


@pytest.mark.parametrize("name", sorted(METHODS | ATTRIBUTES))
def test_h3_each_of_them_is_documented(name: str) -> None:
    assert f"\n        {name}: " in (Handle.__doc__ or "") or inspect.getdoc(getattr(Handle, name))


async def test_h3_a_handle_is_read_only() -> None:
    operation: Operation[int] = Operation(Progress.current(), "read-only")
    handles: list[Any] = [operation.handle, gather(operation.handle)]
    for handle in handles:
        for name in sorted(ATTRIBUTES):
            with pytest.raises(AttributeError):
                setattr(handle, name, 1)
        with pytest.raises(AttributeError):
            handle.other = 1
    operation.resolve(1)
    assert await operation.handle == 1
