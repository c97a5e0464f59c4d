"""gloo, a part of torch: ranks over TCP without MPI.

No global state of `torch.distributed` is set: gloo's process groups are created and used directly. [Note: gloo] of
`library` has the properties of the groups. Because of these all messages are *frames*: a header, then short data. One
thread per peer waits for frames, with a receive always posted. A frame announces longer data. The receiver posts a
receive after the match, with the known size, then acknowledges the data. Messages are matched here, so receives from
any source work. A message of another size than its receive is an error.
"""

from aiodist.backends.gloo.native import GlooNative, work_handle
from aiodist.backends.gloo.transport import GlooTransport, open_world

__all__ = ["GlooNative", "GlooTransport", "open_world", "work_handle"]
