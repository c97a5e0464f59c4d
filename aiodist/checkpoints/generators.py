"""Random states: of the generators that a process has anyway, and of those that are handed over."""

from __future__ import annotations

import random
import sys
from typing import Any, cast

import numpy as np
import torch

Generator = torch.Generator | random.Random | np.random.Generator | np.random.RandomState


def process_state() -> dict[str, Any]:
    """Return the states of the generators of Python, torch, numpy and, where CUDA is in use, of each device."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy.random" in sys.modules:
        state["numpy"] = np.random.get_state(legacy=False)
    if torch.cuda.is_initialized():
        state["cuda"] = [generator.get_state() for generator in torch.cuda.default_generators]
    return state


def set_process_state(state: dict[str, Any]) -> None:
    """Have the generators of this process go on from `state`; those of devices that are not here are left out."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        np.random.set_state(state["numpy"])
    if state.get("cuda") and torch.cuda.is_available():
        torch.cuda.init()
        for generator, of_device in zip(torch.cuda.default_generators, state["cuda"], strict=False):
            generator.set_state(of_device)


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
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.bit_generator.state = cast("Any", state)
