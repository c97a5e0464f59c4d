"""N20: the state of a sharded optimizer, as it is and in pieces for another number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import aiodist
from aiodist import Communicator
from aiodist.checkpoints import InPieces, Piece
from aiodist.nn import DataParallel, ShardedOptimizer
from aiodist.testing import run_ranks

if TYPE_CHECKING:
    from tests.nn.conftest import Trial

SIZES: Sequence[dict[str, Any]] = ({"bucket_bytes": 1, "first_bucket_bytes": 1}, {"bucket_bytes": 600}, {})


class Counts(torch.optim.Optimizer):
    """Signs of a mean of gradients; it counts steps in a plain number."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state.update(steps=0, mean=torch.zeros_like(p))
                    state["steps"] += 1
                    state["mean"].lerp_(p.grad, 1 / state["steps"])
                    p.sub_(state["mean"].sign(), alpha=group["lr"])


MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.02, amsgrad=True),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, dampening=0.3),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.05, initial_accumulator_value=0.1),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=0.02),
    "rprop": lambda groups: torch.optim.Rprop(groups, lr=0.02),
    "counts": Counts,
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.05),
}


class Part(nn.Module):
    """One layer is used only when it is told to; one lies in memory in another order."""

    def __init__(self, trial: type[Trial]) -> None:
        super().__init__()
        self.layers = trial.Mlp()
        self.conv = nn.Conv2d(2, 3, (3, 1), bias=False).to(memory_format=torch.channels_last).double()  # type: ignore[call-overload]
        self.rest = nn.Linear(3, 3).double()
        self.whole = False

    def forward(self, x: Tensor) -> Tensor:
        out = self.layers(x) + self.conv(x.view(-1, 2, 3, 1)).sum((2, 3))
        return self.rest(out) if self.whole else out  # type: ignore[no-any-return]


def groups_of(module: nn.Module) -> list[dict[str, Any]]:
    named = dict(module.named_parameters())
    return [
        {"params": [p for name, p in named.items() if "weight" in name]},
        {"params": [p for name, p in named.items() if "bias" in name], "lr": 0.01},
    ]


class Saved:
    """What all ranks have saved, put together: tensors by name, and the rest."""

    def __init__(self, by_rank: Sequence[tuple[dict[str, Piece], dict[str, Any]]]) -> None:
        self.tensors: dict[str, Tensor] = {}
        filled: dict[str, Tensor] = {}
        for pieces, rest in by_rank:
            assert rest == by_rank[0][1]
            for name, piece in pieces.items():
                numel = torch.Size(piece.shape).numel()
                whole = self.tensors.setdefault(name, torch.full((numel,), torch.nan).to(piece.tensor.dtype))
                count = filled.setdefault(name, torch.zeros(numel, dtype=torch.int))
                place = slice(piece.start, piece.start + piece.tensor.numel())
                assert piece.tensor.dim() == 1
                whole[place] = piece.tensor
                count[place] += 1
        assert all(bool((count == 1).all()) for count in filled.values())
        self.rest = deepcopy(by_rank[0][1])

    def load(self, opt: InPieces) -> None:
        for name, piece in opt.wanted().items():
            piece.tensor.copy_(self.tensors[name][piece.start : piece.start + piece.tensor.numel()])
        opt.load_rest(self.rest)


async def train(net: DataParallel, opt: ShardedOptimizer, trial: type[Trial], steps: range) -> None:
    """All ranks train on the batch of four, so that the result does not depend on their number."""
    for step in steps:
        await net.step(trial.joined, opt, net, 4, step)
    await opt.flush()


def plainly(trial: type[Trial], how: str, steps: int, whole_from: int) -> nn.Module:
    module = Part(trial)
    opt = MAKERS[how](groups_of(module))
    opt.param_groups[1]["lr"] = 0.03
    for step in range(steps):
        module.whole = step >= whole_from
        opt.zero_grad()
        trial.joined(module, 4, step).backward()
        opt.step()
    return module


@pytest.mark.parametrize("how", MAKERS)
def test_n20_from_4_ranks_to_others(trial: type[Trial], how: str) -> None:
    """Three steps on 4 ranks, then two on others, with other buckets: the state is that which was saved, bit by bit."""

    async def save() -> tuple[Any, Mapping[str, Any]]:
        async with aiodist.init() as coll:
            net = await DataParallel.create(Part(trial), coll, **SIZES[1])
            opt = ShardedOptimizer(net, MAKERS[how], groups_of(net.module))
            opt.param_groups[1]["lr"] = 0.03
            await train(net, opt, trial, range(3))
            return deepcopy(opt.pieces()), deepcopy(net.state_dict())

    def load(sizes: dict[str, Any]) -> Callable[[], Any]:
        async def program() -> Any:
            async with aiodist.init() as coll:
                net = await DataParallel.create(Part(trial), coll, **sizes)
                opt = ShardedOptimizer(net, MAKERS[how], groups_of(net.module))
                net.load_state_dict(made[0][1])
                saved.load(opt)
                again = deepcopy(opt.pieces())
                net.module.whole = True  # type: ignore[assignment]
                await train(net, opt, trial, range(3, 5))
                return again, net.module

        return program

    made = run_ranks(4, save)
    saved = Saved([pieces for pieces, _ in made])
    assert how == "sgd" or any(name.startswith("layers.0.weight.") for name in saved.tensors)
    expected = plainly(trial, how, 5, 3)
    for number, ranks in enumerate((1, 2, 3, 5)):
        loaded = run_ranks(ranks, load(SIZES[number % 3]))
        again = Saved([pieces for pieces, _ in loaded])
        assert again.rest == saved.rest
        assert again.tensors.keys() == saved.tensors.keys()
        for name, tensor in saved.tensors.items():
            assert torch.equal(again.tensors[name], tensor) or name.startswith("rest."), name
        for _, module in loaded:
            trial.assert_same(module, expected)


@pytest.mark.ranks(2)
async def test_n20_names_and_shapes_of_pieces(coll: Communicator, trial: type[Trial]) -> None:
    net = await DataParallel.create(Part(trial), coll)
    opt = ShardedOptimizer(net, torch.optim.Adam)
    assert isinstance(opt, InPieces)
    everyone: list[dict[str, Any]] = await coll.allgather_object(opt.wanted())
    shapes = {name: piece.shape for pieces in everyone for name, piece in pieces.items()}
    for name, parameter in net.named_parameters():
        assert shapes[f"{name}.step"] == ()
        shape = (3, 3, 2) if name == "conv.weight" else tuple(parameter.shape)
        assert shapes[f"{name}.exp_avg"] == shapes[f"{name}.exp_avg_sq"] == shape
    pieces, rest = opt.pieces()
    assert rest["stepped"] == []
    [group] = rest["param_groups"]
    assert group["params"] == [name for name, _ in net.named_parameters()]
    assert group["lr"] == 1e-3
    assert not [name for name, piece in pieces.items() if piece.shape == () and piece.start]


@pytest.mark.ranks(1, 3)
async def test_n20_state_of_the_own_shard(coll: Communicator, trial: type[Trial]) -> None:
    async def some(sizes: dict[str, Any]) -> tuple[DataParallel, ShardedOptimizer]:
        net = await DataParallel.create(trial.Mlp(), coll, **sizes)
        return net, ShardedOptimizer(net, trial.OPTIMIZERS["adam"])

    net, opt = await some(SIZES[0])
    await train(net, opt, trial, range(3))
    state, weights = deepcopy(opt.state_dict()), deepcopy(net.state_dict())
    after, new = await some(SIZES[0])
    after.load_state_dict(weights)
    new.load_state_dict(state)
    await train(after, new, trial, range(3, 5))
    await train(net, opt, trial, range(3, 5))
    for ours, theirs in zip(after.parameters(), net.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert new.pieces()[1] == opt.pieces()[1]
    if coll.size > 1:
        _, other = await some(SIZES[2])
        with pytest.raises(ValueError, match=r"another shard .*see pieces\(\)"):
            other.load_state_dict(state)


class Rows(torch.optim.SGD):
    """It keeps something that is neither as long as its tensor nor a number."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["rows"] = torch.zeros(2)
        return super().step(closure)


@pytest.mark.ranks(2)
async def test_n20_what_cannot_be_saved_or_loaded(coll: Communicator, trial: type[Trial]) -> None:
    net = await DataParallel.create(trial.Mlp(), coll)
    opt = ShardedOptimizer(net, Rows)
    with pytest.raises(TypeError, match=r"Rows keeps rows, a tensor of shape \[2\]"):
        opt.pieces()
    opt.close()
    opt = ShardedOptimizer(net, trial.OPTIMIZERS["adam"])
    _, rest = opt.pieces()
    with pytest.raises(RuntimeError, match=r"call wanted\(\) first"):
        opt.load_rest(rest)
    opt.wanted()
    two = [{**rest["param_groups"][0], "params": ["0.weight"]}, rest["param_groups"][0]]
    with pytest.raises(ValueError, match=r"groups of \[1, 6\] parameters, and the optimizer of \[6\]"):
        opt.load_rest({**rest, "param_groups": two})
    opt.load_rest(rest)
