"""CUDA memory shared among the ranks of a host. A rank maps a storage once, until the owner frees the storage."""

from aiodist.backends.cuda_ipc.mapping import Mapped, Mapper
from aiodist.backends.cuda_ipc.mappings import FRAME_BYTES, Loan, Mappings, ReleaseNotices

__all__ = ["FRAME_BYTES", "Loan", "Mapped", "Mapper", "Mappings", "ReleaseNotices"]
