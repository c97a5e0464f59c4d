"""Work on CUDA devices: streams' events, staging through the host, memory mapped from other processes."""

from aiodist.backends.cuda_ipc import Mapped, Mapper, Mappings
from aiodist.collectives.cuda.accelerator import Accelerator
from aiodist.collectives.cuda.ipc import CudaIpc
from aiodist.collectives.cuda.on_device import DeviceWork, on_devices
from aiodist.collectives.cuda.staging import Staged

__all__ = ["Accelerator", "CudaIpc", "DeviceWork", "Mapped", "Mapper", "Mappings", "Staged", "on_devices"]
