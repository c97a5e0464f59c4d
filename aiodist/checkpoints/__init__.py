"""Checkpoints: the state of a training on disk, to resume on any number of ranks."""

from aiodist.checkpoints.parts import InPieces
from aiodist.checkpoints.reading import StoredTensor
from aiodist.checkpoints.saving import Checkpoint, load, save
from aiodist.checkpoints.values import Piece

__all__ = ["Checkpoint", "InPieces", "Piece", "StoredTensor", "load", "save"]
