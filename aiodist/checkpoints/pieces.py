"""Tensors of which each rank owns a piece, as a checkpoint writes them and reads them back."""

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
class Stateful(Protocol):
    """A loader, an optimizer, a scheduler: what gives and takes its state."""

    def state_dict(self) -> Any:  # noqa: ANN401
        """Return all of its state."""

    def load_state_dict(self, state: Any, /) -> object:  # noqa: ANN401
        """Take that state."""


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
