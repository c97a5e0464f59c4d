# A program as others write it, without types.
# mypy: ignore-errors
"""One rank of a program, named by argv[1], that gloo cannot run."""

import os
import signal
import sys
import threading
import time
from datetime import timedelta
from urllib.request import Request, urlopen

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import aiodist.c10d


def own():
    rank, size = dist.get_rank(), dist.get_world_size()
    t = torch.tensor([1.0, 3.0]) + rank
    dist.all_reduce(t, dist.ReduceOp.AVG)
    assert t.tolist() == [1.5, 3.5], t
    t = torch.tensor([-3, 4]) - rank
    dist.all_reduce(t, dist.ReduceOp.AVG)
    assert t.tolist() == [-3, 3], t  # -7 and 7 halved as NCCL does it
    t, out = torch.tensor([-3, 4]) - rank, torch.empty(1, dtype=torch.int64)
    scattered = dist.ReduceScatterOptions()
    scattered.reduceOp = dist.ReduceOp.AVG
    dist.group.WORLD.reduce_scatter([out], [list(t.split(1))], scattered).wait()
    assert out.item() == [-3, 3][rank]
    dist.reduce(t, 1, dist.ReduceOp.AVG)
    assert rank == 0 or t.tolist() == [-3, 3], t
    t = torch.ones(2)
    dist.all_reduce(t, dist._make_nccl_premul_sum(2.0))
    assert t.tolist() == [4.0, 4.0], t
    t = torch.full((4,), rank + 1.0).to(torch.float8_e4m3fn)
    dist.broadcast(t, 1)
    assert t.float().tolist() == [2.0] * 4
    work = dist.all_reduce(torch.ones(3), async_op=True)
    assert work.wait()
    assert [work.is_completed(), work.is_success(), work.exception()] == [True, True, None]
    assert work.get_future().wait()[0].tolist() == [2.0] * 3
    outs = [torch.zeros(3) for _ in range(size)]
    dist.all_gather(outs, torch.full((3,), rank + 1.0), async_op=True)  # dropped at once
    for _ in range(10_000):
        came = torch.tensor([torch.cat(outs).tolist() == [1.0] * 3 + [2.0] * 3], dtype=torch.int)
        dist.all_reduce(came, dist.ReduceOp.MIN)
        if came:
            break
    assert came, outs
    assert nested(4) == 8.0
    sizes = [1, 2]
    outs = [torch.empty(sizes[rank]) for _ in range(size)]
    dist.all_to_all(outs, list((torch.arange(3.0) + 10 * rank).split(sizes)))
    assert torch.cat(outs).tolist() == [[0.0, 10.0], [1.0, 2.0, 11.0, 12.0]][rank]
    out = torch.empty(sizes[rank])
    dist.reduce_scatter(out, [torch.ones(1), torch.ones(2)])
    assert out.tolist() == [2.0] * sizes[rank]
    dist.group.WORLD.monitored_barrier()
    net = DDP(nn.Linear(300, 300, bias=False))
    aiodist.c10d.ddp_hook(net)
    before = dist.group.WORLD.coll.statistics().arena_bytes
    for _ in range(3):
        net.zero_grad()
        net(torch.full((1, 300), rank + 1.0)).sum().backward()
        assert net.module.weight.grad.eq(1.5).all()
    assert dist.group.WORLD.coll.statistics().arena_bytes > before
    print("own ways agree")


def nested(depth):
    """Return a sum that the callback of a future waits for another future to add to, `depth` times."""
    future = dist.all_reduce(torch.ones(1), async_op=True).get_future()
    more = future.then(lambda over: over.value()[0].item() + (nested(depth - 1) if depth > 1 else 0.0))
    return more.wait()


def layouts():
    """Tensors with another order in memory, on one rank or on both, have the elements that they show."""
    rank = dist.get_rank()
    for shape in ((4, 6), (2, 4, 6, 8)):
        plain = [torch.randn(shape, generator=torch.Generator().manual_seed(r)) for r in (0, 1)]
        for mine in (True, rank == 0):

            def lie(t, mine=mine):
                return t.transpose(0, -1).contiguous().transpose(0, -1) if mine else t.clone()

            x, other, total = lie(plain[rank]), plain[1 - rank], sum(plain)
            blank = lambda t=x, lie=lie: lie(torch.full_like(t, -1.0))  # noqa: E731
            for call, wanted in (
                (lambda t: dist.all_reduce(t), total),
                (lambda t: dist.reduce(t, 1), total if rank else plain[0]),
                (lambda t: dist.broadcast(t, 1), plain[1]),
            ):
                t = lie(plain[rank])
                call(t)
                assert torch.allclose(t, wanted)
            outs = [blank(), blank()]
            dist.all_gather(outs, x)
            assert all(map(torch.equal, outs, plain))
            outs = [blank(), blank()] if rank else None
            dist.gather(x, outs, 1)
            assert not rank or all(map(torch.equal, outs, plain))
            out = blank()
            dist.scatter(out, [lie(t) for t in plain] if rank else None, 1)
            assert torch.equal(out, plain[rank])
            outs = [blank(), blank()]
            dist.all_to_all(outs, [x, lie(other)])
            assert all(torch.equal(out, t) for out, t in zip(outs, plain if rank == 0 else plain[::-1], strict=True))
            dist.reduce_scatter(out, [x, lie(other)])
            assert torch.allclose(out, total)
            whole = lie(torch.full((2 * shape[0], *shape[1:]), -1.0))
            dist.all_gather_into_tensor(whole, x)
            assert torch.equal(whole, torch.cat(plain))
            part = lie(torch.full((shape[0] // 2, *shape[1:]), -1.0))
            dist.reduce_scatter_tensor(part, x)
            assert torch.allclose(part, total.chunk(2)[rank])
            out = blank()
            for sizes in ((None, None), ([shape[0] // 2] * 2, [shape[0] // 2] * 2)):
                dist.all_to_all_single(out, x, *sizes)
                assert torch.equal(out, torch.cat([t.chunk(2)[rank] for t in plain]))
            if rank:
                dist.send(x, 0)
            else:
                dist.recv(out, 1)
                assert torch.equal(out, other)
    print("all layouts agree")


def sizes():
    """Outputs of another size than comes, operators that are not known, and inputs that are only read."""
    rank = dist.get_rank()
    x, four = torch.arange(2.0), torch.ones(4)

    def refused(call, *args):
        before = [t.clone() for t in args if isinstance(t, torch.Tensor)]
        try:
            call(*args)
        except ValueError as error:
            assert "expected" in str(error), error  # noqa: PT017
        else:
            raise AssertionError(f"{call.__name__}{args} was not refused")
        assert all(map(torch.equal, before, [t for t in args if isinstance(t, torch.Tensor)]))

    for wrong in (1, 3):
        out = torch.empty(wrong).fill_(-1)
        refused(dist.all_gather, [out, out.clone()], x)
        refused(dist.gather, x, [out, out.clone()] if rank == 0 else None, 0) if rank == 0 else None
        refused(dist.all_gather_into_tensor, out, x)
        refused(dist.reduce_scatter_tensor, out, four)
        refused(dist.reduce_scatter, out, [x, x.clone()])
        refused(dist.scatter, out, [x, x.clone()] if rank == 0 else None, 0) if rank == 0 else None
        refused(dist.all_to_all, [out, out.clone()], [x, x.clone()])
        refused(dist.all_to_all_single, out, x)
        refused(dist.all_gather, [x.clone()] * wrong, x)
    try:
        dist.all_reduce(torch.eye(2).to_sparse(), dist.ReduceOp.MAX)
    except ValueError as error:
        assert "expected SUM" in str(error)  # noqa: PT017
    else:
        raise AssertionError("the maximum of sparse tensors was not refused")
    half = dist._make_nccl_premul_sum(0.5)
    out = torch.empty(2)
    dist.reduce_scatter_tensor(out, four, half)
    assert (out.tolist(), four.tolist()) == ([1.0] * 2, [1.0] * 4)
    dist.reduce(four, 1, half)
    assert four.tolist() == [1.0] * 4
    whole, numbers = torch.tensor([10 * (rank + 1)]), torch.tensor([10.0 * (rank + 1)])
    with dist._coalescing_manager():
        dist.all_reduce(whole, dist.ReduceOp.AVG)
        dist.all_reduce(numbers, dist.ReduceOp.AVG)
    assert [whole.item(), numbers.item()] == [15, 15.0]
    print("sizes are correct")


def killed():
    device = sys.argv[2] if len(sys.argv) > 2 else "cpu"
    net, x = DDP(nn.Linear(4, 4).to(device)), torch.ones(1, 4, device=device)
    net(x).sum().backward()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        for _ in range(1000):
            net(x).sum().backward()
    except RuntimeError as error:
        assert "rank 1" in str(error), error  # noqa: PT017  - no test of pytest's
        took = time.monotonic() - began
        assert took < 1.0, took  # a promise of seconds: W1
        print(f"the loss was told in {took:.3f} s")


def opposite():
    """Two threads use a group each, 100 times, and the ranks start them in opposite order."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]

    def use(which, found):
        for _ in range(5):
            t = torch.ones(1000) * (which + 1)
            dist.all_reduce(t, group=groups[which])
            found.append(bool(t.eq(2 * (which + 1)).all()))

    for turn in range(100):
        found = []
        threads = [threading.Thread(target=use, args=(which, found)) for which in (0, 1)]
        for thread in threads if (dist.get_rank() + turn) % 2 else reversed(threads):
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [True] * 10, turn
    print("both orders agree")


def shared():
    """Two threads use both groups, in orders that differ between ranks: a result is right, or an error is raised."""
    for turn in range(40):
        groups = [dist.new_group([0, 1]) for _ in range(2)]
        ends = []

        def use(numel, order, ends=ends, groups=groups):
            for which in order:
                t = torch.ones(numel)
                try:
                    dist.all_reduce(t, group=groups[which])
                except dist.DistBackendError as error:
                    ends.append(type(error.__cause__) is aiodist.MismatchError)
                else:
                    ends.append(bool(t.eq(2).all()))

        orders = ((0, 1), (1, 0))
        if (dist.get_rank() + turn) % 2:
            orders = orders[::-1]
        threads = [threading.Thread(target=use, args=(10 + i, order)) for i, order in enumerate(orders)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert ends == [True] * 4, (turn, ends)
        for group in groups:
            dist.destroy_process_group(group)
    print("right or told")


def unequal():
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(2), async_op=True)
    try:
        dist.destroy_process_group()
    except aiodist.AiodistError as error:
        print("the error of the end:", type(error).__name__)
    assert not dist.is_initialized()
    assert not dist.distributed_c10d._world.pg_map


def arena():
    """Buckets of DDP's move into the arena with the first step; what other callers bring stays where it is."""
    statistics = dist.group.WORLD.coll.statistics
    for ways in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}):
        torch.manual_seed(0)
        net, alone = DDP(nn.Linear(300, 301), **ways), nn.Linear(300, 301)
        alone.load_state_dict(net.module.state_dict())
        for _ in range(4):
            x = torch.randn(2, 5, 300)  # equal on both ranks; each takes a half
            net.zero_grad()
            alone.zero_grad()
            before = statistics()
            net(x[dist.get_rank()]).square().mean().backward()
            after = statistics()
            alone(x.view(10, 300)).square().mean().backward()
            for mine, whole in zip(net.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, whole.grad)
            assert after.arena_bytes - before.arena_bytes == 301 * 301 * 4, ways
    t = torch.ones(100_000)
    views, before = t.split(1000), statistics().arena_bytes
    dist.all_reduce(t)
    assert statistics().arena_bytes == before
    assert all(view.eq(2).all() for view in views)
    print("in the arena")


def differ():
    t = torch.ones(3 + dist.get_rank())
    try:
        dist.all_reduce(t)
    except dist.DistBackendError as error:
        assert isinstance(error.__cause__, aiodist.MismatchError), error  # noqa: PT017  - no test of pytest's
        assert str(error).count("other_ways.py:") >= 2, error  # noqa: PT017  - the program's line on each rank
        assert "distributed_c10d.py" not in str(error), error  # noqa: PT017
        print("the mismatch was raised")


def late():
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["named"], timedelta(seconds=60))
        store.set("heard", "")
        return
    group = dist.group.WORLD
    for call, said in (
        (lambda: group.monitored_barrier(timedelta(seconds=0.8)), "Rank 1 failed to pass monitoredBarrier"),
        (lambda: group.barrier().wait(timedelta(seconds=1.2)), " Timed out waiting 1200ms"),
        (lambda: group.monitored_barrier(timedelta(milliseconds=1)), "Rank 1 failed to pass monitoredBarrier"),
        (lambda: group.monitored_barrier(timedelta(0), wait_all_ranks=True), "Rank 0 timed out in monitoredBarrier"),
    ):
        try:
            call()
        except RuntimeError as error:
            assert said in str(error), error  # noqa: PT017  - no test of pytest's
            assert "rank 1 (" in str(error), error  # noqa: PT017
    store.set("named", "")
    store.wait(["heard"], timedelta(seconds=60))  # the store ends with this rank
    print("the late rank was named")


def debugged():
    """torch's debug server has a server of each rank's, which shows where its threads are."""
    from torch._C._distributed_c10d import _WorkerServer

    server = _WorkerServer("127.0.0.1", 0)
    request = Request(f"http://127.0.0.1:{server.port}/handler/dump_traceback", method="POST")
    with urlopen(request, timeout=30) as answer:
        said = answer.read().decode()
    server.shutdown()
    assert "in debugged" in said, said  # this thread
    assert "start_blocking_portal" in said or "from_thread.py" in said, said  # the loop's
    print("the threads were shown")


def raised():
    global home  # noqa: PLW0603  - collected while the interpreter ends, as in larger programs
    home = dist.group.WORLD.home
    vars(dist.group.WORLD).clear()
    error = f"rank {dist.get_rank()} has had enough"
    raise ValueError(error)


def start():
    t = torch.ones(2)
    dist.all_reduce(t)
    assert t.tolist() == [2.0, 2.0]
    print("started")


if __name__ == "__main__":
    dist.init_process_group("aiodist")
    globals()[sys.argv[1]]()
    if sys.argv[1] not in ("killed", "late", "unequal"):
        dist.destroy_process_group()
