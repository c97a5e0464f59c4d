"""C1: messages through shared memory, among N ranks in one process, against what was sent."""

from __future__ import annotations

import asyncio
import gc
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aiodist._core import NUMBERS_BYTES
from aiodist.backends.shm.messages import PASS_BYTES
from aiodist.backends.shm.peers import CREDIT_BYTES, ring_bytes, short_bytes
from aiodist.errors import BackendError, BackendUnavailable
from aiodist.handles import LARGE_BYTES
from aiodist.testing.seams.carriers import Neighbourhood, ShmTransport, meet, open_world
from aiodist.testing.seams.channel import Channel, in_process
from aiodist.testing.seams.memory import Place
from aiodist.testing.seams.progress import transport_lock
from aiodist.testing.seams.transport import Transport
from aiodist.testing.seams.world import Environment, Limits
from aiodist.types import ANY
from aiodist.world.opening import open_transport
from tests.support.transports import held, started

SHORT = short_bytes(2)
Ended = asyncio.Future[None]


@dataclass
class Rank:
    """A rank of this process and its end of the world."""

    near: Neighbourhood
    transport: Transport

    def private(self, nbytes: int, value: int = 0) -> Tensor:
        return torch.full((nbytes,), value, dtype=torch.uint8)

    def shared(self, nbytes: int, value: int = 0) -> Tensor:
        return self.near.arena.empty((nbytes,), torch.uint8).fill_(value)

    def send(self, t: Tensor, dst: int, tag: int = 0) -> Ended:
        return started(lambda done: self.transport.isend(t, dst, tag, done))

    def receive(self, t: Tensor, src: int, tag: int = 0) -> Ended:
        return started(lambda done: self.transport.irecv(t, src, tag, done))


@asynccontextmanager
async def ranks(count: int, *, drained: bool = True) -> AsyncIterator[list[Rank]]:
    """Open `count` ranks; at the end nothing may be left of theirs in their arenas."""
    async with asyncio.timeout(10):
        met = await asyncio.gather(*[meet(channel, [0] * count) for channel in in_process(count)])
        nears = [one.near for one in met if one.near is not None]
        assert len(nears) == count
        before = [held(near.arena) for near in nears]
        opened = [Rank(near, open_world(near)) for near in nears]
        try:
            yield opened
        finally:
            await asyncio.gather(*[rank.transport.aclose(drained=drained) for rank in opened])
            for near in nears:
                near.close()
        for rank in opened:
            rank.transport = None  # type: ignore[assignment]
        if not drained:  # the others may have looked into it until now
            gc.collect()
        assert [held(near.arena) for near in nears] == before


SIZES = (0, 1, 63, 64, 65, SHORT - 1, SHORT, SHORT + 1, 2 * SHORT + 1, LARGE_BYTES - 1, LARGE_BYTES, 5_000_001)
DRAWN = torch.randint(1, 256, (SIZES[-1] + 5000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def drawn(nbytes: int, seed: int) -> Tensor:
    return DRAWN[seed % 5000 :][:nbytes]


@pytest.mark.asyncio(loop_factories=["asyncio"])
@pytest.mark.parametrize("places", ["private private", "shared private", "private shared", "shared shared"])
async def test_c1_sizes_around_every_limit_arrive(places: str) -> None:
    mine, theirs = places.split()
    async with ranks(2) as (a, b):
        for first in ("send", "receive"):
            for size in SIZES:
                sent = getattr(a, mine)(size)
                sent.copy_(drawn(size, size))
                into = getattr(b, theirs)(size + 3, 7)
                if first == "send":
                    ends = [a.send(sent, 1), b.receive(into, 0)]
                else:
                    ends = [b.receive(into, 0), a.send(sent, 1)]
                await asyncio.gather(*ends)
                assert torch.equal(into[:size], sent), size
                assert into[size:].tolist() == [7, 7, 7], "what the message does not fill is left alone"
        del sent, into


@st.composite
def exchanges(draw: st.DrawFn) -> tuple[int, list[Any], int]:
    count = draw(st.integers(1, 4))
    rank = st.integers(0, count - 1)
    size = st.sampled_from((0, 1, 100, short_bytes(count), short_bytes(count) + 1, 300_000))
    one = st.tuples(rank, rank, st.integers(0, 2), size, st.booleans(), st.booleans(), st.booleans())
    return count, draw(st.lists(one, max_size=30)), draw(st.integers(0, 1 << 30))


@settings(max_examples=25, deadline=None)
@given(exchanges())
def test_c1_any_order_of_posting_keeps_the_order_of_equal_messages(drawing: Any) -> None:
    count, messages, seed = drawing

    async def main() -> None:
        if count == 1:
            near = Neighbourhood(0, {})
            alone = open_world(near)
            await exchange([Rank(near, alone)])
            await alone.aclose(drained=True)
            near.close()
        else:
            async with ranks(count) as here:
                await exchange(here)

    async def exchange(here: Sequence[Rank]) -> None:
        sends = []
        receives = []
        from_any = {(dst, tag) for _, dst, tag, *_, any_source in messages if any_source}
        for number, (src, dst, tag, size, shared, into_shared, _) in enumerate(messages):
            if (dst, tag) in from_any:
                size = max(size, 100)  # enough to tell each from all others
            t = here[src].shared(size) if shared else here[src].private(size)
            t.copy_(drawn(size, number))
            room = here[dst].shared(300_000) if into_shared else here[dst].private(300_000)
            sends.append((number, src, dst, tag, t))
            receives.append((ANY if (dst, tag) in from_any else src, dst, tag, room))
        picks = random.Random(seed)
        picks.shuffle(receives)
        calls = [(here[src].send, t, dst, tag) for _, src, dst, tag, t in sends]
        more = [(here[dst].receive, room, src, tag) for src, dst, tag, room in receives]
        ends = []
        while calls or more:
            fn, *arguments = (calls if calls and (not more or picks.random() < 0.5) else more).pop(0)
            ends.append(fn(*arguments))
            if picks.random() < 0.2:
                await asyncio.sleep(0)
        await asyncio.gather(*ends)
        # Messages of one source and tag fill the receives in order; those of several may interleave.
        expected: dict[tuple[int, int, int], list[Tensor]] = defaultdict(list)
        for _, src, dst, tag, t in sends:
            expected[src, dst, tag].append(t)
        for src, dst, tag, room in receives:
            sources = range(count) if src == ANY else (src,)
            queues = [expected[one, dst, tag] for one in sources if expected[one, dst, tag]]
            fits = [queue for queue in queues if torch.equal(queue[0], room[: int(room.count_nonzero())])]
            assert len(fits) == 1, "what was received is the first message of no source"
            fits[0].pop(0)
        assert not any(expected.values())

    asyncio.run(main())


async def test_c1_both_may_send_far_more_than_the_queues_hold_before_they_receive() -> None:
    size = SHORT - 64
    count = 3 * CREDIT_BYTES // size // 2
    assert count * size > ring_bytes(2)
    async with ranks(2) as both:
        sends = [rank.send(rank.private(size, i), 1 - i) for _ in range(count) for i, rank in enumerate(both)]
        await asyncio.sleep(0)
        assert not all(end.done() for end in sends), "nothing waits: all of them were copied"
        rooms = [(rank.private(size, 9), rank, i) for _ in range(count) for i, rank in enumerate(both)]
        await asyncio.gather(*[rank.receive(room, 1 - i) for room, rank, i in rooms], *sends)
        assert all(int(room[0]) == int(room[-1]) == 1 - i for room, _, i in rooms)


async def test_c1_what_nobody_asked_for_takes_bounded_memory_and_lets_others_pass() -> None:
    size = SHORT - 64
    count = 2 * CREDIT_BYTES // size
    async with ranks(2) as (a, b):
        sends = [a.send(a.private(size, i % 251), 1, tag=1) for i in range(count)]
        last, into = a.send(a.private(10, 5), 1, tag=2), b.private(10)
        await b.receive(into, 0, tag=2)
        await last
        assert into.tolist() == [5] * 10
        waiting = [i for i, end in enumerate(sends) if not end.done()]
        assert waiting, "everything was copied to the receiver, however much it is"
        assert waiting[0] * size <= CREDIT_BYTES
        room = b.private(size)
        for i in range(count):
            await b.receive(room, 0, tag=1)
            assert int(room[0]) == int(room[-1]) == i % 251
        await asyncio.gather(*sends)


async def test_c1_what_is_sent_at_once_keeps_its_order_with_what_waits() -> None:
    async with ranks(2) as (a, b):
        send_now = a.transport.capabilities().send_now
        assert send_now is not None
        count = 0
        while send_now(bytearray([count % 251]) * SHORT, 1, 0):
            count += 1
        assert 1 < count <= ring_bytes(2) // SHORT + 1, "nothing is read meanwhile, so the ring fills up"
        waits = a.send(a.private(SHORT, count % 251), 1)
        await asyncio.sleep(0)
        if not waits.done():
            assert not send_now(bytearray(1), 1, 0), "it would overtake one that waits"
        room = b.private(SHORT)
        for i in range(count + 1):
            await b.receive(room, 0)
            assert int(room[0]) == int(room[-1]) == i % 251
        await waits
        assert not send_now(bytearray(SHORT + 1), 1, 0), "what is long is fetched, and so must stay"


@pytest.mark.parametrize("seed", range(4))
async def test_c1_a_receive_of_each_message_gets_all_in_order_also_long_ones(seed: int) -> None:
    picks, count = random.Random(seed), 120
    async with ranks(3) as (a, b, c):
        receive_each = c.transport.capabilities().receive_each
        assert receive_each is not None
        came, room, ends = list[bytes](), c.private(2 * SHORT + 1), list[BaseException | None]()
        sent: dict[int, list[bytes]] = {0: [], 1: []}

        arrived = asyncio.Event()

        def post() -> None:
            receive_each(room, 7, add, long_came)

        def add(data: bytearray) -> None:
            came.append(bytes(data))
            if len(came) == count:
                arrived.set()

        def long_came(error: BaseException | None) -> None:
            ends.append(error)
            if error is None:
                add(bytearray(room.numpy()[: lengths[int(room[0]), int(room[1])]]))
                post()

        lengths: dict[tuple[int, int], int] = {}
        sends: list[Ended] = []
        for i in range(count):
            if i == count // 3:
                with transport_lock:
                    post()  # earlier messages wait for it
            src = picks.choice((0, 1))
            number = len(sent[src])
            size = picks.choice((2, 3, 1000, short_bytes(3), short_bytes(3) + 1, 2 * SHORT))
            lengths[src, number] = size
            t = drawn(size, i).clone()
            t[0], t[1] = src, number
            sent[src].append(t.numpy().tobytes())
            sends.append((a, b)[src].send(t, 2, tag=7))
            sends.append((a, b)[src].send(t[:1], 2, tag=8))  # another tag, which the receive leaves
            if picks.random() < 0.3:
                await asyncio.sleep(0)
        other = c.private(1)
        for _ in range(count):
            await c.receive(other, ANY, tag=8)
        await asyncio.gather(*sends)
        await arrived.wait()
        assert [[one for one in came if one[0] == src] for src in (0, 1)] == [*sent.values()]
        assert any(len(one) > short_bytes(3) for one in came)
        assert ends
        assert not any(ends)
        with transport_lock:
            c.transport.messages.close_comm(c.transport.comm, BackendError("closed here"))  # type: ignore[attr-defined]
        assert "closed here" in str(ends[-1]), "the receive that waits has an end too"


async def test_c1_a_ring_that_was_overwritten_is_an_error_that_names_the_rank() -> None:
    async with ranks(2, drained=False) as (a, b):
        room = b.private(1)
        await asyncio.gather(a.send(a.private(1, 1), 1), b.receive(room, 0))
        received = b.receive(room, 0)
        from_a = b.near.neighbours[0]
        segment, offset = from_a.places["messages"]
        its_numbers = from_a.memory(Place(segment, offset + NUMBERS_BYTES), NUMBERS_BYTES)
        its_numbers[:8] = 0x7F  # how much it has sent
        with pytest.raises(BackendError, match="rank 0: what the other rank wrote into its ring makes no sense"):
            await received
        with pytest.raises(BackendError, match="rank 0"):
            await b.receive(room, 0)
        del received, its_numbers  # the error has frames, and so all that they look at


async def test_c1_an_unmatched_send_takes_no_memory() -> None:
    async with ranks(2, drained=False) as (a, b):
        first = a.send(a.private(1, 1), 1)
        room = b.private(1)
        await asyncio.gather(first, b.receive(room, 0))
        before = held(a.near.arena) + held(b.near.arena)
        large = torch.empty(1 << 30, dtype=torch.uint8)  # its pages are never touched
        sent = a.send(large, 1, tag=1)
        await asyncio.gather(a.send(a.private(1, 2), 1), b.receive(room, 0))
        assert room.item() == 2, "it holds up nothing"
        assert held(a.near.arena) + held(b.near.arena) == before
        assert not sent.done()
        await a.transport.aclose(drained=False)
        with pytest.raises(BackendError, match="was closed"):
            await sent


@pytest.mark.asyncio(loop_factories=["asyncio"])
@pytest.mark.parametrize("size", [100, SHORT + 1, 5_000_000])
@pytest.mark.parametrize("place", ["private", "shared"])
async def test_c1_a_message_that_is_too_long_is_an_error_and_is_gone(size: int, place: str) -> None:
    async with ranks(2) as (a, b):
        small = b.private(size - 1, 7)
        sent = a.send(getattr(a, place)(size, 1), 1)
        with pytest.raises(BackendError, match=f"a message of {size} bytes met a receive of {size - 1}"):
            await b.receive(small, 0)
        await sent
        assert set(small.tolist()) == {7}
        room = b.private(1)
        await asyncio.gather(a.send(a.private(1, 2), 1), b.receive(room, 0))
        assert room.item() == 2


async def test_c1_splits_are_worlds_of_their_own() -> None:
    async with ranks(3) as world:
        pairs = [await world[i].transport.split([2, 0], "pair") for i in (2, 0)]
        assert [(pair.rank, pair.size) for pair in pairs] == [(0, 2), (1, 2)]
        c, a = (Rank(world[i].near, pair) for i, pair in zip((2, 0), pairs, strict=True))
        one, two = a.private(1), a.private(1)
        ends = [world[2].send(world[2].private(1, 1), 0), c.send(c.private(1, 2), 1)]
        await asyncio.gather(a.receive(two, 0), world[0].receive(one, 2), *ends)
        assert (one.item(), two.item()) == (1, 2)
        for pair in pairs:
            await pair.aclose(drained=True)
        with pytest.raises(BackendError, match="closed"):
            await a.receive(two, 0)
        del c, a, pairs


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("places", ["private private", "shared private", "private shared"])
async def test_c1_giving_up_in_the_middle_ends_both_sides_and_leaves_the_rest_alone(places: str, who: int) -> None:
    mine, theirs = places.split()
    size = 4 * PASS_BYTES
    async with ranks(2) as world:
        a, b = world
        halves = [cast(ShmTransport, await rank.transport.split([0, 1], "half")) for rank in world]
        sent, into = getattr(a, mine)(size, 3), getattr(b, theirs)(size)
        ends: list[BaseException | None] = []
        with transport_lock:
            halves[0].isend(sent, 1, 0, ends.append)
            halves[1].irecv(into, 0, 0, ends.append)
            while not into[0]:
                for half in halves:
                    half.messages.poll()
            assert not ends, "it was over before it could be given up"
            half = halves[who]
            half.messages.close_comm(half.comm, BackendError("closed here"))
            copied = int(into.count_nonzero())
            for _ in range(20):
                for half in halves:
                    half.messages.poll()
        assert copied < size
        assert len(ends) == 2
        assert all(any(word in str(end) for word in ("closed", "withdrawn", "discarded")) for end in ends)
        assert int(into.count_nonzero()) == copied, "it went on after it was given up"
        for nbytes in (3, SHORT + 1, PASS_BYTES):
            room = b.private(nbytes)
            await asyncio.gather(a.send(a.private(nbytes, 8), 1), b.receive(room, 0))
            assert room.min() == 8, "other messages go on, through the same stage"
        del sent, into


async def test_c1_closing_fails_all_that_is_pending_once() -> None:
    async with ranks(2, drained=False) as (a, b):
        ends = [a.receive(a.private(10), 1), a.receive(a.private(10), ANY, 3), a.send(a.private(SHORT + 1), 1)]
        ends += [a.send(a.private(SHORT, 1), 1, 5) for _ in range(20)]
        ends = [end for end in ends if not end.done()]
        await a.transport.aclose(drained=False)
        await asyncio.sleep(0)
        failures = await asyncio.gather(*ends, return_exceptions=True)
        assert sum(isinstance(failure, BackendError) for failure in failures) >= 4
        with pytest.raises(BackendError, match="was closed"):
            await a.send(a.private(1), 1)
        with transport_lock:
            assert isinstance(a.transport, ShmTransport)
            assert not len(a.transport.messages)
        del ends, failures, b


async def test_h7_what_a_closed_split_of_shared_memory_sends_or_receives_fails() -> None:
    async with ranks(2) as world:
        half, other = [cast(ShmTransport, await rank.transport.split([0, 1], "half")) for rank in world]
        await half.aclose(drained=False)
        for nbytes in (1, 4 * PASS_BYTES):
            for step in (half.isend, half.irecv):
                with pytest.raises(BackendError, match="closed"):
                    await started(lambda done: step(torch.zeros(nbytes, dtype=torch.uint8), 1, 0, done))  # noqa: B023
        await other.aclose(drained=False)


async def test_c1_where_memory_is_not_shared_the_backend_says_why() -> None:
    async def opened(environment: Environment, channel: Channel, hosts: list[int]) -> Transport:
        met = await meet(channel, hosts, allowed=environment.shared_memory)
        return await open_transport(environment, "shm", None, channel, met, hosts, Limits())

    off = Environment.read({"AIODIST_SHM": "0"})
    calls = [opened(off, channel, [0, 0]) for channel in in_process(2)]
    for error in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(error, BackendUnavailable)
        assert "rank 0: it was turned off (AIODIST_SHM=0); rank 1" in str(error)
    calls = [opened(Environment.read({}), channel, [0, 0, 2]) for channel in in_process(3)]
    errors = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(error, BackendUnavailable) for error in errors)
    assert [str(error).rpartition(": ")[2] for error in errors] == [
        "of 3 ranks only 2 are on this host",
        "of 3 ranks only 2 are on this host",
        "no other rank is on this host",
    ]
