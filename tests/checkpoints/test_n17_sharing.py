"""N17: tensors in pieces or blocks of the ranks, loaded on another number of ranks."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import aiodist
from aiodist import Communicator
from aiodist.checkpoints import InPieces, Piece
from aiodist.checkpoints.parts import share
from aiodist.nn import (
    ColumnLinear,
    DataParallel,
    PipelinedOptimizer,
    RowLinear,
    ShardedOptimizer,
    VocabEmbedding,
    full_state_dict,
)
from aiodist.testing import run_ranks
from tests.checkpoints.conftest import assert_same


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@given(
    st.lists(st.tuples(st.sampled_from([0, 1, 7, 16_384, 16_385, 50_001]), st.sampled_from([1, 2, 4, 8, 16]))),
    st.integers(1, 9),
)
def test_n17_shares_are_even_and_have_each_element_once(tensors: list[tuple[int, int]], size: int) -> None:
    shares = [share(tensors, rank, size) for rank in range(size)]
    for number, (numel, _) in enumerate(tensors):
        mine = sorted((e.start, e.stop) for each in shares for e in each if e.tensor == number)
        assert mine
        assert [start for start, _ in mine] == [0, *(stop for _, stop in mine[:-1])]
        assert mine[-1][1] == numel
    nbytes = [sum((e.stop - e.start) * tensors[e.tensor][1] for e in each) for each in shares]
    assert max(nbytes) <= sum(nbytes) / size + (64 << 10) + 16


class Sharded:
    """A model of a sharded optimizer: each rank has a contiguous piece of each flat tensor."""

    SHAPES: ClassVar[dict[str, tuple[int, ...]]] = {"exp_avg": (7, 5), "tiny": (2,), "big/one": (30_011,), "scalar": ()}

    def __init__(self, rank: int, size: int, value: int) -> None:
        self.step = value
        self.loaded = False
        self.kept: dict[str, Piece] = {}
        for i, (name, shape) in enumerate(self.SHAPES.items()):
            start, stop = (prod(shape) * r // size for r in (rank, rank + 1))
            if start < stop:
                whole = self.whole(i, shape, value)
                self.kept[name] = Piece(whole[start:stop].clone(), start, shape)

    @staticmethod
    def whole(number: int, shape: tuple[int, ...], value: int) -> Tensor:
        return torch.arange(prod(shape)) * (number + 1) * value

    def pieces(self) -> dict[str, Any]:
        none = {name: Piece(torch.empty(0), 0, shape) for name, shape in self.SHAPES.items()}
        return {"step": self.step, "betas": (0.9, 0.99), "same": torch.arange(3), "kept": none | self.kept}

    def divided(self, state: dict[str, Any]) -> dict[str, Any]:
        kept = {}
        for name, piece in self.kept.items():
            if name not in state["kept"] or state["kept"][name].shape != piece.shape:
                raise ValueError(f"there is no {name} of shape {list(piece.shape)}")
            kept[name] = state["kept"][name].elements(piece.start, piece.start + piece.tensor.numel())
        return {**state, "same": state["same"].whole(), "kept": kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.loaded = state["betas"] == (0.9, 0.99) and state["same"].tolist() == [0, 1, 2]
        for name, piece in self.kept.items():
            piece.tensor.copy_(state["kept"][name])


def test_n17_pieces_go_to_another_number_of_ranks(path: Path, training: Any) -> None:
    async def save() -> None:
        async with aiodist.init() as coll:
            net = await DataParallel.create(training.module(), coll)
            opt = Sharded(coll.rank, coll.size, 3)
            assert isinstance(opt, InPieces)
            saving = aiodist.save(path, net, opt)
            await net.submit(opt.kept["big/one"].tensor.zero_)  # after the copy
            await saving

    async def load() -> None:
        async with aiodist.init() as coll:
            net = await DataParallel.create(training.module(), coll)
            opt = Sharded(coll.rank, coll.size, 50)
            await aiodist.load(path, net, opt)
            assert (opt.step, opt.loaded) == (3, True)
            expected = Sharded(coll.rank, coll.size, 3)
            assert opt.kept.keys() == expected.kept.keys()
            for name, piece in opt.kept.items():
                assert torch.equal(piece.tensor, expected.kept[name].tensor), name

    for ranks in (4, 3):
        run_ranks(ranks, save)
        for others in (1, 2, 3, 5):
            run_ranks(others, load)


@pytest.mark.ranks(2)
async def test_n17_pieces_that_do_not_fill_a_tensor_are_an_error_of_the_save(coll: Communicator, path: Path) -> None:
    path = Path(await coll.broadcast_object(str(path)))
    for wrong, said in (
        (Piece(torch.zeros(3), 0, (7,)), "a piece begins at element 0: expected 3"),
        (Piece(torch.zeros(3), 3 * coll.rank, (7,)), "pieces end at element 6 of 7"),
        (Piece(torch.zeros(3), 3 * coll.rank, (6 + coll.rank,)), r"rank 0 has F32 \[6\], rank 1 F32 \[7\]"),
    ):
        opt = Sharded(coll.rank, coll.size, 1)
        opt.kept["exp_avg"] = wrong
        with pytest.raises((ValueError, aiodist.RemoteError), match=said):
            await aiodist.save(path, opt, coll=coll)
    with pytest.raises(FileNotFoundError):
        await aiodist.load(path, Sharded(coll.rank, coll.size, 1), coll=coll)


@pytest.mark.ranks(2)
async def test_n17_pieces_of_something_else_are_not_loaded(coll: Communicator, path: Path) -> None:
    path = Path(await coll.broadcast_object(str(path)))
    opt = Sharded(coll.rank, coll.size, 1)
    await aiodist.save(path, opt, coll=coll)
    opt.kept["more"] = Piece(torch.zeros(1), coll.rank, (2,))
    with pytest.raises(ValueError, match=r"there is no more of shape \[2\]"):
        await aiodist.load(path, opt, coll=coll)
    opt.kept["more"] = opt.kept.pop("tiny")
    opt.kept["exp_avg"] = Piece(torch.zeros(1), coll.rank, (2,))
    with pytest.raises(ValueError, match=r"there is no exp_avg of shape \[2\]"):
        await aiodist.load(path, opt, coll=coll)


class Block(nn.Module):
    """An embedding, a column and a row layer that ranks share, or torch's own."""

    def __init__(self, sharing: Communicator | None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words: nn.Module = nn.Embedding(11, 5) if sharing is None else VocabEmbedding(11, 5, sharing)
        self.wide: nn.Module = nn.Linear(5, 7) if sharing is None else ColumnLinear(5, 7, sharing, gather_output=False)
        self.narrow: nn.Module = nn.Linear(7, 3) if sharing is None else RowLinear(7, 3, sharing, split_input=True)
        self.norm = nn.LayerNorm(3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.narrow(torch.tanh(self.wide(self.words(x)))))
        return out


async def shared_training(coll: Communicator, share: int) -> tuple[DataParallel, torch.optim.Optimizer]:
    grid = await coll.hierarchy(str(coll.rank // share))
    module = Block(await grid[1].intra.dup(thread=True) if share > 1 else None)
    net = await DataParallel.create(module, grid[1].inter if share > 1 else coll)
    return net, torch.optim.Adam(net.parameters(), lr=0.1)


async def steps(net: DataParallel, opt: torch.optim.Optimizer, count: int) -> list[float]:
    x = torch.arange(10).view(2, 5)
    return [float(await net.step(lambda: net(x).square().mean(0).sum(), opt)) for _ in range(count)]


@pytest.mark.thorough
@pytest.mark.parametrize(("ranks", "share"), [(4, 2), (3, 3), (2, 2), (1, 1)])
def test_n17_layers_divided_among_ranks_go_to_another_division(path: Path, ranks: int, share: int) -> None:
    expected: dict[str, Any] = {}

    async def save() -> None:
        async with aiodist.init() as coll:
            net, opt = await shared_training(coll, share)
            await steps(net, opt, 2)
            await aiodist.save(path, net, opt, coll=coll)
            expected["state"] = {name: t.clone() for name, t in (await full_state_dict(net.module)).items()}
            expected["losses"] = await steps(net, opt, 3)

    async def load(others: int) -> None:
        async with aiodist.init() as coll:
            net, opt = await shared_training(coll, others)
            await steps(net, opt, 1)
            await aiodist.load(path, net, opt, coll=coll)
            assert_same(await full_state_dict(net.module), expected["state"])
            assert await steps(net, opt, 3) == pytest.approx(expected["losses"], rel=1e-9)

    run_ranks(ranks, save)
    for ranks_now, share_now in ((1, 1), (2, 1), (2, 2), (4, 2), (3, 3), (6, 3)):
        run_ranks(ranks_now, lambda share_now=share_now: load(share_now))


@pytest.mark.ranks(4)
async def test_n17_divided_layers_are_saved_by_all_ranks_that_share_them(coll: Communicator, path: Path) -> None:
    net, opt = await shared_training(coll, 2)
    with pytest.raises(ValueError, match=r"coll has 2 ranks: expected the 2 x 2"):
        aiodist.save(path, net, opt)
    with pytest.raises(TypeError, match="expected a DataParallel"):
        aiodist.save(path, net.module, coll=coll)
    for kind in (ShardedOptimizer, PipelinedOptimizer):
        driver: Any = await kind.create(net, lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))
        with pytest.raises(TypeError, match=f"{kind.__name__} of a net with divided layers: expected an Optimizer of"):
            aiodist.save(path, net, driver, coll=coll)
        with pytest.raises(TypeError, match=rf"{kind.__name__} of a net with divided layers: .* `per_rank=\[opt\]`"):
            aiodist.load(path, net, driver, coll=coll)
        driver.close()


@pytest.mark.drawn(1)
@pytest.mark.ranks(4)
@pytest.mark.parametrize("kind", [ShardedOptimizer, PipelinedOptimizer])
async def test_n17_other_optimizers_of_divided_layers_are_each_ranks_own(
    coll: Communicator, path: Path, kind: Any
) -> None:
    path = Path(await coll.broadcast_object(str(path)))
    losses: list[list[float]] = []
    for _ in range(2):
        net, _ = await shared_training(coll, 2)
        opt = await kind.create(net, lambda params: torch.optim.Adam(params, lr=0.1))
        if not losses:
            await steps(net, opt, 2)
            await opt.flush()
            await aiodist.save(path, net, coll=coll, per_rank=[opt])
        else:
            await aiodist.load(path, net, coll=coll, per_rank=[opt])
        losses.append(await steps(net, opt, 3))
        await opt.flush()
        await net.aclose()
    assert losses[0] == losses[1]
