"""Parts of a checkpoint, such as a net, and each rank's share of them."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from aiodist.checkpoints.format import TensorEntry, dtype_name
from aiodist.checkpoints.kinds import kind_of, name_of
from aiodist.checkpoints.values import Json, Piece, encode
from aiodist.communicator import Communicator
from aiodist.handles import Handle
from aiodist.types import Stateful


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

    def divided(self, state: Any, /) -> Any:  # noqa: ANN401
        """Return what this rank takes of a whole `state`, whose tensors may be `StoredTensor`, for `load_state_dict`.

        Called on the thread for files; nothing is changed. Raises `ValueError` where the state is of something else.
        """

    def load_state_dict(self, state: Any, /) -> object:  # noqa: ANN401
        """Take what `divided` returned."""


@runtime_checkable
class Redivided(Protocol):
    """An object with a position of each rank, for any number of ranks, such as a `data.ShardQueue`."""

    def state_dict(self) -> Any:  # noqa: ANN401
        """Return the state of this rank."""

    def load_state_dicts(self, states: list[Any], /) -> object:
        """Take this rank's part of the `states` of all ranks that saved them."""


@runtime_checkable
class OfRanks(Protocol):
    """A part with a state that is equal on all ranks and a state of each rank's own, such as `nn.LocalSGD`.

    Both methods are called on the same thread as those of `InPieces`.
    """

    def states(self) -> tuple[Any, Any]:
        """Return what all ranks have alike, and this rank's own: None where it has none."""

    def load_states(self, alike: Any, own: Any, /) -> None:  # noqa: ANN401
        """Take what `states` gave; `own` is None too where another number of ranks saved it."""


Block = tuple[tuple[int, int], ...]
"""Start and end of a block in each dimension."""


class Cut(NamedTuple):
    """The block of a tensor that this rank keeps, with the shape of the whole tensor."""

    shape: tuple[int, ...]
    block: Block

    def of(self, whole: Tensor) -> Tensor:
        """Return this rank's block, or `whole` itself if it has another shape."""
        if tuple(whole.shape) != self.shape:
            return whole
        return whole[tuple(slice(*bounds) for bounds in self.block)].contiguous()

    def piece(self, t: Tensor, *, mine: bool) -> Piece:
        """Return the block `t` as a piece of the whole tensor, divided dimension first; empty unless `mine`."""
        divided = (d for d, (start, stop) in enumerate(self.block) if stop - start != self.shape[d])
        dim = next(divided, 0)
        dims = [dim, *(d for d in range(len(self.shape)) if d != dim)]
        shape = tuple(self.shape[d] for d in dims)
        elements = t.detach().permute(dims).reshape(-1) if mine else t.detach().reshape(-1)[:0]
        back = tuple(dims.index(d) for d in range(len(dims))) if dim else None
        return Piece(elements, self.block[dim][0] * prod(shape[1:]), shape, back)


@runtime_checkable
class InBlocks(Protocol):
    """A layer whose parameters are divided among the ranks of `coll`, such as `nn.ColumnLinear`."""

    coll: Communicator

    def blocks(self) -> dict[str, tuple[tuple[int, ...], Block]]:
        """Return of each divided parameter, by name, the shape of the whole one, and the block that this rank has."""


@dataclass(frozen=True)
class Cuts:
    """The blocks in the state of one part: tensors that ranks divide."""

    of_module: dict[str, Cut]
    """Blocks by key in the state dict."""
    of_parameter: dict[Tensor, Cut]
    ranks: int
    """Number of ranks that share the layers, or 1."""

    @classmethod
    def of(cls, part: object) -> Cuts:
        """Return the blocks of a module, or of a net's module; any other part has none."""
        by_key: dict[str, Cut] = {}
        by_parameter: dict[Tensor, Cut] = {}
        sizes = {1}
        module = getattr(part, "module", part)
        if isinstance(module, nn.Module):
            for prefix, layer in module.named_modules(remove_duplicate=False):
                if isinstance(layer, InBlocks):
                    sizes.add(layer.coll.size)
                    for name, cut in layer.blocks().items():
                        by_key[f"{prefix}.{name}".lstrip(".")] = Cut(*cut)
                        by_parameter[getattr(layer, name)] = Cut(*cut)
        return cls(by_key, by_parameter, max(sizes))

    def paths(self, part: object, state: Any) -> dict[tuple[Any, ...], Cut]:  # noqa: ANN401
        """Return the path of each block in `state`, the state of `part`: keys from the outermost one on."""
        if not self.of_parameter:
            return {}
        if isinstance(getattr(part, "module", part), nn.Module):
            return {(key,): cut for key, cut in self.of_module.items() if key in state}
        if not isinstance(part, Optimizer):
            return {}
        found = {}
        for index, parameter in enumerate(parameters_of(part)):
            if (cut := self.of_parameter.get(parameter)) is not None:
                for key, value in state["state"].get(index, {}).items():
                    if isinstance(value, Tensor) and value.shape in (parameter.shape, cut.shape) and value.dim():
                        found["state", index, key] = cut
        return found

    def check(self, part: object) -> None:
        """Raise `TypeError` if `part` may keep other state for divided parameters than torch's optimizers do."""
        if self.of_parameter and (isinstance(part, InPieces) or hasattr(part, "optimizers")):
            raise TypeError(
                f"{type(part).__name__} of a net with divided layers: expected an Optimizer of torch, or, for as many "
                "ranks as now, `await opt.flush()` and then `per_rank=[opt]`"
            )

    def changed(self, part: object, state: Any, change: Callable[[Cut, Tensor], object]) -> Any:  # noqa: ANN401
        """Return the state of `part` after `change` of each block, or of each whole tensor with blocks."""
        for path, cut in self.paths(part, state).items():
            state = _changed(state, path, partial(change, cut))
        return state


def parameters_of(opt: Optimizer) -> list[nn.Parameter]:
    """Return the parameters of an optimizer, in the order of its state."""
    return [p for group in opt.param_groups for p in group["params"]]


def _changed(state: Any, path: tuple[Any, ...], change: Callable[[Any], Any]) -> Any:  # noqa: ANN401
    """Return `state` after `change` of the value at `path`, in copies of the containers on the path."""
    if not path:
        return change(state)
    copied = copy(state)
    copied[path[0]] = _changed(state[path[0]], path[1:], change)
    return copied


Part = Stateful | InPieces | OfRanks
_WHOLE_BYTES = 64 << 10


@runtime_checkable
class Net(Protocol):
    """An object with a compute thread, such as `nn.DataParallel`; parts are read on that thread, between two steps."""

    @property
    def coll(self) -> Communicator:
        """The communicator of the ranks with equal parameters."""

    @property
    def compressor(self) -> Stateful | None:
        """The object with the residuals of this rank, or None."""

    def submit(self, fn: Any, /, *args: Any) -> Handle[Any]:  # noqa: ANN401
        """Return the handle of `fn(*args)`, which runs on the thread after all earlier work."""


def split_own(part: object, state: Any) -> tuple[Any, Any]:  # noqa: ANN401
    """Return the part of a net's `state` that all ranks have alike, and the part that this rank keeps, None if empty.

    Both have the versions of their modules, as torch gives them.
    """
    keeps = _keeps(part)
    if keeps is None or not any(map(keeps, state)):
        return state, None
    versions = getattr(state, "_metadata", {})
    alike = OrderedDict((key, value) for key, value in state.items() if not keeps(key))
    alike._metadata = {key: value for key, value in versions.items() if not keeps(key)}  # type: ignore[attr-defined]
    mine = {key: value for key, value in state.items() if keeps(key)}
    return alike, {"state": mine, "versions": {key: value for key, value in versions.items() if keeps(key)}}


def join_own(part: object, state: Any, own: Any, saved_by: int | None) -> Any:  # noqa: ANN401
    """Return the `state` of a net with this rank's `own`, as `split_own` gave both.

    `saved_by` is the number of ranks that saved it, None if there are as many here. Raises ValueError unless each rank
    keeps the same here as there.
    """
    keeps = _keeps(part)
    kept = [] if keeps is None else [key for key in part.module.state_dict() if keeps(key)]  # type: ignore[attr-defined]
    saved = {} if own is None or keeps is None else own["state"]
    if not kept and not saved:
        return state
    if saved_by is not None:
        raise ValueError(
            f"{kept[0]!r} is `per_rank`, each rank's own, and {saved_by} ranks saved the checkpoint: expected as many"
        )
    if differ := sorted(saved.keys() ^ set(kept)):
        where = "here" if differ[0] in kept else "in the checkpoint"
        raise ValueError(f"{differ[0]!r} is `per_rank` only {where}: expected the same `per_rank` as at the save")
    joined = OrderedDict([*state.items(), *saved.items()])
    joined._metadata = {**getattr(state, "_metadata", {}), **own["versions"]}  # type: ignore[attr-defined]
    return joined


def _keeps(part: object) -> Callable[[str], bool] | None:
    """Return a function that is True for the keys of a net's state whose values are this rank's own, or None."""
    shared = getattr(part, "shared", None) if isinstance(part, Net) else None
    return getattr(shared, "keeps", None)


@runtime_checkable
class Delayed(Protocol):
    """An optimizer with updates or averages that are made later: `nn.PipelinedOptimizer`, `nn.LocalSGD`."""

    def make_updates(self) -> None:
        """Make all pending updates (compute thread, all ranks)."""


def check_parts(parts: Sequence[object]) -> None:
    for number, part in enumerate(parts):
        if not isinstance(part, Part):
            raise TypeError(f"{name_of(number)} is {type(part).__name__}: expected what has a state_dict, or pieces")


def check_shared(net: object, parts: Sequence[object]) -> None:
    """Raise ValueError for an optimizer among `parts` with parameters that each rank of `net` keeps for itself."""
    own = set(map(id, getattr(net, "per_rank", ()))) if isinstance(net, Net) else set()
    for number, part in enumerate(parts, 1):
        if own and isinstance(part, Optimizer) and (kept := sum(id(p) in own for p in parameters_of(part))):
            raise ValueError(
                f"{name_of(number)}: {type(part).__name__} has {kept} parameters that each rank keeps for itself "
                "(per_rank), and a part has one state for all ranks. Give those parameters an optimizer of their own, "
                "and name that in `per_rank=[own_optimizer]`"
            )


def make_updates(parts: Sequence[object]) -> None:
    """Make pending updates and averages."""
    for part in parts:
        if isinstance(part, Delayed):
            part.make_updates()


class Extent(NamedTuple):
    """A tensor's number, and elements `start` … `stop` of it, made flat."""

    tensor: int
    start: int
    stop: int


def share(tensors: Sequence[tuple[int, int]], rank: int, size: int) -> list[Extent]:
    """Return the extents that `rank` of `size` writes of `tensors`, each given as elements and bytes of one element.

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
    """A rank's share of a tensor: the entry and the flat elements."""

    entry: TensorEntry
    elements: Tensor


@dataclass
class Taken:
    """The state of one rank for a checkpoint, in memory that steps may still change."""

    alike: dict[str, Tensor] = field(default_factory=dict)
    """Tensors that are equal on all ranks."""
    mine: list[Written] = field(default_factory=list)
    """Pieces and tensors that no other rank has."""
    parts: list[Json] = field(default_factory=list)
    own: list[Any] = field(default_factory=list)
    """This rank's own state of each part, or None."""

    def take(self, parts: Sequence[Part], *, writes_blocks: bool) -> None:
        """Read the state of `parts`. `writes_blocks` is True on one of the ranks with equal blocks.

        Raises the errors of the parts, and `TypeError` for a value that cannot be written.
        """
        make_updates(parts)
        cuts = Cuts.of(parts[0])
        for number, part in enumerate(parts):
            said: dict[str, Json] = {"kind": kind_of(part)}
            own = None
            if isinstance(part, InPieces):
                said["state"] = self._encoded(part.pieces(), name_of(number))
            elif isinstance(part, OfRanks):
                alike, own = part.states()
                said["state"] = encode(alike, name_of(number), self.alike)
            else:
                state, own = split_own(part, part.state_dict())
                divided = cuts.changed(part, state, partial(Cut.piece, mine=writes_blocks))
                said["state"] = self._encoded(divided, name_of(number))
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
        for name, t in tensors.items():
            self._keep(name, t, tuple(t.shape), 0)

    def _keep(self, name: str, t: Tensor, shape: tuple[int, ...], start: int) -> None:
        entry = TensorEntry(name, dtype_name(t.dtype, name), shape, start, t.numel())
        self.mine.append(Written(entry, t.detach().reshape(-1)))

    def structure(self, differing: Iterable[str]) -> Json:
        """Return what must be equal on all ranks: JSON, shapes, and the sum of bits of tensors not in `differing`."""
        apart = set(differing)
        sums = iter(bit_sums([t for name, t in self.alike.items() if name not in apart]))
        tensors = {
            name: {"dtype": str(t.dtype), "shape": list(t.shape)}
            | ({} if name in apart else {"sum of bits": next(sums)})
            for name, t in self.alike.items()
        }
        return {"tensors": tensors, "parts": self.parts}

    def mine_to_write(self, rank: int, size: int) -> list[Written]:
        tensors = list(self.alike.items())
        found = list(self.mine)
        for number, start, stop in share([(t.numel(), t.element_size()) for _, t in tensors], rank, size):
            name, t = tensors[number]
            entry = TensorEntry(name, dtype_name(t.dtype, name), tuple(t.shape), start, stop - start)
            found.append(Written(entry, t.reshape(-1)[start:stop]))
        return sorted(found, key=lambda written: -written.entry.itemsize)


def bit_sums(tensors: Sequence[Tensor]) -> list[int]:
    """Return the sum of each tensor's bytes, as integers of up to 64 bits.

    The sum does not depend on the order of elements. Cost: one pass over each tensor.
    """
    sums = []
    for t in tensors:
        raw = t.detach().reshape(-1).view(torch.uint8)
        if raw.storage_offset() % 8:
            raw = raw.clone()
        end = raw.numel() // 8 * 8
        sums.append(raw[:end].view(torch.int64).sum() + raw[end:].sum().to(torch.int64))
    return [int(each) for each in sums]
