"""`DataParallel.join`: ranks without more data take part in the passes of the other ranks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

from torch.optim import Optimizer

from aiodist.control import disagreement
from aiodist.errors import AiodistError, MismatchError, RemoteError
from aiodist.handles import Operation
from aiodist.nn.binding import Binding
from aiodist.nn.compute import Compute, called
from aiodist.nn.drivers import Driver, shared_states
from aiodist.nn.joiners import check_kinds
from aiodist.nn.layout import named_state
from aiodist.nn.synchronize import share_state
from aiodist.types import Stateful
from aiodist.world.agree import agree


@asynccontextmanager
async def join(binding: Binding, optimizers: Sequence[Stateful]) -> AsyncIterator[None]:
    """Run a block of uneven steps, then share the state of the first rank that made most passes.

    `optimizers` are those that the user gave.
    """
    binding.check()
    if wrong := [type(each).__name__ for each in optimizers if not isinstance(each, Stateful)]:
        raise TypeError(f"join({', '.join(wrong)}): expected optimizers, as `net.join(opt)`")
    shared_states("join", optimizers, binding.settings.per_rank)
    reducer, compute = binding.reducer, binding.compute
    finished = compute.submit(compute.finish)  # a failed step of this rank may not have ended yet
    try:
        await finished
    except asyncio.CancelledError as error:  # other ranks in the block learn of an error only there
        finished.add_done_callback(partial(_leave, binding, error, 1))
        raise
    before = reducer.statistics.passes
    reducer.consensus.joining += 1
    try:
        yield
        last = binding.optimizer or reducer.kept_by  # the latter if this rank made no step
        drivers = optimizers or ((last,) if isinstance(last, Optimizer | Driver) else ())
        for driver in drivers:
            if isinstance(driver, Driver):
                await driver.flush()
        if reducer.devices:
            await compute.submit(compute.finish)
        mine = reducer.statistics.passes - before
        active = True
        while active:
            reduction = await compute.submit(compute.bring_nothing)
            await reduction.finished
            if isinstance(reducer.owner, Driver) and reduction.participants:
                await compute.submit(reducer.owner.follow, reduction)
            active = reduction.participants > 0
    except BaseException as error:
        _leave(binding, error, 0)
        raise
    reducer.consensus.joining -= 1
    if isinstance(reducer.owner, Driver):  # this rank has made the steps of the others
        await reducer.owner.flush()
        return
    states = shared_states("join", drivers, binding.settings.per_rank)
    others = [each for each in binding.settings.stateful if all(each is not given for given in drivers)]
    reducer.steps.alike(await _share_longest(binding, mine, states, others))


def _leave(binding: Binding, error: BaseException, entered: int, _: object = None) -> None:
    """Take part in the passes of the others until they have left too; `entered` is 1 if `joining` lacks this block."""
    binding.reducer.consensus.joining += entered
    Operation.of(binding.compute.submit(_see_out, binding.compute, error)).mark_retrieved()  # no code waits for it


@called("net.join")
def _see_out(compute: Compute, error: BaseException) -> None:
    """Report to the others that this rank has left the block with `error`; follow them until they leave."""
    reducer = compute.reducer
    try:
        last = reducer.last
        if not isinstance(error, RemoteError) and (last is None or last.error is not error):
            compute.bring_nothing(error)
        while _keep_up(compute):
            pass
    finally:
        reducer.consensus.joining -= 1


def _keep_up(compute: Compute) -> bool:
    """Take part in a pass of the others; return True if they may make another."""
    owner = compute.reducer.owner
    try:
        this = compute.bring_nothing()
        compute.wait(this.finished)
        if isinstance(owner, Driver) and this.participants:
            owner.follow(this)
    except (RemoteError, MismatchError):
        return compute.reducer.consensus.works
    except (AiodistError, RuntimeError):  # the communicator is aborted, or the loop is closed
        return False
    return this.participants > 0


async def _share_longest(
    binding: Binding, passes: int, optimizers: Sequence[Stateful], settings: Sequence[Stateful]
) -> int:
    """Give all ranks the parameters and states of the first rank that made most `passes`; return its number of steps.

    Buffers stay each rank's own. All ranks call it. After different numbers of passes every rank must give as many
    `optimizers`, and `settings` of the same kinds: otherwise all raise `MismatchError`, and nothing is shared.
    """
    kinds = [type(each).__name__ for each in settings]
    made = binding.reducer.steps.made
    of_ranks = await agree(binding.coll, "net.join()", (passes, made, len(optimizers), kinds))
    counts = [count for count, *_ in of_ranks]
    if len(set(counts)) == 1:
        return made
    check_kinds([theirs for *_, theirs in of_ranks])
    if len({number for _, _, number, _ in of_ranks}) > 1:
        text = disagreement("the number of optimizers", [str(number) for _, _, number, _ in of_ranks])
        text += "; a rank without a step knows none: give them to every rank, `net.join(opt)`"
        raise MismatchError(text, rank=binding.coll.rank, comm=binding.coll.name)
    root = counts.index(max(counts))
    await share_state(binding.coll, root, named_state(binding.shared, buffers=False), [*optimizers, *settings])
    steps: int = of_ranks[root][1]
    return steps
