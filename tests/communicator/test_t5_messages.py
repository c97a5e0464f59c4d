"""T5: `async for message in coll.messages()`, for ranks that serve others: however the loop ends, nothing is lost."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from typing import Any

import pytest
import torch

from aiodist import ANY, Communicator, Handle, OperationTimeout
from aiodist.communicator.messages import Message

pytestmark = pytest.mark.drawn(3)

everywhere = pytest.mark.ranks(1, 2, 3, backend=("local", "openmpi", "mpich", "gloo", "shm"))
LONG = 300_000  # elements: their data follow the header in a message of their own


async def collect(coll: Communicator, count: int, **which: int) -> list[Message]:
    """Return the next `count` messages."""
    got: list[Message] = []
    async with aclosing(coll.messages(**which)) as messages:
        async for message in messages:
            got.append(message)
            if len(got) == count:
                break
    return got


@everywhere
async def test_t5_messages_come_with_source_and_tag_in_the_order_of_each_sender(coll: Communicator) -> None:
    sizes = [0, 1, 7, LONG]
    sends: list[Handle[Any]] = []
    for number, size in enumerate(sizes):
        sends.append(coll.send(torch.full((size,), float(coll.rank)), 0, tag=number))
        sends.append(coll.send_object({"rank": coll.rank, "of": [size] * size}, 0, tag=number))
    if coll.rank == 0:
        got = await collect(coll, 2 * len(sizes) * coll.size)
        for rank in range(coll.size):
            mine = [message for message in got if message.source == rank]
            assert [message.tag for message in mine] == [0, 0, 1, 1, 2, 2, 3, 3]
            for size, tensor, obj in zip(sizes, mine[::2], mine[1::2], strict=True):
                assert torch.equal(tensor.data, torch.full((size,), float(rank)))
                assert obj.data == {"rank": rank, "of": [size] * size}
    for send in sends:
        await send


@everywhere
async def test_t5_messages_of_one_source_or_tag_leave_the_others_alone(coll: Communicator) -> None:
    last = coll.size - 1
    sends = [coll.send_object((coll.rank, tag), 0, tag=tag) for tag in (5, 6)]
    if coll.rank == 0:
        assert [m.data for m in await collect(coll, 1, src=last, tag=6)] == [(last, 6)]
        assert sorted(m.data for m in await collect(coll, coll.size, tag=5)) == [(r, 5) for r in range(coll.size)]
        if last:
            assert sorted(m.data for m in await collect(coll, last)) == [(r, 6) for r in range(last)]
    for send in sends:
        await send


@pytest.mark.drawn(3)
@everywhere
@pytest.mark.parametrize("seed", range(3))
async def test_t5_a_loop_that_is_cancelled_again_and_again_loses_no_message(coll: Communicator, seed: int) -> None:
    draw = random.Random(seed * 10 + coll.rank)
    count = 60

    async def talk() -> None:
        for number in range(count):
            if draw.random() < 0.5:
                await coll.send_object(number, 0)
            else:
                await coll.send(torch.full((draw.choice((1, LONG)),), number), 0)
            if draw.random() < 0.3:
                await asyncio.sleep(draw.random() * 0.002)

    talking = asyncio.create_task(talk())
    got: list[tuple[int, int]] = []

    async def serve() -> None:
        async for message in coll.messages():
            whole = isinstance(message.data, int) or message.data.eq(message.data[0]).all()
            assert whole
            got.append((message.source, message.data if isinstance(message.data, int) else int(message.data[0])))

    while coll.rank == 0 and len(got) < count * coll.size:
        server = asyncio.create_task(serve())
        await asyncio.wait([server], timeout=draw.choice((0.0, 0.0005, 0.003)))
        server.cancel()
        await asyncio.wait([server])
        assert server.cancelled(), server.exception()
    await talking
    if coll.rank == 0:
        for rank in range(coll.size):
            assert [number for source, number in got if source == rank] == list(range(count))


@pytest.mark.ranks(1)
@pytest.mark.parametrize("numel", [3, LONG])
async def test_t5_a_message_that_had_matched_goes_to_the_next_receive(coll: Communicator, numel: int) -> None:
    async def serve() -> None:
        await anext(coll.messages())

    server = asyncio.create_task(serve())
    await asyncio.sleep(0)
    sent = coll.send(torch.arange(numel), 0, tag=4)
    server.cancel()
    with pytest.raises(asyncio.CancelledError):
        await server
    await sent
    receive = coll.recv()
    assert torch.equal(await receive, torch.arange(numel))
    assert (receive.source, receive.tag) == (0, 4)


@pytest.mark.ranks(1)
async def test_t5_what_was_put_back_comes_before_what_came_later(coll: Communicator) -> None:
    server = asyncio.create_task(anext(coll.messages()))
    await asyncio.sleep(0)
    sends = [coll.send_object(number, 0) for number in range(3)]
    server.cancel()
    await asyncio.wait([server])
    assert server.cancelled()
    assert [message.data for message in await collect(coll, 3)] == [0, 1, 2]
    for send in sends:
        await send


@pytest.mark.ranks(1)
async def test_t5_the_receive_that_was_issued_first_wins(coll: Communicator) -> None:
    messages = coll.messages()
    plain = coll.recv_object()
    turn = asyncio.create_task(anext(messages))
    await asyncio.sleep(0)
    await coll.send_object("first", 0)
    await coll.send_object("second", 0)
    assert await plain == "first"
    assert (await turn).data == "second"
    while_the_body_runs = coll.recv_object()
    await coll.send_object("third", 0)
    assert await while_the_body_runs == "third"
    await messages.aclose()


@pytest.mark.ranks(1)
async def test_t5_a_turn_without_a_message_ends_in_time_and_withdraws_its_receive(coll: Communicator) -> None:
    with pytest.raises(OperationTimeout, match="messages"):
        await anext(coll.messages(timeout=0.02))
    sent = coll.send_object("late", 0)
    assert await coll.recv_object() == "late"
    await sent


@pytest.mark.ranks(1)
async def test_t5_an_error_of_the_body_ends_the_loop_and_nothing_is_pending(coll: Communicator) -> None:
    await coll.send_object(1, 0)

    async def serve() -> None:
        async for message in coll.messages():
            raise KeyError(message.data)

    with pytest.raises(KeyError):
        await serve()
    assert coll.statistics().pending == 0


@pytest.mark.ranks(1)
async def test_t5_a_wrong_argument_is_an_error_at_the_call(coll: Communicator) -> None:
    with pytest.raises(ValueError, match="src"):
        coll.messages(src=1)
    with pytest.raises(ValueError, match="tag"):
        coll.messages(tag=-7)


@pytest.mark.ranks(2, backend=("openmpi", "gloo", "shm"))
async def test_t5_messages_end_with_the_communicator(coll: Communicator) -> None:
    other = await coll.dup()
    turn = asyncio.create_task(anext(other.messages(src=ANY)))
    await coll.barrier()
    other.abort("enough")
    with pytest.raises(Exception, match="enough"):
        await turn


@pytest.mark.ranks(2, backend=("openmpi", "mpich", "gloo", "shm"))
async def test_t5_short_sends_end_while_the_other_rank_waits_in_a_collective(coll: Communicator) -> None:
    """The library of the messages may make progress only in calls, and the collective waits in shared memory."""
    if coll.rank == 0:
        for number in range(200):
            await coll.send(torch.full((8,), number), 1, tag=7, timeout=20)
    await coll.barrier()
    if coll.rank == 1:
        for number in range(200):
            assert (await coll.recv(torch.empty(8, dtype=torch.int64), 0, tag=7)).tolist() == [number] * 8
