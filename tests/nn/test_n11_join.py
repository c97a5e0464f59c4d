"""N11: ranks without more data wait for the others, and in the end all have the same state."""

import asyncio
import copy
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import aiodist
from aiodist import Communicator
from aiodist.nn import DataParallel, PipelinedOptimizer, assert_synchronized
from aiodist.testing import run_ranks
from tests.nn.conftest import Trial

MOMENTUM, ADAM = Trial.OPTIMIZERS["momentum"], Trial.OPTIMIZERS["adam"]

UNEVEN: dict[int, list[tuple[int, ...]]] = {
    1: [(3,), (0,)],
    2: [(3, 1), (0, 2), (2, 2), (0, 0)],
    3: [(1, 4, 2), (2, 0, 0), (0, 0, 3)],
    4: [(3, 0, 5, 1)],
}


def reference(
    module: nn.Module,
    opt: torch.optim.Optimizer,
    counts: Sequence[int],
    op: str = "mean",
    first: int = 0,
) -> nn.Module:
    """Train in this process: in each step the mean, or the sum, over the ranks that still have data."""
    for step in range(max(counts)):
        active = [rank for rank, count in enumerate(counts) if step < count]
        opt.zero_grad()
        for rank in active:
            (Trial.loss(module, rank, first + step) / (len(active) if op == "mean" else 1)).backward()
        opt.step()
    return module


def counts_of(coll: Communicator) -> list[tuple[int, ...]]:
    return UNEVEN[coll.size]


@pytest.mark.drawn(2)
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("op", ["mean", "sum"])
async def test_n11_the_mean_is_over_the_ranks_that_have_data(coll: Communicator, op: Literal["mean", "sum"]) -> None:
    for counts in counts_of(coll):
        net, opt = await Trial.made(coll, "adam", op=op, bucket_bytes=100, first_bucket_bytes=1)
        async with net.join(opt):
            await Trial.train(net, opt, range(counts[coll.rank]), coll.rank)
        expected = Trial.Mlp()
        plain = ADAM(expected.parameters())
        Trial.assert_same(net.module, reference(expected, plain, counts, op))
        await assert_synchronized(list(net.parameters()), coll)
        await assert_synchronized(opt.state_dict(), coll) if max(counts) else None
        for mine, theirs in zip(net.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(opt.state[mine], plain.state[theirs], rtol=1e-6, atol=1e-12)
        await net.aclose()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("pipelined", [False, True])
async def test_n11_epoch_after_epoch(coll: Communicator, pipelined: bool) -> None:
    """Who is late changes, and there are even ones between; a step outside needs all ranks again."""
    epochs = [counts for counts in counts_of(coll) if coll.size == 2 or counts != (2, 0, 0)]
    net, opt = await Trial.made(coll, "momentum", pipelined=pipelined, **Trial.SMALL)
    expected = Trial.Mlp()
    plain = MOMENTUM(expected.parameters())
    for epoch, counts in enumerate(epochs):
        first = 10 * epoch
        async with net.join(opt):
            for step in range(counts[coll.rank]):
                await net.step(Trial.loss, opt, net, coll.rank, first + step)
        reference(expected, plain, counts, first=first)
        await assert_synchronized([list(net.parameters()), opt.state_dict()], coll)
        Trial.assert_same(net.module, expected)
        await net.step(Trial.loss, opt, net, coll.rank, first + 9)
        reference(expected, plain, [1] * coll.size, first=first + 9)
    if pipelined:
        await opt.flush()
    Trial.assert_same(net.module, expected)


@pytest.mark.drawn(2)
@pytest.mark.ranks(1, 4)
@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("given", [True, False])
async def test_n11_with_a_pipelined_optimizer(coll: Communicator, given: bool) -> None:
    """The net knows of it where no step was made, too."""
    for counts in counts_of(coll):
        net = await DataParallel.create(Trial.Mlp(), coll, **Trial.SMALL)
        opt = await PipelinedOptimizer.create(net, ADAM)
        async with net.join(*[opt] * given):
            await Trial.train(net, opt, range(counts[coll.rank]), coll.rank)
        expected = Trial.Mlp()
        Trial.assert_same(net.module, reference(expected, ADAM(expected.parameters()), counts))
        await assert_synchronized([list(net.parameters()), opt.state_dict()], coll)
        net(torch.zeros(1, 6).double())  # nothing is pending
        opt.close()
        await net.aclose()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("pipelined", [False, True])
async def test_n11_scaler_and_schedulers_go_on_alike(coll: Communicator, pipelined: bool) -> None:
    """The settings of the net, on ranks with different numbers of steps; also where they are given."""
    net, opt = await Trial.made(coll, "momentum", pipelined=pipelined, bucket_bytes=100, first_bucket_bytes=1)
    scaler = torch.amp.GradScaler("cpu", 1024.0, growth_interval=2)
    schedules = [CosineAnnealingLR(each, 9) for each in (opt.optimizers if pipelined else [opt])]
    net.configure(scaler=scaler, scheduler=schedules)
    expected = Trial.Mlp()
    plain = MOMENTUM(expected.parameters())
    theirs = CosineAnnealingLR(plain, 9)
    given: list[Any] = [scaler, *schedules]
    for epoch, counts in enumerate([counts_of(coll)[0], counts_of(coll)[1]]):
        async with net.join(opt, *given * epoch):
            for step in range(counts[coll.rank]):
                await net.step(Trial.loss, opt, net, coll.rank, 10 * epoch + step)
        for step in range(max(counts)):
            reference(expected, plain, [int(step < count) for count in counts], first=10 * epoch + step)
            theirs.step()
        await net.step(Trial.loss, opt, net, coll.rank, 10 * epoch + 9)
        reference(expected, plain, [1] * coll.size, first=10 * epoch + 9)
        theirs.step()
    if pipelined:
        await opt.flush()
    Trial.assert_same(net.module, expected)
    told = [scaler.state_dict(), [each.state_dict()["last_epoch"] for each in schedules], list(net.parameters())]
    await assert_synchronized(told, coll)


@pytest.mark.ranks(2)
async def test_n11_settings_of_one_rank_alone_are_told(coll: Communicator) -> None:
    """All ranks raise, and no state is shared."""
    net, opt = await Trial.made(coll, "momentum")
    net.configure(scheduler=CosineAnnealingLR(opt, 9) if coll.rank else None)

    async def train() -> None:
        async with net.join():
            await Trial.train(net, opt, range(1 + coll.rank), coll.rank)

    with pytest.raises(aiodist.MismatchError, match=r"settings .*: rank 0: nothing; rank 1: CosineAnnealingLR"):
        await train()


@pytest.mark.ranks(2)
async def test_n11_numbers_of_an_optimizer_keep_their_dtype(coll: Communicator) -> None:
    """State of NAdam is float32, also where the parameters are not."""
    net = await DataParallel.create(Trial.Mlp().to(torch.bfloat16), coll)
    opt = torch.optim.NAdam(net.parameters())
    x = torch.ones(5, 6, dtype=torch.bfloat16)
    async with net.join():
        for _ in range(1 + 2 * coll.rank):
            await net.step(lambda: net(x).square().sum(), opt)
    states = opt.state_dict()["state"]
    assert {each["mu_product"].dtype for each in states.values()} == {torch.float32}
    await assert_synchronized(states, coll, rtol=0)


@pytest.mark.ranks(3)
async def test_n11_a_sum_that_is_added_to(coll: Communicator) -> None:
    """Each rank that still has data keeps its share of the sum, and a rank without brings none."""
    counts = (2, 1, 0)
    net, opt = await Trial.made(coll, "momentum", op="sum", bucket_bytes=100, first_bucket_bytes=1)
    async with net.join(opt):
        for step in range(counts[coll.rank]):
            opt.zero_grad()
            for part in range(3):
                await net.backward(Trial.loss(net, coll.rank, 3 * step + part))
            opt.step()
    expected = Trial.Mlp()
    plain = MOMENTUM(expected.parameters())
    for step in range(2):
        plain.zero_grad()
        for rank in range(2 - step):
            for part in range(3):
                Trial.loss(expected, rank, 3 * step + part).backward()
        plain.step()
    Trial.assert_same(net.module, expected)


@pytest.mark.drawn(2)
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("op", ["mean", "sum"])
async def test_n11_gradients_are_kept_while_ranks_leave(coll: Communicator, op: Literal["mean", "sum"]) -> None:
    """Gradients that were reduced while a rank had data count fully later."""
    for counts in counts_of(coll):
        net = await DataParallel.create(Trial.Mlp(), coll, op=op, bucket_bytes=100, first_bucket_bytes=1)
        seen = []
        async with net.join():
            for step in range(counts[coll.rank]):
                await net.backward(Trial.loss(net, coll.rank, step))
                seen.append([parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None])
        expected = Trial.Mlp()
        for step, found in enumerate(seen):
            active = [rank for rank, count in enumerate(counts) if step < count]
            for rank in active:
                (Trial.loss(expected, rank, step) / (len(active) if op == "mean" else 1)).backward()
            torch.testing.assert_close(found, [parameter.grad for parameter in expected.parameters()])
        for step in range(max(counts)):  # after the block all have the last reduction, and continue from there
            active = [rank for rank, count in enumerate(counts) if len(seen) <= step < count]
            for rank in active:
                (Trial.loss(expected, rank, step) / (len(active) if op == "mean" else 1)).backward()
        for again in range(2):
            if again:
                await net.backward(Trial.loss(net, coll.rank, 7))
                for rank in range(coll.size):
                    (Trial.loss(expected, rank, 7) / (coll.size if op == "mean" else 1)).backward()
            trained = [[p.grad for p in module.parameters()] for module in (net, expected)]
            torch.testing.assert_close(*trained)
        await net.aclose()


@pytest.mark.ranks(1)
async def test_n11_what_is_no_optimizer_is_refused(coll: Communicator) -> None:
    """The call raises, before the first batch, since the others would wait after the last one."""
    net = await DataParallel.create(Trial.Mlp(), coll)
    with pytest.raises(TypeError, match=r"join\(list\): expected optimizers, as `net\.join\(opt\)`"):
        async with net.join([MOMENTUM(net.parameters())]):  # type: ignore[arg-type]
            pass
    async with net.join(MOMENTUM(net.parameters())):
        pass


@pytest.mark.ranks(2)
async def test_n11_the_optimizer_of_the_last_step_is_meant(coll: Communicator) -> None:
    """Without an argument."""
    net, opt = await Trial.made(coll, "momentum")
    counts = (1, 3)
    async with net.join():
        await Trial.train(net, opt, range(counts[coll.rank]), coll.rank)
    expected = Trial.Mlp()
    Trial.assert_same(net.module, reference(expected, MOMENTUM(expected.parameters()), counts))
    await assert_synchronized(opt.state_dict(), coll)


@pytest.mark.ranks(3)
async def test_n11_a_rank_that_made_no_step_knows_of_no_optimizer(coll: Communicator) -> None:
    """All ranks raise, also those with an optimizer, and no state is shared; `net.join(opt)` works."""
    net, opt = await Trial.made(coll, "momentum")

    async def train(*given: torch.optim.Optimizer) -> None:
        async with net.join(*given):
            await Trial.train(net, opt, range(coll.rank), coll.rank)

    with pytest.raises(aiodist.MismatchError, match=r"rank 0: 0; ranks 1, 2: 1.*`net\.join\(opt\)`"):
        await train()
    net.load_state_dict(Trial.Mlp().state_dict())
    opt = ADAM(net.parameters())
    await train(opt)
    expected = Trial.Mlp()
    Trial.assert_same(net.module, reference(expected, ADAM(expected.parameters()), (0, 1, 2)))
    await assert_synchronized([list(net.parameters()), opt.state_dict()], coll)


@pytest.mark.ranks(2, 3)
async def test_n11_backward_and_an_own_step(coll: Communicator) -> None:
    """Two backwards to a step, the first of them local."""
    counts = counts_of(coll)[0]
    net, opt = await Trial.made(coll, "momentum", bucket_bytes=100, first_bucket_bytes=1)
    async with net.join(opt):
        for step in range(counts[coll.rank]):
            opt.zero_grad()
            with net.no_sync():
                await net.backward(Trial.loss(net, coll.rank, 2 * step))
            await net.backward(Trial.loss(net, coll.rank, 2 * step + 1))
            opt.step()
    expected = Trial.Mlp()
    plain = MOMENTUM(expected.parameters())
    for step in range(max(counts)):
        active = [rank for rank, count in enumerate(counts) if step < count]
        plain.zero_grad()
        for rank in active:
            for part in (2 * step, 2 * step + 1):
                (Trial.loss(expected, rank, part) / len(active)).backward()
        plain.step()
    Trial.assert_same(net.module, expected)
    await assert_synchronized(opt.state_dict(), coll)


@pytest.mark.ranks(2)
async def test_n11_gradients_come_one_by_one(coll: Communicator) -> None:
    """`net.backward_iter` yields the mean over the ranks with data."""
    counts = (1, 2)
    net, opt = await Trial.made(coll, "momentum", **Trial.SMALL)
    expected = Trial.Mlp()
    plain = MOMENTUM(expected.parameters())
    async with net.join(opt):
        for step in range(counts[coll.rank]):
            opt.zero_grad()
            seen = {p: grad.clone() async for p, grad in net.backward_iter(Trial.loss(net, coll.rank, step))}
            opt.step()
            reference(expected, plain, [int(step < count) for count in counts], first=step)
            for mine, theirs in zip(net.parameters(), expected.parameters(), strict=True):
                torch.testing.assert_close(seen[mine], theirs.grad, rtol=1e-6, atol=1e-12)
    for step in range(counts[coll.rank], 2):
        reference(expected, plain, [int(step < count) for count in counts], first=step)
    Trial.assert_same(net.module, expected)


@pytest.mark.ranks(3)
async def test_n11_buffers_stay_each_ranks_own(coll: Communicator) -> None:
    torch.manual_seed(3)
    net = await DataParallel.create(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double(), coll)
    opt = MOMENTUM(net.parameters())
    x = torch.randn(4, 4, dtype=torch.float64)
    async with net.join(opt):
        for _ in range(coll.rank):
            await net.step(lambda: net(x).square().sum(), opt)
    assert net.module[1].num_batches_tracked == coll.rank  # type: ignore[index]
    await assert_synchronized(list(net.parameters()), coll)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("where", ["loader", "forward"])
@pytest.mark.parametrize("pipelined", [False, True])
async def test_n11_an_error_in_the_block_hangs_nobody(coll: Communicator, where: str, pipelined: bool) -> None:
    """The others get it as a RemoteError, those that wait at the end of the block too; then all continue together."""
    net, opt = await Trial.made(coll, "momentum", pipelined=pipelined, **Trial.SMALL)
    counts = (1, 3, 5)  # rank 0 waits at the end when rank 1 fails

    def forward(step: int) -> Tensor:
        if where == "forward" and coll.rank == 1 and step == 2:
            raise ArithmeticError("no more")
        return Trial.loss(net, coll.rank, step)

    raised: BaseException | None = None
    try:
        async with net.join(opt):
            for step in range(counts[coll.rank]):
                if where == "loader" and coll.rank == 1 and step == 2:
                    raise ArithmeticError("no more")
                await net.step(forward, opt, step)
    except (ArithmeticError, aiodist.RemoteError) as error:
        raised = error
    assert isinstance(raised, ArithmeticError if coll.rank == 1 else aiodist.RemoteError)
    assert "no more" in str(raised)
    # All have made the same passes; weights differ, as rank 0 has left early: start afresh.
    if pipelined:
        with suppress(ArithmeticError, aiodist.RemoteError):
            await opt.flush()
        opt.close()
    net.load_state_dict(Trial.Mlp().state_dict())
    fresh: Any = await PipelinedOptimizer.create(net, ADAM) if pipelined else ADAM(net.parameters())
    async with net.join(fresh):
        await Trial.train(net, fresh, range(1 + coll.rank), coll.rank)
    expected = Trial.Mlp()
    Trial.assert_same(net.module, reference(expected, ADAM(expected.parameters()), (1, 2, 3)))


def test_n11_a_rank_that_left_the_block_keeps_up_with_no_rank_that_has_failed() -> None:
    """The rank left the block with the error of the failed rank, whose program has ended."""
    heard = asyncio.Event()

    async def program(rank: int) -> None:
        async with aiodist.init() as coll:
            net, opt = await Trial.made(coll, "momentum")

            def forward() -> Tensor:
                if rank:
                    raise ArithmeticError("no more")
                return Trial.loss(net, rank, 0)

            with suppress(aiodist.RemoteError):
                async with net.join(opt):
                    try:
                        await net.step(forward, opt)
                    except ArithmeticError:
                        await heard.wait()
                        raise
                    except aiodist.RemoteError as error:
                        heard.set()
                        with suppress(asyncio.CancelledError):
                            await asyncio.sleep(1000)  # until the other program has failed
                        raise error from None
            await net.submit(ended.append, rank)

    ended: list[int] = []
    with pytest.raises(ArithmeticError, match="no more"):
        run_ranks(2, program)
    assert ended == [0]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("entering", [False, True])
async def test_n11_cancelling_the_block_hangs_nobody(coll: Communicator, entering: bool) -> None:
    net, opt = await Trial.made(coll, "momentum")
    stop = asyncio.Event()
    if entering:
        stop.set()

    async def train() -> None:
        async with net.join(opt):
            for step in range(2):
                await net.step(Trial.loss, opt, net, coll.rank, step)
                if coll.rank == 0:
                    stop.set()
                    await asyncio.get_running_loop().create_future()

    task = asyncio.ensure_future(train())
    if coll.rank == 0:
        await stop.wait()
        await asyncio.sleep(0)
        task.cancel()
    with pytest.raises((asyncio.CancelledError, aiodist.RemoteError)) as caught:
        await task
    assert isinstance(caught.value, asyncio.CancelledError if coll.rank == 0 else aiodist.RemoteError)
    await coll.barrier()


@pytest.mark.ranks(2)
async def test_n11_after_the_block_a_step_counts_all_ranks(coll: Communicator) -> None:
    """A rank that has nothing to bring any more is waited for outside of the block, and its zeros count."""
    net, opt = await Trial.made(coll, "momentum")
    async with net.join(opt):
        pass
    before = copy.deepcopy(net.module)
    await net.step(lambda: Trial.loss(net, 0, 0) * (1 - coll.rank), opt)
    plain = MOMENTUM(before.parameters())
    (Trial.loss(before, 0, 0) / 2).backward()
    plain.step()
    Trial.assert_same(net.module, before)
