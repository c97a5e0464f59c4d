"""gloo, which torch brings along: ranks over TCP where there is no MPI.

No global state of `torch.distributed` is set: process groups of gloo's are made and used directly. What they can and
cannot do is in [Note: gloo] of `library`. It follows that ranks tell each other everything in *frames*: a header,
then the data if it is short. One thread per peer waits for frames, whose receives are always posted. Longer data is
announced by a frame, received when its size is known and a receive was matched, and then acknowledged. Matching is
done here, so receives from any source work, and a message of another size than its receive is an error.
"""

from aiodist.backends.gloo.native import GlooNative, work_handle
from aiodist.backends.gloo.transport import GlooTransport, open_world

__all__ = ["GlooNative", "GlooTransport", "open_world", "work_handle"]
