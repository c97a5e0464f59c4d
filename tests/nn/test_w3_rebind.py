"""W3: a net continues on another world, after deaths and with new ranks; ranks are tasks of this process."""

from __future__ import annotations

import asyncio
import copy
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import aiodist
from aiodist import Communicator, MismatchError, PeerError
from aiodist.codecs import TopK
from aiodist.nn import DataParallel, PipelinedOptimizer
from aiodist.testing import kill_rank, run_ranks
from tests.nn.conftest import Trial
from tests.support.elastic import build, bytes_of, killed_after, share, stepped, survivors

pytestmark = pytest.mark.timeout(100)


class Done(Exception):
    """The program ended as expected."""


def optimizers(kind: str, module: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    if kind == "sgd":
        opt: torch.optim.Optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    else:
        opt = torch.optim.Adam(module.parameters(), lr=0.03)
    return opt, torch.optim.lr_scheduler.StepLR(opt, 7, gamma=0.7)


def alone(kind: str, steps: int) -> nn.Module:
    """Return what one process comes to that makes as many steps on the joined batches."""
    module = build(0)
    return stepped(module, *optimizers(kind, module), steps=range(steps))


async def train(number: int, kind: str, steps: int, grows_at: int) -> Any:
    module = build(number)
    opt, scheduler = optimizers(kind, module)
    options: dict[str, Any] = {"op": "sum", "bucket_bytes": 1, "scheduler": scheduler}
    net: DataParallel | None = None
    async with aiodist.init(elastic=True) as coll:
        while net is None or net.steps_done < steps:
            try:
                if net is None:
                    net = await DataParallel.create(module, coll, opt, **options)
                await net.rebind(coll, opt)
                if net.steps_done == grows_at and coll.size < 4:
                    coll = await coll.grow()
                    continue
                await net.step(partial(share, net, net.steps_done, coll.rank, coll.size), opt)
            except PeerError:
                coll = await coll.shrink()
        return coll.size, net.steps_done, bytes_of(module, opt, scheduler), module


@pytest.mark.drawn(1)
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_w3_killed_at_any_moment_and_joined_it_trains_as_one_process_does(kind: str, seed: int) -> None:
    """Two of four ranks are killed, in a step, while the others rebind or before there is a net; then one joins."""
    steps = 40
    said = survivors(4, lambda number: train(number, kind, steps, 30), seed, within=1500)
    sizes, counts, held, modules = zip(*said, strict=True)
    assert set(counts) == {steps}
    assert len(set(sizes)) == 1
    assert all(each == held[0] for each in held), "bit by bit the same on all ranks"
    started = float(modules[0].seen)
    if started == 0:  # rank 0 lived until all had its parameters
        Trial.assert_same(modules[0], alone(kind, steps), rtol=1e-9, atol=1e-11)


def warming(opt: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Return a scheduler that sets the rate where it is made."""
    return torch.optim.lr_scheduler.LambdaLR(opt, lambda step: min(1.0, (step + 1) / 8) * 0.9 ** (step // 7))


async def train_pipelined(number: int, steps: int, grows_at: int, *, scheduled: bool) -> Any:
    module = build(number)
    net: DataParallel | None = None
    async with aiodist.init(elastic=True) as coll:
        while True:
            try:
                if net is None:
                    net = await DataParallel.create(
                        module, coll, PipelinedOptimizer, op="sum", first_bucket_bytes=1, bucket_bytes=1
                    )
                    opt = await PipelinedOptimizer.create(net, partial(torch.optim.Adam, lr=0.03))
                    if scheduled:
                        net.configure(scheduler=[warming(each) for each in opt.optimizers])
                await net.rebind(coll, opt)
                for step in range(net.steps_done, steps):
                    if step >= grows_at and coll.size < 4:
                        coll = await coll.grow()
                        break
                    await net.step(partial(share, net, step, coll.rank, coll.size), opt)
                else:
                    await opt.flush()
                    await coll.barrier()
                    return coll.size, net.steps_done, bytes_of(module, opt), module
            except PeerError:
                coll = await coll.shrink()


@pytest.mark.thorough
@pytest.mark.drawn(4)
@pytest.mark.parametrize("seed", range(16))
def test_w3_a_pipelined_optimizer_goes_back_to_its_last_whole_step(seed: int) -> None:
    """Two of four ranks are killed at any moment, then others join; each step is made once all the same.

    With odd seeds a scheduler for each bucket is a setting of the net; one that joins gets the states of the others'.
    """
    steps = 40
    said = survivors(4, lambda number: train_pipelined(number, steps, 30, scheduled=seed % 2 == 1), seed, within=4000)
    sizes, counts, held, modules = zip(*said, strict=True)
    assert set(counts) == {steps}
    assert len(set(sizes)) == 1
    assert all(each == held[0] for each in held), "bit by bit the same on all ranks"
    if float(modules[0].seen) == 0:  # rank 0 lived until all had its parameters
        expected = build(0)
        opt = torch.optim.Adam(expected.parameters(), lr=0.03)
        stepped(expected, opt, warming(opt) if seed % 2 else None, steps=range(steps))
        Trial.assert_same(modules[0], expected, rtol=1e-9, atol=1e-11)


def test_w3_the_rank_that_made_most_steps_gives_the_others_what_it_has() -> None:
    """One of three makes the step, one is killed, one was about to make it."""

    async def main(number: int) -> Any:
        module = build(number)
        opt, _ = optimizers("adam", module)
        async with aiodist.init(elastic=True) as coll:
            net = await DataParallel.create(module, coll, opt)
            await net.step(partial(share, net, 0, coll.rank, coll.size), opt)
            await net.backward(share(net, 1, coll.rank, coll.size))
            if number == 2:
                opt.step()
                module.get_buffer("seen").fill_(77.0)
            if number == 0:
                kill_rank()
                await asyncio.sleep(0)
            before = net.steps_done
            with pytest.raises(PeerError):
                await coll.barrier()
            coll = await coll.shrink()
            await net.rebind(coll, opt)
            assert all(p.grad is None for p in net.parameters()), "gradients are dropped"
            found = bytes_of(module, opt)
            await net.step(partial(share, net, net.steps_done, coll.rank, coll.size), opt)
            return before, net.steps_done, float(module.get_buffer("seen")), found, bytes_of(module, opt)

    _, one, two = run_ranks(3, main, elastic=(1, 3))
    assert (one[:3], two[:3]) == ((1, 3, 77.0), (2, 3, 77.0))
    assert one[3:] == two[3:]


@pytest.mark.parametrize("compress", [None, TopK(0.5)], ids=["plain", "compressed"])
def test_w3_a_net_that_is_given_up_while_it_is_made_leaves_no_thread(compress: TopK | None) -> None:
    """The fixture for all tests looks for threads that are left."""

    async def main(ticks: int) -> None:
        async with aiodist.init() as coll:
            making = asyncio.ensure_future(DataParallel.create(build(0), coll, compress=compress))
            making.add_done_callback(lambda made: made.cancelled() or made.exception())  # no code awaits it
            for _ in range(ticks):
                await asyncio.sleep(0)
            seen.add(making.done())
            raise Done

    seen: set[bool] = set()
    for ticks in range(2, 100, 7):
        with pytest.raises(Done):
            run_ranks(2, partial(main, ticks))
    assert seen == {False, True}


@pytest.mark.drawn(5)
@pytest.mark.parametrize("turns", range(0, 90))
def test_w3_where_the_one_that_gives_dies_meanwhile_nobody_has_half_of_it(turns: int) -> None:
    """Rank 2 has made a step more than the others; they have that one, or all stay where they were."""

    async def main(number: int) -> Any:
        module = build(number)
        opt, _ = optimizers("sgd", module)
        async with aiodist.init(elastic=True) as coll:
            net = await DataParallel.create(module, coll, opt)
            await net.step(partial(share, net, 0, coll.rank, coll.size), opt)
            states = [bytes_of(module, opt)]
            await net.backward(share(net, 1, coll.rank, coll.size))
            if number == 2:
                opt.step()
                states.append(bytes_of(module, opt))
            coll = await coll.shrink()  # no rank was lost: all come to another world
            while True:
                try:
                    rebinding = net.rebind(coll, opt)
                    await (killed_after(turns, rebinding) if number == 2 else rebinding)
                    await coll.barrier()
                except PeerError:
                    coll = await coll.shrink()
                else:
                    if coll.size == 3:
                        continue
                    break
            return net.steps_done, states[0] == bytes_of(module, opt), bytes_of(module, opt)

    one, two, dead = run_ranks(3, main, elastic=(1, 3))
    assert dead is None
    assert one == two
    assert one[:2] in ((1, True), (2, False))


def test_w3_gradients_that_are_compressed_and_a_scaler_go_on_too() -> None:
    async def main(number: int) -> Any:
        module = build(number).float()
        opt = torch.optim.SGD(module.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0 + number, growth_interval=2)
        async with aiodist.init(elastic=True) as coll:
            x = torch.ones(4, 5) * (number + 1)
            net = await DataParallel.create(module, coll, opt, compress=TopK(0.5), scaler=scaler)
            if coll.generation == 0:
                for _ in range(3):
                    await net.step(lambda: net(x).square().sum(), opt)
                coll = await coll.grow()
                await net.rebind(coll, opt)
            assert net.steps_done == 3
            for _ in range(2):
                await net.step(lambda: net(x).square().sum(), opt)
            return bytes_of(module), scaler.get_scale(), scaler._get_growth_tracker()

    first, *others = run_ranks(2, main, elastic=(1, 3))
    assert len(others) == 2
    assert all(each == first for each in others)
    assert first[1] == 32.0  # from 8, twice doubled in 5 steps


def test_w3_what_cannot_go_on_says_what_to_do_instead() -> None:
    async def main(number: int) -> None:
        async with aiodist.init(elastic=True) as coll:
            net = await DataParallel.create(build(number), coll)
            sgd, _ = optimizers("sgd", net.module)
            await net.step(partial(share, net, 1, coll.rank, coll.size), sgd)
            with pytest.raises(ValueError, match="rebind without SGD, which made the last step"):
                await net.rebind(coll)
            with pytest.raises(MismatchError, match="disagree on states of net"):
                await net.rebind(await coll.dup(), sgd, *([sgd] if number else []))
            await net.rebind(coll, sgd)
            await net.step(partial(share, net, 1, coll.rank, coll.size), sgd)
            net.configure(scaler=torch.amp.GradScaler("cpu") if number else None)
            with pytest.raises(MismatchError, match="rank 0: nothing; rank 1: GradScaler"):
                await net.rebind(await coll.dup(), sgd)

    run_ranks(2, main, elastic=(1, 2))


def test_w3_one_that_joins_without_the_settings_of_the_others_makes_no_step() -> None:
    async def main(number: int) -> None:
        async with aiodist.init(elastic=True) as coll:
            net = await DataParallel.create(build(0), coll, PipelinedOptimizer)
            opt = await PipelinedOptimizer.create(net, partial(torch.optim.SGD, lr=0.1))
            if coll.generation == 0:
                net.configure(scheduler=[warming(each) for each in opt.optimizers])
                await net.rebind(coll := await coll.grow(), opt)
                with pytest.raises(PeerError):
                    await whole_step(net, opt, partial(share, net, 0, coll.rank, coll.size))
                return
            with pytest.raises(RuntimeError, match=r"has joined LambdaLR.*expected `net\.configure"):
                await net.step(partial(share, net, 0, coll.rank, coll.size), opt)
            kill_rank()
            await asyncio.sleep(0)

    run_ranks(1, main, elastic=(1, 2))


class Fails(torch.optim.SGD):
    """Has changed one parameter when it raises."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            self.fails = False
            self.param_groups[0]["params"][0].data.zero_()
            raise ArithmeticError("no luck")
        return super().step(closure)


@pytest.mark.parametrize("failing", [[0], [0, 1]])
def test_w3_a_rank_whose_optimizer_raised_gives_nothing(failing: list[int]) -> None:
    async def main(number: int) -> Any:
        opt = Fails((module := build(number)).parameters(), lr=0.1)
        async with aiodist.init(elastic=True) as coll:
            net = await DataParallel.create(module, coll, opt)
            opt.fails = number in failing
            with suppress(ArithmeticError):
                await net.step(partial(share, net, 0, coll.rank, coll.size), opt)
            kept = bytes_of(module)
            coll = await coll.shrink()
            if len(failing) == 2:
                with pytest.raises(RuntimeError, match="load the last checkpoint first"):
                    await net.rebind(coll, opt)
                net.load_state_dict(build(5).state_dict())
            await net.rebind(coll, opt)
            return kept, bytes_of(module), net.steps_done

    zero, one = run_ranks(2, main, elastic=(1, 2))
    assert zero[1:] == one[1:]
    assert zero[1:] == ((one[0], 1) if failing == [0] else (bytes_of(build(5)), 0))


def noting(made: list[torch.optim.Optimizer], kind: Any) -> Any:
    """Return what makes optimizers for a pipelined one, and puts them into `made`."""

    def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        made.append(kind(params))
        return made[-1]

    return make


class Luck:
    """A setting that ranks do not compare by value."""

    fails = False

    def __repr__(self) -> str:
        return "Luck"


class SometimesFails(torch.optim.SGD):
    """Has changed one parameter when it raises, which one of its settings has it do."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.param_groups[0]["luck"] = Luck()

    def step(self, closure: Any = None) -> Any:
        if self.param_groups[0]["luck"].fails:
            self.param_groups[0]["params"][0].data.zero_()
            raise ArithmeticError("no luck")
        return super().step(closure)


async def sometimes_failing(
    number: int, coll: aiodist.Communicator
) -> tuple[DataParallel, PipelinedOptimizer, list[torch.optim.Optimizer]]:
    """Return a net, its optimizer, and the optimizers of its buckets."""
    made: list[torch.optim.Optimizer] = []
    net = await DataParallel.create(build(number), coll, PipelinedOptimizer, op="sum", first_bucket_bytes=1)
    opt = await PipelinedOptimizer.create(net, noting(made, partial(SometimesFails, lr=0.1, momentum=0.9)))
    return net, opt, made


@pytest.mark.parametrize("failing", [[0], [0, 1]])
def test_w3_what_a_pipelined_optimizer_made_in_part_is_taken_back(failing: list[int]) -> None:
    """One inner optimizer raises after it has changed a parameter; the others have stepped."""

    async def main(number: int) -> Any:
        async with aiodist.init(elastic=True) as coll:
            net, opt, made = await sometimes_failing(number, coll)
            for step in range(2):
                await net.step(partial(share, net, step, coll.rank, coll.size), opt)
            await opt.flush()
            made[1].param_groups[0]["luck"].fails = number in failing
            with pytest.raises(ArithmeticError) if number in failing else nullcontext():
                await net.step(partial(share, net, 2, coll.rank, coll.size), opt)
                await opt.flush()
            coll = await coll.shrink()
            await net.rebind(coll, opt)
            made[1].param_groups[0]["luck"].fails = False
            made_whole = net.steps_done
            for step in range(made_whole, 5):
                await net.step(partial(share, net, step, coll.rank, coll.size), opt)
            await opt.flush()
            return made_whole, bytes_of(net.module, opt), net.module

    (steps, zero, module), (also, one, _) = run_ranks(2, main, elastic=(1, 2))
    assert steps == also == (3 if failing == [0] else 2)
    assert zero == one
    Trial.assert_same(module, alone("sgd", 5), rtol=1e-9, atol=1e-11)


def test_w3_several_steps_that_were_made_in_part_are_all_taken_back() -> None:
    """On each rank two steps in a row fail in part, the second in another bucket; then they are made as new ones."""

    async def main(number: int) -> Any:
        async with aiodist.init(elastic=True) as coll:
            net, opt, made = await sometimes_failing(number, coll)
            await whole_step(net, opt, partial(share, net, 0, coll.rank, coll.size))
            for failing in (0, 1):
                made[failing].param_groups[0]["luck"].fails = True
                with pytest.raises(ArithmeticError):
                    await whole_step(net, opt, partial(share, net, 1, coll.rank, coll.size))
                made[failing].param_groups[0]["luck"].fails = False
            await net.rebind(coll := await coll.shrink(), opt)
            assert net.steps_done == 1
            for step in range(1, 5):
                made[0].param_groups[0]["luck"].fails = made[1].param_groups[0]["luck"].fails = False
                await whole_step(net, opt, partial(share, net, step, coll.rank, coll.size))
            return bytes_of(net.module), net.module

    (zero, module), (one, _) = run_ranks(2, main, elastic=(1, 2))
    assert zero == one
    Trial.assert_same(module, alone("sgd", 5), rtol=1e-9, atol=1e-11)


@pytest.mark.drawn(4)
@pytest.mark.parametrize("turns", range(0, 24, 2))
def test_w3_a_step_behind_a_load_is_taken_back_to_what_was_loaded(turns: int) -> None:
    """A step had failed in part before; rank 2 dies in the step after the load."""

    async def main(number: int) -> Any:
        made: list[torch.optim.Optimizer] = []
        make = noting(made, partial(SometimesFails, lr=0.1))
        async with aiodist.init(elastic=True) as coll:
            net = await DataParallel.create(
                build(number), coll, PipelinedOptimizer, op="sum", first_bucket_bytes=1, bucket_bytes=1
            )
            opt = await PipelinedOptimizer.create(net, make)
            made[1].param_groups[0]["luck"].fails = True
            with pytest.raises(ArithmeticError):
                await whole_step(net, opt, partial(share, net, 0, coll.rank, coll.size))
            made[1].param_groups[0]["luck"].fails = False
            net.load_state_dict(build(5).state_dict())
            step = whole_step(net, opt, partial(share, net, 0, coll.rank, coll.size))
            with suppress(PeerError):
                await (killed_after(turns, step) if number == 2 else step)
                await coll.barrier()
            await net.rebind(coll := await coll.shrink(), opt)
            return net.steps_done, net.module

    one, two, _ = run_ranks(3, main, elastic=(1, 3))
    expected = build(5)
    if one[0]:
        opt = torch.optim.SGD(expected.parameters(), lr=0.1)
        share(expected, 0, 0, 1).backward()
        opt.step()
    for steps, module in (one, two):
        assert steps == one[0]
        Trial.assert_same(module, expected, rtol=1e-9, atol=1e-11)


async def whole_step(net: DataParallel, opt: PipelinedOptimizer, forward: Any) -> None:
    await net.step(forward, opt)
    await opt.flush()


def test_w3_a_state_that_was_loaded_is_not_taken_back() -> None:
    """A pipelined update has failed in part; the program loads other parameters, and continues elsewhere."""

    async def main(number: int) -> Any:
        made: list[torch.optim.Optimizer] = []
        make = noting(made, partial(SometimesFails, lr=0.1))
        async with aiodist.init(elastic=True) as coll:
            net = await DataParallel.create(build(number), coll, PipelinedOptimizer, op="sum", first_bucket_bytes=1)
            opt = await PipelinedOptimizer.create(net, make)
            made[1].param_groups[0]["luck"].fails = True
            with pytest.raises(ArithmeticError):
                await whole_step(net, opt, partial(share, net, 0, coll.rank, coll.size))
            net.load_state_dict(build(5).state_dict())
            await net.rebind(await coll.dup(), opt)
            return bytes_of(net.module)

    zero, one = run_ranks(2, main, elastic=(1, 2))
    assert zero == one == bytes_of(build(5))


def test_w3_what_an_update_has_changed_is_taken_back_to_the_bit() -> None:
    """State of float32 for parameters of 16 bits, and the scale of a scaler."""

    class Wide(SometimesFails):
        def step(self, closure: Any = None) -> Any:
            for p in self.param_groups[0]["params"]:
                self.state[p].setdefault("sum", torch.zeros(p.shape)).add_(p.grad.float() / 3)
                p.data.sub_(p.grad)
            if self.param_groups[0]["luck"].fails:
                raise ArithmeticError("no luck")
            return None

    async def main(number: int) -> Any:
        made: list[torch.optim.Optimizer] = []
        make = noting(made, partial(Wide, lr=0.1))
        async with aiodist.init(elastic=True) as coll:
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
            x = torch.ones(4, 5, dtype=torch.bfloat16)
            module = build(0).bfloat16()
            net = await DataParallel.create(module, coll, PipelinedOptimizer, first_bucket_bytes=1, scaler=scaler)
            opt = await PipelinedOptimizer.create(net, make)
            await net.step(lambda: net(x).square().sum(), opt)
            await opt.flush()
            before = bytes_of(module, scaler), [each.state_dict()["state"] for each in copy.deepcopy(made)]
            made[1].param_groups[0]["luck"].fails = True
            with pytest.raises(ArithmeticError):
                await whole_step(net, opt, lambda: net(x).square().sum())
            changed = bytes_of(module, scaler)
            await net.rebind(await coll.dup(), opt)
            after = bytes_of(module, scaler), [each.state_dict()["state"] for each in made]
            assert changed != before[0] == after[0]
            if number == 0:  # the other gets what this one has, by torch's way of loading
                torch.testing.assert_close(after[1], before[1], rtol=0, atol=0)

    run_ranks(2, main, elastic=(1, 2))


def test_w3_an_optimizer_for_which_buckets_are_kept_is_asked_for() -> None:
    async def main(number: int) -> None:
        async with aiodist.init(elastic=True) as coll:
            for kind in (torch.optim.SGD, int):
                with pytest.raises(TypeError, match="a class stands for a driver that is made next"):
                    await DataParallel.create(build(0), coll, kind)  # type: ignore[arg-type]
            net = await DataParallel.create(build(0), coll)
            opt = await PipelinedOptimizer.create(net, partial(torch.optim.SGD, lr=0.1))
            with pytest.raises(ValueError, match="rebind without PipelinedOptimizer, which keeps the buckets"):
                await net.rebind(await coll.dup())
            opt.close()
            await net.rebind(await coll.dup())

    run_ranks(2, main, elastic=(1, 2))


@pytest.mark.ranks(1, 3)
async def test_w3_any_other_communicator_will_do(coll: Communicator) -> None:
    net = await DataParallel.create(build(coll.rank), coll, op="sum")
    opt, _ = optimizers("sgd", net.module)
    twin = await coll.dup()
    for step in range(4):
        if step == 2:
            await net.rebind(twin, opt)
        assert net.steps_done == step
        await net.step(partial(share, net, step, coll.rank, coll.size), opt)
    expected = build(0)
    stepped(expected, optimizers("sgd", expected)[0], steps=range(4))
    Trial.assert_same(net.module, expected, rtol=1e-9, atol=1e-11)
    await net.aclose()
