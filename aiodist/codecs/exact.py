"""Codecs without loss, also for Python objects."""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aiodist.codecs.base import Kind, check_input, framed, parse
from aiodist.communicator import pickling
from aiodist.streams.memory import bytes_of


@dataclass(frozen=True)
class Lossless:
    """A lossless codec of floats: the first bytes of all elements, then the second ones, and so on, by zlib.

    NaN keeps its payload, zero its sign. `level` is zlib's, 1 to 9. Use it for repeated values, such as zeros: dense
    floats are mostly noise, and float32 of normal numbers keeps 87 % of its bytes. Cost: a core encodes some 50 MB/s,
    and decodes four times as much, without the interpreter lock.
    `decode` raises `ValueError` for a code of other dtype, numel or length, and for a damaged one: zlib has a checksum.
    """

    level: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.level <= 9:
            raise ValueError(f"level={self.level}: expected from 1 to 9")

    def encode(self, t: Tensor) -> Tensor:
        """Return the code of `t`, flat."""
        t = check_input(t, "Lossless")
        planes = bytes_of(t.contiguous()).view(-1, t.dtype.itemsize).T.contiguous()
        packed = bytearray(zlib.compress(planes.numpy().data, self.level))
        return framed(torch.frombuffer(packed, dtype=torch.uint8), Kind.LOSSLESS, t.dtype, t.numel(), 0)

    def decode(self, code: Tensor, dtype: torch.dtype, numel: int) -> Tensor:
        """Return `numel` elements of `dtype`; raises `ValueError` for a code that does not fit or was damaged."""
        _, payload = parse(code, Kind.LOSSLESS, dtype, numel)
        nbytes, unpack = numel * dtype.itemsize, zlib.decompressobj()
        try:
            data = bytearray(unpack.decompress(payload.numpy().data, nbytes + 1))  # a forged code may decode to more
        except zlib.error as error:
            raise ValueError("a code by Lossless that zlib cannot read") from error
        if len(data) != nbytes or not unpack.eof or unpack.unused_data:
            raise ValueError(f"a code by Lossless of {len(data)} bytes or more, or damaged: expected {nbytes}")
        planes = (
            torch.frombuffer(data, dtype=torch.uint8) if nbytes else torch.empty(0, dtype=torch.uint8, device="cpu")
        )
        return planes.view(dtype.itemsize, numel).T.contiguous().view(-1).view(dtype)


@dataclass(frozen=True)
class Pickle:
    """Any picklable object, by pickle protocol 5, its large buffers (numpy arrays) out of band.

    **Decoding runs code that the sender chose.** Use it only among ranks that trust one another, and `Json` otherwise.
    A checksum detects damage, but is no protection against an attacker.
    """

    def encode(self, obj: Any) -> Tensor:
        """Return `obj` as flat uint8: 16 bytes and its pickle; raises what pickle raises. Cost: two copies."""
        return _checked(Kind.PICKLE, pickling.pack(obj))

    def decode(self, code: Tensor) -> Any:
        """Return the object, with memory of its own; **runs code that the sender chose**.

        Raises `ValueError` for a code that `Pickle` did not make or that was damaged, before any of it runs, and the
        errors of unpickling, for example of a class that is missing here.
        """
        try:
            return pickling.unpack(_payload(Kind.PICKLE, code).clone())
        except struct.error as error:  # the frames, before the pickle
            raise ValueError(f"a code by PICKLE of {code.numel()} bytes without an object in it") from error


@dataclass(frozen=True)
class Json:
    """JSON of None, bool, int, float, str, lists, and dicts whose keys are str. Decoding executes nothing.

    As with `json`, tuples come back as lists, numeric keys as str, and NaN and infinities as they are.
    """

    def encode(self, obj: Any) -> Tensor:
        """Return `obj` as flat uint8: 16 bytes and its JSON.

        Raises `TypeError` for an object outside of JSON, `ValueError` for an object that contains itself.
        """
        text = bytearray(json.dumps(obj, separators=(",", ":")).encode())
        return _checked(Kind.JSON, torch.frombuffer(text, dtype=torch.uint8))

    def decode(self, code: Tensor) -> Any:
        """Return the object; raises `ValueError` for a code that `Json` did not make or that was damaged."""
        try:
            return json.loads(bytes(_payload(Kind.JSON, code).numpy().data))
        except RecursionError as error:
            raise ValueError("a code by Json that is nested too deeply") from error


def _checked(kind: Kind, data: Tensor) -> Tensor:
    return framed(data, kind, torch.uint8, data.numel(), zlib.crc32(data.numpy().data))


def _payload(kind: Kind, code: Tensor) -> Tensor:
    checksum, payload = parse(code, kind, torch.uint8, numel=None)
    if zlib.crc32(payload.numpy().data) != checksum:
        raise ValueError(f"a code by {kind.name} of {code.numel()} bytes was damaged: its checksum differs")
    return payload
