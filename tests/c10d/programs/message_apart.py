# A program as others write it, without types.
# mypy: ignore-errors
"""Three ranks, threads of one process: argv[1] aborts its group while a message between the two others travels."""

import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from time import monotonic, sleep

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _DistributedBackendOptions

import aiodist.c10d  # noqa: F401

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
pool = ThreadPoolExecutor(8)


def make(name, rank, size=3):
    options = _DistributedBackendOptions()
    client = dist.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
    options.store = dist.PrefixStore(name, client)
    options.group_rank, options.group_size, options.timeout = rank, size, timedelta(seconds=20)
    options.group_id, options.global_ranks_in_group = "", []
    return dist.Backend._plugins["AIODIST"].creator_fn(options, None)


class Held:
    """Holds the data of messages back until it is told to let them come."""

    def __init__(self, coll):
        self.coll, self.transport, self.held = coll, coll.parts.transport, []
        coll.parts.dispatcher.mailbox._transport = self

    def __getattr__(self, name):
        return getattr(self.transport, name)

    def irecv(self, t, src, tag, done):
        if tag == 0:
            self.transport.irecv(t, src, tag, done)
        else:
            self.held.append(lambda: self.transport.irecv(t, src, tag, done))

    def come(self):
        for call in self.held:
            self.coll.parts.dispatcher.progress.start_from_thread(call)


gone = int(sys.argv[1])
groups = [future.result() for future in [pool.submit(make, "group", rank) for rank in range(3)]]
src, dst = (rank for rank in range(3) if rank != gone)
held = Held(groups[dst].coll)
sent, came = torch.arange(1e6), torch.zeros(1_000_000)
send = groups[src].send([sent], dst, 1)
recv = groups[dst].recv([came], src, 1)
until = monotonic() + 10
while not held.held and monotonic() < until:
    sleep(0.01)
pending = [groups[rank].allreduce([torch.ones(3)]) for rank in (src, dst)]
pending.append(groups[dst].recv([torch.ones(3)], gone, 2))
leaving = pool.submit(groups[gone].abort)
for work in pending:
    try:
        work.wait()
    except dist.DistBackendError as error:
        print("told:", error, flush=True)
sleep(1)  # for what follows from the abort
assert not recv.is_completed()
held.come()
recv.wait()
send.wait()
assert torch.equal(sent, came)
print("whole", flush=True)
for rank in (src, dst):
    groups[rank].abort()
leaving.result()
