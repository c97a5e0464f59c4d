"""After uneven data: the state of a rank that trained longest, on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from aiodist.communicator import Communicator
from aiodist.nn.synchronize import synchronize_parameters
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
    mine = [optimizer.state_dict() for optimizer in optimizers if coll.rank == root]
    on_host = tree_map_only(Tensor, Tensor.cpu, mine)  # each rank has devices of its own, to which loading takes it
    states = await coll.broadcast_object(on_host, root=root)
    if coll.rank != root:
        for optimizer, state in zip(optimizers, states, strict=True):
            optimizer.load_state_dict(state)
    steps: int = told[root][1]
    return steps
