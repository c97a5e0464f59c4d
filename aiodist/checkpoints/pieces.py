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


@runtime_checkable
class InPieces(Protocol):
    """An object of whose tensors each rank owns pieces, such as a sharded optimizer; others have `state_dict`.

    All three are called on the compute thread of the net that is saved or loaded with it, when no update is pending;
    `pieces` on the loop's thread where that has nothing to wait for.
    """

    def pieces(self) -> tuple[dict[str, Piece], dict[str, Any]]:
        """Return this rank's pieces by the name of their tensor, and the rest: the same values on every rank.

        The pieces of all ranks fill each tensor once. A checkpoint copies the tensors before the next step.
        """
        ...

    def wanted(self) -> dict[str, Piece]:
        """Return the pieces that this rank owns now, by name; loading fills their tensors."""
        ...

    def load_rest(self, rest: dict[str, Any], /) -> None:
        """Take the rest, which `pieces` gave; called after the wanted pieces were filled."""
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
