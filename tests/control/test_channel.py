"""The control channel, over sockets and within one process."""

import asyncio
import gc
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from aiodist.errors import OperationTimeout, RemoteError
from aiodist.frames import MAX_FRAME
from aiodist.testing.seams.channel import Channel, connect, exchange, host, in_process

SIZE = 3

pytestmark = pytest.mark.timeout(20)

Channels = list[Channel]


class Letters:
    """Collects the calls of a callback, whichever thread they come from."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Any] = asyncio.Queue()

    def __call__(self, *args: object) -> None:
        self._loop.call_soon_threadsafe(self._queue.put_nowait, args)

    async def take(self, count: int = 1) -> list[Any]:
        return [await self._queue.get() for _ in range(count)]


@pytest.fixture(params=["sockets", "in process"])
async def channels(request: pytest.FixtureRequest) -> AsyncIterator[Channels]:
    async with asyncio.timeout(20):
        if request.param == "sockets":
            hub = await host(SIZE)
            joining = (connect(hub.address, rank=r, size=SIZE, hub=None if r else hub) for r in range(SIZE))
            found = await asyncio.gather(*joining)
        else:
            found = [*in_process(SIZE)]
    yield found
    async with asyncio.timeout(20):
        await asyncio.gather(*(channel.aclose() for channel in found))
    assert not [thread for thread in threading.enumerate() if thread.name == "aiodist-control"]
    gc.collect()


async def test_rank_and_size(channels: Channels) -> None:
    assert [(channel.rank, channel.size) for channel in channels] == [(0, SIZE), (1, SIZE), (2, SIZE)]
    assert all(isinstance(channel, Channel) for channel in channels)


async def test_get_returns_what_any_rank_set_now_or_later(channels: Channels) -> None:
    await channels[0].set("here", b"\x00\xff")
    assert await channels[1].get("here") == b"\x00\xff"
    waiting = [asyncio.ensure_future(channel.get("later")) for channel in channels]
    await channels[2].set("later", b"")
    assert await asyncio.gather(*waiting) == [b""] * SIZE


async def test_get_in_vain_times_out_and_leaves_the_key_usable(channels: Channels) -> None:
    with pytest.raises(OperationTimeout, match=r"'never' was not set within 0\.02 s"):
        await channels[1].get("never", timeout=0.02)
    await channels[0].set("never", b"after all")
    assert await channels[1].get("never", timeout=5) == b"after all"


async def test_an_exchange_gives_each_rank_the_words_of_all(channels: Channels) -> None:
    for said in ({"a": [1, None]}, ["x"]):
        found = await asyncio.gather(*(exchange(rank, "words", [rank.rank, said]) for rank in channels))
        assert found == [[[0, said], [1, said], [2, said]]] * 3


async def test_an_exchange_names_the_ranks_that_do_not_come(channels: Channels) -> None:
    with pytest.raises(OperationTimeout, match=r"ranks 0, 2 did not come to 'alone' within 0\.05 s") as raised:
        await exchange(channels[1], "alone", 1, 0.05)
    assert raised.value.late == dict.fromkeys((0, 2), "never came to 'alone'")


async def test_a_cancelled_get_is_withdrawn(channels: Channels) -> None:
    waiting = asyncio.ensure_future(channels[1].get("k"))
    await channels[1].add("let the question out")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await channels[1].set("k", b"v")
    assert await channels[2].get("k") == b"v"


async def test_add_counts_without_losing_any(channels: Channels) -> None:
    await asyncio.gather(*(channel.add("n") for channel in channels for _ in range(50)))
    assert await channels[0].add("n", -50) == 100
    assert await channels[1].get("n") == b"100"


async def test_add_to_what_is_no_counter_is_an_error(channels: Channels) -> None:
    await channels[0].set("text", b"abc")
    with pytest.raises(ValueError, match="no counter"):
        await channels[1].add("text")


async def test_messages_arrive_in_order_with_their_source(channels: Channels) -> None:
    letters = Letters()
    channels[2].subscribe("t", letters)
    for n in range(200):
        channels[0].send(2, "t", {"n": n, "raw": bytes([n])})
    assert await letters.take(200) == [(0, {"n": n, "raw": bytes([n])}) for n in range(200)]


async def test_broadcast_reaches_every_other_rank(channels: Channels) -> None:
    letters = [Letters() for _ in channels]
    for channel, box in zip(channels, letters, strict=True):
        channel.subscribe("t", box)
    channels[1].broadcast("t", "all")
    channels[1].send(1, "t", "myself")
    assert [await box.take() for box in letters] == [[(1, "all")], [(1, "myself")], [(1, "all")]]


async def test_messages_before_the_subscription_are_kept(channels: Channels) -> None:
    letters, marker = Letters(), Letters()
    channels[1].subscribe("marker", marker)
    for n in range(3):
        channels[0].send(1, "early", n)
    channels[0].send(1, "marker", None)
    await marker.take()
    channels[1].subscribe("early", letters)
    channels[0].send(1, "early", 3)
    assert await letters.take(4) == [(0, n) for n in range(4)]


async def test_unsubscribed_messages_are_dropped_until_somebody_subscribes(channels: Channels) -> None:
    letters, marker = Letters(), Letters()
    channels[1].subscribe("marker", marker)
    channels[1].subscribe("t", letters)
    with pytest.raises(ValueError, match="has a subscriber already"):
        channels[1].subscribe("t", marker)
    channels[1].unsubscribe("t")
    channels[0].send(1, "t", "lost")
    channels[0].send(1, "marker", None)
    await marker.take()
    channels[1].subscribe("t", letters)
    channels[0].send(1, "t", "heard")
    assert await letters.take() == [(0, "heard")]


async def test_send_works_from_any_thread(channels: Channels) -> None:
    letters = Letters()
    channels[1].subscribe("t", letters)
    await asyncio.to_thread(channels[0].send, 1, "t", 1)
    assert await letters.take() == [(0, 1)]


async def test_a_subscriber_that_raises_is_reported_and_goes_on(channels: Channels) -> None:
    letters = Letters()
    reports = Letters()

    def subscriber(src: int, payload: Any) -> None:
        # It runs on the loop of the thread that listens, if there is one.
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reports(context["exception"]))
        if payload == "bad":
            raise SystemExit("not here")
        letters(src, payload)

    channels[1].subscribe("t", subscriber)
    channels[0].send(1, "t", "bad")
    channels[0].send(1, "t", "good")
    assert await letters.take() == [(0, "good")]
    assert isinstance((await reports.take())[0][0], SystemExit)


@pytest.mark.thorough
async def test_mistakes_are_raised_by_the_call(channels: Channels) -> None:
    with pytest.raises(ValueError, match="rank 3 of 3: expected 0 <= rank < 3"):
        channels[0].send(3, "t", 1)
    with pytest.raises(TypeError, match="cannot travel"):
        channels[0].broadcast("t", object())
    with pytest.raises(ValueError, match=r"at most 67108864 bytes \(64 MiB\)"):
        channels[0].send(1, "t", bytes(MAX_FRAME))
    with pytest.raises(ValueError, match=r"at most 67108864 bytes \(64 MiB\)"):
        await channels[0].set("k", bytes(MAX_FRAME))


async def test_a_large_value_passes(channels: Channels) -> None:
    value = bytes(range(256)) * (8 << 12)  # 8 MiB
    await channels[0].set("large", value)
    assert await channels[1].get("large") == value


async def test_a_clean_leave_is_known_and_no_loss(channels: Channels) -> None:
    lost, marker = Letters(), Letters()
    channels[0].on_lost(lost)
    await channels[2].aclose()
    while 2 not in channels[0].exits():
        await channels[0].add("time passes")
    exit = channels[0].exits()[2]
    assert (exit.clean, exit.exitcode) == (True, 0)
    channels[0].subscribe("marker", marker)
    channels[1].send(0, "marker", None)
    await marker.take()
    channels[1].fail("only this is a loss")
    assert [found.rank for (found,) in await lost.take()] == [1]


async def test_a_reported_failure_reaches_everybody_with_its_traceback(channels: Channels) -> None:
    lost = Letters()
    channels[0].on_lost(lost)
    channels[2].on_lost(lost)
    channels[1].fail("ValueError: no", "Traceback: line 7", 3)
    for (exit,) in await lost.take(2):
        assert (exit.rank, exit.clean, exit.cause, exit.exitcode) == (1, False, "ValueError: no", 3)
        error = exit.error()
        assert isinstance(error, RemoteError)
        assert (error.raised_by, error.traceback) == (1, "Traceback: line 7")
    await channels[1].aclose()
    late = Letters()
    channels[0].on_lost(late)
    assert [found.cause for (found,) in await late.take()] == ["ValueError: no"]
    assert isinstance(channels[0].exits()[1].error(), RemoteError)


async def test_a_closed_channel_says_so(channels: Channels) -> None:
    waiting = asyncio.ensure_future(channels[1].get("never"))
    await channels[1].add("let the question out")
    await channels[1].aclose()
    with pytest.raises(RuntimeError, match="rank 1 is closed"):
        await waiting
    with pytest.raises(RuntimeError, match="rank 1 is closed"):
        channels[1].send(0, "t", 1)
    with pytest.raises(RuntimeError, match="rank 1 is closed"):
        await channels[1].get("k")
    channels[1].fail("too late to matter")
    await channels[1].aclose()
    channels[0].send(1, "t", "to nobody")


async def test_subscribers_hear_while_the_main_thread_is_stuck() -> None:
    hub = await host(2)
    a, b = await asyncio.gather(*(connect(hub.address, rank=r, size=2, hub=None if r else hub) for r in range(2)))
    answered = threading.Event()
    names = []

    def answer(src: int, payload: Any) -> None:
        names.append(threading.current_thread().name)
        b.send(src, "answer", payload)

    b.subscribe("question", answer)
    a.subscribe("answer", lambda src, payload: answered.set())
    a.send(1, "question", None)
    assert answered.wait(15)  # blocks the only loop of this thread
    answered.clear()
    a.send(1, "question", None)
    while not answered.is_set():  # and so does Python code that never yields
        pass
    assert names == ["aiodist-control"] * 2
    await asyncio.gather(a.aclose(), b.aclose())


# --- roll calls ------------------------------------------------------------------------------------------------------


async def test_a_roll_call_ends_when_all_have_answered(channels: Channels) -> None:
    missing = Letters()
    for channel in channels:
        channel.ask_alive([rank for rank in range(SIZE) if rank != channel.rank], missing)
    channels[0].ask_alive([], missing)
    assert await missing.take(4) == [([],)] * 4


async def test_a_roll_call_names_the_ranks_that_do_not_answer(
    channels: Channels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiodist.control.rollcall.LIVENESS_SECONDS", 0.5)
    missing = Letters()
    channels[2].unsubscribe("rollcall")  # it answers as little as a stopped process
    channels[0].ask_alive([1, 2], missing)
    channels[0].ask_alive([1], missing)
    assert await missing.take(2) == [([],), ([2],)]


async def test_a_roll_call_ends_when_a_rank_without_an_answer_leaves(channels: Channels) -> None:
    """A goodbye ends the wait for that rank, a loss the wait for all."""
    missing = Letters()
    for rank in (1, 2):
        channels[rank].unsubscribe("rollcall")
    channels[0].ask_alive([2], missing)
    await channels[2].aclose()
    assert await missing.take() == [([],)]
    channels[0].ask_alive([1, 2], missing)
    channels[1].fail("it broke")
    assert await missing.take() == [([],)]
    channels[0].ask_alive([1, 2], missing)  # known before the question
    assert await missing.take() == [([],)]


async def test_a_roll_call_on_a_closed_channel_ends_at_once(channels: Channels) -> None:
    missing = Letters()
    await channels[0].aclose()
    channels[0].ask_alive([1, 2], missing)
    assert await missing.take() == [([],)]


async def test_a_close_ends_the_roll_calls_of_a_channel(channels: Channels) -> None:
    missing = Letters()
    channels[1].unsubscribe("rollcall")
    channels[0].ask_alive([1], missing)
    await channels[0].aclose()
    assert await missing.take() == [([],)]
