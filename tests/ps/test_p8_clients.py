"""P8: what each training client does, against a server in memory."""

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aiodist.ps import EAMSGD, EASGD, AsySGInCon, Downpour


async def within(what: Awaitable[None]) -> None:
    async with asyncio.timeout(50):
        await what


# --- EASGD -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
async def test_p8_an_exchange_moves_centre_and_weights_by_exactly_alpha_times_their_distance(
    dtype: torch.dtype, new_trial: Any
) -> None:
    trial = new_trial(dtype)
    client = EASGD(trial.ps, trial.params, trial.sgd(0.0), tau=1, alpha=0.3)
    w, c = trial.w.detach().clone(), trial.centre.clone()
    await trial.step(client)
    moved = 0.3 * (w - c)
    assert torch.equal(trial.centre, c + moved)
    assert torch.equal(trial.w.detach(), w - moved)
    await client.aclose()


async def test_p8_an_exchange_takes_the_weights_before_the_optimizer_steps(trial: Any) -> None:
    client = EASGD(trial.ps, trial.params, trial.sgd(0.1), tau=2, alpha=0.3)
    await trial.step(client, 1.0)
    w, c = trial.w.detach().clone(), trial.centre.clone()
    await trial.step(client, 5.0)
    assert torch.equal(trial.centre, c + 0.3 * (w - c))
    torch.testing.assert_close(trial.w.detach(), w - 0.3 * (w - c) - 0.5)


async def test_p8_pulls_and_integrations_at_their_steps(trial: Any) -> None:
    client = EASGD(trial.ps, trial.params, trial.sgd(), tau=50, alpha=0.5, warmup=20, prefetch=25)
    seen: dict[str, list[int]] = {"pull": [], "push": []}
    for step in range(1, 171):
        before = len(trial.ps.log)
        await trial.step(client)
        for kind in trial.ps.kinds()[before:]:
            seen[kind].append(step)
    assert seen == {"pull": [45, 95, 145], "push": [70, 120, 170]}
    assert client.steps == 170


async def test_p8_what_was_prefetched_is_integrated(trial: Any) -> None:
    client = EASGD(trial.ps, trial.params, trial.sgd(0.0), tau=4, alpha=0.5, prefetch=2)
    for _ in range(2):
        await trial.step(client)
    w, c = trial.w.detach().clone(), trial.centre.clone()
    trial.centre.add_(100.0)  # others push
    for _ in range(2):
        await trial.step(client)
    assert torch.equal(trial.w.detach(), w - 0.5 * (w - c))
    assert torch.equal(trial.centre, c + 100.0 + 0.5 * (w - c))


# --- EAMSGD ----------------------------------------------------------------------------------------------------------


def gradient(x: Tensor) -> Tensor:
    return x.cos() + 0.5 * x


async def test_p8_eamsgd_is_algorithm_2_of_the_paper(trial: Any) -> None:
    eta, alpha, delta, tau = 0.1, 0.2, 0.7, 3
    client = EAMSGD(trial.ps, trial.params, trial.sgd(eta), tau=tau, alpha=alpha, momentum=delta)
    x, c, v = trial.w.detach().clone(), trial.centre.clone(), torch.zeros(3, dtype=torch.float64)
    for step in range(1, 11):
        trial.w.grad = gradient(trial.w.detach())
        await within(client.step())
        old = x
        if step % tau == 0:
            x, c = x - alpha * (old - c), c + alpha * (old - c)
        v = delta * v - eta * gradient(old + delta * v)
        x = x + v
        torch.testing.assert_close(trial.w.detach(), x + delta * v)
        torch.testing.assert_close(trial.centre, c)
        with client.weights():
            torch.testing.assert_close(trial.w.detach(), x)
        torch.testing.assert_close(trial.w.detach(), x + delta * v)
    await client.aclose()
    torch.testing.assert_close(trial.w.detach(), x)


async def test_p8_eamsgd_between_exchanges_is_torchs_nesterov(trial: Any) -> None:
    other = nn.Parameter(trial.w.detach().clone())
    theirs = torch.optim.SGD([other], lr=0.1, momentum=0.9, nesterov=True)
    client = EAMSGD(trial.ps, trial.params, trial.sgd(), tau=100, alpha=0.2, momentum=0.9)
    for _ in range(20):
        trial.w.grad, other.grad = gradient(trial.w.detach()), gradient(other.detach())
        await within(client.step())
        theirs.step()
        torch.testing.assert_close(trial.w.detach(), other.detach())


async def test_p8_eamsgd_without_momentum_is_easgd(new_trial: Any) -> None:
    a, b = new_trial(), new_trial()
    first = EASGD(a.ps, a.params, torch.optim.Adam([a.w]), tau=2, alpha=0.2)
    second = EAMSGD(b.ps, b.params, torch.optim.Adam([b.w]), tau=2, alpha=0.2, momentum=0.0)
    for step in range(9):
        await a.step(first, step - 3.0)
        await b.step(second, step - 3.0)
        assert torch.equal(a.w, b.w)
        assert torch.equal(a.centre, b.centre)


async def test_p8_eamsgd_stays_itself_when_closed_inside_weights(trial: Any) -> None:
    client = EAMSGD(trial.ps, trial.params, trial.sgd(), tau=2, alpha=0.2)
    await trial.step(client)
    with client.weights():
        own = trial.w.detach().clone()
        await client.aclose()
    assert torch.equal(trial.w.detach(), own)


# --- Downpour --------------------------------------------------------------------------------------------------------


async def test_p8_downpour_pushes_and_pulls_at_its_steps_and_loses_nothing(trial: Any) -> None:
    client = Downpour(trial.ps, trial.params, trial.sgd(), n_push=2, n_pull=3)
    pushed, c = torch.zeros(3, dtype=torch.float64), trial.centre.clone()
    unpushed = torch.zeros(3, dtype=torch.float64)
    for step in range(1, 13):
        before = len(trial.ps.log)
        await trial.step(client, float(step))
        unpushed -= 0.1 * step
        if step % 2 == 0:
            pushed, unpushed = pushed + unpushed, torch.zeros_like(unpushed)
        expected = [("push", ["w"], "add")] * (step % 2 == 0) + [("pull", ["w"], None)] * (step % 3 == 0)
        assert trial.ps.log[before:] == expected
        torch.testing.assert_close(trial.centre, c + pushed)
        if step % 3 == 0:  # the centre, and the updates not yet pushed
            torch.testing.assert_close(trial.w.detach(), trial.centre + unpushed)
        if step % 6 == 0:
            assert torch.equal(trial.w.detach(), trial.centre)


async def test_p8_downpour_adds_what_all_clients_found(new_trial: Any, memory: Any) -> None:
    ps = memory(w=torch.zeros(3))
    trials = [new_trial(torch.float32) for _ in range(3)]
    for one in trials:
        one.ps = ps
    clients = [Downpour(ps, one.params, one.sgd(1.0), n_push=2, n_pull=2) for one in trials]
    for client in clients:
        await within(client.start())
    for _ in range(4):
        for k, (one, client) in enumerate(zip(trials, clients, strict=True)):
            await one.step(client, float(10**k))
    assert torch.equal(ps.tensors["w"], torch.full((3,), -444.0))


# --- AsySG-InCon -----------------------------------------------------------------------------------------------------


async def test_p8_asysg_pushes_gradients_and_reads_lock_free(memory: Any) -> None:
    w, unused = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.ones(2))
    ps = memory(w=w, unused=unused)
    client = AsySGInCon(ps, {"w": w, "unused": unused}, n_pull=2)
    for step in range(1, 5):
        w.grad = torch.full_like(w, float(step))
        await within(client.step())
        if step % 2:
            assert not torch.equal(w.detach(), ps.tensors["w"])
        else:
            assert torch.equal(w.detach(), ps.tensors["w"])
    assert ps.log == [("push", ["w"], None), ("push", ["w"], None), ("pull", ["w", "unused"], "lock-free")] * 2
    assert torch.equal(ps.tensors["w"], torch.full((2,), -5.0))
    w.grad = None
    await within(client.step())
    assert len(ps.log) == 6


# --- optimizers of other parameters ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["downpour", "easgd", "eamsgd"])
@pytest.mark.parametrize("when", ["made", "later", "in_place"])
async def test_p8_an_optimizer_with_parameters_that_no_client_exchanges(kind: str, when: str, trial: Any) -> None:
    head = nn.Linear(2, 2).requires_grad_(False)
    mine = list(trial.params.values())
    opt = torch.optim.SGD([*mine, head.weight] if when == "made" else mine, lr=0.1)

    def made() -> Any:
        if kind == "downpour":
            return Downpour(trial.ps, trial.params, opt, n_push=1, n_pull=1)
        if kind == "easgd":
            return EASGD(trial.ps, trial.params, opt, tau=2, alpha=0.5)
        return EAMSGD(trial.ps, trial.params, opt, tau=2, alpha=0.5)

    wrong = pytest.raises(ValueError, match=r"does not exchange: a float32\[2(, 2)?\], number \d of its group \d\. The")
    if when == "made":
        await made().aclose()  # it does not train
        head.requires_grad_(True)
        with wrong:
            made()
        return
    client = made()
    await trial.step(client)
    if when == "later":
        opt.add_param_group({"params": head.parameters()})
    else:
        opt.param_groups[0]["params"].append(head.bias)
    await trial.step(client)
    head.requires_grad_(True)
    before, log = trial.w.detach().clone(), len(trial.ps.log)
    with wrong:
        await trial.step(client)
    assert torch.equal(before, trial.w.detach())
    assert len(trial.ps.log) == log
    await client.aclose()
