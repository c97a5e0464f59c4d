"""P8: training clients with any optimizer and parameters of any kind; arguments that they refuse."""

import asyncio
import copy
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from aiodist.ps import EAMSGD, EASGD, AsySGInCon, Downpour

Make = Callable[..., Any]


async def within(what: Awaitable[None]) -> None:
    async with asyncio.timeout(50):
        await what


# --- any model, any optimizer ----------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Parameters of three dtypes, one shared, one frozen, one never used, one that lies crosswise in memory."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        self.a = nn.Parameter(torch.randn(4, 3, generator=draw).t())
        self.b = nn.Parameter(torch.randn(4, generator=draw, dtype=torch.float64))
        self.c = nn.Parameter(torch.randn(4, generator=draw).bfloat16())
        self.again = self.b
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(2))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self) -> Tensor:
        return ((self.a @ self.b.float()).sum() - 1).square() + (self.c.float() * self.again.float()).sum().square()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
async def test_p8_any_optimizer_and_parameters_of_any_kind(make: Make, optimizer: str, memory: Any) -> None:
    start, models = Mixed(), [Mixed(), Mixed()]
    ps = memory(**dict(start.named_parameters()))
    ps.lr = 0.001
    for name, t in ps.tensors.items():
        t.add_(1.0 if name != "frozen" else 0.0)
    clients = []
    for model in models:
        params = [p for p in model.parameters() if p.requires_grad]
        clients.append(make(ps, dict(model.named_parameters()), OPTIMIZERS[optimizer](params)))
    before = {name: t.clone() for name, t in ps.tensors.items()}
    for client in clients:
        await within(client.start())
    assert torch.equal(models[0].a, ps.tensors["a"])
    for _ in range(5):
        for model, client in zip(models, clients, strict=True):
            model.zero_grad()
            model().backward()
            await within(client.step())
    for client in clients:
        await within(client.aclose())
    for name in ("a", "b", "c"):
        assert not torch.equal(ps.tensors[name], before[name]), name
        assert ps.tensors[name].dtype is before[name].dtype
        assert ps.tensors[name].isfinite().all()
    assert torch.equal(models[0].frozen, torch.ones(2))
    assert all("frozen" not in what for _, what, _ in ps.log)
    assert all(len(what) <= 4 for _, what, _ in ps.log)  # the shared one counts once
    assert torch.equal(ps.tensors["unused"], torch.full((2,), 2.0))


async def test_p8_sparse_gradients_are_added_up(memory: Any) -> None:
    table = nn.Embedding(4, 2, sparse=True)
    ps = memory(weight=table.weight)
    client = AsySGInCon(ps, dict(table.named_parameters()))
    table(torch.tensor([1, 1])).sum().backward()
    expected = table.weight.detach().clone()
    expected[1] -= 0.5 * 2
    await within(client.step())
    assert torch.equal(ps.tensors["weight"], expected)


async def test_p8_computing_can_be_left_to_another_thread(trial: Any, new_trial: Any) -> None:
    asked = []

    async def run(fn: Callable[[], None]) -> None:
        asked.append(fn)
        await asyncio.to_thread(fn)

    other = new_trial()
    client = EAMSGD(trial.ps, trial.params, trial.sgd(), tau=2, alpha=0.3, run=run)
    plain = EAMSGD(other.ps, other.params, other.sgd(), tau=2, alpha=0.3)
    for _ in range(4):
        await trial.step(client)
        await other.step(plain)
    assert torch.equal(trial.w, other.w)
    assert torch.equal(trial.centre, other.centre)
    assert len(asked) == 4 + 2  # one for each step, and those of an exchange


async def test_p8_keys_are_the_parameters_themselves_unless_they_have_names(memory: Any) -> None:
    model = nn.Linear(2, 2)
    for params in (model, list(model.parameters()), iter([model.weight, model.bias, model.weight])):
        ps = memory()
        ps.held = True
        asking = asyncio.ensure_future(AsySGInCon(ps, params).start())
        await asyncio.sleep(0)
        asking.cancel()
        ((_, keys, _),) = ps.log
        assert [key is p for key, p in zip(keys, model.parameters(), strict=True)] == [True, True]


# --- what makes no sense ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda ps, p, o: EASGD(ps, p, o, tau=4, alpha=0.1, prefetch=4), ValueError, "prefetch=4 with tau=4"),
        (lambda ps, p, o: EASGD(ps, p, o, tau=0, alpha=0.1), ValueError, "tau=0"),
        (lambda ps, p, o: EASGD(ps, p, o, tau=4, alpha=0.0), ValueError, "alpha=0.0"),
        (lambda ps, p, o: EASGD(ps, p, o, tau=4, alpha=1.1), ValueError, "alpha=1.1"),
        (lambda ps, p, o: EASGD(ps, p, o, tau=4, alpha=float("nan")), ValueError, "alpha=nan"),
        (lambda ps, p, o: EAMSGD(ps, p, o, tau=4, alpha=0.1, momentum=1.0), ValueError, "momentum=1.0"),
        (lambda ps, p, o: Downpour(ps, p, o, n_push=0, n_pull=1), ValueError, "n_push=0"),
        (lambda ps, p, o: Downpour(ps, p, o, n_push=1, n_pull=cast(Any, 1.5)), TypeError, "n_pull is float"),
        (lambda ps, p, o: AsySGInCon(ps, p, n_pull=0), ValueError, "n_pull=0"),
        (lambda ps, p, o: AsySGInCon(ps, []), ValueError, "0 tensors without requires_grad"),
        (lambda ps, p, o: AsySGInCon(ps, [torch.ones(2)]), ValueError, "1 tensors without"),
        (lambda ps, p, o: AsySGInCon(ps, cast(Any, [3])), TypeError, "params holds int"),
        (lambda ps, p, o: AsySGInCon(ps, torch.ones(2)), TypeError, "params is Tensor"),
        (lambda ps, p, o: AsySGInCon(ps, cast(Any, 3)), TypeError, "params is int"),
    ],
)
def test_p8_senseless_arguments_are_refused(trial: Any, call: Make, error: type[Exception], said: str) -> None:
    before = copy.deepcopy(trial.params)
    with pytest.raises(error, match=said):
        call(trial.ps, trial.params, trial.sgd())
    assert torch.equal(before["w"], trial.w)
    assert not trial.ps.log
