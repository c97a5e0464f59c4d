"""P10: the codecs one by one: what comes back, how large the codes are, what is not taken."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from aiodist import codecs
from aiodist.codecs import QSGD, Codec, Half, Lossless, TopK

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
OTHERS = [torch.bool, torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.uint64]
NUMELS = [0, 1, 2, 3, 7, 255, 511, 512, 513, 1537]
LOSSY: list[Codec] = [Half(), TopK(0.1), TopK(1.0), QSGD(), QSGD(bits=2, bucket=7), QSGD(bits=8, bucket=1)]
every = pytest.mark.parametrize("codec", [*LOSSY, Lossless()], ids=str)


def normal(numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def bits(t: Tensor) -> list[int]:
    return t.contiguous().view(torch.uint8).tolist()


def back(codec: Codec, t: Tensor) -> Tensor:
    return codec.decode(codec.encode(t), t.dtype, t.numel())


def bound(codec: Codec, t: Tensor) -> Tensor:
    """The largest error that the docstrings allow, for each element."""
    largest = t.double().abs().amax() if t.numel() else torch.tensor(0.0)
    rounding = t.double().abs() * torch.finfo(t.dtype).eps
    if isinstance(codec, Half):
        return torch.maximum(t.double().abs() * 2**-11, largest * 2**-39) + rounding
    if isinstance(codec, QSGD):
        return largest.expand(t.numel()) / codec.levels + rounding
    return torch.zeros(t.numel())


@every
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_p10_what_comes_back(codec: Codec, dtype: torch.dtype) -> None:
    for numel in NUMELS:
        t = normal(numel, dtype)
        before = bits(t)
        code = codec.encode(t)
        assert (code.dtype, code.dim(), code.device.type) == (torch.uint8, 1, "cpu")
        sent = bits(code)
        decoded = codec.decode(code, dtype, numel)
        assert (decoded.dtype, decoded.shape) == (dtype, t.shape)
        assert bits(t) == before  # nothing was changed on the way
        assert bits(code) == sent
        if isinstance(codec, TopK):
            kept = decoded != 0
            assert int(kept.sum()) == min(numel, max(1, round(codec.ratio * numel)))
            assert torch.equal(decoded[kept], t[kept])
            if not kept.all():
                assert t[kept].abs().min() >= t[~kept].abs().max()
        else:
            assert bool(((decoded.double() - t.double()).abs() <= bound(codec, t)).all())
        for own in (code, decoded):  # new memory, of the size that is needed
            assert own.untyped_storage().nbytes() == own.nbytes
            assert numel == 0 or own.data_ptr() not in (t.data_ptr(), codec.encode(t).data_ptr())
        decoded.zero_()
        assert bits(code) == sent


@every
def test_p10_codes_in_larger_memory(codec: Codec) -> None:
    t = normal(1001, torch.float64)
    code = codec.encode(t)
    expected = codec.decode(code, t.dtype, t.numel())
    for offset in range(1, 9):  # as a receiver finds it: anywhere
        larger = torch.zeros(code.numel() + 9, dtype=torch.uint8)
        larger[offset : offset + code.numel()] = code
        assert torch.equal(codec.decode(larger[offset : offset + code.numel()], t.dtype, t.numel()), expected)
    strided = torch.stack([code, code], 1)[:, 0]
    assert not strided.is_contiguous()
    assert torch.equal(codec.decode(strided, t.dtype, t.numel()), expected)


@every
def test_p10_inputs_with_strides_and_history(codec: Codec) -> None:
    t = normal(1000).requires_grad_()
    half = t.detach()[::2]
    code = copy.deepcopy(codec).encode((t * 1)[::2])
    assert not code.requires_grad
    assert torch.equal(code, copy.deepcopy(codec).encode(half.clone()))
    with torch.inference_mode():
        inside = back(codec, half)
    assert inside.shape == half.shape
    for numel in (0, 1):  # torch calls such contiguous with any stride
        few = t.detach()[: 2 * numel : 2]
        assert torch.equal(copy.deepcopy(codec).encode(few), copy.deepcopy(codec).encode(few.clone()))


@every
def test_p10_only_flat_tensors(codec: Codec) -> None:
    with pytest.raises(ValueError, match=r"shape \(2, 3\): expected .* one dimension"):
        codec.encode(torch.ones(2, 3))
    with pytest.raises(ValueError, match="sparse_coo"):
        codec.encode(torch.ones(3).to_sparse())


@pytest.mark.parametrize("codec", [*LOSSY, Lossless()], ids=str)
@pytest.mark.parametrize("dtype", INTEGERS + OTHERS, ids=str)
def test_p10_only_floats_where_something_is_lost(codec: Codec, dtype: torch.dtype) -> None:
    name, kind = type(codec).__name__, str(dtype).removeprefix("torch.")
    with pytest.raises(TypeError, match=f"{name} of {kind}: {name} takes float16, bfloat16, float32, float64"):
        codec.encode(torch.ones(3, dtype=dtype))


def test_p10_sizes_of_codes() -> None:
    t = normal(1 << 18)
    assert Half().encode(t).nbytes == 16 + t.nbytes // 2
    assert TopK(0.01).encode(t).nbytes == 16 + 8 * round(0.01 * t.numel())
    assert QSGD().encode(t).nbytes == 16 + t.numel() // 2 + 4 * 512
    assert QSGD(bits=2, bucket=1000).encode(t).nbytes == 16 + t.numel() // 4 + 4 * 263
    assert QSGD(bits=8).encode(t.double()).nbytes == 16 + t.numel() + 8 * 512


def test_p10_repr_says_all_that_must_agree() -> None:
    assert [repr(codec) for codec in (Half(), TopK(0.01), QSGD(8, seed=3))] == [
        "Half()",
        "TopK(ratio=0.01)",
        "QSGD(seed=3, bits=8, bucket=512)",
    ]
    assert QSGD() == QSGD()
    assert len({QSGD(), QSGD(), QSGD(seed=1)}) == 2


def test_p10_what_makes_no_sense_is_refused() -> None:
    for ratio in (0.0, -0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="ratio="):
            TopK(ratio)
    with pytest.raises(ValueError, match="bits=3: expected one of 2, 4, 8"):
        QSGD(bits=3)
    with pytest.raises(ValueError, match="bucket=0"):
        QSGD(bucket=0)
    with pytest.raises(ValueError, match="seed=-1"):
        QSGD(seed=-1)


# Half


@given(st.integers(-140, 127), st.sampled_from([torch.bfloat16, torch.float32, torch.float64]))
def test_p10_half_has_one_exponent_for_all(exponent: int, dtype: torch.dtype) -> None:
    t = (normal(100, torch.float64, seed=exponent % 7).clamp(-1, 1) * 2.0**exponent).to(dtype)
    decoded = back(Half(), t).double()
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # where the dtype itself ends
    assert bool(((decoded - t.double()).abs() <= bound(Half(), t) + smallest).all())


def test_p10_half_of_the_largest_and_smallest() -> None:
    for dtype in FLOATS:
        limits = torch.finfo(dtype)
        t = torch.tensor([limits.max, -limits.max, limits.max / 2, 0.0, -0.0], dtype=dtype)
        decoded = back(Half(), t)
        assert bool(decoded.isfinite().all())
        assert bool(((decoded.double() / t.double())[:3] - 1).abs().max() <= 2**-11)
        assert torch.equal(decoded.signbit(), t.signbit())
        tiny = torch.tensor([limits.smallest_normal * limits.eps, 0.0], dtype=dtype)
        assert torch.equal(back(Half(), tiny), tiny)
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    assert bits(back(Half(), halves)) == bits(halves)  # all of them, as they are


def test_p10_half_of_small_elements_beside_infinity() -> None:
    t = torch.tensor([math.inf, 1e-20, -2e-20, math.nan])
    decoded = back(Half(), t)
    assert decoded[0] == math.inf
    assert decoded[3].isnan()
    assert torch.allclose(decoded[1:3], t[1:3], rtol=2**-11, atol=0.0)


# TopK


def test_p10_topk_is_deterministic_among_equals() -> None:
    t = torch.ones(100)
    t[::3] = -1
    t[50] = 2
    for _ in range(3):
        assert back(TopK(0.05), t).nonzero().view(-1).tolist() == [0, 1, 2, 3, 50]
    assert back(TopK(0.5), torch.zeros(10)).tolist() == [0.0] * 10


@given(st.integers(1, 300), st.floats(0.001, 1.0), st.integers(0, 5))
def test_p10_topk_against_sorting(numel: int, ratio: float, seed: int) -> None:
    t = normal(numel, seed=seed).mul(3).round()  # many equal ones
    kept = min(numel, max(1, round(ratio * numel)))
    order = sorted(range(numel), key=lambda i: (-abs(t[i].item()), i))
    expected = torch.zeros(numel)
    expected[order[:kept]] = t[order[:kept]]
    assert torch.equal(back(TopK(ratio), t), expected)


# QSGD


@pytest.mark.parametrize("level", [0.1, 0.5, 0.9, -0.7])
def test_p10_qsgd_is_unbiased_to_a_hundredth_of_a_step(level: float) -> None:
    numel = 1 << 18
    t = torch.full((numel,), level / QSGD().levels)
    t[::512] = 1.0  # the scale of each bucket
    others = torch.arange(numel) % 512 != 0
    mean = float(back(QSGD(seed=1), t)[others].double().mean())
    allowed = math.sqrt(math.log(2e9) / (2 * int(others.sum())))  # Hoeffding again, in steps
    assert abs(mean * QSGD().levels - level) <= allowed < 0.01


def test_p10_qsgd_rounds_to_the_levels_beside() -> None:
    t = normal(1000, torch.float64)
    for codec in (QSGD(bits=2, bucket=64), QSGD(bits=4, bucket=64), QSGD(bits=8, bucket=64)):
        decoded = back(codec, t)
        for bucket, found in zip(t.split(64), decoded.split(64), strict=True):
            step = float(bucket.abs().max()) / codec.levels
            levels = found / step
            assert float((levels - levels.round()).abs().max()) < 1e-9
            assert float((found - bucket).abs().max()) < step
        assert bool((decoded[t.abs() == t.abs().max()] == t[t.abs() == t.abs().max()]).all())


def test_p10_qsgd_draws_anew_at_each_call_and_is_reproducible() -> None:
    t = normal(2000)
    codec = QSGD(seed=5)
    first = [bits(codec.encode(t)) for _ in range(4)]
    assert len({tuple(code) for code in first}) == 4
    for copied in (QSGD(seed=5), copy.copy(codec), copy.deepcopy(codec), pickle.loads(pickle.dumps(codec))):
        assert [bits(copied.encode(t)) for _ in range(4)] == first
    assert bits(QSGD(seed=6).encode(t)) != first[0]
    state = torch.get_rng_state()
    codec.encode(t)
    assert torch.equal(torch.get_rng_state(), state)  # the user's random numbers are theirs


def test_p10_qsgd_of_ranks_with_one_seed_averages_out() -> None:
    # Ranks have nearly the same gradient and the same seed: were their draws the same, no error would average out.
    t = normal(4096)
    errors = [back(QSGD(), t * (1 + rank * 1e-6)) - t for rank in range(16)]
    alone = float(torch.stack(errors).square().mean().sqrt())
    together = float(torch.stack(errors).mean(0).square().mean().sqrt())
    assert together < alone / 3  # a quarter is expected


def test_p10_qsgd_of_the_largest_and_smallest() -> None:
    for dtype in FLOATS:
        limits = torch.finfo(dtype)
        for largest in (limits.max, limits.smallest_normal * limits.eps):
            t = torch.tensor([largest, -largest, 0.0], dtype=dtype)
            assert torch.equal(back(QSGD(), t), t)


# Lossless


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("level", [1, 9])
def test_p10_lossless_keeps_every_bit(dtype: torch.dtype, level: int) -> None:
    codec = Lossless(level)
    for numel in (0, 1, 7, 1000, 100_003):
        t = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8).view(dtype)  # NaN of all kinds, too
        assert bits(codec.decode(codec.encode(t), dtype, numel)) == bits(t)


def test_p10_lossless_gains_little_on_dense_floats() -> None:
    t = normal(100_000)
    assert 0.8 * t.nbytes < Lossless().encode(t).nbytes < 0.9 * t.nbytes
    assert Lossless().encode(torch.zeros(100_000)).nbytes < 2000
    with pytest.raises(ValueError, match="level=10"):
        Lossless(10)


# NaN and infinities


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_p10_nan_and_infinities(dtype: torch.dtype) -> None:
    t = normal(40, dtype)
    t[3], t[5], t[7] = math.nan, math.inf, -math.inf
    usual = [i for i in range(40) if i not in (3, 5, 7)]
    halves = back(Half(), t)
    assert halves[3].isnan()
    assert halves[[5, 7]].tolist() == [math.inf, -math.inf]
    assert bool(((halves[usual] - t[usual]).abs() <= bound(Half(), t[usual])).all())
    first = back(TopK(3 / 40), t)  # these three go first
    assert first[3].isnan()
    assert first[[5, 7]].tolist() == [math.inf, -math.inf]
    assert first[usual].tolist() == [0.0] * 37
    buckets = back(QSGD(bucket=5), t)  # 0 to 4 and 5 to 9 are spoilt, the others are not
    assert buckets[:10].isnan().all()
    assert buckets[10:].isfinite().all()
    assert ((buckets[10:] - t[10:]).abs() <= t[10:].abs().max() / 7 * 1.01).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_p10_what_is_finite_stays_finite(dtype: torch.dtype) -> None:
    """At the end of the dtype, and where a stretch is longer than the dtype can say."""
    largest = torch.finfo(dtype).max
    t = torch.tensor([largest, -largest, 0.0, largest], dtype=dtype)
    scaled = back(codecs.RandomK(0.5, scaled=True), t)
    assert scaled[scaled != 0].abs().tolist() == [largest] * int((scaled != 0).sum())
    assert back(codecs.RandomK(1e-5, scaled=True), torch.zeros(200_000, dtype=dtype)).tolist() == [0.0] * 200_000
    exact = (Half(), TopK(0.5), QSGD(8), codecs.Int8(), codecs.Sign(), codecs.TernGrad(), Lossless())
    for codec in exact:
        for put in (t, t[:1], torch.full((70_000,), largest, dtype=dtype), t / 4):
            decoded = back(codec, put)
            assert decoded.isfinite().all(), codec
            if isinstance(codec, codecs.Int8):
                assert ((decoded.double() - put.double()).abs() <= float(put.abs().max()) / 254).all()
            if isinstance(codec, codecs.Sign):
                scale = (put.double() / 2**20).abs().mean() * 2**20
                torch.testing.assert_close(decoded.abs().double(), scale.expand_as(decoded), rtol=1e-2, atol=0.0)
    t = t if dtype is torch.float16 else t * 0.99  # what rounds to no bfloat16 is infinite
    if dtype is not torch.float64:
        narrow = back(codecs.BFloat16(), t)
        torch.testing.assert_close(narrow, t, rtol=2**-8, atol=0.0)
    spoilt = t.clone()
    spoilt[1] = -math.inf
    assert back(codecs.BFloat16(), spoilt)[1] == -math.inf
