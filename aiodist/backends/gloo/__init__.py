"""The backend over gloo, a part of torch, for ranks over TCP without MPI.

No global state of `torch.distributed` is set, since gloo's process groups are created and used directly. [Note: gloo]
of `library` has the properties of the groups. Because of these properties, all messages are *frames*: a header, then
short data. One thread per peer waits for frames, with a receive always posted. A frame only announces longer data.
After the match, the receiver posts a receive of the known size, then acknowledges the data. This package matches
messages, so receives from any source work. A message of another size than its receive is an error.
"""

from aiodist.backends.gloo.native import GlooNative, work_handle
from aiodist.backends.gloo.transport import GlooTransport, open_world

__all__ = ["GlooNative", "GlooTransport", "open_world", "work_handle"]
