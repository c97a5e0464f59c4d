"""Ranks of one host under an MPI exchange messages in shared memory; MPI has its collectives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import aiodist
from aiodist import ANY, Communicator
from aiodist.communicator import parts_of
from aiodist.handles import Progress


def transport_of(coll: Communicator) -> Any:
    """Return the transport, which has MPI and shared memory."""
    transport: Any = parts_of(coll).transport
    assert transport.name == "mpi"
    assert transport.near is not None
    return transport


@pytest.mark.ranks(2, 3, backend="openmpi")
async def test_a5_messages_make_no_request_of_mpi(coll: Communicator) -> None:
    work = await coll.dup()
    pair = await coll.group([0, 1])
    transport_of(coll).requests.used = False  # earlier tests of this world may have used MPI
    after, before = (coll.rank + 1) % coll.size, (coll.rank - 1) % coll.size
    for numel in (1, 1000, 300_001):
        sent = torch.arange(numel) + 1000 * coll.rank
        for comm in (coll, work):
            comm.send(sent, after, 3).detach()
            assert (await comm.recv(torch.empty_like(sent), before, 3)).equal(torch.arange(numel) + 1000 * before)
        if pair.rank >= 0:
            pair.send(sent, 1 - coll.rank).detach()
            assert (await pair.recv(torch.empty_like(sent), ANY))[0] == 1000 * (1 - coll.rank)
    assert await coll.allgather_object(coll.rank) == list(range(coll.size))
    assert (await work.allreduce(torch.ones(5), impl="ring")).tolist() == [coll.size] * 5
    assert not any(transport_of(comm).requests.used for comm in (coll, work))


@pytest.mark.ranks(2, 3, backend="openmpi")
async def test_a5_the_collectives_of_mpi_are_there(coll: Communicator) -> None:
    work = await coll.dup()
    for comm in (coll, work):
        comm.send(torch.ones(3), (comm.rank + 1) % comm.size).detach()
        total = await comm.allreduce(torch.full((70_000,), comm.rank + 1.0), impl="mpi")
        assert set(total.tolist()) == {comm.size * (comm.size + 1) / 2}
        await comm.recv(torch.empty(3), (comm.rank - 1) % comm.size)
    assert transport_of(coll).requests.used
    await work.aclose()


def test_a5_only_an_mpi_that_was_used_is_polled_for_others() -> None:
    """A rank that waits would need 0.06 of a core for these polls."""
    from aiodist.backends.mpi.requests import Requests

    async def main() -> None:
        requests = Requests(Progress.current())
        requests.stir()
        assert not len(requests)
        requests.used = True
        requests.stir()
        assert len(requests)
        requests.stir(0)
        assert not len(requests)

    aiodist.run(main)
