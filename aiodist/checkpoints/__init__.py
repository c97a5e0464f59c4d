"""Checkpoints: what a training has come to, on disk, for as many ranks as there are when it goes on."""

from aiodist.checkpoints.parts import InPieces
from aiodist.checkpoints.reading import StoredTensor
from aiodist.checkpoints.saving import Checkpoint, load, save
from aiodist.checkpoints.values import Piece

__all__ = ["Checkpoint", "InPieces", "Piece", "StoredTensor", "load", "save"]
