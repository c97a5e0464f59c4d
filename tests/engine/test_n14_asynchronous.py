"""N14: asynchronous SGD, with the clients of a parameter server in the place of an optimizer."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from aiodist import Communicator, CommunicatorAborted, Engine, ParameterServer
from aiodist.engine import State
from aiodist.ps import EAMSGD, EASGD, SGD, AsySGInCon, Downpour, Synchronous
from tests.engine.conftest import Job

STEP: tuple[Any, ...] = ("sample", "forward", "criterion", "backward", "update")


def noted(engine: Engine, into: list[str]) -> None:
    for event in STEP:
        engine.on(event, lambda state, event=event: into.append(event))


def client(kind: str, ps: ParameterServer, module: nn.Module, **how: Any) -> Any:
    opt = torch.optim.SGD(module.parameters(), lr=0.05)
    if kind == "downpour":
        return Downpour(ps, module, opt, n_push=2, n_pull=2, **how)
    if kind == "asysg":
        return AsySGInCon(ps, module, **how)
    return {"easgd": EASGD, "eamsgd": EAMSGD}[kind](ps, module, opt, tau=2, alpha=0.3, **how)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("kind", ["downpour", "easgd", "eamsgd", "asysg"])
async def test_n14_clients_do_what_they_do_in_the_bare_loop(coll: Communicator, kind: str) -> None:
    """One worker, so that nothing depends on time."""
    ends = []
    seen: list[str] = []
    for bare in (True, False):
        module = Job.build()
        rule = SGD(lr=0.05) if kind == "asysg" else "add"
        async with ParameterServer(coll, module, rule=rule) as ps, client(kind, ps, module) as worker:
            if bare:
                for _ in range(2):
                    for x, y in Job.pairs(0, 5):
                        module.zero_grad()
                        mse_loss(module(x), y).backward()
                        await worker.step()
            else:
                engine = Engine(module, worker, mse_loss, coll=coll, **Job.QUIET)
                noted(engine, seen)
                figures = await engine.train(Job.pairs(0, 5), epochs=2)
                assert seen == [*STEP] * 10
                assert worker.steps == 10
                assert (await engine.test(Job.pairs(0, 5)))["loss"] < figures["loss"]
        ends.append({name: t.clone() for name, t in module.state_dict().items()})
    assert all(torch.equal(t, ends[1][name]) for name, t in ends[0].items())


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("together", [False, True])
async def test_n14_workers_wait_for_nobody(coll: Communicator, together: bool) -> None:
    """Each has other numbers of batches; figures are of all ranks, or without a communicator of its own."""
    module = Job.build()
    async with ParameterServer(coll, module) as ps, client("easgd", ps, module) as worker:
        engine = Engine(module, worker, mse_loss, coll=coll if together else None, **Job.QUIET)
        figures = await engine.train(Job.pairs(coll.rank, 1 + 3 * coll.rank), epochs=3)
        assert worker.steps == 3 + 9 * coll.rank
        told = await coll.allgather_object(figures)
        assert all(one == figures for one in told) == together


@pytest.mark.ranks(2)
async def test_n14_synchronous_steps_at_the_server(coll: Communicator) -> None:
    """The server's optimizer makes one step of the gradients of all workers."""
    module = Job.build()
    async with ParameterServer(coll, module, rule=SGD(lr=0.1), consistency=Synchronous("mean")) as ps:
        async with AsySGInCon(ps, module) as worker:
            engine = Engine(module, worker, mse_loss, **Job.QUIET)
            await engine.train(Job.pairs(coll.rank, 1), epochs=1)
        await ps.sync()
        await ps.barrier()
        await ps.pull(module)
    Job.assert_same(module, Job.alone(2, [1, 1]))


@pytest.mark.ranks(2)
async def test_n14_a_stop_ends_this_worker_and_the_others_behind_their_epoch(coll: Communicator) -> None:
    module = Job.build()
    async with ParameterServer(coll, module) as ps, client("downpour", ps, module) as worker:
        engine = Engine(module, worker, mse_loss, coll=coll, **Job.QUIET)

        @engine.on("update")
        def stop(state: State) -> None:
            state.stop = coll.rank == 1 and state.step == 2

        await engine.train(Job.pairs(coll.rank, 5), epochs=3)
        assert engine.state.step == (5 if coll.rank == 0 else 2)


@pytest.mark.ranks(2)
async def test_n14_a_worker_that_fails(coll: Communicator) -> None:
    module = Job.build()
    async with ParameterServer(coll, module) as ps, client("downpour", ps, module) as worker:
        engine = Engine(module, worker, mse_loss, coll=coll, **Job.QUIET)

        @engine.on("criterion")
        def fail(state: State) -> None:
            if coll.rank == 1 and state.step == 2:
                raise ArithmeticError("here")

        if coll.rank == 1:
            with pytest.raises(ArithmeticError, match="here"):
                await engine.train(Job.pairs(1, 3), epochs=2)
        else:
            with pytest.raises(CommunicatorAborted, match=r"rank 1 failed in this training: ArithmeticError\('here'\)"):
                await engine.train(Job.pairs(0, 3), epochs=2)
