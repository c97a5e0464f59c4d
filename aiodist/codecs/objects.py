"""Any Python object as bytes: chosen by the user, never by what arrives."""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aiodist.codecs.base import HEAD, Kind, parse, write_head
from aiodist.communicator import pickling


@dataclass(frozen=True)
class Pickle:
    """Any picklable object, by pickle protocol 5, its large buffers (numpy arrays) out of band.

    **Decoding runs code that the sender chose.** Use it only among ranks that trust one another, and `Json` otherwise.
    A checksum keeps what was damaged on the way from being unpickled; it is no protection against who means harm.
    """

    def encode(self, obj: Any) -> Tensor:
        """Return `obj` as flat uint8: 16 bytes and its pickle; raises what pickle raises. Cost: two copies."""
        return _framed(Kind.PICKLE, pickling.pack(obj))

    def decode(self, code: Tensor) -> Any:
        """Return the object, with memory of its own; **runs code that the sender chose**.

        Raises `ValueError` for a code that `Pickle` did not make or that was damaged, before anything of it runs, and
        what unpickling raises: the class that is missing here, for example.
        """
        try:
            return pickling.unpack(_unframed(Kind.PICKLE, code).clone())
        except struct.error as error:  # the frames, before the pickle
            raise ValueError(f"a code by PICKLE of {code.numel()} bytes without an object in it") from error


@dataclass(frozen=True)
class Json:
    """What JSON can say: None, bool, int, float, str, lists, and dicts whose keys are str. Nothing is executed.

    As `json` has it: tuples come back as lists, keys that are numbers as str, and NaN and infinities do come back.
    """

    def encode(self, obj: Any) -> Tensor:
        """Return `obj` as flat uint8: 16 bytes and its JSON.

        Raises `TypeError` for what JSON cannot say, `ValueError` for an object that contains itself.
        """
        text = bytearray(json.dumps(obj, separators=(",", ":")).encode())
        return _framed(Kind.JSON, torch.frombuffer(text, dtype=torch.uint8))

    def decode(self, code: Tensor) -> Any:
        """Return the object; raises `ValueError` for a code that `Json` did not make or that was damaged."""
        try:
            return json.loads(bytes(_unframed(Kind.JSON, code).numpy().data))
        except RecursionError as error:
            raise ValueError("a code by Json that is nested too deeply") from error


def _framed(kind: Kind, data: Tensor) -> Tensor:
    code = torch.cat([torch.empty(HEAD, dtype=torch.uint8, device="cpu"), data])
    write_head(code, kind, torch.uint8, data.numel(), zlib.crc32(data.numpy().data))
    return code


def _unframed(kind: Kind, code: Tensor) -> Tensor:
    checksum, payload = parse(code, kind, torch.uint8, numel=None)
    if zlib.crc32(payload.numpy().data) != checksum:
        raise ValueError(f"a code by {kind.name} of {code.numel()} bytes was damaged: its checksum differs")
    return payload
