"""What a collective is, in the 24 bytes by which ranks see whether they agree."""

from __future__ import annotations

import struct

import torch

from aiodist.types import ReduceOp

__all__ = ["CODES", "read", "sign"]

CODES = {"allreduce": b"ared", "reduce": b"redu", "reduce_scatter": b"rsca", "scan": b"scan"}

_SIGNATURE = struct.Struct("<4s4s4siq")  # operation, operator, dtype, root or digest, elements


def sign(operation: str, kind: torch.dtype, numel: int, op: ReduceOp, root: int = 0) -> bytes:
    """Return the signature of such a collective."""
    name = f"{'c' if kind.is_complex else 'f' if kind.is_floating_point else 'i' if kind.is_signed else 'u'}"
    return _SIGNATURE.pack(CODES[operation], op.encode(), f"{name}{8 * kind.itemsize}".encode(), root, numel)


def read(signature: bytes) -> str:
    """Return `signature` in words."""
    code, op, kind, root, numel = _SIGNATURE.unpack(signature)
    operation = next(name for name, known in CODES.items() if known == code)
    where = f", root {root}" if operation == "reduce" else ""
    return f"{operation} {op.rstrip(bytes(1)).decode()} of {numel} {kind.rstrip(bytes(1)).decode()}{where}"
