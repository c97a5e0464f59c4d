"""The format of frames: a header of 64 bytes, then the data if it is short."""

from __future__ import annotations

import struct
from ctypes import memmove
from typing import Final, NamedTuple

from torch import Tensor

from aiodist.backends.gloo.library import empty

MESSAGE, OFFER, TAKEN, CREDITS = range(4)

_HEADER = struct.Struct("<B3xiQqqq24x")  # kind, tag, communicator, number, bytes of data, frames received
HEADER_BYTES: Final = _HEADER.size  # 64: what follows is aligned for every dtype


class Frame(NamedTuple):
    """A frame that came; `data` is a view of memory that is used again."""

    kind: int
    tag: int
    comm: int
    number: int
    nbytes: int
    acknowledged: int
    data: Tensor

    def kept(self) -> Frame:
        """Return it with data of its own."""
        return self._replace(data=self.data.clone())

    @staticmethod
    def read(buffer: Tensor, view: memoryview) -> Frame:
        """Return the frame in `buffer`, whose memory `view` is."""
        kind, tag, comm, number, nbytes, acknowledged = _HEADER.unpack_from(view)
        data = buffer[HEADER_BYTES : HEADER_BYTES + (nbytes if kind == MESSAGE else 0)]
        return Frame(kind, tag, comm, number, nbytes, acknowledged, data)

    @staticmethod
    def write(
        kind: int, tag: int, comm: int, number: int, nbytes: int, acknowledged: int, data: Tensor | None
    ) -> Tensor:
        """Return a frame to be sent, with a copy of `data`."""
        inline = 0 if data is None else data.nbytes
        frame = empty(HEADER_BYTES + inline)
        address = frame.data_ptr()
        memmove(address, _HEADER.pack(kind, tag, comm, number, nbytes, acknowledged), HEADER_BYTES)
        if data is not None:
            memmove(address + HEADER_BYTES, data.data_ptr(), inline)
        return frame
