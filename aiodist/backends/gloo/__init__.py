"""gloo, a part of torch: ranks over TCP without MPI.

No global state of `torch.distributed` is set: gloo's process groups are created and used directly. [Note: gloo] of
`library` has their properties. Because of these all messages are *frames*: a header, then the data if it is short. One
thread per peer waits for frames, with a receive always posted. A frame announces longer data; the receiver posts a
receive when its size is known and a receive has matched, and then acknowledges it. Messages are matched here, so
receives from any source work, and a message of another size than its receive is an error.
"""

from aiodist.backends.gloo.native import GlooNative, work_handle
from aiodist.backends.gloo.transport import GlooTransport, open_world

__all__ = ["GlooNative", "GlooTransport", "open_world", "work_handle"]
