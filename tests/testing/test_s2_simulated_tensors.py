"""S2: tensors, modules and autograd on the simulated CUDA device are as on the CPU, only later."""

import copy
import io
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.simulated_cuda.device import SimulatedCuda
from tests.support.simulated_cuda.simulation import simulated_cuda


@pytest.fixture
def device() -> Iterator[SimulatedCuda]:
    """Two devices that wait for nothing unless they are paused."""
    with simulated_cuda(devices=2, delay=0.0) as device:
        yield device


def values(t: Tensor) -> list[float]:
    return sorted(set(t.tolist()))


def _layer(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16), nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), nn.Linear(16, 3)
    ).to(dtype)


def _train(net: nn.Module, batches: list[Tensor], foreach: bool) -> list[Tensor]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, foreach=foreach)
    for batch in batches:
        optimizer.zero_grad()
        labels = torch.zeros(len(batch), dtype=torch.long, device=batch.device)
        nn.functional.cross_entropy(net(batch).mean(1).float(), labels).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    return [p.detach().cpu() for p in net.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_s2_simulated_training_is_as_on_the_cpu(device: SimulatedCuda, dtype: torch.dtype) -> None:
    device.delay = 1e-4
    net = _layer(dtype)
    there = copy.deepcopy(net)
    parameters = list(there.parameters())
    assert there.to("cuda") is there
    assert all(new is p for new, p in zip(there.parameters(), parameters, strict=True))
    assert all(p.is_cuda and isinstance(p, nn.Parameter) for p in parameters)
    batches = [torch.randn(4, 5, 8, dtype=dtype) for _ in range(3)]
    expected = _train(net, batches, foreach=False)
    found = _train(there, [batch.cuda() for batch in batches], foreach=True)
    for a, b in zip(found, expected, strict=True):
        reduced = dtype is torch.bfloat16  # sums in another order
        torch.testing.assert_close(a, b, rtol=0.02 if reduced else 1e-5, atol=1e-3 if reduced else 1e-6)
    assert not device.hazards
    assert not device.fallbacks


def test_s2_simulated_a_step_does_not_synchronise(device: SimulatedCuda) -> None:
    net, batch = _layer(torch.float32).cuda(), torch.ones(4, 5, 8, device="cuda")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, foreach=True)
    before = device.synchronisations.total()
    with device.paused():
        net(batch).sum().backward()
        optimizer.step()
    assert device.synchronisations.total() == before


def test_s2_simulated_forward_on_another_stream_than_backward(device: SimulatedCuda) -> None:
    device.delay = 1e-3
    net, side = nn.Linear(8, 8).cuda(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for _ in range(5):
        with torch.cuda.stream(side):
            loss = net(torch.ones(4, 8, device="cuda")).relu().sum()
        loss.backward()
        del loss
    assert net.weight.grad is not None
    assert net.weight.grad.isfinite().all().item()
    assert not device.hazards


def test_s2_simulated_gradients_go_through_transfers_and_types(device: SimulatedCuda) -> None:
    host = torch.arange(4.0, requires_grad=True)
    (host.to("cuda", torch.float64) ** 2).to("cuda:1").sum().cpu().backward()
    assert host.grad is not None
    assert host.grad.tolist() == [0, 2, 4, 6]
    assert host.grad.device.type == "cpu"
    t = torch.ones(4, dtype=torch.complex64, device="cuda", requires_grad=True)
    (t.conj() * 2j).real.sum().backward()
    assert t.grad is not None
    assert t.grad.is_cuda
    assert t.grad.tolist() == [2j] * 4


def test_s2_simulated_hooks_see_tensors_of_the_device(device: SimulatedCuda) -> None:
    net, seen = nn.Linear(4, 4, device="cuda"), list[Any]()
    for p in net.parameters():
        p.register_post_accumulate_grad_hook(lambda p: seen.append((p.device, p.grad.device, p.grad.shape)))
    net(torch.ones(2, 4, device="cuda")).sum().backward()
    here = torch.device("cuda:0")
    assert sorted(seen, key=lambda s: len(s[2])) == [(here, here, (4,)), (here, here, (4, 4))]


def test_s2_simulated_tensors_are_copied_saved_and_moved(device: SimulatedCuda) -> None:
    net = nn.BatchNorm1d(4)
    kept = weakref.ref(net.weight)
    net.cuda(1).half()
    assert kept() is net.weight
    twin = copy.deepcopy(net)
    twin.weight.data.zero_()
    assert values(net.weight) == [1]
    assert {t.device for t in twin.state_dict().values()} == {torch.device("cuda:1")}
    saved = io.BytesIO()
    torch.save(net.state_dict(), saved)
    saved.seek(0)
    net.weight.data.fill_(3)
    net.load_state_dict(torch.load(saved, weights_only=False))
    assert values(net.weight) == [1]
    assert net.cpu().weight is kept()
    assert net.weight.device.type == "cpu"
    assert type(net.weight) is nn.Parameter


@pytest.mark.parametrize(
    "make",
    [
        lambda d: torch.tensor([1, 2], device=d),
        lambda d: torch.as_tensor([1, 2], device=d),
        lambda d: torch.as_tensor(torch.tensor([1, 2]), device=d),
        lambda d: torch.arange(1, 3, device=d),
        lambda d: torch.full((2,), 1, device=d) + torch.arange(2, device=d),
        lambda d: torch.ones_like(torch.zeros(2, dtype=torch.long), device=d).cumsum(0),
        lambda d: torch.zeros(2, dtype=torch.long).new_tensor([1, 2], device=d),
        lambda d: torch.zeros(2, dtype=torch.long, device=d).new_tensor([1, 2]),
        lambda d: torch.zeros(2, dtype=torch.long, device=d).new_ones(2).cumsum(0),
        lambda d: torch.tensor([1, 2]).to(d),
        lambda d: torch.tensor([1, 2]).to(other=torch.empty(0, dtype=torch.long, device=d)),
        lambda d: torch.tensor([1, 2]).to(d, torch.long, False, True),
        lambda d: torch.tensor([1, 2]).to(1),
        lambda d: torch.tensor([1, 2]).cuda(d),
        lambda d: torch.stack([torch.tensor(n, device=d) for n in (1, 2)]),
        lambda d: torch.sort(torch.tensor([2, 1], device=d)).values,
        lambda d: torch.tensor([0, 1, 2], device=d)[1:],
        lambda d: torch.empty(0, dtype=torch.long, device=d).resize_(2).copy_(torch.tensor([1, 2])),
    ],
)
def test_s2_simulated_tensors_come_to_be(device: SimulatedCuda, make: Callable[[str], Tensor]) -> None:
    t = make("cuda:1")
    assert t.device == torch.device("cuda:1")
    assert t.is_cuda
    assert not t.is_cpu
    assert t.dtype == torch.long
    assert t.tolist() == [1, 2]
    assert t.to("cuda:1").data_ptr() == t.data_ptr() != t.to("cuda:0").data_ptr()


def test_s2_simulated_optimizers_take_parameters_of_several_devices(device: SimulatedCuda) -> None:
    net = nn.ModuleList([nn.Linear(4, 4, device="cuda:0"), nn.Linear(4, 4, device="cuda:1"), nn.Linear(4, 4)])
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    before = [p.detach().cpu().clone() for p in net.parameters()]
    torch.optim.AdamW(net.parameters(), lr=0.5, weight_decay=0.0, foreach=True).step()
    for p, b in zip(net.parameters(), before, strict=True):
        torch.testing.assert_close(p.detach().cpu(), b - 0.5)
