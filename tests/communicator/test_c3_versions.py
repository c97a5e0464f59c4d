"""C3: autograd sees what a call writes, as it sees in-place operations; writes that it would have to record raise."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import aiodist
from aiodist import Communicator
from aiodist.nn import functional
from aiodist.ps import ParameterServer, Synchronous
from aiodist.testing import run_ranks

pytestmark = pytest.mark.timeout(300)

Make = Callable[[int], Tensor]
"""Makes a tensor of that many elements."""


class Call(NamedTuple):
    """A call, with the tensors of this rank that it reads and writes."""

    issue: Callable[[Sequence[Tensor]], Any]
    """Given the tensors, those that are written first."""
    written: list[Tensor]
    read: list[Tensor]
    rooted: list[int] = []  # noqa: RUF012  - never changed
    """The read tensors that other ranks write by the same line."""


ROOT = 1

CALLS: dict[str, Callable[[Communicator, Make, int], Call]] = {
    "allreduce": lambda c, m, n: Call(lambda x: c.allreduce(x[0]), [m(n)], []),
    "allreduce max": lambda c, m, n: Call(lambda x: c.allreduce(x[0], "max"), [m(n)], []),
    "allreduce ring": lambda c, m, n: Call(lambda x: c.allreduce(x[0], impl="ring"), [m(n)], []),
    "allreduce direct": lambda c, m, n: Call(lambda x: c.allreduce(x[0], impl="direct"), [m(n)], []),
    "allreduce list": lambda c, m, n: Call(lambda x: c.allreduce([*x]), [m(n), m(n + 1)], []),
    "allreduce across": lambda c, m, n: Call(lambda x: c.allreduce([*x], across=True), [m(n), m(n)], []),
    "allreduce across out": lambda c, m, n: Call(
        lambda x: c.allreduce([*x[1:]], across=True, out=x[0]), [m(n)], [m(n), m(n)]
    ),
    "allreduce across out of all": lambda c, m, n: Call(
        lambda x: c.allreduce([x[1], x[0]], across=True, out=x[0]), [m(n)], [m(n)]
    ),
    "allreduce named": lambda c, m, n: Call(lambda x: c.allreduce(x[0], name="x"), [m(n)], []),
    "allreduce out": lambda c, m, n: Call(lambda x: c.allreduce(x[1], out=x[0]), [m(n)], [m(n)]),
    "allreduce out named": lambda c, m, n: Call(lambda x: c.allreduce(x[1], out=x[0], name="x"), [m(n)], [m(n)]),
    "allreduce out itself": lambda c, m, n: Call(lambda x: c.allreduce(x[0], out=x[0]), [m(n)], []),
    "scan": lambda c, m, n: Call(lambda x: c.scan(x[0]), [m(n)], []),
    "scan out": lambda c, m, n: Call(lambda x: c.scan(x[1], out=x[0]), [m(n)], [m(n)]),
    "exscan": lambda c, m, n: Call(lambda x: c.exscan(x[0]), [m(n)], []),
    "exscan out": lambda c, m, n: Call(lambda x: c.exscan(x[1], out=x[0]), [m(n)], [m(n)]),
    "reduce": lambda c, m, n: _at_root(c, lambda x: c.reduce(x[0], root=ROOT), m(n)),
    "reduce list": lambda c, m, n: _at_root(c, lambda x: c.reduce([*x], root=ROOT), m(n), m(n)),
    "reduce out": lambda c, m, n: (
        Call(lambda x: c.reduce(x[1], root=ROOT, out=x[0]), [m(n)], [m(n)])
        if c.rank == ROOT
        else Call(lambda x: c.reduce(x[0], root=ROOT, out=x[1]), [], [m(n), m(n)], [1])
    ),
    "reduce out of root": lambda c, m, n: (
        Call(lambda x: c.reduce(x[1], root=ROOT, out=x[0]), [m(n)], [m(n)])
        if c.rank == ROOT
        else Call(lambda x: c.reduce(x[0], root=ROOT), [], [m(n)])
    ),
    "reduce across": lambda c, m, n: (
        Call(lambda x: c.reduce([*x], root=ROOT, across=True), [m(n)], [m(n)])
        if c.rank == ROOT
        else Call(lambda x: c.reduce([*x], root=ROOT, across=True), [], [m(n), m(n)], [0])
    ),
    "reduce_scatter": lambda c, m, n: Call(lambda x: c.reduce_scatter(x[0]), [], [m(n * c.size)]),
    "reduce_scatter out": lambda c, m, n: Call(lambda x: c.reduce_scatter(x[1], out=x[0]), [m(n)], [m(n * c.size)]),
    "reduce_scatter sizes": lambda c, m, n: Call(
        lambda x: c.reduce_scatter(x[1], sizes=[n] * c.size, out=x[0]), [m(n)], [m(n * c.size)]
    ),
    "broadcast": lambda c, m, n: _rooted(c, c.rank != ROOT, lambda x: c.broadcast(x[0], ROOT), m(n)),
    "broadcast list": lambda c, m, n: _rooted(c, c.rank != ROOT, lambda x: c.broadcast([*x], ROOT), m(n), m(n)),
    "broadcast named": lambda c, m, n: _rooted(c, c.rank != ROOT, lambda x: c.broadcast(x[0], ROOT, name="x"), m(n)),
    "broadcast across": lambda c, m, n: (
        Call(lambda x: c.broadcast([x[1], x[0]], ROOT, across=True), [m(n)], [m(n)], [0])
        if c.rank == ROOT
        else Call(lambda x: c.broadcast([*x], ROOT, across=True), [m(n), m(n)], [])
    ),
    "allgather": lambda c, m, n: Call(lambda x: c.allgather(x[0]), [], [m(n)]),
    "allgather list": lambda c, m, n: Call(lambda x: c.allgather([*x]), [], [m(n), m(n)]),
    "allgather across": lambda c, m, n: Call(lambda x: c.allgather([*x], across=True), [], [m(n), m(n)]),
    "allgather out": lambda c, m, n: Call(lambda x: c.allgather(x[1], out=x[0]), [m(n * c.size)], [m(n)]),
    "allgather grows": lambda c, m, n: Call(lambda x: c.allgather(x[1], out=x[0]), [torch.empty(0)], [m(n)]),
    "gather": lambda c, m, n: Call(lambda x: c.gather(x[0], ROOT), [], [m(n)]),
    "gather out": lambda c, m, n: (
        Call(lambda x: c.gather(x[1], ROOT, out=x[0]), [m(n * c.size)], [m(n)])
        if c.rank == ROOT
        else Call(lambda x: c.gather(x[0], ROOT, out=x[1]), [], [m(n), m(n * c.size)], [1])
    ),
    "scatter": lambda c, m, n: Call(
        lambda x: c.scatter([*x] or None, ROOT), [], [m(n) for _ in range(c.size) if c.rank == ROOT]
    ),
    "scatter out": lambda c, m, n: Call(
        lambda x: c.scatter([*x[1:]] or None, ROOT, out=x[0]),
        [m(n)],
        [m(n) for _ in range(c.size) if c.rank == ROOT],
    ),
    "alltoall": lambda c, m, n: Call(lambda x: c.alltoall([*x]), [], [m(n) for _ in range(c.size)]),
    "alltoall out": lambda c, m, n: Call(
        lambda x: c.alltoall([*x[c.size :]], out=[*x[: c.size]]),
        [m(n) for _ in range(c.size)],
        [m(n) for _ in range(c.size)],
    ),
    "alltoall_single": lambda c, m, n: Call(lambda x: c.alltoall_single(x[0]), [], [m(n * c.size)]),
    "alltoall_single out": lambda c, m, n: Call(
        lambda x: c.alltoall_single(x[1], out=x[0]), [m(n * c.size)], [m(n * c.size)]
    ),
    "alltoall_single sizes": lambda c, m, n: Call(
        lambda x: c.alltoall_single(x[1], out=x[0], sizes=[n] * c.size), [m(n * c.size)], [m(n * c.size)]
    ),
    "send recv": lambda c, m, n: Call(
        lambda x: aiodist.gather(c.recv(x[0], src=_before(c)), c.send(x[1], _after(c))), [m(n)], [m(n)]
    ),
    "send recv list": lambda c, m, n: Call(
        lambda x: aiodist.gather(c.recv([*x[:2]], src=_before(c)), c.send([*x[2:]], _after(c))),
        [m(n), m(n)],
        [m(n), m(n)],
    ),
    "sendrecv": lambda c, m, n: Call(lambda x: c.sendrecv(x[0], _after(c), _before(c)), [], [m(n)]),
    "sendrecv out": lambda c, m, n: Call(lambda x: c.sendrecv(x[1], _after(c), _before(c), x[0]), [m(n)], [m(n)]),
}


def _rooted(coll: Communicator, writes: bool, issue: Callable[[Sequence[Tensor]], Any], *ts: Tensor) -> Call:
    """Return a call that writes all of `ts` on some ranks, and reads them on the others."""
    return Call(issue, list(ts), []) if writes else Call(issue, [], list(ts), list(range(len(ts))))


def _at_root(coll: Communicator, issue: Callable[[Sequence[Tensor]], Any], *ts: Tensor) -> Call:
    """Return a call that writes all of `ts` on root, and reads them on the others, which cannot know that."""
    return Call(issue, list(ts), []) if coll.rank == ROOT else Call(issue, [], list(ts))


def _after(coll: Communicator) -> int:
    return (coll.rank + 1) % coll.size


def _before(coll: Communicator) -> int:
    return (coll.rank - 1) % coll.size


MEMORIES: dict[str, Callable[[Communicator], Make]] = {
    "ordinary": lambda _: torch.ones,
    "view": lambda _: lambda n: torch.ones(n + 2)[1:-1],
    "detached": lambda _: lambda n: torch.ones(n).detach(),
    "arena": lambda coll: lambda n: coll.arena_empty((n,)).fill_(1),
    "parameter": lambda _: lambda n: torch.nn.Parameter(torch.ones(n), requires_grad=False),
    "inference": lambda _: _inferred,
}


def _inferred(n: int) -> Tensor:
    with torch.inference_mode():
        return torch.ones(n)


def _recorded(t: Tensor, how: str) -> Tensor:
    """Return a tensor that autograd records and that shares the memory of `t`."""
    if how == "leaf":
        return t.detach().requires_grad_()
    if how == "view of a leaf":
        with torch.no_grad():
            return t.detach().requires_grad_().view(t.shape)
    return t.detach().requires_grad_().view_as(t)  # it has a grad_fn


RECORDED = ("leaf", "view of a leaf", "result")


async def check_versions(coll: Communicator, kind: str, make: Make, numel: int) -> None:
    """The versions of written tensors alone rise, at the call and at the end."""
    call = CALLS[kind](coll, make, numel)
    ts = [*call.written, *call.read]
    if any(t.is_inference() for t in ts):  # they have no version, and may be written all the same
        await call.issue(ts)
    else:
        # Some of several handles may finish within the call.
        await _check_call(call, ts, kind, when_over=not kind.startswith("send recv"))


async def _check_call(call: Call, ts: list[Tensor], kind: str, *, when_over: bool = True) -> None:
    before = [t._version for t in ts]
    handle = call.issue(ts)
    pending, issued = not handle.done(), [t._version for t in ts]
    await handle
    over = [t._version for t in ts]
    writes = len(call.written)
    assert all(a < b for a, b in zip(before[:writes], issued, strict=False)), f"{kind}: not at the call"
    if pending and when_over:
        assert all(a < b for a, b in zip(issued[:writes], over, strict=False)), f"{kind}: not when the data came"
    assert before[writes:] == over[writes:], f"{kind}: what is only read has a new version"


async def check_refusals(coll: Communicator, kind: str, make: Make, numel: int, how: str) -> None:
    """What is written is refused in grad mode, alike on all ranks; what is only read is taken."""
    call = CALLS[kind](coll, make, numel)
    ts, writes = [*call.written, *call.read], len(call.written)
    refused = [*range(writes), *(writes + i for i in call.rooted)]
    counted = coll.seq, coll.statistics().pending, coll.statistics().named
    for i in refused:
        given = [_recorded(t, how) if i == j else t for j, t in enumerate(ts)]
        versions = [t._version for t in given]
        with pytest.raises(RuntimeError, match=r"would write into .*which autograd does not record"):
            call.issue(given)
        assert (coll.seq, coll.statistics().pending, coll.statistics().named) == counted, kind
        assert [t._version for t in given] == versions
    taken = [t if i in refused else _recorded(t, how) for i, t in enumerate(ts)]
    await call.issue(taken)
    with torch.no_grad():
        handle = call.issue([_recorded(t, how) for t in ts])
    await handle


def test_c3_every_public_call_with_tensors_is_among_them() -> None:
    taking = {
        name
        for name, method in inspect.getmembers(Communicator, callable)
        if name[0] != "_" and any(word in str(inspect.signature(method)).split("->")[0] for word in ("Tensor", "Data"))
    }
    tried = {word for kind in CALLS for word in kind.split()}
    assert taking - {"to_arena_"} <= tried  # to_arena_ moves memory, and writes nothing else into it
    assert {"allreduce", "recv", "send", "sendrecv", "scatter", "gather", "alltoall", "exscan"} <= taking


@pytest.mark.thorough
@given(
    kind=st.sampled_from(sorted(CALLS)),
    memory=st.sampled_from(sorted(set(MEMORIES) - {"arena"})),
    numel=st.sampled_from([1, 4, 1000, 70_000]),
    ranks=st.integers(2, 4),
    seed=st.integers(0, 99),
    how=st.sampled_from(RECORDED),
)
def test_c3_any_call_raises_the_versions_of_what_it_writes(
    kind: str, memory: str, numel: int, ranks: int, seed: int, how: str
) -> None:
    async def main() -> None:
        async with aiodist.init() as coll:
            make = MEMORIES[memory](coll)
            await check_versions(coll, kind, make, numel)
            if memory != "inference":
                await check_refusals(coll, kind, make, numel, how)

    run_ranks(ranks, main, seed)


@pytest.mark.drawn(1)
@pytest.mark.ranks(2, backend=("openmpi", "mpich", "gloo", "shm"))
@pytest.mark.parametrize("memory", sorted(MEMORIES))
async def test_c3_calls_between_processes_raise_the_versions_of_what_they_write(
    coll: Communicator, memory: str
) -> None:
    if memory == "arena":
        try:
            coll.arena_empty((1,))
        except aiodist.BackendUnavailable as error:
            pytest.skip(str(error))
    make = MEMORIES[memory](coll)
    for kind in CALLS:
        for numel in (4, 100_000):
            await check_versions(coll, kind, make, numel)
            await coll.barrier()
        if memory != "inference":
            for how in RECORDED:
                await check_refusals(coll, kind, make, 4, how)


@pytest.mark.ranks(2, backend=("local", "openmpi", "shm"))
@pytest.mark.parametrize("numel", [4, 100_000])
async def test_c3_a_loss_that_is_averaged_in_place_before_backward_raises(coll: Communicator, numel: int) -> None:
    x = torch.full((numel,), 0.5, requires_grad=True)
    y = x.exp()  # saves its result
    await coll.allreduce(y.detach(), "mean")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    y = x.exp()
    mean = await coll.allreduce(y.detach(), "mean", out=torch.empty(numel))
    y.sum().backward()
    assert mean.allclose(y)
    assert x.grad is not None
    assert x.grad.allclose(y)


LATE = ("allreduce", "allreduce ring", "allreduce named", "allreduce out", "broadcast", "allgather out", "scan", "recv")


@pytest.mark.ranks(2, backend=("local", "openmpi", "gloo", "shm"))
@pytest.mark.parametrize("numel", [4, 100_000])
async def test_c3_what_autograd_saves_while_it_is_in_flight_raises_too(coll: Communicator, numel: int) -> None:
    """The version is raised when the data came, not at the call alone."""
    for kind in LATE:
        await coll.barrier()
        if coll.rank != 0:
            await asyncio.sleep(0.05)
            await (
                coll.send(torch.zeros(numel), 0) if kind == "recv" else _issued(CALLS[kind](coll, torch.ones, numel))
            )
            continue
        into = torch.ones(numel)
        call = Call(lambda x: coll.recv(x[0]), [into], []) if kind == "recv" else CALLS[kind](coll, torch.ones, numel)
        t, w = call.written[0], torch.ones(call.written[0].numel(), requires_grad=True)
        handle = _issued(call)
        assert not handle.done()
        loss = (w * t).sum()  # saves t
        await handle
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def _issued(call: Call) -> Any:
    return call.issue([*call.written, *call.read])


async def test_c3_a_receive_that_is_withdrawn_writes_nothing_later() -> None:
    async with aiodist.init() as coll:
        t = torch.ones(3)
        handle = coll.recv(t, src=0)
        assert t._version > 0
        assert handle.cancel()
        version = t._version
        await asyncio.sleep(0)
        assert t._version == version


# --- the parameter server ---------------------------------------------------------------------------------------


def ps_calls(ps: ParameterServer, words: Any, kept: Tensor) -> Iterator[Call]:
    ids = torch.tensor([1, 5, 1])
    yield Call(lambda x: ps.pull("w", x[0]), [torch.ones(8)], [])
    yield Call(lambda x: ps.pull(["w", "v"], [*x]), [torch.ones(8), torch.ones(70_000)], [])
    yield Call(lambda x: ps.push("w", x[0]), [], [torch.ones(8)])
    yield Call(lambda x: ps.push("v", x[0]), [], [torch.ones(70_000)])
    yield Call(lambda x: ps.push_pull("w", x[1], x[0]), [torch.ones(8)], [torch.ones(8)])
    yield Call(lambda x: ps.push_pull("v", x[1], x[0]), [torch.ones(70_000)], [torch.ones(70_000)])
    yield Call(lambda x: words.pull(ids, x[0]), [torch.ones(3, 4)], [])
    yield Call(lambda x: words.push(ids, x[0]), [], [torch.ones(3, 4)])


@pytest.mark.drawn(2)
@pytest.mark.ranks(2, backend=("local", "openmpi", "shm"))
async def test_c3_calls_of_the_parameter_server_raise_the_versions_of_what_they_write(coll: Communicator) -> None:
    kept = torch.ones(8, requires_grad=True)
    async with ParameterServer(coll, {"w": kept, "v": torch.ones(70_000)}, consistency=Synchronous("mean")) as ps:
        words = await ps.embedding("words", 4)
        for call in ps_calls(ps, words, kept):
            ts, writes = [*call.written, *call.read], len(call.written)
            await _check_call(call, ts, "of the server")
            for how in RECORDED:
                for i in range(writes):
                    given = [_recorded(t, how) if i == j else t for j, t in enumerate(ts)]
                    with pytest.raises(RuntimeError, match=r"would write into out.*does not record"):
                        call.issue(given)
                await call.issue([t if i < writes else _recorded(t, how) for i, t in enumerate(ts)])
                with torch.no_grad():
                    handle = call.issue([_recorded(t, how) for t in ts])
                await handle
        version = kept._version  # a parameter that was init()ed is there to be written
        await ps.pull("w")
        assert kept._version > version
        await ps.barrier()


# --- collectives that autograd records ------------------------------------------------------------------------------


async def test_c3_results_of_nn_functional_are_written_under_their_graph() -> None:
    async with aiodist.init() as coll:
        own, x = await coll.dup(thread=True), torch.ones(3, requires_grad=True)
        calls: list[Callable[[], Awaitable[Tensor]]] = [
            lambda: functional.allreduce(x, own),
            lambda: functional.broadcast(x, own),
            lambda: functional.allgather(x, own),
            lambda: functional.reduce_scatter(x, own),
            lambda: functional.alltoall(x, own),
        ]
        for call in calls:
            version, y = x._version, await call()
            assert y.grad_fn is not None
            await asyncio.to_thread(y.exp().sum().backward)
            assert x._version == version
        await own.aclose()
