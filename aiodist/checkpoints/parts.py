"""What a checkpoint takes of a net, optimizers and the like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from aiodist.checkpoints.blocks import Cut, Cuts
from aiodist.checkpoints.pieces import InPieces, OfRanks
from aiodist.checkpoints.safetensors_file import TensorEntry, dtype_name
from aiodist.checkpoints.shares import share
from aiodist.checkpoints.values import Json, encode
from aiodist.communicator import Communicator
from aiodist.handles import Handle
from aiodist.types import Stateful

Part = Stateful | InPieces | OfRanks


@runtime_checkable
class Net(Protocol):
    """What has a compute thread, such as `nn.DataParallel`; a part is looked at there, between two steps."""

    @property
    def coll(self) -> Communicator:
        """Of the ranks that have the same parameters."""
        ...

    @property
    def compressor(self) -> Stateful | None:
        """What keeps residuals of this rank's own, if anything does."""
        ...

    def run(self, fn: Any, /, *args: Any) -> Handle[Any]:  # noqa: ANN401
        """Return the handle of `fn(*args)`, which runs on the thread behind what was asked earlier."""
        ...


@runtime_checkable
class Delayed(Protocol):
    """An optimizer with updates or averages that are made later: `nn.PipelinedOptimizer`, `nn.LocalSGD`."""

    def make_updates(self) -> None:
        """Make all that are left; called on the compute thread, on all ranks."""
        ...


def name_of(number: int) -> str:
    """Return what a checkpoint calls a part: it is what the names of its tensors begin with."""
    return "net" if number == 0 else f"part{number}"


def pieces_name(number: int, key: str) -> str:
    """Return what a checkpoint calls a tensor of part `number` that is kept in pieces."""
    return f"{name_of(number)}/pieces/{key}"


def check_parts(parts: Sequence[object]) -> None:
    """Raise `TypeError` for what has no state."""
    for number, part in enumerate(parts):
        if not isinstance(part, Stateful | InPieces | OfRanks):
            raise TypeError(f"{name_of(number)} is {type(part).__name__}: expected what has a state_dict, or pieces")


@dataclass
class Taken:
    """What one rank has of a checkpoint, in memory that may still change."""

    alike: dict[str, Tensor] = field(default_factory=dict)
    """Tensors that all ranks have the same."""
    blocks: list[tuple[str, Cut, Tensor]] = field(default_factory=list)
    """Blocks of tensors, each of which some ranks have the same."""
    mine: list[tuple[TensorEntry, Tensor]] = field(default_factory=list)
    """Pieces and tensors that no other rank has."""
    parts: list[Json] = field(default_factory=list)
    own: list[Any] = field(default_factory=list)
    """Of each part what this rank alone has; None of most."""

    def take(self, parts: Sequence[Part]) -> None:
        """Look at the state of `parts`. Raises what these raise, `TypeError` for what cannot be written."""
        for part in parts:
            if isinstance(part, Delayed):
                part.make_updates()
        cuts = Cuts.of(parts[0])
        for number, part in enumerate(parts):
            own = None
            if isinstance(part, InPieces):
                self._take_pieces(part, number)
            elif isinstance(part, OfRanks):
                alike, own = part.states()
                self.parts.append({"state": encode(alike, name_of(number), self.alike)})
            else:
                self._take_state(part, name_of(number), cuts)
            self.own.append(own)

    def _take_pieces(self, part: InPieces, number: int) -> None:
        pieces, rest = part.pieces()
        for key, piece in pieces.items():
            called = pieces_name(number, key)
            dtype = dtype_name(piece.tensor.dtype, called)
            entry = TensorEntry(called, dtype, tuple(piece.shape), piece.start, piece.tensor.numel())
            self.mine.append((entry, piece.tensor.detach().reshape(-1)))
        self.parts.append({"rest": encode(rest, f"{name_of(number)}/rest", self.alike)})

    def _take_state(self, part: Stateful, name: str, cuts: Cuts) -> None:
        state = part.state_dict()
        found: dict[str, Tensor] = {}
        said = {"state": encode(state, name, found)}
        if isinstance(getattr(state, "_metadata", None), dict):  # versions of the modules
            said["versions"] = encode(state._metadata, f"{name}/versions", found)
        for path, cut in cuts.paths(part, state).items():
            called = "/".join([name, *map(str, path)])
            self.blocks.append((called, cut, found.pop(called)))
        self.alike |= found
        self.parts.append(said)

    def keep_own(self, tensors: dict[str, Tensor]) -> None:
        """Add tensors of this rank, whose names are its own."""
        for name, t in tensors.items():
            entry = TensorEntry(name, dtype_name(t.dtype, name), tuple(t.shape), 0, t.numel())
            self.mine.append((entry, t.detach().reshape(-1)))

    def structure(self) -> Json:
        """Return what has to be the same on all ranks."""
        tensors = {name: [str(t.dtype), list(t.shape)] for name, t in self.alike.items()}
        return {
            "tensors": tensors | {name: [str(t.dtype), list(cut.shape)] for name, cut, t in self.blocks},
            "parts": self.parts,
        }

    def mine_to_write(self, place: tuple[int, int], replica: tuple[int, int]) -> list[tuple[TensorEntry, Tensor]]:
        """Return what this rank writes: each entry with its elements, flat.

        `place` are rank and size among all, `replica` among those that have the same blocks.
        """
        whole = [(name, None, t) for name, t in self.alike.items()]
        return [
            *_shared(whole, *place),
            *_shared([(name, cut, t) for name, cut, t in self.blocks], *replica),
            *self.mine,
        ]


def _shared(
    tensors: Sequence[tuple[str, Cut | None, Tensor]], rank: int, size: int
) -> list[tuple[TensorEntry, Tensor]]:
    found = []
    for number, start, stop in share([(t.numel(), t.element_size()) for _, _, t in tensors], rank, size):
        name, cut, t = tensors[number]
        shape = tuple(t.shape) if cut is None else cut.shape
        block = None if cut is None else cut.block
        entry = TensorEntry(name, dtype_name(t.dtype, name), shape, start, stop - start, block)
        found.append((entry, t.reshape(-1)[start:stop]))
    return found
