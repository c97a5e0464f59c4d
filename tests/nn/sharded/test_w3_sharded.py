"""W3: a sharded optimizer goes back to the last checkpoint when a rank has died, with its shard."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import aiodist
from aiodist import PeerError
from aiodist.nn import DataParallel, ShardedOptimizer
from aiodist.testing import run_ranks
from tests.support.elastic import build, bytes_of, share, survivors

pytestmark = pytest.mark.timeout(100)

STEPS, EVERY, GROWS_AT = 24, 4, 16

MAKERS: dict[str, Any] = {
    "adam": partial(torch.optim.Adam, lr=0.03),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.1),  # state before its first step
}


def halving(opt: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(opt, 5, gamma=0.5)


async def train(number: int, kind: str, folder: Path, clip_norm: float | None) -> Any:
    module = build(number)
    net: DataParallel | None = None
    async with aiodist.init(elastic=True) as coll:
        while True:
            try:
                if net is None:
                    net = await DataParallel.create(
                        module, coll, ShardedOptimizer, op="sum", bucket_bytes=1, first_bucket_bytes=1
                    )
                    opt = await ShardedOptimizer.create(net, MAKERS[kind])
                    scheduler = halving(opt.optimizer)
                    net.configure(scheduler=scheduler, clip_norm=clip_norm)
                await net.rebind(coll, opt)
                first = (await aiodist.load(folder, net, opt, scheduler)).metadata if opt.lost else 0
                for step in range(first, STEPS):
                    if step % EVERY == 0:
                        await aiodist.save(folder, net, opt, scheduler, metadata=step, keep_last=2)
                    if step == GROWS_AT and coll.size < 4:
                        coll = await coll.grow(4 - coll.size)
                        break
                    await net.step(partial(share, net, step, coll.rank, coll.size), opt)
                else:
                    await opt.flush()
                    await coll.barrier()
                    return bytes_of(module, scheduler), module
            except PeerError:
                coll = await coll.shrink()


@pytest.mark.thorough
@pytest.mark.drawn(4)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize(("kind", "clip_norm"), [("adam", None), ("adagrad", 0.3)])
def test_w3_shards_go_on_from_the_last_checkpoint(
    kind: str, clip_norm: float | None, size: int, seed: int, tmp_path: Path
) -> None:
    """One or two ranks are killed at any moment, also while the others save or load; then others join."""
    work = partial(train, kind=kind, folder=tmp_path / "run", clip_norm=clip_norm)
    said = survivors(size, work, seed, within=2500, drawn=f"{kind} {size} {seed}", dead=size - 2)
    held, modules = zip(*said, strict=True)
    assert len(said) >= 2
    assert all(each == held[0] for each in held), "bit by bit the same on all ranks"
    expected = build(int(modules[0].seen))  # of the rank that gave the others its parameters at first
    opt = MAKERS[kind](expected.parameters())
    scheduler = halving(opt)
    for step in range(STEPS):
        opt.zero_grad()
        share(expected, step, 0, 1).backward()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(expected.parameters(), clip_norm)
        opt.step()
        scheduler.step()
    for p, alone in zip(modules[0].parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p, alone, rtol=1e-9, atol=1e-11)


def test_w3_no_step_is_made_with_shards_that_are_lost() -> None:
    async def main(number: int) -> None:
        async with aiodist.init(elastic=True) as coll:
            net = await DataParallel.create(build(0), coll, ShardedOptimizer)
            opt = await ShardedOptimizer.create(net, MAKERS["adam"])
            assert not opt.lost
            await net.step(partial(share, net, 0, coll.rank, coll.size), opt)
            coll = await coll.shrink()
            await net.rebind(coll, opt)
            assert opt.lost
            with pytest.raises(RuntimeError, match=r"await aiodist\.load\(folder, net, opt\)"):
                await net.step(partial(share, net, 1, coll.rank, coll.size), opt)

    run_ranks(2, main, elastic=(1, 2))
