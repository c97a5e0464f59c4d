"""State of one rank: random states, residuals, buffers, loaders."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from aiodist.checkpoints.kinds import kind_of, name_of
from aiodist.checkpoints.parts import Net, Redivided
from aiodist.checkpoints.values import Json, decode, encode
from aiodist.types import Stateful

Generator = torch.Generator | random.Random | np.random.Generator | np.random.RandomState


def torch_state() -> dict[str, Any]:
    """Return the states of torch's generators, where CUDA is in use that of each device too."""
    state: dict[str, Any] = {"torch": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        state["cuda"] = [generator.get_state() for generator in torch.cuda.default_generators]
    return state


def set_torch_state(state: dict[str, Any]) -> None:
    """Set torch's generators to `state`, without those of missing devices."""
    torch.set_rng_state(state["torch"])
    if state.get("cuda") and torch.cuda.is_available():
        torch.cuda.init()
        for generator, of_device in zip(torch.cuda.default_generators, state["cuda"], strict=False):
            generator.set_state(of_device)


def generator_state(generator: Generator) -> Any:  # noqa: ANN401
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.bit_generator.state


def set_generator_state(generator: Generator, state: Any) -> None:  # noqa: ANN401
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = cast("Any", state)
    else:
        generator.set_state(state)


def seed_generator(generator: Generator, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    else:
        generator.seed(seed)


def check_own(own: Sequence[object]) -> None:
    for number, each in enumerate(own):
        if not isinstance(each, Stateful | Redivided | Generator):
            raise TypeError(
                f"per_rank[{number}] is {type(each).__name__}: expected a generator, or what has a state_dict"
            )


def own_loaders(own: Sequence[Any], rank: int) -> tuple[list[Json], dict[str, Tensor]]:
    """Return the states of loaders and the like, with copies of their tensors; None for generators. On the loop."""
    tensors: dict[str, Tensor] = {}
    said = [
        None if isinstance(each, Generator) else encode(each.state_dict(), f"rank{rank}/own/{i}", tensors)
        for i, each in enumerate(own)
    ]
    return said, {name: t.clone() for name, t in tensors.items()}


def own_states(
    net: object, own: Sequence[object], of_parts: Sequence[object], rank: int, tensors: dict[str, Tensor]
) -> dict[str, Json]:
    """Return the state that steps change: random states, residuals, buffers and `of_parts`, the own state of parts.

    Called on the compute thread, after the last step.
    """
    name = f"rank{rank}"
    state = {"python": random.getstate(), **torch_state()}
    if "numpy.random" in sys.modules:
        state["numpy"] = np.random.get_state(legacy=False)
    said = {"random": encode(state, f"{name}/random", tensors)}
    if isinstance(net, Net) and net.compressor is not None:
        said["compressor"] = encode(net.compressor.state_dict(), f"{name}/compressor", tensors)
        said["compressed"] = kind_of(net.compressor)
    said["buffers"] = encode(own_buffers(net), f"{name}/buffers", tensors)
    said["parts"] = [encode(each, f"{name}/{name_of(i)}", tensors) for i, each in enumerate(of_parts)]
    said["kinds"] = list(map(kind_of, own))
    said["generators"] = [
        encode(generator_state(each) if isinstance(each, Generator) else None, f"{name}/generators/{i}", tensors)
        for i, each in enumerate(own)
    ]
    return said


def own_buffers(net: object) -> dict[str, Tensor]:
    """Return the buffers of a net that several ranks have: they do not have them alike, as running statistics."""
    return _buffers(net) if isinstance(net, Net) and net.coll.size > 1 else {}


def _buffers(net: object) -> dict[str, Tensor]:
    module = getattr(net, "module", net)
    if not isinstance(module, nn.Module):
        return {}
    kept = module.state_dict()
    return {name: t for name, t in module.named_buffers() if name in kept}


@dataclass
class OwnState:
    """The own state of one rank, as read; no object uses it yet."""

    states: dict[str, Any]
    """States of this rank, or of one of the saving ranks if those were fewer."""
    loaders: list[list[Any]]
    """The states of loaders and the like, of each rank that wrote it."""
    rank: int
    same_size: bool
    """As many ranks wrote the checkpoint."""

    @classmethod
    def read(cls, said: Sequence[Json], tensor: Callable[[str], Tensor], rank: int, size: int) -> OwnState:
        mine = {key: value for key, value in said[rank % len(said)].items() if key != "loaders"}
        if len(said) != size:
            mine = {key: mine[key] for key in ("random", "generators", "kinds")}
        states = {key: decode(value, tensor) for key, value in mine.items()}
        return cls(states, [decode(of_rank["loaders"], tensor) for of_rank in said], rank, len(said) == size)

    def compressor_differs(self, net: object) -> str | None:
        """Return in words how the compression of the saved residuals differs; None if they may be loaded."""
        if not isinstance(net, Net) or net.compressor is None or "compressed" not in self.states:
            return None
        saved, here = self.states["compressed"], kind_of(net.compressor)
        why = f"the net has compress={here}, and the residuals of the checkpoint are of {saved}: expected the same"
        return None if saved == here else why

    def of_part(self, number: int) -> Any:  # noqa: ANN401
        """Return this rank's state of a part, or None if another number of ranks wrote the checkpoint."""
        return self.states["parts"][number] if self.same_size else None

    def restore(self, net: object, own: Sequence[object]) -> None:
        """Restore all but loaders (compute thread)."""
        if isinstance(net, Net) and net.compressor is not None and "compressor" in self.states:
            net.compressor.load_state_dict(self.states["compressor"])
        mine = _buffers(net)
        with torch.inference_mode(False), torch.no_grad():
            for name, t in self.states.get("buffers", {}).items():
                mine[name].copy_(t)
        self._restore_generators(own)

    def _restore_generators(self, own: Sequence[object]) -> None:
        state, known = self.states["random"], self.rank < len(self.loaders)
        seed = int.from_bytes(sha256(state["torch"].numpy().tobytes() + b"%d" % self.rank).digest()[:4])
        for number, each in enumerate(own):
            if isinstance(each, Generator) and known:
                set_generator_state(each, self.states["generators"][number])
            elif isinstance(each, Generator):
                seed_generator(each, seed + 1 + number)
        if known:
            random.setstate(state["python"])
            set_torch_state(state)
            if "numpy" in state:
                np.random.set_state(state["numpy"])
        else:
            random.seed(seed)
            torch.manual_seed(seed)
            np.random.seed(seed)

    def restore_loaders(self, own: Sequence[object]) -> None:
        """Restore loaders (loop's thread)."""
        for number, each in enumerate(own):
            if isinstance(each, Redivided) and not (self.same_size and isinstance(each, Stateful)):
                each.load_state_dicts([states[number] for states in self.loaders])
            elif self.same_size and isinstance(each, Stateful):
                each.load_state_dict(self.loaders[self.rank][number])
