"""A6, A7 on devices: the table has their rows, operations use edits, and a missing implementation gives a reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from aiodist import BackendUnavailable, Communicator, ConfigError, init
from aiodist.collectives.choice.availability import OfferState
from aiodist.collectives.choice.table import HOSTS, NAMES
from aiodist.testing import run_ranks
from aiodist.testing.seams.algorithms import Scheduled
from aiodist.testing.seams.cuda import CudaIpc, Staged
from aiodist.types import OPERATIONS
from tests.support.simulated_cuda.device import SimulatedCuda
from tests.support.simulated_cuda.simulation import simulated_cuda


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The implementations that ran the allreduces of devices, for each rank."""
    names: list[str] = []
    for kind in (CudaIpc, Staged, Scheduled):

        def noted(self, ep, primitives, run=kind.run):  # type: ignore[no-untyped-def]
            if any(o.kind == "allreduce" and not o.t.is_cpu for o in primitives):
                names.append(self.name)
            return run(self, ep, primitives)

        monkeypatch.setattr(kind, "run", noted)
    return names


@pytest.mark.ranks(2)
async def test_a6_rows_for_devices(coll: Communicator, simulated_cuda: SimulatedCuda) -> None:
    selector = coll.selector
    rows = selector.show(device="cuda").splitlines()[1:]
    assert len(rows) == len(HOSTS) * len(OPERATIONS)
    assert all(row.split()[0] == "cuda" for row in rows)
    for operation in OPERATIONS:
        for nbytes in (0, 1, 1 << 20, 1 << 40):
            chosen = selector.choose(operation, nbytes, "cuda")
            assert chosen in NAMES[operation]
            assert coll.availability().of(operation, chosen, "cuda").state is OfferState.AVAILABLE
    assert "# staged, then cuda_ipc here" in selector.show(operation="allreduce", device="cuda", hosts="one")
    with pytest.raises(ValueError, match="device 'tpu': expected one of cpu, cuda"):
        selector.choose("allreduce", 1, "tpu")


@pytest.mark.ranks(2)
async def test_a6_an_edit_is_seen_by_operations_on_devices_alone(
    coll: Communicator, simulated_cuda: SimulatedCuda, ran: list[str]
) -> None:
    sub = await coll.dup()
    before = [coll.selector.choose("allreduce", nbytes) for nbytes in (0, 4096)]
    await coll.selector.set("allreduce", "doubling", above=1000, below=2000, device="cuda")
    await coll.selector.set("allreduce", "ring", above=2000, device="cuda")
    assert [coll.selector.choose("allreduce", nbytes) for nbytes in (0, 4096)] == before
    for comm in (coll, sub, await coll.dup()):
        for numel, expected in ((10, "staged"), (300, "doubling"), (600, "ring")):
            assert comm.selector.choose("allreduce", 4 * numel, "cuda") == expected
            await coll.barrier()
            ran.clear()
            await coll.barrier()
            assert (await comm.allreduce(torch.ones(numel).to(coll.device))).tolist() == [2.0] * numel
            await coll.barrier()
            assert ran == [expected] * 2
    assert "cuda one allreduce 1000 2000 doubling" in " ".join(coll.selector.show(device="cuda").split())


@pytest.mark.ranks(2)
async def test_a7_what_is_available_on_devices_runs(coll: Communicator, simulated_cuda: SimulatedCuda) -> None:
    offers = [offer for offer in coll.availability() if offer.device == "cuda"]
    assert all(offer.reason for offer in offers if offer.state is not OfferState.AVAILABLE)
    states = {o.impl: o for o in offers if o.operation == "allreduce"}
    assert states["nccl"].state is not OfferState.AVAILABLE
    for impl, offer in states.items():
        t = torch.full((9,), coll.rank + 1.0).to(coll.device)
        if offer.state is OfferState.AVAILABLE:
            assert (await coll.allreduce(t, impl=impl)).tolist() == [3.0] * 9
        elif offer.state is OfferState.NOT_HERE and impl in ("mpi", "gloo", "shm", "nccl"):
            with pytest.raises(BackendUnavailable, match=rf"impl='{impl}': "):
                coll.allreduce(t, impl=impl)
            with pytest.raises(BackendUnavailable, match=f"{impl} is not possible here"):
                coll.selector.set("allreduce", impl, device="cuda")


def test_a7_nccl_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiodist.backends.nccl.missing", lambda: "pip install aiodist[cuda13]")

    async def main() -> None:
        async with init() as coll:
            offer = coll.availability().of("allreduce", "nccl", "cuda")
            assert (str(offer.state), offer.reason) == ("not installed", "pip install aiodist[cuda13]")
            with pytest.raises(BackendUnavailable, match=r"nccl: pip install aiodist\[cuda13\]"):
                coll.allreduce(torch.ones(1).cuda(), impl="nccl")
            with pytest.raises(BackendUnavailable, match=r"nccl is not installed: pip install"):
                coll.selector.set("allreduce", "nccl", device="cuda")

    with simulated_cuda(devices=2):
        run_ranks(2, main)


def test_a6_a_file_with_rows_for_devices(tmp_path: Path) -> None:
    """It is used where there are devices, and refused as a whole, by line, where there are none."""
    path = tmp_path / "table"
    path.write_text("cpu one allreduce 0 - direct\ncuda one allreduce 0 1KiB staged\nlimit staged.pieces 2\n")

    async def main() -> list[str]:
        async with init(selector=path) as coll:
            chosen = [coll.selector.choose("allreduce", nbytes, "cuda") for nbytes in (0, 1 << 20)]
            assert coll.selector.choose("allreduce", 0) == "direct"
            assert coll.selector.limits["staged.pieces"] == 2
            return chosen

    with simulated_cuda(devices=1):
        assert run_ranks(2, main) == [["staged", "cuda_ipc"]] * 2
    with pytest.raises((BackendUnavailable, ConfigError), match=r"table:2: staged is .*there is no CUDA device here"):
        run_ranks(2, main)


@pytest.mark.ranks(2)
async def test_a6_edits_for_devices_that_are_not_here(coll: Communicator) -> None:
    with pytest.raises(BackendUnavailable, match="staged is not possible here: there is no CUDA device here"):
        coll.selector.set("allreduce", "staged", device="cuda")
    with pytest.raises(ValueError, match="device 'cuda': expected one of cpu"):
        coll.selector.choose("allreduce", 1, "cuda")
    assert len(coll.selector.show(device="cuda").splitlines()) == 1
