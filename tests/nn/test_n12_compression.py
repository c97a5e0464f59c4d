"""N12: gradients that travel as codes: as by hand, with residuals that outlive failures, and their state."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aiodist import Communicator
from aiodist.codecs import (
    QSGD,
    SVD,
    BFloat16,
    Codec,
    GradientCodec,
    Gradients,
    Half,
    Int8,
    PowerSGD,
    RandomK,
    Sign,
    TernGrad,
    TopK,
)
from aiodist.errors import AiodistError, MismatchError, RemoteError
from aiodist.nn import Compression, DataParallel, PipelinedOptimizer, assert_synchronized
from tests.nn.conftest import Trial
from tests.support.exchanges import exchanged


def reference(
    codec: GradientCodec, make: Callable[[], nn.Module], loss: Any, ranks: int, steps: int, feedback: bool = True
) -> nn.Module:
    """Train in this process, with a bucket for each parameter."""
    module: nn.Module = make()
    opt = torch.optim.SGD(module.parameters(), lr=0.1)
    residuals = [{name: torch.zeros(p.numel()).double() for name, p in module.named_parameters()} for _ in range(ranks)]
    kept: list[dict[str, Tensor]] = [{} for _ in range(ranks)]
    for step in range(steps):
        grads = []
        for rank in range(ranks):
            opt.zero_grad()
            loss(module, rank, step).backward()
            grads.append({name: torch.as_tensor(p.grad).clone() for name, p in module.named_parameters()})
        for name, p in module.named_parameters():
            every_one = [
                Gradients(
                    mine[name].reshape(-1) + (left[name] if feedback else 0),
                    torch.empty(p.numel()).double(),
                    [tuple(p.shape)],
                    [name],
                    ranks,
                    1 / ranks,
                    feedback=feedback,
                )
                for mine, left in zip(grads, residuals, strict=True)
            ]
            p.grad = exchanged(codec, every_one, kept)[0][0].view_as(p).clone()
            for left, each in zip(residuals, every_one, strict=True):
                left[name] = each.total
        opt.step()
    return module


@pytest.mark.drawn(2)
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("sizes", [Trial.SMALL], ids=["small"])
@pytest.mark.parametrize(
    "codec",
    [
        TopK(0.2),
        Int8(),
        Sign(),
        Sign(vote=True),
        BFloat16(),
        Half(),
        SVD(2),
        Compression(TopK(0.2), error_feedback=False),
    ],
    ids=str,
)
async def test_n12_training_is_what_it_is_by_hand(
    coll: Communicator, codec: GradientCodec | Compression, sizes: dict[str, Any]
) -> None:
    net, opt = await Trial.made(coll, compress=codec, **sizes)
    await Trial.train(net, opt, range(5), coll.rank)
    own, feedback = (codec.codec, False) if isinstance(codec, Compression) else (codec, True)
    assert isinstance(own, GradientCodec)
    Trial.assert_same(net, reference(own, Trial.Mlp, Trial.loss, coll.size, 5, feedback))


@pytest.mark.ranks(2)
async def test_n12_statistics_count_bytes_before_and_after(coll: Communicator) -> None:
    plain = 4 * (64 * 64 + 64)
    for codec, after in [
        (None, plain),
        (BFloat16(), plain // 2),
        (Int8(), 16 + 4 + plain // 4),
        (Sign(), 16 + 4 + plain // 32),
        (PowerSGD(2), 4 * (2 * (64 + 64) + 64)),
        (TopK(0.01), 16 + 8 * 42),
        (RandomK(0.01), 4 * 42),
    ]:
        net = await DataParallel.create(nn.Linear(64, 64), coll, compress=codec)
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            await net.step(square, opt, net)
        seen = net.statistics()
        assert (seen.nbytes, seen.sent_nbytes) == (3 * plain, 3 * after), codec
        await net.aclose()


def square(net: DataParallel) -> Tensor:
    loss: Tensor = net(torch.ones(2, 64)).square().mean()
    return loss


def flat_state(net: DataParallel) -> dict[str, Tensor]:
    assert net.compressor is not None
    state = net.compressor.state_dict()
    return {f"{key}.{name}": t for key in ("residuals", "kept") for name, t in state[key].items()}


@pytest.mark.thorough
@pytest.mark.ranks(2)
async def test_n12_what_is_kept_makes_a_checkpoint(coll: Communicator) -> None:
    for codec in (PowerSGD(1), TopK(0.1), RandomK(0.3), QSGD(4), TernGrad(), Sign(vote=True), BFloat16()):
        net, opt = await Trial.made(coll, compress=codec, **Trial.FEW)
        await Trial.train(net, opt, range(3), coll.rank)
        Trial.Mlp().load_state_dict(net.state_dict())  # the module's own, and nothing else
        assert net.compressor is not None
        weights, state = copy.deepcopy(net.state_dict()), net.compressor.state_dict()
        await Trial.train(net, opt, range(3, 6), coll.rank)
        expected = copy.deepcopy(net.module)
        await net.aclose()
        again = Trial.Mlp()
        again.load_state_dict(weights)
        net = await DataParallel.create(again, coll, compress=codec, **Trial.FEW)
        assert net.compressor is not None
        net.compressor.load_state_dict(state)
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        await Trial.train(net, opt, range(3, 6), coll.rank)
        Trial.assert_same(net, expected)
        await net.aclose()
    assert (await DataParallel.create(Trial.Mlp(), coll)).compressor is None


@pytest.mark.ranks(2)
async def test_n12_a_checkpoint_of_another_net_is_refused(coll: Communicator) -> None:
    net = await DataParallel.create(nn.Linear(3, 2), coll, compress=TopK(0.5))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    await net.step(lambda: net(torch.ones(1, 3)).sum(), opt)
    assert net.compressor is not None
    before = net.compressor.state_dict()
    for residuals, text in [
        ({"w": torch.ones(6)}, "residual of 'w': expected those of weight, bias"),
        ({"weight": torch.ones(7)}, r"'weight' is float32 of shape \(7,\): expected float32 of shape \(6,\)"),
        ({"bias": torch.ones(2).double()}, r"'bias' is float64 of shape \(2,\): expected float32"),
    ]:
        with pytest.raises(ValueError, match=text):
            net.compressor.load_state_dict({**before, "residuals": residuals})
    with pytest.raises(KeyError, match="kept"):
        net.compressor.load_state_dict({"number": 1, "residuals": {}})
    after = net.compressor.state_dict()
    assert all(torch.equal(after["residuals"][name], t) for name, t in before["residuals"].items())


@pytest.mark.drawn(2)
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("codec", [TopK(0.2), Sign(vote=True), PowerSGD(1), RandomK(0.3), BFloat16()], ids=str)
async def test_n12_a_step_that_fails_changes_no_residual(coll: Communicator, codec: Codec) -> None:
    net, opt = await Trial.made(coll, compress=codec, **Trial.FEW)
    await Trial.train(net, opt, range(3), coll.rank)
    assert net.compressor is not None
    before = net.compressor.state_dict()["residuals"]
    assert len(before) == 6

    def fail() -> Tensor:
        raise KeyError("no data")

    with pytest.raises(KeyError if coll.rank == 1 else RemoteError):
        await net.step(fail if coll.rank == 1 else lambda: Trial.loss(net, coll.rank, 3), opt)
    after = net.compressor.state_dict()["residuals"]
    assert all(torch.equal(after[name], before[name]) for name in before)
    await net.step(Trial.loss, opt, net, coll.rank, 4)
    await assert_synchronized(net.module, coll)


@pytest.mark.ranks(2)
async def test_n12_one_bad_gradient_is_sent_and_forgotten(coll: Communicator) -> None:
    biased = TopK(0.1), Int8(), PowerSGD(1), BFloat16(), Half(), SVD(1), Sign(), Sign(vote=True), RandomK(0.1)
    for codec in (*biased, QSGD(4), TernGrad(), RandomK(0.1, scaled=True)):
        net = await DataParallel.create(nn.Linear(30, 20), coll, compress=codec)
        opt = torch.optim.SGD(net.parameters(), lr=0.0)
        x = torch.ones(2, 30)
        x[0, 0] = torch.nan if coll.rank == 1 else 1.0
        await net.backward(net(x).sum())
        assert any(not bool(p.grad.isfinite().all()) for p in net.parameters() if p.grad is not None), codec
        for _ in range(2):
            opt.zero_grad()
            await net.backward(net(torch.ones(2, 30)).sum())
        assert all(bool(p.grad.isfinite().all()) for p in net.parameters() if p.grad is not None), codec
        assert all(bool(t.isfinite().all()) for t in flat_state(net).values()), codec
        await net.aclose()


class Two(nn.Module):
    """Two layers of two dtypes; a forward uses one or both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(4, 3)
        self.b = nn.Linear(4, 3).to(torch.bfloat16)

    def forward(self, x: Tensor, which: str) -> Tensor:
        total = torch.zeros(())
        if "a" in which:
            total = total + self.a(x).square().mean()
        if "b" in which:
            total = total + self.b(x.to(torch.bfloat16)).float().square().mean()
        return total


@pytest.mark.drawn(4)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("codec", [TopK(0.2), Sign(), PowerSGD(1), Int8(), Half()], ids=str)
async def test_n12_what_a_rank_does_not_use_keeps_its_residual(coll: Communicator, codec: Codec) -> None:
    two = Two()
    net = await DataParallel.create(two, coll, compress=codec)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    draw = torch.Generator().manual_seed(coll.rank)
    for _ in range(3):
        await net.step(lambda: net(torch.randn(5, 4, generator=draw), "ab"), opt)
    before = flat_state(net)
    opt.zero_grad()
    await net.backward(net(torch.randn(5, 4, generator=draw), "a"))
    assert two.b.weight.grad is None
    after = flat_state(net)
    assert all(torch.equal(after[name], before[name]) for name in before if name.startswith("residuals.b"))
    assert before["residuals.b.weight"].dtype is torch.float32
    opt.zero_grad()
    await net.backward(net(torch.randn(5, 4, generator=draw), "ab" if coll.rank else "a"))
    assert two.b.weight.grad is not None
    assert two.b.weight.grad.dtype is torch.bfloat16
    await net.step(lambda: net(torch.randn(5, 4, generator=draw), "ab"), opt)
    await assert_synchronized(net.module, coll)


@pytest.mark.drawn(1)
@pytest.mark.ranks(2, 3)
async def test_n12_uneven_data_and_gradients_that_add_up(coll: Communicator) -> None:
    net, opt = await Trial.made(coll, compress=TopK(1.0), **Trial.FEW)
    with net.no_sync():
        await net.backward(Trial.loss(net, coll.rank, 0))
    await net.backward(Trial.loss(net, coll.rank, 1))
    await net.submit(opt.step)
    Trial.assert_same(net, Trial.alone(coll.size, 2, every=2))
    await net.aclose()
    for codec in (TopK(0.2), PowerSGD(1), Sign()):
        net, opt = await Trial.made(coll, compress=codec, **Trial.FEW)
        async with net.join(opt):
            await Trial.train(net, opt, range(2 + 2 * coll.rank), coll.rank)
        await assert_synchronized(net.module, coll)
        await net.aclose()


@pytest.mark.ranks(2)
async def test_n12_with_the_pipelined_optimizer_and_frozen_layers(coll: Communicator) -> None:
    net = await DataParallel.create(Trial.Mlp(), coll, compress=TopK(1.0), **Trial.SMALL)
    opt = await PipelinedOptimizer.create(net, lambda params: torch.optim.SGD(params, lr=0.1))
    await Trial.train(net, opt, range(4), coll.rank)
    await opt.flush()
    Trial.assert_same(net, Trial.alone(coll.size, 4))
    await net.aclose()
    net = await DataParallel.create(Trial.Mlp(), coll, compress=PowerSGD(1), **Trial.FEW)
    opt2 = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(6):
        next(net.module.children()).requires_grad_(step % 2 == 0)
        await net.step(Trial.loss, opt2, net, coll.rank, step)
    await assert_synchronized(net.module, coll)


@pytest.mark.ranks(2)
async def test_n12_embeddings_by_rows_go_as_they_are(coll: Communicator) -> None:
    torch.manual_seed(0)
    embedding = nn.Embedding(9, 4, sparse=True)
    net = await DataParallel.create(nn.Sequential(embedding, nn.Linear(4, 2)), coll, compress=TopK(1.0))
    await net.backward(net(torch.tensor([coll.rank, 5])).sum())
    grad = embedding.weight.grad
    assert grad is not None
    assert grad.is_sparse
    assert grad.to_dense().abs().sum(1).count_nonzero() == 3
    seen = net.statistics()
    assert seen.sent_nbytes == 2 * 8 + 2 * 16 + 16 + 10 * 8


@pytest.mark.drawn(1)
@pytest.mark.ranks(4, 5)
@pytest.mark.parametrize("codec", [PowerSGD(1), TopK(0.3), SVD(1), Sign()], ids=str)
async def test_n12_hosts_add_up_in_full_and_exchange_codes(coll: Communicator, codec: GradientCodec) -> None:
    """Ranks 0 and 1 are a host, and so are the others: as two ranks that have the sums of their gradients."""
    hierarchy = await coll.hierarchy("a" if coll.rank < 2 else "b")
    spanned = await hierarchy.span(0, 1)

    def host(module: Any, number: int, step: int) -> Tensor:
        ranks = range(2) if number == 0 else range(2, coll.size)
        return torch.stack([Trial.loss(module, rank, step) for rank in ranks]).sum() * 2 / coll.size

    net = await DataParallel.create(Trial.Mlp(), spanned, compress=codec, **Trial.SMALL)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    await Trial.train(net, opt, range(4), coll.rank)
    Trial.assert_same(net, reference(codec, Trial.Mlp, host, 2, 4))
    leads = coll.rank in (0, 2)
    assert (net.statistics().sent_nbytes > 0) == leads
    assert bool(flat_state(net)) == leads
    flat = await DataParallel.create(
        Trial.Mlp(), spanned, compress=Compression(codec, within_hosts=True), bucket_bytes=1
    )
    opt = torch.optim.SGD(flat.parameters(), lr=0.1)
    await flat.step(Trial.loss, opt, flat, coll.rank, 0)
    assert flat.statistics().sent_nbytes > 0


@dataclass(frozen=True)
class Fragile:
    """A codec that fails on one rank, in encode or in decode."""

    where: str
    broken: tuple[bool, ...] = ()

    def __repr__(self) -> str:
        return "Fragile"

    def encode(self, t: Tensor) -> Tensor:
        if self.where == "encode" and self.broken:
            raise ArithmeticError("no code")
        return t.clone().view(torch.uint8)

    def decode(self, code: Tensor, dtype: torch.dtype, numel: int) -> Tensor:
        if self.where == "decode" and self.broken:
            raise ArithmeticError("no tensor")
        return code.clone().view(dtype)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("where", ["encode", "decode"])
async def test_n12_a_codec_that_fails_on_one_rank_ends_it_for_all(coll: Communicator, where: str) -> None:
    codec = Fragile(where, (True,) * (coll.rank == 1))
    net, opt = await Trial.made(coll, compress=codec, **Trial.SMALL)
    with pytest.raises(ArithmeticError if coll.rank == 1 else AiodistError):
        await net.step(Trial.loss, opt, net, coll.rank, 0)
    with pytest.raises((ArithmeticError, AiodistError)):
        await net.step(Trial.loss, opt, net, coll.rank, 1)


@pytest.mark.ranks(2)
async def test_n12_what_makes_no_sense_is_refused(coll: Communicator) -> None:
    for wrong in (3, "fp16", TopK):
        with pytest.raises(TypeError, match="expected a codec of aiodist"):
            await DataParallel.create(nn.Linear(2, 2), coll, compress=wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="'weight' is complex64 on cpu: compress= takes floats on the CPU"):
        await DataParallel.create(nn.Linear(2, 2, dtype=torch.complex64), coll, compress=TopK(0.1))
    with pytest.raises(MismatchError, match=r"rank 0: .*TopK\(ratio=0\.1\).*; rank 1: .*TopK\(ratio=0\.2\)"):
        await DataParallel.create(nn.Linear(2, 2), coll, compress=TopK(0.1 * (1 + coll.rank)))


@pytest.mark.ranks(2)
async def test_n12_a_cancelled_step_goes_on(coll: Communicator) -> None:
    net, opt = await Trial.made(coll, compress=TopK(1.0), **Trial.SMALL)
    for step in range(4):
        work = asyncio.ensure_future(net.step(Trial.loss, opt, net, coll.rank, step))
        await asyncio.sleep(0)
        if step % 2:
            work.cancel()
        await asyncio.wait([work])
    await net.submit(lambda: None)
    Trial.assert_same(net, Trial.alone(coll.size, 4))


@pytest.mark.ranks(2)
async def test_n12_unbiased_codecs_keep_no_residual_unless_asked(coll: Communicator) -> None:
    for codec, kept in ((TernGrad(), 0), (RandomK(0.5, scaled=True), 0), (RandomK(0.5), 6), (Sign(), 6)):
        for feedback, expected in ((None, kept), (True, 6), (False, 0)):
            net, opt = await Trial.made(coll, compress=Compression(codec, error_feedback=feedback))
            await net.step(Trial.loss, opt, net, coll.rank, 0)
            assert len(flat_state(net)) == expected
            await net.aclose()


@pytest.mark.ranks(2)
async def test_n12_residuals_follow_the_scale_of_a_scaler(coll: Communicator) -> None:
    """The scale doubles with each step, which is exact: parameters equal those without a scaler bit for bit."""
    found = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)):
        module = Trial.Mlp()
        net = await DataParallel.create(module, coll, compress=TopK(0.1), scaler=scaler, **Trial.FEW)
        async with net:
            opt = torch.optim.SGD(module.parameters(), lr=0.1)
            for step in range(6):
                if step == 4:  # a saved state continues
                    assert net.compressor is not None
                    net.compressor.load_state_dict(net.compressor.state_dict())
                await net.step(lambda net=net, step=step: Trial.loss(net, coll.rank, step), opt)
        found.append([p.detach().clone() for p in module.parameters()])
        assert scaler is None or scaler.get_scale() == 8.0 * 2**6
    assert all(map(torch.equal, *found))
