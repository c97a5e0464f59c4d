"""Memory of CUDA devices that the ranks of a host lend one another: mapped once, kept until it is freed."""

from aiodist.backends.cuda_ipc.burying import Burying
from aiodist.backends.cuda_ipc.mapping import Mapped, Mapper, TorchMapper
from aiodist.backends.cuda_ipc.mappings import Mappings, Visit

__all__ = ["Burying", "Mapped", "Mapper", "Mappings", "TorchMapper", "Visit"]
