"""N3: an error on one rank is raised there, reported to the others, changes no parameter; the next step works."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import aiodist
from aiodist import Communicator, OperationTimeout
from aiodist.nn import DataParallel
from aiodist.testing import Fault, Faults, InjectedFault, run_ranks
from aiodist.testing.seams.progress import reducer_of
from tests.nn.conftest import Trial


class Stop(BaseException):
    """A BaseException, like KeyboardInterrupt."""


class Broken(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, error: BaseException) -> Tensor:
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise ctx.error


Fail = Callable[[Any, Callable[[Any], Tensor], BaseException], Tensor]


def in_forward(net: Any, loss: Callable[[Any], Tensor], error: BaseException) -> Tensor:
    raise error


def in_backward(net: Any, loss: Callable[[Any], Tensor], error: BaseException) -> Tensor:
    """Raise when the last layer's gradients are already in flight."""
    first, *others = net.module
    return loss(lambda x: torch.nn.Sequential(*others)(Broken.apply(first(x), error)))  # type: ignore[no-untyped-call]


def in_the_beginning_of_backward(net: Any, loss: Callable[[Any], Tensor], error: BaseException) -> Tensor:
    return Broken.apply(loss(net), error)  # type: ignore[no-any-return, no-untyped-call]


def in_a_hook(net: Any, loss: Callable[[Any], Tensor], error: BaseException) -> Tensor:
    def hook(grad: Tensor) -> None:
        handle.remove()
        raise error

    handle = net.module[2].weight.register_hook(hook)
    return loss(net)


def in_a_hook_behind_ours(net: Any, loss: Callable[[Any], Tensor], error: BaseException) -> Tensor:
    def hook(parameter: Tensor) -> None:
        handle.remove()
        raise error

    handle = net.module[2].weight.register_post_accumulate_grad_hook(hook)
    return loss(net)


WAYS: list[Fail] = [in_forward, in_backward, in_the_beginning_of_backward, in_a_hook, in_a_hook_behind_ours]


def parameters_of(net: DataParallel) -> list[Tensor]:
    return [p.detach().clone() for p in net.parameters()]


@pytest.mark.drawn(2)
@pytest.mark.ranks(3)
@pytest.mark.parametrize("failing", [{0}, {2}, {0, 1}, {0, 1, 2}], ids=str)
@pytest.mark.parametrize("way", WAYS)
async def test_n3_an_error_is_raised_there_and_told_to_the_others(
    coll: Communicator, way: Fail, failing: set[int]
) -> None:
    net, opt = await Trial.made(coll, "momentum", **Trial.SMALL)
    for step in range(3):
        for kind in (ValueError, Stop):
            before = parameters_of(net)
            if coll.rank in failing:
                loss = partial(Trial.loss, rank=coll.rank, step=step)
                with pytest.raises(kind, match="no luck"):
                    await net.step(partial(way, net, loss, kind("no luck")), opt)
            else:
                with pytest.raises(aiodist.RemoteError, match=f"{kind.__name__}: no luck") as caught:
                    await net.step(partial(Trial.loss, net, coll.rank, step), opt)
                assert caught.value.raised_by in failing
                assert __file__ in caught.value.traceback
                for rank in failing:
                    assert str(rank) in str(caught.value)
            assert all(map(torch.equal, before, parameters_of(net)))
        await net.step(partial(Trial.loss, net, coll.rank, step), opt)
    Trial.assert_same(net, Trial.alone(3, 3, optimizer="momentum"))


@pytest.mark.ranks(2)
async def test_n3_an_error_of_backward(coll: Communicator) -> None:
    net = await DataParallel.create(Trial.Mlp(), coll, **Trial.SMALL)
    for _ in range(2):
        loss = Trial.loss(net, coll.rank, 0)
        if coll.rank:
            with pytest.raises(ValueError, match="no luck"):
                await net.backward(Broken.apply(loss, ValueError("no luck")))  # type: ignore[no-untyped-call]
        else:
            with pytest.raises(aiodist.RemoteError, match="no luck"):
                await net.backward(loss)
        net.zero_grad()
        await net.backward(Trial.loss(net, coll.rank, 0))
        expected = Trial.Mlp()
        Trial.joined(expected, 2, 0).backward()
        Trial.assert_same_gradients(net, expected)


WRONG: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "a number": (lambda loss: loss.item(), TypeError, "forward returned float: expected the loss"),
    "None": (lambda loss: None, TypeError, "forward returned NoneType"),
    "a vector": (lambda loss: torch.stack([loss, loss]), ValueError, r"shape \[2\]: expected the loss, one element"),
    "no graph": (lambda loss: loss.detach(), ValueError, "depends on no parameter"),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", WRONG)
async def test_n3_a_loss_that_is_none(coll: Communicator, what: str) -> None:
    spoil, kind, text = WRONG[what]
    net, opt = await Trial.made(coll)

    def forward(wrong: bool) -> Any:
        loss = Trial.loss(net, coll.rank, 0)
        return spoil(loss) if wrong else loss

    for wrong in range(2):
        expected = kind if coll.rank == wrong else aiodist.RemoteError
        with pytest.raises(expected, match=text):
            await net.step(partial(forward, coll.rank == wrong), opt)
    await net.step(lambda: Trial.loss(net, coll.rank, 0), opt)
    Trial.assert_same(net, Trial.alone(2, 1))


@pytest.mark.ranks(2)
async def test_n3_backward_outside_of_it_is_an_error(coll: Communicator) -> None:
    net, opt = await Trial.made(coll)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"'\d\.(weight|bias)' got a gradient outside of net\.step"):
            Trial.loss(net, coll.rank, 0).backward()
        with pytest.raises(RuntimeError, match="outside of net"):
            await net.submit(lambda: Trial.loss(net, coll.rank, 0).backward())
    await net.step(lambda: Trial.loss(net, coll.rank, 0), opt)
    Trial.assert_same(net, Trial.alone(2, 1))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
async def test_n3_modes_that_build_no_graph(coll: Communicator, mode: Any) -> None:
    net, opt = await Trial.made(coll, **Trial.SMALL)
    for _ in range(2):
        with mode(), pytest.raises(ValueError, match="depends on no parameter"):
            await net.step(lambda: Trial.loss(net, coll.rank, 0), opt)
        await net.step(lambda: Trial.loss(net, coll.rank, 0), opt)
        with torch.no_grad():
            net.load_state_dict(Trial.Mlp().state_dict())
    with net.no_sync():
        await net.backward(Trial.loss(net, coll.rank, 0))
    net.zero_grad()
    await net.step(lambda: Trial.loss(net, coll.rank, 0), opt)
    Trial.assert_same(net, Trial.alone(2, 1))


@pytest.mark.ranks(2)
async def test_n3_a_rank_that_failed_and_leaves_at_once(coll: Communicator) -> None:
    net, opt = await Trial.made(coll, **Trial.SMALL)

    def forward() -> Tensor:
        if coll.rank:
            raise ArithmeticError("no luck")
        return Trial.loss(net, coll.rank, 0)

    with pytest.raises((aiodist.RemoteError, ArithmeticError)):
        await net.step(forward, opt)
    await net.aclose()
    assert await coll.allreduce(1) == 2


@pytest.mark.ranks(2)
async def test_n3_an_error_of_the_optimizer(coll: Communicator) -> None:
    net, opt = await Trial.made(coll)

    def refuse(*args: object) -> None:
        raise ArithmeticError("not today")

    hook = opt.register_step_pre_hook(refuse)
    before = parameters_of(net)
    with pytest.raises(ArithmeticError, match="not today"):
        await net.step(lambda: Trial.loss(net, coll.rank, 0), opt)
    assert all(map(torch.equal, before, parameters_of(net)))
    hook.remove()
    await net.step(lambda: Trial.loss(net, coll.rank, 0), opt)
    Trial.assert_same(net, Trial.alone(2, 1))


@pytest.mark.ranks(3)
async def test_n3_the_order_is_learnt_after_a_first_step_that_failed(coll: Communicator) -> None:
    module = Trial.Mlp()
    net = await DataParallel.create(module, coll, **Trial.SMALL)
    opt = Trial.OPTIMIZERS["sgd"](net.parameters())

    def forward() -> Tensor:  # in reverse: the first layer's gradients come first
        return torch.stack([module.get_parameter(f"{i}.weight").square().sum() for i in (4, 2, 0)]).sum()

    with pytest.raises((aiodist.RemoteError, ValueError)):
        await net.step(forward if coll.rank != 1 else Tensor, opt)
    await net.step(forward, opt)
    await net.step(forward, opt)
    names = [slot.name for bucket in reducer_of(net).buckets for slot in bucket.slots]
    assert names[:3] == ["0.weight", "2.weight", "4.weight"]


@pytest.mark.ranks(2)
async def test_n3_a_lost_communicator_ends_the_step(coll: Communicator) -> None:
    own = await coll.dup()
    net, opt = await Trial.made(own)
    await net.step(lambda: Trial.loss(net, coll.rank, 0), opt)
    before = parameters_of(net)
    if coll.rank:
        reducer_of(net).data.abort("had enough")
    with pytest.raises(aiodist.CommunicatorAborted, match="had enough"):
        await asyncio.wait_for(net.step(lambda: Trial.loss(net, coll.rank, 1), opt), 100)
    with pytest.raises(aiodist.CommunicatorAborted, match="had enough"):
        await net.step(lambda: Trial.loss(net, coll.rank, 1), opt)
    assert all(map(torch.equal, before, parameters_of(net)))
    assert await coll.allreduce(1) == 2


@pytest.mark.ranks(1)
async def test_n3_arguments_of_a_wrong_kind(coll: Communicator) -> None:
    with pytest.raises(TypeError, match=r"create\(Communicator, Linear\): expected a module"):
        await DataParallel.create(coll, torch.nn.Linear(1, 1))  # type: ignore[arg-type]
    net, opt = await Trial.made(coll)
    with pytest.raises(TypeError, match=r"step\(SGD and function\): expected a function"):
        await net.step(opt, lambda: None)  # type: ignore[call-overload]
    with net.no_sync(), pytest.raises(RuntimeError, match=r"net\.backward"):
        await net.step(partial(Trial.loss, net, coll.rank, 0), opt)
    await net.step(Trial.loss, opt, net, coll.rank, step=0)  # arguments are bound at the call
    Trial.assert_same(net, Trial.alone(1, 1))


@pytest.mark.ranks(2)
async def test_n3_the_message_of_a_group_is_that_of_its_first_exception(coll: Communicator) -> None:
    """Groups may be nested, and a group may be the cause of another exception."""
    net, opt = await Trial.made(coll)

    def forward(kind: str) -> Tensor:
        if not coll.rank:
            return Trial.loss(net, 0, 0)
        try:
            raise ExceptionGroup("all", [ExceptionGroup("some", [ArithmeticError("no more\nat all")]), KeyError(1)])
        except ExceptionGroup as group:
            if kind == "by a group":
                raise LookupError("no more") from group
            raise

    for kind, cause in (("group", "ArithmeticError: no more"), ("by a group", "LookupError: no more")):
        error: Any = (ExceptionGroup, LookupError) if coll.rank else aiodist.RemoteError
        with pytest.raises(error) as caught:
            await net.step(forward, opt, kind)
        if not coll.rank:
            assert str(caught.value).startswith(f"rank 1 failed in this step: {cause}")


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("at", range(1, 10))
def test_n3_ranks_hear_of_one_whose_operation_fails(size: int, at: int) -> None:
    """Any operation fails while the net is made or in two steps: no rank waits for it until a deadline."""

    async def main() -> BaseException | None:
        try:
            async with aiodist.init(timeout=60) as coll:
                net = await DataParallel.create(torch.nn.Linear(3, 2), coll)
                opt = torch.optim.SGD(net.parameters(), lr=0.1)
                for _ in range(2):
                    await net.step(lambda: net(torch.ones(1, 3)).sum(), opt)
                await coll.barrier()
        except Exception as error:  # noqa: BLE001  - looked at below
            return error
        return None

    failing = size - 1
    ends = run_ranks(size, main, timeout=30, faults=Faults(Fault("raise", failing, at)))
    assert isinstance(ends.pop(), InjectedFault)
    assert all(f"rank {failing} " in str(end) and not isinstance(end, OperationTimeout) for end in ends), ends


def test_n3_ranks_hear_of_one_whose_optimizer_is_another() -> None:
    """One rank alone raises torch's error; the other raises CommunicatorAborted with its text."""

    async def main() -> BaseException | None:
        async with aiodist.init(timeout=60) as coll:
            module = torch.nn.Linear(2, 1)
            alone = list(module.parameters())
            groups: Any = [{"params": [p]} for p in alone] if coll.rank == 0 else alone
            try:
                net = await DataParallel.create(module, coll, torch.optim.SGD(groups, lr=0.1))
                await net.backward(net(torch.ones(1, 2)).sum())
            except Exception as error:  # noqa: BLE001  - looked at below
                return error
        return None

    first, second = run_ranks(2, main, timeout=30)
    assert isinstance(second, ValueError)
    assert isinstance(first, aiodist.CommunicatorAborted)
    assert "rank 1 failed while a net was made: ValueError('loaded state dict has a" in str(first)
