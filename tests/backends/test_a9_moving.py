"""A9: storages move into an arena with all that looks at them; what cannot move says why, and nothing has moved."""

from __future__ import annotations

import copy
import ctypes
import gc
import io
import mmap
import pickle
import weakref
from array import array
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from aiodist.errors import BackendUnavailable, BufferInFlight
from aiodist.handles import in_flight
from aiodist.testing.seams.memory import Arena, move
from tests.support.moving import needs_moving
from tests.support.transports import held

pytestmark = needs_moving
PAGE = 4096


def inside(arena: Arena, t: Tensor) -> bool:
    storage = t.untyped_storage()
    return arena.locate(storage.data_ptr(), storage.nbytes()) is not None


def parts(module: nn.Module) -> dict[str, Tensor]:
    return dict([*module.named_parameters(), *module.named_buffers()])


@pytest.fixture
def arena() -> Arena:
    return Arena()


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(30, 40),
        lambda: torch.randn(30, 40).T,
        lambda: torch.arange(100)[50:],
        lambda: torch.randn(10, dtype=torch.complex64).conj(),
        lambda: torch.rand(1).expand(1000),
        lambda: torch.tensor(7, dtype=torch.int16),
        lambda: torch.rand(300) > 0.5,
        lambda: torch.randn(77).bfloat16(),
        lambda: torch.quantize_per_tensor(torch.randn(99), 0.1, 3, torch.qint8),
        lambda: torch._lazy_clone(torch.randn(500)),
        lambda: torch.randn(5).as_subclass(type("Named", (Tensor,), {})),
    ],
    ids=[
        "plain",
        "strided",
        "half",
        "lazy-conj",
        "expanded",
        "scalar",
        "bool",
        "bfloat16",
        "quantized",
        "cow",
        "named",
    ],
)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_a9_any_dense_tensor_moves(arena: Arena, make: Callable[[], Tensor]) -> None:
    t = make()
    values, old, kept = t.clone(), t.data_ptr(), (type(t), t._version, t.stride(), t.dtype)
    move(arena, {"t": t})
    assert inside(arena, t)
    assert t.data_ptr() != old
    assert (type(t), t._version, t.stride(), t.dtype) == kept
    assert torch.equal(t, values)
    there = t.data_ptr()
    move(arena, {"t": t})
    assert t.data_ptr() == there, "it was there already"


def test_a9_views_tied_weights_and_graphs_move_along(arena: Arena) -> None:
    torch.manual_seed(1)
    first, last = nn.Linear(16, 16), nn.Linear(16, 16)
    last.weight, weight = first.weight, first.weight
    last.bias = nn.Parameter(first.bias.detach())  # another parameter of the same storage
    net = nn.Sequential(first, nn.BatchNorm1d(16), last)
    view, alias = weight.detach()[3:5], weakref.ref(weight.untyped_storage())
    twin, x = copy.deepcopy(net), torch.randn(8, 16)
    loss = net(x).square().mean()  # what autograd saved moves too
    move(arena, parts(net))
    assert all(inside(arena, t) for t in [*parts(net).values(), view])
    assert held(arena) == PAGE * len({t.untyped_storage().data_ptr() for t in parts(net).values()}) == PAGE * 7
    assert first.weight is last.weight is weight
    assert first.bias.data_ptr() == last.bias.data_ptr()
    assert alias() is weight.untyped_storage()
    loss.backward()
    twin(x).square().mean().backward()
    for mine, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert torch.equal(mine.grad, theirs.grad)
    view.fill_(5)
    assert weight[3:5].eq(5).all()


def test_a9_a_change_after_the_move_is_still_found_by_autograd(arena: Arena) -> None:
    w = torch.ones(5, requires_grad=True)
    y = (w * w).sum()
    move(arena, {"w": w})
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_a9_optimizers_go_on(arena: Arena, kind: Callable[..., torch.optim.Optimizer]) -> None:
    nets = [nn.Linear(20, 20) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    optimizers = [kind(net.parameters(), lr=0.1) for net in nets]
    for step in range(4):
        if step == 2:
            move(arena, parts(nets[0]))
            move(arena, {f"{i}": t for i, s in optimizers[0].state.items() for t in s.values() if torch.is_tensor(t)})
        x = torch.full((3, 20), 1.0 + step)
        for net, optimizer in zip(nets, optimizers, strict=True):
            optimizer.zero_grad()
            net(x).square().sum().backward()
            optimizer.step()
    assert inside(arena, nets[0].weight)
    assert all(torch.equal(a, b) for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True))


def test_a9_copies_and_files_are_ordinary(arena: Arena) -> None:
    net = nn.Sequential(nn.Linear(9, 9), nn.BatchNorm1d(9))
    expected = {name: t.clone() for name, t in net.state_dict().items()}
    move(arena, parts(net))
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    copies = [copy.deepcopy(net).state_dict(), pickle.loads(pickle.dumps(net)).state_dict(), torch.load(file)]
    for found in (net.state_dict(), *copies):
        assert all(torch.equal(found[name], t) for name, t in expected.items())
    assert not any(inside(arena, t) for found in copies for t in found.values())
    net.load_state_dict(copies[2])
    assert all(inside(arena, t) for t in parts(net).values())


def test_a9_tensors_of_inference_mode_move_in_and_out_of_it(arena: Arena) -> None:
    with torch.inference_mode():
        t, inner = torch.arange(10.0), torch.ones(3)
        move(arena, {"t": inner})
    move(arena, {"t": t})
    ordinary = torch.ones(3, requires_grad=True)
    with torch.inference_mode():
        move(arena, {"t": ordinary})
    assert t.is_inference()
    assert not ordinary.is_inference()
    (ordinary * 2).sum().backward()
    assert all(inside(arena, moved) for moved in (t, inner, ordinary))
    with torch.device("meta"):
        host = torch.ones(3, device="cpu")
        move(arena, {"t": host})
    assert host.sum() == 3


def test_a9_the_old_memory_goes_and_the_new_goes_back(arena: Arena) -> None:
    size = 40 << 20

    def resident(addresses: list[int]) -> int:
        """Return how many MiB of the blocks at these addresses are there; other tests' memory comes and goes."""
        ctypes.CDLL(None).malloc_trim(0)  # malloc may have placed a block in heap memory that earlier tests freed
        pages = array("Q")
        with Path("/proc/self/pagemap").open("rb") as file:
            for address in addresses:
                file.seek(address // mmap.PAGESIZE * pages.itemsize)
                pages.fromfile(file, size // mmap.PAGESIZE)
        return sum(page >> 62 != 0 for page in pages) * mmap.PAGESIZE >> 20  # in memory, or swapped

    ts = {f"{i}": torch.ones(size, dtype=torch.uint8) for i in range(2)}
    old = [t.data_ptr() for t in ts.values()]
    assert resident(old) == pytest.approx(80, abs=2)
    move(arena, ts)
    new = [t.data_ptr() for t in ts.values()]
    gone = [address for address in old if all(abs(address - other) >= size for other in new)]  # may be mapped again
    assert resident(gone) == pytest.approx(0, abs=2)
    assert resident(new) == pytest.approx(80, abs=2)
    assert held(arena) == 80 << 20
    del ts
    gc.collect()
    assert held(arena) == 0
    assert resident(new) == pytest.approx(0, abs=2)


# --- what cannot move ------------------------------------------------------------------------------------------------


def _numpy() -> Tensor:
    t = torch.ones(5)
    t.numpy()
    return t


def _loaded() -> Tensor:
    file = io.BytesIO()
    torch.save(torch.ones(5), file)
    file.seek(0)
    loaded: Tensor = torch.load(file)
    return loaded


def _fake() -> Tensor:
    with FakeTensorMode():
        return torch.ones(5)


REFUSED: dict[str, tuple[Callable[[], Tensor], str]] = {
    "numpy": (_numpy, "memory that torch does not own"),
    "from_numpy": (lambda: torch.from_numpy(np.ones(5)), "memory that torch does not own"),
    "buffer": (lambda: torch.frombuffer(bytearray(8), dtype=torch.uint8), "memory that torch does not own"),
    "loaded": (_loaded, "memory that torch does not own"),
    "shared": (lambda: torch.ones(5).share_memory_(), "shared with other processes already"),
    "part": (lambda: torch.ones(100)[:40], "has 160 bytes of a storage of 400, which would move as a whole"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "layout torch.sparse_coo: expected a dense"),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), "layout torch.sparse_csr: expected a dense"),
    "meta": (lambda: torch.ones(3, device="meta"), "is on meta: expected the CPU"),
    "fake": (_fake, "is a FakeTensor, which wraps other tensors: expected a plain"),
    "lazy": (lambda: nn.LazyLinear(3).weight, "is uninitialized: expected a module that was called"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_a9_what_cannot_move_says_why_and_nothing_has(arena: Arena, case: str) -> None:
    make, why = REFUSED[case]
    first, t = torch.ones(10), make()
    with pytest.raises(ValueError, match=f"layer.weight .*{why}"):
        move(arena, {"first": first, "layer.weight": t})
    assert not arena.segments
    assert first.untyped_storage().resizable()


def test_a9_within_a_transform_of_torch_there_is_no_memory_to_move(arena: Arena) -> None:
    def inner(x: Tensor) -> Tensor:
        with pytest.raises(ValueError, match="t has no memory of its own: expected a plain tensor"):
            move(arena, {"t": x})
        return x

    torch.vmap(inner)(torch.ones(3, 3))
    torch.func.functionalize(inner)(torch.ones(3))


def test_a9_small_parts_that_are_most_of_a_storage_move_together(arena: Arena) -> None:
    flat = torch.arange(100.0)
    named = {f"{i}": flat[10 * i : 10 * i + 10] for i in range(5)}
    with pytest.raises(ValueError, match="0 has 160 bytes of a storage of 400"):
        move(arena, {**dict(list(named.items())[:4]), "again": flat[:10]})
    move(arena, named)
    assert inside(arena, flat)
    assert flat.sum() == 4950


@pytest.mark.parametrize("writes", [True, False])
def test_a9_what_is_in_flight_does_not_move(arena: Arena, writes: bool) -> None:
    t, other = torch.ones(100), torch.ones(100)
    before = t.data_ptr()
    in_flight.acquire(t.data_ptr() + 40, 8, writes, "that allreduce")
    try:
        with pytest.raises(BufferInFlight, match=r"to_arena_\(\) .* that allreduce still owns: await that first"):
            move(arena, {"other": other, "t": t})
        assert t.data_ptr() == before
        assert not inside(arena, other)
    finally:
        in_flight.release(t.data_ptr() + 40, 8, writes)
    move(arena, {"other": other, "t": t})
    assert inside(arena, t)
    assert not len(in_flight)


def test_a9_a_module_that_does_not_fit_says_how_far_it_came(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    expected = [p.detach().clone() for p in net.parameters()]
    empty, left = arena.empty, 3

    def scarce(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        nonlocal left
        if not left:
            raise MemoryError("no memory for an arena block of 256 bytes: No space left on device")
        left -= 1
        return empty(shape, dtype)

    monkeypatch.setattr(arena, "empty", scarce)
    text = r"1.bias cannot move .*: No space left on device; 3 of 6 storages have moved, 1.bias and later ones have not"
    with pytest.raises(MemoryError, match=text):
        move(arena, parts(net))
    assert [inside(arena, p) for p in net.parameters()] == [True] * 3 + [False] * 3
    assert all(torch.equal(p, e) for p, e in zip(net.parameters(), expected, strict=True))
    assert not len(in_flight)
    left = 3
    move(arena, parts(net))
    assert all(inside(arena, p) for p in net.parameters())


def test_a9_a_torch_that_cannot_is_named(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiodist.backends.shm.moving.UntypedStorage", type("UntypedStorage", (), {}))
    t = torch.ones(5)
    with pytest.raises(BackendUnavailable, match=rf"torch {torch.__version__.split('+')[0]}.* cannot move tensors"):
        move(arena, {"t": t})
    assert not arena.segments
    assert t.sum() == 5


def test_a9_nothing_to_move_needs_no_memory(arena: Arena) -> None:
    move(arena, {"t": torch.empty(0), "u": torch.empty(0, 5)})
    move(arena, {})
    assert not arena.segments


def test_a9_pinned_memory_stays(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "is_pinned", lambda t: True)
    with pytest.raises(ValueError, match="t is pinned for a CUDA device: expected memory that is not pinned"):
        move(arena, {"t": torch.ones(5)})
