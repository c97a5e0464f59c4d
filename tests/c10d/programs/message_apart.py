# A program as others write it, without types.
# mypy: ignore-errors
"""Three ranks, threads of one process: argv[1] aborts its group while a message between the two others travels."""

import sys
import threading
from functools import partial

import torch
import torch.distributed as dist
from in_threads import made, pool

from aiodist.communicator import parts_of
from aiodist.testing.seams.carriers import ShmTransport
from aiodist.testing.seams.progress import transport_lock


class Held:
    """Holds back the data of messages to a rank until its release."""

    def __init__(self, transport):
        self.held, self.some = [], threading.Event()
        irecv = ShmTransport.irecv

        def later(own, t, src, tag, done):
            receive = partial(irecv, own, t, src, tag, done)
            if own is not transport or tag == 0:
                receive()
            else:
                self.held.append(receive)
                self.some.set()

        ShmTransport.irecv = later

    def come(self):
        with transport_lock:
            for receive in self.held:
                receive()


gone = int(sys.argv[1])
groups = made("group", 3)
src, dst = (rank for rank in range(3) if rank != gone)
held = Held(parts_of(groups[dst].coll).transport)
sent, came = torch.arange(1e6), torch.zeros(1_000_000)
send = groups[src].send([sent], dst, 1)
recv = groups[dst].recv([came], src, 1)
assert held.some.wait(10)
pending = [groups[rank].allreduce([torch.ones(3)]) for rank in (src, dst)]
pending.append(groups[dst].recv([torch.ones(3)], gone, 2))
leaving = pool.submit(groups[gone].abort)
for work in pending:
    try:
        work.wait()
    except dist.DistBackendError as error:
        print("told:", error, flush=True)
leaving.result(10)
assert not recv.is_completed()
held.come()
recv.wait()
send.wait()
assert torch.equal(sent, came)
print("whole", flush=True)
for rank in (src, dst):
    groups[rank].abort()
