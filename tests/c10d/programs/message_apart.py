# A program as others write it, without types.
# mypy: ignore-errors
"""Three ranks, threads of one process: argv[1] aborts its group while a message between the two others travels."""

import sys
import threading

import torch
import torch.distributed as dist
from in_threads import made, pool


class Held:
    """Holds the data of messages back until it is told to let them come."""

    def __init__(self, coll):
        self.coll, self.transport, self.held = coll, coll.parts.transport, []
        self.some = threading.Event()
        coll.parts.dispatcher.mailbox._transport = self

    def __getattr__(self, name):
        return getattr(self.transport, name)

    def irecv(self, t, src, tag, done):
        if tag == 0:
            self.transport.irecv(t, src, tag, done)
        else:
            self.held.append(lambda: self.transport.irecv(t, src, tag, done))
            self.some.set()

    def come(self):
        for call in self.held:
            self.coll.parts.dispatcher.progress.start_from_thread(call)


gone = int(sys.argv[1])
groups = made("group", 3)
src, dst = (rank for rank in range(3) if rank != gone)
held = Held(groups[dst].coll)
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
