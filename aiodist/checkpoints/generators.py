"""Random states: of the generators that a process has anyway, and of those that are handed over."""

from __future__ import annotations

import random
import sys
from hashlib import sha256
from typing import Any, cast

import numpy as np
import torch

Generator = torch.Generator | random.Random | np.random.Generator | np.random.RandomState


def torch_state() -> dict[str, Any]:
    """Return the states of torch's generators, where CUDA is in use that of each device too."""
    state: dict[str, Any] = {"torch": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        state["cuda"] = [generator.get_state() for generator in torch.cuda.default_generators]
    return state


def set_torch_state(state: dict[str, Any]) -> None:
    """Have torch's generators go on from `state`; those of devices that are not here are left out."""
    torch.set_rng_state(state["torch"])
    if state.get("cuda") and torch.cuda.is_available():
        torch.cuda.init()
        for generator, of_device in zip(torch.cuda.default_generators, state["cuda"], strict=False):
            generator.set_state(of_device)


def process_state() -> dict[str, Any]:
    """Return the states of the generators of Python, torch, and numpy where that is in use."""
    state = {"python": random.getstate(), **torch_state()}
    if "numpy.random" in sys.modules:
        state["numpy"] = np.random.get_state(legacy=False)
    return state


def set_process_state(state: dict[str, Any]) -> None:
    """Have the generators of this process go on from `state`."""
    random.setstate(state["python"])
    set_torch_state(state)
    if "numpy" in state:
        np.random.set_state(state["numpy"])


def seed_of(state: dict[str, Any], rank: int) -> int:
    """Return a seed for `rank`, which follows from the state of a process."""
    return int.from_bytes(sha256(state["torch"].numpy().tobytes() + b"%d" % rank).digest()[:4])


def seed_process(seed: int) -> None:
    """Seed the generators of this process."""
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(seed)


def generator_state(generator: Generator) -> Any:  # noqa: ANN401
    """Return where `generator` stands."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.bit_generator.state


def set_generator_state(generator: Generator, state: Any) -> None:  # noqa: ANN401
    """Have `generator` go on from `state`."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = cast("Any", state)
    else:
        generator.set_state(state)


def seed_generator(generator: Generator, seed: int) -> None:
    """Have `generator` begin anew from `seed`."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    else:
        generator.seed(seed)
