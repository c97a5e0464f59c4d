"""N3: an error in the program of a pass, in code of this rank, ends the step, and no rank waits."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from torch import Tensor

from aiodist import AiodistError, Communicator
from aiodist.testing.seams.progress import reducer_of
from tests.nn.conftest import Trial


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("failing", [{0}, {0, 1, 2}], ids=str)
async def test_n3_an_error_after_a_reduction_ends_the_step(coll: Communicator, failing: set[int]) -> None:
    net, opt = await Trial.made(coll, "sgd", **Trial.SMALL)

    def broken() -> None:
        raise LookupError("the memory is not known")

    def forward() -> Tensor:
        if coll.rank in failing:
            for bucket in reducer_of(net).buckets:
                bucket.release = broken  # type: ignore[method-assign]
        return Trial.loss(net, coll.rank, 0)

    async with asyncio.timeout(20):
        if coll.rank in failing:
            with pytest.raises(LookupError, match="the memory is not known"):
                await net.step(forward, opt)
        else:  # this rank may have had all statuses before
            with contextlib.suppress(AiodistError):
                await net.step(forward, opt)
        if len(failing) == 1:
            with pytest.raises(AiodistError):  # the ranks have made different numbers of steps, or the net has failed
                await net.step(Trial.loss, opt, net, coll.rank, 1)


class Interrupted(BaseException):
    """An error that no `except Exception` sees, as a signal handler may raise it."""


@pytest.mark.ranks(2)
async def test_n3_an_error_while_a_pass_is_given_up_reaches_all_ranks(coll: Communicator) -> None:
    """A bucket cannot be sent, and the abort that would wake the other rank fails."""
    net, opt = await Trial.made(coll, "sgd", **Trial.SMALL)
    reducer = reducer_of(net)

    def unsendable(_: object) -> None:
        raise ValueError("no place in the queue")

    def broken(*_: object, **__: object) -> None:
        raise LookupError("no way to abort")

    def forward() -> Tensor:
        if coll.rank == 0:
            reducer.hook.reduce = unsendable  # type: ignore[assignment, method-assign]
            reducer.consensus.abort = broken  # type: ignore[method-assign]
        return Trial.loss(net, coll.rank, 0)

    async with asyncio.timeout(20):
        with pytest.raises(AiodistError, match="no way to abort"):
            await net.step(forward, opt)


@pytest.mark.ranks(2)
async def test_n3_an_interrupt_within_a_pass_ends_the_step(coll: Communicator) -> None:
    net, opt = await Trial.made(coll, "sgd", **Trial.SMALL)

    def interrupted(*_: object, **__: object) -> None:
        raise Interrupted

    def forward() -> Tensor:
        if coll.rank == 0:
            for bucket in reducer_of(net).buckets:
                bucket.place = interrupted  # type: ignore[method-assign]
        return Trial.loss(net, coll.rank, 0)

    async with asyncio.timeout(20):
        if coll.rank == 0:
            with pytest.raises(Interrupted):
                await net.step(forward, opt)
        else:  # this rank may have had all statuses before
            with contextlib.suppress(AiodistError):
                await net.step(forward, opt)
