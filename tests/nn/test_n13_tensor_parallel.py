"""N13: layers divided among ranks against torch's own: weights, outputs, gradients, training on a grid, state."""

from __future__ import annotations

import asyncio
import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from aiodist import Communicator
from aiodist.nn import (
    ColumnLinear,
    DataParallel,
    PipelinedOptimizer,
    RowLinear,
    ShardedOptimizer,
    VocabEmbedding,
    assert_synchronized,
    full_state_dict,
    split_state_dict,
)

WORDS, WIDTH, HEADS, LENGTH = 13, 12, 2, 5
Linear = Callable[..., nn.Module]


class Block(nn.Module):
    """A small language model: an embedding, a block of a transformer, and a head; of torch's layers or divided ones."""

    def __init__(self, coll: Communicator | None = None, *, tied: bool = False) -> None:
        super().__init__()
        options: Any = {} if coll is None else {"coll": coll}
        out: Any = {} if coll is None else {"coll": coll, "gather_output": False}
        into: Any = {} if coll is None else {"coll": coll, "split_input": True}
        column, row = (nn.Linear, nn.Linear) if coll is None else (ColumnLinear, RowLinear)
        self.heads = HEADS if coll is None else HEADS // coll.size
        self.words: Any = (nn.Embedding if coll is None else VocabEmbedding)(WORDS, WIDTH, **options)
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        # A bias of the keys would have a gradient of zero, and Adam would make steps out of its rounding errors.
        self.query, self.key, self.value = (column(WIDTH, WIDTH, bias=False, **out) for _ in range(3))
        self.mixed = row(WIDTH, WIDTH, **into)
        self.up = column(WIDTH, 3 * WIDTH + 1, **out)  # an odd number of hidden units
        self.down = row(3 * WIDTH + 1, WIDTH, **into)
        self.head = column(WIDTH, WORDS, bias=not tied, **options)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)  # (B, LENGTH, WIDTH)
        y = self.norms[0](x)
        q, k, v = [f(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value)]
        x = x + self.mixed(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        x = x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))
        return self.head(x)  # type: ignore[no-any-return]


def made(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(1)
    return make().to(dtype)


def data(part: int, step: int = 0) -> tuple[Tensor, Tensor]:
    words = torch.randint(WORDS, (3, LENGTH + 1), generator=torch.Generator().manual_seed(100 * part + step))
    return words[:, :-1], words[:, 1:]


def loss_of(model: Any, part: int, step: int = 0) -> Tensor:
    x, y = data(part, step)
    return cross_entropy(model(x).flatten(0, 1), y.flatten())


CASES: dict[str, tuple[Linear, Callable[[Communicator], nn.Module], tuple[int, ...]]] = {
    "column": (lambda: nn.Linear(3, 7), lambda coll: ColumnLinear(3, 7, coll), (2, 4, 3)),
    "column without bias": (
        lambda: nn.Linear(3, 4, bias=False),
        lambda coll: ColumnLinear(3, 4, coll, bias=False),
        (3,),
    ),
    "row": (lambda: nn.Linear(7, 3), lambda coll: RowLinear(7, 3, coll), (2, 4, 7)),
    "row without bias": (lambda: nn.Linear(5, 2, bias=False), lambda coll: RowLinear(5, 2, coll, bias=False), (5,)),
    "both": (
        lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)),
        lambda coll: nn.Sequential(
            ColumnLinear(4, 5, coll, gather_output=False), nn.Tanh(), RowLinear(5, 2, coll, split_input=True)
        ),
        (3, 4),
    ),
}


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.drawn(8)
async def test_n13_a_divided_layer_is_the_whole_one(coll: Communicator, case: str) -> None:
    plain, divided, shape = CASES[case]
    own = await coll.dup(thread=True)
    alone, mine = made(plain), made(lambda: divided(own))
    full = await full_state_dict(mine)
    assert full.keys() == alone.state_dict().keys()
    assert all(torch.equal(t, full[key]) for key, t in alone.state_dict().items())
    assert isinstance(mine if case != "both" else mine[0], nn.Linear)
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    theirs = x.detach().clone().requires_grad_()
    y = alone(theirs)
    (y * y.detach().cos()).sum().backward()

    def both() -> Tensor:
        y = mine(x)
        (y * y.detach().cos()).sum().backward()
        return y  # type: ignore[no-any-return]

    torch.testing.assert_close(await asyncio.to_thread(both), y)
    torch.testing.assert_close(x.grad, theirs.grad)
    gradients = {name: p.grad for name, p in alone.named_parameters()}
    for name, whole in split_state_dict(mine, gradients).items():
        torch.testing.assert_close(mine.get_parameter(name).grad, whole)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", [ColumnLinear, RowLinear])
async def test_n13_autocast_gives_the_dtype_that_it_gives_torchs_layer(coll: Communicator, kind: Any) -> None:
    own = await coll.dup(thread=True)
    mine = kind(4, 4, own)

    def cast() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return mine(torch.ones(2, 4))  # type: ignore[no-any-return]

    y = await asyncio.to_thread(cast)
    await asyncio.to_thread(y.sum().backward)
    assert y.dtype is torch.bfloat16
    assert mine.bias.grad.dtype is torch.float32


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("padding", [None, 0, -1])
@pytest.mark.drawn(4)
async def test_n13_a_divided_embedding_is_the_whole_one(coll: Communicator, padding: int | None) -> None:
    own = await coll.dup(thread=True)
    alone = made(lambda: nn.Embedding(7, 4, padding))
    mine = made(lambda: VocabEmbedding(7, 4, own, padding_idx=padding))
    ids = torch.tensor([[0, 6, 3], [3, 1, 6]])
    torch.testing.assert_close(await asyncio.to_thread(mine, ids), alone(ids))
    (alone(ids) * torch.arange(4)).sum().backward()
    await asyncio.to_thread(lambda: (mine(ids) * torch.arange(4)).sum().backward())
    torch.testing.assert_close(mine.weight.grad, split_state_dict(mine, {"weight": alone.weight.grad})["weight"])
    assert (await asyncio.to_thread(mine, torch.empty(0, 2, dtype=torch.int64))).shape == (0, 2, 4)
    for wrong in (-1, 7):
        with pytest.raises(IndexError, match="expected 0 to 6"):
            mine(torch.tensor([1, wrong]))


@pytest.mark.ranks(2)
async def test_n13_gradients_of_gradients_pass_divided_layers(coll: Communicator) -> None:
    own = await coll.dup(thread=True)
    alone = made(CASES["both"][0])
    mine = made(lambda: CASES["both"][1](own))

    def penalty(net: nn.Module) -> Tensor:
        x = torch.linspace(0, 1, 12, dtype=torch.float64).view(3, 4).requires_grad_()
        (g,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
        return g.square().sum()

    penalty(alone).backward()
    await asyncio.to_thread(lambda: penalty(mine).backward())
    gradients = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
    for name, whole in split_state_dict(mine, gradients).items():
        torch.testing.assert_close(mine.get_parameter(name).grad, whole)


async def train_on_a_grid(coll: Communicator, dtype: torch.dtype, within: float) -> None:
    """Train on 2 x 2 ranks: pairs share a model, and there are two of these."""
    grid = await coll.hierarchy(str(coll.rank // 2), form="cartesian")
    own = await grid[1].intra.dup(thread=True)
    module = made(lambda: Block(own), dtype)
    alone = made(Block, dtype)
    net = await DataParallel.create(module, grid[1].inter, bucket_bytes=2000, first_bucket_bytes=1)
    opt, theirs = (torch.optim.Adam(m.parameters(), lr=0.01) for m in (net, alone))
    for step in range(6):
        theirs.zero_grad()
        losses = [loss_of(alone, part, step) for part in range(2)]
        torch.stack(losses).mean().backward()
        theirs.step()
        loss = await net.step(lambda step=step: loss_of(net, coll.rank // 2, step), opt)
        torch.testing.assert_close(loss, losses[coll.rank // 2].detach(), rtol=within, atol=within)
    full = await full_state_dict(net.module)
    for key, whole in alone.state_dict().items():
        torch.testing.assert_close(full[key], whole, rtol=within, atol=within)
    await assert_synchronized([module.norms, module.down.bias], coll, rtol=0)  # what all have is the same, to the bit


@pytest.mark.drawn(1)
@pytest.mark.ranks(4)
@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
async def test_n13_a_grid_trains_a_transformer_block_as_one_process(
    coll: Communicator, dtype: torch.dtype, within: float
) -> None:
    await train_on_a_grid(coll, dtype, within)


@pytest.mark.drawn(2)
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("driver", [None, PipelinedOptimizer, ShardedOptimizer])
async def test_n13_ranks_that_share_a_model_clip_and_leave_out_steps_together(coll: Communicator, driver: Any) -> None:
    """The norm is that of the whole model, and an infinity in the block of one rank is one of all."""
    grid = await coll.hierarchy(str(coll.rank // 2), form="cartesian")
    own = await grid[1].intra.dup(thread=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    net = await DataParallel.create(made(lambda: Block(own)), grid[1].inter, clip_norm=0.1, scaler=scaler)
    alone = made(Block)
    make = partial(torch.optim.SGD, lr=0.5)
    opt: Any = make(net.parameters()) if driver is None else await driver.create(net, make)
    theirs = make(alone.parameters())

    def broken(step: int) -> Tensor:
        loss = loss_of(net, coll.rank // 2, step)
        return loss + (net.get_parameter("up.weight") * torch.inf).sum() if step == 2 and coll.rank == 1 else loss

    for step in range(4):
        await net.step(broken, opt, step)
        if step == 2:
            continue
        theirs.zero_grad()
        torch.stack([loss_of(alone, part, step) for part in range(coll.size // 2)]).mean().backward()
        assert nn.utils.clip_grad_norm_(alone.parameters(), 0.1) > 0.1
        theirs.step()
    if driver is not None:
        await opt.flush()
    assert scaler.get_scale() == 512
    full = await full_state_dict(net.module)
    for key, whole in alone.state_dict().items():
        torch.testing.assert_close(full[key], whole)


@pytest.mark.thorough
@pytest.mark.ranks(4, backend=("shm", "openmpi", "mpich", "gloo"))
async def test_n13_a_grid_of_processes(coll: Communicator) -> None:
    await train_on_a_grid(coll, torch.float64, 1e-10)


@pytest.mark.ranks(2)
async def test_n13_state_moves_to_other_numbers_of_ranks(coll: Communicator) -> None:
    own = await coll.dup(thread=True)
    torch.manual_seed(5)
    mine = Block(own, tied=True).double()
    with torch.no_grad():
        for p in mine.parameters():
            p.add_(0.01)
    full = await full_state_dict(mine)
    alone = Block(tied=True).double()
    alone.load_state_dict(full)
    x, _ = data(0)
    torch.testing.assert_close(await asyncio.to_thread(mine, x), alone(x))
    other = Block(own, tied=True).double()
    net = await DataParallel.create(other, await coll.split(coll.rank))
    net.load_state_dict(split_state_dict(net.module, alone.state_dict()))
    assert all(map(torch.equal, other.parameters(), mine.parameters()))
    assert other.head.weight is other.words.weight
    assert split_state_dict(other, {"extra": 1}) == {"extra": 1}


@pytest.mark.ranks(2)
async def test_n13_copies_share_the_communicator(coll: Communicator) -> None:
    own = await coll.dup(thread=True)
    layer = made(lambda: RowLinear(4, 3, own))
    twin = copy.deepcopy(layer)
    assert twin.coll is own
    x = torch.ones(4, dtype=torch.float64)
    assert torch.equal(await asyncio.to_thread(twin, x), await asyncio.to_thread(layer, x))
    with pytest.raises(TypeError, match=r"cannot be pickled.*state_dict"):
        pickle.dumps(layer)
    assert f"rank {coll.rank} of 2" in repr(layer)


@pytest.mark.ranks(2)
async def test_n13_layers_that_cannot_be_divided_and_threads_that_cannot_wait(coll: Communicator) -> None:
    own = await coll.dup(thread=True)
    for make in (
        lambda: ColumnLinear(3, 1, own),
        lambda: RowLinear(1, 3, own),
        lambda: VocabEmbedding(1, 3, own),
    ):
        with pytest.raises(ValueError, match=r"weight has shape \[.*\]: expected 2 or more along [01]"):
            make()
    with pytest.raises(RuntimeError, match="thread=True"):
        ColumnLinear(3, 4, coll)
    layer = RowLinear(4, 3, own)
    with pytest.raises(RuntimeError, match="would block the event loop"):
        layer(torch.ones(4))
    assert torch.equal(await own.allreduce(torch.ones(1)), torch.full((1,), 2.0))  # nothing was issued
