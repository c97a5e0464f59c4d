"""CUDA memory shared among the ranks of a host: each storage is mapped once, until the owner frees it."""

from aiodist.backends.cuda_ipc.mapping import Mapped, Mapper
from aiodist.backends.cuda_ipc.mappings import FRAME_BYTES, Loan, Mappings, ReleaseNotices

__all__ = ["FRAME_BYTES", "Loan", "Mapped", "Mapper", "Mappings", "ReleaseNotices"]
