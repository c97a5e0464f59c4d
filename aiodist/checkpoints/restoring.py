"""What was read of a checkpoint, and how it is restored to a net, optimizers and the like."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from aiodist.checkpoints.blocks import Cuts
from aiodist.checkpoints.manifest import MANIFEST
from aiodist.checkpoints.own import OwnState
from aiodist.checkpoints.parts import Part, name_of, pieces_name
from aiodist.checkpoints.pieces import InPieces, OfRanks, Piece
from aiodist.checkpoints.reading import Reader
from aiodist.checkpoints.values import Json, decode
from aiodist.errors import CheckpointDamaged


class PartsDiffer(ValueError):
    """The checkpoint is sound, but of something else."""


@dataclass
class Loaded:
    """What was read, for one rank: nothing of it is in use yet."""

    states: list[Any]
    """Of each part, or the rest of one in pieces."""
    pieces: list[dict[str, Tensor]]
    extra: Any
    own: OwnState

    @classmethod
    def read(cls, reader: Reader, targets: Targets, rank: int, size: int) -> Loaded:
        """Read what `rank` of `size` needs, and check what no rank does.

        Raises `CheckpointDamaged`, and `ValueError` where the checkpoint is of other parts.
        """
        try:
            return cls._read(reader, targets, rank, size)
        except (PartsDiffer, CheckpointDamaged):
            raise
        except (ValueError, KeyError, RecursionError) as error:  # a manifest that nobody here wrote
            raise CheckpointDamaged(f"{reader.folder / MANIFEST}: {error}") from error

    @classmethod
    def _read(cls, reader: Reader, targets: Targets, rank: int, size: int) -> Loaded:
        said = reader.manifest.parts
        _check_number(reader, "parts", len(said), len(targets.parts))
        own = OwnState.read(reader.manifest.own, reader.tensor, rank, size)
        _check_number(reader, "objects of a rank's own", own.count(), len(targets.own))
        cuts = Cuts.of(targets.parts[0])
        states, pieces = [], []
        for number, part in enumerate(targets.parts):
            states.append(_state(number, part, said[number], cuts, reader))
            wanted = targets.wanted[number].items()
            pieces.append({key: _piece(reader, pieces_name(number, key), piece) for key, piece in wanted})
        extra = decode(reader.manifest.extra, reader.tensor)
        reader.check_rest(rank, size)
        return cls(states, pieces, extra, own)

    def restore(self, targets: Targets) -> None:
        """Have all but loaders go on from it; where they are computed."""
        each = zip(targets.parts, targets.wanted, self.states, self.pieces, strict=True)
        for number, (part, wanted, state, pieces) in enumerate(each):
            if isinstance(part, InPieces):
                for key, target in wanted.items():
                    target.tensor.detach().copy_(pieces[key].view(target.tensor.shape))
                part.load_rest(state)
            elif isinstance(part, OfRanks):
                part.load_states(state, self.own.of_part(number))
            else:
                part.load_state_dict(state)
                for opt, of_opt in _optimizers(part, state):
                    _keep_dtypes(opt, of_opt)
        self.own.restore(targets.parts[0], targets.own)


def _optimizers(part: object, state: Any) -> Iterable[tuple[Optimizer, dict[str, Any]]]:  # noqa: ANN401
    """Return the optimizers of torch that `part` is, or is made of (`nn.PipelinedOptimizer`), each with its state."""
    if isinstance(part, Optimizer):
        return [(part, state)]
    optimizers = getattr(part, "optimizers", None)
    return zip(optimizers, state, strict=True) if isinstance(optimizers, list) and isinstance(state, list) else ()


def _keep_dtypes(opt: Optimizer, state: dict[str, Any]) -> None:
    """Have the state in the dtypes in which it was saved: torch has made them those of the parameters."""
    parameters = [p for group in opt.param_groups for p in group["params"]]
    for index, of_parameter in state["state"].items():
        loaded = opt.state[parameters[index]]
        for key, value in of_parameter.items():
            if isinstance(value, Tensor) and loaded[key].dtype is not value.dtype:
                loaded[key] = value.to(loaded[key].device)


@dataclass
class Targets:
    """What takes the state."""

    parts: Sequence[Part]
    own: Sequence[object]
    wanted: Sequence[dict[str, Piece]] = ()
    """Of each part in pieces those that this rank has now; none of others."""


def _check_number(reader: Reader, what: str, seen: int, expected: int) -> None:
    if seen != expected:
        raise PartsDiffer(f"{reader.folder} has {seen} {what}: expected {expected}, which are to be loaded")


def _state(number: int, part: Part, said: Json, cuts: Cuts, reader: Reader) -> Any:  # noqa: ANN401
    if not isinstance(said, dict) or len(said.keys() & {"state", "rest"}) != 1:
        raise ValueError(f"{name_of(number)} is {str(said)[:40]}: expected a state, or the rest of one")
    if isinstance(part, InPieces) is not ("rest" in said):
        kinds = ("in pieces", "whole") if "rest" in said else ("whole", "in pieces")
        raise PartsDiffer(f"{reader.folder}: {name_of(number)} was saved {kinds[0]}, and is {kinds[1]} here")
    if isinstance(part, InPieces):
        return decode(said["rest"], reader.tensor)
    state = decode(said["state"], reader.tensor)
    if "versions" in said:
        state = OrderedDict(state)
        state._metadata = decode(said["versions"], reader.tensor)  # type: ignore[attr-defined]
    return cuts.cut(part, state)


def _piece(reader: Reader, name: str, piece: Piece) -> Tensor:
    pieces = reader.manifest.tensors.get(name)
    if pieces is None or pieces[0].entry.shape != tuple(piece.shape):
        seen = "is not there" if pieces is None else f"has shape {list(pieces[0].entry.shape)}"
        raise PartsDiffer(f"{reader.folder}: {name!r} {seen}: expected shape {list(piece.shape)}")
    return reader.part(name, piece.start, piece.tensor.numel())
