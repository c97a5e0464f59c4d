"""Messages of parameter servers between ranks of this process: lost, doubled, or with other entries than were sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from aiodist.ps.wire import ENTRY, FRAME
from aiodist.testing.seams.carriers import LocalTransport
from aiodist.testing.seams.transport import Done

__all__ = ["Entry", "Frames"]

Entry = tuple[int, bytes]
"""Kind and body."""


class Frames:
    """Changes to the frames and data messages of each rank."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.copies: Callable[[], int] = lambda: 1
        """How many arrive of one."""
        self.edit: Callable[[int, int, list[Entry]], list[Entry]] | None = None
        """Returns the entries that arrive in place of those that (rank, rank) sends."""
        self.lost_data: Callable[[int, int], bool] = lambda src, dst: False
        """Returns True if a data message from rank `src` to `dst` is lost."""
        self.dead: set[tuple[int, int]] = set()
        """Links, from rank to rank, that lose all messages."""
        isend = LocalTransport.isend

        def sent(transport: LocalTransport, t: Tensor, dst: int, tag: int, done: Done) -> None:
            link = transport.rank, dst
            is_frame = _is_frame(t, transport.rank)
            if link in self.dead or (not is_frame and self.lost_data(*link)):
                done(None)
                return
            if not is_frame:
                isend(transport, t, dst, tag, done)
                return
            frame = t if self.edit is None else self._edited(t, transport.rank, dst)
            copies = self.copies()
            if not copies:
                done(None)
            for _ in range(copies):
                isend(transport, frame.clone(), dst, tag, done)

        patch.setattr(LocalTransport, "isend", sent)

    def _edited(self, frame: Tensor, src: int, dst: int) -> Tensor:
        assert self.edit is not None
        entries = b"".join(map(_packed, self.edit(src, dst, list(_entries(frame.numpy().tobytes())))))
        _, _, *rest = FRAME.unpack_from(frame.numpy().data)
        packed = FRAME.pack(src, FRAME.size + len(entries), *rest) + entries
        return torch.frombuffer(bytearray(packed), dtype=torch.uint8)


def _is_frame(t: Tensor, rank: int) -> bool:
    if t.dtype is not torch.uint8 or t.dim() != 1 or t.numel() < FRAME.size:
        return False
    return FRAME.unpack_from(t.numpy().data)[:2] == (rank, t.numel())


def _entries(frame: bytes) -> Iterator[Entry]:
    at = FRAME.size
    while at < len(frame):
        kind, length = ENTRY.unpack_from(frame, at)
        at += ENTRY.size
        yield kind, frame[at : at + length]
        at += length + -length % 8


def _packed(entry: Entry) -> bytes:
    kind, body = entry
    return ENTRY.pack(kind, len(body)) + body + bytes(-len(body) % 8)
