"""gloo, which torch brings along: ranks over TCP where there is no MPI.

No global state of `torch.distributed` is set: process groups of gloo's are made and used directly. What they can and
cannot do is in [Note: gloo] of `library`. It follows that ranks tell each other everything in *frames*: a header,
then the data if it is short. One thread per peer waits for frames, whose receives are always posted. Longer data is
announced by a frame, received when its size is known and a receive was matched, and then acknowledged. Matching is
done here, so receives from any source work, and a message of another size than its receive is an error. A collective
starts with an exchange of frames, which shows whether the ranks agree; a short one is over then, as the frames
carried the data; for a long one gloo's own goes ahead.

Each module imports only from lines below its own:

    transport                     one communicator; `open_world` makes the first
    native | receiving            its collectives; its receives, matched with messages
    wire                          frames between all ranks, for all communicators
    peer                          what goes to and comes from one other rank
    group | meeting | works       gloo's collectives; how ranks connect; the user's own works
    frames                        the format
    signatures | reductions       what a collective is; what can be reduced, and combining it
    library                       what is used of gloo, and its errors as ours
    memory                        tensors as bytes
"""

from aiodist.backends.gloo.native import GlooNative
from aiodist.backends.gloo.transport import GlooTransport, open_world
from aiodist.backends.gloo.works import work_handle

__all__ = ["GlooNative", "GlooTransport", "open_world", "work_handle"]
