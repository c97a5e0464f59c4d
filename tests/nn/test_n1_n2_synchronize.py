"""N1, N2: parameters and gradients made the same on all ranks, in any dtype and memory layout, against one process."""

import asyncio
from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import aiodist
from aiodist import Communicator
from aiodist.nn import DataParallel, assert_synchronized, synchronize_gradients, synchronize_parameters
from aiodist.nn.layout import (
    flat_view,
    memory_order,
    named_state,
    structure,
    view_like,
)

every = pytest.mark.ranks(1, 2, 3, 5)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64)
LARGE = 150  # squared: 90,000 bytes of float32, too large to be copied into a buffer


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Return small whole numbers: their sums are exact in each dtype and order."""
    drawn = torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(seed))
    return drawn.to(dtype)


class Zoo(nn.Module):
    """Parameters and buffers of many kinds, different on each rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        for i, dtype in enumerate(DTYPES):
            name = str(dtype).removeprefix("torch.")
            self.register_parameter(f"{name}_small", nn.Parameter(values((3, 5), dtype, 10 * rank + i)))
        for i, dtype in enumerate((torch.float32, torch.bfloat16)):
            large = values((LARGE, 2 * LARGE), dtype, 100 * rank + i)
            self.register_parameter(f"large_{i}", nn.Parameter(large))
        image = values((7, 5, 3, 3), torch.float32, 7 + rank)
        self.image = nn.Parameter(image.contiguous(memory_format=torch.channels_last))
        big = values((40, 70, 3, 3), torch.float32, 8 + rank)
        self.big_image = nn.Parameter(big.contiguous(memory_format=torch.channels_last))
        self.turned = nn.Parameter(values((LARGE, LARGE), torch.float32, 9 + rank).t())
        self.sliced = nn.Parameter(values((LARGE, 2 * LARGE), torch.float32, 11 + rank)[:, ::2])
        self.single = nn.Parameter(torch.tensor(float(rank)))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.frozen = nn.Parameter(torch.full((3,), float(rank)), requires_grad=False)
        self.tied = self.float32_small
        self.register_buffer("count", torch.tensor(rank + 5))
        self.register_buffer("flags", torch.tensor([rank == 0, True, rank == 1]))
        self.register_buffer("codes", torch.full((3,), 40_000 + rank, dtype=torch.uint16))
        self.register_buffer("spread", torch.tensor([float(rank)]).expand(6))
        self.register_buffer("hidden", torch.full((2,), float(rank)), persistent=False)
        self.register_buffer("absent", None)


def copies(module: nn.Module) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in named_state(module)}


@cache
def state_of(rank: int) -> dict[str, Tensor]:
    """Return what the zoo of `rank` begins with."""
    return copies(Zoo(rank))


@cache
def gradients_of(rank: int) -> dict[str, Tensor]:
    """Return the gradients of `trained(rank)`."""
    return {name: p.grad for name, p in trained(rank).named_parameters() if p.grad is not None}


def trained(rank: int) -> Zoo:
    """Return a zoo whose every parameter has a gradient, in the layout that autograd gives it."""
    module = Zoo(rank)
    for i, p in enumerate(module.parameters()):
        p.grad = torch.empty_like(p).copy_(values(tuple(p.shape), p.dtype, 1000 * rank + i))
    return module


def mean_of(ts: list[Tensor]) -> Tensor:
    """Return the mean, computed in double precision and rounded once."""
    wide = torch.complex128 if ts[0].is_complex() else torch.float64
    return torch.stack([t.to(wide) for t in ts]).mean(0).to(ts[0].dtype)


def same(seen: Tensor, expected: Tensor) -> bool:
    """Return whether they are equal but for the last bit, which 16-bit means get from float32."""
    assert seen.dtype is expected.dtype
    if not (seen.is_floating_point() or seen.is_complex()):
        return torch.equal(seen, expected)
    return torch.allclose(seen, expected, rtol=2 * torch.finfo(seen.dtype).eps, atol=0)


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: torch.arange(24.0).view(2, 3, 4),
    "number": lambda: torch.tensor(3.0),
    "empty": lambda: torch.empty(3, 0),
    "channels_last": lambda: torch.arange(120.0).view(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "transposed": lambda: torch.arange(12).view(3, 4).t(),
    "permuted": lambda: torch.arange(24).view(2, 3, 4).permute(2, 0, 1),
    "one channel": lambda: torch.arange(20.0).view(4, 1, 5, 1).contiguous(memory_format=torch.channels_last),
    "inside another": lambda: torch.arange(30).view(5, 6)[2:4],
    "a parameter": lambda: nn.Parameter(torch.arange(12.0).view(3, 4).t()),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_n1_a_dense_tensor_is_flat_memory(name: str) -> None:
    t = LAYOUTS[name]()
    flat = flat_view(t)
    assert flat is not None
    assert flat.shape == (t.numel(),)
    assert flat.is_contiguous()
    assert not flat.requires_grad
    assert flat.data_ptr() == t.data_ptr()
    back = view_like(flat, t)
    assert (back.shape, back.stride()) == (t.shape, t.stride())
    assert torch.equal(back, t.detach())
    inside = torch.zeros(t.numel() + 3, dtype=t.dtype)[2:-1]  # a piece of a buffer
    view_like(inside, t).copy_(t.detach())
    assert torch.equal(inside, flat)


@pytest.mark.parametrize(
    "t",
    [
        torch.arange(3.0).expand(2, 3),
        torch.arange(12).view(3, 4)[:, :2],
        torch.arange(12)[::2],
        torch.ones(4, dtype=torch.complex64).conj(),
        torch.ones(2, 3).to_sparse(),
    ],
    ids=["expanded", "columns", "steps", "conjugated", "sparse"],
)
def test_n1_what_has_gaps_has_no_flat_memory(t: Tensor) -> None:
    assert flat_view(t) is None
    assert memory_order(t) is None
    assert view_like(torch.zeros(t.numel()), t).is_contiguous()


def test_n1_shared_tensors_come_once() -> None:
    module = Zoo(0)
    module.register_buffer("alias", module.image.detach())
    names = [name for name, _ in named_state(module)]
    assert "tied" not in names
    assert "alias" not in names
    assert names.index("frozen") < names.index("count") < names.index("hidden")
    buffers = ["count", "flags", "codes", "spread", "hidden"]
    assert [name for name, _ in named_state(module, parameters=False)] == [*buffers, "alias"]


def test_n1_ranks_compare_names_shapes_and_dtypes_alone() -> None:
    texts = [
        structure([("weight", torch.zeros(3, 4)), ("bias", torch.zeros(3))], any_order=True),
        structure([("bias", torch.zeros(3)), ("weight", torch.zeros(3, 4))], any_order=True),
        structure([("weight", torch.zeros(4, 3)), ("bias", torch.zeros(3))], any_order=True),
        structure([("weight", torch.zeros(3, 4)), ("bias", torch.zeros(3).half())], any_order=True),
        structure([("weights", torch.zeros(3, 4)), ("bias", torch.zeros(3))], any_order=True),
        structure([("weight", torch.zeros(3, 4))], any_order=True),
    ]
    assert len(set(map(str, texts))) == len(texts)
    assert texts[5] == structure([("weight", torch.ones(4, 3).t())], any_order=True)


@every
async def test_n1_root_gives_everything(coll: Communicator) -> None:
    for root in {0, coll.size - 1}:
        module: Any = Zoo(coll.rank)
        before = dict(named_state(module))
        await synchronize_parameters(module, coll, root=root)
        for name, expected in state_of(root).items():
            t = dict(named_state(module))[name]
            assert torch.equal(t, expected), name
            assert t is before[name]
            assert t.stride() == before[name].stride()
        assert module.image.is_contiguous(memory_format=torch.channels_last)
        assert module.tied is module.float32_small
        assert not module.frozen.requires_grad
        assert module.image.requires_grad


@every
async def test_n1_mean_of_all(coll: Communicator) -> None:
    module, root = Zoo(coll.rank), coll.size - 1
    await synchronize_parameters(module, coll, how="mean", root=root)
    all_ranks = [state_of(rank) for rank in range(coll.size)]
    for name, t in named_state(module):
        if t.is_floating_point() or t.is_complex():
            assert same(t.detach(), mean_of([state[name] for state in all_ranks])), name
        else:
            assert torch.equal(t, all_ranks[root][name]), name


@pytest.mark.ranks(2)
async def test_n1_large_tensors_are_not_copied(coll: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = Zoo(coll.rank)
    flats = [flat_view(t) for t in (module.large_0,)]
    sent: list[int] = []
    broadcast = coll.broadcast

    def watched(ts: Any, root: int) -> Any:
        sent.extend(t.data_ptr() for t in ts)
        return broadcast(ts, root)

    monkeypatch.setattr(coll, "broadcast", watched)
    before = coll.seq
    await synchronize_parameters(module, coll)
    assert coll.seq == before + 2  # the digests, then everything
    assert all(flat is not None and flat.data_ptr() in sent for flat in flats)


@pytest.mark.ranks(2, 3)
async def test_n1_ranks_may_lay_their_tensors_out_differently(coll: Communicator) -> None:
    for shape in ((4, 3, 5, 5), (40, 30, 5, 5)):
        for how in ("root", "mean"):
            given = [values(shape, torch.float32, rank) for rank in range(coll.size)]
            module = nn.Module()
            form = torch.channels_last if coll.rank == 1 else torch.contiguous_format
            module.weight = nn.Parameter(given[coll.rank].clone(memory_format=form))
            await synchronize_parameters(module, coll, how=how)
            assert same(module.weight.detach(), given[0] if how == "root" else mean_of(given))
            assert module.weight.is_contiguous(memory_format=form)


@pytest.mark.ranks(1, 2)
async def test_n1_n2_what_torch_conjugates_as_it_reads(coll: Communicator) -> None:
    """A buffer, and a gradient as torch makes it where forward conjugates."""
    module: Any = nn.Module()
    module.weight = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j]) * (coll.rank + 1))
    module.register_buffer("turned", torch.tensor([1 - 2j, 1j * coll.rank]).conj())
    module.register_buffer("negative", module.turned.imag)
    await synchronize_parameters(module, coll)
    assert module.turned.is_conj()
    assert module.turned.tolist() == [1 + 2j, 0]
    assert module.negative.tolist() == [2, 0]
    (module.weight.conj() * (1j + coll.rank)).real.sum().backward()
    assert module.weight.grad.is_conj()
    await synchronize_gradients(module, coll, op="sum")
    assert module.weight.grad.tolist() == [sum(1j + rank for rank in range(coll.size))] * 2


@pytest.mark.ranks(2, 3)
async def test_n1_buffers_can_stay_or_go_alone(coll: Communicator) -> None:
    module: Any = nn.BatchNorm1d(3)
    with torch.no_grad():
        module.weight += coll.rank
    module.running_mean += coll.rank
    module.num_batches_tracked += coll.rank + 7
    await synchronize_parameters(module, coll, buffers=False)
    assert module.weight.tolist() == [1.0] * 3
    assert module.running_mean.tolist() == [float(coll.rank)] * 3
    net = await DataParallel.create(module, coll)
    module.running_mean += coll.rank
    module.num_batches_tracked += coll.rank
    await net.synchronize_buffers("mean", root=1)
    assert module.running_mean.tolist() == [sum(range(coll.size)) / coll.size] * 3
    assert module.num_batches_tracked == 8
    module.running_var += coll.rank
    await net.synchronize_buffers(root=1)
    assert module.running_var.tolist() == [2.0] * 3


def renamed() -> nn.Module:
    return nn.ModuleDict({"first": nn.Linear(3, 4), "third": nn.Linear(4, 2)})


DIFFERENT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "name": (renamed, r"second\.weight float32\[2, 4\].*third\.weight float32\[2, 4\]"),
    "shape": (
        lambda: nn.ModuleDict({"first": nn.Linear(3, 4), "second": nn.Linear(4, 3)}),
        r"second\.weight float32\[2, 4\].*second\.weight float32\[3, 4\]",
    ),
    "dtype": (
        lambda: nn.ModuleDict({"first": nn.Linear(3, 4).bfloat16(), "second": nn.Linear(4, 2)}),
        r"first\.weight float32\[4, 3\].*first\.weight bfloat16\[4, 3\]",
    ),
    "fewer": (
        lambda: nn.ModuleDict({"first": nn.Linear(3, 4)}),
        r"tensors/2 of .*: ranks? 0.*: second\.weight float32\[2, 4\]; rank .*: \(missing\)",
    ),
}


@pytest.mark.ranks(2, 3)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", DIFFERENT)
async def test_n1_a_difference_is_named_on_every_rank(coll: Communicator, what: str) -> None:
    other, text = DIFFERENT[what]
    odd = coll.rank == coll.size - 1
    module = other() if odd else nn.ModuleDict({"first": nn.Linear(3, 4), "second": nn.Linear(4, 2)})
    before = copies(module)
    with pytest.raises(aiodist.MismatchError, match=text) as caught:
        await synchronize_parameters(module, coll)
    assert f"rank {coll.size - 1}" in str(caught.value)
    assert caught.value.rank == coll.rank
    assert all(torch.equal(t, before[name]) for name, t in named_state(module))
    assert await coll.allreduce(1) == coll.size


@pytest.mark.ranks(2)
async def test_n1_other_arguments_on_a_rank(coll: Communicator) -> None:
    module = nn.Linear(2, 2)
    with pytest.raises(
        aiodist.MismatchError, match=r"disagree on root of synchronize_parameters: rank 0: 0; rank 1: 1"
    ):
        await synchronize_parameters(module, coll, root=coll.rank)
    with pytest.raises(aiodist.MismatchError, match=r"how of .*: rank 0: root; rank 1: mean"):
        await synchronize_parameters(module, coll, how=("root", "mean")[coll.rank])
    assert await coll.allreduce(1) == 2


@pytest.mark.ranks(2)
async def test_n1_orders_in_memory_are_compared_where_they_matter(coll: Communicator) -> None:
    t = torch.ones(3, 4) if coll.rank == 0 else torch.ones(4, 3).t()
    module = nn.Module()
    module.weight = nn.Parameter(t)
    await synchronize_parameters(module, coll)
    with pytest.raises(
        aiodist.MismatchError, match=r"orders/0 of net .*: rank 0: weight with dimensions \(0, 1\).*rank 1: .*\(1, 0\)"
    ):
        await DataParallel.create(module, coll)
    module.weight = nn.Parameter(torch.ones(4, 3).t())
    await (await DataParallel.create(module, coll)).aclose()


@pytest.mark.ranks(1, 2)
async def test_n1_mistakes_are_told_before_anything_is_sent(coll: Communicator) -> None:
    before = coll.seq
    lazy = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3))
    with pytest.raises(ValueError, match=r"'1\.weight' is not initialised yet"):
        await synchronize_parameters(lazy, coll)
    with pytest.raises(ValueError, match=r"'weight' lives on the meta device"):
        await synchronize_parameters(nn.Linear(2, 2, device="meta"), coll)
    with pytest.raises(ValueError, match=r"how='median': expected 'root' or 'mean'"):
        await synchronize_parameters(nn.Linear(2, 2), coll, how="median")
    with pytest.raises(ValueError, match=r"root=9: expected a rank"):
        await synchronize_parameters(nn.Linear(2, 2), coll, root=9)
    sparse = nn.ParameterDict({"eye": nn.Parameter(torch.eye(3).to_sparse())})
    with pytest.raises(TypeError, match=r"'eye' has layout torch\.sparse_coo: expected a dense"):
        await synchronize_parameters(sparse, coll)
    with pytest.raises(ValueError, match="not initialised"):
        synchronize_gradients(lazy, coll, op="sum")
    assert coll.seq == before


@pytest.mark.ranks(2)
async def test_n1_a_graph_that_saved_old_values_finds_out(coll: Communicator) -> None:
    for width in (3, LARGE):
        layer = nn.Linear(width, width)
        loss = layer(layer(torch.ones(2, width))).sum()
        await synchronize_parameters(layer, coll)
        if coll.rank:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        else:
            loss.backward()


@every
@pytest.mark.parametrize("op", ["sum", "mean"])
async def test_n2_against_one_process(coll: Communicator, op: Literal["mean", "sum"]) -> None:
    module = trained(coll.rank)
    before = [p.grad for p in module.parameters()]
    seq = coll.seq
    await synchronize_gradients(module, coll, op=op)
    assert coll.seq == seq + 1
    for (name, p), grad in zip(module.named_parameters(), before, strict=True):
        given = [gradients_of(rank)[name] for rank in range(coll.size)]
        assert p.grad is grad, name
        assert p.grad is not None
        if name == "frozen":
            assert torch.equal(p.grad, given[coll.rank])
        else:
            expected = mean_of(given) if op == "mean" else torch.stack(given).sum(0, dtype=p.dtype)
            assert same(p.grad, expected), name


@pytest.mark.ranks(1, 2, 3)
async def test_n2_a_step_equals_one_process_with_the_joined_batch(coll: Communicator) -> None:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3).eval(), nn.Flatten(), nn.Linear(27, 5), nn.Tanh())
    net.double().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x, y = torch.randn(6, 2, 5, 5, dtype=torch.float64), torch.randn(6, 5, dtype=torch.float64)
    nn.functional.mse_loss(net(x), y).backward()
    expected = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    net.zero_grad()
    mine = slice(coll.rank * 6 // coll.size, (coll.rank + 1) * 6 // coll.size)
    nn.functional.mse_loss(net(x[mine]), y[mine]).backward()
    await synchronize_gradients(net, coll, op="mean")
    for p, grad in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, grad, rtol=1e-12, atol=1e-15)


@pytest.mark.ranks(2)
async def test_n2_parameters_that_have_one_gradient(coll: Communicator) -> None:
    """Autograd gives both parts of a sum the same memory."""
    shape = (300, 100)
    module = nn.ParameterList(torch.zeros(shape).view(-1) for _ in range(2))
    factors = torch.stack([values(shape, torch.float32, rank) for rank in range(2)])
    ((module[0].view(shape) + module[1].view(shape)) * factors[coll.rank]).sum().backward()
    await synchronize_gradients(module, coll, op="sum")
    for parameter in module:
        torch.testing.assert_close(parameter.grad, factors.sum(0).view(-1))


@pytest.mark.ranks(1, 2, 3)
async def test_n2_none_is_zeros_where_another_rank_has_one(coll: Communicator) -> None:
    for width in (3, LARGE):
        module = nn.ModuleDict({name: nn.Linear(width, width) for name in ("never", "last", "always")})
        conv = module["last"].weight = nn.Parameter(torch.ones(width, width).t())
        for name, layer in module.items():
            if name == "always" or (name == "last" and coll.rank == coll.size - 1):
                for p in layer.parameters():
                    p.grad = torch.full_like(p, coll.rank + 1)
        await synchronize_gradients(module, coll, op="mean")
        assert all(p.grad is None for p in module["never"].parameters())
        assert conv.grad is not None
        assert conv.grad.stride() == conv.stride()
        assert all((p.grad == 1).all() for p in module["last"].parameters() if p.grad is not None)
        total = sum(range(1, coll.size + 1)) / coll.size
        assert all(torch.equal(p.grad, torch.full_like(p, total)) for p in module["always"].parameters())  # type: ignore[arg-type]
        torch.optim.SGD(module.parameters(), lr=0.1).step()  # they are ordinary tensors


@pytest.mark.ranks(2)
async def test_n2_gradients_that_lie_unlike_their_parameter(coll: Communicator) -> None:
    """One rank alone has gradients with other strides, so the ranks must not send memory as it is."""
    for n in (3, LARGE):
        kinds: list[Callable[[Tensor], Tensor]] = [
            lambda g: g.t().contiguous().t(),
            lambda g: torch.stack([g, g], 2)[..., 0],
            lambda g: g.clone(),
        ]
        for kind in kinds:
            layer = nn.Linear(n, n, bias=False)
            given = [values((n, n), torch.float32, rank) for rank in range(2)]
            layer.weight.grad = kind(given[0]) if coll.rank == 0 else given[1].clone()
            stride = layer.weight.grad.stride()
            await synchronize_gradients(layer, coll, op="sum")
            assert torch.equal(layer.weight.grad, given[0] + given[1])
            assert layer.weight.grad.stride() == stride
        layer = nn.Linear(n, n, bias=False)
        layer.weight.grad = torch.tensor(1.0 + coll.rank).expand(n, n)  # cannot be written to
        await synchronize_gradients(layer, coll, op="sum")
        assert torch.equal(layer.weight.grad, torch.full((n, n), 3.0))


@pytest.mark.ranks(2, 3)
@pytest.mark.ranks(2)
async def test_n2_other_names_or_orders_are_an_error_on_every_rank(coll: Communicator) -> None:
    module = renamed() if coll.rank == 1 else nn.ModuleDict({"first": nn.Linear(3, 4), "second": nn.Linear(4, 2)})
    mine = "third" if coll.rank == 1 else "second"
    with pytest.raises(aiodist.MismatchError, match=rf"trainable parameter 2 .*: rank {coll.rank}: {mine}\.weight"):
        await synchronize_gradients(module, coll, op="mean")
    layer = nn.Linear(3, 3)
    if coll.rank == 0:
        layer.weight = nn.Parameter(torch.ones(3, 3).t())
    with pytest.raises(aiodist.MismatchError, match=r"parameter 0 .*weight float32\[3, 3\], with dimensions"):
        await synchronize_gradients(layer, coll, op="sum")
    assert await coll.allreduce(1) == coll.size


@pytest.mark.ranks(2)
async def test_n2_other_sizes_are_found_before_anything_is_sent(coll: Communicator) -> None:
    layer = nn.Linear(3, 4 + coll.rank)
    layer.weight.grad = torch.ones_like(layer.weight)
    with pytest.raises(aiodist.MismatchError, match=r"float32\[16\].*float32\[20\]"):
        await synchronize_gradients(layer, coll, op="sum")
    assert (layer.weight.grad == 1).all()
    assert await coll.allreduce(1) == coll.size


@pytest.mark.ranks(2)
async def test_n2_other_sizes_never_hang(coll: Communicator) -> None:
    other = await coll.dup()
    with pytest.raises(aiodist.MismatchError, match=r"float32\[16\].*float32\[20\]"):
        await synchronize_gradients(nn.Linear(3, 4 + coll.rank), other, op="sum")
    assert await coll.allreduce(1) == coll.size


@pytest.mark.ranks(1, 2)
async def test_n2_mistakes_are_raised_at_the_call(coll: Communicator) -> None:
    layer = nn.Embedding(4, 3, sparse=True)
    layer(torch.tensor([1, 2])).sum().backward()
    before = coll.seq
    with pytest.raises(TypeError, match=r"gradient of 'weight' has layout torch\.sparse_coo: expected a dense"):
        synchronize_gradients(layer, coll, op="sum")
    with pytest.raises(ValueError, match=r"op='max': expected 'sum', or 'mean'"):
        synchronize_gradients(layer, coll, op="max")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="op"):
        synchronize_gradients(layer, coll)  # type: ignore[call-arg]
    assert coll.seq == before


@pytest.mark.ranks(2, 3)
async def test_n2_one_awaitable_among_others(coll: Communicator) -> None:
    module = nn.Linear(5, 5)
    module.weight.grad = torch.ones_like(module.weight)
    t = torch.ones(3)
    async with asyncio.timeout(20):
        both = await asyncio.gather(synchronize_gradients(module, coll, op="sum"), coll.allreduce(t))
    assert list(both) == [None, t]
    assert (module.weight.grad == coll.size).all()


@pytest.mark.ranks(2)
async def test_n2_cancelling_the_await_never_stops_the_transfer(coll: Communicator) -> None:
    module = nn.Linear(5, 5)
    module.weight.grad = torch.full_like(module.weight, coll.rank + 1.0)
    handle = synchronize_gradients(module, coll, op="sum")

    async def wait() -> None:
        await handle

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    await coll.barrier()
    await asyncio.sleep(0)
    assert (module.weight.grad == 3).all()


@pytest.mark.ranks(2)
async def test_n2_a_deadline_is_told(coll: Communicator) -> None:
    module = nn.Linear(5, 5)
    module.weight.grad = torch.ones_like(module.weight)
    if coll.rank == 0:
        with pytest.raises(aiodist.OperationTimeout, match="allreduce") as caught:
            await synchronize_gradients(module, coll, op="sum", timeout=0.5)
        assert list(caught.value.late) == [1]
        await coll.send(torch.ones(1), 1)
    else:
        await coll.recv(torch.empty(1), 0)
        await synchronize_gradients(module, coll, op="sum")


@pytest.mark.ranks(2)
async def test_n2_called_in_inference_mode_and_with_another_default_device(coll: Communicator) -> None:
    layer = nn.Linear(3, 3)
    if coll.rank == 0:
        layer.weight.grad = torch.ones_like(layer.weight)
    with torch.inference_mode(), torch.device("meta"):
        handle = synchronize_gradients(layer, coll, op="sum")
        await synchronize_parameters(layer, coll)
        await handle
    assert layer.bias.grad is None
    torch.optim.SGD(layer.parameters(), lr=1.0, momentum=0.9).step()
    assert layer.weight.grad is not None
    assert layer.weight.grad.mul_(2).eq(2).all()


over_mpi = pytest.mark.ranks(2, backend="mpi")


@over_mpi
async def test_n1_over_mpi(coll: Communicator) -> None:
    module: Any = Zoo(coll.rank)
    async with asyncio.timeout(30):
        await synchronize_parameters(module, coll, how="mean", root=1)
        for name, t in named_state(module):
            if t.is_floating_point() or t.is_complex():
                assert same(t.detach(), mean_of([state_of(rank)[name] for rank in range(2)])), name
        module = Zoo(coll.rank)
        await synchronize_parameters(module, coll, root=1)
        assert all(torch.equal(t, state_of(1)[name]) for name, t in named_state(module))
        with pytest.raises(aiodist.MismatchError, match=r"rank 0: weight float32\[2, 3\]"):
            await synchronize_parameters(nn.Linear(3, 2 + coll.rank), coll)
        assert await coll.allreduce(1) == 2


@over_mpi
async def test_n2_over_mpi(coll: Communicator) -> None:
    async with asyncio.timeout(30):
        module = trained(coll.rank)
        await synchronize_gradients(module, coll, op="mean")
        for name, p in module.named_parameters():
            if p.requires_grad and p.grad is not None:
                assert same(p.grad, mean_of([gradients_of(rank)[name] for rank in range(2)])), name
        huge = nn.Linear(1200, 1000)  # 4.8 MB: the progress thread reduces it
        huge.weight.grad = torch.full_like(huge.weight, float(coll.rank))
        await synchronize_gradients(huge, coll, op="sum")
        assert (huge.weight.grad == 1).all()
        assert huge.bias.grad is None
        name = f"weight_of_{coll.rank}"
        with pytest.raises(aiodist.MismatchError, match=rf"rank {coll.rank}: {name} float32\[3\]"):
            await synchronize_gradients(nn.ParameterDict({name: torch.ones(3)}), coll, op="sum")
        assert await coll.allreduce(1) == 2


@over_mpi
async def test_n10_over_mpi(coll: Communicator) -> None:
    async with asyncio.timeout(30):
        state = [torch.ones(1_100_000), nn.Linear(2, 2, bias=False), 3.0]
        with pytest.raises(aiodist.MismatchError, match=r"x\[1\]\.weight: rank 0: abs-mean .*; rank 1: abs-mean"):
            await assert_synchronized(state, coll)
        await synchronize_parameters(state[1], coll)  # type: ignore[arg-type]
        await assert_synchronized(state, coll)
