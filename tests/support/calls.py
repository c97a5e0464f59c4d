"""One of each call that communicates, and helpers that call from another thread or loop, or with drawn arguments."""

from __future__ import annotations

import asyncio
from asyncio import _get_running_loop, _set_running_loop
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy

__all__ = ["CALLS", "another_loop", "drawn", "error_of"]

T = TypeVar("T")

CALLS: dict[str, Callable[[Any], Any]] = {
    "allreduce": lambda c: c.allreduce(torch.ones(2)),
    "scan": lambda c: c.scan(torch.ones(2)),
    "exscan": lambda c: c.exscan(torch.ones(2)),
    "reduce": lambda c: c.reduce(torch.ones(2)),
    "reduce_scatter": lambda c: c.reduce_scatter(torch.ones(2)),
    "broadcast": lambda c: c.broadcast(torch.ones(2)),
    "allgather": lambda c: c.allgather(torch.ones(2)),
    "gather": lambda c: c.gather(torch.ones(2)),
    "scatter": lambda c: c.scatter([torch.ones(2)] * c.size),
    "alltoall": lambda c: c.alltoall([torch.ones(2)] * c.size),
    "alltoall_single": lambda c: c.alltoall_single(torch.ones(c.size)),
    "barrier": lambda c: c.barrier(),
    "send": lambda c: c.send(torch.ones(2), c.rank),
    "recv": lambda c: c.recv(None, c.rank),
    "sendrecv": lambda c: c.sendrecv(torch.ones(2), c.rank, c.rank),
    "broadcast_object": lambda c: c.broadcast_object(1),
    "allgather_object": lambda c: c.allgather_object(1),
    "gather_object": lambda c: c.gather_object(1),
    "scatter_object": lambda c: c.scatter_object([1] * c.size),
    "alltoall_object": lambda c: c.alltoall_object([1] * c.size),
    "send_object": lambda c: c.send_object(1, c.rank),
    "recv_object": lambda c: c.recv_object(c.rank),
    "shared_table": lambda c: c.shared_table(2),
    "dup": lambda c: c.dup(),
    "group": lambda c: c.group([0]),
    "split": lambda c: c.split(0),
    "hierarchy": lambda c: c.hierarchy(),
    "stopping": lambda c: c.stopping(),
}
"""Every communicating method of a Communicator; a test compares the names with the class."""


@contextmanager
def another_loop() -> Iterator[None]:
    """Make asyncio believe that another event loop runs in this thread."""
    here, other = _get_running_loop(), asyncio.new_event_loop()
    _set_running_loop(other)
    try:
        yield
    finally:
        _set_running_loop(here)
        other.close()


def error_of(call: Callable[..., Any], *args: Any) -> Exception | None:
    """Return what a call raises before it waits for anything; a coroutine is run that far."""
    try:
        made = call(*args)
        if asyncio.iscoroutine(made) or hasattr(made, "ag_frame"):
            step = made if asyncio.iscoroutine(made) else made.__anext__()
            try:
                step.send(None)
            finally:
                step.close()
    except StopIteration:
        return None
    except Exception as error:  # noqa: BLE001  - the test checks the error
        return error
    return None


def drawn(examples: SearchStrategy[T], count: int) -> list[T]:
    """Return `count` examples, the same on all ranks and in each run."""
    found: list[T] = []

    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow],  # a busy machine takes its time
    )
    @given(examples)
    def collect(example: T) -> None:
        found.append(example)

    collect()
    return found
