"""N5: the module stays the caller's own: its names, copies of it, wrapping it again, and modules that fail."""

from __future__ import annotations

import copy
import io
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import aiodist
from aiodist import Communicator
from aiodist.nn import DataParallel, LocalSGD, PipelinedOptimizer, ShardedOptimizer, assert_synchronized
from tests.nn.conftest import Trial
from tests.support.awaited import awaited


async def trained(coll: Communicator, steps: int = 2) -> Any:
    net, opt = await Trial.made(coll)
    for step in range(steps):
        await net.step(partial(Trial.loss, net, coll.rank, step), opt)
    return net


@pytest.mark.ranks(2)
async def test_n5_it_gives_the_callers_own_objects(coll: Communicator) -> None:
    module = Trial.Mlp(coll.rank)
    module[2].register_buffer("seen", torch.tensor(coll.rank))
    parameters = list(module.parameters())
    net = await DataParallel.create(module, coll)
    assert net.module is module
    assert all(a is b for a, b in zip(net.parameters(), parameters, strict=True))
    assert [name for name, _ in net.named_parameters()] == [name for name, _ in module.named_parameters()]
    x, _ = Trial.batch(0, 0)
    assert torch.equal(net(x), module(x))
    for name, p in Trial.Mlp(0).named_parameters():  # rank 0's
        assert torch.equal(p, module.get_parameter(name))
    assert module[2].seen == 0
    assert "DataParallel of Mlp" in repr(net)


@pytest.mark.ranks(2)
async def test_n5_state_dict_has_no_prefix(coll: Communicator) -> None:
    net = await trained(coll)
    state = net.state_dict()
    plain = Trial.Mlp(7)
    plain.load_state_dict(state)
    Trial.assert_same(net, plain)
    net.load_state_dict(Trial.Mlp().state_dict())
    opt = Trial.OPTIMIZERS["sgd"](net.parameters())
    await net.step(lambda: Trial.loss(net, coll.rank, 0), opt)
    Trial.assert_same(net, Trial.alone(2, 1))
    with pytest.raises(RuntimeError, match="Missing key"):
        net.load_state_dict({})


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", ["deepcopy", "copy of a parameter", "pickle", "torch.save"])
async def test_n5_copies_are_plain_modules(coll: Communicator, how: str) -> None:
    net = await trained(coll)
    if how == "deepcopy":
        twin: Any = copy.deepcopy(net.module)
    elif how == "copy of a parameter":
        twin = Trial.Mlp()
        for layer, theirs in zip(twin, net.module, strict=True):
            for name, p in theirs.named_parameters():
                setattr(layer, name, copy.deepcopy(p))
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(net.module))
    else:
        file = io.BytesIO()
        torch.save(net.module, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    Trial.assert_same(net, twin)
    Trial.loss(twin, coll.rank, 2).backward()  # its gradients are its own, and raise nothing
    alone = Trial.Mlp()
    alone.load_state_dict(net.state_dict())
    Trial.loss(alone, coll.rank, 2).backward()
    Trial.assert_same_gradients(twin, alone)
    if coll.rank == 0:
        twin[0].weight.data.zero_()
    again = await DataParallel.create(twin, coll)
    opt = Trial.OPTIMIZERS["sgd"](again.parameters())
    await again.step(lambda: Trial.loss(again, coll.rank, 0), opt)
    await assert_synchronized(twin, coll)
    assert not torch.equal(twin[0].weight, net.module[0].weight)


@pytest.mark.ranks(2)
async def test_n5_closing_takes_the_hooks_off(coll: Communicator) -> None:
    module = Trial.Mlp()
    for times in range(3):
        net = await DataParallel.create(module, coll)
        opt = Trial.OPTIMIZERS["sgd"](net.parameters())
        for step in range(times):
            await net.step(partial(Trial.loss, net, coll.rank, times + step), opt)
        await net.aclose()
        await net.aclose()
        grads = [None if p.grad is None else p.grad.clone() for p in module.parameters()]
        assert (grads[0] is None) == (times == 0)
        module.zero_grad()
        Trial.loss(module, coll.rank, 0).backward()  # nothing raises any more
        module.zero_grad()
    alone = Trial.Mlp()
    theirs = Trial.OPTIMIZERS["sgd"](alone.parameters())
    for step in (1, 2, 3):
        Trial.step_alone(alone, theirs, 2, step)
    Trial.assert_same(module, alone)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("steps", [0, 2])
async def test_n5_wrapping_twice_is_an_error(coll: Communicator, steps: int) -> None:
    net = await trained(coll, steps)
    for part in (net.module, net.module[0], net.module[2], nn.Sequential(net.module[4], nn.Linear(3, 2))):
        before = [p.detach().clone() for p in part.parameters()]
        with pytest.raises(RuntimeError, match=r"parameter '.*(weight|bias)' belongs to a DataParallel already"):
            await DataParallel.create(part, coll)
        assert all(map(torch.equal, before, part.parameters()))
    opt = Trial.OPTIMIZERS["sgd"](net.parameters())
    await net.step(lambda: Trial.loss(net, coll.rank, steps), opt)
    Trial.assert_same(net, Trial.alone(2, steps + 1))


@pytest.mark.ranks(2)
async def test_n5_what_cannot_be_wrapped(coll: Communicator) -> None:
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        (nn.Tanh(), {}, "no parameter"),
        (Trial.Mlp().requires_grad_(False), {}, "no parameter"),
        (Trial.Mlp(), {"op": "max"}, "op='max'"),
        (Trial.Mlp(), {"bucket_bytes": 0}, "bucket"),
        (Trial.Mlp(), {"first_bucket_bytes": -1}, "first bucket"),
        (nn.Linear(2, 2, device="meta"), {}, "meta device"),
        (nn.LazyLinear(2), {}, "not initialised"),
    ]
    for module, options, text in wrong:
        with pytest.raises(ValueError, match=text):
            await DataParallel.create(module, coll, **options)
    differing: list[tuple[nn.Module, str]] = [
        (nn.Linear(6, 3 + coll.rank), r"rank 0: weight float32\[3, 6\]; rank 1: weight float32\[4, 6\]"),
        (nn.Linear(6, 3, bias=coll.rank == 0), "bias"),
        (nn.Linear(6, 3, dtype=(torch.float32, torch.float64)[coll.rank]), "float32.*float64"),
        (nn.ModuleDict({f"part{coll.rank}": nn.Linear(6, 3)}), "part0.*part1"),
    ]
    for module, text in differing:
        before = [p.detach().clone() for p in module.parameters()]
        with pytest.raises(aiodist.MismatchError, match=text):
            await DataParallel.create(module, coll)
        assert all(map(torch.equal, before, module.parameters()))
    net = await trained(coll)
    Trial.assert_same(net, Trial.alone(2, 2))


@pytest.mark.ranks(2)
async def test_n5_frozen_on_one_rank_only(coll: Communicator) -> None:
    """The ranks would make different buckets: creating the net raises, with the parameter's name."""
    module = Trial.Mlp()
    module[2].weight.requires_grad_(coll.rank == 0)
    with pytest.raises(aiodist.MismatchError, match=r"2\.weight"):
        await DataParallel.create(module, coll)
    assert await coll.allreduce(1) == 2


@pytest.mark.ranks(2)
async def test_n5_options_that_differ(coll: Communicator) -> None:
    differing: list[tuple[dict[str, Any], str]] = [
        ({"op": ("mean", "sum")[coll.rank]}, "mean.*sum"),
        ({"bucket_bytes": 100 + coll.rank}, "100.*101"),
    ]
    for options, text in differing:
        with pytest.raises(aiodist.MismatchError, match=text):
            await DataParallel.create(Trial.Mlp(), coll, **options)
    assert await coll.allreduce(1) == 2


@pytest.mark.ranks(2)
async def test_n5_a_parameter_of_another_dtype_later(coll: Communicator) -> None:
    """The bucket keeps the earlier dtype: all ranks raise, and none hangs."""
    net = await DataParallel.create(Trial.Mlp().float(), coll)
    x, y = Trial.batch(coll.rank, 0)
    if coll.rank == 0:
        net.module.double()
    dtype = net.module.get_parameter("0.weight").dtype
    with pytest.raises((TypeError, aiodist.RemoteError), match=r"float64, and was float32 when DataParallel"):
        await net.backward(mse_loss(net(x.to(dtype)), y.to(dtype)))
    net.module.float()
    net.zero_grad()
    await net.backward(mse_loss(net(x.float()), y.float()))
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in net.parameters())


CHANGES: dict[str, Any] = {
    "append": lambda m: m.append(nn.Linear(3, 3).double()),
    "assign": lambda m: m.load_state_dict({k: v.clone() for k, v in m.state_dict().items()}, assign=True),
    "weight_norm": lambda m: nn.utils.weight_norm(m[0]),
    "parametrization": lambda m: nn.utils.parametrizations.weight_norm(m[0]),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("change", CHANGES)
async def test_n5_parameters_that_come_later_are_an_error(coll: Communicator, change: str) -> None:
    """Without the error each rank would train its own values."""
    sgd = Trial.OPTIMIZERS["sgd"]
    drivers: list[Any] = [
        lambda net: sgd(net.parameters()),
        lambda net: PipelinedOptimizer.create(net, sgd),
        lambda net: ShardedOptimizer.create(net, sgd),
        lambda net: LocalSGD.create(net, sgd(net.parameters()), every=2),
    ]
    for drive in drivers:
        net = await trained(coll)
        opt = await awaited(drive(net))
        await net.step(partial(Trial.loss, net, coll.rank, 0), opt)
        if hasattr(opt, "flush"):
            await opt.flush()
        CHANGES[change](net.module)
        for each in (opt, opt) if drive is not drivers[0] else (opt, sgd(net.parameters())):
            with pytest.raises(RuntimeError, match=r"parameters? to train .* put into the module after its DataPar"):
                await net.step(partial(Trial.loss, net, coll.rank, 1), each)
        if drive is drivers[0]:
            with pytest.raises(RuntimeError, match="put into the module after"):
                await net.backward(Trial.loss(net, coll.rank, 1))
            with pytest.raises(RuntimeError, match="put into the module after"):
                _ = [pair async for pair in net.backward_iter(Trial.loss(net, coll.rank, 1))]
            with net.no_sync(), pytest.raises(RuntimeError, match="put into the module after"):
                await net.backward(Trial.loss(net, coll.rank, 1))
        await net.aclose()
    again = await DataParallel.create(net.module, coll)
    await again.step(partial(Trial.loss, again, coll.rank, 1), sgd(again.parameters()))
    await assert_synchronized(again.module, coll)


@pytest.mark.ranks(2)
async def test_n5_parameters_that_come_later_on_one_rank(coll: Communicator) -> None:
    """All ranks raise until the parameters are gone. Frozen ones, another net's, and a second name for one are fine."""
    net = await trained(coll)
    other = await DataParallel.create(Trial.Mlp(), coll)
    net.module[0].other = other.module
    opt = Trial.OPTIMIZERS["sgd"](net.parameters())
    layer = nn.Linear(3, 3).double().requires_grad_(False)
    net.module.append(layer)
    net.module[0].twin = net.module[0].bias
    await net.step(partial(Trial.loss, net, coll.rank, 2), opt)
    layer.requires_grad_(coll.rank == 1)
    with pytest.raises((RuntimeError, aiodist.RemoteError), match=r"5\.weight, 5\.bias: 2 parameters to train"):
        await net.step(partial(Trial.loss, net, coll.rank, 3), opt)
    net.module.pop(-1)
    await net.step(partial(Trial.loss, net, coll.rank, 3), opt)
    await assert_synchronized(net.module, coll)


@pytest.mark.ranks(3)
async def test_n5_a_module_that_local_ranks_share_is_refused(coll: Communicator) -> None:
    """A pytest fixture returns such a module: one object for all ranks that are threads of a process."""
    given = await coll.allgather_object(id(_SHARED))
    assert len(set(given)) == 1
    text = r"ranks 0 and 1 have given the same module object: .*`copy\.deepcopy\(module\)"
    with pytest.raises(aiodist.MismatchError, match=text):
        await DataParallel.create(_SHARED, coll)
    async with await DataParallel.create(copy.deepcopy(_SHARED), coll) as net:
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        await net.step(lambda: net(torch.ones(2)).sum(), opt)


_SHARED = torch.nn.Linear(2, 1)
