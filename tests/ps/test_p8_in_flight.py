"""P8: what training clients have in flight: how much, whose errors, what cancelling and closing do."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch

from aiodist.ps import EAMSGD, EASGD, AsySGInCon, Downpour

Make = Callable[..., Any]


async def within(what: Awaitable[None]) -> None:
    async with asyncio.timeout(50):
        await what


async def turns() -> None:
    """Let every runnable task continue."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_p8_asysg_does_not_wait_for_its_push(trial: Any) -> None:
    client = AsySGInCon(trial.ps, trial.params, n_pull=3)
    trial.ps.held = True
    await trial.step(client)  # in flight
    trial.w.grad = torch.full_like(trial.w, 7.0)
    second = asyncio.ensure_future(client.step())
    await turns()
    assert not second.done()  # one push is in flight at most
    c = trial.centre.clone()
    trial.ps.release()
    await within(second)
    trial.w.grad.fill_(1000.0)  # what is in flight is not the gradient itself
    trial.ps.release()
    assert torch.equal(trial.centre, c - 0.5 * 1.0 - 0.5 * 7.0)
    assert trial.ps.most_pushes == 1


async def test_p8_a_push_is_not_waited_for_and_one_is_in_flight_at_most(trial: Any) -> None:
    client = Downpour(trial.ps, trial.params, trial.sgd(), n_push=1, n_pull=100)
    trial.ps.held = True
    await trial.step(client, 1.0)
    trial.w.grad = torch.full_like(trial.w, 2.0)
    second = asyncio.ensure_future(client.step())
    await turns()
    assert not second.done()
    c = trial.centre.clone()
    trial.ps.release()
    await within(second)
    trial.ps.release()
    torch.testing.assert_close(trial.centre, c - 0.1 - 0.2)
    assert trial.ps.most_pushes == 1


async def test_p8_the_next_step_raises_a_failed_push_and_training_continues(trial: Any) -> None:
    client = Downpour(trial.ps, trial.params, trial.sgd(), n_push=2, n_pull=100)
    await trial.step(client)
    trial.ps.failing = ValueError("no room")
    await trial.step(client)
    w = trial.w.detach().clone()
    with pytest.raises(ValueError, match="no room"):
        await trial.step(client)
    assert torch.equal(trial.w.detach(), w)
    await trial.step(client)
    assert client.steps == 3


@pytest.mark.parametrize("prefetch", [0, 1])
async def test_p8_a_failed_pull_changes_nothing_and_the_step_can_be_made_again(trial: Any, prefetch: int) -> None:
    client = EASGD(trial.ps, trial.params, trial.sgd(), tau=2, alpha=0.5, prefetch=prefetch)
    if prefetch:
        trial.ps.failing = ValueError("server is gone")
    await trial.step(client)
    if not prefetch:
        trial.ps.failing = ValueError("server is gone")
    w, c = trial.w.detach().clone(), trial.centre.clone()
    with pytest.raises(ValueError, match="server is gone"):
        await trial.step(client, 0.0)
    assert torch.equal(trial.w.detach(), w)
    assert torch.equal(trial.centre, c)
    await trial.step(client, 0.0)
    assert client.steps == 2
    assert torch.equal(trial.w.detach(), w - 0.5 * (w - c))


async def test_p8_a_late_call_continues_and_its_memory_is_not_touched(trial: Any) -> None:
    client = Downpour(trial.ps, trial.params, trial.sgd(), n_push=1, n_pull=100)
    trial.ps.held = True
    await trial.step(client, 1.0)
    trial.ps.waiting[0][1].late = True
    with pytest.raises(TimeoutError, match="late"):
        await trial.step(client, 2.0)  # made, and not pushed
    trial.ps.held = False
    trial.ps.release()
    c = trial.centre.clone()
    await trial.step(client, 4.0)
    torch.testing.assert_close(trial.centre, c - 0.2 - 0.4)
    assert trial.ps.kinds() == ["push", "push"]
    assert trial.ps.most_pushes == 1


async def test_p8_a_cancelled_step_takes_up_its_pull_when_it_is_made_again(trial: Any) -> None:
    client = EASGD(trial.ps, trial.params, trial.sgd(0.0), tau=1, alpha=0.5)
    trial.ps.held = True
    w, c = trial.w.detach().clone(), trial.centre.clone()
    trial.w.grad = torch.ones_like(trial.w)
    step = asyncio.ensure_future(client.step())
    await turns()
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    assert client.steps == 0
    trial.ps.held = False
    trial.ps.release()
    await trial.step(client)
    assert trial.ps.kinds() == ["pull", "push"]
    assert torch.equal(trial.w.detach(), w - 0.5 * (w - c))


@pytest.mark.parametrize("ticks", range(12))
async def test_p8_a_cancelled_step_of_downpour_loses_no_update(trial: Any, ticks: int) -> None:
    """The compute thread measured the step's update, but the client has not pushed it."""

    async def later(fn: Callable[[], None]) -> None:
        await asyncio.sleep(0)
        fn()

    def run(fn: Callable[[], None]) -> Awaitable[None]:  # what was asked for is done, as on a compute thread
        return asyncio.shield(asyncio.ensure_future(later(fn)))

    client = Downpour(trial.ps, trial.params, trial.sgd(), n_push=1, n_pull=100, run=run)
    w, c = trial.w.detach().clone(), trial.centre.clone()
    trial.w.grad = torch.ones_like(trial.w)
    step = asyncio.ensure_future(client.step())
    for _ in range(ticks + 1):
        await asyncio.sleep(0)
    step.cancel()
    await turns()
    await trial.step(client, 2.0)
    await within(client.aclose())
    made = w - trial.w.detach()
    assert 0.2 <= float(made.max()) <= 0.3001
    torch.testing.assert_close(trial.centre, c - made)


async def test_p8_close_waits_for_calls_in_flight_and_raises_their_error(trial: Any, make: Make) -> None:
    client = make(trial.ps, trial.params, trial.sgd())
    await trial.step(client)
    trial.ps.held = True
    trial.w.grad = torch.ones_like(trial.w)
    step = asyncio.ensure_future(client.step())
    await turns()
    step.cancel()
    await turns()
    assert trial.ps.waiting
    closing = asyncio.ensure_future(client.aclose())
    await turns()
    assert not closing.done()
    trial.ps.failing = ValueError("lost")
    trial.ps.release()
    with pytest.raises(ValueError, match="lost"):
        await within(closing)
    await client.aclose()
    with pytest.raises(RuntimeError, match="is closed"):
        await client.step()


async def test_p8_a_body_that_raises_is_not_held_up_by_what_is_in_flight(trial: Any) -> None:
    client = EAMSGD(trial.ps, trial.params, trial.sgd(), tau=2, alpha=0.5, prefetch=1)

    async def train() -> None:
        async with client:
            trial.ps.held = True
            await trial.step(client)
            assert trial.ps.waiting
            raise KeyError

    with pytest.raises(KeyError):
        await within(train())
    own = trial.w.detach().clone()
    with client.weights():
        assert torch.equal(trial.w.detach(), own)  # no point ahead
    with pytest.raises(RuntimeError, match="is closed"):
        await client.step()
