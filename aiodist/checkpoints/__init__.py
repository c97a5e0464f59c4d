"""Checkpoints: what a training has come to, on disk, for as many ranks as there are when it goes on."""

from aiodist.checkpoints.pieces import InPieces, Piece

__all__ = ["InPieces", "Piece"]
