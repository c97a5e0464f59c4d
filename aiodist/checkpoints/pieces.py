"""Parts of which ranks have different things: pieces of tensors, blocks of layers, states of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.optim import Optimizer

from aiodist.communicator import Communicator


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


Block = tuple[tuple[int, int], ...]
"""Of each dimension where a block begins and where it ends."""


class Cut(NamedTuple):
    """What this rank keeps of a tensor: the whole one's shape, and a block of it."""

    shape: tuple[int, ...]
    block: Block

    def of(self, whole: Tensor) -> Tensor:
        """Return this rank's block; anything that has another shape as it is."""
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
        ...


@dataclass(frozen=True)
class Cuts:
    """Which tensors of the state of one part, by their path in it, are blocks."""

    of_module: dict[str, Cut]
    """By key in the state dict."""
    of_parameter: dict[Tensor, Cut]
    ranks: int
    """How many share the layers; 1 where nothing is divided."""

    @classmethod
    def of(cls, part: object) -> Cuts:
        """Return those of a module, or of a net's module; of anything else none."""
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
        """Return the keys, from the outermost in, that lead to tensors of `state`, that of `part`, which are blocks.

        Raises as `check`.
        """
        if not self.of_parameter:
            return {}
        if isinstance(getattr(part, "module", part), nn.Module):
            return {(key,): cut for key, cut in self.of_module.items() if key in state}
        if isinstance(part, Optimizer):
            return {path: cut for path, cut, _ in self._of_optimizer(part, state)}
        self.check(part)
        return {}

    def check(self, part: object) -> None:
        """Raise `TypeError` where `part` keeps something else for parameters that may be blocks than torch does."""
        if self.of_parameter and (isinstance(part, InPieces) or hasattr(part, "optimizers")):
            raise TypeError(f"{type(part).__name__} of a net with divided layers: expected an Optimizer of torch")

    def _of_optimizer(self, opt: Optimizer, state: Mapping[str, Any]) -> Iterator[tuple[tuple[Any, ...], Cut, Tensor]]:
        parameters = [p for group in opt.param_groups for p in group["params"]]
        for index, parameter in enumerate(parameters):
            cut = self.of_parameter.get(parameter)
            if cut is None:
                continue
            for key, value in state["state"].get(index, {}).items():
                if isinstance(value, Tensor) and value.shape in (parameter.shape, cut.shape) and value.dim():
                    yield ("state", index, key), cut, value

    def in_pieces(self, part: object, state: Any, *, mine: bool) -> Any:  # noqa: ANN401
        """Return the state of `part` with a piece in the place of each block, which is empty unless it is `mine`."""
        for path, cut in self.paths(part, state).items():
            state = _changed(state, path, partial(cut.piece, mine=mine))
        return state

    def cut(self, part: object, state: Any) -> Any:  # noqa: ANN401
        """Return `state`, read whole, as this rank's `part` takes it."""
        for path, cut in self.paths(part, state).items():
            state = _changed(state, path, cut.of)
        return state


def _changed(state: Any, path: tuple[Any, ...], change: Callable[[Any], Any]) -> Any:  # noqa: ANN401
    """Return `state` with something else at the end of `path`, in copies of what leads there."""
    if not path:
        return change(state)
    copied = copy(state)
    copied[path[0]] = _changed(state[path[0]], path[1:], change)
    return copied
