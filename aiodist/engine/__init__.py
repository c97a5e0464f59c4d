"""The training loop with hooks: synchronous and asynchronous SGD, evaluation, metrics over all ranks, resuming."""

from aiodist.engine.batch import WithCriterion
from aiodist.engine.engine import Engine
from aiodist.engine.state import State

__all__ = ["Engine", "State", "WithCriterion"]
