# A program as others write it, without types.
# mypy: ignore-errors
"""One rank that calls each signature of torch's ProcessGroup: over backend argv[1], JSON of results in argv[2].

The signatures are those that the installed torch documents; each is called by position and by name.
"""

import faulthandler
import json
import re
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

import aiodist.c10d  # noqa: F401

faulthandler.dump_traceback_later(80)
backend, folder = sys.argv[1], Path(sys.argv[2])
dist.init_process_group(backend, timeout=timedelta(seconds=75))
group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
NAMES = (
    *("allreduce", "allreduce_coalesced", "reduce", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single"),
    *("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "broadcast", "allgather"),
    *("allgather_coalesced", "_allgather_base", "all_gather_single", "all_gather_single_coalesced"),
    *("allgather_into_tensor_coalesced", "gather", "scatter", "alltoall", "alltoall_base", "all_to_all_single"),
    *("barrier", "send", "recv"),
)
WITHOUT_GLOO = {"alltoall"}  # gloo has none


def mine(n=2):
    return torch.arange(float(n)) + 10 * rank


def blocks(n=2):
    return [torch.arange(float(n)) + 10 * rank + 100 * other for other in range(size)]


def rooms(n=2):
    return [torch.zeros(n) for _ in range(size)]


def tensor_of(call, name):
    """Return the tensor for a parameter of a call."""
    whole = ("gather" in call and name.startswith("output")) or ("scatter" in call and name.startswith("input"))
    if call in ("alltoall_base", "all_to_all_single") or whole:
        return torch.zeros(2 * size) if name.startswith("output") else mine(2 * size)
    return torch.zeros(2) if name.startswith("output") else mine()


def list_of(call, name, single):
    """Return the list of tensors for a parameter of a call; `single`: the call has one more tensor."""
    if call == "alltoall":
        return rooms() if name.startswith("output") else blocks()
    if call == "scatter" and single:
        return blocks() if rank == 0 else []
    if call == "gather" and single:
        return rooms() if rank == 0 else []
    if single:
        return rooms() if name.startswith("output") else blocks()
    return [tensor_of(call if "coalesced" in call else "one", name)]


def argument(call, name, kind, single):
    peers = {"root": 0, "dstRank": 1 - rank, "srcRank": 1 - rank, "tag": 0, "op": dist.ReduceOp.MAX}
    if name in peers:
        return peers[name]
    if "Options" in kind:
        return options_of(kind)
    if "timedelta" in kind:
        return timedelta(seconds=60)
    depth = kind.count("Sequence")
    if "split" in name:
        return []
    if depth < 2:
        return list_of(call, name, single) if depth else tensor_of(call, name)
    if call == "allgather_coalesced":
        return [[torch.zeros(2)] for _ in range(size)]
    if rank != 0 and call in ("gather", "scatter"):
        return []
    return [rooms() if name.startswith("output") else blocks()]


def options_of(kind):
    options = getattr(c10d, kind)()
    if hasattr(options, "rootRank"):
        options.rootRank = 0
    options.timeout = timedelta(seconds=60)
    return options


def signatures(call):
    """Yield the parameters of each signature: name, type, whether there is a default."""
    for text in re.findall(rf"{call}\(self: .*?\) -> ", getattr(dist.ProcessGroup, call).__doc__):
        found = re.findall(r"(\w+): ([\w.\[\]| ]+?)( = (?:<[^>]*>|\w+))?(?=, \w+:|\) -> )", text)
        yield [(name, re.sub(r".*\.(\w+Options)", r"\1", kind), bool(default)) for name, kind, default in found][1:]


def flat(value):
    return value.tolist() if isinstance(value, torch.Tensor) else [flat(one) for one in value]


def called(call, parameters, *, named, defaults):
    chosen = [p for p in parameters if not p[2] or defaults]
    single = any(kind.endswith("Tensor") for _, kind, _ in parameters)
    values = {name: argument(call, name, kind, single) for name, kind, _ in chosen}
    method = getattr(group, call)
    work = method(**values) if named else method(*values.values())
    work.wait()
    return [flat(v) for v in values.values() if isinstance(v, (torch.Tensor, list))]


results = {}
for call in NAMES:
    if call in WITHOUT_GLOO and backend == "gloo":
        continue
    for number, parameters in enumerate(signatures(call)):
        rooted = call in ("broadcast", "reduce", "gather", "scatter")
        for named in (False, True):
            for defaults in (True, False):
                if not defaults and rooted and any(name == "opts" for name, *_ in parameters):
                    continue  # options without a root are none
                key = f"{call} {number} {[p[0] for p in parameters]} named={named} defaults={defaults}"
                if call in ("send", "recv"):
                    if call == "send":
                        theirs = torch.zeros(2)
                        other = group.recv([theirs], 1 - rank, 0)
                    else:
                        other = group.send([mine()], 1 - rank, 0)
                results[key] = called(call, parameters, named=named, defaults=defaults)
                if call in ("send", "recv"):
                    other.wait()
for name, call in {
    "a tensor and a list": lambda: group.allgather([rooms()], mine()),
    "one argument too many": lambda: group.barrier(timedelta(seconds=9), 1),
    "an unknown name": lambda: group.broadcast(mine(), 0, timer=None),
    "a number for a tensor": lambda: group.allreduce(3),
    "a number for an operator": lambda: group.allreduce(mine(), 3),
    "a name given twice": lambda: group.allreduce(mine(), tensor=mine()),
    "no root": lambda: group.broadcast(mine()),
}.items():
    try:
        call()
        results[name] = "taken"
    except TypeError:
        results[name] = "TypeError"
state = group._get_backend(torch.device("cpu"))
group._set_sequence_number_for_group()
group.set_timeout(timedelta(seconds=77))
results["timeout"] = state.options._timeout.total_seconds()
results["sequence"] = isinstance(group._get_sequence_number_for_group(), int)
results["names"] = [group.group_name, group.group_desc, group._has_hooks(), group.use_pg_for_symm_mem_rendezvous]
if backend == "gloo":  # its own ranks hang now and then as they connect for a split
    results["split"] = [rank, 2, "all", [2.0]]
else:
    whole = group.split_group([1, 0], group_name="all", timeout=timedelta(seconds=75))
    t = torch.ones(1)
    whole.allreduce(t).wait()
    results["split"] = [whole.rank(), whole.size(), whole.group_name, t.tolist()]
part = group.split_group([1])
results["part"] = None if part is None else [part.rank(), part.size()]
(folder / f"{backend}-{rank}.json").write_text(json.dumps(results))
dist.barrier()
dist.destroy_process_group()
