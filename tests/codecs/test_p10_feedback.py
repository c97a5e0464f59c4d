"""P10: what codes leave out is sent later, upwards by a residual, downwards by differences."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from aiodist.codecs import QSGD, Codec, ErrorFeedback, Half, Incoming, Lossless, Outgoing, TopK

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
every = pytest.mark.parametrize(
    "codec",
    [Half(), TopK(0.01), TopK(0.3), QSGD(), QSGD(bits=8), QSGD(bits=2), Lossless()],
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
    assert bool((came > 0.7 * 1000 * t).all())  # no thread waits without end


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


# Downwards


def sides(codec: Codec) -> tuple[Outgoing, Incoming]:
    return Outgoing(codec), Incoming(codec)


def pass_on(outgoing: Outgoing, incoming: Incoming, t: Tensor, receiver: int = 0, key: str = "w") -> Tensor:
    before = t.clone()
    message = outgoing.encode(receiver, key, t)
    assert torch.equal(t.view(torch.uint8), before.view(torch.uint8))
    decoded = incoming.decode(key, message, t.dtype, t.numel())
    held = outgoing.held(receiver, key)
    assert held is not None
    assert held.dtype is t.dtype
    assert held.view(torch.uint8).tolist() == decoded.view(torch.uint8).tolist()  # bit for bit
    return decoded


@every
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_p10_both_sides_agree_and_converge(codec: Codec, dtype: torch.dtype) -> None:
    draw, numel = generator(), 700
    outgoing, incoming = sides(codec)
    t = torch.randn(numel, generator=draw).to(dtype)
    assert torch.equal(pass_on(outgoing, incoming, t), t)  # the first message is the tensor itself
    for _ in range(20):
        t = (t.float() + 0.1 * torch.randn(numel, generator=draw)).to(dtype)
        pass_on(outgoing, incoming, t)
    decoded = torch.zeros(0)
    for _ in range(150):  # it stands still
        decoded = pass_on(outgoing, incoming, t)
    if not (isinstance(codec, QSGD) and codec.bits == 2):  # without any promise
        error = (decoded.double() - t.double()).abs()
        assert bool((error <= t.double().abs() * torch.finfo(dtype).eps).all())


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12, 1e30])
def test_p10_differences_of_any_size_arrive(scale: float) -> None:
    t = torch.randn(600, generator=generator()) * scale
    for codec in (Half(), TopK(0.1), QSGD()):
        outgoing, incoming = sides(codec)
        pass_on(outgoing, incoming, t)
        for _ in range(20):
            decoded = pass_on(outgoing, incoming, 1.25 * t)
        assert torch.allclose(decoded, 1.25 * t, rtol=1e-6, atol=0.0)


def test_p10_one_element_of_any_stride_is_sent_whole() -> None:
    t = torch.arange(4.0)[1::3]
    assert t.stride() == (3,)
    outgoing, incoming = sides(QSGD())
    assert incoming.decode("key", outgoing.encode(0, "key", t), t.dtype, 1).item() == 1


def test_p10_messages_are_smaller_from_the_second_on() -> None:
    t = torch.randn(10_000, generator=generator())
    outgoing, incoming = sides(QSGD())
    sizes = []
    for step in range(3):
        message = outgoing.encode(0, "w", t + step)
        sizes.append(message.nbytes)
        incoming.decode("w", message, t.dtype, t.numel())
    assert sizes == [16 + t.nbytes, 16 + QSGD().encode(t).nbytes, 16 + QSGD().encode(t).nbytes]


def test_p10_small_tensors_are_sent_whole() -> None:
    for numel in (0, 1, 3):
        outgoing, incoming = sides(TopK(0.5))
        for step in range(3):
            t = torch.full((numel,), float(step))
            assert torch.equal(pass_on(outgoing, incoming, t), t)
            assert outgoing.encode(1, "w", t).nbytes == 16 + t.nbytes


def test_p10_nan_and_infinities_come_and_go() -> None:
    for codec in (Half(), TopK(0.05), QSGD()):
        outgoing, incoming = sides(codec)
        t = torch.randn(1000, generator=generator())
        pass_on(outgoing, incoming, t)
        bad = t.clone()
        bad[1], bad[2] = math.nan, -math.inf
        for _ in range(2):
            assert pass_on(outgoing, incoming, bad).tolist()[2] == -math.inf
            assert incoming.decode("x", Outgoing(codec).encode(0, "x", bad), t.dtype, 1000)[1].isnan()
        assert torch.equal(pass_on(outgoing, incoming, t), t)
        for _ in range(30):
            decoded = pass_on(outgoing, incoming, t + 1)
        assert torch.allclose(decoded, t + 1, atol=1e-6)


def test_p10_what_cannot_be_subtracted_is_refused() -> None:
    outgoing = Outgoing(Half())
    for dtype in (torch.bool, torch.complex64, torch.int32):
        with pytest.raises(TypeError, match=r"Outgoing of \w+: Outgoing takes float16"):
            outgoing.encode(0, "w", torch.ones(3, dtype=dtype))


def test_p10_a_receiver_that_starts_again() -> None:
    outgoing, incoming = sides(QSGD())
    t = torch.randn(600, generator=generator())
    pass_on(outgoing, incoming, t)
    pass_on(outgoing, incoming, t + 1)
    incoming.forget("w")
    with pytest.raises(ValueError, match="message 2 for key 'w': expected a whole tensor, or message None"):
        incoming.decode("w", outgoing.encode(0, "w", t), t.dtype, 600)
    outgoing.forget(0, "w")
    assert outgoing.held(0, "w") is None
    assert torch.equal(pass_on(outgoing, incoming, t), t)
    pass_on(outgoing, incoming, t + 1)


def test_p10_receivers_and_keys_are_apart() -> None:
    outgoing = Outgoing(QSGD())
    receivers = [Incoming(QSGD()) for _ in range(3)]
    for step in range(3):
        for number, incoming in enumerate(receivers):
            for key in ("a", "b"):
                pass_on(outgoing, incoming, torch.full((600,), number + step / 3), number, key)
    outgoing.forget(1)
    outgoing.forget(2, "a")
    kept = {(r, k) for r in range(3) for k in "ab" if outgoing.held(r, k) is not None}
    assert kept == {(0, "a"), (0, "b"), (2, "b")}


def test_p10_lost_and_doubled_messages_are_errors() -> None:
    outgoing, incoming = sides(QSGD())
    t = torch.randn(600, generator=generator())
    pass_on(outgoing, incoming, t)
    first, second = outgoing.encode(0, "w", t + 1), outgoing.encode(0, "w", t + 2)
    with pytest.raises(ValueError, match="message 2 for key 'w': expected a whole tensor, or message 1"):
        incoming.decode("w", second, t.dtype, 600)
    incoming.decode("w", first, t.dtype, 600)  # nothing had changed
    with pytest.raises(ValueError, match="message 1 for key 'w': expected a whole tensor, or message 2"):
        incoming.decode("w", first, t.dtype, 600)
    found = incoming.decode("w", second, t.dtype, 600)
    outgoing.forget(0)
    whole = outgoing.encode(0, "w", t)
    after = outgoing.encode(0, "w", t)
    with pytest.raises(ValueError, match="message 65537 for key 'w': expected a whole tensor, or message 3"):
        incoming.decode("w", after, t.dtype, 600)
    assert not torch.equal(incoming.decode("w", whole, t.dtype, 600), found)
    incoming.decode("w", after, t.dtype, 600)


def test_p10_what_is_returned_is_the_callers() -> None:
    outgoing, incoming = sides(QSGD())
    t = torch.randn(600, generator=generator())
    for step in range(3):
        pass_on(outgoing, incoming, t + step).fill_(9)
        held = outgoing.held(0, "w")
        assert held is not None
        held.fill_(7)
    outgoing.forget(0)
    pass_on(outgoing, incoming, t)
    before = t.clone()
    t.fill_(5)  # what the receiver has stays what was sent
    held = outgoing.held(0, "w")
    assert held is not None
    assert torch.equal(held, before)
    assert float(pass_on(outgoing, incoming, torch.zeros(600)).abs().max()) < 5.0


def test_p10_another_numel_or_dtype_is_sent_whole() -> None:
    outgoing, incoming = sides(QSGD())
    for t in (torch.ones(600), torch.ones(700), torch.ones(700, dtype=torch.float64), torch.ones(700)):
        assert torch.equal(pass_on(outgoing, incoming, t), t)
