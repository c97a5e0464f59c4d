"""NCCL for tests: `FakeNccl` stands in for the module `nccl.core` of nccl4py, among ranks of this process.

It takes tensors of simulated devices (`aiodist.testing.cuda`) and queues its work on the stream that it is
given: a kernel ends when all ranks are at it. It checks what NCCL leaves unchecked: see `FakeNccl.violations`.

    library = aiodist.backends.nccl.Library(FakeNccl(dawdle=3))
"""

from aiodist.testing.fake_nccl.communicator import FakeCommunicator
from aiodist.testing.fake_nccl.core import FakeNccl
from aiodist.testing.fake_nccl.interface import FakeConfig, FakeId, NCCLError, NcclInvalid

__all__ = ["FakeCommunicator", "FakeConfig", "FakeId", "FakeNccl", "NCCLError", "NcclInvalid"]
