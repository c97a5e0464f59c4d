"""Parameters of which each rank keeps a block along one dimension, and what an optimizer keeps for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.optim import Optimizer

from aiodist.checkpoints.pieces import InPieces
from aiodist.checkpoints.safetensors_file import Block
from aiodist.communicator import Communicator


class Cut(NamedTuple):
    """What this rank keeps of a tensor: the whole one's shape, and a block of it."""

    shape: tuple[int, ...]
    block: Block

    def of(self, whole: Tensor) -> Tensor:
        """Return this rank's block; anything that has another shape as it is."""
        if tuple(whole.shape) != self.shape:
            return whole
        return whole[tuple(slice(*bounds) for bounds in self.block)].contiguous()


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

    def cut(self, part: object, state: Any) -> Any:  # noqa: ANN401
        """Return `state`, read whole, as this rank's `part` takes it."""
        for path, cut in self.paths(part, state).items():
            *outer, key = path
            within = state
            for step in outer:
                within = within[step]
            within[key] = cut.of(within[key])
        return state
