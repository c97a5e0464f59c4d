"""Memory of CUDA devices that the ranks of a host lend one another: mapped once, kept until it is freed."""

from aiodist.backends.cuda_ipc.mapping import Mapped, Mapper
from aiodist.backends.cuda_ipc.mappings import FRAME_BYTES, Loan, Mappings, ReleaseNotices

__all__ = ["FRAME_BYTES", "Loan", "Mapped", "Mapper", "Mappings", "ReleaseNotices"]
