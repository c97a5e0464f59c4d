"""N20: what goes wrong in a sharded step, and how it ends."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import aiodist
from aiodist import Communicator
from aiodist.codecs import BFloat16
from aiodist.handles import Operation
from aiodist.nn import DataParallel, PipelinedOptimizer, ShardedOptimizer, assert_synchronized
from aiodist.testing.seams.progress import reducer_of
from tests.nn.conftest import Trial
from tests.support.in_backward import in_backward


def fail() -> None:
    raise ArithmeticError("no more")


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("sizes", [Trial.SMALL, {}], ids=["each", "one"])
@pytest.mark.parametrize("where", ["forward", "backward"])
async def test_n20_an_error_on_one_rank(coll: Communicator, where: str, sizes: Any) -> None:
    """The rank raises its error, the others a RemoteError; no rank makes the step, and all continue together."""

    def loss(step: int) -> Tensor:
        if coll.rank != 1 or step != 2:
            return Trial.loss(net, coll.rank, step)
        if where == "forward":
            fail()
        x, y = Trial.batch(coll.rank, step)
        first, *others = net.children()
        return mse_loss(nn.Sequential(*others)(in_backward(first(x), fail)), y)

    net = await DataParallel.create(Trial.Mlp(), coll, **sizes)
    opt = await ShardedOptimizer.create(net, Trial.OPTIMIZERS["adam"])
    expected = Trial.Mlp()
    plain = Trial.OPTIMIZERS["adam"](expected.parameters())
    for step in range(5):
        if step == 2:
            with pytest.raises(ArithmeticError if coll.rank == 1 else aiodist.RemoteError, match="no more"):
                await net.step(loss, opt, step)
            continue
        await net.step(loss, opt, step)
        Trial.step_alone(expected, plain, coll.size, step)
    await opt.flush()
    Trial.assert_same(net, expected)


class Failing(torch.optim.SGD):
    """An optimizer that raises if `fails` is set."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise ArithmeticError("no luck")
        return super().step(closure)


@pytest.mark.ranks(2, 3)
async def test_n20_an_optimizer_that_raises_on_one_rank(coll: Communicator) -> None:
    """The ranks still have equal parameters, with one shard a step late: every later step raises."""
    net = await DataParallel.create(Trial.Mlp(), coll)
    opt = await ShardedOptimizer.create(net, lambda groups: Failing(groups, lr=0.1))
    await net.step(Trial.loss, opt, net, coll.rank, 0)
    await opt.flush()
    saved = {name: value.clone() for name, value in net.state_dict().items()}
    opt.optimizer.fails = coll.rank == 1  # type: ignore[attr-defined]
    if coll.rank == 1:
        with pytest.raises(ArithmeticError, match="no luck"):
            await net.step(Trial.loss, opt, net, coll.rank, 1)
    else:
        await net.step(Trial.loss, opt, net, coll.rank, 1)
    opt.optimizer.fails = False  # type: ignore[attr-defined]
    for step in (2, 3):
        with pytest.raises(aiodist.MismatchError, match="no luck"):
            await net.step(Trial.loss, opt, net, coll.rank, step)
    await opt.flush()
    await assert_synchronized(list(net.parameters()), coll)
    net.load_state_dict(saved)
    await net.step(Trial.loss, opt, net, coll.rank, 1)
    await opt.flush()
    Trial.assert_same(net, Trial.alone(coll.size, 2))


@pytest.mark.ranks(2)
async def test_n20_cancelling_the_await_stops_nothing(coll: Communicator) -> None:
    net = await DataParallel.create(Trial.Mlp(), coll, **Trial.SMALL)
    opt = await ShardedOptimizer.create(net, Trial.OPTIMIZERS["momentum"])
    for step in range(4):
        work = asyncio.ensure_future(net.step(Trial.loss, opt, net, coll.rank, step))
        await asyncio.sleep(0)
        if step == 1 and coll.rank == 0:
            work.cancel()
        with suppress(asyncio.CancelledError):
            await work
    await opt.flush()
    Trial.assert_same(net, Trial.alone(2, 4, optimizer="momentum"))


@pytest.mark.ranks(2)
async def test_n20_closing_the_net_while_parameters_are_gathered(coll: Communicator) -> None:
    net = await DataParallel.create(Trial.Mlp(), coll, **Trial.SMALL)
    opt = await ShardedOptimizer.create(net, Trial.OPTIMIZERS["momentum"])
    await Trial.train(net, opt, range(2), coll.rank)
    await net.aclose()
    assert not opt.pending
    Trial.assert_same(net, Trial.alone(2, 2, optimizer="momentum"))
    with pytest.raises(RuntimeError, match="is closed"):
        await opt.flush()


@pytest.mark.ranks(2)
async def test_n20_a_rank_that_gives_up_in_the_middle(coll: Communicator) -> None:
    """One rank aborts: the others raise CommunicatorAborted instead of waiting, and no rank hangs."""
    net = await DataParallel.create(Trial.Mlp(), coll, **Trial.SMALL)
    opt = await ShardedOptimizer.create(net, Trial.OPTIMIZERS["momentum"])
    await net.step(Trial.loss, opt, net, coll.rank, 0)
    await opt.flush()
    if coll.rank == 1:
        reducer_of(net).data.abort("enough")

    async def go_on() -> None:
        while True:
            await net.step(Trial.loss, opt, net, coll.rank, 1)

    with pytest.raises(aiodist.CommunicatorAborted, match="enough"):
        await go_on()


class Gate(nn.Module):
    """The identity; sets an event when it runs, and waits."""

    def __init__(self) -> None:
        super().__init__()
        self.ran, self.may_pass = threading.Event(), threading.Event()
        self.may_pass.set()

    def forward(self, x: Tensor) -> Tensor:
        self.ran.set()
        assert self.may_pass.wait(20)
        return x


@pytest.mark.ranks(2)
async def test_n20_forward_waits_in_each_layer_for_its_own_parameters(coll: Communicator) -> None:
    """The last layer's parameters come late: all layers before it run in the meantime, and it gets the new ones."""

    def make(gate: Gate) -> nn.Module:
        *before, last = Trial.Mlp()
        return nn.Sequential(*before, gate, last)

    gate = Gate()
    net = await DataParallel.create(make(gate), coll, **Trial.SMALL)
    opt = await ShardedOptimizer.create(net, Trial.OPTIMIZERS["momentum"])
    await net.step(Trial.loss, opt, net, coll.rank, 0)
    await opt.flush()
    usual, held = reducer_of(net).data.allgather, asyncio.Event()

    def gather(own: Tensor, out: Tensor) -> Any:
        if out.numel() not in (22, 4):  # those of the last layer, in two shards
            return usual(own, out=out)
        late: Operation[Any] = Operation(reducer_of(net).loop.progress, "late")

        async def go_on() -> None:
            await held.wait()
            await usual(own, out=out)
            late.resolve(None)

        tasks.append(asyncio.ensure_future(go_on()))
        return late.handle

    tasks: list[Any] = []
    vars(reducer_of(net).data)["allgather"] = gather
    await net.step(Trial.loss, opt, net, coll.rank, 1)
    assert opt.pending
    with pytest.raises(RuntimeError, match=r"await opt\.flush\(\)"):
        net.state_dict()
    with pytest.raises(RuntimeError, match=r"on the compute thread"):
        net(Trial.batch(0, 0)[0])
    gate.ran.clear()
    work = asyncio.ensure_future(net.step(Trial.loss, opt, net, coll.rank, 2))
    assert await asyncio.to_thread(gate.ran.wait, 20)
    assert not work.done()
    held.set()
    await work
    await opt.flush()
    assert len(tasks) == 4  # two parameters, two steps
    Trial.assert_same(net, Trial.alone(2, 3, make=lambda: make(Gate()), optimizer="momentum"))


@pytest.mark.ranks(2)
async def test_n20_gradients_of_whole_parameters_go_while_backward_runs(coll: Communicator) -> None:
    """Two gradients are reduced before the first layer has its own: the older one is freed, the newest is kept."""
    storages: list[Any] = []
    gone: list[list[bool]] = []
    loop = asyncio.get_running_loop()

    def keep(parameter: Tensor) -> None:  # before the net's own hook, which takes the gradient
        assert parameter.grad is not None
        storages.append(torch.multiprocessing.reductions.StorageWeakRef(parameter.grad.untyped_storage()))

    def wait() -> None:
        for _ in range(10_000):
            if any(storage.expired() for storage in storages):
                break
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(20)
        gone.append([storage.expired() for storage in storages])

    def loss() -> Tensor:
        return mse_loss(last(middle(in_backward(first(x), wait))), y)

    torch.manual_seed(1)
    first, middle, last = (nn.Linear(a, b, bias=False).double() for a, b in ((6, 8), (8, 8), (8, 3)))
    for layer in (middle, last):
        layer.weight.register_post_accumulate_grad_hook(keep)
    net = await DataParallel.create(nn.Sequential(first, middle, last), coll, **Trial.SMALL)
    opt = await ShardedOptimizer.create(net, Trial.OPTIMIZERS["sgd"])
    x, y = Trial.batch(coll.rank, 0)
    await net.step(lambda: mse_loss(net(x), y), opt)  # learns in which order gradients come
    await net.step(lambda: mse_loss(net(x), y), opt)
    storages.clear()
    await net.step(loss, opt)
    await opt.flush()
    assert [sorted(one) for one in gone] == [[False, True]]


@pytest.mark.ranks(2)
async def test_n20_what_it_does_not_take(coll: Communicator) -> None:
    net = await DataParallel.create(Trial.Mlp(), coll)
    sgd = Trial.OPTIMIZERS["sgd"]
    with pytest.raises(TypeError, match="net is a Mlp"):
        await ShardedOptimizer.create(Trial.Mlp(), sgd)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected a function that makes one"):
        await ShardedOptimizer.create(net, sgd(net.parameters()))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"float64\[2\].*expected parameters of the net"):
        await ShardedOptimizer.create(net, sgd, [torch.zeros(2, dtype=torch.float64)])
    with pytest.raises(ValueError, match="twice"):
        await ShardedOptimizer.create(net, sgd, [*net.parameters(), next(iter(net.parameters()))])
    with pytest.raises(ValueError, match=r"expected the .* that it was given"):
        await ShardedOptimizer.create(net, lambda groups: torch.optim.SGD(net.parameters()))
    with pytest.raises(TypeError, match="Adafactor looks at whole tensors"):
        await ShardedOptimizer.create(net, torch.optim.Adafactor)
    with pytest.raises(TypeError, match="LBFGS"):
        await ShardedOptimizer.create(net, lambda groups: torch.optim.LBFGS(groups[0]["params"]))
    with pytest.raises(TypeError, match="make_optimizer returned int"):
        await ShardedOptimizer.create(net, lambda groups: 3)  # type: ignore[arg-type, return-value]
    plain = sgd(net.parameters())
    await net.step(Trial.loss, plain, net, coll.rank, 0)
    opt = await ShardedOptimizer.create(net, sgd)
    for make in (ShardedOptimizer, PipelinedOptimizer):
        with pytest.raises(RuntimeError, match=r"<ShardedOptimizer of SGD on .*close\(\) that first"):
            await make.create(net, sgd)
    with pytest.raises(RuntimeError, match=r"net\.step\(forward, sharded\)"):
        await net.step(Trial.loss, plain, net, coll.rank, 1)
    with pytest.raises(RuntimeError, match=r"net\.step\(forward, sharded\)"):
        await net.backward(Trial.loss(net, coll.rank, 1))
    with pytest.raises(RuntimeError, match=r"net\.step\(forward, sharded\)"):
        await anext(net.backward_iter(Trial.loss(net, coll.rank, 1)))
    with net.no_sync(), pytest.raises(RuntimeError, match="no_sync"):
        await net.step(Trial.loss, opt, net, coll.rank, 1)
    await net.step(Trial.loss, opt, net, coll.rank, 1)
    await opt.flush()
    opt.close()
    await net.step(Trial.loss, plain, net, coll.rank, 2)
    Trial.assert_same(net, Trial.alone(2, 3))
    Trial.assert_same_gradients(net, Trial.alone(2, 3))


@pytest.mark.ranks(2)
async def test_n20_nets_that_it_does_not_take(coll: Communicator) -> None:
    sgd = Trial.OPTIMIZERS["sgd"]
    compressed = await DataParallel.create(Trial.Mlp(), coll, compress=BFloat16())
    with pytest.raises(ValueError, match="compresses its gradients"):
        await ShardedOptimizer.create(compressed, sgd)
    sparse = await DataParallel.create(nn.Embedding(5, 3, sparse=True), coll)
    with pytest.raises(TypeError, match=r"'weight' has sparse gradients"):
        await ShardedOptimizer.create(sparse, sgd)
    half = await DataParallel.create(nn.Linear(6, 3).half(), coll, scaler=torch.amp.GradScaler("cpu"))
    opt = await ShardedOptimizer.create(half, sgd)
    with pytest.raises(ValueError, match="no gradients of float16"):
        await half.step(lambda: half(torch.ones(2, 6).half()).sum(), opt)
