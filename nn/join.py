"""After uneven data, or deaths: the state of a rank that trained longest, on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch import _foreach_copy_ as copy_each
from torch.utils._pytree import tree_map_only

from aiodist.communicator import Communicator
from aiodist.nn.layout import named_state
from aiodist.nn.synchronize import check_dense, distinct, share, synchronize_parameters
from aiodist.types import Stateful


async def share_longest(
    coll: Communicator, made: tuple[int, int], module: nn.Module, optimizers: Sequence[Stateful]
) -> int:
    """Give all ranks the parameters and the optimizers' state of the first rank that `made` most passes.

    `made` are passes, and steps of the optimizer; returns how many steps that rank has made.

    Buffers stay each rank's own. Collective; costs one small exchange when all made as many. Else every rank must give
    as many `optimizers`: all raise `ValueError` where that is not so, and nothing is shared.
    """
    told = await coll.allgather_object((*made, len(optimizers)))
    passes = [count for count, _, _ in told]
    if len(set(passes)) == 1:
        return made[1]
    if len({number for _, _, number in told}) > 1:
        known = ", ".join(f"rank {rank}: {number}" for rank, (_, _, number) in enumerate(told))
        raise ValueError(
            f"ranks know of different numbers of optimizers ({known}), since a rank that made no step knows of none: "
            "give them to every rank, `net.join(opt)`"
        )
    root = passes.index(max(passes))
    await synchronize_parameters(module, coll, root=root, buffers=False)
    states = await _states_of(coll, root, optimizers)
    if coll.rank != root:
        for optimizer, state in zip(optimizers, states, strict=True):
            optimizer.load_state_dict(state)
    steps: int = told[root][1]
    return steps


async def share_furthest(coll: Communicator, module: nn.Module, states: Sequence[Stateful], made: int | None) -> int:
    """Give all ranks parameters, buffers and `states` of the first rank that has `made` most steps; return how many.

    None: a rank is in the midst of one, and gives nothing. Raises RuntimeError on all where all are. In an elastic
    world what comes is written only once all of it is here, since `root` may die meanwhile; then nothing suspends.
    """
    told: list[int | None] = await coll.allgather_object(made)
    most = max((count for count in told if count is not None), default=None)
    if most is None:
        raise RuntimeError("each rank's optimizer has raised in the midst of a step: load the last checkpoint first")
    root = told.index(most)
    named = named_state(module)
    check_dense("tensor", named)
    mine = [distinct(t.detach()) for _, t in named]
    elastic = coll.parts.registry.elastic is not None and coll.rank != root
    come = [torch.empty_like(t) for t in mine] if elastic else mine
    await share(come, coll, "root", root)
    came = await _states_of(coll, root, states) if states else []
    coll.parts.dispatcher.check_usable()  # given up meanwhile: nothing is written
    if coll.rank != root:
        if elastic:
            copy_each(mine, come)
        for each, state in zip(states, came, strict=True):
            each.load_state_dict(state)
    return most


async def _states_of(coll: Communicator, root: int, owners: Sequence[Stateful]) -> list[Any]:
    mine = [each.state_dict() for each in owners if coll.rank == root]
    on_host = tree_map_only(Tensor, Tensor.cpu, mine)  # each rank has devices of its own, to which loading takes it
    states: list[Any] = await coll.broadcast_object(on_host, root=root)
    return states
