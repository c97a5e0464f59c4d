"""P10: what codes leave out is sent later."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from aiodist.codecs import QSGD, Codec, ErrorFeedback, Half, TopK

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
every = pytest.mark.parametrize(
    "codec",
    [Half(), TopK(0.01), TopK(0.3), QSGD(), QSGD(bits=8), QSGD(bits=2)],
    ids=str,
)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@every
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_p10_decoded_and_residual_are_all_that_went_in(codec: Codec, dtype: torch.dtype) -> None:
    draw, feedback = generator(), ErrorFeedback(codec)
    numel = 700
    went_in, came_out = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
    for _ in range(100):
        t = (torch.randn(numel, generator=draw) + 0.1).to(dtype)
        before = t.clone()
        code = feedback.encode("w", t)
        assert torch.equal(t, before)
        went_in += t.double()
        came_out += codec.decode(code, dtype, numel).double()
    residual = feedback.residual("w")
    assert residual is not None
    assert residual.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    difference = (came_out + residual.double() - went_in).abs().max()
    assert float(difference) <= 1e-6 * float(went_in.abs().max())


def test_p10_the_residual_of_qsgd_stays_small() -> None:
    draw = generator()
    for codec in (QSGD(bits=4), QSGD(bits=8)):
        feedback = ErrorFeedback(codec)
        for _ in range(100):
            feedback.encode("w", torch.rand(2000, generator=draw) * 2 - 1)
            residual = feedback.residual("w")
            assert residual is not None
            assert float(residual.abs().max()) <= 1 / (codec.levels - 1) + 1e-6


def test_p10_all_elements_are_sent_in_time() -> None:
    codec, t = TopK(0.01), torch.linspace(0.5, 1.5, 1000)
    feedback = ErrorFeedback(codec)
    came = sum(codec.decode(feedback.encode("w", t), t.dtype, t.numel()) for _ in range(1000))
    assert isinstance(came, Tensor)
    assert bool((came > 0.7 * 1000 * t).all())  # none waits for ever


def test_p10_keys_are_apart_and_can_be_forgotten() -> None:
    feedback = ErrorFeedback(TopK(0.5))
    assert feedback.residual("a") is None
    feedback.encode("a", torch.tensor([1.0, 2.0]))
    feedback.encode(("b", 1), torch.tensor([3.0, 4.0, 5.0]))
    for key, expected in (("a", [1.0, 0.0]), (("b", 1), [3.0, 0.0, 0.0])):
        found = feedback.residual(key)
        assert found is not None
        assert found.tolist() == expected
        found.fill_(9)
        again = feedback.residual(key)
        assert again is not None
        assert again.tolist() == expected  # it was a copy
    other = ErrorFeedback(TopK(0.5))
    other.replace(("b", 1), feedback.residual(("b", 1)))
    assert other.encode(("b", 1), torch.zeros(3)).tolist() == feedback.encode(("b", 1), torch.zeros(3)).tolist()
    feedback.replace("a", None)
    feedback.replace("never seen", None)
    assert feedback.residual("a") is None
    feedback.encode("a", torch.ones(5))  # forgotten: any numel


def test_p10_a_key_keeps_its_numel_and_dtype() -> None:
    feedback = ErrorFeedback(TopK(0.5))
    feedback.encode("a", torch.tensor([1.0, 2.0]))
    with pytest.raises(ValueError, match="3 x float32 for key 'a': expected 2 x float32"):
        feedback.encode("a", torch.ones(3))
    with pytest.raises(ValueError, match="2 x float64 for key 'a'"):
        feedback.encode("a", torch.ones(2, dtype=torch.float64))
    with pytest.raises(TypeError, match="ErrorFeedback of int32"):
        feedback.encode("a", torch.ones(2, dtype=torch.int32))
    found = feedback.residual("a")
    assert found is not None
    assert found.tolist() == [1.0, 0.0]


def test_p10_one_bad_gradient_does_not_stay() -> None:
    for codec in (Half(), TopK(0.5), QSGD(bucket=2)):
        feedback = ErrorFeedback(codec)
        feedback.encode("a", torch.tensor([math.nan, math.inf, -math.inf, 1.0]))
        for _ in range(3):
            decoded = codec.decode(feedback.encode("a", torch.ones(4)), torch.float32, 4)
            assert decoded.isfinite().all()


def test_p10_sixteen_bit_totals_do_not_overflow() -> None:
    feedback = ErrorFeedback(TopK(0.5))
    t = torch.tensor([65504.0, 60000.0], dtype=torch.float16)
    sent = torch.zeros(2, dtype=torch.float64)
    for _ in range(4):
        decoded = TopK(0.5).decode(feedback.encode("a", t), t.dtype, 2)
        assert decoded.isfinite().all()
        sent += decoded
    residual = feedback.residual("a")
    assert residual is not None
    assert (sent + residual).tolist() == (4 * t.double()).tolist()
