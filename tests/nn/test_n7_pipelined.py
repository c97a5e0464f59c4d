"""N7: each bucket steps when it is reduced, each layer waits for its own parameters, and the results are the same."""

import asyncio
import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from time import monotonic
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune

import aiodist
from aiodist import Communicator
from aiodist.handles import Handle, Progress
from aiodist.nn import DataParallel, PipelinedOptimizer, assert_synchronized

STEPS = 4
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Held:
    """A communicator whose reductions are made at once, and told of when the test says so."""

    def __init__(self, net: DataParallel, holding: Callable[[Tensor], bool] = lambda t: True) -> None:
        self.holding = holding
        self._coll = net.reducer._paths.data
        self._held: list[tuple[Handle[Any], Handle[None]]] = []
        net.reducer._paths = replace(net.reducer._paths, data=self)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coll, name)

    def __len__(self) -> int:
        return len(self._held)

    def allreduce(self, t: Tensor, op: str) -> Handle[Any]:
        made = self._coll.allreduce(t, op)
        if not self.holding(t):
            return made
        told: Handle[None] = Handle(Progress.current(), "held")
        told.polled = False
        self._held.append((made, told))
        return told

    def release(self) -> None:
        held, self._held = self._held, []
        for made, told in held:
            made.add_done_callback(lambda made, told=told: _pass_on(made, told))


def _pass_on(made: Handle[Any], told: Handle[None]) -> None:
    error = made.outcome_error()
    if error is None:
        told.resolve(None)
    else:
        told.reject(error)


# --- models ------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """The embedding is the output matrix too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.inner(self.embed(_words(x))), self.embed.weight)


class TiedTheOtherWay(nn.Module):
    """The output matrix is the embedding too, and is read before the module that owns it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(F.embedding(_words(x), self.head.weight)))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """`out_proj` is read, and never called."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        seen = x.view(-1, 1, 4).expand(-1, 3, 4) * torch.arange(1.0, 4.0, dtype=x.dtype)[:, None]
        return self.out(self.attention(seen, seen, seen, need_weights=False)[0])  # type: ignore[no-any-return]


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.view(-1, 2, 2).repeat(1, 1, 2))  # type: ignore[no-any-return]


class Twice(nn.Module):
    """One module is called twice, one parameter belongs to the root, one list has no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.rand(4))
        self.list = nn.ParameterList([torch.rand(4, 4), torch.rand(4)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(torch.tanh(self.first(x)))
        return torch.tanh(x @ self.list[0] + self.list[1]) * self.scale


class Branches(nn.Module):
    """What is used depends on the data: something different on each rank and in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.branches = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.never = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        chosen = int(x[0, 0].item() * 1000) % 3
        return self.branches[chosen](torch.tanh(self.first(x)))  # type: ignore[no-any-return]


class Pruned(nn.Module):
    """Hooks of the modules themselves read the parameters before their forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
        for i in (0, 2):
            prune.custom_from_mask(self.layers[i], "weight", torch.rand_like(self.layers[i].weight) > 0.3)
        nn.utils.parametrizations.weight_norm(self.layers[2], "bias", dim=None)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


def _words(x: Tensor) -> Tensor:
    return (x * 1000).long().abs() % 6


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3))


def frozen() -> nn.Module:
    made = mlp()
    made[2].requires_grad_(False)  # type: ignore[index]
    return made


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3), nn.LayerNorm(3))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "tied": Tied,
    "tied_the_other_way": TiedTheOtherWay,
    "attention": Attention,
    "transformer": Transformer,
    "twice": Twice,
    "branches": Branches,
    "frozen": frozen,
    "normed": normed,
    "pruned": Pruned,
}


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def adam(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.02)


def decayed(module: nn.Module) -> Make:
    """Return what makes an AdamW with groups by the identity of the parameters."""
    biases = {p for p in module.parameters() if p.dim() < 2}

    def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        groups: list[dict[str, Any]] = [
            {"params": [p for p in params if p not in biases], "weight_decay": 0.1},
            {"params": [p for p in params if p in biases], "weight_decay": 0.0, "lr": 0.003},
        ]
        return torch.optim.AdamW(groups, lr=0.02)

    return make


def build(kind: str = "mlp") -> nn.Module:
    torch.manual_seed(7)
    return MODELS[kind]().double()


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(module: Callable[[Tensor], Tensor], rank: int, step: int) -> Tensor:
    out = module(batch(rank, step))
    return (out * torch.arange(1.0, out.shape[-1] + 1, dtype=out.dtype)).tanh().square().mean()


def reference(
    module: nn.Module,
    opt: torch.optim.Optimizer,
    size: int,
    steps: Iterator[int] | range = range(STEPS),
    between: Callable[[int], object] = lambda step: None,
    clip: float | None = None,
) -> nn.Module:
    """Train in this process with the data of all ranks: what must come out."""
    for step in steps:
        opt.zero_grad()
        for rank in range(size):
            (loss_of(module, rank, step) / size).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        opt.step()
        between(step)
    return module


def check(module: nn.Module, expected: nn.Module) -> None:
    torch.testing.assert_close(dict(module.named_parameters()), dict(expected.named_parameters()), rtol=1e-6, atol=1e-9)


async def train(
    net: DataParallel,
    opt: PipelinedOptimizer,
    coll: Communicator,
    steps: Iterator[int] | range = range(STEPS),
    held: Held | None = None,
    between: Callable[[int], object] = lambda step: None,
) -> None:
    """Make steps; with `held` the reductions of each come only when the next forward runs, or waits."""
    for step in steps:
        work = asyncio.ensure_future(net.step(lambda step=step: loss_of(net, coll.rank, step), opt))
        if held is not None:
            await until(work.done, held.release)
        await work
        between(step)
    flushed = asyncio.ensure_future(opt.flush())
    if held is not None:
        await until(flushed.done, held.release)
    await flushed


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def until(true: Callable[[], object], meanwhile: Callable[[], object] = lambda: None) -> None:
    """Let the loop run until it is true; in real time, since the compute threads live in that."""
    end = monotonic() + 15
    while not true():
        assert monotonic() < end, "it never came true"
        await turns(5)
        await asyncio.to_thread(lambda: None)  # lets the others have the interpreter
        meanwhile()


# --- equal to the plain loop ---------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
@pytest.mark.parametrize("kind", MODELS)
async def test_n7_equals_the_plain_loop(coll: Communicator, kind: str, bucket_bytes: int) -> None:
    net = await DataParallel.create(build(kind), coll, bucket_bytes=bucket_bytes, first_bucket_bytes=bucket_bytes)
    opt = PipelinedOptimizer(net, sgd)
    await train(net, opt, coll, held=Held(net))
    expected = build(kind)
    check(net.module, reference(expected, sgd(list(expected.parameters())), coll.size))
    await assert_synchronized(list(net.parameters()), coll)


@pytest.mark.ranks(1, 3, 4)
@pytest.mark.ranks(2, backend=("mpi", "gloo"))
@pytest.mark.parametrize("how", ["sgd", "adam", "adamw"])
async def test_n7_equals_the_plain_loop_with_each_optimizer(coll: Communicator, how: str) -> None:
    def maker(module: nn.Module) -> Make:
        return {"sgd": sgd, "adam": adam, "adamw": decayed(module)}[how]

    net = await DataParallel.create(build("transformer"), coll, bucket_bytes=300, first_bucket_bytes=1)
    opt = PipelinedOptimizer(net, maker(net.module))
    assert len(opt.optimizers) > 2
    await train(net, opt, coll)
    expected = build("transformer")
    check(net.module, reference(expected, maker(expected)(list(expected.parameters())), coll.size))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("op", ["mean", "sum"])
async def test_n7_an_optimizer_made_later_and_the_sum(coll: Communicator, op: str) -> None:
    """Some steps of the plain kind before: buckets were dealt anew by then."""
    net = await DataParallel.create(build(), coll, op=op, bucket_bytes=100, first_bucket_bytes=1)
    plain = torch.optim.SGD(net.parameters(), lr=0.05)
    for step in range(2):
        await net.step(lambda step=step: loss_of(net, coll.rank, step), plain)
    opt = PipelinedOptimizer(net, lambda params: torch.optim.SGD(params, lr=0.05))
    await train(net, opt, coll, range(2, 5), Held(net))
    expected = build()
    lr = 0.05 * (coll.size if op == "sum" else 1)
    check(net.module, reference(expected, torch.optim.SGD(expected.parameters(), lr=lr), coll.size, range(5)))


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
@pytest.mark.parametrize("late", [True, False])
async def test_n7_an_update_is_made_with_the_settings_of_its_step(coll: Communicator, late: bool) -> None:
    def turn_down(groups: list[dict[str, Any]], step: int) -> None:
        for group in groups:
            group["lr"] = 0.05 / (step + 2)
            group["momentum"] = 0.9 if step % 2 else 0.5

    net = await DataParallel.create(build(), coll, bucket_bytes=1, first_bucket_bytes=1)
    opt = PipelinedOptimizer(net, sgd)
    held = Held(net) if late else None
    await train(net, opt, coll, held=held, between=lambda step: turn_down(opt.param_groups, step))
    expected = build()
    plain = sgd(list(expected.parameters()))
    check(net.module, reference(expected, plain, coll.size, between=lambda s: turn_down(plain.param_groups, s)))
    assert {group["lr"] for group in opt.param_groups} == {0.05 / (STEPS + 1)}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("late", [True, False])
async def test_n7_a_scheduler_of_torch_for_each_optimizer(coll: Communicator, late: bool) -> None:
    """Nor does torch warn that the optimizer has not stepped yet."""
    net = await DataParallel.create(build(), coll, bucket_bytes=1, first_bucket_bytes=1)
    opt = PipelinedOptimizer(net, sgd)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in opt.optimizers]
    held = Held(net) if late else None
    await train(net, opt, coll, held=held, between=lambda step: [one.step() for one in schedules])
    expected = build()
    plain = sgd(list(expected.parameters()))
    schedule = torch.optim.lr_scheduler.ExponentialLR(plain, 0.5)
    check(net.module, reference(expected, plain, coll.size, between=lambda step: schedule.step()))


class Slow(torch.optim.SGD):
    """Its step begins and then waits."""

    def __init__(self, params: list[nn.Parameter], began: threading.Event, go_on: threading.Event) -> None:
        super().__init__(params, lr=0.05)
        self.began, self.go_on = began, go_on

    def step(self, closure: Any = None) -> Any:
        self.began.set()
        assert self.go_on.wait(20)
        return super().step(closure)


@pytest.mark.ranks(1)
async def test_n7_settings_changed_just_while_an_update_is_made(coll: Communicator) -> None:
    """The compute thread makes it, beside the loop: the new ones are for the next step, and none is lost."""
    began, go_on = threading.Event(), threading.Event()
    net = await DataParallel.create(build(), coll)
    opt = PipelinedOptimizer(net, lambda params: Slow(params, began, go_on))
    await net.step(lambda: loss_of(net, 0, 0), opt)
    opt.param_groups[0]["lr"] = 7.0
    await until(began.is_set)
    opt.param_groups[0]["lr"] = 0.5
    go_on.set()
    await opt.flush()
    assert opt.param_groups[0]["lr"] == 0.5
    expected = build()
    check(net.module, reference(expected, torch.optim.SGD(expected.parameters(), lr=0.05), 1, range(1)))


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("kind", ["mlp", "branches"])
async def test_n7_clipping_by_the_global_norm(coll: Communicator, kind: str) -> None:
    net = await DataParallel.create(build(kind), coll, bucket_bytes=1, first_bucket_bytes=1)
    opt = PipelinedOptimizer(net, sgd, clip_norm=0.01)
    await train(net, opt, coll, held=Held(net))
    expected = build(kind)
    check(net.module, reference(expected, sgd(list(expected.parameters())), coll.size, clip=0.01))
    with pytest.raises(ValueError, match="clip_norm=0"):
        PipelinedOptimizer(net, sgd, clip_norm=0)


# --- overlap ----------------------------------------------------------------------------------------------------------


def recorded(module: nn.Module) -> list[int]:
    """Return a list to which each linear layer's forward adds its place."""
    ran: list[int] = []
    layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    for i, layer in enumerate(layers):
        layer.register_forward_hook(lambda *_, i=i: ran.append(i))
    return ran


def chain() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(4)], nn.Linear(4, 3, bias=False)).double()


@pytest.mark.ranks(1, 2)
async def test_n7_forward_begins_while_the_last_bucket_is_on_its_way(coll: Communicator) -> None:
    """And so it does in each step, though the bucket of the step before came in the middle of it."""
    net = await DataParallel.create(chain(), coll, bucket_bytes=1, first_bucket_bytes=1)
    ran = recorded(net.module)
    opt = PipelinedOptimizer(net, sgd)
    await net.step(lambda: loss_of(net, coll.rank, 0), opt)
    await opt.flush()
    held = Held(net, lambda t: t.numel() == 12)
    await net.step(lambda: loss_of(net, coll.rank, 1), opt)
    for step in range(2, 5):
        await until(lambda: len(held) == 1)
        ran.clear()
        work = asyncio.ensure_future(net.step(lambda step=step: loss_of(net, coll.rank, step), opt))
        await until(lambda: ran == [0, 1, 2, 3])
        assert len(held) == 1
        assert not work.done()
        held.release()
        await work
        assert ran == [0, 1, 2, 3, 4]
    held.holding = lambda t: False
    held.release()
    await opt.flush()
    expected = chain()
    check(net.module, reference(expected, sgd(list(expected.parameters())), coll.size, range(5)))


class Wait(torch.autograd.Function):
    """The identity, whose backward calls something."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], object]) -> Tensor:
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.call()
        return grads[0], None


def test_n7_one_order_on_all_ranks_though_backward_ends_at_other_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 has sent nothing when backward of rank 0 is over, and then more than that: one order all the same."""
    monkeypatch.setattr("aiodist.nn.reduction.WINDOW_BYTES", 1)  # two buckets at a time
    others: list[DataParallel] = []
    done = threading.Event()
    orders: dict[int, list[list[int]]] = {}

    async def main() -> None:
        async with aiodist.init() as coll:
            net = await DataParallel.create(chain(), coll, bucket_bytes=1, first_bucket_bytes=1)
            if coll.rank == 0:
                others.append(net)
            opt = PipelinedOptimizer(net, sgd)
            await net.step(lambda: loss_of(net, coll.rank, 0), opt)
            await opt.flush()
            await coll.barrier()
            for step in range(1, 4):
                slow = coll.rank == (1 if step < 3 else 9)
                before = others[0].reducer.last if slow else None

                def wait(before: Any = before) -> None:
                    while others[0].reducer.last is before or others[0].reducer.last.closed is None:  # type: ignore[union-attr]
                        assert not done.wait(0.001)

                def forward(step: int = step, slow: bool = slow, wait: Callable[[], None] = wait) -> Tensor:
                    x = batch(coll.rank, step)
                    layers = list(net.module.children())
                    for i, layer in enumerate(layers):
                        x = layer(x)
                        if slow and i == (4 if step == 1 else 2):
                            x = Wait.apply(x, wait)  # type: ignore[no-untyped-call]
                    return (x * torch.arange(1.0, 4.0, dtype=x.dtype)).tanh().square().mean()

                await net.step(forward, opt)
                last = net.reducer.last
                await opt.flush()
                assert last is not None
                orders.setdefault(step, []).append(last._order)
                await coll.barrier()
            expected = chain()
            check(net.module, reference(expected, sgd(list(expected.parameters())), coll.size))

    aiodist.testing.run_ranks(3, main)
    for order in orders.values():
        assert order[0] == order[1] == order[2]


@pytest.mark.ranks(2)
async def test_n7_only_the_compute_thread_steps(coll: Communicator) -> None:
    threads: set[str] = set()

    class Spy(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            threads.add(threading.current_thread().name)
            return super().step(closure)

    net = await DataParallel.create(build(), coll, bucket_bytes=1, first_bucket_bytes=1)
    opt = PipelinedOptimizer(net, lambda params: Spy(params, lr=0.1))
    held = Held(net)
    await train(net, opt, coll, held=held)
    held.holding = lambda t: False
    await train(net, opt, coll)
    assert threads == {await net.run(lambda: threading.current_thread().name)}


# --- while updates are pending ---------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
async def test_n7_the_module_is_called_while_updates_are_pending(coll: Communicator) -> None:
    net = await DataParallel.create(build(), coll, bucket_bytes=1, first_bucket_bytes=1)
    opt = PipelinedOptimizer(net, sgd)
    held = Held(net)
    x = batch(9, 9)
    expected = reference(build(), sgd(list(build().parameters())), coll.size, range(0))
    plain = sgd(list(expected.parameters()))
    for step in range(3):
        work = asyncio.ensure_future(net.step(lambda step=step: loss_of(net, coll.rank, step), opt))
        await work
        with pytest.raises(RuntimeError, match=r"net\.run\(net, x\)"):
            net(x)
        with pytest.raises(RuntimeError, match=r"opt\.flush\(\)"):
            net.module[2](torch.zeros(1, 8).double())  # type: ignore[index]
        reference(expected, plain, coll.size, range(step, step + 1))
        with torch.no_grad():
            seen = net.run(net, x)
            await until(seen.done, held.release)
            out = await seen
        assert not out.requires_grad
        torch.testing.assert_close(out, expected(x).detach(), rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(net(x), expected(x), rtol=1e-6, atol=1e-9)


@pytest.mark.ranks(2)
async def test_n7_flush_any_time(coll: Communicator) -> None:
    net = await DataParallel.create(build(), coll, bucket_bytes=1, first_bucket_bytes=1)
    opt = PipelinedOptimizer(net, sgd)
    await opt.flush()
    await train(net, opt, coll, range(1))
    await opt.flush()
    await opt.flush()
    await train(net, opt, coll, range(1, 3))
    expected = build()
    check(net.module, reference(expected, sgd(list(expected.parameters())), coll.size, range(3)))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", ["given", "left to the world"])
async def test_n7_closing_with_updates_pending_makes_them(coll: Communicator, how: str) -> None:
    net = await DataParallel.create(build(), coll, bucket_bytes=1, first_bucket_bytes=1)
    opt = PipelinedOptimizer(net, sgd)
    for step in range(STEPS):
        await net.step(lambda step=step: loss_of(net, coll.rank, step), opt)
    if how == "given":
        await net.aclose()
    else:
        await net._coll.aclose()
    expected = build()
    check(net.module, reference(expected, sgd(list(expected.parameters())), coll.size))
    net.module(batch(0, 0))
    with pytest.raises(RuntimeError, match="closed"):
        await opt.flush()


@pytest.mark.ranks(2)
async def test_n7_a_step_that_is_cancelled_ends_all_the_same(coll: Communicator) -> None:
    net = await DataParallel.create(build(), coll, bucket_bytes=1, first_bucket_bytes=1)
    opt = PipelinedOptimizer(net, sgd)
    for step in range(STEPS):
        work = asyncio.ensure_future(net.step(lambda step=step: loss_of(net, coll.rank, step), opt))
        await turns(1 + 20 * coll.rank * (step % 2))
        if step != 2:
            work.cancel()
        with suppress(asyncio.CancelledError):
            await work
    await opt.flush()
    expected = build()
    check(net.module, reference(expected, sgd(list(expected.parameters())), coll.size))


# --- what goes wrong ---------------------------------------------------------------------------------------------


class Wanders(nn.Module):
    """After the first step the last layer's weight is read by the root, before its module runs or instead of that."""

    def __init__(self, instead: bool) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.instead = instead
        self.wander = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x))
        return F.linear(x, self.last.weight) if self.wander else self.last(x)  # type: ignore[no-any-return]


@pytest.mark.ranks(2)
async def test_n7_a_parameter_that_is_used_elsewhere_later(coll: Communicator) -> None:
    """One step fails on all ranks, none is made with an old weight, and the next are right."""
    torch.manual_seed(7)
    net = await DataParallel.create(Wanders(True).double(), coll, bucket_bytes=1, first_bucket_bytes=1)
    opt = PipelinedOptimizer(net, sgd)
    held = Held(net)
    await train(net, opt, coll, range(2), held)
    await net.step(lambda: loss_of(net, coll.rank, 2), opt)
    net.module.wander = True  # type: ignore[assignment]
    held.holding = lambda t: False
    mine = asyncio.ensure_future(net.step(lambda: loss_of(net, coll.rank, 3), opt))
    weight = {net.module.first.weight, net.module.second.weight}  # type: ignore[union-attr]
    places = [i for i, part in enumerate(opt._parts) if part.bucket.slots[0].parameter in weight]
    await until(lambda: mine.done() or not any(opt._parts[i] in opt._left for i in places), held.release)
    with suppress(aiodist.RemoteError, RuntimeError):
        await mine
    with suppress(aiodist.RemoteError):
        await opt.flush()
    await assert_synchronized(net.module, coll)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
@pytest.mark.parametrize("where", ["before", "forward", "after", "backward"])
async def test_n7_an_error_on_one_rank(coll: Communicator, where: str, bucket_bytes: int) -> None:
    """That rank raises it, the others a RemoteError once, nobody makes that step, all go on together."""

    def fail() -> None:
        raise ArithmeticError("no more")

    def forward(step: int) -> Tensor:
        wrong = coll.rank == 1 and step == 2
        if wrong and where == "before":
            fail()
        x = batch(coll.rank, step)
        for i, layer in enumerate(net.module.children()):
            x = layer(x)
            if wrong and i == 2:
                if where == "forward":
                    fail()
                if where == "backward":
                    x = Wait.apply(x, fail)  # type: ignore[no-untyped-call]
        if wrong and where == "after":
            fail()
        return (x * torch.arange(1.0, x.shape[-1] + 1, dtype=x.dtype)).tanh().square().mean()

    net = await DataParallel.create(build(), coll, bucket_bytes=bucket_bytes, first_bucket_bytes=bucket_bytes)
    opt = PipelinedOptimizer(net, sgd)
    held = Held(net)
    raised: list[BaseException] = []
    for step in range(STEPS):
        work = asyncio.ensure_future(net.step(lambda step=step: forward(step), opt))
        await until(work.done, held.release)
        try:
            await work
        except (ArithmeticError, aiodist.RemoteError) as error:
            raised.append(error)
    held.holding = lambda t: False
    held.release()
    await opt.flush()
    [error] = raised
    if coll.rank == 1:
        assert isinstance(error, ArithmeticError)
    else:
        assert isinstance(error, aiodist.RemoteError)
        assert error.raised_by == 1
        assert "no more" in str(error)
    await assert_synchronized(list(net.parameters()), coll)
    expected = build()
    check(net.module, reference(expected, sgd(list(expected.parameters())), coll.size, iter([0, 1, 3])))


@pytest.mark.ranks(2)
async def test_n7_an_error_in_the_last_step_is_told_by_flush(coll: Communicator) -> None:
    def forward() -> Tensor:
        if coll.rank == 0:
            raise ArithmeticError("no more")
        return loss_of(net, coll.rank, 1)

    net = await DataParallel.create(build(), coll)
    opt = PipelinedOptimizer(net, sgd)
    await net.step(lambda: loss_of(net, coll.rank, 0), opt)
    if coll.rank == 0:
        with pytest.raises(ArithmeticError):
            await net.step(forward, opt)
    else:
        await net.step(forward, opt)
        with pytest.raises(aiodist.RemoteError, match="no more"):
            await opt.flush()
    await opt.flush()
    expected = build()
    check(net.module, reference(expected, sgd(list(expected.parameters())), coll.size, range(1)))


@pytest.mark.ranks(2)
async def test_n7_an_optimizer_that_raises_is_heard(coll: Communicator) -> None:
    """Also where the update was made while nobody waited."""

    class Fragile(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            made.append(1)
            raise FloatingPointError("that is not a number")

    made: list[int] = []
    net = await DataParallel.create(build(), coll)
    opt = PipelinedOptimizer(net, lambda params: Fragile(params, lr=0.1))
    await net.step(lambda: loss_of(net, coll.rank, 0), opt)
    await until(lambda: made)
    with pytest.raises(FloatingPointError, match="not a number"):
        await opt.flush()
    await opt.flush()


@pytest.mark.ranks(2)
async def test_n7_gradients_from_before_do_not_count(coll: Communicator) -> None:
    """As in any step: it begins by forgetting them."""
    net = await DataParallel.create(build(), coll, bucket_bytes=100, first_bucket_bytes=1)
    opt = PipelinedOptimizer(net, sgd)
    for step in range(3):
        await opt.flush()
        with net.no_sync():
            await net.backward(await net.run(loss_of, net, coll.rank, 50 + step))
        await train(net, opt, coll, range(step, step + 1))
    expected = build()
    check(net.module, reference(expected, sgd(list(expected.parameters())), coll.size, range(3)))


# --- copies and states -----------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
async def test_n7_copies_of_the_module_are_free(coll: Communicator) -> None:
    net = await DataParallel.create(build(), coll)
    opt = PipelinedOptimizer(net, sgd)
    held = Held(net)
    await net.step(lambda: loss_of(net, coll.rank, 0), opt)
    x = batch(3, 3)
    expected = build()(x)
    for made in (copy.deepcopy(net.module), pickle.loads(pickle.dumps(net.module))):
        torch.testing.assert_close(made(x), expected)  # the weights of then, and no guard
        made(x).sum().backward()
    with pytest.raises(RuntimeError, match="on their way"):
        net(x)
    held.holding = lambda t: False
    held.release()
    await opt.flush()
    opt.close()
    assert not any(module._forward_pre_hooks for module in net.module.modules())


@pytest.mark.ranks(2)
async def test_n7_going_on_from_a_state(coll: Communicator) -> None:
    net = await DataParallel.create(build(), coll, bucket_bytes=100, first_bucket_bytes=1)
    opt = PipelinedOptimizer(net, adam)
    await train(net, opt, coll, range(2))
    weights, state = copy.deepcopy(net.state_dict()), pickle.loads(pickle.dumps(opt.state_dict()))
    await train(net, opt, coll, range(2, 4))
    opt.close()
    await net.aclose()

    other = await DataParallel.create(build(), coll, bucket_bytes=100, first_bucket_bytes=1)
    again = PipelinedOptimizer(other, adam)
    with pytest.raises(ValueError, match="expected"):
        again.load_state_dict(state[:-1])
    other.load_state_dict(weights)
    again.load_state_dict(state)
    await train(other, again, coll, range(2, 4))
    check(other.module, net.module)
