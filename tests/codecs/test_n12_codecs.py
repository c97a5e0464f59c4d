"""N12: codecs for gradients: the decoded values, the sent bytes, the mean, and the residual."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from aiodist.codecs import (
    QSGD,
    SVD,
    BFloat16,
    Codec,
    ErrorFeedback,
    Gather,
    GradientCodec,
    Gradients,
    Half,
    Int8,
    NarrowSum,
    PowerSGD,
    RandomK,
    Sign,
    Sum,
    TernGrad,
    TopK,
)
from aiodist.codecs.gradients import Gathered
from tests.support.exchanges import exchanged

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
NEW = [BFloat16(), Int8(), Sign(), TernGrad(), RandomK(0.1), RandomK(0.3, scaled=True), PowerSGD(2), SVD(2)]
ALL: list[GradientCodec] = [*NEW, Half(), QSGD(8), TopK(0.1), TopK(1.0), Sign(vote=True), RandomK(1.0)]
every = pytest.mark.parametrize("codec", ALL, ids=str)
CHUNK = 1 << 16


def normal(numel: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gradients(grads: Sequence[Tensor], residuals: Sequence[Tensor], *, number: int = 0, **more: Any) -> list[Gradients]:
    shapes = more.pop("shapes", [tuple(grads[0].shape)])
    names = [f"p{i}" for i in range(len(shapes))]
    return [
        Gradients(g + r, torch.full_like(g, math.nan), shapes, names, len(grads), number=number, **more)
        for g, r in zip(grads, residuals, strict=True)
    ]


@pytest.mark.parametrize("numel", [0, 1, 9, 1000, CHUNK + 9])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@every
def test_n12_what_comes_back(codec: GradientCodec, dtype: torch.dtype, numel: int) -> None:
    t = normal(numel, seed=numel, dtype=dtype)
    before = t.clone()
    code = codec.encode(t)
    assert torch.equal(t, before)
    assert (code.dtype, code.dim()) == (torch.uint8, 1)
    decoded = codec.decode(code, dtype, numel)
    assert (decoded.dtype, decoded.shape) == (dtype, t.shape)
    assert bool(decoded.isfinite().all())
    added = torch.ones(numel, dtype=torch.float64).to(dtype)
    codec.add(code, added, 0.5)
    tolerance = {torch.float16: 4e-3, torch.bfloat16: 3e-2}.get(dtype, 1e-6)
    torch.testing.assert_close(added.double(), 1 + 0.5 * decoded.double(), rtol=tolerance, atol=tolerance)


def test_n12_each_comes_as_near_as_it_says() -> None:
    t = normal(2 * CHUNK + 77)
    chunks = list(t.split(CHUNK))
    for values, back in zip(chunks, Int8().decode(Int8().encode(t), t.dtype, t.numel()).split(CHUNK), strict=True):
        assert float((values - back).abs().max()) <= float(values.abs().max()) / 254 * (1 + 1e-4)
    rounded = t[:CHUNK].bfloat16()
    back = Int8().decode(Int8().encode(rounded), rounded.dtype, CHUNK)
    assert float((rounded.double() - back).abs().max()) <= float(rounded.abs().max()) * (1 / 254 + 1 / 512)
    for values, back in zip(chunks, Sign().decode(Sign().encode(t), t.dtype, t.numel()).split(CHUNK), strict=True):
        expected = torch.where(values >= 0, 1.0, -1.0) * values.double().abs().mean().float()
        torch.testing.assert_close(back, expected)
    back = BFloat16().decode(BFloat16().encode(t), t.dtype, t.numel())
    assert bool(((back - t).abs() <= t.abs() * 2**-8).all())
    kept = RandomK(0.01).decode(RandomK(0.01).encode(t), t.dtype, t.numel())
    assert int(kept.count_nonzero()) == round(0.01 * t.numel())
    assert bool(((kept == t) | (kept == 0)).all())
    values = set(TernGrad(bucket=100).decode(TernGrad(bucket=100).encode(t[:100]), t.dtype, 100).abs().tolist())
    assert values <= {0.0, float(t[:100].abs().max())}


@pytest.mark.parametrize("codec", [PowerSGD(3), SVD(3)], ids=str)
@pytest.mark.parametrize("shape", [(40, 30), (30, 40), (2, 50), (1, 9), (7, 1)])
def test_n12_matrices_of_low_rank_are_exact(codec: GradientCodec, shape: tuple[int, int]) -> None:
    draw = torch.Generator().manual_seed(1)
    t = torch.randn(shape[0], 3, generator=draw) @ torch.randn(3, shape[1], generator=draw)
    flat = t.reshape(-1)
    outs, nbytes = exchanged(codec, gradients([flat], [torch.zeros_like(flat)], shapes=[shape]), [{}])
    rank = min(3, *shape)
    assert nbytes <= 4 * rank * sum(shape)
    torch.testing.assert_close(outs[0], flat, rtol=1e-4, atol=1e-4)


SCALES = [(torch.float32, power) for power in (-38, -30, -25, -19, 19, 25, 30, 36)]
SCALES += [(torch.float64, power) for power in (-305, -160, 160, 300)]


@pytest.mark.drawn(8)
@pytest.mark.parametrize("codec", [PowerSGD(2), SVD(2)], ids=str)
@pytest.mark.parametrize(("dtype", "power"), SCALES)
def test_n12_matrices_of_low_rank_are_exact_at_any_scale(codec: PowerSGD | SVD, dtype: torch.dtype, power: int) -> None:
    draw = torch.Generator().manual_seed(1)
    scale = 10.0**power
    t = (torch.randn(60, 1, generator=draw) @ torch.randn(1, 60, generator=draw)).view(-1).to(dtype) * scale

    def near(found: Tensor, ranks: int) -> bool:
        return bool(((found - t * ranks).abs() <= 1e-4 * t.abs().max()).all())

    assert near(codec.decode(codec.encode(t), dtype, t.numel()), 1)
    kept: list[dict[str, Tensor]] = [{}, {}]
    for step in range(3):  # the later ones begin where the one before ended
        zeros = [torch.zeros_like(t)] * 2
        outs, _ = exchanged(codec, gradients([t.clone(), t.clone()], zeros, number=step, shapes=[(60, 60)]), kept)
        assert all(near(out, 2) for out in outs)


@pytest.mark.parametrize("codec", [PowerSGD(2), SVD(2)], ids=str)
def test_n12_matrices_of_the_largest_elements_stay_finite(codec: PowerSGD | SVD) -> None:
    """Their norm is beyond the dtype."""
    t = torch.full((3600,), 3e38)
    t[::2] *= -1
    torch.testing.assert_close(codec.decode(codec.encode(t), t.dtype, t.numel()), t, rtol=1e-5, atol=0.0)


def test_n12_svd_is_the_best_there_is() -> None:
    t = torch.randn(60, 50, generator=torch.Generator().manual_seed(5)).double()
    flat = (t * torch.logspace(0, -3, 50, dtype=torch.float64)).reshape(-1)
    every_one = gradients([flat], [torch.zeros_like(flat)], shapes=[(60, 50)])
    outs, nbytes = exchanged(SVD(4), every_one, [{}])
    assert nbytes == 8 * 4 * (60 + 50)
    best = torch.linalg.svdvals(flat.view(60, 50))[4:].norm()
    assert best <= (flat - outs[0]).norm() <= 1.01 * best
    torch.testing.assert_close(every_one[0].total, flat - outs[0])


def test_n12_sizes_of_codes() -> None:
    t = normal(1 << 18)
    chunks = 4
    for codec, nbytes in [
        (BFloat16(), 2 * t.numel()),
        (Int8(), t.numel() + 4 * chunks),
        (Sign(), t.numel() // 8 + 4 * chunks),
        (TernGrad(), t.numel() // 4 + 4 * t.numel() // 512),
        (RandomK(0.01), 4 * round(0.01 * t.numel())),
        (PowerSGD(4), 4 * 4 * (512 + 512)),
        (SVD(4), 4 * 4 * (512 + 512)),
    ]:
        assert codec.encode(t).nbytes == 16 + nbytes, codec
    assert Int8().encode(t.double()).nbytes == 16 + t.numel() + 8 * chunks


@pytest.mark.parametrize("codec", NEW, ids=str)
def test_n12_damaged_codes_are_refused(codec: GradientCodec) -> None:
    code = codec.encode(normal(1000))
    for damaged, dtype, numel in [
        (code[:-1], torch.float32, 1000),
        (torch.cat([code, code[:1]]), torch.float32, 1000),
        (code, torch.float64, 1000),
        (code, torch.float32, 999),
        (Half().encode(normal(1000)), torch.float32, 1000),
    ]:
        with pytest.raises(ValueError, match="a code "):
            codec.decode(damaged, dtype, numel)
    with pytest.raises(TypeError, match="takes float16"):
        codec.encode(torch.ones(8, dtype=torch.int32))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@every
def test_n12_what_is_not_finite_is_never_hidden(codec: GradientCodec, bad: float) -> None:
    t = normal(900)
    t[417] = bad
    assert not bool(codec.decode(codec.encode(t), t.dtype, t.numel()).isfinite().all())
    for ranks in (1, 2, 3):
        grads = [t.clone() if rank == ranks - 1 else normal(900, seed=rank) for rank in range(ranks)]
        every_one = gradients(grads, [torch.zeros(900)] * ranks, shapes=[(30, 30)])
        outs, _ = exchanged(codec, every_one, [{} for _ in range(ranks)])
        assert not any(bool(out.isfinite().all()) for out in outs)


@pytest.mark.parametrize("codec", [Int8(), Sign()], ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_n12_one_bad_element_spoils_its_chunk_alone(codec: GradientCodec, bad: float) -> None:
    t = normal(2 * CHUNK)
    t[5] = bad
    decoded = codec.decode(codec.encode(t), t.dtype, t.numel())
    assert bool(decoded[:CHUNK].isnan().all())
    assert bool(decoded[CHUNK:].isfinite().all())


def test_n12_the_smallest_and_the_largest() -> None:
    for codec in (Int8(), Sign()):
        for size in (0.0, 1e-42, 1e-37, 3e38):
            decoded = codec.decode(codec.encode(torch.full((100,), size)), torch.float32, 100)
            assert bool((decoded <= 1.01 * size).all())
            if size > 1e-36:
                torch.testing.assert_close(decoded, torch.full((100,), size))


def test_n12_topk_by_a_sample_is_the_same() -> None:
    numel = 300_007
    for kind in ("normal", "ties", "sorted", "rows", "nan"):
        t = normal(numel, seed=3)
        if kind == "ties":
            t = (t * 2).round()
        elif kind == "sorted":
            t = t.sort().values
        elif kind == "rows":
            t[::61] = 0  # what the sample sees
        elif kind == "nan":
            t[::1000] = math.nan
        kept = round(0.03 * numel)
        expected = t.abs().nan_to_num(math.inf).double().numpy().argsort(kind="stable")[::-1]
        decoded = TopK(0.03).decode(TopK(0.03).encode(t), t.dtype, numel)
        least = float(t.abs().nan_to_num(math.inf)[int(expected[kept - 1])])
        chosen = decoded != 0
        assert int(chosen.sum()) == kept, kind
        assert bool((t[chosen].abs().nan_to_num(math.inf) >= least).all()), kind
        equal = (t.abs().nan_to_num(math.inf) == least).nonzero().view(-1)
        taken = chosen[equal].nonzero().view(-1)
        assert taken.tolist() == list(range(len(taken))), kind  # the lowest indices among equals


@pytest.mark.parametrize("codec", [TernGrad(bucket=8), QSGD(4, bucket=8), RandomK(0.25, scaled=True)], ids=str)
def test_n12_the_mean_of_many_codes_is_right(codec: GradientCodec) -> None:
    assert codec.unbiased
    draws, t = 100_000, torch.tensor([0.9, -0.35, 0.02, 1.0, -1.0, 0.5, 0.0, 0.11])
    back = codec.decode(codec.encode(t.repeat(draws)), t.dtype, 8 * draws).view(draws, 8).double()
    mean, spread = back.mean(0), back.std(0)  # buckets, and the stretches of RandomK, have 8 or 4 elements
    assert bool(((mean - t).abs() <= 4 * spread / math.sqrt(draws) + 1e-6).all())


def test_n12_the_mean_over_many_calls_is_right() -> None:
    """Stretches differ in length: three, three and four elements, again and again."""
    codec, t, at_once, calls = RandomK(0.3, scaled=True, seed=9), normal(10), 100, 1000
    many = t.repeat(at_once)
    back = torch.stack([codec.decode(codec.encode(many), t.dtype, many.numel()) for _ in range(calls)])
    back = back.view(-1, 10).double()
    assert bool(((back.mean(0) - t).abs() <= 4 * back.std(0) / math.sqrt(len(back)) + 1e-6).all())


@pytest.mark.parametrize("make", [lambda seed: TernGrad(seed=seed), lambda seed: RandomK(0.1, seed=seed)])
def test_n12_a_seed_says_what_is_drawn(make: Any) -> None:
    t = normal(5000)
    codes = [codec.encode(t).tolist() for codec in (make(3), make(4), pickle.loads(pickle.dumps(make(3))))]
    assert codes[0] == codes[2] != codes[1]
    codec = make(3)
    assert codec.encode(t).tolist() != codec.encode(t).tolist()
    assert copy.deepcopy(codec) == codec == make(3)
    before = torch.get_rng_state()
    for each in ALL:
        each.encode(t)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("codec", [QSGD(4), TernGrad(seed=5), RandomK(0.1, seed=5)], ids=str)
def test_n12_exchanges_draw_by_their_number(codec: GradientCodec) -> None:
    """So a net that continues from a checkpoint, with a new codec, draws the same values."""
    t = normal(3000)

    def drawn(by: GradientCodec, number: int) -> list[float]:
        ranks = gradients([t], [torch.zeros(3000)], number=number)
        found: list[float] = exchanged(by, ranks, [{}])[0][0].tolist()
        return found

    expected = drawn(copy.deepcopy(codec), 7)
    codec.encode(t)
    assert drawn(codec, 6) != expected
    assert drawn(codec, 7) == expected


def test_n12_what_makes_no_sense_is_refused() -> None:
    for make in (lambda: PowerSGD(0), lambda: SVD(-1)):
        with pytest.raises(ValueError, match="rank="):
            make()
    with pytest.raises(ValueError, match="ratio="):
        RandomK(0.0)
    for make_seeded in (lambda: PowerSGD(seed=-1), lambda: RandomK(0.5, seed=1 << 63)):
        with pytest.raises(ValueError, match="seed="):
            make_seeded()


@every
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_n12_nothing_is_lost_between_ranks(codec: GradientCodec, ranks: int, dtype: torch.dtype) -> None:
    """The sums of all steps plus the residuals of all ranks equal the inputs."""
    shapes, steps = [(24, 20), (17,), (4, 5, 3, 3)], 12
    numel = sum(math.prod(shape) for shape in shapes)
    went_in = torch.zeros(numel, dtype=torch.float64)
    came_out = torch.zeros(numel, dtype=torch.float64)
    residuals = [torch.zeros(numel, dtype=dtype) for _ in range(ranks)]
    kept: list[dict[str, Tensor]] = [{} for _ in range(ranks)]
    for step in range(steps):
        grads = [normal(numel, seed=100 * step + rank).to(dtype) + 0.1 for rank in range(ranks)]
        every_one = gradients(grads, residuals, number=step, shapes=shapes, factor=0.25)
        outs, _ = exchanged(codec, every_one, kept)
        assert all(torch.equal(out, outs[0]) for out in outs)  # bit for bit on all ranks
        went_in += torch.stack(grads).double().sum(0)
        came_out += 4 * outs[0].double()
        residuals = [each.total for each in every_one]
    left = torch.stack(residuals).double()
    difference = (came_out + left.sum(0) - went_in).abs().max()
    # With a residual RandomK(scaled=True) overshoots: its residual becomes larger than its input.
    largest = max(float(went_in.abs().max()), float(left.abs().max()))
    assert float(difference) <= 1e-6 * largest


@pytest.mark.drawn(9)
@every
def test_n12_without_feedback_the_gradients_may_lie_where_the_sum_goes(codec: GradientCodec) -> None:
    grads = [normal(600, seed=rank) for rank in range(3)]
    zeros = [torch.zeros(600)] * 3
    apart = gradients(grads, zeros, shapes=[(20, 30)], factor=1 / 3)
    for each in apart:
        each.feedback = False
    codecs = [copy.deepcopy(codec) for _ in range(2)]  # that draw the same
    expected, _ = exchanged(codecs[0], apart, [{}, {}, {}])
    together = [Gradients(g.clone(), g, [(20, 30)], ["p0"], 3, factor=1 / 3, feedback=False) for g in grads]
    for each in together:
        each.out = each.total
    found, _ = exchanged(codecs[1], together, [{}, {}, {}])
    assert torch.equal(found[0], expected[0])


def test_n12_the_majority_votes() -> None:
    grads = [torch.tensor([1.0, -2.0, 3.0, -4.0]), torch.tensor([1.0, 2.0, -3.0, -4.0]), torch.tensor([-6.0, 2, 3, 5])]
    ranks = gradients(grads, [torch.zeros(4)] * 3)
    outs, nbytes = exchanged(Sign(vote=True), ranks, [{}, {}, {}])
    assert outs[0].tolist() == [2.5 + 2.5 + 4] * 3 + [-9.0]
    assert nbytes == 16 + 4 + 1
    tied = gradients([torch.tensor([1.0, 1.0]), torch.tensor([-1.0, 1.0])], [torch.zeros(2)] * 2)
    assert exchanged(Sign(vote=True), tied, [{}, {}])[0][0].tolist() == [0.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_n12_what_a_vote_leaves_out_is_kept_in_equal_parts(dtype: torch.dtype) -> None:
    grads = [torch.tensor([4.0, -1.0, 1.0]), torch.tensor([-2.0, -3.0, 1.0]), torch.tensor([-3.0, 1.0, 2.0])]
    ranks = gradients([g.to(dtype) for g in grads], [torch.zeros(3, dtype=dtype)] * 3, factor=1 / 3)
    outs, _ = exchanged(Sign(vote=True), ranks, [{}, {}, {}])
    assert outs[0].tolist() == [-2.0, -2.0, 2.0]  # each says 2
    own = torch.tensor([[2.0, 1.0, -1.0], [0.0, -1.0, -1.0], [-1.0, -1.0, 0.0]], dtype=dtype)
    left = torch.tensor([-2.0 + 6, -2.0 + 6, 6.0 - 6], dtype=dtype)  # of the sum of the codes
    torch.testing.assert_close(torch.stack([each.total for each in ranks]), own + left / 3)


def test_n12_half_of_ranks_that_differ_in_size() -> None:
    for sizes in ((1e-30, 1e-30), (0.0, 1e-30), (1e30, 1e-30), (3e38, -3e38), (0.0, 0.0)):
        grads = [torch.full((9,), size) for size in sizes]
        outs, nbytes = exchanged(Half(), gradients(grads, [torch.zeros(9)] * 2), [{}, {}])
        torch.testing.assert_close(outs[0], grads[0] + grads[1], rtol=1e-3, atol=1e-3 * max(map(abs, sizes)))
        assert nbytes == 4 + 18


def test_n12_powersgd_warms_up_to_the_best_product() -> None:
    """With the same gradient again and again the product comes to be the best of its rank, and the residual is sent."""
    grads = [torch.randn(40, 30, generator=torch.Generator().manual_seed(rank)).double() for rank in range(3)]
    mean = torch.stack(grads).mean(0)
    kept: list[dict[str, Tensor]] = [{}, {}, {}]
    for step in range(60):
        flat = [grad.reshape(-1).clone() for grad in grads]
        zeros = [torch.zeros(1200, dtype=torch.float64)] * 3
        ranks = gradients(flat, zeros, number=step, shapes=[(40, 30)], factor=1 / 3)
        outs, nbytes = exchanged(PowerSGD(3), ranks, kept)
        assert nbytes == 8 * 3 * (40 + 30)
    error = (outs[0].view(40, 30) - mean).norm()
    best = torch.linalg.svdvals(mean)[3:].norm()
    assert best <= error <= 1.05 * best
    assert torch.equal(kept[0]["p0"], kept[2]["p0"])


def test_n12_powersgd_sends_small_parameters_as_they_are() -> None:
    shapes = [(5,), (3, 4), (64, 64)]
    grads = [normal(5 + 12 + 4096, seed=rank) for rank in range(2)]
    ranks = gradients(grads, [torch.zeros_like(grads[0])] * 2, shapes=shapes)
    outs, nbytes = exchanged(PowerSGD(2), ranks, [{}, {}])
    torch.testing.assert_close(outs[0][:17], (grads[0] + grads[1])[:17])
    assert not ranks[0].total[:17].any()
    assert nbytes == 4 * (5 + 12 + 2 * 64) + 4 * 2 * 64


def test_n12_powersgd_begins_anew_after_zeros() -> None:
    kept: list[dict[str, Tensor]] = [{}]
    for step in range(3):
        grads = [torch.zeros(900)] if step < 2 else [torch.outer(torch.arange(30.0), torch.ones(30)).reshape(-1)]
        outs, _ = exchanged(PowerSGD(1), gradients(grads, [torch.zeros(900)], number=step, shapes=[(30, 30)]), kept)
    torch.testing.assert_close(outs[0], grads[0], rtol=1e-4, atol=1e-3)


class Quarter:
    """A codec with nothing but the two methods that a parameter server needs."""

    def encode(self, t: Tensor) -> Tensor:
        return (t * 4).round().to(torch.int8).view(torch.uint8)

    def decode(self, code: Tensor, dtype: torch.dtype, numel: int) -> Tensor:
        assert code.numel() == numel
        return code.view(torch.int8).to(dtype) / 4


def test_n12_any_codec_can_be_gathered() -> None:
    codec: Codec = Quarter()
    grads = [torch.tensor([0.3, 1.0]), torch.tensor([0.5, -0.3])]
    ranks = gradients(grads, [torch.zeros(2)] * 2)
    outs, nbytes = exchanged(Gathered(codec), ranks, [{}, {}])
    assert (outs[1].tolist(), nbytes) == ([0.75, 0.75], 2)
    torch.testing.assert_close(ranks[0].total, torch.tensor([0.05, 0.0]))


@pytest.mark.parametrize(
    ("feedback", "steps", "reached"),
    [
        (True, 3_000, 0.02),
        pytest.param(True, 20_000, 0.01, marks=pytest.mark.thorough),
        pytest.param(False, 20_000, 1.0, marks=pytest.mark.thorough),
    ],
)
def test_n12_sign_descent_stands_still_without_feedback(feedback: bool, steps: int, reached: float) -> None:
    """f = ½|x1 + x2| + |x1 - x2| from (1, 1): every sign of its gradient leaves x1 + x2 as it is (arXiv:1901.09847)."""
    codec, kept = Sign(), ErrorFeedback(Sign())
    x = torch.tensor([1.0, 1.0], dtype=torch.float64)
    least = 1.0
    for k in range(1, steps + 1):
        along, across = (1.0 if x[0] + x[1] >= 0 else -1.0), (1.0 if x[0] - x[1] >= 0 else -1.0)
        step = 0.1 / math.sqrt(k) * torch.tensor([along / 2 + across, along / 2 - across], dtype=torch.float64)
        code = kept.encode("x", step) if feedback else codec.encode(step)
        x -= codec.decode(code, x.dtype, 2)
        least = min(least, float((x[0] + x[1]).abs() / 2 + (x[0] - x[1]).abs()))
    assert float((x[0] + x[1]).abs() / 2 + (x[0] - x[1]).abs()) < reached if feedback else least >= 1.0 - 1e-9


def test_n12_sums_and_gathers_are_what_can_be_asked() -> None:
    flat = torch.ones(4)
    assert (Sum(flat).op, Sum(flat, "max").op) == ("sum", "max")
    kinds = {type(next(codec.exchange(g, {}))) for codec in ALL for g in gradients([flat], [flat])}
    assert kinds == {Sum, NarrowSum, Gather}
