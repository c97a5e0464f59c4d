"""What a checkpoint takes of a net, optimizers and the like, and what of it each rank writes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from aiodist.checkpoints.format import TensorEntry, dtype_name
from aiodist.checkpoints.pieces import Cuts, InPieces, OfRanks, Piece
from aiodist.checkpoints.values import Json, encode
from aiodist.communicator import Communicator
from aiodist.handles import Handle
from aiodist.types import Stateful

Part = Stateful | InPieces | OfRanks
_WHOLE_BYTES = 64 << 10


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


def check_parts(parts: Sequence[object]) -> None:
    """Raise `TypeError` for what has no state."""
    for number, part in enumerate(parts):
        if not isinstance(part, Part):
            raise TypeError(f"{name_of(number)} is {type(part).__name__}: expected what has a state_dict, or pieces")


class Extent(NamedTuple):
    """A tensor's number, and elements `start` … `stop` of it, made flat."""

    tensor: int
    start: int
    stop: int


def share(tensors: Sequence[tuple[int, int]], rank: int, size: int) -> list[Extent]:
    """Return what `rank` of `size` writes of `tensors`, each given as its elements and the bytes of one element.

    The bytes of all tensors in a row are cut into `size` parts of equal length; a tensor below 64 KiB stays whole, with
    the rank in whose part it begins. The same call on every rank gives each element to exactly one.

    >>> share([(100_000, 4), (10, 4)], 1, 2)
    [Extent(tensor=0, start=50005, stop=100000), Extent(tensor=1, start=0, stop=10)]
    """
    total = sum(numel * itemsize for numel, itemsize in tensors)
    bounds = [total * r // size for r in range(size + 1)]  # where the part of each rank begins
    found = []
    offset = 0
    for number, (numel, itemsize) in enumerate(tensors):
        if numel * itemsize < _WHOLE_BYTES:
            start, stop = 0, numel
            mine = min(bisect_right(bounds, offset), size) - 1 == rank
        else:
            ends = bounds[rank : rank + 2]
            start, stop = (min(max(0, -(-(bound - offset) // itemsize)), numel) for bound in ends)
            mine = start < stop
        if mine:
            found.append(Extent(number, start, stop))
        offset += numel * itemsize
    return found


class Written(NamedTuple):
    """What a rank writes of a tensor: its entry, and the elements, flat."""

    entry: TensorEntry
    elements: Tensor


@dataclass
class Taken:
    """What one rank has of a checkpoint, in memory that may still change."""

    alike: dict[str, Tensor] = field(default_factory=dict)
    """Tensors that all ranks have the same."""
    mine: list[Written] = field(default_factory=list)
    """Pieces and tensors that no other rank has."""
    parts: list[Json] = field(default_factory=list)
    own: list[Any] = field(default_factory=list)
    """Of each part what this rank alone has; None of most."""

    def take(self, parts: Sequence[Part], *, writes_blocks: bool) -> None:
        """Look at the state of `parts`; of ranks that have the same blocks one `writes_blocks`.

        Raises what these raise, `TypeError` for what cannot be written.
        """
        for part in parts:
            if isinstance(part, Delayed):
                part.make_updates()
        cuts = Cuts.of(parts[0])
        for number, part in enumerate(parts):
            own = None
            if isinstance(part, InPieces):
                cuts.check(part)
                self.parts.append({"state": self._encoded(part.pieces(), name_of(number))})
            elif isinstance(part, OfRanks):
                alike, own = part.states()
                self.parts.append({"state": encode(alike, name_of(number), self.alike)})
            else:
                state = part.state_dict()
                divided = cuts.in_pieces(part, state, mine=writes_blocks)
                said = {"state": self._encoded(divided, name_of(number))}
                if isinstance(getattr(state, "_metadata", None), dict):  # versions of the modules
                    said["versions"] = encode(state._metadata, f"{name_of(number)}/versions", self.alike)
                self.parts.append(said)
            self.own.append(own)

    def _encoded(self, state: Any, name: str) -> Json:  # noqa: ANN401
        """Return `state` as JSON; keep its tensors, which all ranks have alike, and its pieces."""
        found: dict[str, Tensor | Piece] = {}
        said = encode(state, name, found)
        for called, t in found.items():
            if isinstance(t, Tensor):
                self.alike[called] = t
            elif t.tensor.numel():
                self._keep(called, t.tensor, tuple(t.shape), t.start)
        return said

    def keep_own(self, tensors: dict[str, Tensor]) -> None:
        """Add tensors of this rank, whose names are its own."""
        for name, t in tensors.items():
            self._keep(name, t, tuple(t.shape), 0)

    def _keep(self, name: str, t: Tensor, shape: tuple[int, ...], start: int) -> None:
        entry = TensorEntry(name, dtype_name(t.dtype, name), shape, start, t.numel())
        self.mine.append(Written(entry, t.detach().reshape(-1)))

    def structure(self, differing: Iterable[str]) -> Json:
        """Return what has to be the same on all ranks: of tensors sums of their bits, but of those in `differing`."""
        apart = set(differing)
        sums = iter(bit_sums([t for name, t in self.alike.items() if name not in apart]))
        tensors = {
            name: {"dtype": str(t.dtype), "shape": list(t.shape)}
            | ({} if name in apart else {"sum of bits": next(sums)})
            for name, t in self.alike.items()
        }
        return {"tensors": tensors, "parts": self.parts}

    def mine_to_write(self, rank: int, size: int) -> list[Written]:
        """Return what `rank` of `size` writes, the largest elements first."""
        tensors = list(self.alike.items())
        found = list(self.mine)
        for number, start, stop in share([(t.numel(), t.element_size()) for _, t in tensors], rank, size):
            name, t = tensors[number]
            entry = TensorEntry(name, dtype_name(t.dtype, name), tuple(t.shape), start, stop - start)
            found.append(Written(entry, t.reshape(-1)[start:stop]))
        return sorted(found, key=lambda written: -written.entry.itemsize)


def bit_sums(tensors: Sequence[Tensor]) -> list[int]:
    """Return of each tensor the sum of its bytes as integers of up to 64 bits: another one where values differ.

    Costs one pass over each. Orders of elements are not told apart.
    """
    sums = []
    for t in tensors:
        raw = t.detach().reshape(-1).view(torch.uint8)
        if raw.storage_offset() % 8:
            raw = raw.clone()
        end = raw.numel() // 8 * 8
        sums.append(raw[:end].view(torch.int64).sum() + raw[end:].sum().to(torch.int64))
    return [int(each) for each in sums]
