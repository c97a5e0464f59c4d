"""Python objects as tensors of bytes, by pickle protocol 5 with large buffers out of band.

Objects are framed by length, not by a sentinel. Unpickling runs code of the sender's choice: use this call only among
ranks that trust one another. Tensors are sent without pickle.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from aiodist.collectives.messages import Unpacked

_LENGTH = struct.Struct("<Q")


def pack(obj: object) -> Tensor:
    """Return `obj` as flat uint8: the number of parts, the lengths of the parts, then pickle and buffers.

    Raises the error of pickle for an object that cannot be pickled.
    """
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(obj, protocol=5, buffer_callback=buffers.append)
    parts = [memoryview(head), *(buffer.raw() for buffer in buffers)]
    lengths = b"".join(_LENGTH.pack(n) for n in (len(parts), *(part.nbytes for part in parts)))
    packed = torch.empty(len(lengths) + sum(part.nbytes for part in parts), dtype=torch.uint8, device="cpu")
    view = packed.numpy().data
    view[: len(lengths)] = lengths
    at = len(lengths)
    for part in parts:
        view[at : at + part.nbytes] = part
        at += part.nbytes
    return packed


def unpack_each(parts: Sequence[Tensor]) -> list[Any]:
    """Return the objects, each with separate memory."""
    return [unpack(part.clone()) for part in parts]


def unpack(packed: Tensor | Unpacked) -> Any:  # noqa: ANN401
    """Return the object, whose buffers share the memory of `packed`."""
    if isinstance(packed, Unpacked):
        return packed.obj
    view = packed.numpy().data
    (count,) = _LENGTH.unpack_from(view)
    lengths = [_LENGTH.unpack_from(view, _LENGTH.size * (1 + i))[0] for i in range(count)]
    at = _LENGTH.size * (1 + count)
    parts: list[memoryview] = []
    for length in lengths:
        parts.append(view[at : at + length])
        at += length
    return pickle.loads(parts[0], buffers=parts[1:])
