"""Parts of which ranks have different things: what a checkpoint asks of them, and gives back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements `start` … `start + tensor.numel()` of a tensor of `shape`, made flat: what one rank owns of it."""

    tensor: Tensor
    start: int
    shape: tuple[int, ...]
    dims: tuple[int, ...] | None = None
    """The state has the tensor with its dimensions permuted so; None is as they are."""
    number: bool = False
    """The state has a plain number, of which this is the only element."""


@runtime_checkable
class InPieces(Protocol):
    """An object of whose tensors each rank owns pieces, such as a sharded optimizer.

    `pieces` and `load_state_dict` are called on the compute thread of the net that is saved or loaded with it, when no
    update is pending; on the loop's thread where that has nothing to wait for.
    """

    def pieces(self) -> Any:  # noqa: ANN401
        """Return the state that one process would have, with a `Piece` in the place of each tensor that is divided.

        All else is the same on every rank; a rank that owns nothing of a tensor has an empty piece. The pieces of all
        ranks fill each tensor once; none has 0 elements. A checkpoint copies the tensors before the next step.
        """
        ...

    def divided(self, state: Any, /) -> Any:  # noqa: ANN401
        """Return what this rank takes of a whole `state`, whose tensors may be `StoredTensor`, for `load_state_dict`.

        Called on the thread for files; nothing is changed. Raises `ValueError` where the state is of something else.
        """
        ...

    def load_state_dict(self, state: Any, /) -> object:  # noqa: ANN401
        """Take what `divided` returned."""
        ...


@runtime_checkable
class Redivided(Protocol):
    """What each rank has a place of its own in, for any number of ranks, such as a `data.ShardQueue`."""

    def state_dict(self) -> Any:  # noqa: ANN401
        """Return the state of this rank."""

    def load_state_dicts(self, states: list[Any], /) -> object:
        """Take this rank's part of the `states` of all ranks that saved them."""


@runtime_checkable
class OfRanks(Protocol):
    """A part with a state of each rank's own beside what all ranks have alike, such as `nn.LocalSGD`.

    Both are called where those of `InPieces` are.
    """

    def states(self) -> tuple[Any, Any]:
        """Return what all ranks have alike, and this rank's own: None where it has none."""
        ...

    def load_states(self, alike: Any, own: Any, /) -> None:  # noqa: ANN401
        """Take what `states` gave; `own` is None too where another number of ranks saved it."""
        ...
