"""After uneven data: the state of a rank that trained longest, on all ranks (N11)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import nn

from aiodist.communicator import Communicator
from aiodist.nn.synchronize import synchronize_parameters

__all__ = ["Stateful", "share_longest"]


class Stateful(Protocol):
    """An optimizer, as far as its state is concerned."""

    def state_dict(self) -> Any:  # noqa: ANN401
        """Return all of its state."""

    def load_state_dict(self, state: Any, /) -> object:  # noqa: ANN401
        """Take that state."""


async def share_longest(coll: Communicator, steps: int, module: nn.Module, optimizers: Sequence[Stateful]) -> None:
    """Give all ranks the parameters and the optimizers' state of the first rank that made most `steps`.

    Buffers stay each rank's own. Collective; costs one small exchange when all made as many.
    """
    made = await coll.allgather_object(steps)
    if len(set(made)) == 1:
        return
    root = made.index(max(made))
    await synchronize_parameters(module, coll, root=root, buffers=False)
    mine = [optimizer.state_dict() for optimizer in optimizers]
    states = await coll.broadcast_object(mine, root=root)
    if len(states) != len(optimizers):
        raise ValueError(f"rank {root} shares the state of {len(states)} optimizers, this rank has {len(optimizers)}")
    if coll.rank != root:
        for optimizer, state in zip(optimizers, states, strict=True):
            optimizer.load_state_dict(state)
