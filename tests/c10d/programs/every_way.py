# A program as others write it, without types.
# mypy: ignore-errors
"""One rank that trains and communicates in every way of torch: over backend argv[1], results in argv[2].

On the CPU, or on device argv[3]; weights and data come from the CPU's generator on either.
"""

import faulthandler
import json
import sys
import threading
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.nn import functional as dist_functional
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP

import aiodist.c10d  # noqa: F401

warnings.simplefilter("ignore")
faulthandler.dump_traceback_later(50)
backend, folder = sys.argv[1], Path(sys.argv[2])
device = torch.device(sys.argv[3] if len(sys.argv) > 3 else "cpu")
dist.init_process_group(backend)
rank, size = dist.get_rank(), dist.get_world_size()
results = {}
torch.set_default_device(device)


def case(function):
    print(function.__name__, flush=True)
    try:
        results[function.__name__] = function()
    except Exception:  # noqa: BLE001  - the test shows it
        results[function.__name__] = traceback.format_exc()
    return function


def made(seed):
    """Make a model with the CPU's generator, for any device."""

    def wrap(model):
        def make():
            torch.manual_seed(seed)
            with torch.device("cpu"):
                return model().to(device)

        return make

    return wrap


@made(0)
def mlp():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))


@made(1)
class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0) for _ in range(2)
        )
        self.last = nn.Linear(32, 4)

    def forward(self, x):
        x = self.first(x)[:, None]
        for block in self.blocks:
            x = block(x)
        return self.last(x[:, 0])


@made(2)
class Branches(nn.Module):
    """Uses one of two branches."""

    def __init__(self):
        super().__init__()
        self.first = nn.ModuleList(nn.Linear(16, 8) for _ in range(2))
        self.last = nn.Linear(8, 4)
        self.branch = 0

    def forward(self, x):
        return self.last(self.first[self.branch](x).relu())


def data(step, of=rank):
    generator = torch.Generator("cpu").manual_seed(100 * step + of)
    return tuple(torch.randn(8, n, generator=generator, device="cpu").to(device) for n in (16, 4))


def train(net, opt, steps=4, of=rank):
    losses = []
    for step in range(steps):
        x, y = data(step, of)
        opt.zero_grad()
        loss = nn.functional.mse_loss(net(x), y)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


def sgd(net):
    return torch.optim.SGD(net.parameters(), 0.1)


@case
def ddp():
    net = DDP(mlp())
    return train(net, sgd(net))


@case
def ddp_static_graph():
    net = DDP(mlp(), static_graph=True, gradient_as_bucket_view=True)
    return train(net, sgd(net))


@case
def ddp_comm_hook():
    net = DDP(mlp())
    net.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return train(net, sgd(net))


@case
def ddp_hooks_in_cpp():
    found = []
    for hook in (dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS):
        net = DDP(mlp(), bucket_cap_mb=0.0001)  # several buckets
        net._register_builtin_comm_hook(hook)
        found.append(train(net, sgd(net)))
    return found


@case
def ddp_hook_of_its_own():
    def doubled(state, bucket):
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda over: over.value()[0].mul_(2.0 / size))

    net = DDP(mlp(), bucket_cap_mb=0.001)
    net.register_comm_hook(None, doubled)
    return train(net, sgd(net))


@case
def ddp_unused_parameters():
    net = Branches()
    wrapped = DDP(net, find_unused_parameters=True)
    opt, losses = sgd(wrapped), []
    for step in range(4):
        net.branch = step % 2 if step < 3 else rank  # the last step leaves no parameter out on both
        losses += train(wrapped, opt, 1)
    return [*losses, *net.last.weight.flatten()[:3].tolist()]


@case
def ddp_post_local_sgd():
    net = DDP(mlp())
    state = post_localSGD_hook.PostLocalSGDState(None, dist.new_subgroups(1)[0], 1)
    net.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    averager = PeriodicModelAverager(period=2, warmup_steps=1)
    return train(net, PostLocalSGDOptimizer(sgd(net), averager), 6)


@case
def ddp_powersgd():
    net = DDP(mlp())
    state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2, min_compression_rate=1)
    net.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return train(net, sgd(net))


@case
def ddp_no_sync():
    net = DDP(mlp())
    opt, losses = sgd(net), []
    for step in range(4):
        x, y = data(2 * step)
        with net.no_sync():
            nn.functional.mse_loss(net(x), y).backward()
        losses += train(net, opt, 1)
    return losses


@case
def ddp_join():
    net = DDP(mlp())
    with Join([net]):
        return train(net, sgd(net), 3 + rank)


@case
def ddp_sparse():
    net = DDP(made(3)(lambda: nn.Embedding(10, 4, sparse=True))())
    opt, losses = sgd(net), []
    for step in range(3):
        opt.zero_grad()
        loss = net(torch.tensor([rank, 2, step])).pow(2).sum()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


@case
def zero_redundancy_optimizer():
    net = DDP(mlp())
    return train(net, ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, lr=0.01))


@case
def fsdp2():
    net = Transformer()
    for block in net.blocks:
        fully_shard(block)
    fully_shard(net)
    return train(net, torch.optim.Adam(net.parameters(), 0.01))


@case
def fsdp2_mixed_precision():
    net = Transformer()
    kinds = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in net.blocks:
        fully_shard(block, mp_policy=kinds, reshard_after_forward=False)
    fully_shard(net, mp_policy=kinds)
    found = train(net, torch.optim.SGD(net.parameters(), 0.1))
    return [*found, nn.utils.clip_grad_norm_(net.parameters(), 1.0).full_tensor().item()]


@case
def fsdp1():
    net = FullyShardedDataParallel(mlp(), device_id=device)
    return train(net, torch.optim.Adam(net.parameters(), 0.01))


@case
def dtensor():
    mesh = init_device_mesh(device.type, (size,))
    net = parallelize_module(mlp(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return train(net, torch.optim.SGD(net.parameters(), 0.1, foreach=False), of=0)


@case
def dtensor_layouts():
    mesh = init_device_mesh(device.type, (size,))
    whole = distribute_tensor(torch.arange(30.0).view(5, 6), mesh, [Shard(0)])  # 5 rows on two ranks
    across = whole.redistribute(mesh, [Shard(1)])
    product = (across @ whole.redistribute(mesh, [Replicate()]).t()).redistribute(mesh, [Replicate()])
    partial = DTensor.from_local(torch.ones(3) * (rank + 1), mesh, [Partial()]).full_tensor()
    return [across.to_local().tolist(), product.to_local().tolist(), partial.tolist()]


@case
def device_mesh():
    mesh = init_device_mesh(device.type, (1, size), mesh_dim_names=("data", "tensor"))
    t = torch.ones(2) * rank
    dist.all_reduce(t, group=mesh["tensor"].get_group())
    return [*t.tolist(), mesh["data"].size()]


@case
def pipeline():
    whole = mlp()
    part = whole[:2] if rank == 0 else whole[2:]
    stage = PipelineStage(part, rank, 2, device)
    schedule, opt, found = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss), sgd(part), []
    for step in range(3):
        x, y = data(step, 0)
        losses = []
        opt.zero_grad()
        schedule.step(x) if rank == 0 else schedule.step(target=y, losses=losses)
        opt.step()
        found += [loss.item() for loss in losses]
    return found


@case
def pipeline_1f1b():
    whole = mlp()
    part = whole[:2] if rank == 0 else whole[2:]
    schedule = Schedule1F1B(PipelineStage(part, rank, 2, device), 4, loss_fn=nn.functional.mse_loss)
    losses = []
    x, y = data(0, 0)
    schedule.step(x) if rank == 0 else schedule.step(target=y, losses=losses)
    return [*(loss.item() for loss in losses), *(p.grad.sum().item() for p in part.parameters())]


@case
def checkpoint():
    net = fully_shard(Transformer())
    train(net, sgd(net), 2)
    at = str(folder / f"checkpoint-{backend}")
    dcp.save(get_model_state_dict(net), checkpoint_id=at)
    other = fully_shard(Transformer())
    state = get_model_state_dict(other)
    dcp.load(state, checkpoint_id=at)
    set_model_state_dict(other, state)
    pairs = list(zip(net.parameters(), other.parameters(), strict=True))
    return [torch.equal(a.to_local(), b.to_local()) for a, b in pairs]


@case
def checkpoint_in_the_background():
    net = fully_shard(Transformer())
    at = str(folder / f"background-{backend}")
    dcp.async_save(get_model_state_dict(net), checkpoint_id=at, process_group=dist.new_group([0, 1])).result()
    state = {name: torch.zeros_like(t) for name, t in get_model_state_dict(net).items()}
    dcp.load(state, checkpoint_id=at)
    return [torch.equal(state[name].to_local(), t.to_local()) for name, t in get_model_state_dict(net).items()]


@case
def autograd_collectives():
    x = (torch.arange(4.0) + rank).requires_grad_()
    total = dist_functional.all_reduce(x * x)
    parts = dist_functional.all_gather(x * (rank + 1))
    moved = dist_functional.all_to_all([torch.empty(2), torch.empty(2)], list((3 * x).split(2)))
    (total.sum() + (parts[0] * parts[1]).sum() + moved[0].pow(2).sum()).backward()
    return x.grad.tolist()


@case
def functional_collectives():
    group, t = dist.group.WORLD, torch.arange(4.0) + rank
    found = [
        funcol.all_reduce(t, "sum", group),
        funcol.all_gather_tensor(t, 0, group),
        funcol.reduce_scatter_tensor(torch.arange(4.0) * (rank + 1), "sum", 0, group),
        funcol.all_to_all_single(torch.arange(2.0 * size) + 10 * rank, None, None, group),
        funcol.broadcast(t, 0, group),
        *funcol.all_gather_into_tensor_coalesced([t, t + 1], group),
        *funcol.reduce_scatter_tensor_coalesced([torch.ones(4), torch.ones(2)], "sum", [0, 0], group),
        *funcol.all_reduce_coalesced([t, t], "sum", group),
    ]
    return [x.tolist() for x in found]


@case
def object_collectives():
    every, one, mine, at_root = [None] * size, [rank * 3], [None], [None] * size
    dist.all_gather_object(every, {"rank": rank})
    dist.broadcast_object_list(one, 1)
    dist.scatter_object_list(mine, [f"for {r}" for r in range(size)] if rank == 0 else None, 0)
    dist.gather_object(rank, at_root if rank == 0 else None)
    sent = ["word"] if rank == 0 else [None]
    dist.send_object_list(sent, 1) if rank == 0 else dist.recv_object_list(sent, 0)
    return [every, one, mine, at_root, sent]


@case
def groups():
    alone, both = dist.new_group([0]), dist.new_group([0, 1])
    t, u = torch.ones(3) * (rank + 1), torch.ones(2)
    dist.all_reduce(t, group=both)
    if rank == 0:
        dist.all_reduce(u, group=alone)
    own = dist.new_group([rank], use_local_synchronization=True)
    dist.all_reduce(u, group=own)
    dist.destroy_process_group(both)
    return [t.tolist(), u.tolist()]


@case
def coalescing():
    ts = [torch.ones(3) * rank, torch.ones(2) * (rank + 1)]
    with dist._coalescing_manager():
        for t in ts:
            dist.all_reduce(t)
    outs = [torch.empty(2 * size) for _ in range(2)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for i, out in enumerate(outs):
            dist.all_gather_into_tensor(out, torch.ones(2) * rank + i)
    manager.wait()
    return [t.tolist() for t in ts + outs]


@case
def messages():
    x, y = torch.zeros(4), torch.zeros(2)
    if rank == 0:
        dist.send(torch.arange(4.0), 1, tag=5)
        source = dist.recv(x)
    else:
        source = dist.recv(x, tag=5)
        dist.send(x, 0)
    right, left = (rank + 1) % size, (rank - 1) % size
    both = [dist.P2POp(dist.isend, torch.ones(2) * rank, right), dist.P2POp(dist.irecv, y, left)]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    return [source, x.tolist(), y.tolist()]


@case
def uneven_alltoall():
    sizes = [1, 2]
    outs = [sizes[rank]] * size
    out = torch.empty(sum(outs), 2)
    dist.all_to_all_single(out, torch.arange(6.0).view(3, 2) + 10 * rank, outs, sizes)
    return out.tolist()


@case
def channels_last():
    t = torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last) * (rank + 1)
    dist.all_reduce(t)
    return t.tolist()


@case
def operators():
    found = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
        t = torch.tensor([2.0, 3.0]) + rank
        dist.all_reduce(t, op)
        found.append(t.tolist())
    for op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR):
        t = torch.tensor([6, 3]) + rank
        dist.all_reduce(t, op)
        found.append(t.tolist())
    return found


@case
def works():
    """A finished work, and its future, which is finished and calls inline; asked for before the end and after it."""
    found = []
    for early in (True, False) * 20:
        work = dist.all_reduce(torch.ones(4) * rank, async_op=True)
        future = work.get_future() if early else None
        work.wait()
        ran = []
        future = future or work.get_future()
        chained = future.then(lambda done, ran=ran: ran.append(threading.current_thread() is threading.main_thread()))
        chained.wait()
        found.append([future.done(), ran, [t.tolist() for t in future.value()], [t.tolist() for t in work.result()]])
        found.append([work.is_completed(), work.is_success(), work.exception() is None, work.synchronize()])
        found.append([work.wait(timedelta(seconds=9)), work.get_future().done()])
    work = dist.barrier(async_op=True)
    work.wait()
    found.append([work.is_completed(), work.get_future().done()])
    y = torch.zeros(3)
    if rank == 0:
        dist.isend(torch.arange(3.0), 1).wait()
    else:
        work = dist.irecv(y, 0)
        work.wait()
        found.append([work.is_completed(), work._source_rank()])
    return [*found, y.tolist()]


(folder / f"{backend}-{rank}.json").write_text(json.dumps(results))
dist.destroy_process_group()
