"""P8: the training clients against a server in memory that shows what was asked of it, and when it answers."""

import asyncio
import copy
from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from aiodist.ps.training import EAMSGD, EASGD, AsySGInCon, Downpour

Make = Callable[..., Any]


class Call:
    """One request, which is over when the server says so."""

    def __init__(self) -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.late = False

    def done(self) -> bool:
        return bool(self.over.done())

    def __await__(self) -> Generator[Any, None, None]:
        if self.late:
            self.late = False  # told once
            raise TimeoutError("late")
        return (yield from asyncio.shield(self.over).__await__())


class Memory:
    """Tensors by name. With `held` calls stay in flight until `release`; those after `fail_next` raise."""

    def __init__(self, **tensors: Tensor) -> None:
        self.tensors = {name: t.detach().clone() for name, t in tensors.items()}
        self.log: list[tuple[str, list[str], str | None]] = []
        self.lr = 0.5
        """Of its own rule, which takes gradients."""
        self.held = False
        self.waiting: list[tuple[str, Call, Callable[[], None]]] = []
        self.most_pushes = 0
        self.failing: Exception | None = None

    def push(self, what: Sequence[str], values: Sequence[Tensor], *, rule: str | None = None) -> Call:
        def apply() -> None:
            for name, value in zip(what, values, strict=True):
                assert value.is_contiguous()
                self.tensors[name] += value if rule == "add" else -self.lr * value

        return self._issue("push", what, rule, apply)

    def pull(self, what: Sequence[str], out: Sequence[Tensor], *, reads: str | None = None) -> Call:
        def read() -> None:
            for name, into in zip(what, out, strict=True):
                into.copy_(self.tensors[name])

        return self._issue("pull", what, reads, read)

    def _issue(self, kind: str, what: Sequence[str], how: str | None, effect: Callable[[], None]) -> Call:
        call = Call()
        self.log.append((kind, list(what), how))
        self.waiting.append((kind, call, effect))
        self.most_pushes = max(self.most_pushes, [kind for kind, _, _ in self.waiting].count("push"))
        if not self.held:
            self.release()
        return call

    def release(self) -> None:
        while self.waiting:
            _, call, effect = self.waiting.pop(0)
            if self.failing is not None:
                call.over.set_exception(self.failing)
                self.failing = None
            else:
                effect()
                call.over.set_result(None)

    def kinds(self) -> list[str]:
        return [kind for kind, _, _ in self.log]


class Trial:
    """A model of one weight vector, the server that knows it, and gradients of the test's choosing."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        self.w = nn.Parameter(torch.tensor([1.0, -2.0, 0.5], dtype=dtype))
        self.ps = Memory(w=torch.tensor([0.25, 3.0, -1.0], dtype=dtype))
        self.params = {"w": self.w}

    @property
    def centre(self) -> Tensor:
        return self.ps.tensors["w"]

    def sgd(self, lr: float = 0.1) -> torch.optim.Optimizer:
        return torch.optim.SGD([self.w], lr=lr)

    async def step(self, client: Any, gradient: float = 1.0) -> None:
        self.w.grad = torch.full_like(self.w, gradient)
        await within(client.step())


async def within(what: Awaitable[None]) -> None:
    async with asyncio.timeout(5):
        await what


async def turns() -> None:
    """Let whatever can go on do so."""
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture
def trial() -> Trial:
    return Trial()


# --- EASGD -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
async def test_p8_an_exchange_moves_centre_and_weights_by_exactly_alpha_times_their_distance(
    dtype: torch.dtype,
) -> None:
    trial = Trial(dtype)
    client = EASGD(trial.ps, trial.params, trial.sgd(0.0), tau=1, alpha=0.3)
    w, c = trial.w.detach().clone(), trial.centre.clone()
    await trial.step(client)
    moved = 0.3 * (w - c)
    assert torch.equal(trial.centre, c + moved)
    assert torch.equal(trial.w.detach(), w - moved)
    await client.aclose()


async def test_p8_an_exchange_takes_the_weights_before_the_optimizer_steps(trial: Trial) -> None:
    client = EASGD(trial.ps, trial.params, trial.sgd(0.1), tau=2, alpha=0.3)
    await trial.step(client, 1.0)
    w, c = trial.w.detach().clone(), trial.centre.clone()
    await trial.step(client, 5.0)
    assert torch.equal(trial.centre, c + 0.3 * (w - c))
    torch.testing.assert_close(trial.w.detach(), w - 0.3 * (w - c) - 0.5)


async def test_p8_pulls_and_integrations_at_their_steps(trial: Trial) -> None:
    client = EASGD(trial.ps, trial.params, trial.sgd(), tau=50, alpha=0.5, warmup=20, prefetch=25)
    seen: dict[str, list[int]] = {"pull": [], "push": []}
    for step in range(1, 171):
        before = len(trial.ps.log)
        await trial.step(client)
        for kind in trial.ps.kinds()[before:]:
            seen[kind].append(step)
    assert seen == {"pull": [45, 95, 145], "push": [70, 120, 170]}
    assert client.steps == 170


async def test_p8_what_was_prefetched_is_integrated(trial: Trial) -> None:
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


async def test_p8_eamsgd_is_algorithm_2_of_the_paper(trial: Trial) -> None:
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


async def test_p8_eamsgd_between_exchanges_is_torchs_nesterov(trial: Trial) -> None:
    other = nn.Parameter(trial.w.detach().clone())
    theirs = torch.optim.SGD([other], lr=0.1, momentum=0.9, nesterov=True)
    client = EAMSGD(trial.ps, trial.params, trial.sgd(), tau=100, alpha=0.2, momentum=0.9)
    for _ in range(20):
        trial.w.grad, other.grad = gradient(trial.w.detach()), gradient(other.detach())
        await within(client.step())
        theirs.step()
        torch.testing.assert_close(trial.w.detach(), other.detach())


async def test_p8_eamsgd_without_momentum_is_easgd() -> None:
    a, b = Trial(), Trial()
    first = EASGD(a.ps, a.params, torch.optim.Adam([a.w]), tau=2, alpha=0.2)
    second = EAMSGD(b.ps, b.params, torch.optim.Adam([b.w]), tau=2, alpha=0.2, momentum=0.0)
    for step in range(9):
        await a.step(first, step - 3.0)
        await b.step(second, step - 3.0)
        assert torch.equal(a.w, b.w)
        assert torch.equal(a.centre, b.centre)


async def test_p8_eamsgd_stays_itself_when_closed_inside_weights(trial: Trial) -> None:
    client = EAMSGD(trial.ps, trial.params, trial.sgd(), tau=2, alpha=0.2)
    await trial.step(client)
    with client.weights():
        own = trial.w.detach().clone()
        with pytest.raises(RuntimeError, match="inside itself"), client.weights():
            pass
        with pytest.raises(RuntimeError, match="a step inside"):
            await trial.step(client)
        await client.aclose()
    assert torch.equal(trial.w.detach(), own)


# --- Downpour --------------------------------------------------------------------------------------------------------


async def test_p8_downpour_pushes_and_pulls_at_its_steps_and_loses_nothing(trial: Trial) -> None:
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
        if step % 3 == 0:  # the centre, and what it lacks
            torch.testing.assert_close(trial.w.detach(), trial.centre + unpushed)
        if step % 6 == 0:
            assert torch.equal(trial.w.detach(), trial.centre)


async def test_p8_downpour_adds_what_all_clients_found() -> None:
    ps = Memory(w=torch.zeros(3))
    trials = [Trial(torch.float32) for _ in range(3)]
    for one in trials:
        one.ps = ps
    clients = [Downpour(ps, one.params, one.sgd(1.0), n_push=2, n_pull=2) for one in trials]
    for client in clients:
        await within(client.start())
    for _ in range(4):
        for k, (one, client) in enumerate(zip(trials, clients, strict=True)):
            await one.step(client, float(10**k))
    assert torch.equal(ps.tensors["w"], torch.full((3,), -444.0))


async def test_p8_downpour_sends_summed_gradients_where_the_server_has_the_optimizer() -> None:
    w, unused = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.ones(2))
    ps = Memory(w=w, unused=unused)
    optimizer = torch.optim.SGD([w, unused], lr=0.1)
    client = Downpour(ps, {"w": w, "unused": unused}, optimizer, n_push=2, n_pull=4, gradients=True)
    for step in range(1, 5):
        w.grad = torch.full_like(w, float(step))
        await within(client.step())
    assert ps.log == [("push", ["w"], None), ("push", ["w"], None), ("pull", ["w", "unused"], None)]
    assert torch.equal(ps.tensors["w"], torch.full((2,), -0.5 * (1 + 2 + 3 + 4)))
    assert torch.equal(w.detach(), ps.tensors["w"])
    unused.grad = torch.ones(2)
    await within(client.step())
    await within(client.step())
    assert ps.log[-1] == ("push", ["w", "unused"], None)


# --- AsySG-InCon -----------------------------------------------------------------------------------------------------


async def test_p8_asysg_pushes_gradients_and_reads_lock_free() -> None:
    w, unused = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.ones(2))
    ps = Memory(w=w, unused=unused)
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


async def test_p8_asysg_does_not_wait_for_its_push(trial: Trial) -> None:
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


# --- what is in flight -----------------------------------------------------------------------------------------------


MAKERS: dict[str, Make] = {
    "easgd": lambda ps, params, opt: EASGD(ps, params, opt, tau=1, alpha=0.25),
    "prefetching": lambda ps, params, opt: EASGD(ps, params, opt, tau=2, alpha=0.25, prefetch=1),
    "eamsgd": lambda ps, params, opt: EAMSGD(ps, params, opt, tau=1, alpha=0.25),
    "downpour": lambda ps, params, opt: Downpour(ps, params, opt, n_push=1, n_pull=1),
    "gradients": lambda ps, params, opt: Downpour(ps, params, opt, n_push=1, n_pull=1, gradients=True),
    "asysg": lambda ps, params, opt: AsySGInCon(ps, params),
}


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    return MAKERS[request.param]  # type: ignore[return-value]


async def test_p8_a_push_is_not_waited_for_and_one_is_in_flight_at_most(trial: Trial) -> None:
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


async def test_p8_a_failed_push_is_told_by_the_next_step_and_training_goes_on(trial: Trial) -> None:
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
async def test_p8_a_failed_pull_changes_nothing_and_the_step_can_be_made_again(trial: Trial, prefetch: int) -> None:
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


async def test_p8_what_is_late_goes_on_and_its_memory_is_left_alone(trial: Trial) -> None:
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


async def test_p8_a_cancelled_step_takes_up_its_pull_when_it_is_made_again(trial: Trial) -> None:
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


async def test_p8_close_waits_for_what_is_in_flight_and_tells_its_error(trial: Trial, make: Make) -> None:
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


async def test_p8_a_body_that_raises_is_not_held_up_by_what_is_in_flight(trial: Trial) -> None:
    client = EAMSGD(trial.ps, trial.params, trial.sgd(), tau=1, alpha=0.5)

    async def train() -> None:
        async with client:
            await trial.step(client)
            trial.ps.held = True
            client._link.ask(["w"], [torch.empty(3)])
            raise KeyError

    with pytest.raises(KeyError):
        await within(train())
    own = trial.w.detach().clone()
    with client.weights():
        assert torch.equal(trial.w.detach(), own)  # no point ahead
    with pytest.raises(RuntimeError, match="is closed"):
        await client.step()


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
async def test_p8_any_optimizer_and_parameters_of_any_kind(make: Make, optimizer: str) -> None:
    start, models = Mixed(), [Mixed(), Mixed()]
    ps = Memory(**dict(start.named_parameters()))
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


async def test_p8_sparse_gradients_are_added_up() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    ps = Memory(weight=table.weight)
    client = AsySGInCon(ps, dict(table.named_parameters()))
    table(torch.tensor([1, 1])).sum().backward()
    expected = table.weight.detach().clone()
    expected[1] -= 0.5 * 2
    await within(client.step())
    assert torch.equal(ps.tensors["weight"], expected)


async def test_p8_computing_can_be_left_to_another_thread(trial: Trial) -> None:
    asked = []

    async def run(fn: Callable[[], None]) -> None:
        asked.append(fn)
        await asyncio.to_thread(fn)

    other = Trial()
    client = EAMSGD(trial.ps, trial.params, trial.sgd(), tau=2, alpha=0.3, run=run)
    plain = EAMSGD(other.ps, other.params, other.sgd(), tau=2, alpha=0.3)
    for _ in range(4):
        await trial.step(client)
        await other.step(plain)
    assert torch.equal(trial.w, other.w)
    assert torch.equal(trial.centre, other.centre)
    assert len(asked) == 4 + 2  # each step, and what an exchange moves


def test_p8_keys_are_the_parameters_themselves_unless_they_have_names() -> None:
    model = nn.Linear(2, 2)
    for params in (model, list(model.parameters()), iter([model.weight, model.bias, model.weight])):
        client = AsySGInCon(Memory(), params)
        assert [key is p for key, p in zip(client._keys, model.parameters(), strict=True)] == [True, True]


# --- what makes no sense ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda ps, p, o: EASGD(ps, p, o, tau=4, alpha=0.1, prefetch=4), ValueError, "prefetch=4 with tau=4"),
        (lambda ps, p, o: EASGD(ps, p, o, tau=0, alpha=0.1), ValueError, "tau=0"),
        (lambda ps, p, o: EASGD(ps, p, o, tau=4, alpha=0.0), ValueError, "alpha=0.0"),
        (lambda ps, p, o: EASGD(ps, p, o, tau=4, alpha=1.1), ValueError, "alpha=1.1"),
        (lambda ps, p, o: EASGD(ps, p, o, tau=4, alpha=float("nan")), ValueError, "alpha=nan"),
        (lambda ps, p, o: EASGD(ps, p, cast(Any, None), tau=4, alpha=0.1), TypeError, "optimizer is NoneType"),
        (lambda ps, p, o: EAMSGD(ps, p, o, tau=4, alpha=0.1, momentum=1.0), ValueError, "momentum=1.0"),
        (lambda ps, p, o: Downpour(ps, p, o, n_push=0, n_pull=1), ValueError, "n_push=0"),
        (lambda ps, p, o: Downpour(ps, p, o, n_push=1, n_pull=cast(Any, 1.5)), TypeError, "n_pull is float"),
        (lambda ps, p, o: Downpour(ps, p, cast(Any, 3), n_push=1, n_pull=1), TypeError, "optimizer is int"),
        (lambda ps, p, o: AsySGInCon(ps, p, n_pull=0), ValueError, "n_pull=0"),
        (lambda ps, p, o: AsySGInCon(ps, []), ValueError, "0 tensors, none of which requires a gradient"),
        (lambda ps, p, o: AsySGInCon(ps, [torch.ones(2)]), ValueError, "1 tensors, none of which"),
        (lambda ps, p, o: AsySGInCon(ps, cast(Any, [3])), TypeError, "params holds int"),
        (lambda ps, p, o: AsySGInCon(ps, torch.ones(2)), TypeError, "params is Tensor"),
        (lambda ps, p, o: AsySGInCon(ps, cast(Any, 3)), TypeError, "params is int"),
    ],
)
def test_p8_senseless_arguments_are_refused(trial: Trial, call: Make, error: type[Exception], said: str) -> None:
    before = copy.deepcopy(trial.params)
    with pytest.raises(error, match=said):
        call(trial.ps, trial.params, trial.sgd())
    assert torch.equal(before["w"], trial.w)
    assert not trial.ps.log
