"""What a checkpoint takes of a net, optimizers and the like, and how it gives them what was read."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch import Tensor, nn

from aiodist.checkpoints.blocks import Cut, Cuts
from aiodist.checkpoints.generators import Generator, Stateful, generator_state, process_state, set_generator_state
from aiodist.checkpoints.generators import set_process_state
from aiodist.checkpoints.pieces import InPieces
from aiodist.checkpoints.reading import Reader
from aiodist.checkpoints.safetensors_file import Entry, dtype_name
from aiodist.checkpoints.shares import share
from aiodist.checkpoints.values import Json, decode, encode
from aiodist.communicator import Communicator
from aiodist.handles import Handle

T = TypeVar("T")
Part = Stateful | InPieces


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
class Pending(Protocol):
    """An optimizer whose updates are made later, such as `nn.PipelinedOptimizer`."""

    def make_updates(self) -> None:
        """Make all that are left; called on the compute thread."""
        ...


def name_of(number: int) -> str:
    """Return what a checkpoint calls a part: it is what the names of its tensors begin with."""
    return "net" if number == 0 else f"part{number}"


def check_parts(parts: Sequence[object], own: Sequence[object]) -> None:
    """Raise `TypeError` for what has no state."""
    for number, part in enumerate(parts):
        if not isinstance(part, Stateful | InPieces):
            raise TypeError(f"{name_of(number)} is {type(part).__name__}: expected what has a state_dict, or pieces")
    for number, each in enumerate(own):
        if not isinstance(each, Stateful | Generator):
            raise TypeError(f"own[{number}] is {type(each).__name__}: expected a generator, or what has a state_dict")


@dataclass
class Taken:
    """What one rank has of a checkpoint, in memory that may still change."""

    alike: dict[str, Tensor] = field(default_factory=dict)
    """Tensors that all ranks have the same."""
    blocks: list[tuple[str, Cut, Tensor]] = field(default_factory=list)
    """Blocks of tensors, each of which some ranks have the same."""
    mine: list[tuple[Entry, Tensor]] = field(default_factory=list)
    """Pieces and tensors that no other rank has."""
    parts: list[Json] = field(default_factory=list)

    def take(self, parts: Sequence[Part]) -> None:
        """Look at the state of `parts`. Raises what these raise, `TypeError` for what cannot be written."""
        for part in parts:
            if isinstance(part, Pending):
                part.make_updates()
        cuts = Cuts.of(parts[0])
        for number, part in enumerate(parts):
            if isinstance(part, InPieces):
                self._take_pieces(part, name_of(number))
            else:
                self._take_state(part, name_of(number), cuts)

    def _take_pieces(self, part: InPieces, name: str) -> None:
        pieces, rest = part.pieces()
        for key, piece in pieces.items():
            called = f"{name}/pieces/{key}"
            dtype = dtype_name(piece.tensor.dtype, called)
            entry = Entry(called, dtype, tuple(piece.shape), piece.start, piece.tensor.numel())
            self.mine.append((entry, piece.tensor.detach().reshape(-1)))
        self.parts.append({"rest": encode(rest, f"{name}/rest", self.alike)})

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
            entry = Entry(name, dtype_name(t.dtype, name), tuple(t.shape), 0, t.numel())
            self.mine.append((entry, t.detach().reshape(-1)))

    def structure(self) -> Json:
        """Return what has to be the same on all ranks."""
        tensors = {name: [str(t.dtype), list(t.shape)] for name, t in self.alike.items()}
        return {
            "tensors": tensors | {name: [str(t.dtype), list(cut.shape)] for name, cut, t in self.blocks},
            "parts": self.parts,
        }

    def mine_to_write(self, place: tuple[int, int], replica: tuple[int, int]) -> list[tuple[Entry, Tensor]]:
        """Return what this rank writes: each entry with its elements, flat.

        `place` are rank and size among all, `replica` among those that have the same blocks.
        """
        whole = [(name, None, t) for name, t in self.alike.items()]
        return [
            *_shared(whole, *place),
            *_shared([(name, cut, t) for name, cut, t in self.blocks], *replica),
            *self.mine,
        ]


def _shared(tensors: Sequence[tuple[str, Cut | None, Tensor]], rank: int, size: int) -> list[tuple[Entry, Tensor]]:
    found = []
    for number, start, stop in share([(t.numel(), t.element_size()) for _, _, t in tensors], rank, size):
        name, cut, t = tensors[number]
        shape = tuple(t.shape) if cut is None else cut.shape
        block = None if cut is None else cut.block
        entry = Entry(name, dtype_name(t.dtype, name), shape, start, stop - start, block)
        found.append((entry, t.reshape(-1)[start:stop]))
    return found


# --- what each rank has of its own ----------------------------------------------------------------------------------------


def own_name(rank: int) -> str:
    """Return what the names of tensors of `rank`'s own begin with."""
    return f"rank{rank}"


def own_loaders(own: Sequence[object], rank: int) -> tuple[list[Json], dict[str, Tensor]]:
    """Return the state of loaders and the like, on the loop's thread, with copies of its tensors; None for generators."""
    tensors: dict[str, Tensor] = {}
    said = [
        None if isinstance(each, Generator) else encode(each.state_dict(), f"{own_name(rank)}/own/{i}", tensors)  # type: ignore[attr-defined]
        for i, each in enumerate(own)
    ]
    return said, {name: t.clone() for name, t in tensors.items()}


def own_states(net: object, own: Sequence[object], rank: int, tensors: dict[str, Tensor]) -> dict[str, Json]:
    """Return what changes with the steps: random states, residuals. Where these are computed, after the last step."""
    name = own_name(rank)
    said = {"random": encode(process_state(), f"{name}/random", tensors)}
    if isinstance(net, Net) and net.compressor is not None:
        said["compressor"] = encode(net.compressor.state_dict(), f"{name}/compressor", tensors)
    said["generators"] = [
        encode(generator_state(each), f"{name}/generators/{i}", tensors) if isinstance(each, Generator) else None
        for i, each in enumerate(own)
    ]
    return said


# --- giving back --------------------------------------------------------------------------------------------------------


@dataclass
class Given:
    """What was read, for one rank: nothing of it is in use yet."""

    states: list[Any]
    """Of each part, or the rest of one in pieces."""
    pieces: list[dict[str, Tensor]]
    extra: Any
    own: dict[str, Any] | None
    """What this rank had of its own; None where another number of ranks wrote the checkpoint."""
    loaders: list[list[Any]]
    """The states of loaders and the like, of each rank that wrote it."""

    @classmethod
    def read(
        cls, reader: Reader, parts: Sequence[Part], wanted: Sequence[dict[str, Any]], place: tuple[int, int]
    ) -> Given:
        """Read what rank `place[0]` of `place[1]` needs.

        Raises `CheckpointDamaged`, and `ValueError` where the checkpoint is of other parts.
        """
        manifest = reader.manifest
        if len(manifest.parts) != len(parts):
            raise PartsDiffer(
                f"{reader.folder} has {len(manifest.parts)} parts: expected {len(parts)}, as they were saved"
            )
        cuts = Cuts.of(parts[0])
        states, pieces = [], []
        for number, (part, said) in enumerate(zip(parts, manifest.parts, strict=True)):
            split = isinstance(part, InPieces)
            if not isinstance(said, dict) or split is not ("rest" in said):
                kinds = ("in pieces", "whole") if split else ("whole", "in pieces")
                raise PartsDiffer(f"{reader.folder}: {name_of(number)} was saved {kinds[1]}, and is {kinds[0]} here")
            states.append(decode(said["rest"], reader.tensor) if split else _state(said, part, cuts, reader))
            pieces.append(
                {key: _piece(reader, f"{name_of(number)}/pieces/{key}", p) for key, p in wanted[number].items()}
            )
        own = None
        if len(manifest.own) == place[1]:
            own = {key: decode(said, reader.tensor) for key, said in manifest.own[place[0]].items()}
        loaders = [decode(said["loaders"], reader.tensor) for said in manifest.own]
        reader.check_rest(*place)
        return cls(states, pieces, decode(manifest.extra, reader.tensor), own, loaders)

    def give(self, net: object, parts: Sequence[Part], wanted: Sequence[dict[str, Any]], own: Sequence[object]) -> None:
        """Have everything but loaders go on from it; where it is computed."""
        for part, state, pieces, targets in zip(parts, self.states, self.pieces, wanted, strict=True):
            if isinstance(part, InPieces):
                for key, target in targets.items():
                    target.tensor.detach().copy_(pieces[key].view(target.tensor.shape))
                part.load_rest(state)
            else:
                part.load_state_dict(state)
        if self.own is None:
            return
        if isinstance(net, Net) and net.compressor is not None and "compressor" in self.own:
            net.compressor.load_state_dict(self.own["compressor"])
        for each, state in zip(own, self.own["generators"], strict=True):
            if isinstance(each, Generator):
                set_generator_state(each, state)
        set_process_state(self.own["random"])

    def give_loaders(self, own: Sequence[object], rank: int) -> None:
        """The same for loaders, on the loop's thread."""
        for number, each in enumerate(own):
            if isinstance(each, Generator):
                continue
            if isinstance(each, Redivided):
                each.load_state_dicts([states[number] for states in self.loaders])
            elif self.own is not None:
                each.load_state_dict(self.loaders[rank][number])  # type: ignore[attr-defined]


class PartsDiffer(ValueError):
    """The checkpoint is sound, but of something else."""


@runtime_checkable
class Redivided(Protocol):
    """What each rank has of its own, but can be divided among another number of ranks."""

    def load_state_dicts(self, states: list[Any], /) -> object:
        """Take this rank's part of the `states` of all ranks that saved them."""
        ...


def _state(said: dict[str, Json], part: Stateful, cuts: Cuts, reader: Reader) -> Any:  # noqa: ANN401
    state = decode(said["state"], reader.tensor)
    if "versions" in said:
        state = OrderedDict(state)
        state._metadata = decode(said["versions"], reader.tensor)  # type: ignore[attr-defined]
    return cuts.cut(part, state)


def _piece(reader: Reader, name: str, piece: Any) -> Tensor:  # noqa: ANN401
    pieces = reader.manifest.tensors.get(name)
    if pieces is None or pieces[0].entry.shape != tuple(piece.shape):
        seen = "no such tensor" if pieces is None else f"shape {list(pieces[0].entry.shape)}"
        raise PartsDiffer(f"{reader.folder}: {name!r}: there is {seen}, expected shape {list(piece.shape)}")
    return reader.part(name, piece.start, piece.tensor.numel())


def module_or_net(part: object) -> bool:
    """Return whether `part` is a module, or a net."""
    return isinstance(part, Net | nn.Module)
