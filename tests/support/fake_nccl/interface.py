"""Small things that `nccl.core` has: errors, flags, settings, ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = [
    "INTERNAL_ERROR",
    "INVALID_ARGUMENT",
    "INVALID_USAGE",
    "IN_PROGRESS",
    "SUCCESS",
    "TEXTS",
    "FakeConfig",
    "FakeId",
    "NCCLError",
    "NcclInvalid",
]

SUCCESS: Final = 0
INTERNAL_ERROR: Final = 3
INVALID_ARGUMENT: Final = 4
INVALID_USAGE: Final = 5
IN_PROGRESS: Final = 7
TEXTS: Final = {
    1: "unhandled cuda error",
    2: "unhandled system error",
    3: "internal error",
    4: "invalid argument",
    5: "invalid usage",
    6: "remote process exited or there was a network error",
    7: "in progress",
}


class NCCLError(Exception):
    """As `nccl.bindings.nccl.NCCLError`."""

    def __init__(self, status: int) -> None:
        super().__init__(f"{TEXTS[status]} ({status})")
        self.status = status


class NcclInvalid(Exception):
    """As `nccl.core.NcclInvalid`."""


@dataclass(kw_only=True)
class FakeConfig:
    """The used part of `nccl.core.NCCLConfig`."""

    blocking: bool | None = None


class FakeId:
    """As `nccl.core.UniqueId`."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __bytes__(self) -> bytes:
        return self._data

    @staticmethod
    def from_bytes(b: bytes | bytearray | memoryview) -> FakeId:
        """Return the id that these bytes are."""
        return FakeId(bytes(b))
