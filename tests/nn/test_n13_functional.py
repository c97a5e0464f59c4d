"""N13: collectives that autograd goes through: results, gradients of first and second order, threads, mistakes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import grad, gradcheck
from torch.utils.checkpoint import checkpoint

import aiodist
from aiodist import Communicator
from aiodist.nn import DataParallel, functional

Op = Callable[[Tensor, Communicator], Any]
Meaning = Callable[[list[Tensor]], list[Tensor]]
"""The result of each rank, by the inputs of all."""


def rows_to(rank: int, size: int) -> list[int]:
    """Return how many rows `rank` sends to each: uneven, some none."""
    return [(2 * rank + to) % 3 for to in range(size)]


def exchanged(ts: list[Tensor]) -> list[Tensor]:
    size = len(ts)
    parts = [t.split(rows_to(rank, size)) for rank, t in enumerate(ts)]
    return [torch.cat([parts[rank][to] for rank in range(size)]) for to in range(size)]


def alltoall_uneven(t: Tensor, coll: Communicator) -> Any:
    received = [rows_to(rank, coll.size)[coll.rank] for rank in range(coll.size)]
    return functional.alltoall(t, coll, rows_to(coll.rank, coll.size), received)


def blocks(t: Tensor, size: int) -> list[Tensor]:
    return list(t.tensor_split(size))


Shape = Callable[[int, int], tuple[int, ...]]
"""The input of `rank` of `size`."""
SAME: Shape = lambda rank, size: (5, 2)  # noqa: E731
KINDS: dict[str, tuple[Op, Shape, Meaning]] = {
    "sum": (functional.allreduce, SAME, lambda ts: [sum(ts)] * len(ts)),  # type: ignore[list-item]
    "mean": (
        partial(functional.allreduce, op="mean"),
        lambda rank, size: (),
        lambda ts: [torch.stack(ts).mean(0)] * len(ts),
    ),
    "broadcast": (
        lambda t, coll: functional.broadcast(t, coll, coll.size - 1),
        SAME,
        lambda ts: [ts[-1]] * len(ts),
    ),
    "allgather": (functional.allgather, SAME, lambda ts: [torch.cat(ts)] * len(ts)),
    "allgather of blocks": (
        partial(functional.allgather, rows=7),
        lambda rank, size: (len(blocks(torch.empty(7), size)[rank]), 2),
        lambda ts: [torch.cat(ts)] * len(ts),
    ),
    "reduce_scatter": (functional.reduce_scatter, SAME, lambda ts: blocks(sum(ts), len(ts))),  # type: ignore[arg-type]
    "reduce_scatter of a mean": (
        partial(functional.reduce_scatter, op="mean"),
        lambda rank, size: (3, 2, 2),
        lambda ts: blocks(torch.stack(ts).mean(0), len(ts)),
    ),
    "alltoall": (
        functional.alltoall,
        lambda rank, size: (2 * size, 3),
        lambda ts: [torch.cat([blocks(t, len(ts))[to] for t in ts]) for to in range(len(ts))],
    ),
    "alltoall of sizes": (alltoall_uneven, lambda rank, size: (sum(rows_to(rank, size)), 2), exchanged),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def given(kind: str, size: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return what the ranks give: random, and of other values on each."""
    random = torch.Generator().manual_seed(size)
    shape = KINDS[kind][1]
    return [torch.randn(shape(rank, size), generator=random, dtype=dtype) for rank in range(size)]


@kinds
@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.drawn(18)
async def test_n13_results_and_gradients_are_those_of_one_process(coll: Communicator, kind: str) -> None:
    own = await coll.dup(thread=True)
    op, _, meaning = KINDS[kind]
    alone = [t.requires_grad_() for t in given(kind, coll.size)]
    expected = meaning(alone)
    random = torch.Generator().manual_seed(3)  # the same on all ranks
    weights = [torch.rand(y.shape, dtype=y.dtype, generator=random).requires_grad_() for y in expected]
    objective = sum((w * y.square()).sum() for w, y in zip(weights, expected, strict=True))
    first = grad(objective, alone, create_graph=True, materialize_grads=True)  # type: ignore[arg-type]
    second = grad(sum(g.pow(3).sum() for g in first), [*alone, *weights], materialize_grads=True)  # type: ignore[arg-type]

    t, w = given(kind, coll.size)[coll.rank].requires_grad_(), weights[coll.rank]
    before = t.detach().clone()
    y = await op(t, own)
    assert torch.equal(t, before)
    torch.testing.assert_close(y, expected[coll.rank])

    def backward() -> tuple[Tensor, Tensor, Tensor]:
        (g,) = grad((w * y.square()).sum(), t, create_graph=True)
        gg, gw = grad(g.pow(3).sum(), [t, w])
        return g, gg, gw

    g, gg, gw = await asyncio.to_thread(backward)
    torch.testing.assert_close(g, first[coll.rank])
    torch.testing.assert_close(gg, second[coll.rank])
    torch.testing.assert_close(gw, second[coll.size + coll.rank])


@kinds
@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.drawn(1)
async def test_n13_gradcheck(coll: Communicator, kind: str) -> None:
    # All ranks move the same inputs at once, so their gradients are means over the ranks, as is the objective.
    own = await coll.dup(thread=True)
    op, inputs = KINDS[kind][0], [t.requires_grad_() for t in given(kind, coll.size)]

    def objective(*ts: Tensor) -> Tensor:
        means = functional.allreduce(torch.cat([t.flatten() for t in ts]), own, "mean").wait()
        mine = means.split([t.numel() for t in ts])[coll.rank].view_as(ts[coll.rank])
        y = op(mine, own).wait()
        weights = torch.arange(1.0, 1 + y.numel(), dtype=y.dtype).view(y.shape) + coll.rank
        return functional.allreduce((weights * y.sin()).sum(), own, "mean").wait()

    assert await asyncio.to_thread(gradcheck, objective, inputs)


@pytest.mark.ranks(2, 3)
async def test_n13_a_rank_whose_input_needs_no_gradient_takes_part(coll: Communicator) -> None:
    own = await coll.dup(thread=True)
    t = torch.full((2,), coll.rank + 1.0, requires_grad=coll.rank == 1)
    y = await functional.allreduce(t, own)
    assert y.requires_grad
    await asyncio.to_thread((y.square().sum() * (coll.rank + 1)).backward)
    total = sum(range(1, coll.size + 1))
    assert (t.grad is None) == (coll.rank != 1)
    if t.grad is not None:
        assert torch.equal(t.grad, torch.full((2,), 2.0 * total * total))


@pytest.mark.ranks(3)
async def test_n13_backward_issues_in_the_reverse_order_of_the_calls(coll: Communicator) -> None:
    # Two branches whose code continues in another order on each rank, and a shape of its own for each collective.
    own = await coll.dup(thread=True)
    x = torch.randn(6, requires_grad=True)
    ts = [x[: 3 + i] * (i + 1) for i in range(4)]
    handles = [functional.allreduce(t, own) for t in ts]
    order = [(i + coll.rank) % 4 for i in range(4)] if coll.rank < 2 else [3, 1, 0, 2]
    losses = {}
    for i in order:
        losses[i] = (await handles[i]).sin().sum() * (i + 1)
    await asyncio.to_thread(torch.stack([losses[i] for i in order]).sum().backward)
    assert x.grad is not None
    whole = [await coll.allreduce(t.detach().clone()) for t in ts]
    expected = torch.zeros(6)
    for i, total in enumerate(whole):
        expected[: 3 + i] += (i + 1) * coll.size * (i + 1) * total.cos()
    torch.testing.assert_close(x.grad, expected)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex128])
async def test_n13_dtypes_and_layouts(coll: Communicator, dtype: torch.dtype) -> None:
    own = await coll.dup(thread=True)
    base = torch.arange(6.0).view(2, 3).to(dtype) * (coll.rank + 1)
    t = base.clone().requires_grad_()
    y = await functional.allreduce(t.T.conj(), own)  # not contiguous, and conjugated by a flag
    assert torch.equal(y, torch.arange(6.0).view(2, 3).T.to(dtype) * 3)
    await asyncio.to_thread(y.sum().abs().backward)  # the gradient that comes is expanded from one number
    assert t.grad is not None
    assert torch.equal(t.grad, torch.full_like(t, 2))
    assert not (await functional.allreduce(torch.arange(3), own)).requires_grad


@pytest.mark.ranks(2)
async def test_n13_without_gradients_any_communicator_will_do(coll: Communicator) -> None:
    t = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        y = await functional.allreduce(t, coll)
    assert not y.requires_grad
    with torch.inference_mode():
        assert torch.equal(await functional.allgather(t, coll), torch.ones(6))
    assert (await functional.allgather(torch.ones(coll.rank, 2, dtype=torch.int64), coll)).shape == (1, 2)


@pytest.mark.ranks(2)
async def test_n13_mistakes(coll: Communicator) -> None:
    own = await coll.dup(thread=True)
    t = torch.ones(3, 2, requires_grad=True)
    wrong: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: functional.allreduce(t, coll), RuntimeError, r"expected what .await coll.dup\(thread=True\)"),
        (lambda: functional.allreduce(t, own, "max"), ValueError, "op='max'"),  # type: ignore[arg-type]
        (lambda: functional.reduce_scatter(t, own, "min"), ValueError, "op='min'"),  # type: ignore[arg-type]
        (lambda: functional.broadcast(t, own, 2), ValueError, "root=2"),
        (lambda: functional.allgather(t[0, 0], own), ValueError, "t is a number"),
        (lambda: functional.reduce_scatter(t[0, 0], own), ValueError, "t is a number"),
        (lambda: functional.allgather(t, own, rows=9), ValueError, r"shape \[3, 2\]: expected \[[45], 2\]"),
        (lambda: functional.alltoall(t, own), ValueError, "3 rows"),
        (lambda: functional.alltoall(t, own, [1, 2]), ValueError, "expected both lists"),
        (lambda: functional.alltoall(t, own, [1, 1], [1, 1]), ValueError, "sizes add up to 2"),
        (lambda: functional.alltoall(t, own, [1, 2], [1]), ValueError, "expected 2 counts"),
    ]
    for call, kind, text in wrong:
        with pytest.raises(kind, match=text):
            call()
    y = await functional.allreduce(t, own)
    with pytest.raises(RuntimeError, match="would block the event loop"):
        y.sum().backward()
    with pytest.raises(ValueError, match="node of autograd"):  # rank 1 sends three rows to each
        await functional.alltoall(torch.ones(2 + 2 * coll.rank, 1), own, [1 + coll.rank] * 2, [1, 1])
    with pytest.raises(ValueError, match="node of autograd"):
        await functional.allgather(torch.ones(1 + coll.rank), own)
    assert torch.equal(await functional.allreduce(torch.ones(1), own), torch.full((1,), 2.0))  # it goes on


@pytest.mark.ranks(2)
async def test_n13_ranks_that_disagree_are_told_in_forward_and_in_backward(coll: Communicator) -> None:
    own = await coll.dup(thread=True)
    with pytest.raises(aiodist.MismatchError):
        await functional.allreduce(torch.ones(2 + coll.rank), own)
    x = torch.ones(2, requires_grad=True)
    y, z = await functional.allreduce(x, own), await functional.allgather(x, own)
    with pytest.raises(aiodist.MismatchError):
        await asyncio.to_thread((y if coll.rank else z).sum().backward)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("reentrant", [False, True])
async def test_n13_checkpointed_activations_are_computed_again(coll: Communicator, reentrant: bool) -> None:
    own = await coll.dup(thread=True)
    x = torch.randn(4, dtype=torch.float64, requires_grad=True)

    def part(x: Tensor) -> Tensor:
        return functional.allreduce(x.sin(), own).wait().exp()

    def both() -> list[Tensor]:
        plain = grad(part(part(x)).sum(), x)[0]
        twice = checkpoint(part, checkpoint(part, x, use_reentrant=reentrant), use_reentrant=reentrant)
        x.grad = None
        twice.sum().backward()
        assert x.grad is not None
        return [plain, x.grad]

    torch.testing.assert_close(*(await asyncio.to_thread(both)))


@pytest.mark.ranks(2, backend="shm")
@pytest.mark.drawn(1)
async def test_n13_in_modules_and_coroutines_under_data_parallel(coll: Communicator) -> None:
    own = await coll.dup(thread=True)

    class Mixed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = torch.nn.Linear(3, 4).double(), torch.nn.Linear(4, 1).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.last(functional.allreduce(self.first(x), own, "mean").wait().tanh())  # type: ignore[no-any-return]

    torch.manual_seed(0)
    module = Mixed()
    net = await DataParallel.create(module, coll, op="sum", bucket_bytes=1, first_bucket_bytes=1)
    xs = torch.randn(coll.size, 5, 3, dtype=torch.float64)
    alone = Mixed()
    alone.load_state_dict(net.state_dict())
    opt, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (net, alone))
    for step in range(3):
        theirs.zero_grad()
        hidden = torch.stack([alone.first(x) for x in xs]).mean(0).tanh()
        (coll.size * alone.last(hidden).square().mean()).backward()
        theirs.step()
        if step < 2:
            await net.step(lambda: net(xs[coll.rank]).square().mean(), opt)
            continue
        net.zero_grad()  # the same by hand: the loop computes, and awaits
        hidden = await functional.allreduce(module.first(xs[coll.rank]), own, "mean")
        await net.backward(module.last(hidden.tanh()).square().mean())
        await net.submit(opt.step)
    for ours, their in zip(net.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours, their)
