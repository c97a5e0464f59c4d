"""Checkpoints: what a training has come to, on disk, for as many ranks as there are when it goes on."""

from aiodist.checkpoints.loading import Checkpoint, load
from aiodist.checkpoints.pieces import InPieces, Piece
from aiodist.checkpoints.reading import StoredTensor
from aiodist.checkpoints.saving import save

__all__ = ["Checkpoint", "InPieces", "Piece", "StoredTensor", "load", "save"]
