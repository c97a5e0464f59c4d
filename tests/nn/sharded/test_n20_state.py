"""N20: the state of a sharded optimizer, as it is and in pieces for another number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aiodist
from aiodist import Communicator
from aiodist.checkpoints import InPieces, Piece
from aiodist.nn import DataParallel, ShardedOptimizer
from aiodist.testing import run_ranks
from tests.nn.conftest import Trial

SIZES: Sequence[dict[str, Any]] = (Trial.SMALL, {"bucket_bytes": 600}, {})


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
    """One layer is used only if `whole` is set; one has the memory format channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = Trial.Mlp()
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


def together(each: Sequence[Any]) -> Any:
    """Return the state that all ranks have saved, whole."""
    first = each[0]
    if isinstance(first, dict):
        assert all(state.keys() == first.keys() for state in each)
        return {key: together([state[key] for state in each]) for key in first}
    if not isinstance(first, Piece):
        assert all(state == first for state in each)
        return deepcopy(first)
    assert len({(piece.shape, piece.dims, piece.number, piece.tensor.dtype) for piece in each}) == 1
    numel = torch.Size(first.shape).numel()
    whole, count = torch.zeros(numel, dtype=first.tensor.dtype), torch.zeros(numel, dtype=torch.int)
    for piece in each:
        assert piece.tensor.dim() == 1
        place = slice(piece.start, piece.start + piece.tensor.numel())
        whole[place] = piece.tensor
        count[place] += 1
    assert bool((count == 1).all())
    whole = whole.view(first.shape)
    return whole.item() if first.number else whole if first.dims is None else whole.permute(first.dims)


async def train(net: DataParallel, opt: ShardedOptimizer, steps: range) -> None:
    """All ranks train on the batch of four, so that the result does not depend on their number."""
    for step in steps:
        await net.step(Trial.joined, opt, net, 4, step)
    await opt.flush()


class Alike:
    """Equal to a state of the same types, dtypes and shapes, with the same values up to rounding, or `exact` ones."""

    def __init__(self, expected: Any, *, exact: bool = False) -> None:
        self.expected = expected
        self.exact = exact

    def __eq__(self, seen: object) -> bool:
        if isinstance(seen, dict) and isinstance(self.expected, dict):
            return seen.keys() == self.expected.keys() and all(
                seen[key] == Alike(value, exact=self.exact) for key, value in self.expected.items()
            )
        if isinstance(seen, list) and isinstance(self.expected, list):
            return dict(enumerate(seen)) == Alike(dict(enumerate(self.expected)), exact=self.exact)
        if isinstance(seen, Tensor):
            expected, same = self.expected, torch.equal if self.exact else torch.allclose
            return (seen.dtype, seen.shape) == (expected.dtype, expected.shape) and same(seen, expected)
        return type(seen) is type(self.expected) and seen == self.expected

    def __repr__(self) -> str:
        return repr(self.expected)


def plainly(how: str, steps: int, whole_from: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    module = Part()
    opt = MAKERS[how](groups_of(module))
    opt.param_groups[1]["lr"] = 0.03
    for step in range(steps):
        module.whole = step >= whole_from
        Trial.step_alone(module, opt, 4, step)
    return module, opt


@pytest.mark.thorough
@pytest.mark.parametrize("how", MAKERS)
def test_n20_from_4_ranks_to_others(how: str) -> None:
    """Three steps on 4 ranks, then two on others, with other buckets: the state is that which was saved, bit by bit."""

    async def save() -> tuple[Any, Mapping[str, Any]]:
        async with aiodist.init() as coll:
            net = await DataParallel.create(Part(), coll, **SIZES[1])
            opt = await ShardedOptimizer.create(net, MAKERS[how], groups_of(net.module))
            opt.param_groups[1]["lr"] = 0.03
            await train(net, opt, range(3))
            return deepcopy(opt.pieces()), deepcopy(net.state_dict())

    def load(sizes: dict[str, Any]) -> Callable[[], Any]:
        async def program() -> Any:
            async with aiodist.init() as coll:
                net = await DataParallel.create(Part(), coll, **sizes)
                opt = await ShardedOptimizer.create(net, MAKERS[how], groups_of(net.module))
                net.load_state_dict(made[0][1])
                opt.load_state_dict(opt.divided(saved))
                again = deepcopy(opt.pieces())
                net.module.whole = True  # type: ignore[assignment]
                await train(net, opt, range(3, 5))
                return again, net.module

        return program

    made = run_ranks(4, save)
    saved = together([pieces for pieces, _ in made])
    _, plain = plainly(how, 3, 3)
    assert {k: v for k, v in saved.items() if k != "names"} == Alike(plain.state_dict())
    expected, _ = plainly(how, 5, 3)
    for number, ranks in enumerate((1, 2, 3, 5)):
        loaded = run_ranks(ranks, load(SIZES[number % 3]))
        assert together([pieces for pieces, _ in loaded]) == Alike(saved, exact=True)
        for _, module in loaded:
            Trial.assert_same(module, expected)


@pytest.mark.ranks(2)
async def test_n20_shapes_of_pieces(coll: Communicator) -> None:
    net = await DataParallel.create(Part(), coll)
    opt = await ShardedOptimizer.create(net, torch.optim.Adam)
    assert isinstance(opt, InPieces)
    assert opt.pieces()["state"] == {}
    await train(net, opt, range(1))
    pieces = opt.pieces()
    names = [name for name, _ in net.named_parameters()]
    assert pieces["names"] == [names]
    for number, state in pieces["state"].items():
        assert (state["step"].shape, state["step"].start, state["step"].dims) == ((), 0, None)
        parameter = net.get_parameter(names[number])
        over = names[number] == "conv.weight"
        for key in ("exp_avg", "exp_avg_sq"):
            assert state[key].shape == ((1, 3, 3, 2) if over else tuple(parameter.shape))
            assert state[key].dims == ((1, 3, 2, 0) if over else None)
    [group] = pieces["param_groups"]
    assert group["params"] == list(range(len(names)))
    assert group["lr"] == 1e-3
    assert len(pieces["state"]) == len(names) - 2  # one layer is not used yet


@pytest.mark.ranks(1, 3)
async def test_n20_state_of_the_own_shard(coll: Communicator) -> None:
    async def some(sizes: dict[str, Any]) -> tuple[DataParallel, ShardedOptimizer]:
        net = await DataParallel.create(Trial.Mlp(), coll, **sizes)
        return net, await ShardedOptimizer.create(net, Trial.OPTIMIZERS["adam"])

    net, opt = await some(SIZES[0])
    await train(net, opt, range(3))
    state, weights = deepcopy(opt.state_dict()), deepcopy(net.state_dict())
    after, new = await some(SIZES[0])
    after.load_state_dict(weights)
    new.load_state_dict(state)
    await train(after, new, range(3, 5))
    await train(net, opt, range(3, 5))
    for ours, theirs in zip(after.parameters(), net.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert new.pieces()["param_groups"] == opt.pieces()["param_groups"]
    if coll.size > 1:
        _, other = await some(SIZES[2])
        with pytest.raises(ValueError, match=r"another shard .*see pieces\(\)"):
            other.load_state_dict(state)


class Rows(torch.optim.SGD):
    """An optimizer whose state has a tensor that is neither a number nor of its parameter's length."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["rows"] = torch.zeros(2)
        return super().step(closure)


@pytest.mark.ranks(2)
async def test_n20_what_cannot_be_saved_or_loaded(coll: Communicator) -> None:
    net = await DataParallel.create(Trial.Mlp(), coll)
    opt = await ShardedOptimizer.create(net, Rows)
    with pytest.raises(TypeError, match=r"Rows keeps rows, a tensor of shape \[2\]"):
        opt.pieces()
    opt.close()
    opt = await ShardedOptimizer.create(net, Trial.OPTIMIZERS["adam"])
    state = opt.pieces()
    two = [{**state["param_groups"][0], "params": [0]}, state["param_groups"][0]]
    with pytest.raises(ValueError, match=r"groups of \[1, 6\] parameters, and the optimizer of \[6\]"):
        opt.divided({**state, "param_groups": two})
    with pytest.raises(ValueError, match="the same parameters in the same groups"):
        opt.divided({**state, "names": [state["names"][0][::-1]]})
    with pytest.raises(ValueError, match="not that of an optimizer"):
        opt.divided(net.state_dict())
    with pytest.raises(ValueError, match=r"exp_avg of '.*' has shape \[2, 2\]: expected that of the parameter"):
        opt.divided({**state, "state": {number: {"exp_avg": torch.zeros(2, 2)} for number in range(6)}})
    opt.load_state_dict(opt.divided(state))
